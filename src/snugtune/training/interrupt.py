"""Ctrl-C, SIGTERM and SIGUSR1: finish the update, save, stop. A second Ctrl-C stops at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

_AT_ONCE = "stopped at once; the same command (in Python: call) continues from the last checkpoint"
# Launchers hand a Ctrl-C on to processes that have already got it from the terminal.
_GRACE_SECONDS = 2.0


class Interrupts:
    """While the block runs, the first signal only sets `requested`.

    In a thread other than the main one, where Python allows no signal handlers, nothing is changed.

    Args:
        quiet: Say nothing about it.
        launched: A launcher hands signals on, so that one Ctrl-C may arrive twice.
    """

    def __init__(self, *, quiet: bool = False, launched: bool = False) -> None:
        self.requested = False
        self._quiet, self._grace_seconds = quiet, _GRACE_SECONDS if launched else 0.0
        self._at = 0.0
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            # Slurm announces the end of a job by SIGUSR1, where it is asked to; Windows has no such signal.
            user = [signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []
            for number in (signal.SIGINT, signal.SIGTERM, *user):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._in_a_child(number)
        elif not self.requested:
            self.requested, self._at = True, time.monotonic()
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self._say(f"{name}: finishing this update and saving; Ctrl-C once more stops at once")
        elif number == signal.SIGINT and time.monotonic() - self._at >= self._grace_seconds:
            self._say(_AT_ONCE)
            raise KeyboardInterrupt

    def _in_a_child(self, number: int) -> None:
        """Processes that load data have these handlers too: they leave when the run does, or when told."""
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _say(self, text: str) -> None:
        # Straight to the descriptor: the signal may have come in the middle of a print.
        if not self._quiet:
            with suppress(OSError, ValueError, AttributeError):
                os.write(sys.stderr.fileno(), f"\n{text}\n".encode())
