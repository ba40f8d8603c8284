"""Scores of classes and numbers, from torchmetrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from snugtune.tasks import Metrics

_NAMES = {
    "single-label": ("accuracy", "macro_f1", "loss"),
    "multi-label": ("micro_f1", "macro_f1", "loss"),
    "regression": ("mse", "pearson", "spearman"),
}


def metric_names(kind: str) -> tuple[str, ...]:
    """The metrics that a kind of labels has."""
    return _NAMES[kind]


def measure(outputs: dict[str, torch.Tensor], *, kind: str, names: Sequence[str]) -> Metrics:
    """Scores of all rows together.

    Args:
        outputs: `logits` [rows, classes] and `labels` ([rows]; [rows, classes] for multi-label).
        kind: single-label, multi-label or regression.
        names: The label names.
    """
    logits, labels = outputs["logits"].float(), outputs["labels"]
    if kind == "regression":
        return _numbers(logits.squeeze(-1).double(), labels.double())
    if kind == "multi-label":
        return _many_classes(logits, labels, names)
    return _one_class(logits, labels, names)


def _one_class(logits: torch.Tensor, labels: torch.Tensor, names: Sequence[str]) -> Metrics:
    from torchmetrics.functional.classification import (
        multiclass_confusion_matrix,
        multiclass_f1_score,
        multiclass_precision,
        multiclass_recall,
    )

    answers, classes = logits.argmax(dim=-1), len(names)
    confusion = multiclass_confusion_matrix(answers, labels, classes)
    scores = {
        "precision": multiclass_precision(answers, labels, classes, average=None),
        "recall": multiclass_recall(answers, labels, classes, average=None),
        "f1": multiclass_f1_score(answers, labels, classes, average=None),
        "rows": confusion.sum(dim=1),
    }
    return {
        "accuracy": (answers == labels).double().mean().item(),
        "macro_f1": float(multiclass_f1_score(answers, labels, classes, average="macro")),
        "loss": F.cross_entropy(logits, labels).item(),
        "per_class": _table(scores, names),
        "confusion": confusion.tolist(),
    }


def _many_classes(logits: torch.Tensor, labels: torch.Tensor, names: Sequence[str]) -> Metrics:
    from torchmetrics.functional.classification import (
        multilabel_f1_score,
        multilabel_precision,
        multilabel_recall,
    )

    answers, truth, classes = (logits > 0).long(), labels.long(), len(names)
    scores = {
        "precision": multilabel_precision(answers, truth, classes, average=None),
        "recall": multilabel_recall(answers, truth, classes, average=None),
        "f1": multilabel_f1_score(answers, truth, classes, average=None),
        "rows": truth.sum(dim=0),
    }
    return {
        "micro_f1": float(multilabel_f1_score(answers, truth, classes, average="micro")),
        "macro_f1": float(multilabel_f1_score(answers, truth, classes, average="macro")),
        "loss": F.binary_cross_entropy_with_logits(logits, labels.float()).item(),
        "per_class": _table(scores, names),
    }


def _numbers(answers: torch.Tensor, truth: torch.Tensor) -> Metrics:
    from torchmetrics.functional import mean_squared_error, pearson_corrcoef, spearman_corrcoef

    with warnings.catch_warnings():  # where nothing varies there is no correlation, and the result says nan
        warnings.simplefilter("ignore")
        pearson, spearman = float(pearson_corrcoef(answers, truth)), float(spearman_corrcoef(answers, truth))
    return {
        "mse": float(mean_squared_error(answers, truth)),
        "pearson": pearson,
        "spearman": math.nan if math.isnan(pearson) else spearman,  # torchmetrics says 0 where nothing varies
    }


def _table(scores: dict[str, torch.Tensor], names: Sequence[str]) -> list[dict[str, object]]:
    columns = {name: values.tolist() for name, values in scores.items()}
    return [
        {"label": label, **{name: values[row] for name, values in columns.items()}}
        for row, label in enumerate(names)
    ]
