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


def finish_model(
    config: RunConfig, folder: RunFolder, step: Step, update: int | None, facts: dict[str, Any]
) -> Metrics:
    """Write `model/` and return its scores. The checkpoints stay, so a full disk costs no work.

    Args:
        config: The run's configuration.
        folder: The run's folder.
        step: Its model has the weights that are to be written.
        update: The update they are of; None where no evaluation was the best.
        facts: What is known of the data.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    metrics = _metrics_of(folder, update)
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


def _metrics_of(folder: RunFolder, update: int | None) -> Metrics:
    """The scores that an update's evaluation wrote into the record; the last ones if there is no best."""
    evaluations = read_record(folder.record_path).evaluations
    found = [line for line in evaluations if line["update"] == update] or evaluations[-1:]
    return dict(found[-1]["metrics"]) if found else {}
