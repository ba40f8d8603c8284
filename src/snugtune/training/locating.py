"""Where numbers stop being finite: in which rows, in which module, forward or backward.

Looked for after the fact, by computing the passes of an update once more: it was not applied, so the weights
are those of before, or on a card, which is one update ahead, those after the next. An update without trouble
pays nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from snugtune.data.batching import Batch
from snugtune.errors import ModelError
from snugtune.seeds import seeded_passes
from snugtune.step import Step
from snugtune.tasks.caching import caching_configs, without_cache

Kind = Literal["labels", "inputs", "weights", "range", "forward", "loss", "backward", "unknown"]

_FP16_LARGEST = 65504.0
_MOST_ROWS = 5


@dataclass(frozen=True)
class Located:
    """What is not finite.

    Args:
        kind: labels: none of a pass counts; inputs: the batch itself; weights: already before the update;
            range: only in half precision; forward, loss and backward: there, in fp32 too.
        why: The sentence that says where and what.
        do: What to do about it.
    """

    kind: Kind
    why: str
    do: str


def locate(
    step: Step,
    passes: Sequence[Batch],
    rows: Sequence[Sequence[int]],
    *,
    number: int,
    loss_scale: float | None,
    places: Callable[[Sequence[int]], list[str]],
) -> Located | None:
    """Find the first thing that is not finite in this process's passes of an update; None if all is finite.

    Args:
        step: The step, with the weights of before the update (on a card, of one update later).
        passes: The passes.
        rows: Numbers of the rows of each.
        number: Number of the update, from 0.
        loss_scale: That of the update; None where it had none.
        places: Numbers of rows -> what people call each.
    """
    found = _bad_weights(step.model)
    with _unchanged(step.model), seeded_passes(step.device):
        for index, (batch, numbers) in enumerate(zip(passes, rows, strict=True)):
            if found is not None:
                break
            found = _locate_in_pass(_Pass(step, batch, number, index), loss_scale, numbers, places)
            if found is not None and found.kind != "weights":
                where = f"pass {index + 1} of {len(passes)}: {found.why}" if len(passes) > 1 else found.why
                found = Located(found.kind, where, found.do)
    return found


@dataclass
class _Pass:
    """One pass of an update, to be computed again."""

    step: Step
    batch: Batch
    number: int
    index: int

    def forward(self, *, in_fp32: bool = False) -> tuple[torch.Tensor, torch.Tensor | float]:
        with without_cache(caching_configs(self.step.model)):
            return self.step.forward(
                self.batch, number=self.number, index=self.index, again=True, in_fp32=in_fp32
            )

    def watched(self, *, in_fp32: bool = False) -> tuple[float, float, list[_Answer]]:
        """Loss, denominator, and what each module answered, in the order in which they ended."""
        answers: list[_Answer] = []

        def look(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            name = f"{name or 'the model'} ({type(module).__name__})"
            answers.append(_Answer.of(name, [args, kwargs], output))

        hooks = [
            module.register_forward_hook(partial(look, name), with_kwargs=True)
            for name, module in self.step.model.named_modules()
        ]
        try:
            with torch.no_grad():
                loss, denominator = self.forward(in_fp32=in_fp32)
        finally:
            for hook in hooks:
                hook.remove()
        return float(loss), float(denominator), answers

    def bad_gradients(self, scale: float) -> list[str]:
        """Names of parameters whose gradient is not finite at a loss scale, the last of the model first."""
        learning = [(n, p) for n, p in self.step.model.named_parameters() if p.requires_grad]
        loss, _ = self.forward()
        if not loss.requires_grad:
            return []
        samples = next(iter(self.batch.values())).shape[0]
        grads = torch.autograd.grad(loss * scale / samples, [p for _, p in learning], allow_unused=True)
        bad = [
            name
            for (name, _), grad in zip(learning, grads, strict=True)
            if grad is not None and not bool(torch.isfinite(grad).all())
        ]
        return bad[::-1]


@dataclass
class _Answer:
    """What a module answered: its largest finite number, and whether some are not finite.

    Args:
        name: Name and kind of the module.
        largest, largest_input: The largest size of a finite number in what it gave, and in what it was given.
        nan: Whether there are such.
        infinite: Whether there are infinite numbers above zero.
        sound: Whether all are finite.
        sound_input: Whether what it was given is; masks of minus infinity are.
        rows: Which of its first dimension are not finite, [rows]; None where it gave several tensors.
    """

    name: str
    largest: float
    largest_input: float
    nan: bool
    infinite: bool
    sound: bool
    sound_input: bool
    rows: torch.Tensor | None

    @classmethod
    def of(cls, name: str, given: Any, output: Any) -> _Answer:
        tensors, inputs = list(_tensors(output)), list(_tensors(given))
        bad = None
        if len(tensors) == 1 and tensors[0].ndim:
            bad = (~torch.isfinite(tensors[0])).reshape(len(tensors[0]), -1).any(dim=1).cpu()
        return cls(
            name,
            largest=_largest(tensors),
            largest_input=_largest(inputs),
            nan=any(bool(torch.isnan(tensor).any()) for tensor in tensors),
            infinite=any(bool(tensor.isposinf().any()) for tensor in tensors),
            sound=all(bool(torch.isfinite(tensor).all()) for tensor in tensors),
            sound_input=not any(bool((tensor.isnan() | tensor.isposinf()).any()) for tensor in inputs),
            rows=bad,
        )


def _largest(tensors: Sequence[torch.Tensor]) -> float:
    finite = [tensor[torch.isfinite(tensor)].abs() for tensor in tensors]
    return max([float(part.max()) for part in finite if part.numel()], default=0.0)


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors of floating-point numbers in what a module returned."""
    if isinstance(thing, torch.Tensor):
        if thing.is_floating_point() and thing.numel():
            yield thing
    elif isinstance(thing, dict):
        yield from (tensor for value in thing.values() for tensor in _tensors(value))
    elif isinstance(thing, (list, tuple)):
        yield from (tensor for value in thing for tensor in _tensors(value))


