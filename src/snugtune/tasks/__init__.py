"""What a model can learn: one file per task, all of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn
from torch.utils.data import default_collate

from snugtune.config import RunConfig
from snugtune.data.batching import Batch, Examples, Row
from snugtune.errors import UsageError

Metrics = dict[str, Any]


def stack_rows(rows: Sequence[Row]) -> Batch:
    """Rows of numbers, arrays and tensors -> one batch: each column stacked."""
    batch: Batch = default_collate(list(rows))
    return batch


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write a model's weights as model.safetensors; read them with `safetensors.torch.load_model`."""
    save_model(model, str(folder / "model.safetensors"))


@dataclass(frozen=True, kw_only=True)
class Task:
    """A handful of callables that say what is learnt. Nothing here knows about devices or memory.

    A batch is a dictionary of tensors with the rows in their first dimension. Only `build_model` and `loss`
    must be given.

    Args:
        name: Name of the task.
        build_model: Makes the model with fp32 weights on the CPU.
        loss: (model, batch) -> (sum of the losses, denominator), such as the rows of the batch. An update
            divides the sum of all its passes by the sum of their denominators, so it equals the update of
            the whole batch.
        collate: Rows -> one batch of CPU tensors, padded to its own longest row. Without it, rows are
            stacked.
        outputs: (model, batch) -> tensors with the rows in their first dimension, all that `measure` needs.
            Called without gradients; the results leave the device. Without it, the loss is measured.
        measure: The outputs of all rows -> metrics. Numbers can be named in `metric`; anything else
            (tables, matrices) goes into the record as it is. It comes with `outputs`.
        metric: Name of the metric that decides which model is best; `evaluation.metric` overrides it.
        smaller_is_better: Whether the best model is the one with the smallest metric. Without it, that is so
            for `SMALLER_IS_BETTER` alone.
        save: (model, folder) -> writes what people need to use the model. Without it, the weights are
            written as model.safetensors.
        length: Row -> its length in tokens, where rows are padded: passes are then cut by length.
        samples_interact: Whether the loss compares samples with each other, as contrastive losses do. An
            update then stays one pass unless more are asked for.
        example_batch: (rows, tokens) -> a batch of that size, for planning.
    """

    build_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor | float]]
    name: str = "own"
    collate: Callable[[Sequence[Row]], Batch] = stack_rows
    outputs: Callable[[nn.Module, Batch], dict[str, torch.Tensor]] = None  # type: ignore[assignment]
    measure: Callable[[dict[str, torch.Tensor]], Metrics] = None  # type: ignore[assignment]
    metric: str = "loss"
    smaller_is_better: bool = None  # type: ignore[assignment]
    save: Callable[[nn.Module, Path], None] = save_weights
    length: Callable[[Row], int] | None = None
    samples_interact: bool = False
    example_batch: Callable[[int, int], Batch] | None = None

    def __post_init__(self) -> None:
        self._check_callables()
        if (self.outputs is None) != (self.measure is None):
            raise UsageError(
                f"the task {self.name!r} has only one of `outputs` and `measure`",
                why="the second measures what the first gives",
                do="give both, or none of them to measure the loss",
            )
        if self.outputs is None:
            object.__setattr__(self, "outputs", partial(_loss_outputs, loss=self.loss))
            object.__setattr__(self, "measure", mean_loss)
        if self.smaller_is_better is None:
            object.__setattr__(self, "smaller_is_better", self.metric in SMALLER_IS_BETTER)

    def _check_callables(self) -> None:
        if isinstance(self.build_model, nn.Module):  # it can be called too, but makes no model
            raise UsageError(
                f"build_model of the task {self.name!r} is a model, and not a function that makes one",
                why="new weights follow from the seed of the run, so the run makes the model itself",
                do=f"give build_model=lambda: {type(self.build_model).__name__}(...)",
            )
        for name in ("build_model", "loss", "collate", "outputs", "measure", "save", "length"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise UsageError(
                    f"{name} of the task {self.name!r} is a {type(value).__name__}",
                    why="it is called",
                    do="give a function",
                )


def _loss_outputs(
    model: nn.Module, batch: Batch, *, loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, Any]]
) -> dict[str, torch.Tensor]:
    part, denominator = loss(model, batch)
    whole = torch.as_tensor(denominator, dtype=torch.float64)
    return {"loss": part.double().reshape(1), "denominator": whole.reshape(1)}


def mean_loss(outputs: dict[str, torch.Tensor]) -> Metrics:
    """The loss of all rows, which is measured where a task has no `measure` of its own."""
    return {"loss": float(outputs["loss"].sum() / outputs["denominator"].sum())}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A task with its data, ready to train.

    Args:
        task: The task.
        train: Encoded training data.
        validation: Encoded data that only measures.
        facts: What was found and decided, for the record: columns, labels, rows, cut texts.
        notes: The same as sentences for people.
        places: Numbers of rows of `train` -> what people call each: its file and line, or its number.
    """

    task: Task
    train: Examples
    validation: Examples
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    places: Callable[[Sequence[int]], list[str]] = field(default=lambda rows: [f"row {row}" for row in rows])


# Metrics for which smaller is better, unless a task says otherwise; all others are better when larger.
SMALLER_IS_BETTER = frozenset(
    {"loss", "val_loss", "mse", "rmse", "mae", "mape", "perplexity", "wer", "cer", "error", "error_rate"}
)


def is_better(value: float, *, than: float | None, smaller: bool) -> bool:
    """Whether a metric has improved; one that is not a number never has.

    Args:
        value: The new value.
        than: The best value so far; None before the first.
        smaller: Whether smaller values are better.
    """
    if math.isnan(value):
        return False
    if than is None:
        return True
    return value < than if smaller else value > than


# The written-out list of tasks: name in the run file -> module with a `prepare` function.
TASKS = {"sequence-classification": "snugtune.tasks.sequence_classification"}


def prepare(config: RunConfig) -> Prepared:
    """Read the data and build the task that a configuration names.

    Args:
        config: The run's configuration.

    Raises:
        DataError, ModelError, HubError, UsageError: The data or the model cannot be used as asked.
    """
    if config.task not in TASKS:
        raise UsageError(
            f"the task {config.task!r} has no model and no data that a run file could name",
            why="it is a model of somebody's own, which only a Python program can give",
            do="call snugtune.train(task=snugtune.Task(...), data=...) in Python",
        )
    prepared: Prepared = import_module(TASKS[config.task]).prepare(config)
    return prepared
