"""The peak memory of a training step before it runs: the step itself, on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from snugtune.memory.allocator import Allocator, parse_settings
from snugtune.memory.cuda import CudaCard, cuda_choices
from snugtune.memory.footprint import AGAIN, by_kind, by_layer, held_at, repeat, replay
from snugtune.memory.kernels import Kernels
from snugtune.memory.trace import CARD, Trace, Tracer, place_on_card, tracing
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Task

Batch = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor | float]]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a training step needs on a card.

    Args:
        peak_allocated_bytes: Most bytes in tensors during training.
        peak_reserved_bytes: Most bytes that the allocator takes from the card during training; this is what
            has to fit.
        first_update_peak_bytes: Most bytes in tensors during the first update.
        evaluation_peak_bytes: Most bytes in tensors during an evaluation; None where none was asked for.
        process_bytes: Fewest and most bytes that the driver will charge to the process: reserved and context.
        by_kind: Bytes at the peak, by what they are for. Fragmentation is what is reserved beyond it.
        by_layer: Bytes at the peak by module, the largest first.
        peak_at: Operation and module at the peak.
        assumed: What was answered where the model read values that only real data have.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    first_update_peak_bytes: int
    evaluation_peak_bytes: int | None
    process_bytes: tuple[int, int]
    by_kind: dict[str, int]
    by_layer: dict[str, int]
    peak_at: tuple[str, str]
    assumed: dict[str, str] = field(default_factory=dict)


@dataclass
class _Traced:
    trace: Trace
    gradients: set[int] = field(default_factory=set)
    state: set[int] = field(default_factory=set)


def predict_step(  # noqa: PLR0913
    task: Task,
    choices: Choices,
    hyperparameters: Hyperparameters,
    *,
    passes: list[Batch],
    card: CudaCard,
    context_bytes: tuple[int, int],
    evaluation: Batch | None = None,
    allocator: str = "",
    limit_bytes: int | None = None,
) -> Prediction:
    """Predict what a step needs: model loading, updates, and an evaluation.

    Args:
        task, choices, hyperparameters: The step.
        passes: The batches of one update, CPU tensors; the largest that will come.
        card: What decides which kernels run.
        context_bytes: Fewest and most bytes that CUDA needs besides the allocator.
        evaluation: The batch of an evaluation; None for none.
        allocator: Value of PYTORCH_CUDA_ALLOC_CONF.
        limit_bytes: The most that may be reserved; unused segments are given back before it is passed.

    Raises:
        DoesNotFit: It is passed nevertheless.
        UsageError: A setting of the allocator that is not modelled.
    """
    expandable = parse_settings(allocator)
    traced = _trace(task, choices, hyperparameters, passes, evaluation, card)
    # A steady update may start with the blocks of the one before it in other places, so a few are replayed.
    trace = repeat(traced.trace, "update 3", "update 2", 3)
    peaks = replay(trace, Allocator(expandable=expandable, limit_bytes=limit_bytes))
    training = {name: peak for name, peak in peaks.items() if name == "load" or name.startswith("update")}
    # Repetitions allocate what the update did; only where it lies may need more.
    once = [peak for name, peak in training.items() if not name.endswith(AGAIN)]
    peak = max(once, key=lambda peak: peak.allocated_bytes)
    reserved = max(peak.reserved_bytes for peak in training.values())
    held = held_at(trace, peak.event)
    kinds = by_kind(trace, held, gradients=traced.gradients, optimizer=traced.state)
    at = trace.storages[trace.events[peak.event]]
    evaluating = peaks.get("evaluation")
    most = max(reserved, evaluating.reserved_bytes if evaluating else 0)
    return Prediction(
        peak_allocated_bytes=peak.allocated_bytes,
        peak_reserved_bytes=reserved,
        first_update_peak_bytes=peaks["update 1"].allocated_bytes,
        evaluation_peak_bytes=evaluating.allocated_bytes if evaluating else None,
        process_bytes=(most + context_bytes[0], most + context_bytes[1]),
        by_kind={**kinds, "fragmentation": reserved - sum(kinds.values()), "context": context_bytes[1]},
        by_layer=by_layer(trace, held),
        peak_at=(at.op, at.module),
        assumed=trace.assumed,
    )


def _trace(
    task: Task,
    choices: Choices,
    hyperparameters: Hyperparameters,
    passes: list[Batch],
    evaluation: Batch | None,
    card: CudaCard,
) -> _Traced:
    with cuda_choices(card), tracing(Kernels(card)) as tracer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fake tensors, and for the real run to show
        traced = _Traced(tracer.trace)
        with tracer.phase("load"):
            step = Step(_on_card(task, tracer), choices, hyperparameters, device=CARD, read=_answers)
        parameters = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
        step.optimizer.register_step_pre_hook(
            lambda *_: traced.gradients.update(_numbers(tracer, [parameter.grad for parameter in parameters]))
        )
        for number in range(1, 4):
            with tracer.phase(f"update {number}"):
                step.update(passes, number=number, learning_rate=hyperparameters.learning_rate)
        for values in step.optimizer.state.values():
            traced.state |= _numbers(tracer, list(values.values()))
        if evaluation is not None:
            with tracer.phase("evaluation"):
                step.evaluate(evaluation)
    return traced


def _on_card(task: Task, tracer: Tracer) -> Task:
    """The task with a model that is on the card: `nn.Module.to` cannot move fake parameters."""

    def build() -> nn.Module:
        model = place_on_card(task.build_model())
        model.to = lambda *_, **__: model  # type: ignore[method-assign]
        tracer.watch(model)
        return model

    return Task(name=task.name, build_model=build, loss=task.loss, outputs=task.outputs, measure=task.measure)


def _answers(values: torch.Tensor) -> list[float]:
    # Every number that a step reads is finite: gradients that are not would skip the optimizer.
    return [1.0] * values.numel()


def _numbers(tracer: Tracer, tensors: list[Any]) -> set[int]:
    found = {tracer.number_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return {number for number in found if number is not None}


def task_of(build: Callable[[], nn.Module], loss: Loss | None) -> Task:
    """A task for a model that returns its mean loss from `forward`, or whose loss is given.

    Args:
        build: Makes the model.
        loss: (model, batch) -> (sum of the losses, denominator); None takes it from the model's output.
    """
    return Task(build_model=build, loss=loss or _own_loss)


def _own_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
    out = model(**batch)
    mean = out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, Mapping) else out[0]
    rows = next(iter(batch.values())).shape[0]
    return mean * rows, float(rows)
