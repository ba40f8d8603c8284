"""Which rows an update learns from: each once an epoch, whatever the passes, and the same ones every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from snugtune.data.batching import EvaluationPasses, Examples, Updates, cut_passes, epoch_order


class Table:
    """Rows that know their number and their length."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, keys: list[int], /) -> list[dict[str, Any]]:
        assert all(type(key) is int for key in keys)
        return [{"row": key, "length": int(self.lengths[key])} for key in keys]


def collate(rows: Any) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in ("row", "length")}


def examples(rows: int, seed: int = 0) -> Examples:
    lengths = np.random.default_rng(seed).integers(1, 40, rows)
    return Examples(Table(lengths), lengths)


def make(rows: int, **settings: int) -> Updates:
    defaults = {"batch_size": 8, "passes": 3, "seed": 5, "epochs": 2}
    return Updates(examples(rows), collate, **{**defaults, **settings})


def rows_in(update: list[dict[str, torch.Tensor]]) -> list[int]:
    return [int(row) for batch in update for row in batch["row"]]


@given(
    rows=st.integers(1, 200),
    batch_size=st.integers(1, 70),
    passes=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    epochs=st.integers(1, 3),
)
def test_every_row_is_used_exactly_once_in_each_epoch(rows, batch_size, passes, seed, epochs):
    updates = make(rows, batch_size=batch_size, passes=passes, seed=seed, epochs=epochs)
    done = [updates[number] for number in range(len(updates))]
    assert len(done) == epochs * updates.per_epoch
    for epoch in range(epochs):
        part = done[epoch * updates.per_epoch : (epoch + 1) * updates.per_epoch]
        assert sorted(row for update in part for row in rows_in(update)) == list(range(rows))
        sizes = [len(rows_in(update)) for update in part]
        assert sizes[:-1] == [batch_size] * (len(part) - 1)
        for update, size in zip(part, sizes, strict=True):
            assert len(update) == min(passes, size)
            counts = [len(batch["row"]) for batch in update]
            assert max(counts) - min(counts) <= 1
            assert counts[0] == max(counts)


@given(rows=st.integers(1, 120), batch_size=st.integers(1, 60), passes=st.integers(1, 9))
def test_passes_go_from_the_longest_to_the_shortest_rows(rows, batch_size, passes):
    updates = make(rows, batch_size=batch_size, passes=passes)
    for number in range(len(updates)):
        lengths = [int(length) for batch in updates[number] for length in batch["length"]]
        assert lengths == sorted(lengths, reverse=True)


@given(rows=st.integers(1, 120), batch_size=st.integers(1, 60), passes=st.integers(1, 9))
def test_the_number_of_passes_changes_nothing_about_the_rows_of_an_update(rows, batch_size, passes):
    one, many = make(rows, batch_size=batch_size, passes=1), make(rows, batch_size=batch_size, passes=passes)
    for number in range(len(one)):
        assert rows_in(one[number]) == rows_in(many[number])


@given(rows=st.integers(2, 300), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 50))
def test_the_order_is_a_function_of_seed_and_epoch(rows, seed, epoch):
    order = epoch_order(rows, seed, epoch).tolist()
    np.random.default_rng().random(3)
    epoch_order.cache_clear()
    assert epoch_order(rows, seed, epoch).tolist() == order


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    assert epoch_order(10, 42, 0).tolist() == [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]
    assert len({tuple(epoch_order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}) == 100


def test_any_update_can_be_rebuilt_alone_and_in_any_order():
    forward = make(50, epochs=3)
    expected = [rows_in(forward[number]) for number in range(len(forward))]
    for number in (20, 0, 13, 7, 20):
        assert rows_in(make(50, epochs=3)[number]) == expected[number]


def test_rows_of_one_length_keep_their_order():
    lengths = np.array([3, 3, 9, 3, 9])
    parts = cut_passes(np.array([4, 1, 3, 0, 2]), lengths, 2)
    assert [part.tolist() for part in parts] == [[4, 2, 1], [3, 0]]


@given(rows=st.integers(1, 200), size=st.integers(1, 250))
def test_evaluation_uses_every_row_once_the_longest_first_in_bounded_passes(rows, size):
    data = examples(rows)
    passes = EvaluationPasses(data, collate, rows_per_pass=size)
    batches = [passes[number] for number in range(len(passes))]
    seen = [int(row) for batch in batches for row in batch["row"]]
    lengths = [int(length) for batch in batches for length in batch["length"]]
    assert sorted(seen) == list(range(rows))
    assert seen == passes.order.tolist()
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch["row"]) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert 1 <= len(batches[-1]["row"]) <= size


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_processes_see_the_same_batches(workers):
    updates, passes = make(50), EvaluationPasses(examples(50), collate, rows_per_pass=7)
    loaded = list(DataLoader(updates, batch_size=None, sampler=range(3, 14), num_workers=workers))
    assert [rows_in(update) for update in loaded] == [rows_in(updates[number]) for number in range(3, 14)]
    evaluated = list(DataLoader(passes, batch_size=None, num_workers=workers))
    for number, batch in enumerate(evaluated):
        assert {name: value.tolist() for name, value in batch.items()} == {
            name: value.tolist() for name, value in passes[number].items()
        }
    assert len(evaluated) == len(passes) == 8
