"""What the labels of a table are, and the same labels as numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from snugtune.data.checks import blank_texts
from snugtune.data.columns import Columns
from snugtune.data.label_cells import (
    ANOTHER_COLUMN,
    are_amounts,
    as_numbers,
    class_label,
    column_of,
    holds_lists,
    listed_names,
    names_of,
    refuse_missing,
    scalars,
)
from snugtune.errors import DataError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset
    from numpy.typing import NDArray

Kind = Literal["single-label", "multi-label", "regression"]

_MANY_CLASSES = 1000
_INTEGER = re.compile(r"-?\d+", re.ASCII)
_MARKS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a model has to answer.

    Args:
        kind: One class of several, any number of classes, or a number.
        names: The classes in the order of their numbers; empty for regression.
    """

    kind: Kind
    names: tuple[str, ...]


def check_texts(dataset: Dataset, columns: Columns, where: str) -> None:
    """Refuse texts that are missing or empty.

    Args:
        dataset: The table.
        columns: Which of its columns are used.
        where: The table, for messages.

    Raises:
        DataError: Some are, or the column does not hold texts.
    """
    check_text_types(dataset, columns, where)
    for name in columns.texts:
        refuse_missing(blank_texts(dataset, name), f"text in the column {name!r}", where)


def check_text_types(dataset: Dataset, columns: Columns, where: str) -> None:
    """Refuse text columns that hold something else.

    Args:
        dataset: The table.
        columns: Which of its columns are used.
        where: The table, for messages.

    Raises:
        DataError: One does.
    """
    import pyarrow as pa

    for name in columns.texts:
        kind = column_of(dataset, name).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(
                f"{where}: the column {name!r} does not hold texts",
                why=f"it holds {kind}",
                do="name another column with --text-column (data.text_column)",
            )


def learn_labels(
    dataset: Dataset, columns: Columns, *, kind: str = "auto", separator: str | None = None, where: str
) -> Labels:
    """Find out from the training data what the labels are.

    Args:
        dataset: The training data.
        columns: Which of its columns are used.
        kind: "single-label", "multi-label", "regression", or "auto": several columns, lists or a
            separator mean multi-label; numbers that are not all whole mean regression; else classes.
        separator: What separates several labels in one cell.
        where: The table, for messages.

    Raises:
        DataError: Labels are missing, there is one class only, or so many that they look like texts.
        UsageError: `kind` does not go with the columns.
    """
    several = len(columns.labels) > 1 or separator is not None or holds_lists(dataset, columns.labels[0])
    if kind not in ("auto", "multi-label") and several:
        raise UsageError(
            f"{where}: several labels for each row do not make a {kind} task",
            why="there are several label columns, lists of labels, or a separator",
            do="set data.label_kind=multi-label, or name one column of single labels",
        )
    if kind == "multi-label" and not several:
        raise UsageError(
            f"{where}: the column {columns.labels[0]!r} has one label for each row",
            why="multi-label needs several 0/1 columns, lists of labels, or a separator",
            do='set data.label_separator (such as "|") or data.label_column=[..., ...]',
        )
    if len(columns.labels) > 1:
        return Labels(kind="multi-label", names=columns.labels)
    if several:
        names, _, _ = listed_names(dataset, columns.labels[0], separator=separator, where=where)
        return Labels(kind="multi-label", names=_order(dataset, columns.labels[0], names, where))
    column = scalars(dataset, columns.labels[0], where)
    if kind == "regression" or (kind == "auto" and are_amounts(column)):
        return Labels(kind="regression", names=())
    names = names_of(dataset, columns.labels[0], column)
    refuse_missing(names.is_null(), f"label in the column {columns.labels[0]!r}", where)
    found = _order(dataset, columns.labels[0], names, where)
    if kind == "auto" and len(found) > _MANY_CLASSES and class_label(dataset, columns.labels[0]) is None:
        numbers = all(_INTEGER.fullmatch(name) for name in found)
        raise DataError(
            f"{where}: the column {columns.labels[0]!r} has {len(found)} different values",
            why="it looks like amounts, not like classes"
            if numbers
            else "it looks like free text, not like labels",
            do=ANOTHER_COLUMN,
        )
    return Labels(kind="single-label", names=found)


