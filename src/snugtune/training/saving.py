"""When and how a run saves, and what it does when the disk does not take a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from snugtune.errors import RunFolderError
from snugtune.processes import Processes
from snugtune.step import Step
from snugtune.training import checkpoints
from snugtune.training.folder import RunFolder
from snugtune.training.positions import Position
from snugtune.training.reports import Reports
from snugtune.training.space import has_room, model_bytes


class Saver:
    """Saves a run. A disk that is full or read-only does not end it, as long as that makes sense.

    Args:
        folder: The run's folder.
        step: What is saved.
        reports: What is told.
        processes: The processes of the run; the first one writes.
        keep_last: Checkpoints kept, besides the best.
        facts: What else a checkpoint says: what it was made with.
    """

    def __init__(
        self,
        folder: RunFolder,
        step: Step,
        reports: Reports,
        processes: Processes,
        *,
        keep_last: int,
        facts: Mapping[str, Any],
    ) -> None:
        self.folder, self.step, self.reports, self.processes = folder, step, reports, processes
        self.keep_last, self.facts = keep_last, facts
        self.last: int | None = None
        """Update of the newest checkpoint; None before the first."""
        self.unmeasured = False
        """Whether that one waits for an evaluation, after which it is written again."""
        self.failed: RunFolderError | None = None
        """Why the newest one could not be written; None if it could."""
        self.at = time.monotonic()
        """When that was, or was tried."""

    def is_due(self, every_minutes: float) -> bool:
        """Whether it is time again, by the clock of this process."""
        return time.monotonic() - self.at >= every_minutes * 60

    def save(self, position: Position, why: str) -> bool:
        """Save, unless just that is saved already; False if it failed.

        Args:
            position: Where the run is.
            why: What it is for: evaluation, time or interrupt.

        Raises:
            RunFolderError: Nothing was ever saved, and there is no room for the finished model either.
        """
        began = self.at = time.monotonic()
        if self.processes.rank or (self.last == position.update and self.unmeasured == position.unmeasured):
            return True
        places, run_id = self.folder.checkpoints, self.folder.run_id
        try:
            path = checkpoints.save_checkpoint(places, self.step, position, run_id=run_id, facts=self.facts)
        except RunFolderError as error:
            self._tell(error)
            return False
        checkpoints.remove_old(
            places,
            run_id=run_id,
            keep_last=self.keep_last,
            best_update=position.best_update,
            update=position.update,
        )
        self.at = time.monotonic()
        self.last, self.unmeasured, self.failed = position.update, position.unmeasured, None
        seconds = self.at - began
        self.reports.checkpoint(
            path, update=position.update, folder=self.folder.path, seconds=seconds, why=why
        )
        return True

    def _tell(self, error: RunFolderError) -> None:
        told, self.failed = self.failed is not None, error
        if self.last is None and not has_room(self.folder.path, model_bytes(self.step)):
            raise RunFolderError(
                "the first checkpoint could not be written, and the finished model could not be either",
                why=error.why,
                do="make room or give another --output, and start again: going on would lose everything",
            ) from error
        if told:
            self.reports.journal.log(f"{error.what}: {error.why}")
            return
        ground = "nothing" if self.last is None else f"the checkpoint of update {self.last}"
        self.reports.trouble(
            error.what, why=error.why, do=f"make room; the run goes on, has {ground}, and tries again"
        )
