"""Which rows share an update, and how the rows of an update are cut into passes: numbers alone."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

import numpy as np

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
    by_length = longest_first(row_numbers, lengths)
    if not len(by_length):
        return []
    if passes is not None:
        return np.array_split(by_length, min(passes, len(by_length)))
    if packed:
        return np.split(by_length, _even_cuts(lengths[by_length], most_tokens))
    return np.split(by_length, _cheapest_cuts(lengths[by_length], price_tokens, most_tokens))


def longest_first(row_numbers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The same rows, the longest first; [rows]."""
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
