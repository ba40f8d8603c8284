"""Scores, against those of scikit-learn and SciPy."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from snugtune.tasks import SMALLER_IS_BETTER
from snugtune.tasks.scores import measure, metric_names

NAMES = ("体育", "market", "film", "empty")


def single(rows: int, seed: int, *, classes: int = 4, empty: bool = True) -> dict[str, torch.Tensor]:
    """Logits that are right about half of the time; the last class has no rows, but may be answered."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - empty, (rows,), generator=random)
    logits = torch.randn(rows, classes, generator=random) + 1.5 * F.one_hot(labels, classes)
    return {"logits": logits, "labels": labels}


def check_table(table, names, precision, recall, f1, rows):
    assert [line["label"] for line in table] == list(names)
    for key, expected in {"precision": precision, "recall": recall, "f1": f1}.items():
        assert [line[key] for line in table] == pytest.approx(expected.tolist(), abs=1e-6), key
    assert [line["rows"] for line in table] == rows.tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [1, 17, 400])
@pytest.mark.parametrize("empty", [False, True])
def test_scores_of_classes_agree_with_scikit_learn(rows, seed, empty):
    sklearn = pytest.importorskip("sklearn.metrics")
    outputs = single(rows, seed, empty=empty)
    truth, answers = outputs["labels"].numpy(), outputs["logits"].argmax(-1).numpy()
    found = measure(outputs, kind="single-label", names=NAMES)
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(truth, answers), abs=1e-12)
    assert found["macro_f1"] == pytest.approx(sklearn.f1_score(truth, answers, average="macro"), abs=1e-6)
    assert found["loss"] == pytest.approx(
        sklearn.log_loss(truth, outputs["logits"].double().softmax(-1).numpy(), labels=range(4)), rel=1e-5
    )
    assert found["confusion"] == sklearn.confusion_matrix(truth, answers, labels=range(4)).tolist()
    each = sklearn.precision_recall_fscore_support(truth, answers, labels=range(4), zero_division=0)
    check_table(found["per_class"], NAMES, *each)


def test_two_classes_are_scored_as_two_and_not_as_yes_and_no():
    outputs = {
        "logits": torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.0]]),
        "labels": torch.tensor([0, 1, 0, 0]),
    }
    found = measure(outputs, kind="single-label", names=("no", "yes"))
    assert found["accuracy"] == 0.75
    assert found["confusion"] == [[2, 1], [0, 1]]
    assert found["macro_f1"] == pytest.approx((0.8 + 2 / 3) / 2)
    assert [line["rows"] for line in found["per_class"]] == [3, 1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [1, 17, 400])
def test_scores_of_several_labels_agree_with_scikit_learn(rows, seed):
    sklearn = pytest.importorskip("sklearn.metrics")
    random = torch.Generator().manual_seed(seed)
    truth = (torch.rand(rows, 4, generator=random) < torch.tensor([0.5, 0.2, 0.8, 0.0])).float()
    logits = torch.randn(rows, 4, generator=random) + 2 * truth - 1
    logits[:, 3] = -1.0  # neither there nor answered
    found = measure({"logits": logits, "labels": truth}, kind="multi-label", names=NAMES)
    answers = (logits > 0).numpy()
    for average in ("micro", "macro"):
        expected = sklearn.f1_score(truth.numpy(), answers, average=average, zero_division=0)
        assert found[f"{average}_f1"] == pytest.approx(expected, abs=1e-6), average
    expected = F.binary_cross_entropy_with_logits(logits.double(), truth.double()).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    each = sklearn.precision_recall_fscore_support(truth.numpy(), answers, zero_division=0)
    check_table(found["per_class"], NAMES, *each)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
def test_scores_of_numbers_agree_with_scikit_learn_and_scipy(seed, ties):
    sklearn = pytest.importorskip("sklearn.metrics")
    stats = pytest.importorskip("scipy.stats")
    random = torch.Generator().manual_seed(seed)
    truth = torch.randn(200, generator=random) * 3 + 2
    answers = truth + torch.randn(200, generator=random) * 2
    if ties:
        truth, answers = truth.round(), answers.round()
    found = measure({"logits": answers[:, None], "labels": truth}, kind="regression", names=())
    one, other = truth.double().numpy(), answers.double().numpy()
    assert found["mse"] == pytest.approx(sklearn.mean_squared_error(one, other), rel=1e-5)
    assert found["pearson"] == pytest.approx(stats.pearsonr(one, other).statistic, abs=1e-5)
    assert found["spearman"] == pytest.approx(stats.spearmanr(one, other).statistic, abs=1e-5)


def test_the_correlation_of_large_numbers_that_differ_little_is_exact():
    stats = pytest.importorskip("scipy.stats")
    random = torch.Generator().manual_seed(0)
    truth = torch.randn(300, generator=random) + 1e5
    answers = truth + torch.randn(300, generator=random)
    found = measure({"logits": answers[:, None], "labels": truth}, kind="regression", names=())
    expected = stats.pearsonr(answers.double().numpy(), truth.double().numpy()).statistic
    assert found["pearson"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("answers", "truth"),
    [([2.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]), ([1.0, 2.0], [3.0, 3.0]), ([1.5], [1.0])],
    ids=["constant answers", "constant truth", "one row"],
)
def test_a_correlation_that_does_not_exist_is_not_a_number_and_says_nothing(answers, truth):
    outputs = {"logits": torch.tensor(answers)[:, None], "labels": torch.tensor(truth)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = measure(outputs, kind="regression", names=())
    assert math.isnan(found["pearson"])
    assert math.isnan(found["spearman"])
    assert found["mse"] == pytest.approx(float(np.mean((np.array(answers) - np.array(truth)) ** 2)))


@pytest.mark.parametrize("kind", ["single-label", "multi-label"])
def test_answers_that_are_not_numbers_give_scores_and_no_crash(kind):
    outputs = single(12, 0)
    outputs["logits"] = torch.full_like(outputs["logits"], math.nan)
    if kind == "multi-label":
        outputs["labels"] = F.one_hot(outputs["labels"], 4).float()
    found = measure(outputs, kind=kind, names=NAMES)
    assert math.isnan(found["loss"])
    assert 0 <= found["macro_f1"] <= 1


def test_answers_in_half_precision_are_scored_in_full():
    outputs = single(300, 1)
    half = {**outputs, "logits": outputs["logits"].half()}
    exact = {**outputs, "logits": outputs["logits"].half().float()}
    assert measure(half, kind="single-label", names=NAMES) == measure(exact, kind="single-label", names=NAMES)


@pytest.mark.parametrize("kind", ["single-label", "multi-label", "regression"])
def test_every_metric_that_can_be_named_is_measured_as_a_number(kind):
    outputs = single(30, 2)
    if kind == "multi-label":
        outputs["labels"] = F.one_hot(outputs["labels"], 4).float()
    if kind == "regression":
        outputs = {"logits": outputs["logits"][:, :1], "labels": outputs["labels"].float()}
    found = measure(outputs, kind=kind, names=NAMES)
    assert {name for name, value in found.items() if isinstance(value, float)} == set(metric_names(kind))
    assert {"loss", "mse"} & set(metric_names(kind)) <= SMALLER_IS_BETTER
