"""The end of a run: the best weights become a model that people can use."""

from __future__ import annotations

import shutil
from typing import Any

from safetensors import SafetensorError

from snugtune.config import RunConfig
from snugtune.errors import RunFolderError
from snugtune.record import read_record
from snugtune.step import Step
from snugtune.tasks import Metrics
from snugtune.training.card import write_card
from snugtune.training.checkpoints import sync
from snugtune.training.folder import WRITING, RunFolder
from snugtune.training.positions import Position


def finish_model(
    config: RunConfig, folder: RunFolder, step: Step, position: Position, facts: dict[str, Any]
) -> Metrics:
    """Write `model/` and return its scores. The checkpoints stay, so a full disk costs no work.

    Args:
        config: The run's configuration.
        folder: The run's folder.
        step: Its model has the weights that are to be written.
        position: Where the run is; they are those of its best update, if it has one.
        facts: What is known of the data.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    metrics = _metrics_of(folder, position, step.task.metric)
    aside = folder.path / f"{WRITING}-model"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        step.task.save(step.model, aside)
        write_card(aside, config, used_as=folder.model, facts=facts, metrics=metrics)
        sync(aside)
        shutil.rmtree(folder.model, ignore_errors=True)
        aside.rename(folder.model)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunFolderError(
            f"cannot write the finished model into {folder.model}",
            why=str(getattr(error, "strerror", None) or error),
            do="make room; the same command then continues from the last checkpoint",
        ) from error
    return metrics


def _metrics_of(folder: RunFolder, position: Position, metric: str) -> Metrics:
    """The scores that the best evaluation wrote into the record; of the last one if there is no best."""
    evaluations = read_record(folder.record_path).evaluations
    if position.best_update is None:
        return dict(evaluations[-1]["metrics"]) if evaluations else {}
    found = [line["metrics"] for line in evaluations if line["update"] == position.best_update]
    # A record may have lost lines; one score is in the checkpoint too.
    known = {} if position.best_value is None else {metric: position.best_value}
    return dict(found[-1]) if found else known
