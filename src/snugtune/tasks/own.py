"""A model of somebody's own: their module, their batches, their loss, through the same loop."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from snugtune.config import RunConfig
from snugtune.data.batching import Batch, Examples, Row, Rows
from snugtune.data.splits import split_rows
from snugtune.errors import DataError, ModelError, UsageError
from snugtune.tasks import Prepared, Task

_SHAPES = 'a dictionary of arrays of equal length ({"images": x, "labels": y}), or a data set of dictionaries'


class Columns:
    """Rows of arrays: column name -> [rows, ...].

    Raises:
        DataError: The arrays are not equally long.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = {name: torch.as_tensor(column) for name, column in columns.items()}
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                "the columns of the data are not equally long",
                why=", ".join(f"{name} has {length:,} rows" for name, length in lengths.items()),
                do="give each row a value in every column",
            )
        self._rows = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, number: int) -> Row:
        return {name: column[number] for name, column in self.columns.items()}

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [dict(self[number]) for number in numbers]


class _DataSet:
    """Any data set with a length and numbered rows."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        if hasattr(self.rows, "__getitems__"):
            return list(self.rows.__getitems__(numbers))
        return [self.rows[number] for number in numbers]


def check_task(task: Any, data: Any) -> None:
    """Refuse what is no task, or has no data.

    Raises:
        UsageError: It is none.
    """
    if not isinstance(task, Task):
        raise UsageError(
            f"task cannot be a {type(task).__name__}",
            why="it is the name of a task, or a snugtune.Task",
            do="give snugtune.Task(build_model=..., loss=...)",
        )
    if data is None:
        raise UsageError("data is not given", why="there is nothing to learn from", do=f"give {_SHAPES}")


def prepare(config: RunConfig, *, task: Task, data: Any, validation: Any = None) -> Prepared:
    """Check a person's own data, and put them into the shape of every other task's.

    Args:
        config: The run's configuration.
        task: The task.
        data: What to learn from: a dictionary of arrays, or a data set whose rows are dictionaries.
        validation: The same for what only measures; None sets a part of `data` aside.

    Raises:
        DataError, UsageError: The data have another shape, or too few rows.
    """
    train = _examples(data, task, "data")
    measured = train if validation is None else _examples(validation, task, "validation")
    notes = [f"{len(train):,} rows to learn from, {len(measured):,} rows to measure on"]
    if validation is None:
        train, measured = _set_aside(config, train)
        notes = [f"{len(train):,} rows to learn from, {len(measured):,} rows set aside to measure on"]
    return Prepared(
        task=dataclasses.replace(
            task, loss=_Checked(task.loss), collate=partial(_checked_batch, collate=task.collate)
        ),
        train=train,
        validation=measured,
        facts={
            "columns": sorted(train.rows.__getitems__([0])[0]),
            "label_names": [],
            "rows": {"train": len(train), "validation": len(measured)},
        },
        notes=notes,
    )


def digest_of(data: Any) -> str | None:
    """SHA-256 of a dictionary of arrays; None for other data, which may be too large to read at once."""
    if not isinstance(data, Mapping):
        return None
    digest = hashlib.sha256()
    for name, column in data.items():
        array = np.ascontiguousarray(torch.as_tensor(column).numpy())
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()


class _Checked:
    """A loss whose answer is looked at before it is used."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | float]:
        answer = self.loss(model, batch)
        if not (isinstance(answer, tuple) and len(answer) == 2 and getattr(answer[0], "ndim", 1) == 0):
            got = f"a {type(answer).__name__}"
            if isinstance(answer, torch.Tensor):
                got = f"one tensor of shape {list(answer.shape)}"
            raise ModelError(
                "the loss of the task must return two things: the sum of the losses, and how many there are",
                why=f"it returned {got}; a mean of each pass would weight the samples of small passes more",
                do='such as: return F.cross_entropy(answers, labels, reduction="sum"), len(labels)',
            )
        return answer


def _checked_batch(rows: Sequence[Row], *, collate: Any) -> Batch:
    batch = collate(rows)
    parts = batch.items() if isinstance(batch, Mapping) else [("batch", batch)]
    for name, part in parts:
        if not isinstance(part, torch.Tensor) or part.shape[:1] != (len(rows),):
            shape = f" of shape {list(part.shape)}" if isinstance(part, torch.Tensor) else ""
            raise DataError(
                f"a batch must be a dictionary of tensors with {len(rows)} rows each; {name!r} is not",
                why=f"it is a {type(part).__name__}{shape}",
                do="let `collate` of the task return such a dictionary",
            )
    return dict(batch)


def _examples(data: Any, task: Task, name: str) -> Examples:
    if isinstance(data, (str, bytes)) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise UsageError(
            f"{name} is {type(data).__name__}", why="a task of one's own has no reader", do=f"give {_SHAPES}"
        )
    rows: Rows = Columns(data) if isinstance(data, Mapping) else _DataSet(data)
    if not len(rows):
        raise DataError(f"{name} has no rows", why="there is nothing to learn from", do=f"give {_SHAPES}")
    first = rows.__getitems__([0])[0]
    if not isinstance(first, Mapping):
        raise UsageError(
            f"the first row of {name} is a {type(first).__name__}",
            why="a row has names",
            do=f"give {_SHAPES}",
        )
    lengths = np.ones(len(rows), dtype=np.int64)
    if task.length is not None:
        lengths = np.array([task.length(rows.__getitems__([number])[0]) for number in range(len(rows))])
    return Examples(rows, lengths)


def _set_aside(config: RunConfig, examples: Examples) -> tuple[Examples, Examples]:
    train, aside = split_rows(
        None,
        rows=len(examples),
        fraction=config.data.validation_fraction,
        seed=config.training.seed,
        kind="own",
    )
    return _part(examples, train), _part(examples, aside)


def _part(examples: Examples, numbers: np.ndarray) -> Examples:
    return Examples(_Part(examples.rows, numbers), examples.lengths[numbers])


class _Part:
    """Some rows of a table."""

    def __init__(self, rows: Rows, numbers: np.ndarray) -> None:
        self.rows, self.numbers = rows, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return self.rows.__getitems__(self.numbers[numbers].tolist())
