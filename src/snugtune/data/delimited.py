"""Files of cells (CSV, TSV) into tables, refusing what the fast reader would change without a word."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from snugtune.data.columns import USUAL_NAMES, distinct_names, listed
from snugtune.data.encodings import Encoding, bytes_read, find_encoding, open_bytes
from snugtune.data.plain_cells import Doubtful, plain_batches
from snugtune.data.reading import (
    DELIMITERS,
    How,
    Reading,
    Refusals,
    copied,
    in_batches,
    pick_lines,
    usual_delimiter,
)
from snugtune.errors import DataError
from snugtune.units import show_count

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_LARGEST_CELL = min(sys.maxsize, 2**31 - 1)  # what a C long holds everywhere
_SAMPLE_CHARACTERS, _SAMPLE_ROWS = 1 << 16, 100
_NUMBER = re.compile(r"\s*[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?\s*", re.ASCII)
_ROWS_BETWEEN_CALLS = 50_000
_DO = 'put cells with delimiters or quotes in "quotes", and write a quote inside them twice ("")'


def no_rows(source: str | Path) -> DataError:
    """The error for a table without rows."""
    return DataError(
        f"{source} has no rows", why="there is nothing to learn from", do="check that it is complete"
    )


@dataclass(frozen=True)
class _Form:
    """How a file is written."""

    path: Path
    encoding: Encoding
    delimiter: str
    starts_at_once: bool  # without a blank line
    header: bool
    names: list[str]

    @property
    def what(self) -> tuple[object, ...]:
        """All that decides what comes of the file."""
        return self.encoding.name, self.encoding.damaged, self.delimiter, self.header, self.names

    def schema(self) -> pa.Schema:
        """All cells are texts."""
        import pyarrow as pa

        return pa.schema([(name, pa.string()) for name in self.names])


def read_delimited(path: Path, how: How) -> Reading:
    """Read a file of cells, all of them text.

    Args:
        path: The file, or its gzipped form.
        how: What a person wants.

    Raises:
        DataError: Its encoding is uncertain, its first line may be a row, rows do not fit, or there are none.
        UsageError: There is no such encoding.
    """
    encoding = find_encoding(path, wanted=how.encoding)
    form = _find_form(path, encoding, how)
    refusals = Refusals(path, _DO)
    table = _read_fast(form, how)
    if table is None:
        table = _read_slowly(form, refusals, how)
    if len(table) == 0:
        raise no_rows(path)
    reading = Reading(
        source=str(path),
        table=table,
        encoding=encoding.name,
        delimiter=form.delimiter,
        refused=refusals.rows,
        refused_rows=refusals.count,
    )
    reading.lines = lambda wanted: pick_lines(
        (line for line, _ in _good_rows(form, Refusals(path, _DO))), wanted
    )
    return reading


def _read_fast(form: _Form, how: How) -> Dataset | None:
    """The table of a file without anything odd; None if the rows have to be looked at one by one."""
    if not form.encoding.is_plain or len(form.names) < 2 or not form.starts_at_once:
        return None
    size = form.path.stat().st_size
    batches = plain_batches(
        form.path,
        delimiter=form.delimiter,
        names=form.names,
        header=form.header,
        on_bytes=lambda done: how.on_bytes(done, size),
    )
    try:
        return copied(form.path, ("plain", *form.what), form.schema(), batches)
    except Doubtful:
        return None


def _read_slowly(form: _Form, refusals: Refusals, how: How) -> Dataset:
    """The table of the rows that fit; the fast readers would fill short lines and drop surplus cells."""
    rows = (cells for _, cells in _good_rows(form, refusals, how))

    def batches() -> Iterator[pa.RecordBatch]:
        yield from in_batches(form.schema(), rows)
        refusals.check(how.bad_rows)

    return copied(form.path, form.what, form.schema(), batches(), again=True)


@contextmanager
def _open_cells(path: Path, encoding: Encoding) -> Iterator[TextIO]:
    """A file as text with its line ends, and no limit on the length of a cell."""
    before = csv.field_size_limit(_LARGEST_CELL)
    errors = "surrogateescape" if encoding.damaged else "strict"
    try:
        with (
            open_bytes(path) as binary,
            io.TextIOWrapper(binary, encoding=_name(encoding), errors=errors, newline="") as text,
        ):
            yield text
    finally:
        csv.field_size_limit(before)


def _name(encoding: Encoding) -> str:
    return "utf-8-sig" if encoding.name == "utf-8" else encoding.name


def _is_blank(cells: list[str]) -> bool:
    return not cells or (len(cells) == 1 and not cells[0].strip())


def _rows(text: TextIO, delimiter: str) -> Iterator[tuple[int, list[str] | csv.Error]]:
    """The line and the cells of each row, or what is wrong with its quotes; blank lines are left out."""
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    line = 1
    while True:
        try:
            for cells in reader:
                if not _is_blank(cells):
                    yield line, cells
                line = reader.line_num + 1
            return
        except csv.Error as error:
            yield line, error
            line = reader.line_num + 1


def _damage(cells: list[str]) -> int | None:
    """A byte that does not fit the encoding, if one of the cells has it."""
    for cell in cells:
        if not cell.isascii():
            found = next((ord(sign) for sign in cell if "\udc80" <= sign <= "\udcff"), None)
            if found is not None:
                return found - 0xDC00
    return None


def _good_rows(form: _Form, refusals: Refusals, how: How | None = None) -> Iterator[tuple[int, list[str]]]:
    """Line and cells of the rows that fit; the others are refused."""
    width, size = len(form.names), form.path.stat().st_size
    with _open_cells(form.path, form.encoding) as text:
        rows = _rows(text, form.delimiter)
        for number, (line, cells) in enumerate(islice(rows, int(form.header), None)):
            if isinstance(cells, csv.Error):
                refusals.add(line, f"the quotes of the row that starts there do not fit: {cells}")
                if "unexpected end" in str(cells):
                    refusals.spoilt = "a quote that is never closed swallows all that follows"
            elif len(cells) != width:
                refusals.add(line, f"it has {show_count(len(cells), 'cell')}, the header has {width}")
            elif form.encoding.damaged and (byte := _damage(cells)) is not None:
                refusals.add(line, f"its byte 0x{byte:02x} is not UTF-8")
            else:
                refusals.good += 1
                yield line, cells
            if how is not None and number % _ROWS_BETWEEN_CALLS == 0:
                how.on_bytes(bytes_read(text.buffer), size)


# How a file is written


def _find_form(path: Path, encoding: Encoding, how: How) -> _Form:
    with _open_cells(path, encoding) as text:
        sample = text.read(_SAMPLE_CHARACTERS)
    usual = usual_delimiter(path)
    delimiter = _find_delimiter(sample, usual, how)
    form = partial(_Form, path, encoding, delimiter, bool(sample.split("\n", 1)[0].strip()))
    first = next(iter(_sample_rows(sample, delimiter)), None)
    if first is None:  # blank, or one row longer than the sample
        with _open_cells(path, encoding) as text:
            _, cells = next(_rows(text, delimiter), (0, None))
        if cells is None:
            raise no_rows(path)
        first = cells if isinstance(cells, list) else _broken_header(path, cells)
    if how.header is False:
        return form(False, [f"column {number}" for number in range(1, len(first) + 1)])
    if how.header is None and _seems_a_row(_sample_rows(sample, delimiter), how):
        raise DataError(
            f"{path}: the first line seems to be a row, not the names of columns: {listed(first, 4)[:80]}",
            why="none of its cells is a usual name, and one is a number, or is repeated below it",
            do="write names into a first line; or set data.header to false (--no-header), which calls the "
            "columns column 1, column 2, ...; or to true (--header) if these are names",
        )
    return form(True, distinct_names(_named(first)))


def _broken_header(path: Path, error: csv.Error) -> list[str]:
    why = f"the quotes of the row that starts there do not fit: {error}"
    raise DataError(f"{path}, line 1, cannot be read", why=why, do=_DO)


def _named(cells: list[str]) -> list[str]:
    return [cell.strip() or f"Unnamed: {number}" for number, cell in enumerate(cells)]


def _sample_rows(sample: str, delimiter: str) -> list[list[str]]:
    """The first rows, without the one that the end of the sample may have cut."""
    found = []
    for _, cells in islice(_rows(io.StringIO(sample, newline=""), delimiter), _SAMPLE_ROWS):
        if isinstance(cells, csv.Error):
            break
        found.append(cells)
    cut = len(sample) == _SAMPLE_CHARACTERS and len(found) < _SAMPLE_ROWS
    return found[:-1] if cut and len(found) > 1 else found


def _find_delimiter(sample: str, usual: str, how: How) -> str:
    """The sign that divides the rows most evenly; the one that the file's name promises wins a tie."""

    def merit(delimiter: str) -> tuple[bool, float, bool]:
        rows = _sample_rows(sample, delimiter)
        width = len(rows[0]) if rows else 0
        if width < 2:
            return False, 0.0, delimiter == usual
        known = bool(_known_names(rows[0], how))
        return known, sum(len(row) == width for row in rows) / len(rows), delimiter == usual

    best: str = max(DELIMITERS, key=merit)
    return best


def _known_names(cells: list[str], how: How) -> set[str]:
    names = {cell.strip() for cell in cells}
    return (names & set(how.names)) | ({name.lower() for name in names} & USUAL_NAMES)


def _seems_a_row(rows: list[list[str]], how: How) -> bool:
    """Whether the first row looks like those below it: it has numbers, or cells that come again."""
    if not rows or _known_names(rows[0], how):
        return False
    first, others = [cell.strip() for cell in rows[0]], rows[1:]
    if first == [str(number) for number in range(len(first))]:  # what pandas calls columns without names
        return False
    if any(_NUMBER.fullmatch(cell) for cell in first):
        return True
    return any(
        cell and any(len(row) > place and row[place].strip() == cell for row in others)
        for place, cell in enumerate(first)
    )
