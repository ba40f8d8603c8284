"""The fast way through JSON lines, where reading them line by line would say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from snugtune.data.plain_cells import Doubtful, whole_rows

if TYPE_CHECKING:
    import pyarrow as pa

_LARGEST_EXACT = 2.0**53  # whole numbers in fp64


def plain_tables(path: Path, on_bytes: Callable[[int], object] = lambda done: None) -> Iterator[pa.Table]:
    """The rows of a UTF-8 file of JSON lines in parts; all have the types of the first.

    Args:
        path: The file, or its gzipped form.
        on_bytes: Called now and then with the bytes of the file that were read.

    Raises:
        Doubtful: The file has to be read line by line.
    """
    import pyarrow as pa
    from pyarrow import json

    schema: pa.Schema | None = None
    for rows in whole_rows(path, on_bytes, quoted=False):
        lines = rows.count(b"\n") + (not rows.endswith(b"\n"))
        # The fast reader crashes the process on a null, and takes two objects in one line for two rows.
        if not rows.startswith(b"{") or rows.count(b"\n{") + 1 != lines:
            raise Doubtful("a line that does not begin with an object")
        read = json.ReadOptions(use_threads=False, block_size=len(rows) + 1)
        parse = json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "error"
        )
        try:
            table = json.read_json(pa.BufferReader(rows), read, parse)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise Doubtful(str(error)) from None
        if len(table) != lines or table.num_columns == 0:
            raise Doubtful("an object in several lines, or several in one")
        schema = table.schema
        _check_types(table)
        yield table


def _check_types(table: pa.Table) -> None:
    """Refuse what the fast reader changes without a word."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for column in table.columns:
        cells = column
        while pa.types.is_list(cells.type):
            cells = pc.list_flatten(cells)
        kind = cells.type
        if pa.types.is_temporal(kind):
            raise Doubtful("texts that became times")
        if pa.types.is_null(kind):
            raise Doubtful("a column whose type is not known yet")
        if pa.types.is_floating(kind):
            largest = pc.max(pc.abs(cells)).as_py()
            if largest is not None and largest >= _LARGEST_EXACT:
                raise Doubtful("numbers that fp64 cannot hold")
