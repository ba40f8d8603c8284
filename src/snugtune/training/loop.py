"""One run from its configuration to a finished model. The only user of Accelerate."""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from snugtune import environment, hardware, tasks
from snugtune.config import RunConfig, show_config
from snugtune.data.batching import Batch, Plan, Updates
from snugtune.inference import measure
from snugtune.planning.defaults import decide, decide_passes
from snugtune.record import RecordWriter
from snugtune.step import Choices, Hyperparameters, Step, Updated
from snugtune.tasks import Metrics, Prepared, is_better
from snugtune.training import checkpoints
from snugtune.training.device import (
    Device,
    MemoryMeter,
    describe,
    explained_out_of_memory,
    open_device,
)
from snugtune.training.finish import finish_model
from snugtune.training.folder import RunFolder
from snugtune.training.interrupt import Interrupts
from snugtune.training.journal import Journal, open_journal
from snugtune.training.positions import Position, list_checkpoints
from snugtune.training.progress import Mode, Progress, Shown, open_progress
from snugtune.training.rates import Rates
from snugtune.training.result import TrainResult, show_numbers
from snugtune.training.schedule import learning_rate
from snugtune.units import show_count


def run_training(config: RunConfig, folder: RunFolder, *, mode: Mode) -> TrainResult:
    """Train, or continue an unfinished run.

    Raises:
        SnugtuneError: What stops the run, with what to do about it.
    """
    with ExitStack() as stack:
        journal = stack.enter_context(open_journal(folder.log, mode))
        accelerator = Accelerator(mixed_precision="no")
        device = stack.enter_context(open_device(accelerator.device, budget_bytes=config.budget_bytes))
        journal.say(f"run       {folder.path} on {describe(device, config.budget_bytes)}")
        prepared = tasks.prepare(config.task, config)
        for note in prepared.notes:
            journal.say(f"data      {note}")
        record = stack.enter_context(RecordWriter(folder.record_path))
        try:
            with explained_out_of_memory(device, passes=config.training.passes):
                return _Run(config, prepared, device, folder, record, journal).run(mode)
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
        folder: RunFolder,
        record: RecordWriter,
        journal: Journal,
    ) -> None:
        self.config, self.prepared, self.device = config, prepared, device
        self.folder, self.record, self.journal = folder, record, journal
        self.task, settings = prepared.task, config.training
        self.decisions = decide(config, device_name=device.name, capability=device.capability)
        self.step = self._build_step()
        self.decisions.append(decide_passes(config, interacting=self.step.interacting))
        self.updates = Updates(
            prepared.train,
            prepared.task.collate,
            plan=self._plan(),
            seed=settings.seed,
            epochs=settings.epochs,
        )
        self.position = Position()
        self.meter = MemoryMeter(device)
        self.tokens, self.positions = 0, 0.0
        self.saved_at = time.monotonic()

    def _build_step(self) -> Step:
        settings = self.config.training
        values = {decision.name: decision.value for decision in self.decisions}
        choices = Choices(
            precision=values["precision"],  # type: ignore[arg-type]
            checkpointed_layers=settings.checkpointed_layers,
            optimizer=str(values["optimizer"]),
        )
        hyperparameters = Hyperparameters(
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            clip_grad_norm=settings.clip_grad_norm,
            seed=settings.seed,
        )
        return Step(self.task, choices, hyperparameters, device=self.device.torch)

    def _plan(self) -> Plan:
        settings = self.config.training
        values = {decision.name: decision.value for decision in self.decisions}
        return Plan(
            batch_size=settings.batch_size,
            batching=settings.batching,
            passes=None if values["passes"] == "auto" else int(str(values["passes"])),
            price_tokens=int(str(values["pass price"])),
        )

    def run(self, mode: Mode) -> TrainResult:
        self._resume()
        self._write_start()
        began = time.monotonic() - self.position.seconds
        status = "finished"
        with (
            open_progress(
                total_updates=self.updates.total, done_updates=self.position.update, mode=mode
            ) as progress,
            self.journal.above(progress),
            Interrupts() as interrupts,
        ):
            rates = Rates(now=time.monotonic())
            for passes in self._loader():
                self._update(passes, rates, progress)
                self.position = dataclasses.replace(self.position, seconds=time.monotonic() - began)
                rates.pause(now=time.monotonic())
                over = self._measure_and_save(progress)
                rates.resume(now=time.monotonic())
                if over:
                    break
                if interrupts.requested:
                    status = "interrupted"
                    break
        return self._interrupted() if status == "interrupted" else self._finish()

    def _resume(self) -> None:
        before = (self.folder.record.starts or [{}])[-1].get("choices", {}).get("precision")
        if before not in (None, self.step.choices.precision):
            self.journal.say(f"precision was {before} before: from here on the numbers round differently")
        found = list_checkpoints(self.folder.checkpoints)
        if found:
            self.position = checkpoints.load_checkpoint(found[-1], self.step)
            self.journal.say(f"continue  after update {self.position.update} of {self.updates.total}")

    def _write_start(self) -> None:
        parameters = sum(p.numel() for p in self.step.model.parameters())
        for decision in self.decisions:
            self.journal.say(f"{decision.name:<9} {decision.value}: {decision.because}")
        updates = f"{show_count(self.updates.total, 'update')} of {self.updates.plan.batch_size} samples"
        epochs = show_count(self.config.training.epochs, "epoch")
        self.journal.say(f"plan      {updates} in {epochs}, {parameters / 1e6:.1f} million parameters")
        (self.folder.path / "config.yaml").write_text(show_config(self.config), encoding="utf-8")
        self.record.write(
            "start",
            run_id=self.folder.run_id,
            resumed_from_update=self.position.update or None,
            total_updates=self.updates.total,
            parameters=parameters,
            decisions=[dataclasses.asdict(decision) for decision in self.decisions],
            choices=dataclasses.asdict(self.step.choices),
            checkpointed_layers=self.step.checkpointed,
            device=self.device.name,
            data=self.prepared.facts,
            data_digests=self.folder.data_digests,
        )
        environment.write_snapshot(self.folder.path / "environment.json", hardware.find_gpus())

    def _loader(self) -> Any:
        return DataLoader(
            self.updates,  # type: ignore[arg-type]
            sampler=range(self.position.update, self.updates.total),
            batch_size=None,
            pin_memory=self.device.is_cuda,
            generator=torch.Generator(),  # otherwise it draws from the caller's random numbers
        )

    def _update(self, passes: list[Batch], rates: Rates, progress: Progress) -> None:
        began = time.monotonic()
        rate = learning_rate(self.config.training, applied=self.position.applied, total=self.updates.total)
        did = self.step.update(passes, number=self.position.update, learning_rate=rate)
        now = time.monotonic()
        self.position = dataclasses.replace(
            self.position,
            update=self.position.update + 1,
            applied=self.position.applied + did.applied,
        )
        if did.tokens is not None and did.padding is not None:
            self.tokens += did.tokens
            self.positions += did.tokens / (1 - did.padding)
        rates.add(now=now, samples=did.samples, tokens=did.tokens or 0)
        self._note(did, rate, now - began, rates, progress)

    def _note(self, did: Updated, rate: float, seconds: float, rates: Rates, progress: Progress) -> None:
        memory = self.meter.read()
        update = self.position.update
        self.record.write(
            "update",
            update=update,
            epoch=math.ceil(update / self.updates.per_epoch),
            learning_rate=rate,
            seconds=round(seconds, 6),
            **dataclasses.asdict(did),
            **({} if memory is None else dataclasses.asdict(memory)),
        )
        if not did.applied:
            why = f"its gradient is not finite (loss {did.loss:g}, loss scale {did.loss_scale})"
            self.record.write("event", what=f"update {update} was skipped", why=why, do=None)
            self.journal.log(f"update {update} was skipped: {why}")
        progress.update(
            Shown(
                update=update,
                total_updates=self.updates.total,
                loss=did.loss,
                learning_rate=rate,
                samples_per_second=rates.samples_per_second,
                tokens_per_second=rates.tokens_per_second if did.tokens else None,
                seconds_left=rates.seconds_left(
                    updates_left=self.updates.total - update, pauses_left=self._evaluations_left()
                ),
                memory=memory,
            )
        )

    def _evaluations_left(self) -> int:
        every = self.config.evaluation.every_updates or self.updates.per_epoch
        return math.ceil(self.updates.total / every) - self.position.update // every

    def _measure_and_save(self, progress: Progress) -> bool:
        """Evaluate and save when it is time; True when the run is over."""
        update, total = self.position.update, self.updates.total
        every = self.config.evaluation.every_updates or self.updates.per_epoch
        if update % every == 0 or update == total:
            self._evaluate(progress)
            self._save("evaluation")
            patience = self.config.evaluation.early_stopping
            if patience is not None and self.position.stale >= patience and update < total:
                self.journal.say(
                    f"stopped early: {show_count(patience, 'evaluation')} without a better {self.task.metric}"
                )
                return True
            return update == total
        minutes = self.config.checkpoints.every_minutes
        if minutes is not None and time.monotonic() - self.saved_at >= minutes * 60:
            self._save("time")
        return False

    def _evaluate(self, progress: Progress) -> None:
        began = time.monotonic()
        metrics = measure(
            self.step,
            self.prepared.validation,
            rows_per_pass=math.ceil(self.config.training.batch_size / (self.updates.plan.passes or 1)),
            on_pass=lambda done, total: progress.evaluation(done=done, total=total),
        )
        value = metrics[self.task.metric]
        # A model whose answers are not numbers has a loss that is none, whatever its accuracy.
        sound = not math.isnan(metrics.get("loss", 0.0))
        best = sound and is_better(self.task.metric, value, than=self.position.best_value)
        if best:
            self.position = dataclasses.replace(
                self.position, best_update=self.position.update, best_value=value, stale=0
            )
        else:
            self.position = dataclasses.replace(self.position, stale=self.position.stale + 1)
        epoch = self.position.update / self.updates.per_epoch
        padding = (
            "" if not self.positions else f", {1 - self.tokens / self.positions:.1%} padding in training"
        )
        self.record.write(
            "evaluation",
            update=self.position.update,
            epoch=epoch,
            metrics=metrics,
            rows=len(self.prepared.validation),
            seconds=round(time.monotonic() - began, 3),
            best=best,
        )
        self.journal.say(
            f"epoch {epoch:.2f}: {show_numbers(metrics)}{' (best so far)' if best else ''}{padding}"
        )

    def _save(self, why: str) -> None:
        began = time.monotonic()
        path = checkpoints.save_checkpoint(self.folder.checkpoints, self.step, self.position)
        checkpoints.remove_old(
            self.folder.checkpoints,
            keep_last=self.config.checkpoints.keep_last,
            best_update=self.position.best_update,
        )
        self.saved_at = time.monotonic()
        self.record.write(
            "checkpoint",
            update=self.position.update,
            path=path.relative_to(self.folder.path).as_posix(),
            bytes=sum(file.stat().st_size for file in path.iterdir()),
            seconds=round(self.saved_at - began, 3),
            why=why,
        )

    def _interrupted(self) -> TrainResult:
        self._save("interrupt")
        self.record.write("end", status="interrupted", seconds=self.position.seconds, metrics={})
        self.journal.say(
            f"interrupted after update {self.position.update} of {self.updates.total} and saved; "
            "the same command continues"
        )
        return self._result("interrupted", {})

    def _finish(self) -> TrainResult:
        facts = self.prepared.facts
        if skipped := self.position.update - self.position.applied:
            self.journal.say(
                f"{show_count(skipped, 'update')} skipped: gradients that were not finite (log.txt)"
            )
        metrics = finish_model(self.config, self.folder, self.step, self.position, facts)
        self.record.write(
            "end",
            status="finished",
            seconds=self.position.seconds,
            metrics=metrics,
            updates=self.position.update,
            best_update=self.position.best_update,
        )
        return self._result("finished", metrics)

    def _result(self, status: str, metrics: Metrics) -> TrainResult:
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
