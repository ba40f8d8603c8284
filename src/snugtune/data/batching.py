"""Which rows an update learns from, and how they are cut into passes.

Order is a function of (seed, epoch), so any update can be rebuilt at any time: a resumed run, a redone
update and any number of worker processes see the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

Batch = dict[str, "torch.Tensor"]
Row = Mapping[str, Any]


class Rows(Protocol):
    """A table of encoded rows, such as `datasets.Dataset`."""

    def __len__(self) -> int: ...

    def __getitems__(self, keys: list[int], /) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Examples:
    """Encoded rows and the length of each.

    Args:
        rows: The table.
        lengths: Tokens of each row, [rows].
    """

    rows: Rows
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)


@lru_cache(maxsize=2)
def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The random order of an epoch, [rows]."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


def cut_passes(row_numbers: np.ndarray, lengths: np.ndarray, passes: int) -> list[np.ndarray]:
    """Cut the rows of one update into passes of like lengths, the longest first.

    The longest pass comes first, so that a batch that does not fit fails before work is spent on it.

    Args:
        row_numbers: The update's rows, [samples].
        lengths: Tokens of every row of the table, [rows].
        passes: How many passes; fewer when there are fewer rows.
    """
    by_length = row_numbers[np.argsort(-lengths[row_numbers], kind="stable")]
    return np.array_split(by_length, min(passes, len(by_length)))


class Updates:
    """The updates of a run, in order: number `u` is a list of collated passes.

    A map-style data set for `torch.utils.data.DataLoader`.

    Args:
        examples: The training data.
        collate: Rows -> one padded batch.
        batch_size: Samples of an update; the last one of an epoch may have fewer.
        passes: Passes of an update.
        seed: Start of the random order.
        epochs: How often each row is used.
    """

    def __init__(
        self,
        examples: Examples,
        collate: Callable[[Sequence[Row]], Batch],
        *,
        batch_size: int,
        passes: int,
        seed: int,
        epochs: int,
    ) -> None:
        self.examples, self.collate = examples, collate
        self.batch_size, self.passes, self.seed = batch_size, passes, seed
        self.per_epoch = math.ceil(len(examples) / batch_size)
        self.total = self.per_epoch * epochs

    def __len__(self) -> int:
        return self.total

    def rows_of(self, update: int) -> np.ndarray:
        """The rows that update number `update` (from 0) learns from, [samples]."""
        epoch, position = divmod(update, self.per_epoch)
        order = epoch_order(len(self.examples), self.seed, epoch)
        return order[position * self.batch_size : (position + 1) * self.batch_size]

    def __getitem__(self, update: int) -> list[Batch]:
        passes = cut_passes(self.rows_of(update), self.examples.lengths, self.passes)
        return collate_passes(self.examples, passes, self.collate)


def collate_passes(
    examples: Examples, passes: Sequence[np.ndarray], collate: Callable[[Sequence[Row]], Batch]
) -> list[Batch]:
    """One padded batch for each list of row numbers."""
    return [collate(examples.rows.__getitems__(numbers.tolist())) for numbers in passes]


class EvaluationPasses:
    """All rows once, in passes of at most `rows_per_pass` rows of like length, the longest first.

    A map-style data set; each item is one padded batch. `order` says which rows the passes hold.
    """

    def __init__(
        self, examples: Examples, collate: Callable[[Sequence[Row]], Batch], *, rows_per_pass: int
    ) -> None:
        self.examples, self.collate = examples, collate
        self.order = np.argsort(-examples.lengths, kind="stable")
        self.passes = np.split(self.order, range(rows_per_pass, len(self.order), rows_per_pass))

    def __len__(self) -> int:
        return len(self.passes)

    def __getitem__(self, number: int) -> Batch:
        return collate_passes(self.examples, [self.passes[number]], self.collate)[0]
