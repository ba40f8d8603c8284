"""What came of reading a file: its table, and whatever in it was not as it should be."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snugtune.data.encodings import show_encoding
from snugtune.errors import DataError
from snugtune.units import show_count

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

BadRows = Literal["stop", "skip"]
SHOWN = 10  # refused lines that are told one by one
_KEPT = 10_000  # refused lines that are remembered
_ROWS_AT_A_TIME = 10_000
_COPIES = 2  # counted up when copies are written in another way


@dataclass(frozen=True, kw_only=True)
class How:
    """What a person wants of the reader.

    Args:
        bad_rows: What happens to rows that cannot be used.
        encoding: The encoding of text; None finds out.
        header: Whether the first line of cells names the columns; None finds out.
        names: Columns that were asked for: a first line that has one of them is a header.
        on_bytes: Called now and then with the bytes read and their number in all.
    """

    bad_rows: BadRows = "stop"
    encoding: str | None = None
    header: bool | None = None
    names: tuple[str, ...] = ()
    on_bytes: Callable[[int, int], object] = lambda done, size: None


@dataclass(frozen=True)
class Refused:
    """A row that cannot be used: the line where it begins (None where there are no lines), and why."""

    line: int | None
    why: str

    def __str__(self) -> str:
        return self.why if self.line is None else f"line {self.line}: {self.why}"


@dataclass(kw_only=True)
class Reading:
    """A table and how it was read.

    Args:
        source: File, folder or hub id.
        table: The rows that could be read.
        encoding: Of text files.
        delimiter: Of files of cells.
        refused: Rows that could not be read; the first of very many.
        refused_rows: How many these are.
        repaired: What was changed, and in how many places.
        changed: By column, the rows whose cell there was left empty.
        lines: The lines of a file on which rows begin, for ascending numbers from 0; None for other sources.
    """

    source: str
    table: Dataset
    encoding: str | None = None
    delimiter: str | None = None
    refused: list[Refused] = field(default_factory=list)
    refused_rows: int = 0
    repaired: Counter[str] = field(default_factory=Counter)
    changed: dict[str, list[Refused]] = field(default_factory=dict)
    lines: Callable[[Sequence[int]], list[int]] | None = None

    @property
    def kind(self) -> str | None:
        """How the text of the file was understood, where that is not the usual way."""
        words = []
        if self.encoding is not None and self.encoding != "utf-8":
            words.append(f"encoding {show_encoding(self.encoding)}")
        if self.delimiter is not None and self.delimiter != usual_delimiter(self.source):
            words.append(f"cells separated by {DELIMITERS[self.delimiter]}")
        return ", ".join(words) or None


DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


def usual_delimiter(source: str | Path) -> str:
    """What the name of a file promises to stand between its cells."""
    name = str(source).lower().removesuffix(".gz")
    return "\t" if name.endswith((".tsv", ".tab")) else ","


class Refusals:
    """Rows that cannot be read. `good` counts the others; `spoilt` says why the rest is worth nothing.

    Args:
        path: The file.
        do: What to do about such a row.
    """

    def __init__(self, path: Path, do: str) -> None:
        self._path, self._do = path, do
        self.rows: list[Refused] = []
        self.count = self.good = 0
        self.spoilt: str | None = None

    def add(self, line: int, why: str) -> None:
        """A row that begins on this line cannot be read."""
        self.count += 1
        if len(self.rows) < _KEPT:
            self.rows.append(Refused(line, why))

    def check(self, bad_rows: BadRows) -> None:
        """Stop unless these rows may be left out.

        Args:
            bad_rows: What a person wants.

        Raises:
            DataError: Stopping is wanted, or so much is broken that the whole is doubtful.
        """
        if not self.count or (bad_rows == "skip" and self.spoilt is None and self.count <= self.good):
            return
        first, *others = self.rows[:SHOWN]
        more = "".join(f"; {row}" for row in others)
        more += f"; and {self.count - SHOWN} more" if self.count > SHOWN else ""
        do = self._do
        if self.spoilt is not None:
            do = f"{do}; it cannot be left out, because {self.spoilt}"
        elif bad_rows == "skip":
            why = f"{show_count(self.count, 'row')} cannot be read and {show_count(self.good, 'row')} can"
            do = f"{do}; they are not left out, because {why}: the whole file is doubtful"
        else:
            do = f"{do}, or leave such rows out with data.bad_rows=skip"
        raise DataError(f"{self._path}, line {first.line}, cannot be read", why=f"{first.why}{more}", do=do)


def pick_lines(lines: Iterator[int], rows: Sequence[int]) -> list[int]:
    """The lines of some rows.

    Args:
        lines: The line of every row.
        rows: Numbers of rows from 0, ascending.
    """
    found, done = [], 0
    for row in rows:
        line = next(islice(lines, row - done, None), None)
        if line is None:
            break
        found.append(line)
        done = row + 1
    return found


def copied(
    path: Path,
    what: tuple[object, ...],
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    again: bool = False,
) -> Dataset:
    """Rows as a table on disk, kept in the cache of `datasets` for the next time.

    Args:
        path: The file they come from.
        what: All else that they depend on.
        schema: Their columns.
        batches: The rows; not asked for where they are kept already.
        again: Whether they are written anew in any case.
    """
    import pyarrow as pa
    from datasets import Dataset, config

    state = path.stat()
    key = json.dumps([str(path.absolute()), state.st_size, state.st_mtime_ns, _COPIES, what], default=str)
    folder = Path(config.HF_DATASETS_CACHE) / "snugtune"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.arrow"
    if again or not kept.is_file():
        aside = kept.with_suffix(f".{os.getpid()}.part")
        try:
            with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            aside.replace(kept)
        finally:
            aside.unlink(missing_ok=True)
    return Dataset.from_file(str(kept))


def in_batches(schema: pa.Schema, rows: Iterator[list[Any]]) -> Iterator[pa.RecordBatch]:
    """Rows of cells as batches of a bounded number of rows."""
    import pyarrow as pa

    while part := list(islice(rows, _ROWS_AT_A_TIME)):
        columns = zip(*part, strict=True)
        arrays = [pa.array(cells, kind) for cells, kind in zip(columns, schema.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
