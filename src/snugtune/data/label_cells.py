"""The cells of a label column, whatever their type: numbers, truth values, texts, class numbers or lists."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from snugtune.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset
    from numpy.typing import NDArray

ANOTHER_COLUMN = "name another column with --label-column (data.label_column), or set data.label_kind"
_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))(?:\.0*)?", re.ASCII)  # 7 and 7.0, but not 07
_SHOWN_ROWS = 8


def column_of(dataset: Dataset, name: str) -> pa.ChunkedArray:
    """One column as it lies on disk, memory mapped."""
    table: pa.Table = dataset.select_columns([name]).with_format("arrow")[:]
    return table.column(name)


def holds_lists(dataset: Dataset, name: str) -> bool:
    """Whether each cell of a column is a list."""
    import pyarrow as pa

    kind = dataset.features.arrow_schema.field(name).type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def class_label(dataset: Dataset, name: str) -> Any:
    """The ClassLabel feature of a column or of its lists; None for other columns."""
    from datasets import ClassLabel

    feature = _inner_feature(dataset, name)
    return feature if isinstance(feature, ClassLabel) else None


def scalars(dataset: Dataset, name: str, where: str) -> pa.Array:
    """A label column in one piece: numbers, truth values or trimmed texts; empty ones are null.

    Args:
        dataset: The table.
        name: The column.
        where: The table, for messages.

    Raises:
        DataError: The column holds something else.
    """
    import pyarrow as pa

    column = column_of(dataset, name)
    if pa.types.is_string(column.type):
        column = column.cast(pa.large_string())  # one piece may be larger than 2 GiB
    return _plain(column.combine_chunks(), dataset.features[name], f"{where}: the column {name!r}")


def as_numbers(array: pa.Array) -> pa.Array | None:
    """The values in fp64; None if one of them is not a finite number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        numbers = array.cast(pa.float64(), safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return numbers if pc.all(pc.is_finite(numbers), min_count=0).as_py() else None


def are_amounts(array: pa.Array) -> bool:
    """Whether all values are numbers, and not all of them whole."""
    import pyarrow.compute as pc

    numbers = as_numbers(array)
    return numbers is not None and not pc.all(pc.equal(pc.floor(numbers), numbers), min_count=0).as_py()


def names_of(dataset: Dataset, name: str, array: pa.Array) -> pa.Array:
    """Cells as class names, null where there is none.

    Args:
        dataset: The table.
        name: The column.
        array: Its cells, or those of its lists.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    label = class_label(dataset, name)
    if label is not None:
        known = pc.and_(pc.greater_equal(array, 0), pc.less(array, len(label.names)))
        return pa.array(label.names, pa.large_string()).take(pc.if_else(known, array, None))
    names = array.cast(pa.large_string())
    different = names.unique()
    whole = [None if value is None else _WHOLE.fullmatch(value) for value in different.to_pylist()]
    if whole.count(None) > different.null_count:
        return names
    short = pa.array([match and match[1] for match in whole], pa.large_string())  # "1.0" is the class "1"
    return short.take(pc.index_in(names, value_set=different))


def listed_names(
    dataset: Dataset, name: str, *, separator: str | None, where: str
) -> tuple[pa.Array, NDArray[np.int64], int]:
    """All names of a column of several labels, the number of the row of each, and how many rows there are.

    No label at all is an answer here (no class applies): an empty list, or with a separator an empty cell.

    Args:
        dataset: The table.
        name: The column.
        separator: What separates the labels of a cell that is not a list.
        where: The table, for messages.

    Raises:
        DataError: A list or a label in it is missing.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    what = f"label in the column {name!r}"
    split = separator is not None and not holds_lists(dataset, name)
    if split:
        cells = scalars(dataset, name, where).cast(pa.large_string())
        lists = pc.split_pattern(cells.fill_null(""), pattern=separator)
    else:
        lists = column_of(dataset, name).combine_chunks()
    refuse_missing(lists.is_null(), what, where)
    rows = np.repeat(np.arange(len(lists)), np.asarray(pc.list_value_length(lists)))
    feature = _inner_feature(dataset, name)
    names = names_of(dataset, name, _plain(lists.flatten(), feature, f"{where}: the column {name!r}"))
    given = np.asarray(names.is_valid())
    if not split:
        refuse_missing(np.isin(np.arange(len(lists)), rows[~given]), what, where)
    return names.filter(pa.array(given)), rows[given], len(lists)


def refuse_missing(missing: pa.Array | NDArray[np.bool_], what: str, where: str) -> None:
    """Stop if a mask of rows has any.

    Args:
        missing: True for each row without it.
        what: What these rows do not have.
        where: The table, for messages.

    Raises:
        DataError: Some rows do not have it.
    """
    import numpy as np

    rows = np.flatnonzero(np.asarray(missing)) + 1
    if len(rows) == 0:
        return
    shown = ", ".join(map(str, rows[:_SHOWN_ROWS])) + (", ..." if len(rows) > _SHOWN_ROWS else "")
    raise DataError(
        f"{where}: {len(rows)} of {len(missing)} rows have no {what}: row {shown}",
        why="such a row teaches nothing; rows are counted from 1, without the header",
        do="fill them in, or leave such rows out with data.bad_rows=skip",
        rows=rows[:_SHOWN_ROWS].tolist(),
    )


def _inner_feature(dataset: Dataset, name: str) -> Any:
    feature = dataset.features[name]
    return getattr(feature, "feature", feature)


def _plain(array: pa.Array, feature: Any, what: str) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if type(feature).__name__ == "Json":
        why = "it mixes texts, numbers or lists"
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        texts = pc.utf8_trim_whitespace(array.cast(pa.large_string()))
        return pc.if_else(pc.equal(texts, ""), None, texts)
    elif pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers = array.cast(pa.float64())
        return pc.if_else(pc.is_nan(numbers), None, numbers)
    elif pa.types.is_null(kind) or pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return array
    else:
        why = f"it holds {kind}"
    raise DataError(f"{what} cannot be used as labels", why=why, do=ANOTHER_COLUMN)
