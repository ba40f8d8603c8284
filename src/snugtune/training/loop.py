"""One run from its configuration to a finished model. The only user of Accelerate."""

from __future__ import annotations

import dataclasses
import json
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
from snugtune.processes import Processes
from snugtune.record import RecordWriter
from snugtune.tasks import Metrics, Prepared
from snugtune.training.assembly import build_step, build_updates, count_parameters
from snugtune.training.checkpoints import check_savable
from snugtune.training.continuing import go_on, load_newest, made_with, put_best, tell_changes
from snugtune.training.device import (
    Device,
    MemoryMeter,
    describe,
    explained_out_of_memory,
    open_device,
    open_processes,
)
from snugtune.training.evaluating import evaluate
from snugtune.training.finish import finish_model
from snugtune.training.folder import RunFolder, check_same_run, clear_leftovers, write_aside
from snugtune.training.health import Health
from snugtune.training.interrupt import Interrupts
from snugtune.training.journal import Journal, open_journal
from snugtune.training.pending import Pending, most_pending
from snugtune.training.positions import Position, list_checkpoints
from snugtune.training.progress import Mode, open_progress
from snugtune.training.rates import Rates
from snugtune.training.reports import Reports
from snugtune.training.result import TrainResult
from snugtune.training.saving import Saver
from snugtune.training.schedule import learning_rate
from snugtune.training.space import check_space, saves_left
from snugtune.training.trackers import TrackedRecord, open_trackers
from snugtune.training.workers import explained_dead_workers
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
        if speaks:
            clear_leftovers(folder)
        device = stack.enter_context(open_device(accelerator.device, budget_bytes=config.budget_bytes))
        several = "" if processes.alone else f", with {processes.count} processes"
        journal.say(f"run       {folder.path} on {describe(device, config.budget_bytes)}{several}")
        trackers = stack.enter_context(open_trackers(config, folder, is_main=speaks))
        prepared = processes.first_here(lambda: prepare(config))
        for note in prepared.notes:
            journal.say(f"data      {note}")
        record = stack.enter_context(TrackedRecord(path, trackers))
        try:
            with explained_out_of_memory(device, passes=config.training.passes), explained_dead_workers():
                run = _Run(config, prepared, device, processes, folder, record, journal)
                return run.run(mode if speaks else "quiet")
        except BaseException as error:
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            record.write("end", status=status, seconds=None, metrics={}, why=why)
            journal.log(f"{status}: {why}")
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
        self.step, self.decisions = build_step(config, prepared, device=device, processes=processes)
        self.updates = build_updates(config, self._decided, prepared, processes=processes)
        self.every_updates = config.evaluation.every_updates or self.updates.per_epoch
        self.reports = Reports(record, journal, self.updates, every_updates=self.every_updates)
        self.position = Position()
        self.pending: deque[Pending] = deque()
        self.most_pending = most_pending(device, self.step.choices.precision)
        self.meter = MemoryMeter(device)
        keep_last = config.checkpoints.keep_last
        facts = made_with(config, folder)
        self.saver = Saver(folder, self.step, self.reports, processes, keep_last=keep_last, facts=facts)

    @property
    def _decided(self) -> dict[str, Any]:
        return {decision.name: decision.value for decision in self.decisions}

    def run(self, mode: Mode) -> TrainResult:
        check_savable(self.step)
        self._resume()
        parts = self.config, self.prepared, self.step, self.updates, self.reports
        self.health = Health(*parts, first=self.position.update)
        room = self.processes.first_here(self._room)
        self._write_start()
        self.reports.journal.say(f"disk      {room}")
        began = time.monotonic() - self.position.seconds
        interrupted = False
        over = self._is_over()  # a run may have ended between its last checkpoint and its model
        with (
            open_progress(
                total_updates=self.updates.total, done_updates=self.position.update, mode=mode
            ) as progress,
            self.reports.journal.above(progress),
            Interrupts(quiet=mode == "quiet", launched=not self.processes.alone) as interrupts,
        ):
            self.reports.progress, self.reports.rates = progress, Rates(now=time.monotonic())
            self.interrupts = interrupts
            if self.position.unmeasured:
                over = self._measure_and_save()
                interrupted = not over and self.processes.any(interrupts.requested)
            batches = iter(() if over or interrupted else self._loader())
            passes = next(batches, None)
            while passes is not None:
                self._launch(passes)
                passes = next(batches, None)  # made while the device is at work
                self._settle(most_pending=self.most_pending)
                self.position = dataclasses.replace(self.position, seconds=time.monotonic() - began)
                over = self._measure_and_save()
                interrupted = not over and self.processes.any(interrupts.requested)
                if over or interrupted:
                    break
            self._settle(most_pending=0)
            if interrupted:
                return self._interrupted()  # a second Ctrl-C may come while it saves
        return self._finish()

    def _resume(self) -> None:
        found = list_checkpoints(self.folder.checkpoints)
        if found:
            facts = {name: self.prepared.facts.get(name) for name in ("label_kind", "label_names")}
            check_same_run(self.folder, parameters=count_parameters(self.step.model), **facts)
        self.position = load_newest(self.folder, self.step, self.reports, self.processes)
        if not found:
            return
        self.saver.last, self.saver.unmeasured = self.position.update, self.position.unmeasured
        self.position = go_on(self.folder, self.updates, self.position, self.config, self.reports)
        now = {"device": self.device.name, "processes": self.processes.count}
        tell_changes(self.folder, self.decisions, now, self.reports)
        self.reports.journal.say(f"continue  after update {self.position.update} of {self.updates.total}")

    def _room(self) -> str:
        done, total = self.position.update - self.updates.ahead, self.updates.planned
        comes = saves_left(done=done, total=total, every=self.every_updates)
        keep_last = self.config.checkpoints.keep_last
        return check_space(self.folder, self.step, keep_last=keep_last, saves_left=comes)

    def _write_start(self) -> None:
        parameters = count_parameters(self.step.model)
        self.reports.plan(
            self.decisions, self.config.training, parameters=parameters, processes=self.processes.count
        )
        if self.processes.rank:
            return
        write_aside(self.folder.path / "config.yaml", show_config(self.config))
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
        around = environment.snapshot(hardware.find_gpus())
        write_aside(self.folder.path / "environment.json", json.dumps(around, indent=2, ensure_ascii=False))

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
        applied = max(0, self.position.applied + len(self.pending) - self.updates.ahead)
        rate = learning_rate(self.config.training, applied=applied, total=self.updates.planned)
        launched = self.step.launch(
            passes, number=number, learning_rate=rate, samples=len(self.updates.rows_of(number))
        )
        self.pending.append(Pending(launched, rate, self.meter.read()))

    def _settle(self, *, most_pending: int) -> None:
        """Wait for updates until no more than `most_pending` may still be running."""
        while len(self.pending) > most_pending:
            done = self.pending.popleft()
            did = done.launched.result()
            epoch, rows = self.updates.place_after(self.position.update + 1)
            self.position = dataclasses.replace(
                self.position,
                update=self.position.update + 1,
                applied=self.position.applied + did.applied,
                epoch=epoch,
                rows=rows,
            )
            self.reports.update(
                did, number=self.position.update, learning_rate=done.learning_rate, memory=done.memory
            )
            self.health.look(did, self.position.update, saved=self.saver.last)

    def _measure_and_save(self) -> bool:
        """Evaluate and save when it is time; True when the run is over."""
        update, total = self.position.update + len(self.pending), self.updates.total
        measured = (update - self.updates.ahead) % self.every_updates == 0 or update == total
        measured = measured or self.position.unmeasured
        every = self.config.checkpoints.every_minutes
        # Each process has a clock of its own, and what follows is done together.
        timed = not measured and every is not None and self.processes.any(self.saver.is_due(every))
        if not (measured or timed):
            return False
        self._settle(most_pending=0)
        self.reports.rates.pause(now=time.monotonic())
        before = self.position
        if measured:
            self.position = evaluate(
                self.step, self.prepared, self.updates.plan, self.reports, before, stop=self._stop_wanted
            )
            if self.position.unmeasured:
                return False  # saved as every interrupted run is
        saved = self.saver.save(self.position, "evaluation" if measured else "time")
        if measured and update < total and self.processes.any(not saved):
            # These weights are gone after the next update: the best that is on the disk stays the best.
            self.position = dataclasses.replace(
                self.position, best_update=before.best_update, best_value=before.best_value
            )
        self.reports.rates.resume(now=time.monotonic())
        return self._is_over()

    def _is_over(self) -> bool:
        patience, stale = self.config.evaluation.early_stopping, self.position.stale
        if self.position.unmeasured:
            return False
        if self.position.update == self.updates.total:
            return True
        if patience is None or stale < patience:
            return False
        self.reports.journal.say(
            f"stopped early: {show_count(patience, 'evaluation')} without a better {self.task.metric}"
        )
        return True

    def _stop_wanted(self) -> bool:
        return self.interrupts.requested

    def _interrupted(self) -> TrainResult:
        saved = self.saver.save(self.position, "interrupt")
        self.reports.end("interrupted", self.position, {})
        how = "saved" if saved else f"not saved, so it continues after update {self.saver.last or 0}"
        self.reports.journal.say(
            f"interrupted after update {self.position.update} of {self.updates.total} and {how}; "
            "the same command continues (in Python: the same call)"
        )
        return self._result("interrupted", {})

    def _finish(self) -> TrainResult:
        self.health.finish(applied=self.position.applied, updates=self.position.update)
        mine: tuple[Metrics, int | None] = ({}, None)
        if not self.processes.rank:
            self.reports.record.flush()  # the scores are read from it
            best = put_best(self.folder, self.step, self.position, self.reports)
            facts = self.prepared.facts
            mine = finish_model(self.config, self.folder, self.step, best, facts), best.best_update
        metrics, update = self.processes.gather(mine)[0]
        self.position = dataclasses.replace(self.position, best_update=update)
        self.reports.end("finished", self.position, metrics, updates=self.position.update, best_update=update)
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