def _locate_in_pass(
    the: _Pass,
    loss_scale: float | None,
    numbers: Sequence[int],
    places: Callable[[Sequence[int]], list[str]],
) -> Located | None:
    loss, denominator, answers = the.watched()
    if math.isfinite(loss) and denominator:
        return _locate_backward(the, loss_scale or 1.0)
    if bad := _bad_inputs(the.batch):
        name, rows = bad
        where = _show(places([numbers[row] for row in rows[:_MOST_ROWS]]), len(rows))
        why = f"the numbers that come in as {name!r} are not finite in {where}"
        return Located("inputs", why, "correct or leave out these rows; precision has nothing to do with it")
    if not denominator:
        where = _show(places(list(numbers[:_MOST_ROWS])), len(numbers))
        why = f"no label counts in {where}"
        return Located("labels", why, "nothing, if that is meant: such rows teach nothing")
    if the.step.choices.precision == "fp32":
        return _locate_forward(answers, numbers, places, the)
    return _locate_in_half(loss, answers, numbers, places, the)


def _locate_in_half(
    loss: float,
    answers: Sequence[_Answer],
    numbers: Sequence[int],
    places: Callable[[Sequence[int]], list[str]],
    the: _Pass,
) -> Located:
    """The first module that gives finite numbers in fp32 alone."""
    half = the.step.choices.precision
    try:
        loss_in_fp32, _, in_fp32 = the.watched(in_fp32=True)
    except (RuntimeError, ModelError):  # frozen weights in half precision do not go with fp32 inputs
        return _locate_forward(answers, numbers, places, the)
    pairs = zip(answers, in_fp32, strict=False)
    bad, good = next(((a, b) for a, b in pairs if not a.sound and b.sound), (None, None))
    if bad is None or good is None:
        if not math.isfinite(loss_in_fp32):
            return _locate_forward(in_fp32, numbers, places, the)
        why = (
            f"the loss is {loss:g} in {half} and {loss_in_fp32:g} in fp32; every module gives finite numbers"
        )
        return Located("range", why, "compute the loss in fp32 (answers.float()), or take --precision fp32")
    where = _rows_of(bad, numbers, places)
    largest = good.largest if bad.sound_input else good.largest_input
    if half == "fp16" and largest > _FP16_LARGEST:
        what = bad.name if bad.sound_input else f"what goes into {bad.name}"
        ends = f"and fp16 ends at {_FP16_LARGEST:,.0f}"
        why = f"overflow in forward: {what} reaches {largest:,.6g} in fp32, {ends}{where}"
    else:
        why = f"{bad.name} leaves the finite numbers in {half}, but reaches {largest:,.6g} in fp32{where}"
    return Located("range", why, "take --precision fp32; a lower learning rate would not help")


