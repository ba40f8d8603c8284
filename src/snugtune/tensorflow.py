"""Keeps TensorFlow from taking the whole card, so that PyTorch, a desktop or another program fits beside it.

By itself TensorFlow reserves nearly all memory of every card it sees. Growth only changes when memory is
taken, not how much is needed, and what was taken is not given back before the process ends.
Source: https://www.tensorflow.org/guide/gpu. Not verified on a card so far.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from snugtune.errors import HardwareError, MissingDependency, UsageError
from snugtune.units import MiB, parse_size, show_size


def share_gpu(budget: int | str | None = None) -> int:
    """Let TensorFlow take memory as it needs it, or at most `budget` of each card; without a card do nothing.

    Args:
        budget: Most bytes on each card, or a size such as "6 GiB"; None for growth without a limit.

    Returns:
        The number of cards that it holds for.

    Raises:
        MissingDependency: TensorFlow does not import.
        UsageError: The budget is no size, or less than one MiB, which is TensorFlow's unit.
        HardwareError: TensorFlow has used the card before, or was told otherwise before.
    """
    limit_bytes = parse_size(budget) if isinstance(budget, str) else budget
    if limit_bytes is not None and limit_bytes < MiB:
        raise UsageError(
            f"a budget of {limit_bytes} bytes is too small",
            why="TensorFlow counts its limit in MiB",
            do="give bytes, or a size such as '6 GiB'",
        )
    config = _tensorflow().config
    cards = config.list_physical_devices("GPU")
    for card in cards:
        try:
            if limit_bytes is None:
                config.experimental.set_memory_growth(card, True)
            else:
                # A hard limit and growth exclude each other.
                config.experimental.set_memory_growth(card, False)
                limit = config.LogicalDeviceConfiguration(memory_limit=limit_bytes // MiB)
                config.set_logical_device_configuration(card, [limit])
        except RuntimeError as error:
            raise HardwareError(
                f"TensorFlow already uses {card.name}, and takes its memory as it was told before",
                why=_first_line(error),
                do="call share_gpu() right after `import tensorflow`, before anything computes",
            ) from error
        except ValueError as error:
            wish = "growth" if limit_bytes is None else f"a limit of {show_size(limit_bytes)}"
            raise HardwareError(
                f"TensorFlow does not take {wish} for {card.name}",
                why=_first_line(error),
                do="call share_gpu() once, and leave out other calls that divide the card",
            ) from error
    return len(cards)


def _tensorflow() -> Any:
    try:
        return import_module("tensorflow")
    except ImportError as error:
        raise MissingDependency(
            "share_gpu needs the package 'tensorflow', which did not import",
            why=str(error),
            do="install what this prints: snugtune doctor --install-line tensorflow",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
