"""What kernels and libraries need on the card besides the tensors that go in and come out.

Sizes follow PyTorch's sources, or were measured on an H200 with PyTorch 2.11 and cuDNN 9.19 by
`benchmarks/operator_probes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from snugtune.memory.convolutions import convolution, convolution_backward
from snugtune.memory.cuda import CudaCard
from snugtune.memory.reductions import reduction_buffers
from snugtune.memory.scratch import Lasting, Need, OnHost, Result
from snugtune.units import KiB

_aten = torch.ops.aten


class Kernels:
    """The needs of each operation, in the order in which its kernels ask the allocator."""

    def __init__(self, card: CudaCard) -> None:
        self.card = card

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Iterator[Need] | None:
        """What to note for an operation; None where only its results are new."""
        rule = _RULES.get(func)
        return None if rule is None else rule(Call(self.card, func, args, kwargs, result))


@dataclass(frozen=True)
class Call:
    """One call of an operation on a card."""

    card: CudaCard
    func: Any
    args: Any
    kwargs: dict[str, Any]
    result: Any


def _product(call: Call) -> Iterator[Need]:
    # aten/src/ATen/cuda/CublasHandlePool.cpp: 4096 KiB * 8 on Hopper and later, :4096:2:16:8 before. Each
    # thread has a handle of its own, and the backward pass runs in another thread.
    thread = "forward" if torch._C._current_autograd_node() is None else "backward"
    yield Result(0)
    size = 8 * 4096 * KiB if call.card.capability[0] >= 9 else 2 * 4096 * KiB + 8 * 16 * KiB
    yield Lasting(size, f"cublas {thread}")
    if call.func is _aten.addmm.default and call.args[0].dim() == 1:
        # A bias is added by cuBLASLt, which has 1,024 KiB of its own for each thread.
        yield Lasting(1024 * KiB, f"cublasLt {thread}")


def _dropout(call: Call) -> Iterator[Need]:
    yield Result(1)  # the mask comes first
    yield Result(0)


def _reduction(call: Call) -> Iterator[Need]:
    yield Result(0)
    yield from reduction_buffers(call.card, call.func, call.args, call.kwargs)


def _safe_softmax(call: Call) -> Iterator[Need]:
    # Rows of nothing but minus infinity become zeros: SoftMax.cpp compares, and asks for each row.
    elements, width = call.result.numel(), call.result.shape[call.args[1]]
    yield from (Result(0), elements, elements // width, 4)


def _foreach_norm(call: Call) -> Iterator[Need]:
    # ForeachReduceOp.cu: one number for each chunk of 65,536 elements of the largest tensor.
    chunks = max((-(-tensor.numel() // 65536) for tensor in call.args[0]), default=0)
    yield len(call.args[0]) * chunks * 4


def _embedding(call: Call) -> Iterator[Need]:
    indices = call.args[1]
    if not indices.is_contiguous():
        yield (
            indices.numel() * indices.element_size()
        )  # one row of indices, in aten/src/ATen/native/Embedding.cpp


def _embedding_backward(call: Call) -> Iterator[Need]:
    gradient, indices, rows = call.args[:3]
    count = indices.numel()
    at = 0
    if not indices.is_contiguous():
        yield 8 * count
        at = 1
    if count <= 3072:  # aten/src/ATen/native/cuda/Embedding.cu: few indices take a kernel that needs no order
        yield Result(0)
        return
    yield from (8 * count, 8 * count, 8 * count)
    yield 16 * count + count // 4 + 16895  # cub's radix sort, as measured
    yield from (~(at + 3), ~(at + 2))
    yield Result(0)
    # EmbeddingBackwardKernel.cu: rows are summed in parts of 10, of which there may be so many.
    segments = min(count, rows)
    parts = count // 10 + segments
    yield from (8 * count, 8, 8 * count, 1279, ~(at + 7), ~(at + 6))
    yield from (8 * segments, 8 * segments, 1279, ~(at + 10), 8, 8 * parts)
    # Measured: sums of parts are needed with 16 indices for a row, not with 64.
    yield 4 * parts * gradient.shape[-1] if count <= 32 * rows else 8 * parts


def _efficient_attention(call: Call) -> Iterator[Need]:
    yield from (Result(0), Result(1), OnHost(2), OnHost(3))
    value = call.args[2]
    if value.shape[-1] > 128 and value.element_size() == 2:
        yield 4 * call.result[0].numel()  # mem_eff_attention/kernel_forward.h: sums in fp32


def _efficient_attention_backward(call: Call) -> Iterator[Need]:
    """attention_backward.cu, and the workspace of mem_eff_attention/kernel_backward.h."""
    query, key, value = call.args[1:4]
    batch, heads, queries, width = query.shape
    keys = key.shape[-2]
    half = query.element_size() == 2
    rows = 4 * batch * heads * queries
    yield from (Result(0), Result(1), Result(2), Result(3))
    widest = max(width, value.shape[-1])
    large_blocks = half and call.card.capability[0] >= 8 and 64 < widest <= 128
    block = 128 if large_blocks and call.card.capability not in ((8, 6), (8, 9)) else 64
    columns = 64 if widest <= 64 else 128
    # fp32 sums of the gradient of the queries, in tiles with a lock each; needed since keys are split.
    floats = -(-queries // block) * -(-width // columns) * (block * columns + 4)
    if half and widest > block:  # sums of the others do not fit into registers
        splits = max(1, min(-(-keys // 64), 200 // (batch * heads)))
        floats += splits * 64 * (-(-width // 64) * 64 + -(-value.shape[-1] // 64) * 64)
    if half:
        yield rows
    else:
        yield from (rows * value.shape[-1], rows, rows, ~1, ~0)
    yield batch * heads * (-(-floats // 4) * 4) * 4


def _flash_attention(call: Call) -> Iterator[Need]:
    yield from (Result(0), Result(1))


def _flash_attention_backward(call: Call) -> Iterator[Need]:
    query = call.args[1]
    batch, heads, queries, width = query.shape
    whole = -(-queries // 128) * 128
    yield from (Result(0), Result(1), Result(2))
    yield 4 * batch * heads * whole
    yield 4 * batch * heads * whole * (-(-width // 32) * 32)


def _cudnn_attention(call: Call) -> Iterator[Need]:
    # Seed and offset lie on the card, and are kept for the backward pass.
    seed, offset = (index for index, part in enumerate(call.result) if _is_seed(part))
    yield from (Result(seed), Result(offset), Result(0))
    yield Result(1) if call.args[4] else OnHost(1)  # no log-sum-exp without a backward pass
    yield 256


def _is_seed(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype == torch.int64


def _cudnn_attention_backward(call: Call) -> Iterator[Need]:
    query = call.args[1]
    yield from (Result(0), Result(1), Result(2))
    yield 4 * query.numel() + 4 * query.numel() // query.shape[-1] + 256


def _convolution(call: Call) -> Iterator[Need]:
    yield Result(0)
    yield from convolution(call.args)


def _convolution_backward(call: Call) -> Iterator[Need]:
    yield from convolution_backward(call.args, call.result)


def _scan(call: Call) -> Iterator[Need]:
    yield Result(0)
    yield 1279 + call.args[0].numel() // 64  # cub's scan, as measured


def _sort(call: Call) -> Iterator[Need]:
    count = call.args[0].numel()
    yield from (Result(0), Result(1))
    if count > 4096:
        yield from (8 * count, 12 * count + count // 5 + 9000)  # positions, and cub's radix sort, as measured


def _batch(*operations: str) -> Iterator[Any]:
    for operation in operations:
        name, _, overload = operation.partition(".")
        packet = getattr(_aten, name, None)
        if packet is not None and (overload or "default") in packet.overloads():
            yield getattr(packet, overload or "default")


_RULES: dict[Any, Callable[[Call], Iterator[Need]]] = {
    operation: rule
    for rule, operations in (
        (_product, "mm addmm bmm baddbmm addmv mv dot"),
        (_dropout, "native_dropout"),
        (_safe_softmax, "_safe_softmax"),
        (_foreach_norm, "_foreach_norm.Scalar"),
        (
            _reduction,
            "sum sum.dim_IntList mean mean.dim any any.dim all all.dim linalg_vector_norm amax amin max min "
            "prod norm.ScalarOpt_dim norm.Scalar",
        ),
        (_embedding, "embedding"),
        (_embedding_backward, "embedding_dense_backward"),
        (_efficient_attention, "_scaled_dot_product_efficient_attention"),
        (_efficient_attention_backward, "_scaled_dot_product_efficient_attention_backward"),
        (_flash_attention, "_scaled_dot_product_flash_attention"),
        (_flash_attention_backward, "_scaled_dot_product_flash_attention_backward"),
        (_cudnn_attention, "_scaled_dot_product_cudnn_attention"),
        (_cudnn_attention_backward, "_scaled_dot_product_cudnn_attention_backward"),
        (_convolution, "convolution"),
        (_convolution_backward, "convolution_backward"),
        (_scan, "cumsum cumprod"),
        (_sort, "sort sort.stable"),
    )
    for operation in _batch(*operations.split())
}
