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
    cells_of,
    class_label,
    holds_lists,
    listed_names,
    missing_labels,
    named_cells,
    refuse_missing,
    type_of,
)
from snugtune.errors import DataError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray

    from snugtune.data.label_cells import Named

Kind = Literal["single-label", "multi-label", "regression"]

_MANY_CLASSES = 1000
_MOST_COUNTED = 10_000  # different values of a column that are kept
_INTEGER = re.compile(r"-?\d+", re.ASCII)
_COMMA = re.compile(r"-?\d+,\d+", re.ASCII)
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
        kind = type_of(dataset, name)
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
        listed, _ = listed_names(dataset, columns.labels[0], separator=separator, where=where)
        return Labels(kind="multi-label", names=_order(dataset, columns.labels[0], listed.names, where))
    return _learn_single(dataset, columns.labels[0], kind, where)


def _learn_single(dataset: Dataset, column: str, kind: str, where: str) -> Labels:
    """The labels of a column that has one for each row."""
    if kind == "regression":
        return Labels(kind="regression", names=())
    automatic = kind == "auto"
    named = named_cells(dataset, column, where, most=_MOST_COUNTED if automatic else None)
    if automatic and (named is None or not all(map(_INTEGER.fullmatch, named.names))):
        if are_amounts(dataset, column, where):
            return Labels(kind="regression", names=())
        _refuse_commas(dataset, column, where)
    if named is None:
        raise _too_many(dataset, column, f"more than {_MOST_COUNTED:,}", where)
    refuse_missing(named.rows < 0, f"label in the column {column!r}", where)
    found = _order(dataset, column, named.names, where)
    if automatic and len(found) > _MANY_CLASSES and class_label(dataset, column) is None:
        raise _too_many(dataset, column, f"{len(found):,}", where)
    return Labels(kind="single-label", names=found)


def _refuse_commas(dataset: Dataset, column: str, where: str) -> None:
    """Stop where all labels are whole numbers or have one comma between digits."""
    first: list[Any] = next((cells.to_pylist() for _, cells in cells_of(dataset, column, where)), [])
    texts = [text for text in first if isinstance(text, str)]
    commas = [text for text in texts if _COMMA.fullmatch(text)]
    if commas and all(_COMMA.fullmatch(text) or _INTEGER.fullmatch(text) for text in texts):
        raise DataError(
            f"{where}: the column {column!r} has labels such as {commas[0]!r}",
            why="that is a number with a decimal comma, or two labels; learnt as classes it would be neither",
            do="write numbers with a point; or set data.label_separator to a comma for several labels in a "
            "cell, or data.label_kind to single-label for classes of these names",
        )


def _too_many(dataset: Dataset, column: str, count: str, where: str) -> DataError:
    first = next(cells_of(dataset, column, where))[1]
    return DataError(
        f"{where}: the column {column!r} has {count} different values",
        why="it looks like amounts, not like classes"
        if as_numbers(first) is not None
        else "it looks like free text, not like labels",
        do=ANOTHER_COLUMN,
    )


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
        return _numbers(dataset, column, where)
    if labels.kind == "single-label":
        named = cast("Named", named_cells(dataset, column, where))
        refuse_missing(named.rows < 0, f"label in the column {column!r}", where)
        return _codes(named, labels, None, where)
    listed, rows = listed_names(dataset, column, separator=separator, where=where)
    matrix = np.zeros((len(dataset), len(labels.names)), dtype=np.float32)
    matrix[rows, _codes(listed, labels, rows, where)] = 1
    return matrix


def _order(dataset: Dataset, name: str, found: list[str], where: str) -> tuple[str, ...]:
    """The class names in the order of their numbers."""
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


def _codes(named: Named, labels: Labels, rows: NDArray[np.int64] | None, where: str) -> NDArray[np.int64]:
    """Class numbers of names; `rows` says where each stands, for the message about an unknown one."""
    import numpy as np

    numbers = {name: number for number, name in enumerate(labels.names)}
    table = np.array([*(numbers.get(name, -1) for name in named.names), -1], dtype=np.int64)
    codes = table[named.rows]
    if len(codes) and codes.min() < 0:
        first = int(np.argmax(codes < 0))
        row = (first if rows is None else int(rows[first])) + 1
        known = ", ".join(labels.names[:12]) + (", ..." if len(labels.names) > 12 else "")
        name = named.names[named.rows[first]]
        raise DataError(
            f"{where}, row {row}: the label {name!r} is not in the training data",
            why=f"the training data has {known}",
            do="correct the label, or put rows with it into the training data",
            rows=[row],
        )
    return codes


def _marks(dataset: Dataset, name: str, where: str) -> NDArray[Any]:
    """A column of 0 and 1 (or true and false)."""
    import numpy as np
    import pyarrow as pa

    refuse_missing(missing_labels(dataset, name, where), f"label in the column {name!r}", where)
    marks, done = np.zeros(len(dataset), dtype=np.int8), 0
    for rows, cells in cells_of(dataset, name, where):
        texts = cells.cast(pa.large_string()).to_pylist()
        table = np.array([*(_MARKS.get(str(text).lower(), -1) for text in texts), -1], dtype=np.int8)
        part = table[rows]
        marks[done : done + len(part)] = part
        if len(part) and part.min() < 0:
            wrong = int(np.argmin(part))
            row = done + wrong + 1
            raise DataError(
                f"{where}, row {row}: {texts[rows[wrong]]!r} in the column {name!r}",
                why="with several label columns, each says 0 or 1",
                do="correct the cell, or name one label column",
                rows=[row],
            )
        done += len(part)
    return marks


def _numbers(dataset: Dataset, name: str, where: str) -> NDArray[np.float32]:
    import numpy as np
    import pyarrow as pa

    refuse_missing(missing_labels(dataset, name, where), f"label in the column {name!r}", where)
    values, done = np.zeros(len(dataset), dtype=np.float32), 0
    for rows, cells in cells_of(dataset, name, where):
        numbers = as_numbers(cells)
        if numbers is None:
            bad = [as_numbers(pa.array([cell])) is None for cell in cells]
            wrong = int(np.argmax(np.append(bad, False)[rows]))
            row = done + wrong + 1
            cell = cells[int(rows[wrong])].as_py()
            raise DataError(
                f"{where}, row {row}: {cell!r} in the column {name!r} is not a number",
                why="regression learns numbers",
                do="correct the cell, or set data.label_kind=single-label",
                rows=[row],
            )
        values[done : done + len(rows)] = np.asarray(numbers.cast(pa.float64()))[rows]
        done += len(rows)
    return values
