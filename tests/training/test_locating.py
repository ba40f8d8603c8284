"""Where numbers stop being finite: rows, module, forward or backward, and whether precision is to blame."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Task
from snugtune.training.locating import locate

CPU = torch.device("cpu")
ROWS = 6


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Net(nn.Module):
    def __init__(self, function, *, as_layer: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.layer = Apply(function) if as_layer else None
        self.function = function
        nn.init.constant_(self.first.weight, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last((self.layer or self.function)(hidden))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["y"]
    return F.cross_entropy(model(batch["x"]).float(), labels, reduction="sum"), (labels != -100).sum()


def make_batch(**changes: object) -> dict[str, torch.Tensor]:
    x = torch.linspace(0.1, 1.0, ROWS * 4).reshape(ROWS, 4)
    return {"x": x, "y": torch.arange(ROWS) % 2, **changes}


def look(function=lambda x: x, precision="fp32", *, as_layer=True, batch=None, its_loss=loss, **more):
    task = Task(build_model=lambda: Net(function, as_layer=as_layer), loss=its_loss)
    step = Step(task, Choices(precision=precision), Hyperparameters(), device=CPU)
    batch = batch or make_batch()
    passes = [{name: column[part] for name, column in batch.items()} for part in (slice(0, 2), slice(2, 6))]
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    states = torch.random.get_rng_state()
    found = locate(
        step,
        passes,
        [[10, 11], [12, 13, 14, 15]],
        number=0,
        loss_scale=more.get("loss_scale"),
        places=lambda rows: [f"f.csv, line {row}" for row in rows],
    )
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert torch.equal(states, torch.random.get_rng_state())
    return found


def test_nothing_is_found_where_all_is_finite():
    for precision in ("fp32", "fp16", "bf16"):
        assert look(precision=precision) is None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_rows_whose_inputs_are_not_finite_come_before_everything_else(precision):
    """C062"""
    batch = make_batch()
    batch["x"][3, 1] = math.inf
    found = look(precision=precision, batch=batch)
    assert found.kind == "inputs"
    assert found.why == "pass 2 of 2: the numbers that come in as 'x' are not finite in f.csv, line 13"


def test_masks_of_minus_infinity_are_no_such_inputs():
    batch = make_batch(attention_mask=torch.full((ROWS, 4), -math.inf))
    assert look(batch=batch) is None


def test_a_pass_in_which_no_label_counts_comes_before_precision():
    """C062: such as a loss that takes a mean of its own."""

    def mean(model, batch):
        labels = batch["y"]
        counted = (labels != -100).sum()
        return F.cross_entropy(model(batch["x"]).float(), labels) * counted, counted

    batch = make_batch(y=torch.tensor([0, 1, -100, -100, -100, -100]))
    found = look(precision="fp16", batch=batch, its_loss=mean)
    assert found.kind == "labels"
    assert "no label counts in f.csv, line 12; f.csv, line 13" in found.why


@pytest.mark.parametrize(("as_layer", "said"), [
    (True, "overflow in forward: layer (Apply) reaches "),
    (False, "overflow in forward: what goes into last (Linear) reaches "),
])  # fmt: skip
def test_an_overflow_of_fp16_names_the_module_and_its_largest_number(as_layer, said):
    """C049: also where an operation between two modules is to blame."""
    found = look(lambda x: x * 20_000, "fp16", as_layer=as_layer)
    assert found.kind == "range"
    assert said in found.why
    largest = float(found.why.partition("reaches ")[2].partition(" in fp32")[0].replace(",", ""))
    assert 65_504 < largest < 20_000 * 5
    assert "f.csv, line 1" in found.why
    assert "--precision fp32" in found.do


def test_bf16_does_not_overflow_there():
    assert look(lambda x: x * 20_000, "bf16") is None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("as_layer", [True, False])
def test_what_is_nan_in_fp32_too_is_not_blamed_on_precision(precision, as_layer):
    found = look(lambda x: torch.log(x - 100), precision, as_layer=as_layer)
    assert found.kind == "forward"
    first = (
        "layer (Apply) is the first module"
        if as_layer
        else "numbers that are not finite go into last (Linear)"
    )
    assert first in found.why
    assert "fp32" not in found.do


def test_rows_are_named_where_only_some_of_a_pass_are_affected():
    def one(x: torch.Tensor) -> torch.Tensor:
        poison = torch.zeros(len(x), 1)
        poison[-1] = math.nan
        return x + poison

    found = look(one)
    assert found.why.endswith("gives NaN, in f.csv, line 11")


def test_a_loss_that_is_not_finite_by_itself():
    found = look(its_loss=lambda model, batch: (loss(model, batch)[0] * math.inf, 4))
    assert found.kind == "loss"


def test_a_slope_that_is_not_finite_is_found_behind_a_finite_loss():
    found = look(lambda x: x + (x * 0).sum(dim=1, keepdim=True).sqrt())
    assert found.kind == "backward"
    assert "from first.bias on (2 parameters in all)" in found.why


def test_a_gradient_that_is_too_large_for_the_scale_alone_is_told_apart():
    """C053"""
    found = look(precision="fp16", loss_scale=2.0**24)
    assert found.kind == "range"
    assert "at a loss scale of 1.67772e+07, and not without a scale" in found.why


def test_statistics_stay_as_they_were():
    task = Task(
        build_model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), loss=loss
    )
    step = Step(task, Choices(), Hyperparameters(), device=CPU)
    before = {name: buffer.clone() for name, buffer in step.model.named_buffers()}
    assert locate(step, [make_batch()], [range(ROWS)], number=0, loss_scale=None, places=list) is None
    assert all(torch.equal(before[name], buffer) for name, buffer in step.model.named_buffers())
