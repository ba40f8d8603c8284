"""Decoders keep keys and values for a next token, which never comes while they learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


def caching_configs(model: nn.Module) -> list[Any]:
    """The configurations in a model, each once, that switch such a cache on."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else None
        found.update({id(each): each for each in (config, text) if getattr(each, "use_cache", None) is True})
    return list(found.values())


@contextmanager
def without_cache(configs: Sequence[Any]) -> Iterator[None]:
    """No cache while the block runs; afterwards the configurations say what they said before."""
    # Past the checks that transformers makes at each change of a setting, which take 20 microseconds.
    for config in configs:
        object.__setattr__(config, "use_cache", False)
    try:
        yield
    finally:
        for config in configs:
            object.__setattr__(config, "use_cache", True)
