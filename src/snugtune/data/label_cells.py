"""The cells of a label column, whatever their type: numbers, truth values, texts, class numbers or lists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from snugtune.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset
    from numpy.typing import NDArray

ANOTHER_COLUMN = "name another column with --label-column (data.label_column), or set data.label_kind"
_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))(?:\.0*)?", re.ASCII)  # 7 and 7.0, but not 07
_SHOWN_ROWS = 8
_ROWS_AT_A_TIME = 100_000


def parts_of(dataset: Dataset, name: str) -> Iterator[pa.Array]:
    """A column in parts of bounded size, read from disk as they are asked for.

    Args:
        dataset: The table.
        name: The column.
    """
    column = dataset.select_columns([name]).with_format("arrow")
    for start in range(0, len(dataset), _ROWS_AT_A_TIME):
        yield from column[start : start + _ROWS_AT_A_TIME].column(name).chunks


def type_of(dataset: Dataset, name: str) -> pa.DataType:
    """What the cells of a column are on disk."""
    return dataset.features.arrow_schema.field(name).type


def holds_lists(dataset: Dataset, name: str) -> bool:
    """Whether each cell of a column is a list."""
    import pyarrow as pa

    kind = type_of(dataset, name)
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def class_label(dataset: Dataset, name: str) -> Any:
    """The ClassLabel feature of a column or of its lists; None for other columns."""
    from datasets import ClassLabel

    feature = _inner_feature(dataset, name)
    return feature if isinstance(feature, ClassLabel) else None


def cells_of(dataset: Dataset, name: str, where: str) -> Iterator[tuple[NDArray[np.int64], pa.Array]]:
    """A label column in parts: for each row the number of its cell, -1 for none, and the different cells.

    Cells are numbers, truth values, trimmed texts, or the names of numbered classes.

    Args:
        dataset: The table.
        name: The column.
        where: The table, for messages.

    Raises:
        DataError: The column holds something else.
    """
    feature = dataset.features[name]
    for part in parts_of(dataset, name):
        indices, cells = _different(part, feature, f"{where}: the column {name!r}")
        cells = _named(dataset, name, cells)
        yield _numbered(indices, cells), cells


def _different(part: pa.Array, feature: Any, what: str) -> tuple[pa.Array, pa.Array]:
    """For each cell its number among the different ones, and these, as `_plain` makes them."""
    _plain(part.slice(0, 0), feature, what)  # what cannot be a label cannot be told apart either
    encoded = part.dictionary_encode()
    return encoded.indices, _plain(encoded.dictionary, feature, what)


def missing_labels(dataset: Dataset, name: str, where: str) -> NDArray[np.bool_]:
    """Which rows have no label, [rows].

    Args:
        dataset: The table.
        name: A column of single labels.
        where: The table, for messages.

    Raises:
        DataError: The column cannot hold labels.
    """
    import numpy as np

    return np.concatenate(
        [np.zeros(0, dtype=bool), *(rows < 0 for rows, _ in cells_of(dataset, name, where))]
    )


@dataclass(frozen=True, eq=False)
class Named:
    """A column of single labels.

    Args:
        names: Its different labels, in no order.
        rows: The number of the name of each row, -1 for none, int32 [rows].
    """

    names: list[str]
    rows: NDArray[np.int32]


def named_cells(dataset: Dataset, name: str, where: str, *, most: int | None = None) -> Named | None:
    """The names in a column of single labels, four bytes for each row; None if there are too many.

    Args:
        dataset: The table.
        name: The column.
        where: The table, for messages.
        most: So many names are not too many; None for any number.

    Raises:
        DataError: The column cannot hold labels.
    """
    return _collected(cells_of(dataset, name, where), most=most, fixed=class_label(dataset, name) is not None)


def _collected(
    parts: Iterable[tuple[NDArray[np.int64], pa.Array]], *, most: int | None, fixed: bool
) -> Named | None:
    """The names in all parts; None if there are too many. Those that are not fixed may lose their points."""
    import numpy as np
    import pyarrow as pa

    found: dict[str, int] = {}
    numbers = [np.zeros(0, dtype=np.int32)]
    for rows, cells in parts:
        texts = cells.cast(pa.large_string()).to_pylist()
        own = [-1 if text is None else found.setdefault(text, len(found)) for text in texts]
        numbers.append(np.array([*own, -1], dtype=np.int32)[rows])
        if most is not None and len(found) > most:
            return None
    named = Named([*found], np.concatenate(numbers))
    whole = [_WHOLE.fullmatch(text) for text in found]
    if fixed or None in whole:
        return named
    short: dict[str, int] = {}  # "1.0" is the class "1"
    own = [short.setdefault(match[1], len(short)) for match in whole if match]
    return Named([*short], np.array([*own, -1], dtype=np.int32)[named.rows])


def as_numbers(array: pa.Array) -> pa.Array | None:
    """The values in fp64; None if one of them is not a finite number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        numbers = array.cast(pa.float64(), safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return numbers if pc.all(pc.is_finite(numbers), min_count=0).as_py() else None


def are_amounts(dataset: Dataset, name: str, where: str) -> bool:
    """Whether all cells of a column are numbers, and not all of them whole."""
    import pyarrow.compute as pc

    all_whole = True
    for _, cells in cells_of(dataset, name, where):
        numbers = as_numbers(cells)
        if numbers is None:
            return False
        all_whole = all_whole and pc.all(pc.equal(pc.floor(numbers), numbers), min_count=0).as_py()
    return not all_whole


def _named(dataset: Dataset, name: str, cells: pa.Array) -> pa.Array:
    """Numbers of classes as their names; other cells as they are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    label = class_label(dataset, name)
    if label is None:
        return cells
    known = pc.and_(pc.greater_equal(cells, 0), pc.less(cells, len(label.names)))
    return pa.array(label.names, pa.large_string()).take(pc.if_else(known, cells, None))


def listed_names(
    dataset: Dataset, name: str, *, separator: str | None, where: str
) -> tuple[Named, NDArray[np.int64]]:
    """All names in a column of several labels, and the number of the row of each, [labels].

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
    import pyarrow.compute as pc

    what, feature = f"label in the column {name!r}", _inner_feature(dataset, name)
    split = None if holds_lists(dataset, name) else separator
    missing, owners = [np.zeros(0, dtype=bool)], [np.zeros(0, dtype=np.int64)]

    def parts() -> Iterator[tuple[NDArray[np.int64], pa.Array]]:
        done = 0
        for lists in _lists_of(dataset, name, split, where):
            lengths = np.asarray(pc.list_value_length(lists).fill_null(0))
            rows = np.repeat(np.arange(len(lists)), lengths)
            indices, cells = _different(lists.flatten(), feature, f"{where}: the column {name!r}")
            cells = _named(dataset, name, cells)
            numbers = _numbered(indices, cells)
            without = np.asarray(lists.is_null())
            if split is None:
                without = without | np.isin(np.arange(len(lists)), rows[numbers < 0])
            missing.append(without)
            owners.append(done + rows[numbers >= 0])
            done += len(lists)
            yield numbers[numbers >= 0], cells

    found = _collected(parts(), most=None, fixed=class_label(dataset, name) is not None)
    refuse_missing(np.concatenate(missing), what, where)
    return cast("Named", found), np.concatenate(owners)


def _lists_of(dataset: Dataset, name: str, separator: str | None, where: str) -> Iterator[pa.Array]:
    """The cells of a column as lists, in parts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for part in parts_of(dataset, name):
        if separator is None:
            yield part
        else:
            cells = _plain(part, dataset.features[name], f"{where}: the column {name!r}")
            yield pc.split_pattern(cells.cast(pa.large_string()).fill_null(""), pattern=separator)


def _numbered(indices: pa.Array, cells: pa.Array) -> NDArray[np.int64]:
    """Numbers of cells, -1 for those that are nothing."""
    import numpy as np

    # One more, for what has no cell: its number is -1, which is the last.
    known = np.append(np.where(np.asarray(cells.is_valid()), np.arange(len(cells)), -1), -1)
    return cast("NDArray[np.int64]", known[np.asarray(indices.fill_null(-1))])


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
