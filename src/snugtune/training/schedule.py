"""The learning rate as a function of the updates that changed the parameters."""

from __future__ import annotations

import math

from snugtune.config import TrainingSettings


def warmup_updates(settings: TrainingSettings, total: int) -> int:
    """Updates in which the learning rate rises.

    Args:
        settings: Their share.
        total: Updates of the whole run.
    """
    return math.ceil(settings.warmup_fraction * total)


def learning_rate(settings: TrainingSettings, *, applied: int, total: int) -> float:
    """Learning rate of the next update.

    It rises in a straight line over the warm-up, reaches `settings.learning_rate` with its last update, and
    falls to zero, which would be the rate of the update after the last.

    Args:
        settings: Rate, schedule and warm-up.
        applied: Updates that have changed the parameters so far. One that was skipped does not count.
        total: Updates of the whole run.
    """
    warmup = warmup_updates(settings, total)
    if applied < warmup:
        return settings.learning_rate * (applied + 1) / warmup
    done = (applied - warmup) / max(1, total - warmup)
    shape = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
    return settings.learning_rate * shape[settings.schedule]
