"""A model of one's own through the same loop: what it needs to say, and what is refused in words."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file, load_model
from torch import nn

import snugtune
from snugtune.errors import DataError, ModelError, RunFolderError, UsageError
from snugtune.record import read_record
from snugtune.tasks.own_data import open_rows
from snugtune.training.card import class_scores
from snugtune.training.summary import print_tables

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
    with pytest.raises(RunFolderError, match=r"the contents of data\.train"):
        train(task, {**points, "x": points["x"] * 2})


def mean_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def changed(points, **columns):
    return {**points, **columns}


def as_rows(points) -> list[dict[str, np.ndarray]]:
    return [{name: column[number] for name, column in points.items()} for number in range(50)]


def refusal(train, error, task=None, data=None, **more) -> str:
    with pytest.raises(error) as caught:
        train(
            snugtune.Task(**{"build_model": linear, "loss": loss, **(task or {})}),
            **({} if data is None else {"data": data}),
            **more,
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("task", "error", "words"),
    [
        ({"outputs": lambda model, batch: {}}, UsageError, "only one of `outputs` and `measure`"),
        ({"build_model": nn.Linear(4, 2)}, UsageError, "give build_model=lambda: Linear(...)"),
        ({"loss": 3}, UsageError, "loss of the task 'own' is a int"),
        ({"build_model": lambda: [1]}, ModelError, "it returned a value of type list"),
        ({"metric": "accuracy"}, UsageError, "the metric 'accuracy' is not measured"),
        ({"collate": lambda rows: [1]}, DataError, "it is a value of type list"),
        ({"collate": lambda rows: torch.zeros(8, 4)}, DataError, "it is a tensor of shape [8, 4]"),
        ({"collate": lambda rows: {}}, DataError, "with 8 rows each"),
        ({"collate": lambda rows: {"x": torch.zeros(3, 4)}}, DataError, "'x' is a tensor of shape [3, 4]"),
        ({"collate": lambda rows: {"x": torch.zeros(8, 4)}}, DataError, "a batch has no 'y'"),
        ({"length": lambda row: None}, DataError, "row 0 of data has no length"),
        ({"length": lambda row: 2.5}, DataError, "a value of type float"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_in_words(train, task, error, words):
    assert words in refusal(train, error, task)


class Parts:
    """What the loss below returns of its sum of losses and its rows."""

    def __init__(self, choose):
        self.choose = choose

    def __call__(self, model, batch):
        return self.choose(*loss(model, batch))


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda total, rows: total, "it returned a tensor of shape []"),
        (lambda total, rows: (total.reshape(1), rows), "(a tensor of shape [1], a value of type int)"),
        (lambda total, rows: (total.item(), rows), "(a value of type float, a value of type int)"),
        (lambda total, rows: (np.float64(total.item()), rows), "(a value of type float64, a value of type"),
        (lambda total, rows: (total, torch.ones(rows)), "(a tensor of shape [], a tensor of shape [8])"),
        (lambda total, rows: (total, None), "(a tensor of shape [], nothing)"),
        (lambda total, rows: (total, "8"), "(a tensor of shape [], a value of type str)"),
        (lambda total, rows: (total.detach(), rows), "the loss of the task has no gradient"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_in_words(train, choose, words):
    assert words in refusal(train, ModelError, {"loss": Parts(choose)})


@pytest.mark.parametrize("one", [torch.tensor, np.float32, lambda rows: torch.ones(1) * rows])
def test_a_denominator_may_be_any_single_number(train, one):
    plain = train(snugtune.Task(build_model=linear, loss=loss), output="plain")
    other = train(snugtune.Task(build_model=linear, loss=Parts(lambda total, rows: (total, one(rows)))))
    assert other.metrics == plain.metrics


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ("reviews.csv", UsageError, "data is str"),
        ([], DataError, "has no rows"),
        ({}, DataError, "has no rows"),
        ([(1, 2)] * 9, UsageError, "the first row of data is a tuple"),
        ({"x": np.zeros((3, 4)), "y": np.zeros(2)}, DataError, "x has 3 rows, y has 2 rows"),
        ({"x": np.zeros((1, 4)), "y": np.zeros(1)}, DataError, "one row is too few"),
        ({"x": ["good", "bad"]}, DataError, "the column 'x' of data cannot become a tensor"),
        ({"x": np.array(["good", "bad"])}, DataError, "texts and rows of different lengths"),
        ({"x": np.array([{}, None])}, DataError, "numpy.object_"),
        ({"x": [1.0, None]}, DataError, "None"),
        ({"x": [[1.0, 2.0], [3.0]]}, DataError, "the column 'x' of data"),
        ({"x": [np.ones(2), np.ones(3)]}, DataError, "the column 'x' of data"),
        ({"x": [torch.ones(2), torch.ones(3)]}, DataError, "equal size"),
        ({"x": [torch.ones(2), "bad"]}, DataError, "the column 'x' of data"),
        ({"x": torch.eye(3).to_sparse()}, DataError, "it is sparse"),
        ({"x": 5}, DataError, "it is a single int"),
        ({"x": np.float32(5)}, DataError, "it is a single value"),
        ({"x": torch.tensor(5)}, DataError, "it is a single value"),
        ({"x": "good"}, DataError, "it is a single str"),
        (pandas.DataFrame({"x": [1.0], "y": [0]}), UsageError, 'give data.to_dict("list")'),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1.0]})}),
            UsageError,
            'data["train"]',
        ),
        (datasets.Dataset.from_dict({"x": [[1.0] * 4] * 9, "y": [0] * 9}), DataError, 'with_format("torch")'),
        (
            [{"x": torch.ones(4), "y": 1}, {"x": torch.ones(4)}] * 9,
            DataError,
            "one has 'x', another 'x', 'y'",
        ),
        ([{"x": torch.ones(4 + n), "y": 1} for n in range(9)], DataError, "cannot be stacked"),
        ([{"x": torch.ones(4)}] * 9, DataError, "a batch has no 'y'"),
    ],
    ids=str,
)
def test_data_that_cannot_be_used_are_refused_in_words(train, data, error, words):
    assert words in refusal(train, error, data=data)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.tensor(x, requires_grad=True),
        lambda x: list(torch.tensor(x)),
        list,
        lambda x: x.tolist(),
        lambda x: x.astype(">f4"),
        lambda x: x[::-1].copy()[::-1],
        np.asfortranarray,
        lambda x: pandas.DataFrame(x).to_numpy(),  # cannot be written to
        lambda x: torch.tensor(x).T.contiguous().T,
    ],
)
def test_the_same_numbers_in_other_clothes_are_the_same_data(train, points, change):
    task = snugtune.Task(build_model=linear, loss=loss)
    digests = [
        read_record(train(task, data, output=name, epochs=1).folder / "record.jsonl").start["data_digests"]
        for name, data in (("plain", points), ("other", changed(points, x=change(points["x"]))))
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.uint8])
def test_columns_may_have_any_type_of_number(train, points, dtype):
    def cast(model, batch):
        assert batch["x"].dtype == dtype
        return loss(model, {**batch, "x": batch["x"].float()})

    train(
        snugtune.Task(build_model=linear, loss=cast),
        changed(points, x=torch.tensor(points["x"]).to(dtype), none=np.ones((50, 0))),
        epochs=1,
    )


def test_validation_without_a_column_that_the_loss_reads_is_refused_at_once(train, points):
    text = refusal(train, DataError, validation={"x": points["x"]})
    assert "validation has no column 'y'" in text
    rows = [dict(row) for row in as_rows(points)]
    del rows[20]["y"]
    assert "cannot be stacked" in refusal(train, DataError, validation=rows)


class Noisy(torch.utils.data.Dataset):
    """Rows that are changed at random whenever they are read."""

    def __init__(self, rows, scale=1.0, random=None):
        self.rows, self.scale, self.random = rows, scale, random

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        noise = torch.randn(4) if self.random is None else torch.tensor(self.random.normal(size=4)).float()
        row = self.rows[number]
        return {"x": torch.tensor(row["x"]) * self.scale + noise, "y": row["y"]}


def test_another_data_set_in_the_same_folder_is_refused(train, points):
    rows = as_rows(points)
    task = snugtune.Task(build_model=linear, loss=loss)
    for name, same, others in (
        ("list", list(rows), [rows[1:], [{**rows[0], "x": rows[1]["x"]}, *rows[1:]]]),
        ("noisy", Noisy(rows), [Noisy(rows[1:]), Noisy(rows, scale=2.0)]),
        (
            "its own random numbers",
            Noisy(rows, random=np.random.default_rng()),
            [Noisy(rows[1:], random=np.random.default_rng())],
        ),
    ):
        first = train(task, same, output=name, epochs=1)
        assert train(task, same, output=name, epochs=1) == first
        for other in others:
            with pytest.raises(RunFolderError, match=r"the contents of data\.train"):
                train(task, other, output=name, epochs=1)
        with pytest.raises(RunFolderError, match=r"these differ: data\.validation"):
            train(task, same, output=name, epochs=1, validation=points)


def test_looking_at_data_takes_no_random_numbers_from_the_program(points):
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    open_rows(Noisy(as_rows(points)), "data")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()


# Scores


def answers(model, batch):
    return {"right": model(batch["x"]).argmax(dim=1) == batch["y"]}


def accuracy(outputs):
    return {"accuracy": outputs["right"].double().mean()}


def scored(measure=accuracy, outputs=answers, metric="accuracy", **more) -> dict[str, object]:
    return {"outputs": outputs, "measure": measure, "metric": metric, **more}


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (lambda outputs: {"recall": 1.0, "f1": 0.5}, "it returned 'recall', 'f1'"),
        (lambda outputs: None, "it returned nothing"),
        (lambda outputs: 0.5, "it returned a value of type float"),
        (lambda outputs: {"accuracy": None}, "returned nothing"),
        (lambda outputs: {"accuracy": "high"}, "a value of type str"),
        (lambda outputs: {"accuracy": torch.ones(3)}, "a tensor of shape [3]"),
        (lambda outputs: {"accuracy": 1.0, "loss": "low"}, "the score 'loss' must be a number"),
        (lambda outputs: {"accuracy": 1.0, "at": object()}, "the score 'at' cannot be written"),
        (lambda outputs: {"accuracy": 1.0, "at": {(1, 2): 3}}, "the score 'at' cannot be written"),
    ],
)
def test_scores_that_cannot_be_used_are_refused_in_words(train, measure, words):
    assert words in refusal(train, ModelError, scored(measure), epochs=1)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda model, batch: 1.0, "it is a value of type float"),
        (lambda model, batch: batch["x"], "it is a tensor of shape [5, 4]"),
        (lambda model, batch: {"loss": batch["x"].mean()}, "'loss' is a tensor of shape []"),
        (lambda model, batch: {"right": [True] * 5}, "'right' is a value of type list"),
        (lambda model, batch: {"right": batch["z"]}, "a batch has no 'z'"),
    ],
)
def test_outputs_that_cannot_be_used_are_refused_in_words(train, outputs, words):
    error = DataError if "a batch" in words else ModelError
    assert words in refusal(train, error, scored(outputs=outputs), epochs=1)


def test_outputs_of_different_widths_are_refused_in_words(train):
    task = scored(
        outputs=lambda model, batch: {"sums": model(batch["x"]).sum(dim=2)},
        loss=padded_loss,
        collate=pad,
        length=lambda row: len(row["x"]),
    )
    text = refusal(train, ModelError, task, Rows(), validation=Rows(), epochs=1)
    assert "'sums' of the task has another shape" in text
    assert "[rows, 1] and [rows, 2] and [rows, 3]" in text
    assert "pad it to one width" in text


def test_scores_of_any_kind_are_recorded_as_plain_ones(train):
    result = train(
        snugtune.Task(
            build_model=linear,
            loss=loss,
            **scored(
                lambda outputs: {
                    "accuracy": np.float32(0.5),
                    "count": torch.tensor(3),
                    "confusion": np.eye(2, dtype=np.int64),
                    "per_class": {"a": torch.tensor([0.25])},
                    "words": ["a", np.float64(1)],
                }
            ),
        ),
        epochs=1,
    )
    scores = {
        "accuracy": 0.5,
        "count": 3,
        "confusion": [[1, 0], [0, 1]],
        "per_class": {"a": [0.25]},
        "words": ["a", 1.0],
    }
    assert result.metrics == scores
    assert read_record(result.folder / "record.jsonl").end["metrics"] == scores
    assert "| accuracy | 0.5000 |" in (result.model_folder / "README.md").read_text()


@pytest.mark.parametrize("value", [5, "abc", [1, 2], [["a"], ["b"]], [{"label": "a"}], {"a": 1}])
def test_tables_of_another_shape_are_not_shown_as_those_of_labels(value):
    out = Console(file=io.StringIO())
    print_tables({"per_class": value, "confusion": value}, ["a", "b"], out)
    print_tables({"per_class": value, "confusion": value}, [], out)
    assert out.file.getvalue() == ""
    assert class_scores({"per_class": value}) == []


@pytest.mark.parametrize(
    ("metric", "smaller", "best"),
    [("far", None, 3), ("far", False, 3), ("far", True, 1), ("rmse", None, 1), ("rmse", False, 3)],
)
def test_which_model_is_best(train, metric, smaller, best):
    values = iter([1.0, 2.0, 3.0])
    task = scored(lambda outputs: {metric: next(values)}, metric=metric, smaller_is_better=smaller)
    result = train(snugtune.Task(build_model=linear, loss=loss, **task), batch_size=64)
    assert result.best_update == best
    assert result.metrics == {metric: best}
    word = "smallest" if best == 1 else "largest"
    assert f"the best model is the one with the {word} {metric}" in (result.folder / "log.txt").read_text()


def test_the_metric_of_the_configuration_counts(train):
    values = iter([1.0, 2.0, 3.0])

    def measure(outputs):
        value = next(values)
        return {"far": value, "rmse": value, "high": value}

    task = snugtune.Task(
        build_model=linear, loss=loss, **scored(measure, metric="far", smaller_is_better=True)
    )
    high = train(task, batch_size=64, set={"evaluation.metric": "high"})
    assert high.best_update == 3
    values = iter([1.0, 2.0, 3.0])
    assert train(task, batch_size=64, output="2", set={"evaluation.metric": "rmse"}).best_update == 1
    text = refusal(train, UsageError, output="3", set={"evaluation.metric": "f1"})
    assert "the metric 'f1' is not measured" in text


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("model", {"model": "bert-base-uncased"}),
        ("text_column", {"text_column": "x"}),
        ("text_pair_column", {"text_pair_column": "x"}),
        ("label_column", {"label_column": ["y"]}),
        ("max_length", {"max_length": 128}),
        ("training.class_weights", {"set": {"training.class_weights": "balanced"}}),
        ("data.label_kind", {"set": {"data.label_kind": "regression"}}),
        ("data.train_split", {"set": {"data.train_split": "train"}}),
        ("data.max_length", {"set": {"data.max_length": 64}}),
        ("data.train", {"set": {"data.train": "a.csv"}}),
        ("data.validation", {"set": {"data.validation": "a.csv"}}),
        ("model.name", {"set": {"model.name": "bert-base-uncased"}}),
        ("model.revision", {"set": {"model.revision": "main"}}),
        ("task", {"set": {"task": "sequence-classification"}}),
    ],
)
def test_settings_without_effect_are_refused(train, name, more):
    assert f"{name} has no effect on a task of one's own" in refusal(train, UsageError, **more)


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
