"""No run is silently wrong: skipped updates are explained, hopeless runs stop, what never learns is named."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import snugtune
from snugtune.data.cutting import epoch_batches
from snugtune.errors import ModelError
from snugtune.record import read_record
from snugtune.seeds import seeded
from snugtune.step import Choices, Hyperparameters, Step
from tiny_runs import compute_in_fp16

ROWS = 50


class Net(nn.Module):
    """Two layers; `change` is what happens between them, `hold` a layer that nothing uses."""

    def __init__(self, change: Any = None, *, hold: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 2)
        if hold:
            self.hold = nn.Sequential(nn.Linear(16, 3), nn.LayerNorm(3))
        self.change = change or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.change(self.first(x)))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["y"]
    return F.cross_entropy(model(batch["x"]), labels, reduction="sum"), (labels != -100).sum()


@pytest.fixture
def points() -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}


@pytest.fixture
def train(points, tmp_path):
    def run(build=Net, data=points, output="run", settings=None, loss=loss, **more):
        return snugtune.train(
            task=snugtune.Task(build_model=build, loss=loss),
            data=data,
            validation=points,
            output=tmp_path / output,
            quiet=True,
            set={"training.schedule": "constant", "training.warmup_fraction": 0.0, **(settings or {})},
            **{"epochs": 3, "batch_size": 8, "learning_rate": 0.01, **more},
        )

    return run


def record_of(folder):
    return read_record(folder / "record.jsonl")


# Precision: case kind d


class Wide(nn.Module):
    """A feed-forward layer whose answers fp16 does not hold: 512 times 2 times 90 is 92,160."""

    def __init__(self) -> None:
        super().__init__()
        self.wo = nn.Linear(512, 1, bias=False)
        nn.init.constant_(self.wo.weight, 2.0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = torch.full((len(hidden), 512), 90.0) + 0 * hidden[:, :1]
        return hidden + 1e-6 * self.wo(wide)


def test_an_overflow_in_forward_names_the_module_its_size_and_fp32_and_stops_the_run(
    train, tmp_path, monkeypatch
):
    """C049, and the rule that update after update without effect ends a run with exit code 1."""
    compute_in_fp16(monkeypatch)
    with pytest.raises(ModelError) as caught:
        train(lambda: Net(Wide()), epochs=9)
    assert caught.value.exit_code == 1
    assert "stopped at update 10: 10 updates in a row changed nothing" in caught.value.what
    assert "overflow in forward: change.wo (Linear) reaches 92,160" in caught.value.why
    assert "65,504" in caught.value.why
    assert "--precision fp32" in caught.value.do
    assert "a lower learning rate would not help" in caught.value.do
    assert "checkpoint of update 7 is whole" in caught.value.do
    record = record_of(tmp_path / "run")
    assert [line["applied"] for line in record.updates] == [False] * 10
    assert record.end["status"] == "failed"
    assert sum("overflow in forward" in line["why"] for line in record.events) == 3  # then it is known


def test_the_same_command_in_fp32_continues_from_the_last_checkpoint(train, tmp_path, monkeypatch):
    """C049: the way out that the message names works."""
    with monkeypatch.context() as patch:
        compute_in_fp16(patch)
        with pytest.raises(ModelError):
            train(lambda: Net(Wide()), epochs=3, precision="fp16")
    result = train(lambda: Net(Wide()), epochs=3, precision="fp32")
    record = record_of(tmp_path / "run")
    assert record.starts[-1]["resumed_from_update"] == 7
    assert [line["applied"] for line in record.updates[7:]] == [True] * (result.updates - 7)


class Poison(nn.Module):
    """Makes the answers of some calls not finite, in the way that is given."""

    def __init__(self, when, value: float) -> None:
        super().__init__()
        self.when, self.value, self.calls = when, value, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            if self.when(self.calls):
                return x * self.value
        return x


def test_one_overflow_halves_the_scale_and_moves_nothing_else(train, tmp_path, monkeypatch):
    """C053: weights and learning rate stay, one is counted, nothing warns."""
    compute_in_fp16(monkeypatch)
    real = Step.launch

    def launch(self, passes, *, number, **more):
        if number == 1:
            passes = [{**batch, "x": batch["x"].clone()} for batch in passes]
            passes[0]["x"][0, 0] = math.inf
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        launched = real(self, passes, number=number, **more)
        if number == 1:
            after = list(self.model.parameters())
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        return launched

    monkeypatch.setattr(Step, "launch", launch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(epochs=1, settings={"training.schedule": "linear"})
    updates = record_of(tmp_path / "run").updates
    assert [line["applied"] for line in updates] == [True, False, *[True] * 5]
    assert [line["loss_scale"] for line in updates[:3]] == [65536, 65536, 32768]
    assert updates[1]["learning_rate"] == updates[2]["learning_rate"] < updates[0]["learning_rate"]
    assert "1 update skipped" in (tmp_path / "run" / "log.txt").read_text()
    assert not [each for each in caught if "lr_scheduler" in str(each.message)]


def test_a_scale_that_keeps_falling_stops_the_run(train, tmp_path, monkeypatch):
    """A variant of C053: the loss is finite, but its gradient never fits fp16, whatever the scale."""
    compute_in_fp16(monkeypatch)

    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return torch.full_like(gradient, math.inf)

    class Layer(nn.Module):
        def forward(self, x):
            return Steep.apply(x)

    with pytest.raises(ModelError) as caught:
        train(lambda: Net(Layer()), epochs=9)
    assert "17 updates in a row changed nothing; the loss scale has fallen to 1" in caught.value.what
    assert "its gradient is not, from first." in caught.value.why
    assert "--precision fp32" in caught.value.do


def test_a_run_of_which_no_update_had_an_effect_does_not_finish(train, tmp_path, monkeypatch):
    """Too short for the other rules: four updates, all skipped."""
    with pytest.raises(ModelError, match="none of 4 updates changed the model") as caught:
        train(lambda: Net(Poison(lambda call: True, math.nan)), epochs=1, batch_size=13)
    assert "change (Poison) is the first module that gives NaN" in caught.value.why
    assert not (tmp_path / "run" / "model").exists()


def test_a_batch_without_labels_is_skipped_and_changes_nothing_else(train, points, tmp_path):
    """C062: cross-entropy of ignored labels alone is NaN. All other updates are those of a run without it."""
    whole = train(epochs=1)
    without = {"x": points["x"], "y": points["y"].copy()}
    rows = epoch_batches(np.ones(ROWS), batch_size=8, batching="random", seed=42, epoch=0)[3]
    without["y"][rows] = -100
    result = train(data=without, output="one", epochs=1)
    record = record_of(result.folder)
    assert [line["applied"] for line in record.updates] == [*[True] * 3, False, *[True] * 3]
    (event,) = record.events
    assert event["what"] == "update 4 was skipped"
    assert f"no label of its rows counts (row {rows[0]} of data" in event["why"]
    assert "1 update skipped: no label of their rows counts" in (result.folder / "log.txt").read_text()
    # The same updates but this one, by hand.
    step_losses = [line["loss"] for line in record.updates]
    assert step_losses[:3] == [line["loss"] for line in record_of(whole.folder).updates][:3]
    expected = _by_hand(points, skipped=3)
    found = load_file(result.model_folder / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def _by_hand(points, *, skipped: int) -> dict[str, torch.Tensor]:
    """The weights after one epoch of plain PyTorch that leaves out one batch."""
    with seeded(42):
        model = Net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for number, rows in enumerate(
        epoch_batches(np.ones(ROWS), batch_size=8, batching="random", seed=42, epoch=0)
    ):
        if number != skipped:
            optimizer.zero_grad()
            F.cross_entropy(
                model(torch.tensor(points["x"][rows])), torch.tensor(points["y"][rows])
            ).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def test_a_loss_that_is_not_finite_is_not_applied_though_its_gradient_is(train):
    def infinite(model, batch):
        total, count = loss(model, batch)
        return total + (math.inf if model.training else 0.0), count

    with pytest.raises(ModelError, match="10 updates in a row") as caught:
        train(loss=infinite)
    assert "every module gives finite numbers, but the loss is none" in caught.value.why


@pytest.mark.parametrize("passes", [1, 4])
def test_inputs_that_are_not_finite_are_named_by_row_and_not_blamed_on_precision(
    train, points, tmp_path, monkeypatch, passes
):
    """C062: the row is named; the message does not speak of precision as the cause."""
    compute_in_fp16(monkeypatch)
    points["x"][17, 2] = math.nan
    result = train(data=points, epochs=2, passes=passes)
    record = record_of(result.folder)
    assert sum(not line["applied"] for line in record.updates) == 2
    assert {line["why"].split(": ")[-1] for line in record.events} == {
        "the numbers that come in as 'x' are not finite in row 17 of data"
    }
    assert all("leave out these rows" in line["do"] for line in record.events)


def test_a_loss_without_a_graph_where_nothing_counts_is_skipped_too(train, points):
    """C052: a batch whose loss has no graph: it is skipped with a count where its denominator is zero."""

    def careful(model, batch):
        kept = batch["y"] != -100
        if not bool(kept.any()):
            return torch.zeros(()), 0
        return loss(model, {name: column[kept] for name, column in batch.items()})

    points["y"][::2] = -100
    result = train(data=points, loss=careful, batch_size=2, epochs=1)
    applied = [line["applied"] for line in record_of(result.folder).updates]
    assert 0 < applied.count(False) < len(applied)
    assert "no label of their rows counts" in (result.folder / "log.txt").read_text()


def test_everything_frozen_another_model_and_no_graph_have_a_message_each(train, monkeypatch):
    """C052: nothing of PyTorch's "No inf checks were recorded" reaches a person."""
    compute_in_fp16(monkeypatch)
    other = Net()
    setups = {
        "no parameter of the model can learn": (lambda: Net().requires_grad_(False), loss),
        "another model, such as a copy": (Net, lambda _, batch: loss(other, batch)),
        "no gradient": (Net, lambda model, batch: (loss(model, batch)[0].detach() * 0, 8)),
    }
    said = []
    for number, (text, (build, its_loss)) in enumerate(setups.items()):
        with pytest.raises(ModelError) as caught:
            train(build, loss=its_loss, output=f"run{number}")
        assert text in f"{caught.value.what} {caught.value.why}"
        said.append(caught.value.what)
    assert len(set(said)) == 3


