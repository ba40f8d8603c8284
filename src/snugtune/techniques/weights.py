"""Weights that learn are fp32, whatever the model was stored in."""

from __future__ import annotations

import logging

import torch
from torch import nn

from snugtune.errors import ModelError
from snugtune.units import show_size

_log = logging.getLogger(__name__)

_HALF = (torch.float16, torch.bfloat16)


def check_weights(model: nn.Module) -> None:
    """Refuse a model of which nothing can learn, or whose weights do not exist yet.

    Raises:
        ModelError: It is one.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"{name} of the model has no shape yet",
                why="a lazy layer finds out its shape in its first pass, but the optimizer needs it before",
                do="run the model once on a small input in build_model, or name the sizes",
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "no parameter of the model can learn",
            why="requires_grad is False for all of them",
            do="leave at least the last layer unfrozen",
        )


def widen_weights(model: nn.Module, *, frozen_too: bool) -> int:
    """Make the half-precision parameters that learn fp32, and all buffers.

    Small updates vanish in half precision, and the gradient scaler refuses such gradients.

    Args:
        model: The model.
        frozen_too: Also those that do not learn: needed where no autocast brings both kinds together.

    Returns:
        The bytes that the parameters that learn take more than before.
    """
    more_bytes = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        stays = isinstance(tensor, nn.Parameter) and not tensor.requires_grad and not frozen_too
        if tensor.dtype not in _HALF or stays:
            continue
        before = tensor.nbytes
        tensor.data = tensor.data.float()
        more_bytes += tensor.nbytes - before if tensor.requires_grad else 0
    if more_bytes:
        _log.warning(
            "weights   those that learn were in half precision and are kept in fp32, which takes %s more: "
            "small updates would vanish",
            show_size(more_bytes),
        )
    return more_bytes
