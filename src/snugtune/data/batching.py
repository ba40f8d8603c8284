"""Which rows an update learns from, and how they are cut into passes.

Order is a function of (seed, epoch), so any update can be rebuilt at any time: a resumed run, a redone
update and any number of worker processes see the same rows.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


# Grouped batching sorts by length inside groups of this many updates: enough for little padding, few enough
# for an order that is still random.
_UPDATES_PER_GROUP = 50


_NEVER = np.iinfo(np.int64).max // 2  # a cost that nothing real has


@lru_cache(maxsize=2)
def _random_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def epoch_batches(
    lengths: np.ndarray, *, batch_size: int, batching: str, seed: int, epoch: int
) -> list[np.ndarray]:
    """The rows of each update of an epoch; the last update may have fewer.

    A pure function of its arguments.

    Args:
        lengths: Tokens of each row, [rows].
        batch_size: Samples of an update.
        batching: "random": who shares an update is random; "grouped": rows of like length share one.
        seed: Start of the random order.
        epoch: Number of the epoch, from 0.
    """
    order = _random_order(len(lengths), seed, epoch)
    starts = range(batch_size, len(order), batch_size)
    if batching == "random":
        return np.split(order, starts)
    groups = np.split(
        order, range(batch_size * _UPDATES_PER_GROUP, len(order), batch_size * _UPDATES_PER_GROUP)
    )
    order = np.concatenate([group[np.argsort(-lengths[group], kind="stable")] for group in groups])
    batches = np.split(order, starts)
    shuffled = np.random.default_rng([seed, epoch, 1]).permutation(len(batches))
    return [batches[number] for number in shuffled]


def cut_passes(
    row_numbers: np.ndarray,
    lengths: np.ndarray,
    *,
    passes: int | None,
    price_tokens: int,
    most_tokens: int | None = None,
    packed: bool = False,
) -> list[np.ndarray]:
    """Cut the rows of one update into passes, each padded only to its own longest row.

    The longest pass comes first, so that a batch that does not fit fails before work is spent on it.

    Args:
        row_numbers: The update's rows, [samples].
        lengths: Tokens of every row of the table, [rows].
        passes: So many passes of the same number of rows, or fewer when there are fewer rows. None takes the
            cut with the smallest cost: padded tokens of all passes, plus a price for each.
        price_tokens: What one more pass costs, in tokens that could be computed in its time.
        most_tokens: Positions that a pass may have, padding included, unless it is a single row; read where
            `passes` is None.
        packed: Whether padding costs nothing: then rows are cut for `most_tokens` alone.
    """
    by_length = _longest_first(row_numbers, lengths)
    if not len(by_length):
        return []
    if passes is not None:
        return np.array_split(by_length, min(passes, len(by_length)))
    if packed:
        return np.split(by_length, _even_cuts(lengths[by_length], most_tokens))
    return np.split(by_length, _cheapest_cuts(lengths[by_length], price_tokens, most_tokens))


def _longest_first(row_numbers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return row_numbers[np.argsort(-lengths[row_numbers], kind="stable")]


def _even_cuts(sizes: np.ndarray, most_tokens: int | None) -> list[int]:
    """Where to cut rows so that each part has about the same tokens, in as few parts as the limit allows."""
    total = int(sizes.sum())
    if most_tokens is None or total <= most_tokens:
        return []
    fewest = len(_full_cuts(sizes, most_tokens))
    # The smallest limit that does with as few parts makes them about equal.
    limits = range(-(-total // (fewest + 1)), most_tokens + 1)
    smallest = bisect_left(limits, True, key=lambda limit: len(_full_cuts(sizes, limit)) <= fewest)
    return _full_cuts(sizes, limits[smallest] if smallest < len(limits) else most_tokens)


def _full_cuts(sizes: np.ndarray, most_tokens: int) -> list[int]:
    """Cut where the next row would be too much."""
    cuts, tokens = [], 0
    for row, size in enumerate(sizes.tolist()):
        if tokens and tokens + size > most_tokens:
            cuts.append(row)
            tokens = 0
        tokens += size
    return cuts


def _cheapest_cuts(sizes: np.ndarray, price_tokens: int, most_tokens: int | None) -> list[int]:
    """Where to cut rows that are sorted by size, the largest first: dynamic programming over the last cut.

    The best cost up to `bounds[end]` is the smallest, over all earlier bounds, of the best cost up to there
    plus the rows between them times the first size among them, plus the price. Without a limit rows of one
    size stay together, so only the places where the size changes are bounds.
    """
    rows = len(sizes)
    changes = np.flatnonzero(np.diff(sizes)) + 1 if most_tokens is None else np.arange(1, rows)
    bounds = np.concatenate([[0], changes, [rows]])
    widths = sizes[bounds[:-1]]
    best = np.zeros(len(bounds), dtype=np.int64)
    cut_before = np.zeros(len(bounds), dtype=np.int64)
    for end in range(1, len(bounds)):
        positions = (bounds[end] - bounds[:end]) * widths[:end]
        costs = best[:end] + positions
        if most_tokens is not None:
            costs[:-1][positions[:-1] > most_tokens] = _NEVER
        cut_before[end] = start = int(costs.argmin())
        best[end] = costs[start] + price_tokens
    cuts: list[int] = []
    end = int(cut_before[-1])
    while end > 0:
        cuts.append(int(bounds[end]))
        end = int(cut_before[end])
    return cuts[::-1]


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
        by_length = _longest_first(self.rows_of(update), self.examples.lengths)
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
    processes each has its own passes.
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
