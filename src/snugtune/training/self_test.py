"""Whether a card computes in fp16 what it computes in fp32, found out on a few small layers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch
from torch.nn import functional

from snugtune.planning.defaults import Decision
from snugtune.processes import Processes
from snugtune.training.device import Device

_log = logging.getLogger(__name__)

Compute = Callable[[torch.device, torch.dtype | None], torch.Tensor]

_LARGEST_ERROR = 0.05  # of the largest answer; rounding costs less than a tenth of it here


def checked_precision(decision: Decision, device: Device, processes: Processes) -> Decision:
    """fp16 only where the cards of all processes compute it rightly; else fp32, which is said.

    Args:
        decision: The precision that was decided.
        device: The card.
        processes: The processes that compute together.
    """
    if decision.value != "fp16":
        return decision
    fault = half_precision_fault(device.torch)
    if not processes.any(fault is not None):
        return decision
    why = f"fp16 would give wrong numbers on {device.name}: {fault or 'on the card of another process'}"
    _log.warning("warning   %s; fp32 is used", why)
    return dataclasses.replace(decision, value="fp32", because=why)


def half_precision_fault(device: torch.device, compute: Compute | None = None) -> str | None:
    """What is wrong with fp16 on a card; None if it computes what fp32 computes.

    Cards with the chips TU116 and TU117 (GTX 16xx) give NaN with some versions of cuDNN, from the first
    forward pass on (https://github.com/pytorch/pytorch/issues/58123).

    Args:
        device: The card.
        compute: (device, type to compute in; None for fp32) -> answers; None takes some usual layers.
    """
    compute = compute or _small_forward
    expected = compute(device, None).float().cpu()
    try:
        found = compute(device, torch.float16).float().cpu()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"it fails there: {' '.join(str(error).split())[:200]}"
    wrong = int((~torch.isfinite(found)).sum())
    if wrong:
        return f"{wrong} of {found.numel()} answers of some small layers are not finite in fp16"
    largest = float((found - expected).abs().max() / expected.abs().max())
    if largest > _LARGEST_ERROR:
        return f"answers of some small layers are off by {largest:.0%} in fp16"
    return None


@torch.no_grad()
def _small_forward(device: torch.device, half: torch.dtype | None) -> torch.Tensor:
    """A convolution, a matrix product and attention, as every network has some."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    images, kernels, weight = numbers(4, 8, 16, 16), numbers(32, 8, 3, 3) / 8, numbers(64, 32) / 6
    with torch.autocast(device.type, dtype=half, enabled=half is not None):
        pixels = functional.conv2d(images, kernels, padding=1).flatten(2).transpose(1, 2)
        tokens = functional.linear(pixels.relu(), weight)
        heads = tokens.view(4, -1, 4, 16).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads).float()
