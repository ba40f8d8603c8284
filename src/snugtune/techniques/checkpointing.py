"""Checkpointed layers: computed a second time in the backward pass instead of being kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from itertools import groupby
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
        layers = [module for module in model.modules() if isinstance(module, marked)]
        # Some models mark stages as well as the layers in them; both together would be computed three times.
        outer = {layer for layer in layers if sum(isinstance(part, marked) for part in layer.modules()) > 1}
        if layers:
            return [layer for layer in layers if layer not in outer]
    stacks = [
        list(module) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    runs = [list(run) for stack in stacks for _, run in groupby(stack, key=type)]
    # A single layer counts only where it is the whole stack: a layer that the model uses many times.
    return max((run for run in runs if len(run) > 1 or run in stacks), key=len, default=[])


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
        args = tuple(map(_without_cache, args))
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        # The reentrant variant trains nothing behind frozen inputs and fails with several processes.
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _without_cache(value: Any) -> Any:
    """None for a decoder's cache of keys and values, which the backward pass would fill a second time."""
    cache_utils = sys.modules.get("transformers.cache_utils")
    return None if cache_utils is not None and isinstance(value, cache_utils.Cache) else value
