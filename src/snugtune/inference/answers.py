"""What a model's numbers mean: labels with scores, or a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from snugtune.data.labels import Labels
from snugtune.data.writers import free_names

if TYPE_CHECKING:
    import pyarrow as pa

_SEPARATOR = "|"


def answer_names(labels: Labels, taken: list[str]) -> list[str]:
    """The names of the columns of answers beside columns that have names already."""
    if labels.kind == "regression":
        names = ["predicted_value"]
    elif labels.kind == "single-label":
        names = ["predicted_label", "predicted_score"]
    else:
        names = ["predicted_labels", *(f"predicted_score_{label}" for label in labels.names)]
    return free_names(names, taken)


def answer_table(logits: torch.Tensor, labels: Labels, *, separator: str | None) -> pa.Table:
    """Numbers of a model as answers, in the columns of `answer_names`.

    Args:
        logits: [rows, classes].
        labels: What the model answers.
        separator: What stands between several labels; None takes a bar.
    """
    import pyarrow as pa

    columns: list[list[Any]]
    if labels.kind == "regression":
        columns = [_numbers(logits[:, 0])]
    elif labels.kind == "single-label":
        scores, numbers = logits.softmax(dim=-1).max(dim=-1)
        columns = [[labels.names[number] for number in numbers.tolist()], _numbers(scores)]
    else:
        scores = logits.sigmoid()
        joined = [
            (separator or _SEPARATOR).join(name for name, yes in zip(labels.names, row, strict=True) if yes)
            for row in (logits > 0).tolist()
        ]
        columns = [joined, *(_numbers(column) for column in scores.T)]
    kinds = [
        pa.string() if labels.kind != "regression" else pa.float64(),
        *[pa.float64()] * (len(columns) - 1),
    ]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    return pa.table(arrays, names=answer_names(labels, []))


def show_answer(answer: dict[str, Any]) -> str:
    """An answer as a line: 'praise  0.9412'; for several labels the score of each follows."""
    first, *rest = answer.items()
    words = first[1] if isinstance(first[1], str) else f"{first[1]:.4f}"
    if len(rest) == 1:
        return f"{words}  {rest[0][1]:.4f}"
    scores = ", ".join(f"{name.removeprefix('predicted_score_')} {value:.4f}" for name, value in rest)
    return f"{words or 'none'}  ({scores})" if rest else words


def _numbers(values: torch.Tensor) -> list[float]:
    """As many digits as fp32 has; more would only look exact."""
    return [float(f"{value:.7g}") for value in values.tolist()]
