"""Random numbers that follow from a few whole numbers alone, whatever was drawn before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Random numbers that depend on `parts` alone; the generators are put back afterwards."""
    with torch.random.fork_rng(devices=[]):  # weights are made on the CPU
        torch.manual_seed(_mix(*parts))
        yield


@contextmanager
def seeded_passes(device: torch.device) -> Iterator[None]:
    """Put the generators back after `seed_pass` has set them in the block."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def seed_pass(device: torch.device, *parts: int) -> None:
    """Let the random numbers of a pass follow from `parts` alone; for use inside `seeded_passes`."""
    # Not `torch.manual_seed`: where a kind of device is not in use, that keeps a note for later at each call.
    number = _mix(*parts)
    torch.default_generator.manual_seed(number)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(number)


def _mix(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
