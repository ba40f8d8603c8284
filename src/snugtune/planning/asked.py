"""`predict_memory`: a prediction for a model of one's own, with everything that is asked checked first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import nn

from snugtune.errors import UsageError
from snugtune.planning.cards import Attention, planned_card
from snugtune.planning.prediction import Batch, Loss, Prediction, predict_step, task_of
from snugtune.step import Choices, Hyperparameters
from snugtune.techniques.optimizers import OPTIMIZERS

_WORDS: dict[str, tuple[str, ...]] = {
    "precision": ("fp32", "fp16", "bf16"),
    "optimizer": tuple(OPTIMIZERS),
    "attention": ("default", "memory-efficient", "math"),
}


def predict_memory(  # noqa: PLR0913
    *,
    model: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    micro_batch: int,
    card: str,
    passes: int = 1,
    precision: Literal["fp32", "fp16", "bf16"] = "fp32",
    checkpointed_layers: int | Literal["all"] = 0,
    optimizer: str = "adamw-fused",
    clip_grad_norm: float | None = 1.0,
    attention: Attention = "default",
    allocator: str = "",
    evaluation_batch: int | None = None,
    loss: Loss | None = None,
) -> Prediction:
    """Predict the peak memory of training a model, on a card that need not be there.

    Args:
        model: Makes the model; its weights need no memory.
        batch: Number of rows -> a batch of CPU tensors by name, the largest that will come.
        micro_batch: Rows of a pass.
        card: Name or alias of a card, as `snugtune cards` lists them.
        passes: Passes of an update.
        precision: fp32, or autocast to fp16 (with a scaled loss) or bf16.
        checkpointed_layers: How many of the first layers are computed again in the backward pass.
        optimizer: adamw-fused, adamw-foreach, sgd or adafactor.
        clip_grad_norm: The largest norm of the gradient; None for no clipping.
        attention: "default" as PyTorch chooses on the card; "memory-efficient" without flash and cuDNN
            kernels, "math" without any.
        allocator: Value of PYTORCH_CUDA_ALLOC_CONF.
        evaluation_batch: Rows of an evaluation; None for none.
        loss: (model, batch) -> (sum of the losses, what to divide it by); None takes the loss that the
            model returns.

    Raises:
        UsageError: An argument that makes no sense, or a card that is not known.
        ModelError: The model cannot be trained as asked.
    """
    for name, function in (("model", model), ("batch", batch)):
        if not callable(function) or isinstance(function, nn.Module):
            raise UsageError(
                f"{name} is {_shown(function)}",
                why="it is called inside the prediction, so that nothing of it takes memory before",
                do=f"pass a function: `{name}=lambda{' rows' if name == 'batch' else ''}: ...`",
            )
    _check_count("micro_batch", micro_batch, 1)
    _check_count("passes", passes, 1)
    if evaluation_batch is not None:
        _check_count("evaluation_batch", evaluation_batch, 1)
    if checkpointed_layers != "all":
        _check_count("checkpointed_layers", checkpointed_layers, 0, 'or "all"')
    for name, word in (("precision", precision), ("optimizer", optimizer), ("attention", attention)):
        _check_word(name, word)
    if clip_grad_norm is not None and not (_is_number(clip_grad_norm) and clip_grad_norm > 0):
        raise UsageError(
            f"clip_grad_norm is {clip_grad_norm!r}",
            why="the largest norm of a gradient is a number above zero",
            do="give such a number, or None for no clipping",
        )
    planned = planned_card(card, attention=attention)
    return predict_step(
        task_of(lambda: _model_of(model), loss),
        Choices(precision=precision, checkpointed_layers=checkpointed_layers, optimizer=optimizer),
        Hyperparameters(clip_grad_norm=clip_grad_norm),
        passes=[_batch_of(batch, micro_batch) for _ in range(passes)],
        card=planned.choices,
        context_bytes=planned.context_bytes,
        evaluation=None if evaluation_batch is None else _batch_of(batch, evaluation_batch),
        allocator=allocator,
    )


def _check_count(name: str, value: Any, least: int, otherwise: str = "") -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return
    raise UsageError(
        f"{name} is {value!r}",
        why=f"it is a whole number from {least} on{', ' + otherwise if otherwise else ''}",
        do=f"give such a number, for instance {name}={max(least, 8)}",
    )


def _check_word(name: str, value: Any) -> None:
    if value not in _WORDS[name]:
        raise UsageError(
            f"{name} is {value!r}", why="there is no such choice", do=f"choose from {', '.join(_WORDS[name])}"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _model_of(make: Callable[[], nn.Module]) -> nn.Module:
    made: Any = make()
    if isinstance(made, nn.Module):
        return made
    raise UsageError(
        f"model() returned {_shown(made)}",
        why="a prediction trains an nn.Module",
        do="return the model itself",
    )


def _batch_of(make: Callable[[int], Batch], rows: int) -> Batch:
    made: Any = make(rows)
    if isinstance(made, dict) and made and all(isinstance(part, torch.Tensor) for part in made.values()):
        return cast(Batch, made)
    raise UsageError(
        f"batch({rows}) returned {_shown(made)}",
        why="the model is called with tensors by name",
        do='return a dictionary such as {"input_ids": ..., "labels": ...} of CPU tensors',
    )


def _shown(value: Any) -> str:
    name = type(value).__name__
    return f"a model ({name})" if isinstance(value, nn.Module) else f"an object of type {name}"
