"""What kernels and libraries need on the card besides the tensors that go in and come out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from snugtune.memory.cuda import CudaCard
from snugtune.units import KiB

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.addmv.default,
    _aten.mv.default,
    _aten.dot.default,
}


class Kernels:
    """Bytes that kernels need, by operation."""

    def __init__(self, card: CudaCard) -> None:
        self.card = card

    def __call__(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any
    ) -> Iterator[tuple[int, str | None]]:
        if func in _PRODUCTS:
            # aten/src/ATen/cuda/CublasHandlePool.cpp: 4096 KiB * 8 on Hopper and later, :4096:2:16:8 before. Each
            # thread has a handle of its own, and the backward pass runs in another thread.
            thread = "forward" if torch._C._current_autograd_node() is None else "backward"
            size = 8 * 4096 * KiB if self.card.capability[0] >= 9 else 2 * 4096 * KiB + 8 * 16 * KiB
            yield size, f"cublas {thread}"
