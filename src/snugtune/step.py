"""The training step: the only place where one is built.

Trainer, predictor, planner and benchmark run this very object, so everything that costs memory or time on the
device is in here: moving the batch, precision, checkpointed layers, passes, clipping, optimizer, evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from snugtune.data.batching import Batch
from snugtune.errors import ModelError
from snugtune.tasks import Task
from snugtune.techniques.checkpointing import checkpoint_layers
from snugtune.techniques.optimizers import build_optimizer

Precision = Literal["fp32", "fp16", "bf16"]
_INTERACTING = (nn.modules.batchnorm._BatchNorm,)
_AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How a step is executed: what may change without changing what is learnt, beyond rounding."""

    precision: Precision = "fp32"
    checkpointed_layers: int | Literal["all"] = 0
    optimizer: str = "adamw-fused"


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What is learnt depends on these."""

    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    clip_grad_norm: float | None = 1.0
    seed: int = 42


@dataclass(frozen=True, kw_only=True)
class Updated:
    """What an update did.

    Args:
        loss: Mean loss of the whole batch.
        grad_norm: Norm of the gradient before clipping; not finite when fp16 overflowed.
        applied: Whether the parameters changed.
        loss_scale: Scale of the loss, for fp16.
        passes: Passes it was computed in.
        samples: Rows of the batch.
        tokens: Tokens of the batch, padding left out; None where a batch has no attention mask.
        padding: Share of padding among all positions, 0 to 1; None as above.
    """

    loss: float
    grad_norm: float
    applied: bool
    loss_scale: float | None
    passes: int
    samples: int
    tokens: int | None
    padding: float | None


def read_values(values: torch.Tensor) -> list[float]:
    """Bring numbers to the host. The one place that waits for the device; replaced under fake tensors."""
    return [float(value) for value in values.tolist()]


@contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Random numbers that depend on `parts` alone; the generators are put back afterwards."""
    with torch.random.fork_rng(devices=[]):  # weights are made on the CPU
        torch.manual_seed(_mix(*parts))
        yield


def _mix(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])


class Step:
    """Runs updates and evaluations of one task in one way.

    Args:
        task: What is learnt.
        choices: How it is executed.
        hyperparameters: What the result depends on.
        device: Where.
        read: Brings numbers to the host.

    Raises:
        ModelError: Nothing in the model can learn.
    """

    def __init__(
        self,
        task: Task,
        choices: Choices,
        hyperparameters: Hyperparameters,
        *,
        device: torch.device,
        read: Callable[[torch.Tensor], list[float]] = read_values,
    ) -> None:
        self.task, self.choices, self.hyperparameters = task, choices, hyperparameters
        self.device, self.read = device, read
        with seeded(hyperparameters.seed):
            model = task.build_model()
        _check_parameters(model)
        self.model = model.to(device).train()
        self.checkpointed = checkpoint_layers(self.model, choices.checkpointed_layers)
        self.optimizer = build_optimizer(
            choices.optimizer,
            self.model,
            learning_rate=hyperparameters.learning_rate,
            weight_decay=hyperparameters.weight_decay,
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=choices.precision == "fp16")

    def update(self, passes: Sequence[Batch], *, number: int, learning_rate: float) -> Updated:
        """Run one update: forward and backward of each pass, then the optimizer.

        The gradient is that of the whole batch, whatever the passes. A gradient that is not finite is never
        applied.

        Args:
            passes: Batches of CPU tensors; together they are the update's batch.
            number: Number of the update in the run, from 0; random numbers follow from it.
            learning_rate: Learning rate of this update.
        """
        self.model.train()
        samples = sum(_rows(batch) for batch in passes)
        # The exact denominator is known after the last pass. Until then the number of samples keeps the
        # size of the numbers right for fp16; the rest is put right in `_apply`.
        loss_sum = torch.zeros((), device=self.device)
        denominator: torch.Tensor | float = 0.0
        with seeded_passes(self.device):
            for index, batch in enumerate(passes):
                torch.manual_seed(_mix(self.hyperparameters.seed, number, index))
                part, weight = self._forward(self._to_device(batch))
                self.scaler.scale(part / samples).backward()  # type: ignore[no-untyped-call]
                loss_sum += part.detach()
                denominator = denominator + weight
                del part
        loss, grad_norm, applied, scale = self._apply(loss_sum, denominator, samples, learning_rate)
        tokens, positions = _count_tokens(passes)
        return Updated(
            loss=loss,
            grad_norm=grad_norm,
            applied=applied,
            loss_scale=scale,
            passes=len(passes),
            samples=samples,
            tokens=tokens,
            padding=None if not positions or tokens is None else 1 - tokens / positions,
        )

    @property
    def interacting(self) -> list[str]:
        """Kinds of layers in which the samples of a pass see each other: passes change what is learnt."""
        layers = (module for module in self.model.modules() if isinstance(module, _INTERACTING))
        return sorted({type(layer).__name__ for layer in layers})

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What the task wants to know of each row of one batch, on the CPU."""
        self.model.eval()
        with self._autocast():
            outputs = self.task.outputs(self.model, self._to_device(batch))
        return {name: value.to("cpu") for name, value in outputs.items()}

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | float]:
        with self._autocast():
            return self.task.loss(self.model, batch)

    def _apply(
        self, loss_sum: torch.Tensor, denominator: torch.Tensor | float, samples: int, learning_rate: float
    ) -> tuple[float, float, bool, float | None]:
        self.scaler.unscale_(self.optimizer)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        whole = torch.as_tensor(denominator, dtype=torch.float32, device=self.device)
        norm = torch.nn.utils.get_total_norm(grads)
        scale = self.scaler.scale(torch.ones((), device=self.device))
        loss, norm_read, correction, scale_read = self.read(
            torch.stack([loss_sum / whole, norm.to(self.device), samples / whole, scale])
        )
        grad_norm = norm_read * correction
        applied = math.isfinite(grad_norm)
        if applied:
            self._step_optimizer(grads, grad_norm, correction, learning_rate)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm, applied, scale_read if self.scaler.is_enabled() else None

    def _step_optimizer(
        self, grads: list[torch.Tensor], grad_norm: float, correction: float, learning_rate: float
    ) -> None:
        limit = self.hyperparameters.clip_grad_norm
        factor = correction
        if limit is not None and grad_norm > limit:
            factor *= limit / (grad_norm + 1e-6)
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def _autocast(self) -> torch.autocast:
        dtype = _AUTOCAST.get(self.choices.precision)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}


@contextmanager
def seeded_passes(device: torch.device) -> Iterator[None]:
    """Put the generators back after the passes of an update have set them."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _check_parameters(model: nn.Module) -> None:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not learning:
        raise ModelError(
            "no parameter of the model can learn",
            why="requires_grad is False for all of them",
            do="leave at least the last layer unfrozen",
        )
    for parameter in learning:
        # Half-precision parameters lose small updates, and the gradient scaler refuses them.
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


def _rows(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]


def _count_tokens(passes: Sequence[Batch]) -> tuple[int | None, int]:
    masks = [batch["attention_mask"] for batch in passes if "attention_mask" in batch]
    if not masks:
        return None, 0
    return sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
