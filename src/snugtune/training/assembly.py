"""The parts of a run, put together from its configuration and from what was decided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from snugtune.config import RunConfig
from snugtune.data.batching import Examples, Plan, Updates
from snugtune.planning.defaults import ModelSize
from snugtune.processes import Processes
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Prepared, Task
from snugtune.training.device import Device


def build_step(
    config: RunConfig, decided: Mapping[str, Any], task: Task, *, device: Device, processes: Processes
) -> Step:
    """The step of a run.

    Args:
        config: The run's configuration.
        decided: What was decided, by name.
        task: What is learnt.
        device: Where.
        processes: The processes that share each update.

    Raises:
        ModelError, HubError: The model cannot be loaded, or cannot learn.
    """
    settings = config.training
    choices = Choices(
        precision=decided["precision"],
        checkpointed_layers=settings.checkpointed_layers,
        optimizer=decided["optimizer"],
    )
    hyperparameters = Hyperparameters(
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        clip_grad_norm=settings.clip_grad_norm,
        seed=settings.seed,
    )
    return Step(task, choices, hyperparameters, device=device.torch, processes=processes)


def count_parameters(model: nn.Module) -> int:
    """All parameters of a model, also those that do not learn."""
    return sum(parameter.numel() for parameter in model.parameters())


def model_size(model: nn.Module) -> ModelSize:
    """What the time of a model's pass depends on."""
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    sizes = [0 if id(parameter) in tables else parameter.numel() for parameter in model.parameters()]
    return ModelSize(parameters=sum(sizes), tensors=len(sizes))


def build_updates(
    config: RunConfig, decided: Mapping[str, Any], prepared: Prepared, *, processes: Processes
) -> Updates:
    """The updates of a run; the arguments are those of `build_step`, and the task's data."""
    settings = config.training
    plan = Plan(
        batch_size=settings.batch_size,
        batching=settings.batching,
        passes=None if decided["passes"] == "auto" else decided["passes"],
        price_tokens=decided["pass price"],
        most_tokens=settings.pass_tokens,
    )
    return Updates(
        prepared.train,
        prepared.task.collate,
        plan=plan,
        seed=settings.seed,
        epochs=settings.epochs,
        rank=processes.rank,
        processes=processes.count,
    )


def evaluation_rows(plan: Plan, examples: Examples) -> int:
    """Rows of an evaluation's pass: no more than a training pass may have, which always fits."""
    rows = math.ceil(plan.batch_size / (plan.passes or 1))
    if plan.most_tokens is None or plan.passes is not None:
        return rows
    return max(1, min(rows, plan.most_tokens // max(1, int(examples.lengths.max()))))
