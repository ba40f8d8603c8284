"""What a run tells while it runs: to its record, its log, the screen, and trackers."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snugtune.config import TrainingSettings
from snugtune.data.batching import Plan, Updates
from snugtune.planning.defaults import Decision
from snugtune.record import RecordWriter
from snugtune.step import Updated
from snugtune.tasks import Metrics
from snugtune.training.journal import Journal
from snugtune.training.positions import Position
from snugtune.training.progress import Memory, Progress, Shown
from snugtune.training.rates import Rates
from snugtune.training.result import show_numbers
from snugtune.training.schedule import warmup_updates
from snugtune.units import show_count


def describe_batch(plan: Plan, rows: int, processes: int) -> str:
    """How the samples of an update come together, in words.

    Args:
        plan: How rows become updates and passes.
        rows: Rows of the training data.
        processes: Processes that share each update.
    """
    samples = min(plan.batch_size, rows)
    share = math.ceil(samples / processes)
    words = f"{show_count(samples, 'sample')} in each update"
    if processes > 1:
        equal = "" if samples % processes == 0 else "at most "
        words += f" = {processes} processes x {equal}{show_count(share, 'sample')}"
    passes = 0 if plan.passes is None else min(plan.passes, share)
    if passes > 1:
        exact = share % passes == 0
        words += f"{' =' if processes == 1 else ', each'} {passes} passes x "
        words += f"{'' if exact else 'at most '}{show_count(math.ceil(share / passes), 'sample')}"
    elif passes == 1:
        words += ", in one pass" if processes == 1 else ", each in one pass"
    else:
        words += ", in as many passes as their lengths call for"
    if plan.batch_size > rows:
        words += f"; batch_size {plan.batch_size:,} is more than the {show_count(rows, 'row')} of an epoch"
    if passes and plan.passes is not None and plan.passes > share:
        words += f"; {plan.passes} passes are more than there are samples"
    return f"{words}; the last update of an epoch may have fewer" if rows % samples else words


class Reports:
    """Tells of updates, evaluations and checkpoints.

    Args:
        record: The run's record.
        journal: Its log.
        updates: Its updates.
        every_updates: Updates between two evaluations.
    """

    def __init__(
        self, record: RecordWriter, journal: Journal, updates: Updates, *, every_updates: int
    ) -> None:
        self.record, self.journal, self.updates = record, journal, updates
        self.every_updates = every_updates
        self.progress: Progress | None = None
        self.rates = Rates(now=time.monotonic())
        self._tokens, self._positions = 0, 0.0

    def plan(
        self, decisions: Sequence[Decision], settings: TrainingSettings, *, parameters: int, processes: int
    ) -> None:
        """Tell what was decided, and what is ahead.

        Args:
            decisions: What the settings left open.
            settings: The settings of the training.
            parameters: Parameters of the model.
            processes: Processes that share each update.
        """
        for decision in decisions:
            self.journal.say(f"{decision.name:<9} {decision.value}: {decision.because}")
        self.journal.say(
            f"batch     {describe_batch(self.updates.plan, len(self.updates.examples), processes)}"
        )
        total, each = show_count(self.updates.planned, "update"), show_count(self.updates.per_epoch, "update")
        warmup = show_count(warmup_updates(settings, self.updates.planned), "update")
        self.journal.say(
            f"plan      {total}, {each} in each of {show_count(settings.epochs, 'epoch')}; the learning rate "
            f"rises over {warmup}; {parameters / 1e6:.1f} million parameters"
        )

    def start(self, **facts: Any) -> None:
        """Tell the record that the run starts, or starts again."""
        self.record.write("start", **facts)

    def update(self, did: Updated, *, number: int, learning_rate: float, memory: Memory | None) -> None:
        """Tell of an update.

        Args:
            did: What it did.
            number: Its number, from 1.
            learning_rate: Its learning rate.
            memory: Memory of the card at its highest during it; None without a card.
        """
        seconds = self.rates.add(now=time.monotonic(), samples=did.samples, tokens=did.tokens or 0)
        if did.tokens and did.padding is not None:
            self._tokens += did.tokens
            self._positions += did.tokens / (1 - did.padding)
        self.record.write(
            "update",
            update=number,
            epoch=math.ceil((number - self.updates.ahead) / self.updates.per_epoch),
            learning_rate=learning_rate,
            seconds=round(seconds, 6),
            **vars(did),
            **({} if memory is None else dataclasses.asdict(memory)),
        )
        if self.progress is not None:
            self.progress.update(self._shown(did, number, learning_rate, memory))

    def skipped(self, number: int, *, why: str, do: str | None) -> None:
        """Tell of an update that changed nothing.

        Args:
            number: Its number, from 1.
            why: Why.
            do: What to do about it; None says it to the log alone.
        """
        what = f"update {number} was skipped"
        if do is not None:
            self.trouble(what, why=why, do=do)
            return
        self.record.write("event", what=what, why=why, do=None)
        self.journal.log(f"{what}: {why}")

    def _shown(self, did: Updated, number: int, learning_rate: float, memory: Memory | None) -> Shown:
        total, planned = self.updates.total, self.updates.planned
        done = number - self.updates.ahead
        evaluations_left = math.ceil(planned / self.every_updates) - done // self.every_updates
        return Shown(
            update=number,
            total_updates=total,
            loss=did.loss,
            learning_rate=learning_rate,
            samples_per_second=self.rates.samples_per_second,
            tokens_per_second=self.rates.tokens_per_second if did.tokens else None,
            seconds_left=self.rates.seconds_left(updates_left=total - number, pauses_left=evaluations_left),
            memory=memory,
        )

    def evaluation_pass(self, done: int, total: int) -> None:
        """Tell of a pass of an evaluation."""
        if self.progress is not None:
            self.progress.evaluation(done=done, total=total)

    def evaluation(
        self, metrics: Metrics, position: Position, *, rows: int, seconds: float, best: bool
    ) -> None:
        """Tell of an evaluation.

        Args:
            metrics: Its scores.
            position: Where the run is.
            rows: Rows it measured on.
            seconds: How long it took.
            best: Whether it is the best so far.
        """
        epoch = (position.update - self.updates.ahead) / self.updates.per_epoch
        padding = f", {1 - self._tokens / self._positions:.1%} padding in training" if self._positions else ""
        self.record.write(
            "evaluation",
            update=position.update,
            epoch=epoch,
            metrics=metrics,
            rows=rows,
            seconds=round(seconds, 3),
            best=best,
        )
        self.journal.say(
            f"epoch {epoch:.2f}: {show_numbers(metrics)}{' (best so far)' if best else ''}{padding}"
        )

    def checkpoint(self, path: Path, *, update: int, folder: Path, seconds: float, why: str) -> None:
        """Tell of a checkpoint.

        Args:
            path: Where it lies.
            update: The update it was made after.
            folder: The run's folder.
            seconds: How long it took to write.
            why: What it was made for.
        """
        self.record.write(
            "checkpoint",
            update=update,
            path=path.relative_to(folder).as_posix(),
            bytes=sum(file.stat().st_size for file in path.iterdir()),
            seconds=round(seconds, 3),
            why=why,
        )

    def trouble(self, what: str, *, why: str, do: str | None) -> None:
        """Tell of something unusual that does not end the run."""
        self.record.write("event", what=what, why=why, do=do)
        self.journal.say(f"warning   {what} ({why})" + (f"; {do}" if do else ""))

    def end(self, status: str, position: Position, metrics: Metrics, **more: Any) -> None:
        """Tell how the run ended.

        Raises:
            RunFolderError: It finished, but the disk does not take the record.
        """
        self.record.write("end", status=status, seconds=position.seconds, metrics=metrics, **more)
        if status == "finished":
            self.record.flush()
