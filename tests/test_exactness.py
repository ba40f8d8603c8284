"""The gradient of an update is that of its whole batch: real transformers, unequal texts, plain PyTorch."""

from __future__ import annotations

import copy
import csv
import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import snugtune
from snugtune.config import RunConfig
from snugtune.data.batching import Batch, Examples, Plan, Updates
from snugtune.data.cutting import cut_passes
from snugtune.data.labels import Labels
from snugtune.record import read_record
from snugtune.step import Choices, Hyperparameters, Step, Updated
from snugtune.tasks import Task
from snugtune.tasks.pretrained import load_tokenizer
from snugtune.tasks.sequence_classification import build_task

Gradient = dict[str, torch.Tensor]

CPU = torch.device("cpu")
ROWS = 9
CLASSES = ("bad", "fair", "good")
WEIGHTS = torch.tensor([0.2, 1.0, 7.0])
LABEL_KINDS = {
    "single-label": "single-label",
    "single-label, weighted": "single-label",
    "multi-label": "multi-label",
    "multi-label, weighted": "multi-label",
    "regression": "regression",
}
KINDS = [*LABEL_KINDS, "tokens"]
# Passes of equal size, one for each row, and the program's own cut by length.
CUTS: dict[str, dict[str, Any]] = {
    "1 pass": {"passes": 1, "price_tokens": 0},
    "3 passes": {"passes": 3, "price_tokens": 0},
    "7 passes": {"passes": 7, "price_tokens": 0},
    "each row alone": {"passes": ROWS, "price_tokens": 0},
    "by length": {"passes": None, "price_tokens": 8},
}
# What may be lost: a share of the largest entry of the gradient; in half precision two units of its rounding.
ROUNDING = {"fp32": 1e-6, "fp16": 2**-9, "bf16": 2**-6}


class Table(list[dict[str, Any]]):
    """Encoded rows in memory."""

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        return [dict(self[key]) for key in keys]


def build_model(family: str, kind: str) -> nn.Module:
    """A tiny transformer without dropout; the same numbers each time."""
    return copy.deepcopy(_build_once(family, kind))


@lru_cache
def _build_once(family: str, kind: str) -> nn.Module:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": 60,
        "num_labels": 1 if kind == "regression" else 3,
        "pad_token_id": 0,
    }
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 3}
    decoder = {"n_embd": 32, "n_head": 2, "n_layer": 3, "n_positions": 64, "use_cache": False}
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "classifier_dropout": 0.0}
    config = {
        "bert": lambda: transformers.BertConfig(**shape, **calm, **bert, max_position_embeddings=64),
        "roberta": lambda: transformers.RobertaConfig(**shape, **calm, **bert, max_position_embeddings=66),
        "gpt2": lambda: transformers.GPT2Config(**shape, **decoder, **silent, **ends),
    }[family]()
    model = (
        transformers.AutoModelForTokenClassification
        if kind == "tokens"
        else transformers.AutoModelForSequenceClassification
    )
    torch.manual_seed(3)
    built: nn.Module = model.from_config(config)
    # The usual first weights are so small that the gradient of the head drowns all others.
    for parameter in built.parameters():
        if parameter.ndim > 1:
            parameter.data *= 3
    return built


def make_rows(kind: str, count: int = ROWS) -> Table:
    """Rows of 3, 5, 7 ... tokens with labels; with "tokens" a label for each, some not counted."""
    random = np.random.default_rng(11)
    rows = Table()
    for number, length in enumerate(random.permutation(np.arange(3, 3 + 2 * count, 2))):
        label: Any = {
            "multi-label": [float(bit) for bit in random.integers(0, 2, 3)],
            "regression": float(random.normal()),
            "tokens": random.choice([0, 1, 2, -100], size=length, p=[0.2, 0.1, 0.1, 0.6]).tolist(),
        }.get(LABEL_KINDS.get(kind, kind), int(random.integers(0, 3)))
        if kind == "tokens" and number == 5:
            label = [-100] * int(length)  # a row, and so a pass, in which nothing counts
        rows.append({"input_ids": random.integers(5, 60, length).tolist(), "labels": label})
    return rows


