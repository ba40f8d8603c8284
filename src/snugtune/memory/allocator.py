"""A model of PyTorch's caching allocator: which blocks it hands out, and what it takes from the card.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp`, the same from PyTorch 2.6 to 2.14 on one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from snugtune.errors import HardwareError, UsageError
from snugtune.units import MiB, show_size

# Constants of the allocator, by their names there.
_MIN_BLOCK = 512  # kMinBlockSize: every size is rounded up to it
_SMALL_SIZE = 1 * MiB  # kSmallSize: the largest size that comes from the small pool
_SMALL_BUFFER = 2 * MiB  # kSmallBuffer: a segment of the small pool
_LARGE_BUFFER = 20 * MiB  # kLargeBuffer: a segment for sizes below kMinLargeAlloc
_MIN_LARGE_ALLOC = 10 * MiB  # kMinLargeAlloc
_ROUND_LARGE = 2 * MiB  # kRoundLarge: larger sizes have a segment of their own, rounded up to this
_SEGMENT_DISTANCE = 1 << 44  # addresses of different segments never touch


class DoesNotFit(HardwareError):
    """The limit would be passed even after every unused segment was given back.

    Args:
        size_bytes: What was asked for.
        allocated_bytes: In tensors at that moment.
        reserved_bytes: Taken from the card at that moment.
    """

    def __init__(self, size_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(
            f"{show_size(size_bytes)} more do not fit",
            why=f"{show_size(reserved_bytes)} are taken, {show_size(allocated_bytes)} of them by tensors",
            do="take smaller passes, checkpoint layers, or choose a larger card",
        )
        self.size_bytes = size_bytes
        self.allocated_bytes, self.reserved_bytes = allocated_bytes, reserved_bytes


@dataclass(eq=False, slots=True)
class Block:
    """A stretch of a segment: handed out, free, or (expandable segments) without memory behind it."""

    address: int
    size: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    used: bool = False
    mapped: bool = True
    start: int = 0  # address of the segment


@dataclass(eq=False)
class _Pool:
    small: bool
    # (size, address): best fit takes the smallest, the lowest among equals.
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)
    unmapped: list[int] = field(default_factory=list)  # addresses


def parse_settings(text: str) -> bool:
    """PYTORCH_CUDA_ALLOC_CONF -> whether segments are expandable; other settings are refused.

    Raises:
        UsageError: A setting whose effect is not modelled.
    """
    expandable = False
    for setting in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = setting.partition(":")
        if name.strip() == "expandable_segments" and value.strip().lower() in ("true", "false"):
            expandable = value.strip().lower() == "true"
        elif not (name.strip() == "backend" and value.strip() == "native"):
            raise UsageError(
                f"the allocator setting {setting!r} is not modelled",
                why="only expandable_segments:True and expandable_segments:False are, and backend:native",
                do="leave it out of the prediction, or measure on the card",
            )
    return expandable


class Allocator:
    """The caching allocator of one device and one stream.

    Args:
        expandable: Whether segments are expandable.
        limit_bytes: Most bytes that may be taken from the card, as `set_per_process_memory_fraction` sets
            it; None is no limit.
    """

    def __init__(self, *, expandable: bool = False, limit_bytes: int | None = None) -> None:
        self.expandable, self.limit_bytes = expandable, limit_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.retries = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._segments = 0

    def allocate(self, size_bytes: int) -> Block | None:
        """A block for a tensor; None for one without bytes.

        Raises:
            DoesNotFit: The limit would be passed, even after unused segments were given back.
        """
        if size_bytes <= 0:
            return None
        size = max(_MIN_BLOCK, -(-size_bytes // _MIN_BLOCK) * _MIN_BLOCK)
        pool = self._small if size <= _SMALL_SIZE else self._large
        block = self._take_free(pool, size) or self._take_new(pool, size)
        if block is None:
            self.retries += 1
            self.release_unused()
            block = self._take_new(pool, size)
        if block is None:
            raise DoesNotFit(size, self.allocated_bytes, self.reserved_bytes)
        self._split(block, size)
        block.used = True
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block | None) -> None:
        """Give a block back; it is kept for later tensors."""
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.used = False
        self._keep(self._merge(block))

    def release_unused(self) -> None:
        """Give back to the card what no tensor is in: `torch.cuda.empty_cache`."""
        for pool in (self._large, self._small):
            for size, address in list(pool.free):
                block = pool.blocks[address]
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._forget(block)
                    del pool.blocks[address]
                    self.reserved_bytes -= size

    # Free blocks

    def _keep(self, block: Block) -> None:
        insort(block.pool.free, (block.size, block.address))

    def _forget(self, block: Block) -> None:
        place = bisect_left(block.pool.free, (block.size, block.address))
        del block.pool.free[place]

    def _take_free(self, pool: _Pool, size: int) -> Block | None:
        place = bisect_left(pool.free, (size, 0))
        if place == len(pool.free):
            return None
        if self.expandable:
            place = self._prefer_those_that_cannot_grow(pool, place)
        _, address = pool.free.pop(place)
        return pool.blocks[address]

    def _prefer_those_that_cannot_grow(self, pool: _Pool, place: int) -> int:
        # A free block at the end of the mapped part counts with the size it could grow to.
        def could_be(at: int) -> int:
            block = pool.blocks[pool.free[at][1]]
            after = block.after
            return block.size + (after.size if after is not None and not after.mapped else 0)

        while place + 1 < len(pool.free):
            if could_be(place + 1) >= could_be(place):
                break
            place += 1
        return place

    def _split(self, block: Block, size: int) -> None:
        rest = block.size - size
        # Without expandable segments, a rest up to kSmallSize of a large block stays with it.
        if rest < _MIN_BLOCK or not (block.pool.small or self.expandable or rest > _SMALL_SIZE):
            return
        self._keep(self._cut(block, size))

    def _cut(self, block: Block, size: int) -> Block:
        """Shorten a block to a size, and return the rest of it as a new block."""
        rest = Block(
            block.address + size,
            block.size - size,
            block.pool,
            block,
            block.after,
            mapped=block.mapped,
            start=block.start,
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        block.pool.blocks[rest.address] = rest
        return rest

    def _merge(self, block: Block) -> Block:
        """Join a block that is in no list with its free neighbours, and return the whole."""
        before, after = block.before, block.after
        if before is not None and not before.used and before.mapped == block.mapped:
            self._unlist(before)
            block = self._join(before, block)
        if after is not None and not after.used and after.mapped == block.mapped:
            self._unlist(after)
            block = self._join(block, after)
        return block

    def _unlist(self, block: Block) -> None:
        if block.mapped:
            self._forget(block)
        else:
            block.pool.unmapped.remove(block.address)

    def _join(self, first: Block, second: Block) -> Block:
        del first.pool.blocks[second.address]
        first.size += second.size
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    # New memory

    def _may_reserve(self, size: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + size <= self.limit_bytes

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size

    def _take_new(self, pool: _Pool, size: int) -> Block | None:
        if size <= _SMALL_SIZE:
            segment = _SMALL_BUFFER
        elif size < _MIN_LARGE_ALLOC:
            segment = _LARGE_BUFFER
        else:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if not self._may_reserve(segment):
            return None
        if self.expandable:
            return self._grow(pool, size)
        self._reserve(segment)
        return self._new_segment(pool, segment)

    def _new_segment(self, pool: _Pool, size: int, *, mapped: bool = True) -> Block:
        self._segments += 1
        address = self._segments * _SEGMENT_DISTANCE
        block = Block(address, size, pool, mapped=mapped, start=address)
        pool.blocks[address] = block
        return block

    # Expandable segments: one stretch of addresses for each pool, with memory behind some of it.

    def _grow(self, pool: _Pool, size: int) -> Block | None:
        block = self._find_room(pool, size)
        if not block.mapped:
            if not self._map(block, size):
                return None
            block = self._merge(block)
        else:
            self._forget(block)
        while block.size < size:
            after = block.after
            if after is None or not self._map(after, size - block.size):
                self._keep(block)
                return None
            self._keep(block)
            block = self._merge(after)
        return block

    def _find_room(self, pool: _Pool, size: int) -> Block:
        """The first block with enough unused addresses, of which some may have memory already."""
        for address in pool.unmapped:
            block = pool.blocks[address]
            if block.before is not None and not block.before.used:
                block = block.before
            room, at = 0, block  # type: int, Block | None
            while at is not None and not at.used and room < size:
                room, at = room + at.size, at.after
            if room >= size:
                return block
        block = self._new_segment(pool, _SEGMENT_DISTANCE // 2, mapped=False)
        insort(pool.unmapped, block.address)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first bytes of a block without any, in whole pages of the pool."""
        page = _SMALL_BUFFER if block.pool.small else _LARGE_BUFFER
        size = min(block.size, -(-size // page) * page)  # blocks without memory begin at a page
        if not self._may_reserve(size):
            return False
        block.pool.unmapped.remove(block.address)
        if size < block.size:
            insort(block.pool.unmapped, self._cut(block, size).address)
        block.mapped = True
        self._reserve(size)
        return True

    def _unmap(self, block: Block) -> None:
        page = _SMALL_BUFFER if block.pool.small else _LARGE_BUFFER
        first = -(-(block.address - block.start) // page) * page + block.start
        last = (block.address + block.size - block.start) // page * page + block.start
        if last <= first:
            return
        self._forget(block)
        if block.address < first:
            whole, block = block, self._cut(block, first - block.address)
            self._keep(whole)
        if block.address + block.size > last:
            self._keep(self._cut(block, last - block.address))
        block.mapped = False
        self.reserved_bytes -= block.size
        block = self._merge(block)
        insort(block.pool.unmapped, block.address)
