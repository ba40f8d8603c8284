"""The parts of a run, put together from its configuration and from what was decided."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from snugtune.config import RunConfig
from snugtune.data.batching import Examples, Plan, Updates
from snugtune.planning.defaults import (
    Decision,
    ModelSize,
    choose_pass_price,
    choose_pass_tokens,
    choose_workers,
    decide,
    decide_packing,
    decide_passes,
    overflows_in_fp16,
)
from snugtune.processes import Processes
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Prepared
from snugtune.techniques.checkpointing import Checkpointing, checkpointable_layers
from snugtune.training.device import Device, why_no_card
from snugtune.training.self_test import checked_precision

_log = logging.getLogger(__name__)


def build_step(
    config: RunConfig, prepared: Prepared, *, device: Device, processes: Processes
) -> tuple[Step, list[Decision]]:
    """The step of a run, and what was decided, with reasons.

    Args:
        config: The run's configuration.
        prepared: The task with its data.
        device: Where.
        processes: The processes that share each update.

    Raises:
        ModelError, HubError: The model cannot be loaded, or cannot learn.
        HardwareError, UsageError: The card or the model cannot do what was asked.
    """
    settings = config.training
    family = prepared.facts.get("model_type")
    decisions = _decide(config, family, device, processes)
    values: dict[str, Any] = {decision.name: decision.value for decision in decisions}
    choices = Choices(
        precision=values["precision"],
        checkpointed_layers=settings.checkpointed_layers,
        optimizer=values["optimizer"],
        packing=settings.packing is not False,
    )
    hyperparameters = Hyperparameters(
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        clip_grad_norm=settings.clip_grad_norm,
        seed=settings.seed,
    )
    step = Step(prepared.task, choices, hyperparameters, device=device.torch, processes=processes)
    built = getattr(getattr(step.model, "config", None), "model_type", None)
    if choices.precision == "fp16" and family is None and (known := overflows_in_fp16(built)):
        _log.warning("warning   %s: expect skipped updates in fp16, and take --precision fp32 then", known)
    if step.checkpointing.wanted:
        decisions.append(decide_checkpointing(step.checkpointing))
    return step, [*decisions, *_decide_passes(config, step, device)]


def _decide(config: RunConfig, family: str | None, device: Device, processes: Processes) -> list[Decision]:
    """Precision and optimizer; fp16 only on a card that computes it rightly."""
    asked_in_vain = config.training.precision == "fp16" and not device.is_cuda
    precision, *others = decide(
        config,
        device_name=device.name,
        capability=device.capability,
        family=family,
        no_card_because=why_no_card() if asked_in_vain else None,
    )
    return [checked_precision(precision, device, processes), *others]


def decide_checkpointing(checkpointing: Checkpointing) -> Decision:
    """Which layers are computed a second time, and how.

    Args:
        checkpointing: That of the step's model.
    """
    found = len(checkpointable_layers(checkpointing.model))
    if checkpointing.came_with_it:
        why = "the model came with gradient checkpointing switched on; kept, non-reentrant"
    elif not found:
        why = "no layers were found in this model that could be; it takes the memory of a run without"
    else:
        why = f"of {found} layers, computed a second time (non-reentrant): less memory, more time"
    return Decision("checkpointed layers", checkpointing.count, why)


def _decide_passes(config: RunConfig, step: Step, device: Device) -> list[Decision]:
    """How updates are cut and run, which depends on the model."""
    settings, packed = config.training, step.packing is not None
    price = choose_pass_price(
        settings.pass_price,
        size=model_size(step.model),
        precision=step.choices.precision,
        capability=device.capability,
        multiprocessors=device.multiprocessors,
    )
    price_tokens = int(str(price.value))
    if step.packing is not None:
        # One more group in attention is less work than one more pass, but saves less too.
        step.packing.price_tokens = 2 * price_tokens
    interacting = [*step.interacting, *(["the loss"] if step.task.samples_interact else [])]
    return [
        price,
        decide_packing(settings.packing, packed=packed),
        choose_pass_tokens(
            settings.pass_tokens, price_tokens=price_tokens, packed=packed, on_card=device.is_cuda
        ),
        decide_passes(config, interacting=interacting, processes=step.processes.count, packed=packed),
        choose_workers(config.data.workers, on_card=device.is_cuda, task=config.task),
    ]


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
    """The updates of a run.

    Args:
        config: The run's configuration.
        decided: What was decided, by name.
        prepared: The task's data.
        processes: The processes that share each update.
    """
    settings = config.training
    plan = Plan(
        batch_size=settings.batch_size,
        batching=settings.batching,
        passes=None if decided["passes"] == "auto" else decided["passes"],
        price_tokens=decided["pass price"],
        most_tokens=decided["pass tokens"],
        packed=decided["packing"],
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
