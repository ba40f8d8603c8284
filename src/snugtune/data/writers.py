"""Tables into files: the cells as they came, and after them columns of answers."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from snugtune.errors import DataError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

# Takes a part of a table and the answers to its rows, two tables of the same rows.
Write = Callable[["pa.Table", "pa.Table"], None]
Rows = Iterator[dict[str, Any]]

_WRITABLE = (".csv", ".tsv", ".jsonl", ".parquet")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_BYTE_ORDER_MARK = "\ufeff".encode()


def check_output(output: Path, *, source: str | Path | None, overwrite: bool) -> None:
    """Refuse an output that cannot or should not be written, before any work is done for it.

    Args:
        output: The file to be written.
        source: What is read for it; None if that is no file.
        overwrite: Whether a file that is there may be replaced.

    Raises:
        UsageError: Its name, its folder, or what is there already.
    """
    what = f"cannot write {output}"
    kinds = ", ".join(_WRITABLE)
    if output.suffix.lower() not in _WRITABLE:
        why = f"its name ends in {output.suffix or 'nothing'}; known are {kinds}"
        raise UsageError(what, why=why, do=f"give a name that ends in one of {kinds}")
    if not output.parent.is_dir():
        why = f"there is no folder {output.parent.absolute()}"
        raise UsageError(what, why=why, do="make the folder, or check the spelling")
    if source is not None and output.exists() and os.path.exists(source) and output.samefile(source):  # noqa: PTH110
        why = "it is the very file that is read"
        raise UsageError(what, why=why, do="give another name with --output")
    if output.is_dir():
        raise UsageError(what, why="it is a folder", do="give the name of a file")
    if output.exists() and not overwrite:
        why = "it is there already"
        raise UsageError(what, why=why, do="give another name, or --overwrite to replace it")


def free_names(names: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Names for new columns: those wanted, or with the same number behind each where one is taken."""
    number, free = 1, list(names)
    while not set(free).isdisjoint(taken):
        number += 1
        free = [f"{name}_{number}" for name in names]
    return free


@contextmanager
def open_output(
    output: Path, *, source: str | Path | None = None, rows: Rows | None = None
) -> Iterator[Write]:
    """Write a table into a file, which appears under its name only when the block has ended well.

    Until then it is beside it, with `.part` behind its name; after an error it is removed.

    Args:
        output: The file; its name decides the format.
        source: What is read. Where that is text with a byte order mark, CSV gets one too.
        rows: The rows as they are written in the source, for formats of text; None takes those of the table.

    Raises:
        DataError: It cannot be written.
    """
    aside = output.with_name(f"{output.name}.part")
    try:
        with _explained(output):
            sink = (
                _Parquet(aside) if output.suffix.lower() == ".parquet" else _Text.file(aside, output, source)
            )
        sink.rows = rows

        def write(part: pa.Table, answers: pa.Table) -> None:
            with _explained(output):
                sink.write(part, answers)

        try:
            yield write
        finally:
            with _explained(output):
                sink.close()
        with _explained(output):
            aside.replace(output)
    finally:
        if aside.is_file():
            aside.unlink()


@contextmanager
def open_standard_output(kind: str, *, rows: Rows | None = None) -> Iterator[Write]:
    """Write a table to the standard output; when its reader goes away, the block ends without an error.

    Args:
        kind: ".csv", ".tsv" or ".jsonl".
        rows: As in `open_output`.
    """
    with standard_output() as stream:
        sink = _Text(stream, kind)
        sink.rows = rows
        yield sink.write


@contextmanager
def standard_output() -> Iterator[TextIO]:
    """The standard output for data: UTF-8 with the line ends as they are, also where a terminal has others.

    When its reader goes away (`| head`), the block ends without an error.

    Raises:
        DataError: It is closed, or cannot be written.
    """
    stream = sys.stdout
    if stream is None:
        raise DataError(
            "cannot write the standard output", why="it is closed", do="open it, or name a file with --output"
        )
    binary = None if stream.isatty() else getattr(stream, "buffer", None)
    stream.flush()
    text: Any = stream if binary is None else _text(binary)
    try:
        yield text
        text.flush()
    except BrokenPipeError:
        _forget(stream)
    except OSError as error:
        _forget(stream)
        raise _cannot_write("the standard output", error) from error
    finally:
        if binary is not None:
            text.detach()


