"""One run of against_trainer.py, in its own process: `against_trainer_run.py JOB NUMBERS`, two JSON files."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

import snugtune
from snugtune import tasks
from snugtune.config import TrainingSettings
from snugtune.data.batching import Examples
from snugtune.record import read_record
from snugtune.runfile import load_config
from snugtune.step import Launched, Step, seeded
from snugtune.tasks.pretrained import load_tokenizer
from snugtune.training import checkpoints, loop
from snugtune.training.schedule import learning_rate

WARM_UP_UPDATES = 2
LIMIT_TOKENS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One run: everything that its process must know."""

    variant: str
    model: str
    train: str
    validation: str
    folder: str
    batch_size: int
    seed: int
    epochs: int
    learning_rate: float
    precision: str
    budget: str | None
    as_pascal: bool
    passes: str
    pass_tokens: int | None
    checkpointed_layers: str
    trainer_accumulation: int
    trainer_checkpointing: bool


class Clock:
    """Takes the time at the end of the warm-up and of the last update, when the device has done its work."""

    def __init__(self, *, total: int) -> None:
        self.total = total
        self.began = self.ended = math.nan

    def updated(self, done: int) -> None:
        """Called at the end of each update; waits for the device at the two that count only."""
        if done in (WARM_UP_UPDATES, self.total):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.began, self.ended = (now, self.ended) if done == WARM_UP_UPDATES else (self.began, now)


def run_job(job: Job) -> dict[str, Any]:
    """Train as the job says."""
    if job.as_pascal:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    with Path(job.train).open(encoding="utf-8", newline="") as file:
        rows = sum(1 for _ in csv.DictReader(file))
    clock = Clock(total=math.ceil(rows / job.batch_size) * job.epochs)
    measured = (run_ours if job.variant.startswith("snugtune") else run_trainer)(job, clock)
    seconds = clock.ended - clock.began
    samples = float(rows * job.epochs - WARM_UP_UPDATES * job.batch_size)
    if job.variant.endswith("-grouped"):
        # The Trainer begins with its longest rows; not to time them must not make it faster.
        samples = rows * job.epochs * measured["timed_tokens"] / measured["tokens"]
    return {
        **measured,
        "seconds": seconds,
        "samples_per_second": samples / seconds,
        "updates": clock.total,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }


def everyday(job: Job) -> dict[str, Any]:
    """The everyday settings of a run; the Trainer's are made from the same."""
    return {
        "model": job.model,
        "data": job.train,
        "validation": job.validation,
        "max_length": LIMIT_TOKENS,
        "epochs": job.epochs,
        "batch_size": job.batch_size,
        "learning_rate": job.learning_rate,
        "precision": job.precision,
        "passes": job.passes if job.passes == "auto" else int(job.passes),
        "checkpointed_layers": "all" if job.checkpointed_layers == "all" else int(job.checkpointed_layers),
        "budget": job.budget,
        "seed": job.seed,
        "output": job.folder,
    }


def settings(job: Job, clock: Clock) -> dict[str, object]:
    """The other settings: one evaluation, after the last update, and no checkpoint before it."""
    return {
        "training.batching": "grouped" if job.variant.endswith("-grouped") else "random",
        "training.pass_tokens": job.pass_tokens,
        "training.warmup_fraction": 0.06,
        "training.weight_decay": 0.01,
        "training.clip_grad_norm": 1.0,
        "evaluation.every_updates": clock.total,
        "checkpoints.every_minutes": None,
    }


