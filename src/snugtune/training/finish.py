"""The end of a run: the best weights become a model that people can use."""

from __future__ import annotations

import shutil
from typing import Any

from snugtune.config import RunConfig
from snugtune.errors import RunFolderError
from snugtune.record import read_record
from snugtune.step import Step
from snugtune.tasks import Metrics
from snugtune.training.card import write_card
from snugtune.training.checkpoints import load_weights
from snugtune.training.folder import RunFolder
from snugtune.training.positions import Position, checkpoint_path


def finish_model(
    config: RunConfig, folder: RunFolder, step: Step, position: Position, facts: dict[str, Any]
) -> Metrics:
    """Write `model/` from the best checkpoint and return its scores.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    best = position.best_update
    if best is not None and best != position.update:
        load_weights(checkpoint_path(folder.checkpoints, best), step)
    metrics = _metrics_of(folder, best)
    aside = folder.path / ".writing-model"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        step.task.save(step.model, aside)
        write_card(aside, config, used_as=folder.model, facts=facts, metrics=metrics)
        shutil.rmtree(folder.model, ignore_errors=True)
        aside.rename(folder.model)
    except OSError as error:
        raise RunFolderError(
            f"cannot write the finished model into {folder.model}",
            why=str(error.strerror or error),
            do="make room; the same command then continues from the last checkpoint",
        ) from error
    return metrics


def _metrics_of(folder: RunFolder, update: int | None) -> Metrics:
    """The scores that an update's evaluation wrote into the record; the last ones if there is no best."""
    evaluations = read_record(folder.record_path).evaluations
    found = [line for line in evaluations if line["update"] == update] or evaluations[-1:]
    return dict(found[-1]["metrics"]) if found else {}
