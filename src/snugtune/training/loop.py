"""One run from its configuration to a finished model. The only user of Accelerate."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from snugtune import environment, hardware, tasks
from snugtune.config import RunConfig, show_config
from snugtune.data.batching import Batch
from snugtune.inference import measure
from snugtune.processes import Processes
from snugtune.record import RecordWriter
from snugtune.tasks import Metrics, Prepared, is_better
from snugtune.training import checkpoints
from snugtune.training.assembly import build_step, build_updates, count_parameters, evaluation_rows
from snugtune.training.device import (
    Device,
    MemoryMeter,
    describe,
    explained_out_of_memory,
    open_device,
    open_processes,
)
from snugtune.training.finish import finish_model
from snugtune.training.folder import RunFolder, check_same_run
from snugtune.training.interrupt import Interrupts
from snugtune.training.journal import Journal, open_journal
from snugtune.training.pending import Pending, most_pending
from snugtune.training.positions import Position, list_checkpoints
from snugtune.training.progress import Mode, open_progress
from snugtune.training.rates import Rates
from snugtune.training.reports import Reports
from snugtune.training.result import TrainResult
from snugtune.training.schedule import learning_rate
from snugtune.training.trackers import TrackedRecord, open_trackers
from snugtune.units import show_count


def run_training(
    config: RunConfig,
    folder: RunFolder,
    *,
    mode: Mode,
    prepare: Callable[[RunConfig], Prepared] = tasks.prepare,
) -> TrainResult:
    """Train, or continue an unfinished run.

    Args:
        config: The run's configuration.
        folder: Where it lives.
        mode: What is shown.
        prepare: Makes the task with its data.

    Raises:
        SnugtuneError: What stops the run, with what to do about it.
    """
    with ExitStack() as stack:
        # Only told so, Accelerate joins several processes where there is no card.
        accelerator = Accelerator(mixed_precision="no", cpu=not torch.cuda.is_available())
        processes = open_processes(accelerator)
        processes.any(False)  # nobody writes into the folder before all have looked at it
        speaks = processes.rank == 0
        log, path = (folder.log, folder.record_path) if speaks else (Path(os.devnull), Path(os.devnull))
        journal = stack.enter_context(open_journal(log, mode if speaks else "quiet"))
        device = stack.enter_context(open_device(accelerator.device, budget_bytes=config.budget_bytes))
        several = "" if processes.alone else f", with {processes.count} processes"
        journal.say(f"run       {folder.path} on {describe(device, config.budget_bytes)}{several}")
        trackers = stack.enter_context(open_trackers(config, folder, is_main=speaks))
        prepared = processes.first_here(lambda: prepare(config))
        for note in prepared.notes:
            journal.say(f"data      {note}")
        record = stack.enter_context(TrackedRecord(path, trackers))
        try:
            with explained_out_of_memory(device, passes=config.training.passes):
                run = _Run(config, prepared, device, processes, folder, record, journal)
                return run.run(mode if speaks else "quiet")
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            record.write("end", status="failed", seconds=None, metrics={}, why=why)
            journal.log(f"failed: {why}")
            raise


class _Run:
    """The state of one run while it runs."""

    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        device: Device,
        processes: Processes,
        folder: RunFolder,
        record: RecordWriter,
        journal: Journal,
    ) -> None:
        self.config, self.prepared, self.device = config, prepared, device
        self.processes, self.folder = processes, folder
        self.task = prepared.task
        self.step, self.decisions = build_step(config, self.task, device=device, processes=processes)
        self.updates = build_updates(config, self._decided, prepared, processes=processes)
        self.every_updates = config.evaluation.every_updates or self.updates.per_epoch
        self.reports = Reports(record, journal, self.updates, every_updates=self.every_updates)
        self.position = Position()
        self.pending: deque[Pending] = deque()
        self.most_pending = most_pending(device, self.step.choices.precision)
        self.meter = MemoryMeter(device)
        self.saved_at = time.monotonic()

    @property
    def _decided(self) -> dict[str, Any]:
        return {decision.name: decision.value for decision in self.decisions}

    def run(self, mode: Mode) -> TrainResult:
        self._resume()
        self._write_start()
        began = time.monotonic() - self.position.seconds
        over = interrupted = False
        with (
            open_progress(
                total_updates=self.updates.total, done_updates=self.position.update, mode=mode
            ) as progress,
            self.reports.journal.above(progress),
            Interrupts() as interrupts,
        ):
            self.reports.progress, self.reports.rates = progress, Rates(now=time.monotonic())
            for passes in self._loader():
                self._launch(passes)
                self._settle(most_pending=self.most_pending)
                self.position = dataclasses.replace(self.position, seconds=time.monotonic() - began)
                over = self._measure_and_save()
                interrupted = not over and self.processes.any(interrupts.requested)
                if over or interrupted:
                    break
            self._settle(most_pending=0)
        return self._interrupted() if interrupted else self._finish()

    def _resume(self) -> None:
        before = (self.folder.record.starts or [{}])[-1].get("choices", {}).get("precision")
        say = self.reports.journal.say
        if before not in (None, self.step.choices.precision):
            say(f"precision was {before} before: from here on the numbers round differently")
        found = list_checkpoints(self.folder.checkpoints)
        if found:
            check_same_run(
                self.folder, parameters=count_parameters(self.step.model), updates=self.updates.total
            )
            self.position = checkpoints.load_checkpoint(found[-1], self.step)
            say(f"continue  after update {self.position.update} of {self.updates.total}")

    def _write_start(self) -> None:
        parameters = count_parameters(self.step.model)
        self.reports.plan(self.decisions, epochs=self.config.training.epochs, parameters=parameters)
        if self.processes.rank:
            return
        (self.folder.path / "config.yaml").write_text(show_config(self.config), encoding="utf-8")
        self.reports.start(
            run_id=self.folder.run_id,
            resumed_from_update=self.position.update or None,
            total_updates=self.updates.total,
            parameters=parameters,
            decisions=self.decisions,
            choices=self.step.choices,
            checkpointed_layers=self.step.checkpointed,
            device=self.device.name,
            processes=self.processes.count,
            data=self.prepared.facts,
            data_digests=self.folder.data_digests,
        )
        environment.write_snapshot(self.folder.path / "environment.json", hardware.find_gpus())

    def _loader(self) -> Any:
        return DataLoader(
            self.updates,  # type: ignore[arg-type]
            sampler=range(self.position.update, self.updates.total),
            batch_size=None,
            num_workers=self._decided["workers"],
            pin_memory=self.device.is_cuda,
            generator=torch.Generator(),  # otherwise it draws from the caller's random numbers
        )

    def _launch(self, passes: list[Batch]) -> None:
        number = self.position.update + len(self.pending)
        applied = self.position.applied + len(self.pending)
        rate = learning_rate(self.config.training, applied=applied, total=self.updates.total)
        launched = self.step.launch(
            passes, number=number, learning_rate=rate, samples=len(self.updates.rows_of(number))
        )
        self.pending.append(Pending(launched, rate, self.meter.read()))

    def _settle(self, *, most_pending: int) -> None:
        """Wait for updates until no more than `most_pending` may still be running."""
        while len(self.pending) > most_pending:
            done = self.pending.popleft()
            did = done.launched.result()
            self.position = dataclasses.replace(
                self.position,
                update=self.position.update + 1,
                applied=self.position.applied + did.applied,
            )
            self.reports.update(
                did, number=self.position.update, learning_rate=done.learning_rate, memory=done.memory
            )

    def _measure_and_save(self) -> bool:
        """Evaluate and save when it is time; True when the run is over."""
        update, total = self.position.update + len(self.pending), self.updates.total
        minutes = self.config.checkpoints.every_minutes
        timed = minutes is not None and time.monotonic() - self.saved_at >= minutes * 60
        measured = update % self.every_updates == 0 or update == total
        if not (measured or timed):
            return False
        self._settle(most_pending=0)
        self.reports.rates.pause(now=time.monotonic())
        if measured:
            self._evaluate()
        self._save("evaluation" if measured else "time")
        self.reports.rates.resume(now=time.monotonic())
        patience = self.config.evaluation.early_stopping
        if measured and patience is not None and self.position.stale >= patience and update < total:
            self.reports.journal.say(
                f"stopped early: {show_count(patience, 'evaluation')} without a better {self.task.metric}"
            )
            return True
        return update == total

    def _evaluate(self) -> None:
        began = time.monotonic()
        metrics = measure(
            self.step,
            self.prepared.validation,
            rows_per_pass=evaluation_rows(self.updates.plan, self.prepared.validation),
            on_pass=self.reports.evaluation_pass,
        )
        value = metrics[self.task.metric]
        # A model whose answers are not numbers has a loss that is none, whatever its accuracy.
        sound = math.isfinite(metrics.get("loss", 0.0))
        best = sound and is_better(value, than=self.position.best_value, smaller=self.task.smaller_is_better)
        if best:
            self.position = dataclasses.replace(
                self.position, best_update=self.position.update, best_value=value, stale=0
            )
        else:
            self.position = dataclasses.replace(self.position, stale=self.position.stale + 1)
        self.reports.evaluation(
            metrics,
            self.position,
            rows=len(self.prepared.validation),
            seconds=time.monotonic() - began,
            best=best,
        )

    def _save(self, why: str) -> None:
        began = self.saved_at = time.monotonic()
        if self.processes.rank:
            return
        path = checkpoints.save_checkpoint(self.folder.checkpoints, self.step, self.position)
        checkpoints.remove_old(
            self.folder.checkpoints,
            keep_last=self.config.checkpoints.keep_last,
            best_update=self.position.best_update,
        )
        self.saved_at = time.monotonic()
        self.reports.checkpoint(
            path,
            update=self.position.update,
            folder=self.folder.path,
            seconds=self.saved_at - began,
            why=why,
        )

    def _interrupted(self) -> TrainResult:
        self._save("interrupt")
        self.reports.end("interrupted", self.position, {})
        self.reports.journal.say(
            f"interrupted after update {self.position.update} of {self.updates.total} and saved; "
            "the same command continues"
        )
        return self._result("interrupted", {})

    def _finish(self) -> TrainResult:
        if skipped := self.position.update - self.position.applied:
            self.reports.journal.say(
                f"{show_count(skipped, 'update')} skipped: gradients that were not finite (log.txt)"
            )
        facts = self.prepared.facts
        mine = (
            {}
            if self.processes.rank
            else finish_model(self.config, self.folder, self.step, self.position, facts)
        )
        metrics = self.processes.gather(mine)[0]
        self.reports.end(
            "finished",
            self.position,
            metrics,
            updates=self.position.update,
            best_update=self.position.best_update,
        )
        return self._result("finished", metrics)

    def _result(self, status: str, metrics: Metrics) -> TrainResult:
        self.processes.any(False)  # nobody looks at the folder again before its end is written
        return TrainResult(
            folder=self.folder.path,
            model_folder=self.folder.model if status == "finished" else None,
            metrics=metrics,
            best_update=self.position.best_update,
            updates=self.position.update,
            seconds=self.position.seconds,
            status=status,
            label_names=self.prepared.facts["label_names"],
        )