def _forget(stream: TextIO) -> None:
    """Let what is still buffered go nowhere; Python flushes it when it ends, and would fail again."""
    with Path(os.devnull).open("wb") as nobody:
        os.dup2(nobody.fileno(), stream.fileno())


def _text(binary: Any, encoding: str = "utf-8") -> io.TextIOWrapper:
    # Half a surrogate pair has no UTF-8, but the escape is JSON's own.
    return io.TextIOWrapper(binary, encoding=encoding, errors="backslashreplace", newline="")


class _Text:
    """CSV, TSV and JSON lines."""

    def __init__(self, stream: TextIO, kind: str) -> None:
        self.stream, self.rows = stream, None  # type: TextIO, Rows | None
        self._delimiter = _DELIMITERS.get(kind)
        self._header = self._delimiter is not None
        if self._delimiter is not None:
            self._plain = csv.writer(stream, delimiter=self._delimiter, lineterminator="\n")
            # Some versions of the module leave a carriage return unquoted, and readers end the row there.
            self._quoted = csv.writer(
                stream, delimiter=self._delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL
            )

    @classmethod
    def file(cls, path: Path, output: Path, source: str | Path | None) -> _Text:
        kind = output.suffix.lower()
        marked = kind in _DELIMITERS and source is not None and _has_mark(Path(source))
        return cls(_text(path.open("wb"), "utf-8-sig" if marked else "utf-8"), kind)

    def write(self, part: pa.Table, answers: pa.Table) -> None:
        rows = part.to_pylist() if self.rows is None else list(islice(self.rows, len(part)))
        if len(rows) != len(part):
            raise DataError(
                "the data has fewer rows than before",
                why="the file changed while it was read",
                do="give the same command again, and leave the file alone until it is done",
            )
        whole = [{**row, **answer} for row, answer in zip(rows, answers.to_pylist(), strict=True)]
        if self._delimiter is None:
            self.stream.writelines(f"{as_json_text(row)}\n" for row in whole)
            return
        names = [*part.column_names, *answers.column_names]
        if self._header:
            self._write_cells(names)
            self._header = False
        for row in whole:
            self._write_cells([_cell(row.get(name)) for name in names])

    def _write_cells(self, cells: list[str]) -> None:
        (self._quoted if any("\r" in cell for cell in cells) else self._plain).writerow(cells)

    def close(self) -> None:
        self.stream.close()


class _Parquet:
    def __init__(self, path: Path) -> None:
        self.rows: Rows | None = None
        self._path, self._file = path, path.open("wb")
        self._writer: Any = None

    def write(self, part: pa.Table, answers: pa.Table) -> None:
        import pyarrow.parquet as pq

        for name in answers.column_names:
            part = part.append_column(name, answers.column(name))
        part = part.replace_schema_metadata(None)  # it describes the columns before
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, part.schema)
        self._writer.write_table(part)

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._file.close()


def _has_mark(source: Path) -> bool:
    if not source.is_file():
        return False
    with source.open("rb") as file:
        return file.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK


def _cell(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    return as_json_text(value) if isinstance(value, bool | int | float | list | dict) else str(value)


def as_json_text(value: object) -> str:
    """A value as JSON in one line; null for a number that is none, and texts for what JSON does not know."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, default=str)


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _explained(output: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except OSError as error:
        raise _cannot_write(output, error) from error
    except pa.ArrowException as error:
        raise DataError(
            f"cannot write {output}", why=" ".join(str(error).split())[:300], do="give an --output in .jsonl"
        ) from error


def _cannot_write(output: str | Path, error: OSError) -> DataError:
    return DataError(
        f"cannot write {output}", why=str(error.strerror or error), do="make room, or give another --output"
    )
