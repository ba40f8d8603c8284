"""Trackers: what they show of a run, how a run goes on in them, and that none of them can end it."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator

from snugtune.config import RunConfig
from snugtune.errors import MissingDependency, UsageError
from snugtune.record import Record, read_record
from snugtune.training.folder import RunFolder
from snugtune.training.trackers import TrackedRecord, Trackers, numbers_of, open_trackers
from snugtune.units import GiB

UPDATE: dict[str, Any] = {
    "epoch": 1,
    "learning_rate": 0.25,
    "seconds": 0.5,
    "loss": 2.0,
    "grad_norm": 1.5,
    "applied": True,
    "loss_scale": None,
    "passes": 3,
    "samples": 8,
    "tokens": 60,
    "padding": 0.125,
}
EVALUATION: dict[str, Any] = {
    "epoch": 1.0,
    "metrics": {"accuracy": 0.75, "loss": 0.5, "confusion": [[1, 0], [0, 1]], "sound": True},
    "rows": 4,
    "seconds": 0.1,
    "best": True,
}


@pytest.fixture(autouse=True)
def process() -> None:
    """As in a run: Accelerate knows which process speaks."""
    Accelerator(mixed_precision="no", cpu=True)


def make_config(report_to: str | None, **training: object) -> RunConfig:
    data = {"train": "评论.csv", "label_column": ["good", "bad"]}
    settings = {"report_to": report_to, **training}
    return RunConfig.model_validate({"model": {"name": "m"}, "data": data, "training": settings})


def make_folder(path: Path, state: str = "new") -> RunFolder:
    path.mkdir(exist_ok=True)
    return RunFolder(path, state, Record(), "0123456789abcdef0123456789abcdef", {})


def report(config: RunConfig, folder: RunFolder, *, updates: range, accuracy: float | None = None) -> None:
    """Tell a record, and so a tracker, of some updates, and of an evaluation after the last."""
    with open_trackers(config, folder) as trackers, TrackedRecord(folder.record_path, trackers) as record:
        record.write("start", run_id=folder.run_id)
        for update in updates:
            record.write("update", update=update, **{**UPDATE, "loss": 2.0 / update})
        if accuracy is not None:
            record.write(
                "evaluation", update=updates[-1], **{**EVALUATION, "metrics": {"accuracy": accuracy}}
            )
        record.write("end", status="finished", seconds=1.0, metrics={})


def test_the_numbers_are_those_of_the_record():
    assert numbers_of("update", {"update": 3, **UPDATE}) == {
        "training/loss": 2.0,
        "training/learning_rate": 0.25,
        "training/grad_norm": 1.5,
        "training/padding": 0.125,
        "training/samples_per_second": 16.0,
    }
    assert numbers_of("evaluation", EVALUATION) == {"evaluation/accuracy": 0.75, "evaluation/loss": 0.5}
    for kind in ("start", "event", "checkpoint", "end"):
        assert numbers_of(kind, {"update": 3, "loss": 1.0}) == {}


def test_what_is_unknown_is_left_out_and_a_card_has_memory():
    memory = {"allocated_bytes": GiB, "reserved_bytes": 3 * GiB, "process_bytes": None}
    found = numbers_of("update", {**UPDATE, **memory, "padding": None, "seconds": 0.0})
    assert {name for name in found if name.startswith("memory/")} == {
        "memory/allocated_gib",
        "memory/reserved_gib",
    }
    assert found["memory/reserved_gib"] == 3.0
    assert "training/padding" not in found
    assert "training/samples_per_second" not in found


def test_without_the_setting_nothing_is_loaded_or_written(tmp_path):
    folder = make_folder(tmp_path / "run")
    report(make_config(None), folder, updates=range(1, 3), accuracy=0.5)
    assert [path.name for path in folder.path.iterdir()] == ["record.jsonl"]
    assert len(read_record(folder.record_path).updates) == 2


def test_only_the_main_process_reports(tmp_path):
    folder = make_folder(tmp_path / "run")
    with open_trackers(make_config("tensorboard"), folder, is_main=False) as trackers:
        trackers.log({"training/loss": 1.0}, update=1)
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_before_anything_is_written(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    folder = make_folder(tmp_path / "run")
    with pytest.raises(MissingDependency) as error, open_trackers(make_config(name), folder):
        pass
    assert f"training.report_to: {name}" in error.value.what
    assert f"pip install {name}" in error.value.do
    assert list(folder.path.iterdir()) == []


# A tracker that fails


class Failing:
    """A tracker that never works."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(step)
        raise ConnectionError("no route\nto host")

    def finish(self) -> None:
        raise OSError("disk full")


def test_a_tracker_that_fails_is_said_once_and_ends_nothing(caplog, tmp_path):
    trackers = Trackers("wandb", Failing())
    with (
        caplog.at_level(logging.WARNING, logger="snugtune"),
        TrackedRecord(tmp_path / "record.jsonl", trackers) as record,
    ):
        for update in (1, 2, 3):
            record.write("update", update=update, **UPDATE)
        trackers.close()
    assert len(read_record(tmp_path / "record.jsonl").updates) == 3
    (said,) = caplog.messages
    assert "wandb takes no numbers" in said
    assert "ConnectionError: no route to host" in said


def test_a_tracker_that_takes_long_to_fail_is_left_alone_for_a_while(monkeypatch):
    """It waits ten seconds for its server: the next try comes a thousand seconds later."""
    now = [0.0]

    class Slow(Failing):
        def log(self, values: dict[str, float], step: int) -> None:
            now[0] += 10.0
            super().log(values, step)

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("snugtune.training.trackers.time", clock)
    slow = Slow()
    trackers = Trackers("mlflow", slow)
    for update in range(200):
        trackers.log({"training/loss": 1.0}, update=update)
        now[0] += 10.0
    assert slow.calls == [0, 100]


