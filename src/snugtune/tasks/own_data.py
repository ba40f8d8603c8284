"""Somebody's own data: dictionaries of arrays and data sets, looked at before anything learns from them."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from snugtune.data.batching import Examples, Row, Rows
from snugtune.data.splits import split_rows
from snugtune.errors import DataError, UsageError

SHAPES = 'a dictionary of arrays of equal length ({"images": x, "labels": y}), or a data set of dictionaries'


class Columns:
    """Rows of arrays: column name -> [rows, ...].

    Args:
        columns: What becomes a tensor with a row for each sample.
        name: What the data are called in messages.

    Raises:
        DataError: A column is no array of numbers, or the columns are not equally long.
    """

    def __init__(self, columns: Mapping[str, Any], name: str) -> None:
        self.columns = {
            key: _column(column, f"the column {key!r} of {name}") for key, column in columns.items()
        }
        lengths = {key: len(column) for key, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"the columns of {name} are not equally long",
                why=", ".join(f"{key} has {length:,} rows" for key, length in lengths.items()),
                do="give each row a value in every column",
            )
        self.names = sorted(str(key) for key in columns)
        self._rows = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, number: int) -> Row:
        return {name: column[number] for name, column in self.columns.items()}

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [dict(self[number]) for number in numbers]

    def digest(self) -> str:
        """SHA-256 of all values."""
        digest = hashlib.sha256()
        for name, column in self.columns.items():
            digest.update(f"{name} {column.dtype} {list(column.shape)}".encode())
            # As bytes, because NumPy knows fewer types of numbers than PyTorch.
            digest.update(column.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


class DataSet:
    """Any data set with a length and numbered rows.

    Args:
        rows: The data set.
        name: What it is called in messages.

    Raises:
        DataError: Its first row cannot be read.
        UsageError: Its rows are no dictionaries.
    """

    def __init__(self, rows: Any, name: str) -> None:
        self.rows = rows
        first = self._first(name)
        if not isinstance(first, Mapping):
            raise UsageError(
                f"the first row of {name} is a {type(first).__name__}",
                why="a row has names",
                do=f"give {SHAPES}",
            )
        self.names = sorted(str(key) for key in first)
        again = _as_text(self._first(name))
        # A row that is another one at each reading says nothing about the data.
        self._seen = again if again == _as_text(first) else ""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        if hasattr(self.rows, "__getitems__"):
            return list(self.rows.__getitems__(numbers))
        return [self.rows[number] for number in numbers]

    def digest(self) -> str:
        """SHA-256 of the number of rows, their names and the first row: all may be too many to read."""
        return hashlib.sha256(f"{len(self)} {self.names} {self._seen}".encode()).hexdigest()

    def _first(self, name: str) -> Any:
        try:
            with _same_random_numbers():
                return self.__getitems__([0])[0]
        except (LookupError, TypeError) as error:
            raise DataError(
                f"row 0 of {name} cannot be read",
                why=f"{type(error).__name__}: {error}",
                do=f"give {SHAPES}",
            ) from error


def open_rows(data: Any, name: str) -> Columns | DataSet:
    """Look at somebody's own data.

    Args:
        data: A dictionary of arrays, or a data set whose rows are dictionaries.
        name: What they are called in messages.

    Raises:
        DataError, UsageError: They cannot be used.
    """
    kind = type(data).__name__
    if kind == "DataFrame":
        raise UsageError(
            f"{name} is a DataFrame", why="its columns are wanted", do=f'give {name}.to_dict("list")'
        )
    if kind.endswith("DatasetDict"):
        raise UsageError(
            f"{name} is several data sets: {', '.join(data)}",
            why="one is learnt from, and another measured on",
            do=f'give one of them, such as {name}["{next(iter(data), "train")}"]',
        )
    if isinstance(data, (str, bytes)) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UsageError(f"{name} is {kind}", why="a task of one's own has no reader", do=f"give {SHAPES}")
    columns = Columns(data, name) if isinstance(data, Mapping) else None
    if not len(data if columns is None else columns):
        raise DataError(f"{name} has no rows", why="there is nothing to learn from", do=f"give {SHAPES}")
    return DataSet(data, name) if columns is None else columns


def set_aside(examples: Examples, *, fraction: float, seed: int) -> tuple[Examples, Examples]:
    """Divide rows into those to learn from and those that measure, at random.

    Args:
        examples: All rows.
        fraction: Share of those that measure.
        seed: Start of the random numbers.

    Raises:
        DataError: There is only one row.
    """
    if len(examples) < 2:
        raise DataError(
            "one row is too few to set some aside to measure on",
            why="the model must not learn from what it is measured on",
            do="add rows, or give `validation`",
        )
    train, aside = split_rows(None, rows=len(examples), fraction=fraction, seed=seed, kind="own")
    return _part(examples, train), _part(examples, aside)


def _part(examples: Examples, numbers: np.ndarray) -> Examples:
    return Examples(_Part(examples.rows, numbers), examples.lengths[numbers])


class _Part:
    """Some rows of a table."""

    def __init__(self, rows: Rows, numbers: np.ndarray) -> None:
        self.rows, self.numbers = rows, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitems__(self, numbers: list[int]) -> Sequence[Row]:
        return self.rows.__getitems__(self.numbers[numbers].tolist())


def places(rows: Rows, numbers: Sequence[int]) -> list[str]:
    """What people call some rows to learn from: their numbers in what they gave, from 0.

    Args:
        rows: The rows to learn from.
        numbers: Numbers among them.
    """
    given = rows.numbers if isinstance(rows, _Part) else np.arange(len(rows))
    return [f"row {int(given[number])} of data" for number in numbers]


def _column(column: Any, what: str) -> torch.Tensor:
    """The values as a CPU tensor without gradients, with at least one dimension."""
    try:
        tensor = _as_tensor(column)
        if not tensor.ndim or tensor.layout != torch.strided:
            raise TypeError("it is a single value" if not tensor.ndim else "it is sparse")
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} cannot become a tensor with a row for each sample",
            why=" ".join(str(error).split())[:300],
            do="give numbers of one shape in every row; texts and rows of different lengths go into a list "
            "of dictionaries, with a `collate` in the task",
        ) from error
    return tensor


def _as_tensor(column: Any) -> torch.Tensor:
    if isinstance(column, torch.Tensor):
        return column.detach().cpu()
    if hasattr(column, "__array__"):
        array = np.asarray(column)
        # PyTorch reads neither foreign byte orders nor arrays that run backwards.
        array = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
        with warnings.catch_warnings():
            # Columns of pandas cannot be written to, and nothing here writes to them.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.as_tensor(array)
    if isinstance(column, (str, bytes)) or not hasattr(column, "__iter__"):
        raise TypeError(f"it is a single {type(column).__name__}")
    values = list(column)
    if values and isinstance(values[0], torch.Tensor):
        return torch.stack([value.detach().cpu() for value in map(torch.as_tensor, values)])
    if values and hasattr(values[0], "__array__"):
        return _as_tensor(np.stack(values))
    return torch.as_tensor(values)


def _as_text(row: Any) -> str:
    """A row, the same for the same values in every process; objects without values are their types."""
    return json.dumps(
        dict(row),
        default=lambda value: value.tolist() if hasattr(value, "tolist") else type(value).__name__,
        skipkeys=True,
    )


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Rows may be changed at random when they are read; here they are so in the same way each time."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
