"""Checkpointed layers: computed a second time in the backward pass instead of being kept."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from itertools import count as count_up
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from snugtune.errors import ModelError

_log = logging.getLogger(__name__)


class Checkpointing:
    """The checkpointed layers of one model.

    A model may come with checkpointing of its own switched on. Then all its layers are checkpointed, in the
    way of this module alone: two ways at once would compute layers three times.

    Args:
        model: The model.
        wanted: How many layers: the first so many, or all.
    """

    def __init__(self, model: nn.Module, wanted: int | Literal["all"]) -> None:
        self.model = model
        self.came_with_it = _switch_off_own(model)
        """Whether the model came with checkpointing switched on."""
        self.wanted: int | Literal["all"] = "all" if self.came_with_it and not wanted else wanted
        self.left_out: list[nn.Module] = []
        self.count = checkpoint_layers(model, self.wanted)
        """How many layers are checkpointed."""

    def leave_out_last(self, error: CheckpointError) -> None:
        """Checkpoint no more the layer that was recomputed last: its forward pass cannot be repeated.

        Raises:
            ModelError: It was none of these layers.
        """
        name, layer = _last_recomputed(self.model)
        if layer is None or layer in self.left_out:
            raise ModelError(
                "a part of the model cannot be checkpointed",
                why=f"its forward pass did not do the same a second time ({_first_line(error)})",
                do="leave torch.utils.checkpoint out of that part of the model",
            ) from error
        self.left_out.append(layer)
        self.count = checkpoint_layers(self.model, self.wanted, left_out=self.left_out)
        _log.warning(
            "warning   non-repeatable forward in %s: computed a second time it did not do the same (%s); "
            "it is no longer checkpointed, which takes more memory",
            name,
            _first_line(error),
        )


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


def checkpoint_layers(
    model: nn.Module, count: int | Literal["all"], *, left_out: Collection[nn.Module] = ()
) -> int:
    """Checkpoint the first `count` layers and no others; may be called again with another count.

    The first, not the last: the backward pass reaches the last layers while the memory of all others is
    still held, so recomputing those would raise the peak that is to be lowered.

    Args:
        model: The model.
        count: How many.
        left_out: Layers among them that are not checkpointed after all.

    Returns:
        How many layers are checkpointed now: `count`, or fewer if the model has fewer.
    """
    layers = checkpointable_layers(model)
    wanted = len(layers) if count == "all" else min(count, len(layers))
    chosen = [layer for layer in layers[:wanted] if layer not in left_out]
    for layer in layers:
        # An attribute of the instance hides the method of the class; removing it restores the method.
        layer.__dict__.pop("forward", None)
        if layer in chosen:
            layer.forward = _recomputing(layer, layer.forward)
    return len(chosen)


def _recomputing(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args = tuple(map(_without_cache, args))
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        contexts = partial(_contexts, layer, _copies(layer))
        # The reentrant variant trains nothing behind frozen inputs and fails with several processes.
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return run


Buffers = list[tuple[nn.Module, str, torch.Tensor]]

_recomputations = count_up(1)


def _copies(layer: nn.Module) -> Buffers:
    """What the forward pass may change, such as the running means of BatchNorm, as it is before."""
    return [
        (module, name, buffer.clone())
        for module in layer.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype != torch.bool  # a mask is large, and stays as it is
    ]


def _contexts(
    layer: nn.Module, before: Buffers
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _once_more(layer, before)


@contextmanager
def _once_more(layer: nn.Module, before: Buffers) -> Iterator[None]:
    """Let a layer see the buffers that it saw the first time; what it changes in them now is forgotten."""
    layer._recomputation = next(_recomputations)  # type: ignore[assignment]
    now = [(module, name, module._buffers[name]) for module, name, _ in before]
    for module, name, buffer in before:
        module._buffers[name] = buffer
    try:
        yield
    finally:
        for module, name, kept in now:
            module._buffers[name] = kept


def _last_recomputed(model: nn.Module) -> tuple[str, nn.Module | None]:
    """Name and layer of the last recomputation; ("", None) where there was none."""
    found = [(vars(layer).get("_recomputation", 0), layer) for layer in checkpointable_layers(model)]
    number, layer = max(found, key=lambda pair: pair[0], default=(0, None))
    names = {id(module): name for name, module in model.named_modules()}
    return (names[id(layer)], layer) if number and layer is not None else ("", None)


def _switch_off_own(model: nn.Module) -> bool:
    """Switch the checkpointing of transformers off; True if it was on."""
    own = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    for module in own:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    return bool(own)


def _first_line(error: Exception) -> str:
    """What did not match, without the advice that PyTorch adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:5])[:300]


def _without_cache(value: Any) -> Any:
    """None for a decoder's cache of keys and values, which the backward pass would fill a second time."""
    cache_utils = sys.modules.get("transformers.cache_utils")
    return None if cache_utils is not None and isinstance(value, cache_utils.Cache) else value
