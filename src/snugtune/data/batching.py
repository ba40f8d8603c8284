"""Which rows an update learns from, and how they are cut into passes.

Order is a function of (seed, epoch), so any update can be rebuilt at any time: a resumed run, a redone
update and any number of worker processes see the same rows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from snugtune.data.cutting import cut_passes, epoch_batches, longest_first

if TYPE_CHECKING:
    import torch

Batch = dict[str, "torch.Tensor"]
Row = Mapping[str, Any]


class Rows(Protocol):
    """A table of encoded rows, such as `datasets.Dataset`."""

    def __len__(self) -> int: ...

    def __getitems__(self, keys: list[int], /) -> Sequence[Row]: ...


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How rows become updates and passes.

    Args:
        batch_size: Samples of an update.
        batching: Who shares an update: "random" or "grouped" (rows of like length).
        passes: Passes of an update; None cuts by tokens.
        price_tokens: What a pass costs beside its tokens, in tokens.
        most_tokens: Positions that a pass cut by tokens may have; None is no limit.
        packed: Whether padding costs nothing.
    """

    batch_size: int
    batching: str = "random"
    passes: int | None = None
    price_tokens: int = 0
    most_tokens: int | None = None
    packed: bool = False


class Updates:
    """The updates of a run, in order: number `u` is a list of collated passes.

    A map-style data set for `torch.utils.data.DataLoader`.

    Args:
        examples: The training data.
        collate: Rows -> one padded batch.
        plan: How rows become updates and passes.
        seed: Start of the random order.
        epochs: How often each row is used.
        rank: Number of this process, from 0, among those that share each update.
        processes: How many they are.

    A run that continued with other settings has perhaps done more updates, or fewer (then it is less than 0),
    than its plan has up to the same place in the data: it is `ahead` by so many.
    """

    def __init__(
        self,
        examples: Examples,
        collate: Callable[[Sequence[Row]], Batch],
        *,
        plan: Plan,
        seed: int,
        epochs: int,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self.examples, self.collate, self.plan, self.seed = examples, collate, plan, seed
        self.rank, self.processes = rank, processes
        self.per_epoch = math.ceil(len(examples) / plan.batch_size)
        self.planned = self.per_epoch * epochs
        self.ahead = 0
        self._epoch: tuple[int, list[np.ndarray]] | None = None

    @property
    def total(self) -> int:
        """The updates of the whole run: those planned, and those by which it is ahead of its plan."""
        return self.planned + self.ahead

    def __len__(self) -> int:
        return self.total

    def place_after(self, update: int) -> tuple[int, int]:
        """Where in the data a run is after `update` updates: whole epochs, and rows of the next one."""
        epoch, position = divmod(update - self.ahead, self.per_epoch)
        return epoch, position * self.plan.batch_size

    def go_on(self, *, update: int, epoch: int, rows: int) -> None:
        """Continue at a place in the data, which a run with other settings may have reached in more updates.

        Args:
            update: Updates done.
            epoch: Epochs that are over.
            rows: Rows of the next one that are over. A part of an update is done again.
        """
        done = epoch * self.per_epoch + min(rows // self.plan.batch_size, self.per_epoch)
        self.ahead = update - min(done, self.planned)

    def rows_of(self, update: int) -> np.ndarray:
        """The rows that update number `update` (from 0) learns from, [samples]."""
        epoch, position = divmod(update - self.ahead, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            batches = epoch_batches(
                self.examples.lengths,
                batch_size=self.plan.batch_size,
                batching=self.plan.batching,
                seed=self.seed,
                epoch=epoch,
            )
            self._epoch = epoch, batches
        return self._epoch[1][position]

    def __getitem__(self, update: int) -> list[Batch]:
        with _seeded(self.seed, update, self.rank):
            return self._collated(update)

    def _collated(self, update: int) -> list[Batch]:
        return collate_passes(self.examples, self.passes_of(update), self.collate)

    def passes_of(self, update: int) -> list[np.ndarray]:
        """The rows of each pass of an update in this process."""
        # Dealt out by length, every process gets about the same work; the last update may leave some without.
        by_length = longest_first(self.rows_of(update), self.examples.lengths)
        return cut_passes(
            by_length[self.rank :: self.processes],
            self.examples.lengths,
            passes=self.plan.passes,
            price_tokens=self.plan.price_tokens,
            most_tokens=self.plan.most_tokens,
            packed=self.plan.packed,
        )


@contextmanager
def _seeded(*parts: int) -> Iterator[None]:
    """Random numbers that a data set or a collate draws follow from `parts` alone, in any process."""
    import torch

    seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])


def collate_passes(
    examples: Examples, passes: Sequence[np.ndarray], collate: Callable[[Sequence[Row]], Batch]
) -> list[Batch]:
    """One padded batch for each list of row numbers."""
    return [collate(examples.rows.__getitems__(numbers.tolist())) for numbers in passes]


class EvaluationPasses:
    """All rows once, in passes of at most `rows_per_pass` rows of like length, the longest first.

    A map-style data set; each item is one padded batch. `order` says which rows the passes hold. Of several
    processes each has its own passes, and none has less than `fewest`.
    """

    def __init__(
        self,
        examples: Examples,
        collate: Callable[[Sequence[Row]], Batch],
        *,
        rows_per_pass: int,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self.examples, self.collate = examples, collate
        by_length = np.argsort(-examples.lengths, kind="stable")
        passes = np.split(by_length, range(rows_per_pass, len(by_length), rows_per_pass))
        self.passes = passes[rank::processes]
        self.fewest = len(passes) // processes
        self.order = np.concatenate([by_length[:0], *self.passes])

    def __len__(self) -> int:
        return len(self.passes)

    def __getitem__(self, number: int) -> Batch:
        with _seeded(number):
            return collate_passes(self.examples, [self.passes[number]], self.collate)[0]


def count_tokens(passes: Sequence[Batch], *, packed: bool) -> list[int]:
    """Tokens without padding, and positions with it; zeros where batches have no attention mask.

    Args:
        passes: Batches.
        packed: Whether their padding is left out.
    """
    masks = [batch["attention_mask"] for batch in passes if "attention_mask" in batch]
    masks = [mask for mask in masks if mask.ndim == 2 and not mask.is_floating_point()]
    tokens = sum(int((mask != 0).sum()) for mask in masks)
    return [tokens, tokens if packed else sum(mask.numel() for mask in masks)]
