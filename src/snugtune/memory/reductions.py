"""Buffers of CUDA's reductions: long sums are split over blocks of threads that meet in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from snugtune.memory.cuda import CudaCard

_WARP = 32
_MOST_THREADS = 512  # max_reduce_threads


def reduction_buffers(card: CudaCard, func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[int]:
    """Bytes of the partial results and of their semaphores; nothing where blocks do not have to meet.

    The rules are those of `setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh.

    Args:
        card: The card; its multiprocessors decide how far a sum is split.
        func, args, kwargs: The operation.
    """
    tensor = args[0]
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dims = given.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    reduced = {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))
    if not tensor.numel() or not tensor.dim():
        return
    config = _Config(tensor, reduced, card)
    if config.blocks > 1:
        size = _accumulated_bytes(tensor.dtype, func) * config.outputs * config.blocks
        yield size if config.within_block else size * config.width * config.vector
        yield 4 * config.grid


def _accumulated_bytes(dtype: torch.dtype, func: Any) -> int:
    if func._schema.name in ("aten::any", "aten::all"):
        return 1
    if dtype.is_floating_point:
        return 8 if dtype == torch.float64 else 4
    return 8


class _Config:
    """How the work of a reduction is divided."""

    def __init__(self, tensor: torch.Tensor, reduced: set[int], card: CudaCard) -> None:
        sizes, strides = tensor.shape, tensor.stride()
        inner = [(strides[dim], sizes[dim]) for dim in reduced if sizes[dim] > 1]
        outer = [
            (strides[dim], sizes[dim]) for dim in range(len(sizes)) if dim not in reduced and sizes[dim] > 1
        ]
        self.inputs = math.prod(size for _, size in inner)
        self.outputs = math.prod(size for _, size in outer)
        fastest = not outer or (bool(inner) and min(inner)[0] < min(outer)[0])
        first, second = (self.inputs, self.outputs) if fastest else (self.outputs, self.inputs)
        self.vector = 1
        if fastest and not outer and first > 128 and min(inner)[0] == 1:
            first //= 4
        elif not fastest and min(outer)[0] == 1:
            self.vector = math.gcd(4, min(outer)[1])
            first //= self.vector
        self._divide(first, second, fastest)
        self._split(card)

    def _divide(self, first: int, second: int, fastest: bool) -> None:
        most = _MOST_THREADS // self.vector
        first_power, second_power = _power(first, most), _power(second, most)
        width = min(first_power, _WARP)
        self.height = min(second_power, most // width)
        self.width = min(first_power, most // self.height)
        self.within_block = fastest
        self.step_input = self.width if fastest else 1
        self.step_output = 1 if fastest else self.width
        self.across_warps = self._values() >= min(self.height * 16, 256)
        if self.across_warps:
            self.step_input *= self.height
        else:
            self.step_output *= self.height

    def _values(self) -> int:
        return -(-self.inputs // self.step_input)

    def _split(self, card: CudaCard) -> None:
        self.grid = -(-(self.outputs // self.vector) // self.step_output)
        self.blocks = 1
        target = card.multiprocessors * (card.threads_per_multiprocessor // (self.width * self.height))
        values = self._values()
        if self.across_warps and values >= 256 and self.grid <= target:
            self.blocks = max(min(-(-target // self.grid), -(-values // 16)), -(-values // 256))


def _power(value: int, most: int) -> int:
    """The largest power of two that is not above value, at most `most`."""
    return most if value >= most else 1 << (max(value, 1).bit_length() - 1)