def encode_labels(
    dataset: Dataset, columns: Columns, labels: Labels, *, separator: str | None = None, where: str
) -> NDArray[Any]:
    """The labels as numbers.

    Args:
        dataset: Training or validation data.
        columns: Which of its columns are used.
        labels: What `learn_labels` found in the training data.
        separator: What separates several labels in one cell.
        where: The table, for messages.

    Returns:
        Single-label: class numbers, int64 [rows]. Multi-label: zeros and ones, float32 [rows, classes].
        Regression: float32 [rows].

    Raises:
        DataError: A label is missing, is not a number, or was not in the training data.
    """
    import numpy as np

    if len(columns.labels) > 1:
        marks = [_marks(dataset, name, where) for name in columns.labels]
        return np.stack(marks, axis=1).astype(np.float32)
    column = columns.labels[0]
    if labels.kind == "regression":
        return _numbers(scalars(dataset, column, where), column, where)
    if labels.kind == "single-label":
        names = names_of(dataset, column, scalars(dataset, column, where))
        refuse_missing(names.is_null(), f"label in the column {column!r}", where)
        return _codes(names, labels, np.arange(len(names)), where)
    names, rows, count = listed_names(dataset, column, separator=separator, where=where)
    matrix = np.zeros((count, len(labels.names)), dtype=np.float32)
    matrix[rows, _codes(names, labels, rows, where)] = 1
    return matrix


def _order(dataset: Dataset, name: str, names: pa.Array, where: str) -> tuple[str, ...]:
    """The class names in the order of their numbers."""
    found = names.unique().to_pylist()
    if len(found) < 2:
        raise DataError(
            f"{where}: the column {name!r} has only one class: {', '.join(map(repr, found)) or 'none'}",
            why="there is nothing to tell apart",
            do=ANOTHER_COLUMN,
        )
    label = class_label(dataset, name)
    if label is not None:
        return tuple(label.names)
    if all(_INTEGER.fullmatch(value) for value in found):
        return tuple(sorted(found, key=lambda value: (int(value), value)))
    return tuple(sorted(found))


def _codes(names: pa.Array, labels: Labels, rows: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """Class numbers of names; `rows` says where each stands, for the message about an unknown one."""
    import numpy as np

    numbers = {name: number for number, name in enumerate(labels.names)}
    encoded = names.dictionary_encode()
    different = encoded.dictionary.to_pylist()
    table = np.array([numbers.get(name, -1) for name in different], dtype=np.int64)
    codes = table[np.asarray(encoded.indices)] if len(names) else np.zeros(0, dtype=np.int64)
    unknown = np.flatnonzero(codes < 0)
    if len(unknown):
        first = int(unknown[0])
        known = ", ".join(labels.names[:12]) + (", ..." if len(labels.names) > 12 else "")
        raise DataError(
            f"{where}, row {rows[first] + 1}: the label {names[first].as_py()!r} is not in the training data",
            why=f"the training data has {known}",
            do="correct the label, or put rows with it into the training data",
            rows=[rows[first] + 1],
        )
    return cast("NDArray[np.int64]", codes)


def _marks(dataset: Dataset, name: str, where: str) -> NDArray[Any]:
    """A column of 0 and 1 (or true and false)."""
    import numpy as np
    import pyarrow as pa

    array = scalars(dataset, name, where).cast(pa.large_string())
    refuse_missing(array.is_null(), f"label in the column {name!r}", where)
    encoded = array.dictionary_encode()
    table = np.array([_MARKS.get(value.lower(), -1) for value in encoded.dictionary.to_pylist()])
    marks = table[np.asarray(encoded.indices)]
    wrong = np.flatnonzero(marks < 0)
    if len(wrong):
        raise DataError(
            f"{where}, row {wrong[0] + 1}: {array[int(wrong[0])].as_py()!r} in the column {name!r}",
            why="with several label columns, each says 0 or 1",
            do="correct the cell, or name one label column",
            rows=[wrong[0] + 1],
        )
    return cast("NDArray[Any]", marks)


def _numbers(array: pa.Array, name: str, where: str) -> NDArray[np.float32]:
    import numpy as np
    import pyarrow as pa

    refuse_missing(array.is_null(), f"label in the column {name!r}", where)
    numbers = as_numbers(array)
    if numbers is None:
        row, value = next(
            (row, value) for row, value in enumerate(array, 1) if as_numbers(pa.array([value])) is None
        )
        raise DataError(
            f"{where}, row {row}: {value.as_py()!r} in the column {name!r} is not a number",
            why="regression learns numbers",
            do="correct the cell, or set data.label_kind=single-label",
            rows=[row],
        )
    return cast("NDArray[np.float32]", np.asarray(numbers).astype(np.float32))