def test_lazy_layers_and_layers_made_in_forward_are_refused(train):
    """Variants of C052: the optimizer was built before the parameters were there."""

    class Later(Net):
        def forward(self, x):
            if not hasattr(self, "late"):
                self.late = nn.Linear(16, 2)
            return self.late(self.first(x)) + 0 * self.last(self.first(x))

    with pytest.raises(ModelError, match="unknown to the optimizer: late"):
        train(Later)
    with pytest.raises(ModelError, match=r"0\.weight of the model has no shape yet"):
        train(lambda: nn.Sequential(nn.LazyLinear(2)), output="lazy")


def test_weights_that_are_not_finite_stop_the_run_at_once(train):
    def build():
        model = Net()
        model.last.weight.data[0, 3] = math.nan
        return model

    with pytest.raises(ModelError, match="stopped at update 1") as caught:
        train(build)
    assert "last.weight of the model has values that are not finite" in caught.value.why


def test_half_weights_that_learn_are_cast_which_is_said_with_the_bytes(train, tmp_path, monkeypatch):
    """C055: frozen ones stay half; five updates are applied."""
    compute_in_fp16(monkeypatch)

    def build():
        model = Net().half()
        model.first.requires_grad_(False)
        return model

    result = train(build, epochs=1, batch_size=10)
    found = load_file(result.model_folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "first.weight": torch.float16,
        "first.bias": torch.float16,
        "last.weight": torch.float32,
        "last.bias": torch.float32,
    }
    assert [line["applied"] for line in record_of(result.folder).updates] == [True] * 5
    more = 2 * (16 * 2 + 2)
    assert f"kept in fp32, which takes {more} B more" in (tmp_path / "run" / "log.txt").read_text()


