"""Updates that are launched, but not waited for yet."""

from __future__ import annotations

from dataclasses import dataclass

from snugtune.step import Launched
from snugtune.training.device import Device
from snugtune.training.progress import Memory


@dataclass(frozen=True)
class Pending:
    """An update that may still run on the device.

    Args:
        launched: What gives its result.
        learning_rate: Its learning rate.
        memory: Memory of the card at its highest while it was launched.
    """

    launched: Launched
    learning_rate: float
    memory: Memory | None


def most_pending(device: Device, precision: str) -> int:
    """How many there may be, so that a card is never without work.

    In fp16 updates are skipped now and then, and the next learning rate depends on whether the last one was.
    """
    return int(device.is_cuda and precision != "fp16")
