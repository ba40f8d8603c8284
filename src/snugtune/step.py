"""The training step: the only place where one is built.

Trainer, predictor, planner and benchmark run this very object, so everything that costs memory or time on the
device is in here: moving the batch, precision, checkpointed layers, passes, clipping, optimizer, evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from snugtune.data.batching import Batch, count_tokens
from snugtune.errors import ModelError
from snugtune.processes import ALONE, Processes
from snugtune.seeds import seed_pass, seeded, seeded_passes
from snugtune.tasks import Task
from snugtune.tasks.caching import caching_configs, without_cache
from snugtune.tasks.explained import explained_forward
from snugtune.techniques.checkpointing import Checkpointing
from snugtune.techniques.optimizers import build_optimizer
from snugtune.techniques.packing import pack_layers
from snugtune.techniques.weights import check_weights, widen_weights

Precision = Literal["fp32", "fp16", "bf16"]
_INTERACTING = (nn.modules.batchnorm._BatchNorm,)
_AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """How a step is executed: what may change without changing what is learnt, beyond rounding."""

    precision: Precision = "fp32"
    checkpointed_layers: int | Literal["all"] = 0
    packing: bool = False  # where the model can be packed
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
        denominator: What the sum of the losses was divided by; 0 where no label of the batch counts.
        passes: Passes it was computed in, in this process.
        samples: Rows of the batch.
        tokens: Tokens of the batch, padding left out; None where a batch has no attention mask.
        padding: Share of padding among all positions, 0 to 1; None as above.
    """

    loss: float
    grad_norm: float
    applied: bool
    loss_scale: float | None
    denominator: float
    passes: int
    samples: int
    tokens: int | None
    padding: float | None


def read_values(values: torch.Tensor) -> list[float]:
    """Numbers of a tensor. The one place where values are looked at; replaced under fake tensors."""
    return [float(value) for value in values.tolist()]