# Gradients: case kind e


@pytest.mark.parametrize("passes", [1, 3])
def test_a_layer_that_no_gradient_reaches_stops_the_run_with_its_name(train, tmp_path, passes):
    with pytest.raises(ModelError, match="4 parameters got no gradient in the first 7 updates") as caught:
        train(lambda: Net(hold=True), passes=passes)
    assert "hold.0, hold.1" in caught.value.what
    assert "training.unused_parameters=allow" in caught.value.do
    assert record_of(tmp_path / "run").updates[-1]["update"] == 7


def test_it_may_be_allowed_and_is_then_listed(train, tmp_path):
    settings = {"training.unused_parameters": "allow"}
    with pytest.raises(ModelError):
        train(lambda: Net(hold=True))
    result = train(lambda: Net(hold=True), settings=settings)
    assert result.status == "finished"
    (event,) = record_of(result.folder).events
    assert "hold.0, hold.1" in event["what"]
    train(lambda: frozen(Net(hold=True), "hold"), output="frozen")


def frozen(model: nn.Module, name: str) -> nn.Module:
    getattr(model, name).requires_grad_(False)
    return model


class Adapter(nn.Module):
    """A low-rank addition whose second half begins at zero, so that the first has a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.a(x))


def test_a_gradient_of_zero_is_a_gradient(train):
    assert train(lambda: Net(Adapter()), epochs=1).status == "finished"


class Rare(nn.Module):
    """Used by every fourth call only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(16, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) if self.calls % 4 == 0 else x


