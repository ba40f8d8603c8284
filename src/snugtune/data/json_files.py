"""JSON and JSON lines into tables: the fast reader where a file is clean, else line by line."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugtune.data.delimited import no_rows
from snugtune.data.encodings import Encoding, find_encoding
from snugtune.data.json_items import Fault, items_of, kind_word, starts_as
from snugtune.data.plain_cells import Doubtful
from snugtune.data.plain_json import plain_tables
from snugtune.data.reading import How, Reading, Refusals, Refused, copied, in_batches, pick_lines
from snugtune.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_DO = "write one JSON object per line, or one list of objects"
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_SCALARS = ("text", "whole", "real", "truth")
_MOST_CHANGED = 10_000


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
    if encoding.is_plain and starts_as(path, encoding, "{"):
        table = _read_fast(path, how)
    reading = (
        Reading(source=str(path), table=table, encoding=encoding.name)
        if table is not None
        else _read_slowly(path, encoding, how)
    )
    reading.lines = lambda wanted: pick_lines((line for line, _ in _objects(path, encoding)), wanted)
    return reading


def json_objects(path: Path, how: How) -> Iterator[dict[str, Any]]:
    """The objects of a JSON file as they are written; `read_json` changes some cells.

    Args:
        path: A file that `read_json` has read, or its gzipped form.
        how: What a person wanted there.

    Raises:
        DataError: A line is broken, and stopping is wanted.
    """
    for line, value in items_of(path, find_encoding(path, wanted=how.encoding)):
        if not isinstance(value, Fault):
            yield value
        elif how.bad_rows == "stop":
            raise DataError(f"{path}, line {line}, cannot be read", why=value.why, do=_DO)


def _read_fast(path: Path, how: How) -> Dataset | None:
    """The table of a clean file; None if its lines have to be looked at one by one."""
    size = path.stat().st_size
    tables = plain_tables(path, lambda done: how.on_bytes(done, size))
    try:
        first = next(tables)
        batches = (batch for table in chain([first], tables) for batch in table.to_batches())
        return copied(path, ("plain",), first.schema, batches)
    except Doubtful:
        return None


def _objects(path: Path, encoding: Encoding) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((line, item) for line, item in items_of(path, encoding) if not isinstance(item, Fault))


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
    for line, item in items_of(path, encoding, lambda done: how.on_bytes(done, size)):
        if isinstance(item, Fault):
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
                changed.append(Refused(line, f"{name!r} is {kind_word(item[name])}, unlike in most rows"))
