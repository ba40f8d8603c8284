"""What a run says: on the screen and in its log file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

from snugtune.errors import RunFolderError
from snugtune.training.console import console
from snugtune.training.progress import Mode, Progress


class Journal:
    """Sentences of a run. Each goes to the log file, and to the screen unless the run is quiet."""

    def __init__(self, log: TextIO, mode: Mode) -> None:
        self._log, self._mode = log, mode
        self._print: Callable[[str], None] = console().print

    def say(self, text: str) -> None:
        """A sentence for screen and log."""
        self.log(text)
        if self._mode != "quiet":
            self._print(text)

    def log(self, text: str) -> None:
        """A sentence for the log alone."""
        with suppress(OSError):  # a full disk; the screen and the record say it too
            self._log.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}\n")

    @contextmanager
    def above(self, progress: Progress) -> Iterator[None]:
        """While the block runs, sentences appear above the progress bar."""
        before, self._print = self._print, progress.say
        try:
            yield
        finally:
            self._print = before


class _Handler(logging.Handler):
    """Log messages of snugtune's modules become sentences of the run."""

    def __init__(self, journal: Journal, mode: Mode) -> None:
        super().__init__()
        self._journal, self._shown = journal, logging.INFO if mode == "verbose" else logging.WARNING

    def emit(self, record: logging.LogRecord) -> None:
        speak = self._journal.say if record.levelno >= self._shown else self._journal.log
        speak(record.getMessage())


@contextmanager
def open_journal(path: Path, mode: Mode) -> Iterator[Journal]:
    """Open a run's log file for appending.

    Raises:
        RunFolderError: It cannot be written.
    """
    try:
        log = path.open("a", encoding="utf-8", buffering=1, errors="backslashreplace")
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}",
            why=str(error.strerror or error),
            do="give another folder with --output, or mend its permissions",
        ) from error
    logger = logging.getLogger("snugtune")
    journal = Journal(log, mode)
    handler, level = _Handler(journal, mode), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield journal
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        with suppress(OSError):
            log.close()
