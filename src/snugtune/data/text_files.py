"""CSV, TSV, JSON and JSON lines into tables, refusing what the fast readers would change without a word."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from snugtune.errors import DataError
from snugtune.units import show_count

if TYPE_CHECKING:
    from datasets import Dataset

_DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
_NAMES = {"NoneType": "null", "bool": "true or false", "list": "a list", "str": "a text"}
_LARGEST_CELL = 2**31 - 1  # what a C long holds everywhere


def no_rows(source: str | Path) -> DataError:
    """The error for a table without rows."""
    return DataError(
        f"{source} has no rows", why="there is nothing to learn from", do="check that it is complete"
    )


def read_delimited(path: Path, delimiter: str) -> Dataset:
    """Read a file of cells, all of them text.

    Args:
        path: The file, or its gzipped form.
        delimiter: What separates its cells.

    Raises:
        DataError: It is not UTF-8, a line does not fit the header, quotes do not fit, or there are no rows.
    """
    from datasets import Dataset, Features, Value

    _check_utf8(path)
    names, rows = _check_delimited(path, delimiter)
    if rows == 0:
        raise no_rows(path)
    table = Dataset.from_csv(
        glob.escape(str(path.absolute())),
        features=Features({name: Value("string") for name in names}),
        column_names=names,
        header=0,
        sep=delimiter,
        index_col=False,
        na_filter=False,
        encoding="utf-8-sig",
    )
    if len(table) != rows:
        raise DataError(
            f"{path} can be understood in two ways",
            why=f"it was read as {len(table)} rows, but counting gave {rows}",
            do="save it again as CSV from a spreadsheet or from pandas, which quotes cells as needed",
        )
    return table


def _check_delimited(path: Path, delimiter: str) -> tuple[list[str], int]:
    """Column names and number of rows of a CSV file.

    The fast reader fills short lines, drops surplus cells and renames columns without a word; this pass
    over the file, which holds one row at a time, refuses what would change there.
    """
    names: list[str] = []
    rows, line = 0, 1
    before = csv.field_size_limit(_LARGEST_CELL)
    try:
        with _open(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            for cells in reader:
                if not cells or (len(cells) == 1 and not cells[0].strip()):
                    pass  # a blank line
                elif not names:
                    names = _column_names(path, cells, delimiter)
                elif len(cells) != len(names):
                    why = f"it has {show_count(len(cells), 'cell')}, the header has {len(names)}"
                    raise _broken_line(path, line, why, 'put cells with delimiters or quotes in "quotes"')
                else:
                    rows += 1
                line = reader.line_num + 1
    except csv.Error as error:
        do = 'close every opened quote, and write a quote inside a quoted cell twice ("")'
        raise _broken_line(
            path, line, f"the quotes of the row that starts there do not fit: {error}", do
        ) from error
    finally:
        csv.field_size_limit(before)
    return names, rows


def _column_names(path: Path, cells: list[str], delimiter: str) -> list[str]:
    if any("\0" in cell for cell in cells):
        raise DataError(
            f"{path} has zero bytes in its header",
            why="it is probably saved as UTF-16",
            do="save it as UTF-8 (spreadsheets: CSV UTF-8)",
        )
    for word, other in _DELIMITERS.items():
        if len(cells) == 1 and other in cells[0]:
            raise DataError(
                f"{path} has a single column, named {cells[0]!r}",
                why=f"its cells seem to be separated by a {word}; .csv means commas and .tsv means tabs",
                do="rename it to .tsv"
                if other == "\t"
                else "save it with commas as .csv, or with tabs as .tsv",
            )
    names = [cell.strip() or f"Unnamed: {number}" for number, cell in enumerate(cells)]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(
            f"{path} has several columns named {', '.join(map(repr, repeated))}",
            why="a column is chosen by its name",
            do="rename them in the first line",
        )
    return names


def read_json(path: Path) -> Dataset:
    """Read a list of objects, or one object per line.

    Args:
        path: The file, or its gzipped form.

    Raises:
        DataError: It is not UTF-8, a line is broken, or there are no rows.
    """
    from datasets import Dataset

    _check_utf8(path)
    if not _starts_as_object(path):
        # The fast reader crashes the process on a null, and makes a column of anything else.
        _refuse_broken(path)
    try:
        return Dataset.from_json(glob.escape(str(path.absolute())))
    except Exception as error:
        if "corresponds to no data" in str(error):
            raise no_rows(path) from error
        _refuse_broken(path, error)
        raise


def json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON file as they are written; `read_json` makes times of texts that look like them.

    Args:
        path: A file that `read_json` has read, or its gzipped form.

    Raises:
        DataError: An object goes over several lines.
    """
    whole = not _starts_as_object(path)
    with _open(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig") as text:
        if whole:
            yield from json.load(text)
            return
        for number, line in enumerate(text, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                do = "write one JSON object per line, or one list of objects"
                raise _broken_line(path, number, f"{error.msg} at column {error.colno}", do) from error


def _starts_as_object(path: Path) -> bool:
    with _open(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig") as text:
        return next((line for line in text if line.strip()), "{").lstrip().startswith("{")


def _refuse_broken(path: Path, error: Exception | None = None) -> None:
    for line, trouble in _json_trouble(path):
        do = "write one JSON object per line, or one list of objects"
        raise _broken_line(path, line, trouble, do) from error


def _json_trouble(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not JSON objects; slow, for files that the fast reader refused."""
    with _open(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig") as text:
        first = next((line for line in text if line.strip()), "")
        text.seek(0)
        whole = first.lstrip().startswith("[")
        for number, line in [(1, text.read())] if whole else enumerate(text, start=1):
            try:
                value = json.loads(line.rstrip()) if line.strip() else {}
            except json.JSONDecodeError as error:
                yield number + error.lineno - 1, f"{error.msg} at column {error.colno}"
                continue
            for place, item in (
                enumerate(value, start=1) if isinstance(value, list) and whole else [(0, value)]
            ):
                if not isinstance(item, dict):
                    what = f"item {place} of the list" if place else "it"
                    yield number, f"{what} is {_NAMES.get(type(item).__name__, 'a number')}, not an object"


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _check_utf8(path: Path) -> None:
    offset = 0
    with _open(path) as binary:
        for number, line in enumerate(binary, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                byte = offset + error.start
                raise DataError(
                    f"{path} is not UTF-8: line {number}, byte offset {byte} (0x{line[error.start]:02x})",
                    why="it was saved in another encoding (GBK, Windows-1252, UTF-16 and so on)",
                    do="save it as UTF-8 (spreadsheets: CSV UTF-8; editors: save with encoding)",
                ) from error
            offset += len(line)


def _broken_line(path: Path, line: int, why: str, do: str) -> DataError:
    return DataError(f"{path}, line {line}, cannot be read", why=why, do=do)
