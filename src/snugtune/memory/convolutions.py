"""Workspaces of cuDNN's convolutions.

Most of its kernels want channels in the last dimension. For tensors that have them in the second, as
PyTorch's usually do, it rearranges input, output and weights in its workspace. Filters of one point have
kernels that read such tensors as they are, if the points of a channel can be read 16 bytes at a time.
Measured on an H200 with cuDNN 9.19; elsewhere the algorithms may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from snugtune.memory.scratch import Need, Result


def convolution(args: Any) -> Iterator[Need]:
    """Needs of `convolution` after its result."""
    tensor, weight, _, stride, padding, dilation, transposed, _, groups = args
    if _is_depthwise(tensor, weight, groups):
        return
    if _reads_as_it_is(tensor, weight, stride, padding):
        yield 400
    elif weight[0, 0].numel() == 1 and min(stride) > 1 and tensor.element_size() == 4:
        # Measured: the output of such a filter, which leaves out points, is written as it has to be.
        yield (tensor.numel() + weight.numel()) * 4 + 16
    elif not _few_channels(tensor, weight):
        yield _rearranged(
            tensor, weight, _output_elements(tensor, weight, stride, padding, dilation, transposed)
        )


def convolution_backward(args: Any, result: Any) -> Iterator[Need]:
    """Needs of `convolution_backward` with its results: the gradients of input, weights and bias."""
    gradient, tensor, weight, _, stride, padding, _, _, _, groups, _ = args
    plain = _reads_as_it_is(tensor, weight, stride, padding)
    depthwise, few = _is_depthwise(tensor, weight, groups), _few_channels(tensor, weight)
    copies = _rearranged(tensor, weight, gradient.numel())
    births = 0
    if result[0] is not None:
        yield Result(0)
        if not depthwise and not few:
            yield 400 if plain else copies
            yield ~births
            births += 1
    if result[1] is not None:
        yield Result(1)
        if plain:
            yield 4 * tensor.shape[0] * weight.numel() + 400  # a product for each sample, added up afterwards
            yield ~births
        elif not depthwise and not few:
            # Sums over all positions are split, as long as the parts stay below about 9 MB.
            parts = max(1, min(15, 9_437_184 // (4 * weight.numel())))
            yield copies + 4 * weight.numel() * (parts - 1)
            yield ~births


def _is_depthwise(tensor: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    return bool(groups > 1 and groups == tensor.shape[1])  # PyTorch's own kernels


def _few_channels(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    # Images in fp32 have kernels of their own where the filter is small or cuts the image into patches.
    return tensor.shape[1] <= 4 and tensor.element_size() == 4 and weight.shape[-1] != 7


def _reads_as_it_is(
    tensor: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> bool:
    points = tensor[0, 0].numel()
    return (
        weight[0, 0].numel() == 1
        and set(stride) == {1}
        and set(padding) == {0}
        and points * tensor.element_size() % 16 == 0
    )


def _rearranged(tensor: torch.Tensor, weight: torch.Tensor, output_elements: int) -> int:
    # In half precision channels are padded to 8, so that they can be read 16 bytes at a time.
    channels = tensor.shape[1]
    whole = -(-channels // 8) * 8 if tensor.element_size() == 2 else channels
    inner = (tensor.numel() + (weight.numel() if weight[0, 0].numel() > 1 else 0)) * whole // channels
    return (inner + output_elements) * tensor.element_size() + 16


def _output_elements(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
) -> int:
    if transposed:
        return tensor.numel() * weight.shape[1] // tensor.shape[1] * weight[0, 0].numel()
    elements = int(tensor.shape[0] * weight.shape[0])
    for size, kernel, step, pad, spread in zip(
        tensor.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
    ):
        elements *= (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
    return elements