def _locate_forward(
    answers: Sequence[_Answer],
    numbers: Sequence[int],
    places: Callable[[Sequence[int]], list[str]],
    the: _Pass,
) -> Located:
    """The first module that gives what is not finite, in fp32; infinite numbers alone may be a mask."""
    bad = [answer for answer in answers if not answer.sound]
    # Minus infinity alone is what masks are filled with.
    answer = next((answer for answer in bad if answer.nan or answer.infinite), bad[0] if bad else None)
    if answer is None:
        why = "every module gives finite numbers, but the loss is none"
        return Located("loss", why, "look for a logarithm or a division by zero in the loss")
    kind = "NaN" if answer.nan else "infinite numbers"
    where = _rows_of(answer, numbers, places)
    why = f"{answer.name} is the first module that gives {kind}{where}"
    if not answer.sound_input:
        why = f"numbers that are not finite go into {answer.name}, and no module before it gave them{where}"
    do = "look for a division, a logarithm or a root of zero there"
    if the.number:
        do += "; if it came with training, lower the learning rate"
    return Located("forward", why, do)


def _locate_backward(the: _Pass, scale: float) -> Located | None:
    if scale != 1.0 and the.bad_gradients(scale) and not the.bad_gradients(1.0):
        why = f"the gradient leaves the range of fp16 at a loss scale of {scale:g}, and not without a scale"
        return Located("range", why, "nothing: the loss scale is halved")
    bad = the.bad_gradients(1.0)
    if not bad:
        return None
    why = f"the loss is finite, but its gradient is not, from {bad[0]} on ({len(bad)} parameters in all)"
    if the.step.choices.precision == "fp16":
        return Located("backward", why, "take --precision fp32 for this run")
    do = "look for a function without a finite slope, such as the root or the norm of zero"
    return Located("backward", why, do)


def _bad_inputs(batch: Batch) -> tuple[str, list[int]] | None:
    """The name and the rows of what is not finite in a batch; masks may be infinite."""
    for name, value in batch.items():
        if value.is_floating_point() and "mask" not in name:
            bad = (~torch.isfinite(value)).reshape(len(value), -1).any(dim=1)
            if bool(bad.any()):
                return name, bad.nonzero().flatten().tolist()
    return None


def _bad_weights(model: nn.Module) -> Located | None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and bool(torch.isnan(tensor).any() | tensor.isposinf().any()):
            why = f"{name} of the model has values that are not finite"
            return Located("weights", why, "start from other weights: with these every answer is lost")
    return None


def _rows_of(answer: _Answer, numbers: Sequence[int], places: Callable[[Sequence[int]], list[str]]) -> str:
    """', in row 3 of data': only where the module answers with a row for each row of the pass."""
    if answer.rows is None or len(answer.rows) != len(numbers):
        return ""
    rows = [numbers[row] for row in answer.rows.nonzero().flatten().tolist()]
    if not rows or len(rows) == len(numbers):
        return ", in all rows of the pass"
    return f", in {_show(places(rows[:_MOST_ROWS]), len(rows))}"


def _show(places: Sequence[str], count: int) -> str:
    more = count - len(places)
    return "; ".join(places) + (f" and {more} more" if more > 0 else "")


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Leave statistics such as those of BatchNorm as they were."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, kept in before:
            buffer.copy_(kept)
