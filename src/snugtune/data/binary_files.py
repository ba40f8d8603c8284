"""Files of Arrow, and files that are something else than their name says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from snugtune.data.reading import copied
from snugtune.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_ROWS_AT_A_TIME = 100_000
# How files of these kinds begin, by the specifications of their formats.
_BEGINNINGS = (
    (b"PK\x03\x04", "a zip archive, which Excel files (.xlsx) are too", "export it as CSV in UTF-8"),
    (b"\xd0\xcf\x11\xe0", "an old Excel or Word file", "export it as CSV in UTF-8"),
    (b"%PDF-", "a PDF", "export it as CSV in UTF-8"),
    (b"PAR1", "a Parquet file", "let its name end in .parquet"),
    (b"ARROW1", "an Arrow file", "let its name end in .arrow"),
    (b"\x1f\x8b", "gzipped", "let its name end in .gz, as in reviews.csv.gz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it"),
    (b"BZh", "compressed with bzip2", "unpack it"),
)


def refuse_foreign(path: Path) -> None:
    """Stop at a file whose name promises text and that is something else.

    Args:
        path: The file.

    Raises:
        DataError: It begins like a file of another kind.
    """
    with path.open("rb") as file:
        head = file.read(8)
    packed = path.name.lower().endswith(".gz")
    if packed and not head.startswith(b"\x1f\x8b"):
        raise DataError(f"{path} is not gzipped", why="its name ends in .gz", do="take .gz off its name")
    for beginning, kind, do in _BEGINNINGS:
        if head.startswith(beginning) and not packed:
            raise DataError(
                f"{path} is not text: it is {kind}", why=f"its first bytes are {head[:4]!r}", do=do
            )


def read_arrow(path: Path) -> Dataset:
    """The table in a file or stream of Arrow, whose content is checked before anything reads it.

    Args:
        path: The file.

    Raises:
        pyarrow.ArrowInvalid: It is neither, or damaged.
    """
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            table = pa.ipc.open_file(source)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
            return copied(path, ("arrow",), table.schema, _checked(batches))
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        return copied(path, ("arrow",), stream.schema, _checked(iter(stream)))


def check_content(table: Dataset) -> None:
    """Look for texts that are no texts, as some programs write them into Parquet files.

    Args:
        table: What was read.

    Raises:
        pyarrow.ArrowInvalid: There are some.
    """
    for part in table.with_format("arrow").iter(batch_size=_ROWS_AT_A_TIME):
        part.validate(full=True)


def _checked(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        batch.validate(full=True)  # a damaged place in memory would end the process
        yield batch
