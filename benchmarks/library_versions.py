"""What a table's version of transformers computes differently from the installed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from packaging.version import Version

COPIED = Version("5.20")


@contextmanager
def as_measured(header: dict[str, Any]) -> Iterator[None]:
    """Models compute as in the version that a table was measured with, where that decides about memory.

    From 5.20 on, a mask made of position biases is copied into rows before attention gets it
    (integrations/sdpa_attention.py). Before, its last stride is not 1, so PyTorch takes the math kernel.
    """
    import transformers

    measured = header.get("transformers")
    if measured is None or not Version(measured) < COPIED <= Version(transformers.__version__):
        yield
        return
    from transformers.integrations import sdpa_attention

    make = sdpa_attention.create_position_bias_mask
    with mock.patch.object(sdpa_attention, "create_position_bias_mask", _without_copy(make)):
        yield


def _without_copy(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        with mock.patch.object(torch.Tensor, "contiguous", lambda tensor, *_, **__: tensor):
            return make(*args, **kwargs)

    return made
