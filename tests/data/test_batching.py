"""Which rows an update learns from: each once an epoch, whatever the passes, and the same ones every time."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from snugtune.data.batching import EvaluationPasses, Examples, Plan, Updates
from snugtune.data.cutting import cut_passes, epoch_batches


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


def make(rows: int, *, seed: int = 5, epochs: int = 2, **plan: Any) -> Updates:
    whole = Plan(**{"batch_size": 8, "passes": 3, **plan})
    return Updates(examples(rows), collate, plan=whole, seed=seed, epochs=epochs)


def order(rows: int, seed: int, epoch: int, batching: str = "random") -> list[int]:
    lengths = examples(rows).lengths
    batches = epoch_batches(lengths, batch_size=7, batching=batching, seed=seed, epoch=epoch)
    return np.concatenate(batches).tolist()


def rows_in(update: list[dict[str, torch.Tensor]]) -> list[int]:
    return [int(row) for batch in update for row in batch["row"]]


@pytest.mark.parametrize("batching", ["random", "grouped"])
@given(
    rows=st.integers(1, 200),
    batch_size=st.integers(1, 70),
    passes=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    epochs=st.integers(1, 3),
)
def test_every_row_is_used_exactly_once_in_each_epoch(batching, rows, batch_size, passes, seed, epochs):
    plan = {"batch_size": batch_size, "passes": passes, "batching": batching}
    updates = make(rows, seed=seed, epochs=epochs, **plan)
    done = [updates[number] for number in range(len(updates))]
    assert len(done) == epochs * updates.per_epoch
    for epoch in range(epochs):
        part = done[epoch * updates.per_epoch : (epoch + 1) * updates.per_epoch]
        assert sorted(row for update in part for row in rows_in(update)) == list(range(rows))
        sizes = [len(rows_in(update)) for update in part]
        assert sorted(sizes, reverse=True)[:-1] == [batch_size] * (len(part) - 1)
        assert batching == "grouped" or sizes[:-1] == [batch_size] * (len(part) - 1)
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
    before = order(rows, seed, epoch)
    np.random.default_rng().random(3)
    order(rows, seed, epoch + 1), order(rows + 1, seed, epoch)
    assert order(rows, seed, epoch) == before


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    assert order(10, 42, 0) == [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]
    assert len({tuple(order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}) == 100


def test_any_update_can_be_rebuilt_alone_and_in_any_order():
    forward = make(50, epochs=3)
    expected = [rows_in(forward[number]) for number in range(len(forward))]
    for number in (20, 0, 13, 7, 20):
        assert rows_in(make(50, epochs=3)[number]) == expected[number]


def test_rows_of_one_length_keep_their_order():
    lengths = np.array([3, 3, 9, 3, 9])
    parts = cut_passes(np.array([4, 1, 3, 0, 2]), lengths, passes=2, price_tokens=0)
    assert [part.tolist() for part in parts] == [[4, 2, 1], [3, 0]]


def cost(parts: list[np.ndarray], lengths: np.ndarray, price: int) -> int:
    """Positions that are computed, padding included, and the price of each pass."""
    return sum(len(part) * int(lengths[part].max()) + price for part in parts)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    price=st.integers(0, 100),
    most=st.none() | st.integers(1, 200),
)
def test_no_other_cut_is_cheaper_than_the_one_by_tokens(sizes, price, most):
    lengths = np.array(sizes)
    parts = cut_passes(np.arange(len(sizes)), lengths, passes=None, price_tokens=price, most_tokens=most)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(sizes)))
    by_length = np.argsort(-lengths, kind="stable")
    every_cut = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(sizes)), count) for count in range(len(sizes))
    )
    allowed = [
        cut
        for cut in (np.split(by_length, places) for places in every_cut)
        if most is None or all(len(part) == 1 or cost([part], lengths, 0) <= most for part in cut)
    ]
    assert cost(parts, lengths, price) == min(cost(cut, lengths, price) for cut in allowed)
    assert most is None or all(len(part) == 1 or cost([part], lengths, 0) <= most for part in parts)


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=40), most=st.integers(1, 300) | st.none())
def test_packed_passes_have_about_the_same_tokens_and_no_more_than_allowed(sizes, most):
    lengths = np.array(sizes)
    rows = np.arange(len(sizes))
    parts = cut_passes(rows, lengths, passes=None, price_tokens=50, most_tokens=most, packed=True)
    assert sorted(np.concatenate(parts).tolist()) == rows.tolist()
    assert all(len(part) for part in parts)
    if most is None:
        assert len(parts) == 1
    else:
        assert all(len(part) == 1 or lengths[part].sum() <= most for part in parts)
        assert len(parts) <= 2 * lengths.sum() / most + 2


def test_where_a_pass_is_dear_there_is_one_and_where_it_is_free_nothing_is_padded():
    lengths = examples(100).lengths
    rows = np.arange(100)
    assert len(cut_passes(rows, lengths, passes=None, price_tokens=10**6)) == 1
    free = cut_passes(rows, lengths, passes=None, price_tokens=0)
    assert cost(free, lengths, 0) == lengths.sum()
    assert len(cut_passes(rows, np.full(100, 9), passes=None, price_tokens=1)) == 1


def test_thousands_of_rows_in_one_update_are_cut_at_once():
    lengths = np.random.default_rng(0).integers(1, 512, 5000)
    parts = cut_passes(np.arange(5000), lengths, passes=None, price_tokens=1000)
    assert sum(map(len, parts)) == 5000
    assert cost(parts, lengths, 0) < 1.1 * lengths.sum()


def test_grouped_updates_hold_rows_of_like_length_and_are_in_random_order():
    data = examples(4000)
    batches = epoch_batches(data.lengths, batch_size=16, batching="grouped", seed=1, epoch=0)
    padded = cost(batches, data.lengths, 0)
    alone = cost(
        epoch_batches(data.lengths, batch_size=16, batching="random", seed=1, epoch=0), data.lengths, 0
    )
    assert padded < 1.05 * data.lengths.sum() < 1.5 * data.lengths.sum() < alone
    longest = [int(data.lengths[batch].max()) for batch in batches]
    assert longest != sorted(longest, reverse=True)
    other = epoch_batches(data.lengths, batch_size=16, batching="grouped", seed=1, epoch=1)
    assert {tuple(batch) for batch in batches} != {tuple(batch) for batch in other}


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


def test_random_numbers_of_a_collate_follow_from_seed_and_update_alone():
    import random

    import torch

    def drawing(rows):
        return {"x": torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])}

    def draw(seed: int, update: int, **more: int) -> list[float]:
        updates = Updates(examples(40), drawing, plan=Plan(batch_size=8), seed=seed, epochs=1, **more)
        torch.rand(3), random.random(), np.random.rand()
        return updates[update][0]["x"].tolist()

    assert draw(1, 2) == draw(1, 2)
    others = [draw(1, 3), draw(2, 2), draw(1, 2, rank=1, processes=2)]
    assert len({tuple(numbers) for numbers in [draw(1, 2), *others]}) == 4
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(()).item(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    Updates(examples(40), drawing, plan=Plan(batch_size=8), seed=1, epochs=1)[0]
    assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected
