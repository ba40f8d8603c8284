"""What a model can learn: one file per task, all of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugtune.data.batching import Batch, Examples, Row

if TYPE_CHECKING:
    import torch
    from torch import nn

Metrics = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A handful of callables that say what is learnt. Nothing here knows about devices or memory.

    Args:
        name: Name of the task.
        build_model: Makes the model with fp32 weights on the CPU.
        collate: Rows -> one batch of CPU tensors, padded to its own longest row; every tensor has the rows
            in its first dimension.
        loss: (model, batch) -> (sum of the losses, denominator). An update divides the sum of all its passes
            by the sum of their denominators, so it equals the update of the whole batch.
        outputs: (model, batch) -> tensors with the rows in their first dimension, all that `measure` needs.
            Called without gradients; the results leave the device.
        measure: The outputs of all rows -> metrics. Numbers can be named in `metric`; anything else
            (tables, matrices) goes into the record as it is.
        example_batch: (rows, tokens) -> a batch of that size, for planning.
        metric: Name of the metric that decides which model is best.
        save: (model, folder) -> writes what people need to use the model.
    """

    name: str
    build_model: Callable[[], nn.Module]
    collate: Callable[[Sequence[Row]], Batch]
    loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor | float]]
    outputs: Callable[[nn.Module, Batch], dict[str, torch.Tensor]]
    measure: Callable[[dict[str, torch.Tensor]], Metrics]
    example_batch: Callable[[int, int], Batch]
    metric: str
    save: Callable[[nn.Module, Path], None]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A task with its data, ready to train.

    Args:
        task: The task.
        train: Encoded training data.
        validation: Encoded data that only measures.
        facts: What was found and decided, for the record: columns, labels, rows, cut texts.
        notes: The same as sentences for people.
    """

    task: Task
    train: Examples
    validation: Examples
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)


# Metrics for which smaller is better; all others are better when larger.
SMALLER_IS_BETTER = frozenset({"loss", "mse", "mae", "perplexity"})


def is_better(metric: str, value: float, *, than: float | None) -> bool:
    """Whether a metric has improved; one that is not a number never has.

    Args:
        metric: Its name, which says whether larger or smaller is better.
        value: The new value.
        than: The best value so far; None before the first.
    """
    if math.isnan(value):
        return False
    if than is None:
        return True
    return value < than if metric in SMALLER_IS_BETTER else value > than


# The written-out list of tasks: name in the run file -> module with a `prepare` function.
TASKS = {"sequence-classification": "snugtune.tasks.sequence_classification"}


def prepare(name: str, config: Any) -> Prepared:
    """Read the data and build the task that a configuration names.

    Args:
        name: One of TASKS.
        config: A `snugtune.config.RunConfig`.

    Raises:
        DataError, ModelError, HubError, UsageError: The data or the model cannot be used as asked.
    """
    prepared: Prepared = import_module(TASKS[name]).prepare(config)
    return prepared
