"""The model of the caching allocator, against its rules and against what was measured on a card."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snugtune.errors import UsageError
from snugtune.memory.allocator import Allocator, DoesNotFit, parse_settings
from snugtune.units import MiB


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 1, 10 * MiB, 10 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (19 * MiB + 512 * 1024, 20 * MiB, 20 * MiB),  # a rest of up to 1 MiB stays with a large block
        (33 * MiB, 34 * MiB, 34 * MiB),
    ],
)
def test_sizes_are_rounded_and_segments_taken(asked: int, allocated: int, reserved: int) -> None:
    allocator = Allocator()
    allocator.allocate(asked)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_nothing_needs_nothing() -> None:
    allocator = Allocator()
    assert allocator.allocate(0) is None
    allocator.free(None)
    assert allocator.reserved_bytes == 0


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = Allocator()
    large, small = allocator.allocate(100 * MiB), allocator.allocate(40 * MiB)
    allocator.free(large)
    allocator.free(small)
    taken = allocator.allocate(39 * MiB + 512 * 1024)
    assert taken is small
    assert allocator.reserved_bytes == 140 * MiB


def test_neighbours_are_joined_when_they_are_free() -> None:
    allocator = Allocator()
    parts = [allocator.allocate(4 * MiB) for _ in range(5)]
    assert allocator.reserved_bytes == 20 * MiB
    for part in parts:
        allocator.free(part)
    allocator.allocate(20 * MiB)
    assert allocator.reserved_bytes == 20 * MiB


def test_at_the_limit_unused_segments_are_given_back() -> None:
    allocator = Allocator(limit_bytes=100 * MiB)
    allocator.free(allocator.allocate(60 * MiB))
    allocator.allocate(80 * MiB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 80 * MiB)
    with pytest.raises(DoesNotFit) as error:
        allocator.allocate(30 * MiB)
    assert error.value.reserved_bytes == 80 * MiB


@pytest.mark.parametrize("expandable", [False, True])
def test_a_segment_in_use_is_not_given_back(expandable: bool) -> None:
    allocator = Allocator(expandable=expandable)
    allocator.allocate(2 * MiB)
    allocator.free(allocator.allocate(2 * MiB))
    allocator.release_unused()
    assert allocator.reserved_bytes == 20 * MiB


def test_expandable_segments_grow_in_place_of_new_ones() -> None:
    """What does not fit into free blocks of a classic pool fits where one stretch of addresses grows."""
    reserved = []
    for expandable in (False, True):
        allocator = Allocator(expandable=expandable)
        for size in (40, 60, 80, 100):
            allocator.free(allocator.allocate(size * MiB))
        reserved.append(allocator.reserved_bytes)
    assert reserved == [280 * MiB, 100 * MiB]


def test_expandable_segments_are_mapped_page_by_page() -> None:
    allocator = Allocator(expandable=True)
    allocator.allocate(33 * MiB)
    allocator.allocate(512)
    assert allocator.reserved_bytes == 40 * MiB + 2 * MiB
    assert allocator.allocated_bytes == 33 * MiB + 512  # rests are always split off


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 64 * MiB), min_size=1, max_size=40),
    order=st.randoms(use_true_random=False),
    expandable=st.booleans(),
)
def test_blocks_never_overlap_and_everything_comes_back(sizes, order, expandable) -> None:
    allocator = Allocator(expandable=expandable)
    held = []
    for size in sizes:
        held.append(allocator.allocate(size))
        if order.random() < 0.4:
            allocator.free(held.pop(order.randrange(len(held))))
        spans = sorted((block.address, block.address + block.size) for block in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated_bytes == sum(block.size for block in held) <= allocator.reserved_bytes
    for block in held:
        allocator.free(block)
    allocator.release_unused()
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0


def test_settings_are_read_or_refused() -> None:
    assert parse_settings("") is False
    assert parse_settings("backend:native, expandable_segments:True") is True
    with pytest.raises(UsageError, match="max_split_size_mb"):
        parse_settings("max_split_size_mb:64")
