"""Other ways for operations to run, for fake tensors alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def overload(name: str) -> Any:
    """'softmax.int' -> the operation of that name."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def composite(operation: Any) -> Callable[..., Any]:
    """What an operation is put together from."""
    # Not `decompose`, which prefers decompositions in Python where there are some.
    return partial(operation._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


def for_fakes(function: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A function for fake tensors, unless it declines with NotImplemented; another one for all others."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], FakeTensor):
            made = function(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return otherwise(*args, **kwargs)

    return choose