def run_ours(job: Job, clock: Clock) -> dict[str, Any]:
    """Train with `snugtune.train`."""
    real = Step.launch

    def timed(self: Step, *arguments: Any, number: int, **named: Any) -> Launched:
        launched = real(self, *arguments, number=number, **named)
        clock.updated(number + 1)
        return launched

    Step.launch = timed  # type: ignore[method-assign]
    with (  # gigabytes of a large model, which nobody reads
        mock.patch.object(checkpoints, "save_checkpoint", lambda folder, *rest, **more: folder),
        mock.patch.object(loop, "finish_model", return_value={}),
    ):
        (Path(job.folder) / "checkpoints").mkdir(parents=True)
        (Path(job.folder) / "config.yaml").touch()
        result = snugtune.train(**everyday(job), set=settings(job, clock), quiet=True)
    record = read_record(result.folder / "record.jsonl")
    updates = record.updates
    return {
        "accuracy": record.evaluations[-1]["metrics"]["accuracy"],
        "tokens": sum(line["tokens"] for line in updates),
        "timed_tokens": sum(line["tokens"] for line in updates[WARM_UP_UPDATES:]),
        "passes_per_update": statistics.mean(line["passes"] for line in updates),
        "peak_reserved_bytes": max(line.get("reserved_bytes") or 0 for line in updates) or None,
    }


def run_trainer(job: Job, clock: Clock) -> dict[str, Any]:
    """Train with the Trainer: rows, model, first weights and learning rates are those of our run."""
    config = load_config(everyday=everyday(job), settings=settings(job, clock))
    if config.budget_bytes is not None and torch.cuda.is_available():
        card_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(config.budget_bytes / card_bytes)

    class Timed(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.updated(state.global_step)

    class SameRates(Trainer):
        """Its own linear schedule begins with a rate of zero; ours does not."""

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            def share(applied: int) -> float:
                rate = learning_rate(config.training, applied=applied, total=num_training_steps)
                return rate / config.training.learning_rate

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
            return self.lr_scheduler

    prepared = tasks.prepare(config)
    with seeded(job.seed):
        model = prepared.task.build_model()
    to_the_limit = {"padding": "max_length", "max_length": LIMIT_TOKENS}
    collate: Any = DataCollatorWithPadding(
        load_tokenizer(config.model), **(to_the_limit if job.variant == "trainer-padded" else {})
    )
    tokens: list[int] = []  # of each pass

    def counted(batch: list[dict[str, Any]]) -> Any:
        tokens.append(sum(len(row["input_ids"]) for row in batch))
        return collate(batch)

    trainer = SameRates(
        model=model,
        args=trainer_arguments(job, config.training),
        train_dataset=data_set(prepared.train).add_column("length", prepared.train.lengths.tolist()),
        data_collator=counted,
        callbacks=[Timed()],
    )
    trainer.train()
    passes = tokens.copy()
    peak = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None
    answers = trainer.predict(data_set(prepared.validation))
    return {
        "accuracy": float((answers.predictions.argmax(-1) == answers.label_ids).mean()),
        "tokens": sum(passes),
        "timed_tokens": sum(passes[WARM_UP_UPDATES * job.trainer_accumulation :]),
        "passes_per_update": job.trainer_accumulation,
        "peak_reserved_bytes": peak,
    }


def data_set(examples: Examples) -> Any:
    """The same rows as the data set that people give the Trainer."""
    rows: Any = examples.rows
    return rows.table.add_column("labels", rows.labels.tolist())


def trainer_arguments(job: Job, training: TrainingSettings) -> TrainingArguments:
    """Its fast settings: the fused optimizer; no logging, saving or look at the loss between the updates."""
    arguments: dict[str, Any] = {
        "output_dir": job.folder,
        "per_device_train_batch_size": job.batch_size // job.trainer_accumulation,
        "gradient_accumulation_steps": job.trainer_accumulation,
        "gradient_checkpointing": job.trainer_checkpointing,
        "per_device_eval_batch_size": 32,
        "num_train_epochs": training.epochs,
        "learning_rate": training.learning_rate,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.clip_grad_norm,
        "optim": "adamw_torch_fused",
        "fp16": job.precision == "fp16",
        "bf16": job.precision == "bf16",
        "seed": job.seed,
        "data_seed": job.seed,
        "use_cpu": not torch.cuda.is_available(),
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,  # it waits for the device at every pass
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if job.variant == "trainer-grouped":
        new = "train_sampling_strategy" in inspect.signature(TrainingArguments).parameters
        arguments |= {"train_sampling_strategy": "group_by_length"} if new else {"group_by_length": True}
    return TrainingArguments(**arguments)


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(run_job(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
