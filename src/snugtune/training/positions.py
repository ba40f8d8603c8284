"""How far a run has come, and where its checkpoints lie. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run has come.

    Args:
        update: Updates done; the next one has this number.
        applied: Updates that changed the parameters; the schedule counts these.
        best_update: Update of the best evaluation so far; None before the first.
        best_value: Its metric.
        stale: Evaluations since then without a better one.
        seconds: Seconds spent so far, over all parts of an interrupted run.
        epoch: Epochs that are over; None in checkpoints of versions 1 and 2.
        rows: Rows of the next one that are over. Together they are the place in the data, whatever the batch
            size was.
        unmeasured: An evaluation was interrupted here: it comes before the next update.
    """

    update: int = 0
    applied: int = 0
    best_update: int | None = None
    best_value: float | None = None
    stale: int = 0
    seconds: float = 0.0
    epoch: int | None = None
    rows: int = 0
    unmeasured: bool = False


def checkpoint_path(folder: Path, update: int) -> Path:
    """Where the checkpoint after `update` updates lies."""
    return folder / f"update-{update:08d}"


def update_of(path: Path) -> int:
    """The update after which a checkpoint was made."""
    return int(path.name[7:])


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    found = [path for path in folder.glob("update-*") if path.name[7:].isdigit()]
    return sorted(found, key=update_of)


def run_of(path: Path) -> str | None:
    """The run that a checkpoint belongs to: "" if it does not say (version 1), None if it cannot be read."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return str(state["run_id"]) if state["version"] > 1 else ""
    except (OSError, ValueError, LookupError, TypeError):
        return None


def facts_of(path: Path) -> dict[str, Any]:
    """What a checkpoint says about the run it is of; empty if nothing (versions 1 and 2)."""
    try:
        facts = json.loads((path / "state.json").read_text(encoding="utf-8"))["facts"]
        return facts if isinstance(facts, dict) else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def belongs(path: Path, run_id: str) -> bool:
    """Whether a checkpoint is known to be one of a run: only such ones may be deleted."""
    # Before checkpoints named their run, a folder held those of one run only.
    return run_of(path) in (run_id, "")