def test_a_tracker_that_cannot_start_is_refused_in_words(tmp_path):
    folder = make_folder(tmp_path / "run")
    (folder.path / "tensorboard").write_text("a file where TensorBoard wants a folder")
    with pytest.raises(UsageError) as error, open_trackers(make_config("tensorboard"), folder):
        pass
    assert error.value.what == "training.report_to: tensorboard could not be started"
    assert "tensorboard" in error.value.why


# The real ones


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: name -> (update, number)."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = loading.EventAccumulator(str(folder))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]
    }


def test_tensorboard_shows_every_update_and_evaluation(tmp_path):
    folder = make_folder(tmp_path / "run")
    report(make_config("tensorboard"), folder, updates=range(1, 5), accuracy=0.75)
    found = curves(folder.path / "tensorboard")
    assert found["training/loss"] == [(1, 2.0), (2, 1.0), (3, pytest.approx(2 / 3)), (4, 0.5)]
    assert found["training/samples_per_second"] == [(update, 16.0) for update in range(1, 5)]
    assert found["evaluation/accuracy"] == [(4, 0.75)]
    (settings,) = (folder.path / "tensorboard").glob("*/hparams.yml")
    text = settings.read_text()
    assert "training.batch_size: 32" in text
    assert "training.report_to: tensorboard" in text
    assert """data.label_column: '["good", "bad"]'""" in text


def test_tensorboard_forgets_what_a_continued_run_computes_again(tmp_path):
    config, folder = make_config("tensorboard"), make_folder(tmp_path / "run")
    report(config, folder, updates=range(1, 8))  # and then the power fails
    (folder.checkpoints / "update-00000004").mkdir(parents=True)
    report(config, make_folder(folder.path, "unfinished"), updates=range(5, 7), accuracy=1.0)
    found = curves(folder.path / "tensorboard")
    assert [update for update, _ in found["training/loss"]] == [1, 2, 3, 4, 5, 6]
    assert found["evaluation/accuracy"] == [(6, 1.0)]
    assert len(list((folder.path / "tensorboard").glob("*/hparams.yml"))) == 1


def test_tensorboard_forgets_a_start_that_came_to_no_checkpoint(tmp_path):
    config, folder = make_config("tensorboard"), make_folder(tmp_path / "run")
    report(config, folder, updates=range(1, 8))
    report(config, folder, updates=range(1, 4))
    found = curves(folder.path / "tensorboard")
    assert [update for update, _ in found["training/loss"]] == [1, 2, 3]


def test_numbers_that_are_none_do_not_trouble_tensorboard(tmp_path):
    folder = make_folder(tmp_path / "run")
    with open_trackers(make_config("tensorboard"), folder) as trackers:
        trackers.log({"training/loss": math.nan, "training/grad_norm": math.inf}, update=1)
    ((update, loss),) = curves(folder.path / "tensorboard")["training/loss"]
    assert update == 1
    assert math.isnan(loss)


def test_mlflow_keeps_numbers_and_settings_and_continues_the_same_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    folder = make_folder(tmp_path / "run")
    report(make_config("mlflow"), folder, updates=range(1, 5), accuracy=0.75)
    again = make_folder(folder.path, "unfinished")
    report(make_config("mlflow", passes=4), again, updates=range(5, 7))
    (run,) = mlflow.search_runs(experiment_names=["snugtune"], output_format="list")
    assert run.info.run_name == "run"
    assert run.data.params["training.batch_size"] == "32"
    assert run.data.metrics["evaluation/accuracy"] == 0.75
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "training/loss")
    assert [(point.step, point.value) for point in history][-2:] == [(5, 0.4), (6, 2 / 6)]
    assert len(history) == 6


def test_wandb_writes_below_the_folder_of_the_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = make_folder(tmp_path / "run")
    report(make_config("wandb"), folder, updates=range(1, 5), accuracy=0.75)
    (file,) = (folder.path / "wandb").glob(f"offline-run-*-{folder.run_id}/run-{folder.run_id}.wandb")
    content = file.read_bytes()
    for words in (b"training/loss", b"evaluation/accuracy", b"training.batch_size"):
        assert words in content


# A whole run


def test_a_run_that_is_interrupted_shows_each_update_once(tiny_model, tmp_path, monkeypatch):
    import snugtune

    rows = [f"the film was {'very ' * (n % 7)}{'good' if n % 2 else 'bad'},{n % 2}" for n in range(40)]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")

    def train() -> Any:
        return snugtune.train(
            model=tiny_model,
            data=tmp_path / "reviews.csv",
            batch_size=8,
            epochs=2,
            output=tmp_path / "run",
            quiet=True,
            set={"training.report_to": "tensorboard", "data.validation_fraction": 0.2},
        )

    with monkeypatch.context() as patch:
        real = TrackedRecord.write

        def interrupt(self: TrackedRecord, kind: str, /, **fields: Any) -> None:
            real(self, kind, **fields)
            if kind == "update" and fields["update"] == 6:
                raise KeyboardInterrupt

        patch.setattr(TrackedRecord, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train()
    result = train()
    assert result.status == "finished"
    found = curves(result.folder / "tensorboard")
    record = read_record(result.folder / "record.jsonl")
    assert [update for update, _ in found["training/loss"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    losses = [line["loss"] for line in record.updates]
    assert [loss for _, loss in found["training/loss"]] == pytest.approx(losses)
    accuracies = [(line["update"], line["metrics"]["accuracy"]) for line in record.evaluations]
    assert found["evaluation/accuracy"] == [(update, pytest.approx(value)) for update, value in accuracies]