def test_a_layer_that_some_updates_use_has_learnt(train):
    assert train(lambda: Net(Rare())).status == "finished"


def test_an_encoder_that_is_cut_off_is_found(train):
    class Cut(nn.Module):
        def forward(self, x):
            return x.detach()

    with pytest.raises(ModelError, match=r"2 parameters got no gradient .*: first"):
        train(lambda: Net(Cut()))


def test_reentrant_checkpointing_of_ones_own_behind_frozen_layers_is_found(train):
    """C063, a variant: PyTorch only warns, and the layer learns nothing."""

    class Reentrant(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)

    with (
        pytest.warns(UserWarning, match="None of the inputs have requires_grad"),
        pytest.raises(ModelError, match=r"got no gradient .*: change\.inner") as caught,
    ):
        train(lambda: frozen(Net(Reentrant()), "first"))
    assert "reentrant checkpointing behind frozen layers" in caught.value.why


def test_a_part_of_a_pretrained_model_that_the_task_does_not_use_is_listed_and_the_run_goes_on(
    build_tiny_model, tmp_path, monkeypatch
):
    """C111 for one process: a ready-made task does not stop."""
    from snugtune.tasks import sequence_classification

    real = sequence_classification._build_model

    def build(*args, **more):
        model = real(*args, **more)
        model.bert.spare = nn.Linear(4, 4)
        return model

    monkeypatch.setattr(sequence_classification, "_build_model", build)
    lines = [f"the film was {'good' if n % 2 else 'bad'} {n},{n % 2}" for n in range(40)]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    result = snugtune.train(
        model=build_tiny_model(), data=tmp_path / "reviews.csv", output=tmp_path / "run", epochs=1, quiet=True
    )
    assert result.status == "finished"
    (event,) = record_of(result.folder).events
    assert "2 parameters got no gradient in the first 2 updates: bert.spare" in event["what"]


def test_the_checks_read_nothing_from_the_device(points):
    """An update is read once, as before; looking for parameters without a gradient reads none."""
    step = Step(
        snugtune.Task(build_model=lambda: Net(hold=True), loss=loss),
        Choices(),
        Hyperparameters(),
        device=torch.device("cpu"),
    )
    read = []
    real = step.read
    step.read = lambda values: read.append(values) or real(values)
    batch = {name: torch.tensor(column) for name, column in points.items()}
    for number in range(3):
        step.update([copy.copy(batch)], number=number, learning_rate=0.01)
    assert len(read) == 3
    assert list(step.without_gradient) == ["hold.0.weight", "hold.0.bias", "hold.1.weight", "hold.1.bias"]
