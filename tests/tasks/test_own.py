"""A model of one's own through the same loop: what it needs to say, and what is refused in words."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, load_model
from torch import nn

import snugtune
from snugtune.errors import DataError, ModelError, RunFolderError, UsageError
from snugtune.record import read_record

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


@pytest.fixture
def points() -> dict[str, np.ndarray]:
    """50 points on two sides of a plane."""
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    return {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}


@pytest.fixture
def train(points, tmp_path):
    def run(task: snugtune.Task, data: object = points, output: str = "run", **more: object):
        return snugtune.train(
            task=task,
            data=data,
            output=tmp_path / output,
            quiet=True,
            **{"epochs": 3, "batch_size": 8, "learning_rate": 0.1, **more},
        )

    return run


def test_a_convolutional_net_learns_digits_through_the_same_loop(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["digits.py", "--output", str(tmp_path / "digits")])
    names = runpy.run_path(str(EXAMPLE))
    names["main"]()
    assert "% of the digits that it had never seen" in capsys.readouterr().out
    record = read_record(tmp_path / "digits" / "record.jsonl")
    assert record.end["metrics"]["accuracy"] > 0.95
    assert record.start["data"]["rows"] == {"train": 1617, "validation": 180}
    model = names["build_model"]()
    load_model(model, str(tmp_path / "digits" / "model" / "model.safetensors"))
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    right = model(images).argmax(dim=1).numpy() == digits.target
    assert right.mean() > 0.97
    card = (tmp_path / "digits" / "model" / "README.md").read_text()
    assert "The task `digits`" in card
    assert "pipeline" not in card


def test_build_model_and_loss_are_enough_and_the_loss_is_then_measured(train, points):
    result = train(snugtune.Task(build_model=linear, loss=loss), validation=points)
    model = linear()
    load_model(model, str(result.model_folder / "model.safetensors"))
    batch = {name: torch.tensor(column) for name, column in points.items()}
    assert result.metrics == {"loss": pytest.approx(float(mean_loss(model, batch)), rel=1e-6)}
    assert result.metrics["loss"] < 0.5


def test_passes_do_not_change_what_is_learnt(train):
    task = snugtune.Task(build_model=linear, loss=loss)
    one, many = train(task, output="one", passes=1), train(task, output="many", passes=3)
    weights = [load_file(result.model_folder / "model.safetensors")["weight"] for result in (one, many)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)
    assert read_record(many.folder / "record.jsonl").updates[0]["passes"] == 3


class Rows(torch.utils.data.Dataset):
    """A data set of dictionaries, of different lengths."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, object]:
        return {"x": torch.ones(1 + number % 5, 4) * (1 if number % 2 else -1), "y": number % 2}


def pad(rows) -> dict[str, torch.Tensor]:
    x = nn.utils.rnn.pad_sequence([row["x"] for row in rows], batch_first=True)
    return {"x": x, "y": torch.tensor([row["y"] for row in rows])}


def padded_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    answers = model(batch["x"]).sum(dim=1)
    return F.cross_entropy(answers, batch["y"], reduction="sum"), len(batch["y"])


def test_a_data_set_with_rows_of_different_lengths_is_cut_by_length(train):
    seen = []

    def collate(rows):
        seen.append([len(row["x"]) for row in rows])
        return pad(rows)

    task = snugtune.Task(
        build_model=linear, loss=padded_loss, collate=collate, length=lambda row: len(row["x"])
    )
    result = train(task, Rows(), validation=Rows(), epochs=1, set={"training.pass_price": 0})
    assert result.metrics["loss"] < 0.3
    assert all(len(set(lengths)) == 1 for lengths in seen[:5])
    assert len(read_record(result.folder / "record.jsonl").updates) == 5


def test_a_loss_that_compares_samples_keeps_the_update_in_one_pass(train):
    task = snugtune.Task(build_model=linear, loss=loss, samples_interact=True)
    record = read_record(train(task).folder / "record.jsonl")
    decision = next(d for d in record.start["decisions"] if d["name"] == "passes")
    assert (decision["value"], decision["because"]) == (1, "the loss must see the whole update")
    assert {line["passes"] for line in record.updates} == {1}


def test_other_data_in_the_same_folder_are_refused(train, points):
    task = snugtune.Task(build_model=linear, loss=loss)
    first = train(task)
    assert train(task) == first
    with pytest.raises(RunFolderError, match="other data"):
        train(task, {**points, "x": points["x"] * 2})


def mean_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize(
    ("task", "data", "error", "words"),
    [
        ({"loss": mean_loss}, None, ModelError, "the sum of the losses, and how many"),
        ({"outputs": lambda model, batch: {}}, None, UsageError, "only one of `outputs` and `measure`"),
        ({"collate": lambda rows: [1]}, None, DataError, "a batch must be a dictionary"),
        ({"collate": lambda rows: {"x": torch.zeros(3, 4)}}, None, DataError, "with 8 rows each; 'x' is not"),
        ({}, {"x": np.zeros((3, 4)), "y": np.zeros(2)}, DataError, "not equally long"),
        ({}, [], DataError, "has no rows"),
        ({}, [(1, 2)] * 9, UsageError, "the first row of data is a tuple"),
        ({}, "reviews.csv", UsageError, "data is str"),
        ({}, {"x": np.zeros((1, 4), np.float32), "y": np.zeros(1, np.int64)}, DataError, "too few"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_refused_in_words(train, points, task, data, error, words):
    with pytest.raises(error, match=words):
        train(
            snugtune.Task(**{"build_model": linear, "loss": loss, **task}), points if data is None else data
        )


def test_a_task_needs_data_and_must_be_one(tmp_path):
    with pytest.raises(UsageError, match="data is not given"):
        snugtune.train(task=snugtune.Task(build_model=linear, loss=loss), output=tmp_path)
    with pytest.raises(UsageError, match="task cannot be a Linear"):
        snugtune.train(task=linear(), data={}, output=tmp_path)


def test_a_run_file_cannot_name_a_model_of_ones_own(tmp_path, tiny_model):
    (tmp_path / "a.csv").write_text("text,label\na,1\nb,0\n")
    with pytest.raises(UsageError, match="'own' has no model and no data that a run file could name"):
        snugtune.train(
            task="own", model=tiny_model, data=tmp_path / "a.csv", output=tmp_path / "run", quiet=True
        )
