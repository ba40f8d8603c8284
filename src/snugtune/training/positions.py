"""How far a run has come, and where its checkpoints lie. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    """

    update: int = 0
    applied: int = 0
    best_update: int | None = None
    best_value: float | None = None
    stale: int = 0
    seconds: float = 0.0


def checkpoint_path(folder: Path, update: int) -> Path:
    """Where the checkpoint after `update` updates lies."""
    return folder / f"update-{update:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    found = [path for path in folder.glob("update-*") if path.name[7:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[7:]))
