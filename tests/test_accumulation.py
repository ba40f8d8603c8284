"""Updates in passes: every remainder, what numbers are allowed, and what is said about the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from snugtune.data.batching import Examples, Plan, Updates
from snugtune.errors import UsageError
from snugtune.runfile import load_config
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Task
from snugtune.training.reports import describe_batch

BASIC = {"model": "m", "data": "d"}


class Points(list):
    def __getitems__(self, keys: list[int]) -> list[dict[str, object]]:
        return [self[key] for key in keys]


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="sum"), len(batch["y"])


@pytest.mark.parametrize("passes", range(1, 6))
@pytest.mark.parametrize("rows", range(1, 10))
def test_every_remainder_is_an_update_with_clipping_and_a_loss_scale(rows, passes):
    """C051: `passes` rows in an update, each in a pass of its own, two epochs."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(5))
    points = Points({"x": x[row], "y": row % 2} for row in range(rows))
    task = Task(build_model=lambda: nn.Linear(3, 2), loss=loss)
    plan = Plan(batch_size=passes, passes=passes)
    updates = Updates(Examples(points, np.ones(rows)), task.collate, plan=plan, seed=1, epochs=2)
    hyperparameters = Hyperparameters(clip_grad_norm=0.1)
    step = Step(task, Choices(precision="fp16"), hyperparameters, device=torch.device("cpu"))
    step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**8})  # at 2^16 some overflow
    did = [step.update(updates[number], number=number, learning_rate=0.1) for number in range(len(updates))]
    assert len(did) == 2 * math.ceil(rows / passes)
    assert all(each.applied for each in did)
    assert sum(each.samples for each in did) == 2 * rows
    assert all(parameter.grad is None for parameter in step.model.parameters())


@pytest.mark.parametrize("name", ["passes", "batch_size", "epochs"])
@pytest.mark.parametrize(("value", "said"), [
    (0, "greater than or equal to 1"),
    (-4, "greater than or equal to 1"),
    (2.5, "fractional part"),
    ("2.5", "valid integer"),
    ("many", "valid integer"),
    (math.nan, "finite number"),
])  # fmt: skip
def test_numbers_that_make_no_sense_are_refused_by_name(name, value, said):
    with pytest.raises(UsageError, match=f"training.{name} cannot be") as caught:
        load_config(everyday={**BASIC, name: value})
    assert said in caught.value.why
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("plan", "rows", "processes", "said"), [
    ({"batch_size": 8, "passes": 2}, 32, 1, "8 samples in each update = 2 passes x 4 samples"),
    ({"batch_size": 8, "passes": 3}, 32, 1, "8 samples in each update = 3 passes x at most 3 samples"),
    ({"batch_size": 8, "passes": 1}, 32, 1, "8 samples in each update, in one pass"),
    ({"batch_size": 8}, 32, 1, "8 samples in each update, in as many passes as their lengths call for"),
    ({"batch_size": 8, "passes": 2}, 32, 2,
     "8 samples in each update = 2 processes x 4 samples, each 2 passes x 2 samples"),
    ({"batch_size": 7, "passes": 2}, 35, 2,
     "7 samples in each update = 2 processes x at most 4 samples, each 2 passes x 2 samples"),
    ({"batch_size": 8, "passes": 1}, 20, 1,
     "8 samples in each update, in one pass; the last update of an epoch may have fewer"),
    ({"batch_size": 64, "passes": 1}, 20, 1,
     "20 samples in each update, in one pass; batch_size 64 is more than the 20 rows of an epoch"),
    ({"batch_size": 4, "passes": 9}, 20, 1,
     "4 samples in each update = 4 passes x 1 sample; 9 passes are more than there are samples"),
])  # fmt: skip
def test_how_a_batch_comes_together_is_said_in_one_formula(plan, rows, processes, said):
    """C110, and numbers that are larger than the epoch."""
    assert describe_batch(Plan(**plan), rows, processes) == said
