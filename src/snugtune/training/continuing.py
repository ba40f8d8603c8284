"""How an unfinished run goes on: from its newest checkpoint that is whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from snugtune.config import RunConfig, differences
from snugtune.data.batching import Updates
from snugtune.errors import ProcessError, RunFolderError
from snugtune.planning.defaults import Decision
from snugtune.processes import Processes
from snugtune.step import Step
from snugtune.training.checkpoints import BadCheckpoint, load_best, load_checkpoint
from snugtune.training.folder import RunFolder, check_same_run, show_changes
from snugtune.training.positions import Position, checkpoint_path, facts_of, list_checkpoints
from snugtune.training.reports import Reports

_PLACE = ("training.batch_size", "data.", "the contents")
_MEASURE = ("evaluation.metric", "training.seed")  # the rows set aside follow from the seed
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

    def begin_anew(why: str) -> None:
        what = "the optimizer begins anew, and the first updates may be worse for it"
        reports.trouble(what, why=why, do="only the weights go on, as --continue-anyway asks for")

    for path in reversed(found):
        try:
            anew = begin_anew if folder.anyway else None
            position = load_checkpoint(path, step, run_id=folder.run_id, without_optimizer=anew)
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


def put_best(folder: RunFolder, step: Step, position: Position, reports: Reports) -> Position:
    """Give a step the weights of the best evaluation; those of now where that checkpoint is damaged.

    Args:
        folder: The run's folder.
        step: The step.
        position: Where the run is.
        reports: What is told.

    Returns:
        The position, with the update whose weights these are as the best.
    """
    best = position.best_update
    if best is None or best == position.update:
        return position
    try:
        load_best(checkpoint_path(folder.checkpoints, best), step)
        return position
    except BadCheckpoint as error:
        reports.trouble(
            f"the best model, of update {best}, is lost: the last one, of update {position.update}, is kept",
            why=error.why,
            do=None,
        )
        return dataclasses.replace(position, best_update=position.update, best_value=None)


def made_with(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """What a checkpoint says about the settings and data it was made with."""
    return {"settings": config.model_dump(), "data_digests": folder.data_digests}


def go_on(
    folder: RunFolder, updates: Updates, position: Position, config: RunConfig, reports: Reports
) -> Position:
    """Find the place in the data, also where other settings give it another number, and name what changed.

    Args:
        folder: The run's folder.
        updates: Its updates; they are put to that place.
        position: Where the newest checkpoint is.
        config: The configuration now.
        reports: What is told.

    Returns:
        The position without a best score, where scores cannot be compared any more.

    Raises:
        RunFolderError: It is another run, or the place is not known.
    """
    _tell_gaps(folder, position, reports)
    if position.epoch is None:
        _check_place_known(folder, position)
    else:
        updates.go_on(update=position.update, epoch=position.epoch, rows=position.rows)
    if not folder.anyway:
        check_same_run(folder, total_updates=updates.total)
    changes, comparable = _changes_since(folder, position, config)
    if not changes:
        return position
    kept = (
        "weights, optimizer and the place in the data are kept, learning rate and length follow the new plan"
    )
    anew = (
        "" if comparable else "; the best model is chosen anew, because scores of before mean something else"
    )
    reports.trouble(
        f"continues with other settings: {', '.join(changes)}",
        why=f"asked for; {kept}{anew}",
        do="the result is not that of a run without interruption, whichever settings it has",
    )
    if comparable:
        return position
    return dataclasses.replace(position, best_update=None, best_value=None, stale=0)


def _changes_since(folder: RunFolder, position: Position, config: RunConfig) -> tuple[list[str], bool]:
    """What is learnt otherwise than up to a checkpoint; whether its scores and later ones can be compared.

    The checkpoint is asked, not config.yaml: that of the folder may be of a start which never came to save.
    """
    facts = facts_of(checkpoint_path(folder.checkpoints, position.update))
    now, before = folder.data_digests, facts.get("data_digests", {})
    try:
        there = RunConfig.model_validate(facts.get("settings"))
    except ValueError:  # versions 1 and 2 do not say
        return list(folder.changes), not folder.changes
    other = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    moved = {name for name in before.keys() & now.keys() if before[name] == now[name]}
    names = [name for name in differences(there, config) if name not in moved]
    measured = [name for name in names if name.startswith("data.") or name in _MEASURE]
    changes = show_changes(there, config) + [f"the contents of {name}" for name in other]
    return changes, not (measured or other)


def _check_place_known(folder: RunFolder, position: Position) -> None:
    """Refuse other batches or data for a checkpoint of version 1 or 2, which counts in updates only."""
    changed = [change for change in folder.changes if change.startswith(_PLACE)]
    if changed:
        raise RunFolderError(
            f"cannot continue {folder.path} with other settings: {', '.join(changed)}",
            why=f"its checkpoint of update {position.update} is of an earlier snugtune and does not say how "
            "far in the data it is",
            do="continue it with the settings of before until the next checkpoint, then with these",
        )


def _tell_gaps(folder: RunFolder, position: Position, reports: Reports) -> None:
    """Notice a record that lacks what a checkpoint has seen."""
    there = sum(line["update"] <= position.update for line in folder.record.updates)
    if there < position.update:
        reports.trouble(
            f"{folder.record_path} has {there} of the {position.update} updates before this",
            why="lines were lost on a full disk" if folder.record.starts else "it was emptied or deleted",
            do="the run goes on all the same; only what reads the record lacks their losses and scores",
        )


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
