"""Printing that no terminal, pipe or encoding can break."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO, TextIO, cast

from rich.console import Console


def console(stream: TextIO | None = None) -> Console:
    """Make the console that everything prints to; printing to it never raises.

    Characters that the stream's encoding lacks appear escaped, square brackets are plain text, and when
    the stream is closed, or nobody reads it any longer, the text is dropped.

    Args:
        stream: Where to print; None is whatever `sys.stdout` is at the moment of printing.
    """
    safe = SafeStream(stream)
    return Console(
        file=cast("IO[str]", safe),
        force_jupyter=None if stream is None else False,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=not safe.isatty(),  # lines of a log file are not cut to the width of a terminal
    )


class SafeStream:
    """A text stream that accepts every character, and drops the text when the stream is gone.

    Args:
        stream: Where the text goes; None is whatever `sys.stdout` is at the moment of writing.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._gone: TextIO | None = None

    @property
    def _target(self) -> TextIO | None:
        return sys.stdout if self._stream is None else self._stream

    @property
    def encoding(self) -> str:
        """The encoding of the stream that is written to."""
        # While a bar is shown, Rich puts a stream without encoding in the place of sys.stdout.
        target = getattr(self._target, "rich_proxied_file", self._target)
        return getattr(target, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write text, with backslash escapes for characters that the encoding lacks."""
        known = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        self._try(lambda target: target.write(known))
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered."""
        self._try(lambda target: target.flush())

    def isatty(self) -> bool:
        """Whether the stream is a terminal; False when it is gone, or does not know."""
        try:
            return self._target is not None and self._target.isatty()
        except (AttributeError, ValueError):  # a host program's own stream; a closed one
            return False

    def fileno(self) -> int:
        """The descriptor of the stream, as the consoles of old Windows need it."""
        if self._target is None:
            raise OSError("there is no standard output")
        return self._target.fileno()

    def _try(self, action: Callable[[TextIO], object]) -> None:
        """A display must not end a run: after the first failure of a stream, leave it alone."""
        target = self._target
        if target is None or target is self._gone:
            return
        try:
            action(target)
        except (OSError, ValueError):
            self._gone = target
