"""How far a long reading is: a bar in a terminal, otherwise nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_REFRESH_SECONDS = 0.25


class _Rate(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f} rows/s")


@contextmanager
def open_bar(rows: int, console: Console, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A function that takes the number of rows done.

    Args:
        rows: All rows.
        console: Where the bar appears, and vanishes in the end; what is printed there stands above it.
        show: Whether there is a bar at all.
    """
    if not show:
        yield lambda done: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    # Rich's refreshing thread is not used, and neither are its traps for other output.
    bar = Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task("", total=rows)
    drawn_at = 0.0

    def show_rows(done: int) -> None:
        nonlocal drawn_at
        if time.monotonic() - drawn_at >= _REFRESH_SECONDS or done >= rows:
            bar.update(task, completed=done, refresh=True)
            drawn_at = time.monotonic()

    with bar:
        yield show_rows
