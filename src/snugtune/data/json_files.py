"""JSON and JSON lines into tables: the fast reader where a file is clean, else line by line."""

from __future__ import annotations

import glob
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugtune.data.delimited import no_rows
from snugtune.data.encodings import Encoding, find_encoding, open_bytes
from snugtune.data.reading import How, Reading, Refusals, Refused, copied, in_batches, pick_lines
from snugtune.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_NAMES = {"NoneType": "null", "bool": "true or false", "list": "a list", "str": "a text", "dict": "an object"}
_DO = "write one JSON object per line, or one list of objects"
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_SCALARS = ("text", "whole", "real", "truth")
_MOST_CHANGED = 10_000
_LINES_BETWEEN_CALLS = 50_000


@dataclass(frozen=True)
class _Fault:
    """What is wrong with a line or an item."""

    why: str
    is_end: bool = False  # nothing after it can be understood


def read_json(path: Path, how: How) -> Reading:
    """Read a list of objects, or one object per line.

    Args:
        path: The file, or its gzipped form.
        how: What a person wants.

    Raises:
        DataError: Its encoding is uncertain, a line is broken, or there are no rows.
        UsageError: There is no such encoding.
    """
    encoding = find_encoding(path, wanted=how.encoding)
    table = None
    # The fast reader crashes the process on a null, and makes a column of anything else but objects.
    if encoding.is_plain and _starts_as(path, encoding, "{"):
        table = _read_fast(path)
    reading = (
        Reading(source=str(path), table=table, encoding=encoding.name)
        if table is not None
        else _read_slowly(path, encoding, how)
    )
    reading.lines = lambda wanted: pick_lines((line for line, _ in _objects(path, encoding)), wanted)
    return reading