def make_task(kind: str, folder: Path, *, family: str = "bert") -> Task:
    """The project's own task with a model of our own; token classification is built by hand."""
    if kind == "tokens":
        return token_task(family)
    weights = dict(zip(CLASSES, WEIGHTS.tolist(), strict=True)) if "weighted" in kind else None
    config = RunConfig.model_validate(
        {
            "model": {"name": str(folder)},
            "data": {"train": "rows.csv"},
            "training": {"class_weights": weights},
        }
    )
    names = () if kind == "regression" else CLASSES
    labels = Labels(kind=LABEL_KINDS[kind], names=names)
    task = build_task(config, labels, load_tokenizer(config.model), 64, None)
    return dataclasses.replace(task, build_model=lambda: build_model(family, kind))


def pad(values: list[list[int]], filler: int) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in values], batch_first=True, padding_value=filler
    )


def answers(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits


def token_task(family: str = "bert") -> Task:
    """A label for each token; -100 is not counted, nor is padding."""

    def collate(rows: Any) -> Batch:
        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": pad(ids, 0),
            "attention_mask": pad([[1] * len(row) for row in ids], 0),
            "labels": pad([row["labels"] for row in rows], -100),
        }

    def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        labels = batch["labels"].flatten()
        logits = answers(model, batch).float().flatten(0, 1)
        return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()

    return Task(
        name="tokens",
        build_model=lambda: build_model(family, "tokens"),
        collate=collate,
        loss=loss,
        outputs=lambda model, batch: {},
        measure=lambda outputs: {},
        example_batch=lambda rows, tokens: {},
        metric="loss",
        save=lambda model, folder: None,
    )


def whole_batch(task: Task, kind: str, rows: Table) -> tuple[float, Gradient]:
    """Loss and gradient of the rows in one padded pass: what PyTorch calls the mean, in double precision."""
    model, batch = task.build_model().double(), task.collate(rows.__getitems__(list(range(len(rows)))))
    logits, labels = answers(model, batch), batch["labels"]
    weights = WEIGHTS.double() if "weighted" in kind else None
    if kind == "tokens":
        loss = F.cross_entropy(logits.transpose(1, 2), labels)
    elif kind == "regression":
        loss = F.mse_loss(logits[:, 0], labels.double())
    elif kind.startswith("multi-label"):
        loss = F.binary_cross_entropy_with_logits(logits, labels.double(), weight=weights)
    else:
        loss = F.cross_entropy(logits, labels, weight=weights)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def make_step(task: Task, **choices: Any) -> Step:
    """A step that only adds the gradient: nothing decays, nothing is clipped."""
    plain = Hyperparameters(clip_grad_norm=None, weight_decay=0.0)
    return Step(task, Choices(**{"optimizer": "sgd", **choices}), plain, device=CPU)


def update_of(step: Step, passes: list[Batch], *, number: int = 0) -> tuple[Updated, Gradient]:
    """Run an update; also the gradient that its optimizer used, which its first momentum shows."""
    step.optimizer.state.clear()
    did = step.update(passes, number=number, learning_rate=0.1)
    momentum, share = ("exp_avg", 0.1) if "adamw" in step.choices.optimizer else ("momentum_buffer", 1.0)
    state = step.optimizer.state
    return did, {name: state[p][momentum] / share for name, p in step.model.named_parameters() if p in state}


def cut(task: Task, rows: Table, **how: Any) -> list[Batch]:
    lengths = np.array([len(row["input_ids"]) for row in rows])
    parts = cut_passes(np.arange(len(rows)), lengths, **how)
    return [task.collate(rows.__getitems__(part.tolist())) for part in parts]