class Launched:
    """An update that has been given to the device, which may still be at work on it."""

    def __init__(self, values: torch.Tensor, finish: Callable[[torch.Tensor], Updated]) -> None:
        self._finish = finish
        self._arrived: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            # Reading the values where they are would wait for everything that is launched after them too.
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = on_host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._values = values

    def result(self) -> Updated:
        """Wait for the end of this update, not of later ones, and say what it did."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._finish(self._values)


class Step:
    """Runs updates and evaluations of one task in one way.

    Args:
        task: What is learnt.
        choices: How it is executed.
        hyperparameters: What the result depends on.
        device: Where.
        processes: The processes that share each update.
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
        processes: Processes = ALONE,
        read: Callable[[torch.Tensor], list[float]] = read_values,
    ) -> None:
        self.task, self.choices, self.hyperparameters = task, choices, hyperparameters
        self.device, self.processes, self.read = device, processes, read
        with seeded(hyperparameters.seed):
            model = task.build_model()
        check_weights(model)
        widen_weights(model, frozen_too=choices.precision == "fp32")
        self.model = model
        self.packing = pack_layers(model, task.outputs, task.example_batch) if choices.packing else None
        self.model.to(device).train()
        self._learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Shrinks while updates run; a gradient of zeros is one.
        self.without_gradient = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self._caching = caching_configs(model)
        self.checkpointing = Checkpointing(self.model, choices.checkpointed_layers)
        self.optimizer = build_optimizer(
            choices.optimizer,
            self.model,
            learning_rate=hyperparameters.learning_rate,
            weight_decay=hyperparameters.weight_decay,
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=choices.precision == "fp16")

    def update(self, passes: Sequence[Batch], *, number: int, learning_rate: float) -> Updated:
        """Run one update and wait for its end; the arguments are those of `launch`."""
        return self.launch(passes, number=number, learning_rate=learning_rate).result()

    def launch(
        self, passes: Sequence[Batch], *, number: int, learning_rate: float, samples: int | None = None
    ) -> Launched:
        """Run one update: forward and backward of each pass, then the optimizer.

        The gradient is that of the whole batch, whatever the passes. A gradient that is not finite is never
        applied. With `adamw-fused` nothing here waits for the device.

        Args:
            passes: Batches of CPU tensors; together they are the update's batch, or this process's share.
            number: Number of the update in the run, from 0; random numbers follow from it.
            learning_rate: Learning rate of this update.
            samples: Rows of the whole batch; None where this process has them all.

        Raises:
            ProcessError: Another process could not compute its share.
        """
        self._set_training(True)
        samples = sum(_rows(batch) for batch in passes) if samples is None else samples
        counts = count_tokens(passes, packed=self.packing is not None)
        with self.processes.all_or_none(self._learning, counts):
            sums = self._run_passes(passes, number, samples)
        self.processes.add_up(self._learning, sums)
        if self.without_gradient:
            left = self.without_gradient.items()
            self.without_gradient = {name: parameter for name, parameter in left if parameter.grad is None}
        tokens, positions = counts
        values = self._apply(*sums, samples, learning_rate)

        def finish(values: torch.Tensor) -> Updated:
            loss, grad_norm, scale, denominator = self.read(values)
            return Updated(
                loss=loss,
                grad_norm=grad_norm,
                applied=math.isfinite(grad_norm),
                loss_scale=scale if self.scaler.is_enabled() else None,
                denominator=denominator,
                passes=len(passes),
                samples=samples,
                tokens=tokens if positions else None,
                padding=1 - tokens / positions if positions else None,
            )

        return Launched(values, finish)

    def strangers(self) -> list[str]:
        """Names of parameters that the optimizer does not know: they were made after the model was built."""
        known = set(map(id, self._learning))
        named = self.model.named_parameters()
        return [name for name, each in named if each.requires_grad and id(each) not in known]

    @property
    def checkpointed(self) -> int:
        """How many layers are checkpointed."""
        return self.checkpointing.count

    @property
    def interacting(self) -> list[str]:
        """Kinds of layers in which the samples of a pass see each other: passes change what is learnt."""
        layers = (module for module in self.model.modules() if isinstance(module, _INTERACTING))
        return sorted({type(layer).__name__ for layer in layers})

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What the task wants to know of each row of one batch, on the CPU."""
        self._set_training(False)
        half = self.choices.precision != "fp32"
        with self._packed(batch), self._autocast(), explained_forward(_rows(batch), half=half):
            outputs = self.task.outputs(self.model, self._to_device(batch))
        return {name: value.to("cpu") for name, value in outputs.items()}

    def _packed(self, batch: Batch) -> AbstractContextManager[None]:
        if self.packing is None:
            return nullcontext()
        return self.packing.of(batch.get("attention_mask"), self.device)

    def _set_training(self, training: bool) -> None:
        # Walking through all modules of a large model takes a millisecond.
        if self.model.training != training:
            self.model.train(training)

    def forward(
        self, batch: Batch, *, number: int, index: int, again: bool = False, in_fp32: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Forward of pass `index` of update `number`, with its random numbers; for use in `seeded_passes`.

        Args:
            batch: The pass.
            number, index: Which one.
            again: For looking at it only: padded, so that modules answer with a row for each row.
            in_fp32: Whatever the precision of the step.

        Returns:
            The sum of the losses, and their denominator.
        """
        own = [self.processes.rank] if self.processes.rank else []
        seed_pass(self.device, self.hyperparameters.seed, number, index, *own)
        half = self.choices.precision != "fp32"
        packed = self._packed({} if again else batch)
        with packed, self._autocast(in_fp32=in_fp32), explained_forward(_rows(batch), half=half):
            return self.task.loss(self.model, self._to_device(batch))

    def _run_passes(
        self, passes: Sequence[Batch], number: int, samples: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of each pass; the sum of the losses, and of their denominators."""
        # The exact denominator is known after the last pass. Until then the number of samples keeps the
        # size of the numbers right for fp16; the rest is put right in `_apply`.
        loss_sum = torch.zeros((), device=self.device)
        denominator = torch.zeros((), device=self.device)
        try:
            with seeded_passes(self.device), without_cache(self._caching):
                for index, batch in enumerate(passes):
                    part, weight = self.forward(batch, number=number, index=index)
                    if part.requires_grad:  # or nothing in the pass counts
                        self.scaler.scale(part / samples).backward()  # type: ignore[no-untyped-call]
                    loss_sum += part.detach()
                    denominator += weight
                    del part
        except CheckpointError as error:
            # Each time one layer fewer is checkpointed, so this ends.
            self.checkpointing.leave_out_last(error)
            self.optimizer.zero_grad(set_to_none=True)
            return self._run_passes(passes, number, samples)
        return loss_sum, denominator

    def _apply(
        self, loss_sum: torch.Tensor, denominator: torch.Tensor, samples: int, learning_rate: float
    ) -> torch.Tensor:
        """Clip, and change the parameters where the gradient is finite.

        Returns:
            Loss, norm, loss scale and denominator, [4].
        """
        grads = [parameter.grad for parameter in self._learning if parameter.grad is not None]
        scale = self.scaler.scale(torch.ones((), device=self.device))
        if not grads:
            if self.read(denominator.reshape(1))[0]:
                raise ModelError(
                    "the loss does not depend on any parameter that learns",
                    why="no gradient reached one of them in this update; perhaps the loss was computed from "
                    "another model, such as a copy of the one that the run trains",
                    do="compute the loss from the answers of the model that the function is given, without "
                    "detach() or no_grad() between",
                )
            return torch.stack([loss_sum / denominator, loss_sum / denominator, scale, denominator])
        self.scaler.unscale_(self.optimizer)
        correction = samples / denominator
        norm = torch.nn.utils.get_total_norm(grads).to(self.device) * correction
        norm = norm + 0 * loss_sum  # a loss that is not finite has no good gradient either
        limit = self.hyperparameters.clip_grad_norm
        factor = correction if limit is None else correction * (limit / (norm + 1e-6)).clamp(max=1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.choices.optimizer == "adamw-fused":
            # The kernel divides by the one and leaves everything as it was if the other is not zero.
            self.optimizer.grad_scale = (1 / factor).float()  # type: ignore[attr-defined]
            self.optimizer.found_inf = 1.0 - torch.isfinite(norm).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        else:
            (applies, read_factor) = self.read(torch.stack([torch.isfinite(norm).float(), factor]))
            if applies:
                if read_factor != 1.0:
                    torch._foreach_mul_(grads, read_factor)
                self.optimizer.step()
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss_sum / denominator, norm, scale, denominator])

    def _autocast(self, *, in_fp32: bool = False) -> torch.autocast:
        dtype = None if in_fp32 else _AUTOCAST.get(self.choices.precision)
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}


def _rows(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]
