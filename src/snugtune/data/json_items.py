"""The objects in a JSON file one after another, and what is wrong where there is none."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snugtune.data.encodings import Encoding, bytes_read, open_bytes

_NAMES = {"NoneType": "null", "bool": "true or false", "list": "a list", "str": "a text", "dict": "an object"}
_BLANK = " \t\r\n"  # what JSON takes for space
_BLOCK_CHARACTERS = 1 << 20
_LONGEST_ITEM_CHARACTERS = 1 << 28
_LINES_BETWEEN_CALLS = 50_000

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Fault:
    """What is wrong with a line or an item."""

    why: str
    is_end: bool = False  # nothing after it can be understood


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    item = dict(pairs)
    if len(item) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} is there twice")
    return item


def _constant(word: str) -> None:
    if word == "NaN":  # what Python and pandas write for nothing
        return
    raise ValueError(f"{word} is not a value that JSON has")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def open_text(path: Path, encoding: Encoding) -> io.TextIOWrapper:
    """A file as text."""
    name = "utf-8-sig" if encoding.name == "utf-8" else encoding.name
    errors = "surrogateescape" if encoding.damaged else "strict"
    # Only the signs that JSON knows end a line.
    return io.TextIOWrapper(open_bytes(path), encoding=name, errors=errors, newline=None)


def starts_as(path: Path, encoding: Encoding, sign: str) -> bool:
    """Whether the first line that is not blank begins with a sign."""
    with open_text(path, encoding) as text:
        while block := text.read(4096):
            if block := block.lstrip():
                return block.startswith(sign)
    return False


def items_of(
    path: Path, encoding: Encoding, on_bytes: Progress = lambda done: None
) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
    """The line and the object of each row, or the fault there; one of them is in memory at a time.

    Args:
        path: The file, or its gzipped form.
        encoding: Its encoding.
        on_bytes: Called now and then with the bytes of the file that were read.
    """
    if starts_as(path, encoding, "[") and not _is_a_list_per_line(path, encoding):
        with open_text(path, encoding) as text:
            yield from _List(text, on_bytes, damaged=encoding.damaged).items()
        return
    with open_text(path, encoding) as text:
        for number, line in enumerate(text, start=1):
            if line.strip():
                yield number, _parsed(line, encoding)
            if number % _LINES_BETWEEN_CALLS == 0:
                on_bytes(bytes_read(text.buffer))


def _is_a_list_per_line(path: Path, encoding: Encoding) -> bool:
    """Whether the first line is a whole list, and not all there is."""
    with open_text(path, encoding) as text:
        first = text.readline(_BLOCK_CHARACTERS)
        while first and not first.strip():
            first = text.readline(_BLOCK_CHARACTERS)
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return False
        return any(line.strip() for line in text)


def _parsed(line: str, encoding: Encoding) -> Any:
    if encoding.damaged and (byte := _damage(line)):
        return byte
    try:
        value = _DECODER.decode(line.strip())
    except json.JSONDecodeError as error:
        return Fault(f"{error.msg} at column {error.colno}")
    except RecursionError:
        return Fault("it is nested too deeply")
    except ValueError as error:  # a name that is there twice, or a number of thousands of digits
        return Fault(str(error))
    return value if isinstance(value, dict) else Fault(f"it is {kind_word(value)}, not an object")


def _damage(text: str) -> Fault | None:
    byte = re.search("[\udc80-\udcff]", text)
    return Fault(f"its byte 0x{ord(byte[0]) - 0xDC00:02x} is not UTF-8") if byte else None


def kind_word(value: object) -> str:
    """What a value is, in words."""
    return _NAMES.get(type(value).__name__, "a number")


class _List:
    """A list that is read from a text as far as it is needed.

    Args:
        text: What begins with the list.
        on_bytes: Called now and then with the bytes of the file that were read.
        damaged: Whether single bytes do not fit the encoding.
    """

    def __init__(self, text: io.TextIOWrapper, on_bytes: Progress, *, damaged: bool) -> None:
        self._text, self._on_bytes, self._damaged = text, on_bytes, damaged
        self._held, self._place, self._done = "", 0, False
        self._line = self._column = 1  # of the sign up to which they were counted
        self._counted = 0

    def _more(self) -> bool:
        """Read on, and forget what was understood; False at the end."""
        self._here()
        self._held, self._place, self._counted = self._held[self._place :], 0, 0
        # Twice as much each time, so that one long item is not tried over and over.
        block = self._text.read(max(_BLOCK_CHARACTERS, len(self._held)))
        self._held += block
        self._done = not block or len(self._held) > _LONGEST_ITEM_CHARACTERS
        self._on_bytes(bytes_read(self._text.buffer))
        return not self._done

    def _here(self) -> tuple[int, int]:
        """Line and column of the place; each sign is counted once."""
        lines = self._held.count("\n", self._counted, self._place)
        last = self._held.rfind("\n", self._counted, self._place)
        self._column = self._place - last if lines else self._column + self._place - self._counted
        self._line, self._counted = self._line + lines, self._place
        return self._line, self._column

    def _sign(self) -> str:
        """The next sign that is not space; nothing at the end."""
        while True:
            while self._place < len(self._held) and self._held[self._place] in _BLANK:
                self._place += 1
            if self._place < len(self._held):
                return self._held[self._place]
            if not self._more():
                return ""

    def items(self) -> Iterator[tuple[int, dict[str, Any] | Fault]]:
        """The items, each with the line where it begins."""
        self._sign()
        self._place += 1  # the bracket
        number = 0
        while not (self._sign() == "]" and number == 0):
            number += 1
            line, _ = self._here()
            value = self._value()
            if isinstance(value, Fault):
                yield (self._here()[0] if value.is_end else line), value
                if value.is_end:
                    return
            else:
                wrong = f"item {number} of the list is {kind_word(value)}, not an object"
                yield line, value if isinstance(value, dict) else Fault(wrong)
            sign = self._sign()
            if sign == "]":
                break
            if sign != ",":
                place, column = self._here()
                yield place, Fault(f"Expecting ',' delimiter at column {column}", is_end=True)
                return
            self._place += 1
            self._sign()
        self._place += 1
        if self._sign():
            yield self._here()[0], Fault("there is something after the end of the list", is_end=True)

    def _value(self) -> Any:
        """The next item, or what is wrong with it."""
        while True:
            start = self._place
            try:
                value, end = _DECODER.raw_decode(self._held, start)
            except json.JSONDecodeError as error:
                if self._more():
                    continue
                self._place += error.pos - start
                return Fault(f"{error.msg} at column {self._here()[1]}", is_end=True)
            except RecursionError:
                return Fault("it is nested too deeply", is_end=True)
            except ValueError as error:
                return Fault(str(error), is_end=True)
            # A number at the end of what is held may go on.
            if end == len(self._held) and not self._done and not isinstance(value, dict) and self._more():
                continue
            self._place = end
            return (_damage(self._held[start:end]) if self._damaged else None) or value
