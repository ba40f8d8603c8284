"""Checkpointed layers: computed a second time in the backward pass instead of being kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpointable_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that can be checkpointed, in the order of the model.

    Those that transformers marks for it; in other models the longest run of layers of one type. Empty if
    there is neither.
    """
    modeling_layers = sys.modules.get("transformers.modeling_layers")
    if modeling_layers is not None:
        marked = modeling_layers.GradientCheckpointingLayer
        if layers := [module for module in model.modules() if isinstance(module, marked)]:
            return layers
    stacks = [
        list(module) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    uniform = [stack for stack in stacks if len({type(layer) for layer in stack}) == 1]
    return max(uniform, key=len, default=[])


def checkpoint_layers(model: nn.Module, count: int | Literal["all"]) -> int:
    """Checkpoint the first `count` layers and no others; may be called again with another count.

    The first, not the last: the backward pass reaches the last layers while the memory of all others is
    still held, so recomputing those would raise the peak that is to be lowered.

    Returns:
        How many layers are checkpointed now: `count`, or fewer if the model has fewer.
    """
    layers = checkpointable_layers(model)
    wanted = len(layers) if count == "all" else min(count, len(layers))
    for number, layer in enumerate(layers):
        # An attribute of the instance hides the method of the class; removing it restores the method.
        layer.__dict__.pop("forward", None)
        if number < wanted:
            layer.forward = _recomputing(layer.forward)
    return wanted


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The reentrant variant trains nothing behind frozen inputs and fails with several processes.
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
