"""The same rows in the same order give the weights that the Trainer of transformers makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import snugtune
from snugtune import tasks
from snugtune.data.batching import Plan, Updates
from snugtune.runfile import load_config
from snugtune.step import seeded
from snugtune.tasks.pretrained import load_tokenizer
from snugtune.training.schedule import learning_rate

ROWS, BATCH_SIZE = 90, 16  # the last update has 10 rows


@pytest.fixture
def run(build_tiny_model, tmp_path: Path) -> dict[str, Any]:
    """The everyday settings of a run without dropout, on texts of many lengths."""
    model = build_tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    lines = [
        f"the film was {'very ' * (row * 7 % 23)}{('good', 'bad')[row % 2]},{row % 2}" for row in range(ROWS)
    ]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "\n".join(lines), encoding="utf-8")
    return {
        "model": model,
        "data": tmp_path / "train.csv",
        "validation": tmp_path / "validation.csv",
        "epochs": 1,
        "batch_size": BATCH_SIZE,
        "learning_rate": 1e-3,
        "precision": "fp32",
        "output": tmp_path / "run",
        "seed": 3,
    }


def trainer_weights(run: dict[str, Any], folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Weights after the Trainer has seen the rows in our order."""
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    config = load_config(everyday=run)
    prepared = tasks.prepare(config)
    plan = Plan(batch_size=BATCH_SIZE, passes=1)
    updates = Updates(prepared.train, prepared.task.collate, plan=plan, seed=run["seed"], epochs=1)
    order = [int(row) for number in range(len(updates)) for row in updates.rows_of(number)]
    rows: Any = prepared.train.rows
    with seeded(run["seed"]):
        model = prepared.task.build_model()

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return order

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            def share(applied: int) -> float:
                return learning_rate(config.training, applied=applied, total=num_training_steps) / 1e-3

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, share)
            return self.lr_scheduler

    trainer = InOrder(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=1,
            learning_rate=1e-3,
            weight_decay=config.training.weight_decay,
            max_grad_norm=config.training.clip_grad_norm,
            optim="adamw_torch_fused",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=rows.table.add_column("labels", rows.labels.tolist()),
        data_collator=DataCollatorWithPadding(load_tokenizer(config.model)),
    )
    trainer.train()
    return {name: value.detach() for name, value in trainer.model.state_dict().items()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_a_run_ends_with_the_weights_of_the_trainer(run, tmp_path):
    theirs = trainer_weights(run, tmp_path / "trainer", per_device_train_batch_size=BATCH_SIZE)
    first = snugtune.train(**run, quiet=True, set={"training.packing": False, "training.passes": 1})
    plain = load_file(first.model_folder / "model.safetensors")
    ours = {}
    for name, settings in {
        "packed": {"training.packing": True},
        "cut": {"training.packing": False, "training.passes": 3},
    }.items():
        result = snugtune.train(**{**run, "output": tmp_path / name}, quiet=True, set=settings)
        ours[name] = load_file(result.model_folder / "model.safetensors")
    with seeded(run["seed"]):
        untrained = tasks.prepare(load_config(everyday=run)).task.build_model().state_dict()
    moved = difference(plain, untrained)
    assert moved > 3e-3  # updates change weights by about the learning rate each
    assert difference(plain, theirs) < 1e-4 * moved
    for weights in ours.values():
        assert difference(plain, weights) < 1e-4 * moved


def test_other_rows_in_an_update_would_be_found(run, tmp_path):
    halves = trainer_weights(run, tmp_path / "trainer", per_device_train_batch_size=BATCH_SIZE // 2)
    result = snugtune.train(**run, quiet=True)
    assert difference(load_file(result.model_folder / "model.safetensors"), halves) > 0.3e-3
