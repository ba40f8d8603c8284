"""The fast way through a file of cells: columns at a time, where reading row by row would say the same.

What is checked on the way is all that the fast reader would get wrong without a word: quotes in odd places,
zero bytes, and lines with too few or too many cells. Any doubt, and the file is read row by row instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from snugtune.data.encodings import bytes_read, open_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_BYTES = 1 << 22
_LONGEST_ROW_BYTES = 1 << 26  # longer ones are read row by row
_MARK = b"\xef\xbb\xbf"


class Doubtful(Exception):
    """A file has to be read row by row."""


def plain_batches(
    path: Path,
    *,
    delimiter: str,
    names: list[str],
    header: bool,
    on_bytes: Callable[[int], object] = lambda done: None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a UTF-8 file in batches, all cells texts as they are written.

    Limits: the first line must not be blank, and there must be two columns or more.

    Args:
        path: The file, or its gzipped form.
        delimiter: What stands between cells.
        names: The names of the columns.
        header: Whether the first row is none.
        on_bytes: Called now and then with the bytes of the file that were read.

    Raises:
        Doubtful: The file has to be read row by row.
    """
    import pyarrow as pa
    from pyarrow import csv

    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        null_values=[],
        strings_can_be_null=False,
        quoted_strings_can_be_null=False,
    )
    for number, rows in enumerate(whole_rows(path, on_bytes)):
        check_quotes(rows, delimiter)
        read = csv.ReadOptions(
            # One block, in this thread: threads that read ahead would outlive an error.
            use_threads=False,
            block_size=len(rows) + 1,
            column_names=names,
            skip_rows_after_names=int(header and number == 0),
        )
        parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        try:
            table = csv.read_csv(pa.BufferReader(rows), read, parse, convert)
        except pa.ArrowInvalid as error:
            raise Doubtful(str(error)) from None
        yield from table.to_batches()


def whole_rows(path: Path, on_bytes: Callable[[int], object], *, quoted: bool = True) -> Iterator[bytes]:
    """A UTF-8 file in blocks of whole rows, without its byte order mark.

    Args:
        path: The file, or its gzipped form.
        on_bytes: Called now and then with the bytes of the file that were read.
        quoted: Whether a line end between quotes is no end of a row.

    Raises:
        Doubtful: No row ends for very long.
    """
    with open_bytes(path) as file:
        held = file.read(_BLOCK_BYTES).removeprefix(_MARK)
        while block := file.read(_BLOCK_BYTES):
            on_bytes(bytes_read(file))
            end = held.rfind(b"\n") + 1
            odd = held.count(b'"', 0, end) % 2 if quoted else 0
            while odd:  # between quotes: back to the last line end before the last of them
                before = held.rfind(b"\n", 0, held.rfind(b'"', 0, end)) + 1
                odd ^= held.count(b'"', before, end) % 2
                end = before
            if end:
                yield held[:end]
            elif len(held) > _LONGEST_ROW_BYTES:
                raise Doubtful("no end of a row")
            held = held[end:] + block
        if held:
            yield held


def check_quotes(rows: bytes, delimiter: str) -> None:
    """Whether all quotes stand where everybody understands them alike: around whole cells, or twice inside.

    Args:
        rows: Whole rows.
        delimiter: What stands between cells.

    Raises:
        Doubtful: They do not.
    """
    import numpy as np

    if b"\0" in rows:
        raise Doubtful("zero bytes")
    if rows.startswith(_MARK):
        raise Doubtful("a mark that the fast reader would leave out")
    if b'"' not in rows:
        return
    values = np.frombuffer(b"\n" + rows + b"\n", np.uint8)
    places = np.flatnonzero(values == ord('"'))
    if len(places) % 2:
        raise Doubtful("a quote that is never closed")
    # A quote inside a cell is written twice: it closes the cell and opens it again.
    may_stand_beside = np.zeros(256, dtype=bool)
    may_stand_beside[[*b'\r\n"', ord(delimiter)]] = True
    if not may_stand_beside[values[places[::2] - 1]].all():
        raise Doubtful("a quote inside a cell")
    if not may_stand_beside[values[places[1::2] + 1]].all():
        raise Doubtful("something after a closing quote")
