"""How an unfinished run goes on: from its newest checkpoint that is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from snugtune.errors import ProcessError, RunFolderError
from snugtune.planning.defaults import Decision
from snugtune.processes import Processes
from snugtune.step import Step
from snugtune.training.checkpoints import BadCheckpoint, load_best, load_checkpoint
from snugtune.training.folder import RunFolder
from snugtune.training.positions import Position, checkpoint_path, list_checkpoints
from snugtune.training.reports import Reports

# Decisions after which the same rows give other roundings, or other random numbers.
_MATTER = ("precision", "passes", "packing", "pass tokens", "pass price")


def load_newest(folder: RunFolder, step: Step, reports: Reports, processes: Processes) -> Position:
    """Put a step into the state of the newest checkpoint; a damaged one is skipped, which is told.

    Args:
        folder: The run's folder.
        step: The step.
        reports: What is told.
        processes: The processes of the run; all of them must read the same.

    Raises:
        RunFolderError: All are damaged, or the newest whole one does not fit the run.
        ProcessError: The processes see different checkpoints.
    """
    found = list_checkpoints(folder.checkpoints)
    skipped: list[BadCheckpoint] = []
    position = Position()
    for path in reversed(found):
        try:
            position = load_checkpoint(path, step, run_id=folder.run_id)
            break
        except BadCheckpoint as error:
            skipped.append(error)
            what = f"the checkpoint {path.name} is skipped"
            reports.trouble(what, why=error.why, do="an earlier one is looked for")
    if found and len(skipped) == len(found):
        reasons = zip(reversed(found), skipped, strict=True)
        raise RunFolderError(
            f"no checkpoint in {folder.checkpoints} can be used",
            why="; ".join(f"{path.name}: {error.why}" for path, error in reasons),
            do=f"put a copy of one back, or delete {folder.checkpoints} to start again from the beginning",
        )
    if len(set(processes.gather(position.update))) > 1:
        raise ProcessError(
            "the processes of this run see different checkpoints",
            why=f"this one continues after update {position.update}, others do not",
            do="give an --output on a disk that all of them share",
        )
    return position


def put_best(folder: RunFolder, step: Step, position: Position, reports: Reports) -> int | None:
    """Give a step the weights of the best evaluation; those of now where that checkpoint is damaged.

    Args:
        folder: The run's folder.
        step: The step.
        position: Where the run is.
        reports: What is told.

    Returns:
        The update whose weights these are; None where no evaluation was the best.
    """
    best = position.best_update
    if best is None or best == position.update:
        return best
    try:
        load_best(checkpoint_path(folder.checkpoints, best), step)
        return best
    except BadCheckpoint as error:
        reports.trouble(
            f"the best model, of update {best}, is lost: the last one, of update {position.update}, is kept",
            why=error.why,
            do=None,
        )
        return position.update


def tell_changes(
    folder: RunFolder, decisions: Sequence[Decision], now: Mapping[str, Any], reports: Reports
) -> None:
    """Name what changed since the run was interrupted and makes it round differently from here on.

    Args:
        folder: The run's folder.
        decisions: What was decided this time.
        now: Other facts of this time: device and processes.
        reports: What is told.
    """
    before = (folder.record.starts or [{}])[-1]
    pairs = [(name, before.get(name), value) for name, value in now.items()]
    decided = {line["name"]: line["value"] for line in before.get("decisions", [])}
    pairs += [(each.name, decided.get(each.name), each.value) for each in decisions if each.name in _MATTER]
    pairs.append(("torch", _torch_before(folder), torch.__version__))
    changed = [f"{name} {old} -> {new}" for name, old, new in pairs if old is not None and old != new]
    if changed:
        reports.trouble(
            f"changed since the interruption: {', '.join(changed)}",
            why="numbers round differently from here on, and dropout may draw others",
            do="for exactly the result of a run without interruption, continue as it began",
        )


def _torch_before(folder: RunFolder) -> str | None:
    try:
        snapshot = json.loads((folder.path / "environment.json").read_text(encoding="utf-8"))
        return str(snapshot["packages"]["torch"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
