"""Checkpoints: exact, small in number, and never half."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from snugtune.errors import RunFolderError
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Task
from snugtune.training import checkpoints
from snugtune.training.checkpoints import load_checkpoint, model_tensors, remove_old, save_checkpoint
from snugtune.training.manifest import write_manifest
from snugtune.training.positions import Position, list_checkpoints

POSITION = Position(update=3, applied=2, best_update=2, best_value=0.5, stale=1, seconds=1.5)


class Tied(nn.Module):
    """Two layers that share their weights, a norm with buffers, and dropout."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(self.norm(self.first(x))))


class Halves(nn.Module):
    """Two layers, of which one is frozen."""

    def __init__(self, middle: int, frozen: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, middle), nn.Linear(middle, 6)
        getattr(self, frozen).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def make_step(
    optimizer: str = "adamw-fused",
    precision: str = "fp32",
    width: int = 6,
    seed: int = 1,
    build: Callable[[], nn.Module] | None = None,
) -> Step:
    task = Task(
        name="tied",
        build_model=build or (lambda: Tied(width)),
        collate=lambda rows: {},
        loss=lambda model, batch: (model(batch["x"]).float().square().sum(), len(batch["x"])),
        outputs=lambda model, batch: {},
        measure=lambda outputs: {},
        example_batch=lambda rows, tokens: {},
        metric="loss",
        save=lambda model, folder: None,
    )
    choices = Choices(optimizer=optimizer, precision=precision)  # type: ignore[arg-type]
    return Step(task, choices, Hyperparameters(seed=seed), device=torch.device("cpu"))


def learn(step: Step, first: int, last: int) -> None:
    for number in range(first, last):
        batch = {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(number))}
        step.update([batch], number=number, learning_rate=0.01)


def same(one: Step, other: Step) -> bool:
    tensors = [model_tensors(step.model) for step in (one, other)]
    states = [step.optimizer.state_dict()["state"] for step in (one, other)]
    return (
        all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
        and all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][parameter][name]))
            for parameter, values in states[0].items()
            for name, value in values.items()
            if value is not None
        )
        and one.scaler.state_dict() == other.scaler.state_dict()
    )


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "sgd", "adafactor"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_step_goes_on_from_a_checkpoint_bit_for_bit(optimizer, precision, tmp_path):
    """C098, C114: tied weights stay tied, and the optimizer is not cold."""
    whole = make_step(optimizer, precision)
    learn(whole, 0, 3)
    path = save_checkpoint(tmp_path, whole, POSITION)
    other = make_step(optimizer, precision, seed=1)
    learn(other, 0, 1)
    assert not same(whole, other)
    assert load_checkpoint(path, other) == POSITION
    assert same(whole, other)
    assert other.model.second.weight is other.model.first.weight
    for step in (whole, other):
        learn(step, 3, 6)
    assert same(whole, other)


@pytest.mark.parametrize(("before", "after"), [("fp32", "fp16"), ("fp16", "fp32"), ("fp16", "bf16")])
def test_a_run_goes_on_in_the_precision_of_another_device(before, after, tmp_path):
    step, other = make_step(precision=before), make_step(precision=after, seed=2)
    learn(step, 0, 2)
    load_checkpoint(save_checkpoint(tmp_path, step, POSITION), other)
    assert torch.equal(step.model.first.weight, other.model.first.weight)
    weight = other.model.first.weight.detach().clone()
    learn(other, 2, 22)  # the loss scale of fp16 first has to come down
    assert not torch.equal(weight, other.model.first.weight)


def test_weights_that_do_not_lie_in_one_piece_are_restored_too(tmp_path):
    step, other = make_step(), make_step(seed=2)
    for each in (step, other):
        each.model.first.weight.data = each.model.first.weight.data.t()
        assert not each.model.first.weight.is_contiguous()
    assert not same(step, other)
    load_checkpoint(save_checkpoint(tmp_path, step, POSITION), other)
    assert same(step, other)
    assert not other.model.first.weight.is_contiguous()


def test_what_a_killed_process_left_half_written_is_no_checkpoint_and_goes(tmp_path):
    (tmp_path / ".writing").mkdir()
    (tmp_path / ".writing" / "model.safetensors").write_bytes(b"half")
    assert list_checkpoints(tmp_path) == []
    save_checkpoint(tmp_path, make_step(), POSITION)
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000003"]