def json_objects(path: Path, *, encoding: str | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSON file as they are written; `read_json` changes some cells.

    Args:
        path: A file that `read_json` has read, or its gzipped form.
        encoding: Its encoding; None finds out.

    Raises:
        DataError: A line is broken.
    """
    for line, value in _items(path, find_encoding(path, wanted=encoding)):
        if isinstance(value, _Fault):
            raise DataError(f"{path}, line {line}, cannot be read", why=value.why, do=_DO)
        yield value


def _read_fast(path: Path) -> Dataset | None:
    """The table of a clean file; None if the file is not clean, or if a column mixes types."""
    import pyarrow as pa
    from datasets import Dataset

    try:
        table = Dataset.from_json(glob.escape(str(path.absolute())))
    except OSError:
        raise
    except Exception:  # of many kinds; the slow reader finds out what it was
        return None
    kinds = table.features.arrow_schema.types
    if any(type(feature).__name__ == "Json" for feature in table.features.values()):
        return None
    return None if any(pa.types.is_temporal(kind) for kind in kinds) else table  # it makes times of texts


def _starts_as(path: Path, encoding: Encoding, sign: str) -> bool:
    """Whether the first line that is not blank begins with a sign."""
    with _open_text(path, encoding) as text:
        return next((line for line in text if line.strip()), "").lstrip().startswith(sign)


def _open_text(path: Path, encoding: Encoding) -> io.TextIOWrapper:
    name = "utf-8-sig" if encoding.name == "utf-8" else encoding.name
    errors = "surrogateescape" if encoding.damaged else "strict"
    # Only the signs that JSON knows end a line.
    return io.TextIOWrapper(open_bytes(path), encoding=name, errors=errors, newline=None)


def _items(path: Path, encoding: Encoding) -> Iterator[tuple[int, Any]]:
    """The line and the object of each row, or the fault there."""
    if _starts_as(path, encoding, "["):
        with _open_text(path, encoding) as text:
            content = text.read()
        if _is_one_value(content):
            yield from _listed(content)
            return
    with _open_text(path, encoding) as text:
        for number, line in enumerate(text, start=1):
            if line.strip():
                yield number, _parsed(line, encoding)


def _is_one_value(content: str) -> bool:
    """Whether a list goes over the whole file, and not each line is one."""
    first = content.lstrip().split("\n", 1)[0]
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return content.strip() == first.strip()


def _parsed(line: str, encoding: Encoding) -> Any:
    if encoding.damaged and (byte := re.search("[\udc80-\udcff]", line)):
        return _Fault(f"its byte 0x{ord(byte[0]) - 0xDC00:02x} is not UTF-8")
    try:
        value = json.loads(line.strip())
    except json.JSONDecodeError as error:
        return _Fault(f"{error.msg} at column {error.colno}")
    except RecursionError:
        return _Fault("it is nested too deeply")
    except ValueError as error:  # a number of thousands of digits
        return _Fault(str(error))
    return value if isinstance(value, dict) else _Fault(f"it is {_kind_word(value)}, not an object")


def _listed(content: str) -> Iterator[tuple[int, Any]]:
    """The items of a list, each with the line where it begins."""
    decoder, place = json.JSONDecoder(), content.index("[") + 1
    line, counted = 1, 0
    blank = re.compile(r"\s*")
    number = 0

    def line_at(where: int) -> int:
        nonlocal line, counted
        line, counted = line + content.count("\n", counted, where), where
        return line

    while True:
        place = blank.match(content, place).end()  # type: ignore[union-attr]
        if number == 0 and content[place : place + 1] == "]":
            return
        number += 1
        try:
            value, end = decoder.raw_decode(content, place)
        except json.JSONDecodeError as error:
            yield error.lineno, _Fault(f"{error.msg} at column {error.colno}", is_end=True)
            return
        except (RecursionError, ValueError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            yield line_at(place), _Fault(why, is_end=True)
            return
        wrong = f"item {number} of the list is {_kind_word(value)}, not an object"
        yield line_at(place), value if isinstance(value, dict) else _Fault(wrong)
        place = blank.match(content, end).end()  # type: ignore[union-attr]
        sign = content[place : place + 1]
        if sign == "]":
            rest = content[place + 1 :].strip()
            if rest:
                yield line_at(place), _Fault("there is something after the end of the list", is_end=True)
            return
        if sign != ",":
            column = place - content.rfind("\n", 0, place)
            yield line_at(place), _Fault(f"Expecting ',' delimiter at column {column}", is_end=True)
            return
        place += 1


def _objects(path: Path, encoding: Encoding) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((line, value) for line, value in _items(path, encoding) if not isinstance(value, _Fault))


def _kind_word(value: object) -> str:
    return _NAMES.get(type(value).__name__, "a number")


# Line by line


@dataclass
class _Column:
    """What the cells of a column are, counted by kind, and the kinds in its lists."""

    kinds: Counter[str] = field(default_factory=Counter)
    inner: set[str] = field(default_factory=set)

    @property
    def holds_scalars(self) -> bool:
        nested = self.kinds["list"] + self.kinds["object"]
        return sum(self.kinds[kind] for kind in _SCALARS) >= nested

    @property
    def name(self) -> str:
        """What all its cells become: one of the kinds, "lists of ..." or "json"."""
        if self.holds_scalars:
            return _common({kind for kind in _SCALARS if self.kinds[kind]})
        plain = not self.kinds["object"] and self.inner <= {*_SCALARS, "null"}
        return f"lists of {_common(self.inner - {'null'})}" if plain else "json"


def _common(kinds: set[str]) -> str:
    if len(kinds) == 1:
        return next(iter(kinds))
    return "real" if kinds == {"whole", "real"} else "text"


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int):
        return "whole" if abs(value) < 2**63 else "text"
    return {"NoneType": "null", "str": "text", "float": "real", "list": "list"}.get(
        type(value).__name__, "object"
    )


def _read_slowly(path: Path, encoding: Encoding, how: How) -> Reading:
    import pyarrow as pa

    refusals, columns = Refusals(path, _DO), dict[str, _Column]()
    size = path.stat().st_size
    for number, (line, item) in enumerate(_items(path, encoding)):
        if isinstance(item, _Fault):
            refusals.add(line, item.why)
            refusals.spoilt = "what follows cannot be told apart" if item.is_end else refusals.spoilt
            continue
        refusals.good += 1
        for name, value in item.items():
            column = columns.setdefault(name, _Column())
            kind = _kind(value)
            column.kinds[kind] += 1
            if kind == "list":
                column.inner.update(map(_kind, value))
        if number % _LINES_BETWEEN_CALLS == 0:
            how.on_bytes(0, size)
    refusals.check(how.bad_rows)
    if refusals.good == 0 or not columns:
        raise no_rows(path)
    kinds = {name: column.name for name, column in columns.items()}
    rows, schema = (_cells(item, kinds) for _, item in _objects(path, encoding)), _schema(pa, kinds)
    table = copied(path, (encoding.name, kinds), schema, in_batches(schema, rows))
    reading = Reading(
        source=str(path),
        table=table,
        encoding=encoding.name,
        refused=refusals.rows,
        refused_rows=refusals.count,
    )
    _tell_changes(reading, columns, path, encoding)
    return reading


def _schema(pa: Any, kinds: dict[str, str]) -> pa.Schema:
    types = {"whole": pa.int64(), "real": pa.float64(), "truth": pa.bool_()}
    return pa.schema(
        [
            (
                _whole_text(name),
                pa.list_(types.get(kind.removeprefix("lists of "), pa.string()))
                if kind.startswith("lists of ")
                else types.get(kind, pa.string()),
            )
            for name, kind in kinds.items()
        ]
    )


def _cells(item: dict[str, Any], kinds: dict[str, str]) -> list[Any]:
    return [_fit(item.get(name), kind) for name, kind in kinds.items()]


def _fit(value: Any, kind: str) -> Any:
    """A cell as its column holds it; None where it has no place there."""
    if value is None:
        return None
    if kind == "json":
        return _whole_text(json.dumps(value, ensure_ascii=False))
    if kind.startswith("lists of "):
        inner = kind.removeprefix("lists of ")
        return [_fit(part, inner) for part in value] if isinstance(value, list) else None
    if isinstance(value, list | dict):
        return None
    if kind == "text":
        return _whole_text(value) if isinstance(value, str) else json.dumps(value)
    return float(value) if kind == "real" else value


def _whole_text(text: str) -> str:
    """Without halves of surrogate pairs, which no encoding can write."""
    return _HALF_PAIR.sub("\ufffd", text)


def _tell_changes(reading: Reading, columns: dict[str, _Column], path: Path, encoding: Encoding) -> None:
    """Which cells are not as they were written."""
    wanted: dict[str, tuple[type, ...]] = {}
    for name, column in columns.items():
        scalars = {kind for kind in _SCALARS if column.kinds[kind]}
        if column.holds_scalars and len(scalars) > 1 and column.name == "text":
            others = sum(column.kinds[kind] for kind in (scalars - {"text"}))
            reading.repaired[f"numbers or truth values made texts in {name!r}"] += others
        nested = column.kinds["list"] + column.kinds["object"]
        if nested and column.holds_scalars:
            wanted[name] = (list, dict)
        elif not column.holds_scalars and any(column.kinds[kind] > 0 for kind in _SCALARS):
            wanted[name] = (str, int, float)
    if not wanted:
        return
    for line, item in _objects(path, encoding):
        for name, kinds in wanted.items():
            changed = reading.changed.setdefault(name, [])
            if isinstance(item.get(name), kinds) and len(changed) < _MOST_CHANGED:
                changed.append(Refused(line, f"{name!r} is {_kind_word(item[name])}, unlike in most rows"))
