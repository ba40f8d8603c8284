"""Room on the disk for what a run is going to write."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from snugtune.errors import RunFolderError
from snugtune.step import Step
from snugtune.training.checkpoints import model_tensors
from snugtune.training.folder import WRITING, RunFolder
from snugtune.training.positions import list_checkpoints
from snugtune.units import show_size

# Copies of each parameter that learns in the state of an optimizer; adafactor keeps sums of rows and columns.
_COPIES = {"adamw-fused": 2, "adamw-foreach": 2, "sgd": 1, "adafactor": 0}


def check_space(folder: RunFolder, step: Step, *, keep_last: int, saves_left: int) -> str:
    """What the run needs on the disk, in words.

    Args:
        folder: The run's folder.
        step: What is saved.
        keep_last: Checkpoints kept, besides the best.
        saves_left: Checkpoints that are certain to come.

    Raises:
        RunFolderError: It cannot fit.
    """
    model, one = model_bytes(step), checkpoint_bytes(step)
    # While one is written, those that stay and the best are there too.
    most = (keep_last + 2) * one
    known = list_checkpoints(folder.checkpoints)
    comes = len(known) + saves_left
    least = max(min(keep_last + 1, comes) * one, min(keep_last, comes) * one + model)
    there = sum(path.stat().st_size for place in known for path in place.glob("*") if path.is_file())
    free = _free_bytes(folder.path)
    parts = f"checkpoints of {show_size(one)} each and a model of {show_size(model)}"
    if free is not None and free + there < least:
        raise RunFolderError(
            f"{folder.path} has too little room for this run",
            why=f"{parts} need at least {show_size(least - there)} more, and {show_size(free)} are free",
            do="make room, give another --output, or keep fewer: --set checkpoints.keep_last=1",
        )
    scarce = free is not None and free + there < most
    return (
        f"{parts}: at most {show_size(max(0, most - there))} more, {show_size(free)} free"
        f"{'; that may not suffice' if scarce else ''}"
    )


def has_room(folder: Path, size_bytes: int) -> bool:
    """Whether a file of a size can be written into a folder now."""
    probe = folder / f"{WRITING}-probe"
    try:
        with probe.open("wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))
            else:
                file.write(b"x")
        free = _free_bytes(folder)
        return hasattr(os, "posix_fallocate") or free is None or free >= size_bytes
    except OSError:
        return False
    finally:
        if probe.exists():
            probe.unlink()


def model_bytes(step: Step) -> int:
    """Size of the finished model's weights."""
    return sum(tensor.nbytes for tensor in model_tensors(step.model).values())


def checkpoint_bytes(step: Step) -> int:
    """Size of a checkpoint: the weights and the state of the optimizer."""
    learning = sum(parameter.nbytes for parameter in step.model.parameters() if parameter.requires_grad)
    return model_bytes(step) + _COPIES[step.choices.optimizer] * learning


def saves_left(*, done: int, total: int, every: int) -> int:
    """Evaluations that are still to come, each of which makes a checkpoint."""
    return math.ceil(total / every) - done // every if done < total else 0


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