@pytest.mark.parametrize(
    "state", ["[]", "null", '{"version": 1, "optimizer": {"name": "adamw-fused", "state": []}}']
)
def test_a_state_that_says_something_else_is_refused_in_words(state, tmp_path):
    path = save_checkpoint(tmp_path, make_step(), POSITION)
    (path / "state.json").write_text(state)
    with pytest.raises(RunFolderError, match="cannot continue from the checkpoint"):
        load_checkpoint(path, make_step())


def test_only_safetensors_and_json_are_written(tmp_path):
    """C097: nothing of ours is pickled."""
    path = save_checkpoint(tmp_path, make_step(), POSITION)
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["update-00000003"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_cut_file_is_refused_in_words_and_the_checkpoint_before_still_loads(name, share, tmp_path):
    """C093."""
    step = make_step()
    learn(step, 0, 2)
    before = save_checkpoint(tmp_path, step, Position(update=2))
    last = save_checkpoint(tmp_path, step, Position(update=3))
    content = (last / name).read_bytes()
    (last / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(RunFolderError, match="cannot continue from the checkpoint") as caught:
        load_checkpoint(last, step)
    assert str(last) in caught.value.do
    assert load_checkpoint(before, step).update == 2


@pytest.mark.parametrize(("other", "why"), [
    ({"optimizer": "sgd"}, "its optimizer is adamw-fused, the run's is sgd"),
    ({"width": 8}, "has another size"),
])  # fmt: skip
def test_a_checkpoint_of_something_else_is_refused(other, why, tmp_path):
    """C114."""
    path = save_checkpoint(tmp_path, make_step(), POSITION)
    with pytest.raises(RunFolderError) as caught:
        load_checkpoint(path, make_step(**other))
    assert why in caught.value.why


def test_the_state_of_other_parameters_is_refused_or_begins_anew(tmp_path):
    """As many learn, of the same sizes: their numbers alone would fit."""
    first = make_step(build=partial(Halves, 6, "first"))
    learn(first, 0, 3)
    path = save_checkpoint(tmp_path, first, POSITION)
    other = make_step(build=partial(Halves, 6, "second"))
    with pytest.raises(RunFolderError, match=r"other parameters learn than then \(first\.bias\)"):
        load_checkpoint(path, other)
    told: list[str] = []
    load_checkpoint(path, other, without_optimizer=told.append)
    assert len(told) == 1
    assert not other.optimizer.state
    assert torch.equal(other.model.first.weight, first.model.first.weight)


def test_a_state_without_names_is_refused_by_its_sizes(tmp_path):
    first = make_step(build=partial(Halves, 4, "first"))
    learn(first, 0, 3)
    path = save_checkpoint(tmp_path, first, POSITION)
    state = json.loads((path / "state.json").read_text())
    del state["optimizer"]["parameters"]  # as versions before 4 were
    (path / "state.json").write_text(json.dumps(state))
    write_manifest(path)
    load_checkpoint(path, make_step(build=partial(Halves, 4, "first")))
    with pytest.raises(RunFolderError, match=r"of another size for first\.weight"):
        load_checkpoint(path, make_step(build=partial(Halves, 4, "second")))


def test_a_checkpoint_of_a_later_snugtune_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, make_step(), POSITION)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "version": 99}))
    with pytest.raises(RunFolderError) as caught:
        load_checkpoint(path, make_step())
    assert "version 99" in caught.value.why


def test_a_full_disk_leaves_what_was_there_and_nothing_half(tmp_path, monkeypatch):
    """C093."""
    step = make_step()
    save_checkpoint(tmp_path, step, Position(update=2))
    real = checkpoints.save_file

    def full(tensors, path, **kwargs):
        if path.name == "optimizer.safetensors":
            raise OSError(28, "No space left on device")
        real(tensors, path, **kwargs)

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(RunFolderError, match="No space left"):
        save_checkpoint(tmp_path, step, Position(update=3))
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000002"]
    assert load_checkpoint(tmp_path / "update-00000002", step).update == 2


def test_old_checkpoints_go_but_never_the_best(tmp_path):
    """C094: by number, so 9 is older than 10."""
    step = make_step()
    for update in (2, 9, 10, 100, 20):
        save_checkpoint(tmp_path, step, Position(update=update))
    (tmp_path / "update-notes").mkdir()
    assert [int(path.name[7:]) for path in list_checkpoints(tmp_path)] == [2, 9, 10, 20, 100]
    remove_old(tmp_path, run_id="", keep_last=2, best_update=9, update=100)
    assert [int(path.name[7:]) for path in list_checkpoints(tmp_path)] == [9, 20, 100]
    assert (tmp_path / "update-notes").exists()
