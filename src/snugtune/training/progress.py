"""What a person sees while a run trains: a bar in a terminal, a cell in a notebook, lines, or nothing."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from snugtune.training.console import SafeStream, console
from snugtune.units import show_duration, show_size

Mode = Literal["quiet", "normal", "verbose"]
Clock = Callable[[], float]

_LOSSES_IN_THE_MEAN = 20
_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the card at its highest since the last update: in tensors, taken by torch, by the process."""

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What there is to show after an update. The loss is this update's; people see a mean of the last 20."""

    update: int
    total_updates: int
    loss: float
    learning_rate: float
    samples_per_second: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    memory: Memory | None


@contextmanager
def open_progress(
    *,
    total_updates: int,
    done_updates: int,
    mode: Mode,
    stream: TextIO | None = None,
    clock: Clock = time.monotonic,
) -> Iterator[Progress]:
    """Show the progress of a run until the block ends.

    Args:
        total_updates: Updates of the whole run.
        done_updates: Those done already, before a resume.
        mode: "quiet" shows nothing, "verbose" a line for every update.
        stream: Where to print; None is `sys.stdout`, or the cell of a notebook.
        clock: Seconds that never go back.
    """
    face = _choose_face(mode, stream, clock)
    progress = Progress(face, total_updates=total_updates, done_updates=done_updates)
    try:
        yield progress
    finally:
        progress.close()


class Progress:
    """The progress of one run, as `open_progress` gives it."""

    def __init__(self, face: _Face, *, total_updates: int, done_updates: int) -> None:
        self._face = face
        self._losses: deque[float] = deque(maxlen=_LOSSES_IN_THE_MEAN)
        self._status = _Status(done=done_updates, total=total_updates)
        face.open(self._status)

    def update(self, shown: Shown) -> None:
        """Show that an update has been done."""
        self._losses.append(shown.loss)
        self._status = _Status(
            done=shown.update,
            total=shown.total_updates,
            seconds_left=shown.seconds_left,
            facts=_facts(shown, mean_loss=_mean_loss(self._losses)),
            loss=shown.loss,
        )
        self._face.show(self._status)

    def evaluation(self, *, done: int, total: int) -> None:
        """Show that `done` of the `total` passes of an evaluation have been done."""
        self._face.show_evaluation(self._status, f"evaluating {done}/{total}")

    def say(self, message: str) -> None:
        """Print a message above the bar."""
        self._face.say(message)

    def close(self) -> None:
        """Show the last state, and give the terminal back; a second call does nothing."""
        self._face.close()


@dataclass(frozen=True, kw_only=True)
class _Status:
    done: int
    total: int
    seconds_left: float | None = None
    facts: str = ""
    loss: float | None = None

    @property
    def counts(self) -> str:
        left = "" if self.seconds_left is None else f"  {show_duration(self.seconds_left)} left"
        return f"{self.done}/{self.total}{left}"


class _Face(Protocol):
    def open(self, status: _Status) -> None: ...
    def show(self, status: _Status) -> None: ...
    def show_evaluation(self, status: _Status, text: str) -> None: ...
    def say(self, message: str) -> None: ...
    def close(self) -> None: ...


class _Lines:
    """A line for the first update, the last, every tenth of the run and every ten seconds; or for each."""

    def __init__(self, out: Console, clock: Clock, *, every_update: bool) -> None:
        self._console, self._clock, self._every_update = out, clock, every_update
        self._printed_at: float | None = None
        self._tenth = 0

    def open(self, status: _Status) -> None:
        pass  # the first line is that of the first update

    def show(self, status: _Status) -> None:
        if self._every_update:
            self._print(f"{status.counts}  {status.facts}  this update's loss {_number(status.loss)}")
        elif self._due() or _tenth(status) > self._tenth or status.done >= status.total:
            self._print(f"{status.counts}  {status.facts}")
            self._tenth = _tenth(status)

    def show_evaluation(self, status: _Status, text: str) -> None:
        if self._due():
            self._print(f"{status.counts}  {text}")

    def say(self, message: str) -> None:
        self._console.print(message)

    def close(self) -> None:
        pass

    def _due(self) -> bool:
        return self._printed_at is None or self._clock() - self._printed_at >= _LINE_SECONDS

    def _print(self, text: str) -> None:
        self._console.print(text)
        self._printed_at = self._clock()


