"""What a run left behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snugtune.training.folder import RunFolder

if TYPE_CHECKING:
    from snugtune.tasks import Metrics


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run left behind.

    Args:
        folder: The run's folder.
        model_folder: The finished model; None if the run was interrupted.
        metrics: Scores of the best model on the validation data.
        best_update: The update it was made by.
        updates: Updates done.
        seconds: Seconds of the whole run, data and evaluation included.
        status: finished, or interrupted.
        label_names: What the model answers.
    """

    folder: Path
    model_folder: Path | None
    metrics: Metrics
    best_update: int | None
    updates: int
    seconds: float
    status: str
    label_names: list[str]


def finished_result(folder: RunFolder) -> TrainResult:
    """The result of a run that ended before, from its record."""
    end, start = folder.record.end or {}, folder.record.start or {}
    return TrainResult(
        folder=folder.path,
        model_folder=folder.model,
        metrics=end.get("metrics", {}),
        best_update=end.get("best_update"),
        updates=end.get("updates", len(folder.record.updates)),
        seconds=end.get("seconds", 0.0),
        status="finished",
        label_names=start.get("data", {}).get("label_names", []),
    )


def show_numbers(metrics: Metrics) -> str:
    """The single numbers among the metrics: 'accuracy 0.9612, macro_f1 0.9604'."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float))
