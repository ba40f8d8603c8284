"""One run in one folder at a time."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from snugtune.config import RunConfig
from snugtune.errors import RunFolderError
from snugtune.training.folder import HOLDER, LOCK, RunFolder, is_ours, open_folder

# Processes that load data hold the lock of a run that was killed until they notice: every five seconds.
_WAIT_SECONDS = 15.0
_log = logging.getLogger(__name__)


@contextmanager
def open_locked(
    config: RunConfig, data_digests: dict[str, str] | None = None, *, anyway: bool = False
) -> Iterator[RunFolder]:
    """Look into the output folder, and keep other runs out of it while the block runs.

    The lock is one of the operating system, which ends with its process, however that ends. Of the processes
    of one run, only process 0 takes it.

    Args:
        config: The run's configuration.
        data_digests, anyway: See `open_folder`.

    Raises:
        RunFolderError: Another run uses the folder, or it cannot be used at all.
    """
    with _locked(config.folder):
        yield open_folder(config, data_digests, anyway=anyway)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import filelock
    except ImportError:  # without the packages of training nothing is going to be written
        filelock = None  # type: ignore[assignment]
    if filelock is None or os.environ.get("RANK", "0") != "0" or not is_ours(path):
        yield
        return
    lock = filelock.FileLock(path / LOCK)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _acquire(lock, path, refused=filelock.Timeout)
    except (NotImplementedError, OSError) as error:
        # Where nothing can be written, what is there can be shown, and who wants to write gets to know soon.
        # A lock of another user in a folder of several is something else.
        if getattr(error, "errno", None) != errno.EROFS and (os.access(path, os.W_OK) or not path.exists()):
            _log.warning("%s cannot be locked (%s): make sure that no other run uses it", path, error)
    if not lock.is_locked:
        yield
        return
    holder = path / HOLDER
    try:
        with suppress(OSError):
            holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), "utf-8")
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        lock.release()


def _acquire(lock: Any, path: Path, *, refused: type[Exception]) -> None:
    until = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            lock.acquire(timeout=0)
            return
        except refused as error:
            holder = _read(path / HOLDER)
            if not _is_dead(holder) or time.monotonic() > until:
                who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
                raise RunFolderError(
                    f"another run uses {path} at this moment",
                    why=f"{who} holds its lock",
                    do=f"wait for its end, or give another folder, such as --output {path}-2",
                ) from error
            time.sleep(0.2)


def _read(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_text("utf-8"))
        return {"pid": int(holder["pid"]), "host": str(holder["host"])}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the process that took the lock is known to be gone."""
    if os.name == "nt" or holder.get("host") != socket.gethostname():
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