class _Picture:
    """One picture that is drawn again in place, at most four times a second."""

    def __init__(self, canvas: _Bar | _Cell, clock: Clock) -> None:
        self._canvas, self._clock = canvas, clock
        self._drawn_at = -math.inf
        self._status: _Status | None = None

    def open(self, status: _Status) -> None:
        self._draw(status, status.facts)

    def show(self, status: _Status) -> None:
        self._status = status
        if self._clock() - self._drawn_at >= _REFRESH_SECONDS:
            self._draw(status, status.facts)

    def show_evaluation(self, status: _Status, text: str) -> None:
        if self._clock() - self._drawn_at >= _REFRESH_SECONDS:
            self._draw(status, text)

    def say(self, message: str) -> None:
        self._canvas.say(message)

    def close(self) -> None:
        if self._status is not None:
            self._draw(self._status, self._status.facts)
            self._status = None
        self._canvas.close()

    def _draw(self, status: _Status, text: str) -> None:
        self._canvas.draw(status, text)
        self._drawn_at = self._clock()


class _Bar:
    """A bar in a terminal, and a line of facts below it."""

    def __init__(self, out: Console) -> None:
        # Rich's refreshing thread is not used: a data-loading process forked while that thread holds
        # the console's lock would hang at its first print.
        self._live = Live(
            console=out,
            auto_refresh=False,
            redirect_stdout=SafeStream(None).isatty(),
            redirect_stderr=SafeStream(sys.stderr).isatty(),
        )
        self._live.start()

    def draw(self, status: _Status, text: str) -> None:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(total=max(1, status.total), completed=status.done, width=40), status.counts)
        self._live.update(Group(grid, Text(text)), refresh=True)

    def say(self, message: str) -> None:
        self._live.console.print(message)

    def close(self) -> None:
        self._live.stop()


class _Cell:
    """The output of a notebook's cell: what was said, and the state below it."""

    def __init__(self) -> None:
        from IPython.display import display

        self._said: list[str] = []
        self._state = ""
        self._handle: Any = display({"text/plain": ""}, raw=True, display_id=True)

    def draw(self, status: _Status, text: str) -> None:
        done = round(40 * min(1.0, status.done / max(1, status.total)))
        self._state = f"[{'#' * done}{'-' * (40 - done)}] {status.counts}\n{text}"
        self._show()

    def say(self, message: str) -> None:
        self._said.append(message)
        self._show()

    def close(self) -> None:
        pass

    def _show(self) -> None:
        self._handle.update({"text/plain": "\n".join([*self._said, self._state])}, raw=True)


def _choose_face(mode: Mode, stream: TextIO | None, clock: Clock) -> _Face:
    out = console(stream)
    if mode == "quiet":
        out.quiet = True
        return _Lines(out, clock, every_update=False)
    if mode == "verbose":
        return _Lines(out, clock, every_update=True)
    if out.is_jupyter:
        return _Picture(_Cell(), clock)
    # FORCE_COLOR makes Rich take a file for a terminal, so the stream is asked as well. The bar keeps
    # the stream of this moment, because sys.stdout will lead to the bar.
    if out.is_interactive and SafeStream(stream).isatty():
        return _Picture(_Bar(console(sys.stdout if stream is None else stream)), clock)
    return _Lines(out, clock, every_update=False)


def _tenth(status: _Status) -> int:
    return status.done * 10 // max(1, status.total)


def _mean_loss(losses: deque[float]) -> float:
    """The mean of the finite losses; a last loss that is not finite is shown as it is."""
    if not math.isfinite(losses[-1]):
        return losses[-1]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _facts(shown: Shown, *, mean_loss: float) -> str:
    facts = [f"loss {_number(mean_loss)}", f"learning rate {shown.learning_rate:.3g}"]
    if shown.samples_per_second is not None:
        facts.append(f"{shown.samples_per_second:,.1f} samples/s")
    if shown.tokens_per_second is not None:
        facts.append(f"{shown.tokens_per_second:,.0f} tokens/s")
    if (memory := shown.memory) is not None:
        process = "" if memory.process_bytes is None else f", {show_size(memory.process_bytes)} process"
        allocated, reserved = show_size(memory.allocated_bytes), show_size(memory.reserved_bytes)
        facts.append(f"memory {allocated} allocated, {reserved} reserved{process}")
    return "  ".join(facts)