def worst(found: Gradient, expected: Gradient) -> float:
    """The largest difference, as a share of the largest entry of the expected gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(entry.abs().max()) for entry in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / largest


@pytest.fixture(scope="module")
def wanted(tiny_model: Path) -> Callable[[str, str], tuple[Task, Table, float, Gradient]]:
    """A function: family and kind -> task, rows, and loss and gradient of the whole batch, computed once."""
    found: dict[tuple[str, str], tuple[Task, Table, float, Gradient]] = {}

    def find(family: str, kind: str) -> tuple[Task, Table, float, Gradient]:
        if (family, kind) not in found:
            task, rows = make_task(kind, tiny_model, family=family), make_rows(kind)
            found[family, kind] = (task, rows, *whole_batch(task, kind, rows))
        return found[family, kind]

    return find


def check(step: Step, rows: Table, how: dict[str, Any], loss: float, gradient: Gradient) -> None:
    precision = step.choices.precision
    if precision == "fp16":  # at the first scale, 2^16, some gradients overflow
        step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 2.0**8})
    passes = cut(step.task, rows, **how)
    assert len(passes) == how["passes"] or (how["passes"] is None and 2 < len(passes) < ROWS)
    did, found = update_of(step, passes)
    assert did.applied
    assert worst(found, gradient) < ROUNDING[precision]
    assert did.loss == pytest.approx(loss, rel=ROUNDING[precision])
    norm = math.sqrt(sum(float((entry.double() ** 2).sum()) for entry in gradient.values()))
    assert did.grad_norm == pytest.approx(norm, rel=ROUNDING[precision])


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("layers", [0, 2, "all"])
@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_an_update_is_that_of_its_whole_batch(kind, how, layers, precision, wanted):
    task, rows, loss, gradient = wanted("bert", kind)
    step = make_step(task, checkpointed_layers=layers, precision=precision)
    assert step.checkpointed == (3 if layers == "all" else layers)
    check(step, rows, CUTS[how], loss, gradient)


@pytest.mark.parametrize("layers", [0, "all"])
@pytest.mark.parametrize("how", ["1 pass", "3 passes", "each row alone", "by length"])
@pytest.mark.parametrize("kind", ["single-label, weighted", "tokens"])
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_other_families_are_as_exact(family, kind, how, layers, wanted):
    task, rows, loss, gradient = wanted(family, kind)
    check(make_step(task, checkpointed_layers=layers), rows, CUTS[how], loss, gradient)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach"])
@pytest.mark.parametrize("how", ["1 pass", "3 passes", "by length"])
@pytest.mark.parametrize("kind", ["single-label, weighted", "multi-label", "tokens"])
def test_other_optimizers_are_given_the_same_gradient(kind, how, optimizer, precision, wanted):
    task, rows, loss, gradient = wanted("bert", kind)
    check(make_step(task, optimizer=optimizer, precision=precision), rows, CUTS[how], loss, gradient)


# What goes wrong elsewhere


def test_passes_with_different_numbers_of_tokens_weigh_their_tokens_and_not_themselves():
    """C120: the mean of means is off by two thirds."""
    task, rows = token_task(), Table()
    for counted in (3, 9):
        labels = [0] * counted if counted == 3 else [1, 2, 2] * 3
        rows.append({"input_ids": list(range(5, 5 + counted)), "labels": labels})
    _, gradient = whole_batch(task, "tokens", rows)
    alone = [whole_batch(task, "tokens", Table([row]))[1] for row in rows]
    mean_of_means = {name: (alone[0][name] + alone[1][name]) / 2 for name in gradient}
    assert worst(mean_of_means, gradient) > 0.3
    _, found = update_of(make_step(task), cut(task, rows, passes=2, price_tokens=0))
    assert worst(found, gradient) < 1e-6


def test_any_split_of_the_same_rows_ends_in_the_same_weights():
    """C120"""
    task, rows = token_task(), make_rows("tokens", 12)
    random = np.random.default_rng(2)
    ends = []
    for splits in (0, 1, 2, 4, 7, 11):
        order = random.permutation(12)
        parts = np.split(order, np.sort(random.choice(np.arange(1, 12), splits, replace=False)))
        step = make_step(task)
        step.update(
            [task.collate(rows.__getitems__(part.tolist())) for part in parts], number=0, learning_rate=1.0
        )
        ends.append([parameter.detach() for parameter in step.model.parameters()])
    start = list(make_step(task).model.parameters())
    assert max(float((a - b).detach().abs().max()) for a, b in zip(start, ends[0], strict=True)) > 0.01
    for end in ends[1:]:
        assert max(float((a - b).abs().max()) for a, b in zip(end, ends[0], strict=True)) < 1e-6


def test_the_last_updates_of_an_epoch_are_whole_and_leave_nothing_to_the_next(tiny_model):
    """C122: 63 rows, 8 in an update, each in a pass of its own: the eighth update of an epoch has 7."""
    kind = "single-label, weighted"
    task, random = make_task(kind, tiny_model), np.random.default_rng(4)
    lengths = random.integers(3, 12, 63)
    rows = Table(
        {"input_ids": random.integers(5, 60, length).tolist(), "labels": int(random.integers(0, 3))}
        for length in lengths
    )
    plan = Plan(batch_size=8, passes=8)
    updates = Updates(Examples(rows, lengths), task.collate, plan=plan, seed=1, epochs=2)
    assert updates.total == 16
    step, sizes = make_step(task), []
    for number in range(7, 10):  # the last of an epoch, and the first two of the next
        step.model.load_state_dict(task.build_model().state_dict())
        assert all(parameter.grad is None for parameter in step.model.parameters())
        did, found = update_of(step, updates[number], number=number)
        batch = Table(rows[row] for row in updates.rows_of(number))
        loss, gradient = whole_batch(task, kind, batch)
        assert worst(found, gradient) < 1e-6
        assert did.loss == pytest.approx(loss, rel=1e-6)
        sizes.append((did.samples, did.passes))
    assert sizes == [(7, 7), (8, 8), (8, 8)]


@pytest.mark.parametrize("passes", [1, 4, 32])
def test_the_loss_that_is_told_is_the_mean_whatever_the_passes(passes):
    """C125: a model whose loss is always 2, also in the update that has fewer rows."""

    def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
        count = len(batch["input_ids"])
        return 2.0 * count + 0.0 * answers(model, batch).sum(), count

    task = dataclasses.replace(token_task(), loss=loss)
    rows = Table({"input_ids": [5] * (3 + row % 4), "labels": [0] * (3 + row % 4)} for row in range(36))
    lengths = np.array([len(row["input_ids"]) for row in rows])
    plan = Plan(batch_size=32, passes=passes)
    updates = Updates(Examples(rows, lengths), task.collate, plan=plan, seed=1, epochs=1)
    step = make_step(task)
    did = [update_of(step, updates[number], number=number)[0] for number in range(2)]
    assert [each.loss for each in did] == [2.0, 2.0]
    assert [each.samples for each in did] == [32, 4]
    assert [each.passes for each in did] == [passes, min(passes, 4)]


# Whole runs


@pytest.fixture(scope="module")
def calm_model(build_tiny_model: Callable[..., Path]) -> Path:
    return build_tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.fixture
def run(calm_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """Train on 20 unequal texts of two classes, 8 to an update, two epochs: 2 x (8 + 8 + 4) samples."""
    for name in ("train", "validation"):
        with (tmp_path / f"{name}.csv").open("w", encoding="utf-8", newline="") as out:
            rows = [
                [f"the film was {'very ' * (n % 9)}{'bad' if n % 3 else 'good'}", n % 3 > 0]
                for n in range(20)
            ]
            csv.writer(out).writerows([["text", "label"], *rows])

    def train(output: str, **settings: object) -> Any:
        return snugtune.train(
            model=calm_model,
            data=tmp_path / "train.csv",
            validation=tmp_path / "validation.csv",
            batch_size=8,
            epochs=2,
            learning_rate=1e-2,
            output=tmp_path / output,
            quiet=True,
            # Without Adam: where a gradient is all rounding, Adam divides the rounding by itself.
            set={"training.optimizer": "sgd", "training.class_weights": "balanced"}
            | {f"training.{name}": value for name, value in settings.items()},
        )

    return train


def end_of(result: Any) -> Gradient:
    from safetensors.torch import load_file

    return load_file(result.model_folder / "model.safetensors")


@pytest.mark.parametrize("batching", ["random", "grouped"])
def test_runs_in_other_passes_and_with_checkpointed_layers_end_in_the_same_weights(run, batching):
    common = {"batching": batching, "clip_grad_norm": 0.5}
    one = end_of(run("one", passes=1, **common))
    for passes, layers in ((3, 0), (7, 1), ("auto", "all")):
        how = {"passes": passes, "checkpointed_layers": layers, "pass_price": 4}
        result = run(f"{passes} passes", **common, **how)
        assert max(line["grad_norm"] for line in read_record(result.folder / "record.jsonl").updates) > 0.5
        for name, tensor in end_of(result).items():
            torch.testing.assert_close(tensor, one[name], rtol=0, atol=1e-6)


def test_no_rest_of_an_epoch_is_dropped_and_the_rate_falls_by_updates(run):
    """C121, C124: ten pairs of rows, four in an update, two epochs: six updates, not four or twenty."""
    result = run("run", passes=4, warmup_fraction=0.0, schedule="linear")
    record = read_record(result.folder / "record.jsonl")
    assert record.start["total_updates"] == result.updates == 6
    assert [line["samples"] for line in record.updates] == [8, 8, 4, 8, 8, 4]
    assert [line["passes"] for line in record.updates] == [4] * 6
    assert all(line["applied"] for line in record.updates)
    rates = [line["learning_rate"] for line in record.updates]
    assert rates == pytest.approx([1e-2 * left / 6 for left in (6, 5, 4, 3, 2, 1)])
