"""A whole run: what it leaves behind, how it is interrupted and continued, and which model it keeps."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from snugtune.errors import RunFolderError, UsageError
from snugtune.record import read_record
from snugtune.step import Step
from tiny_runs import assert_equal, compute_in_fp16, stop_after, weights


def test_a_run_leaves_a_model_that_people_can_use(train, tmp_path):
    result = train(epochs=6)
    assert result.status == "finished"
    assert result.metrics["accuracy"] == 1.0
    assert {path.name for path in result.folder.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "environment.json",
        "log.txt",
        "model",
        "record.jsonl",
    }
    from transformers import pipeline

    classify = pipeline("text-classification", str(result.model_folder))
    answers = [answer["label"] for answer in classify(["the film was very great", "the film was awful"])]
    assert answers == ["yes", "no"]
    card = (result.model_folder / "README.md").read_text()
    assert "accuracy | 1.0000" in card
    assert f'pipeline("text-classification", "{result.model_folder.as_posix()}", truncation=True)' in card
    environment = json.loads((result.folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert not list(result.folder.rglob("*.bin"))
    assert not list(result.folder.rglob("*.p*t"))


def test_the_record_has_a_line_for_everything_that_happened(train):
    result = train()
    record = read_record(result.folder / "record.jsonl")
    assert record.damaged_lines == 0
    assert record.start["total_updates"] == 14  # 54 rows or so in updates of 8, twice
    assert record.start["data"]["label_names"] == ["no", "yes"]
    assert {decision["name"] for decision in record.start["decisions"]} == {
        "precision",
        "optimizer",
        "pass price",
        "pass tokens",
        "passes",
        "packing",
        "workers",
    }
    assert [line["update"] for line in record.updates] == list(range(1, 15))
    rows = record.start["data"]["rows"]["train"]
    assert [line["samples"] for line in record.updates] == [*[8] * 6, rows - 48] * 2
    assert [line["epoch"] for line in record.updates] == [1] * 7 + [2] * 7
    rates = [line["learning_rate"] for line in record.updates]
    assert max(rates) == rates[0] == pytest.approx(1e-2)
    assert rates == sorted(rates, reverse=True)
    assert all(line["applied"] and line["seconds"] > 0 and line["tokens"] > 0 for line in record.updates)
    assert all(0 <= line["padding"] < 0.7 for line in record.updates)
    assert [line["update"] for line in record.evaluations] == [7, 14]
    assert record.evaluations[-1]["rows"] == 60 - rows
    assert record.checkpoints[-1]["bytes"] > 0
    assert record.end["status"] == "finished"


def test_an_interrupted_run_continues_to_the_very_same_weights(train, monkeypatch):
    """C092, C113."""
    whole = train("whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        first = train("parts")
        assert (first.status, first.updates, first.model_folder) == ("interrupted", 4, None)
    with monkeypatch.context() as patch:
        stop_after(patch, 9, signal.SIGTERM)
        assert train("parts").updates == 10
    last = train("parts")
    assert last.status == "finished"
    assert_equal(whole, last)
    record = read_record(last.folder / "record.jsonl")
    assert [start["resumed_from_update"] for start in record.starts] == [None, 4, 10]
    assert len({start["run_id"] for start in record.starts}) == 1
    without_time = [
        {k: v for k, v in line.items() if k not in ("time", "seconds")} for line in record.updates
    ]
    expected = read_record(whole.folder / "record.jsonl").updates
    assert without_time == [
        {k: v for k, v in line.items() if k not in ("time", "seconds")} for line in expected
    ]


def test_the_signal_handlers_are_those_of_before_after_a_run(train, monkeypatch):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train("a")
    stop_after(monkeypatch, 2)
    train("b")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_crash_loses_only_what_came_after_the_last_checkpoint(train, monkeypatch):
    whole = train("whole")
    real = Step.launch

    def crash(self, passes, *, number, **more):
        if number == 10:
            raise RuntimeError("the lamp fell on the keyboard")
        return real(self, passes, number=number, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "launch", crash)
        with pytest.raises(RuntimeError, match="lamp"):
            train("crashed")
    assert "lamp" in (whole.folder.parent / "crashed" / "log.txt").read_text()
    again = train("crashed")
    record = read_record(again.folder / "record.jsonl")
    assert record.starts[-1]["resumed_from_update"] == 7
    assert_equal(whole, again)


def test_checkpoints_come_also_by_time_and_old_ones_go(train):
    result = train(settings={"checkpoints.every_minutes": 1e-6, "checkpoints.keep_last": 3})
    record = read_record(result.folder / "record.jsonl")
    assert [line["update"] for line in record.checkpoints] == list(range(1, 15))
    best = result.best_update
    kept = sorted(
        int(path.name.removeprefix("update-")) for path in (result.folder / "checkpoints").iterdir()
    )
    assert kept == sorted({best, 12, 13, 14})


def test_a_finished_run_shows_its_results_again(train, monkeypatch):
    first = train()
    monkeypatch.setattr(Step, "__init__", lambda *args, **kwargs: pytest.fail("it trained again"))
    second = train()
    assert second == first


def test_a_folder_of_another_run_is_refused_and_left_alone(train):
    first = train()
    before = (first.folder / "record.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match=r"training.epochs 2 -> 3, training.seed 42 -> 1") as caught:
        train(epochs=3, seed=1)
    assert "-2" in caught.value.do
    assert (first.folder / "record.jsonl").read_bytes() == before


def test_results_of_other_data_are_not_shown(train, reviews):
    train()
    reviews.write_text(reviews.read_text() + "one more film was great,yes\n")
    with pytest.raises(RunFolderError, match="holds another run") as caught:
        train()
    assert "the contents of data.train" in caught.value.why


def test_a_folder_that_is_no_run_is_refused(train, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.docx").write_text("years of work")
    with pytest.raises(RunFolderError, match=r"is not a run of snugtune"):
        train()
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunFolderError, match="cannot use"):
        train("file")


def test_a_run_that_failed_before_its_first_checkpoint_may_start_again_with_other_settings(
    train, monkeypatch
):
    with pytest.raises(UsageError):
        train(text_column="texd")
    with monkeypatch.context() as patch:
        patch.setattr(Step, "launch", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train()
    result = train(batch_size=16)
    record = read_record(result.folder / "record.jsonl")
    assert result.status == "finished"
    assert [line["samples"] for line in record.updates][:3] == [16, 16, 16]
    assert record.end["status"] == "finished"


def test_updates_that_are_waited_for_later_are_the_same_updates(train, monkeypatch):
    """On a card the next update is launched before the last one is waited for."""
    whole = train("whole")
    monkeypatch.setattr("snugtune.training.loop.most_pending", lambda *args: 1)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train("late").updates == 4
    late = train("late")
    assert_equal(whole, late)
    records = [read_record(result.folder / "record.jsonl") for result in (whole, late)]
    for name in ("update", "loss", "grad_norm", "learning_rate", "samples", "tokens", "applied"):
        assert [line[name] for line in records[1].updates] == [line[name] for line in records[0].updates]
    assert [line["metrics"] for line in records[1].evaluations] == [
        line["metrics"] for line in records[0].evaluations
    ]


def test_worker_processes_prepare_the_same_batches_and_leave_interrupts_to_the_run(train, monkeypatch):
    whole = train("whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train("parts", {"data.workers": 2}).updates == 4
    assert_equal(whole, train("parts", {"data.workers": 2}))


@pytest.mark.parametrize(("metric", "values", "best"), [
    ("accuracy", [0.4, 0.9, 0.6, 0.9], 2),
    ("loss", [0.9, 0.4, float("nan"), 0.6], 2),
    ("accuracy", [float("nan"), 0.2, 0.1, 0.15], 2),
])  # fmt: skip
def test_the_best_model_is_kept_by_its_metric_in_the_right_direction(
    train, monkeypatch, metric, values, best
):
    """C094, C117."""
    scripted = iter(values)
    monkeypatch.setattr(
        "snugtune.training.evaluating.measure",
        lambda *args, **kwargs: {"accuracy": 0.0, "loss": 0.0, metric: next(scripted)},
    )
    result = train(epochs=4, settings={"evaluation.metric": metric, "checkpoints.keep_last": 1})
    assert result.best_update == 7 * best
    kept = sorted(path.name for path in (result.folder / "checkpoints").iterdir())
    assert kept == [f"update-{7 * best:08d}", "update-00000028"]
    saved = load_file(result.folder / "checkpoints" / kept[0] / "model.safetensors")
    final = weights(result)
    assert all(torch.equal(saved[name], final[name]) for name in final)
    assert result.metrics[metric] == values[best - 1]


def test_early_stopping_counts_evaluations_without_a_better_metric(train, monkeypatch):
    scripted = iter([0.5, 0.7, 0.7, 0.6, 0.9, 0.9])
    monkeypatch.setattr(
        "snugtune.training.evaluating.measure",
        lambda *args, **kwargs: {"accuracy": next(scripted), "loss": 1.0},
    )
    result = train(epochs=6, settings={"evaluation.early_stopping": 2})
    assert (result.status, result.updates, result.best_update) == ("finished", 28, 14)


def test_evaluations_come_as_often_as_asked_and_at_the_end(train):
    result = train(settings={"evaluation.every_updates": 4})
    record = read_record(result.folder / "record.jsonl")
    assert [line["update"] for line in record.evaluations] == [4, 8, 12, 14]


@pytest.mark.parametrize("passes", [3, 7, "auto"])
def test_the_number_of_passes_does_not_change_what_is_learnt(build_tiny_model, train, passes):
    calm = build_tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    # Without Adam: where a gradient is all rounding, Adam divides the rounding by itself.
    settings = {"training.optimizer": "sgd", "data.validation_fraction": 0.2}
    one = weights(train("one", {**settings, "training.passes": 1}, model=calm))
    how = {"training.passes": passes, "training.pass_price": 0}
    many = train("many", {**settings, **how}, model=calm)
    for name, tensor in weights(many).items():
        torch.testing.assert_close(tensor, one[name], rtol=0, atol=1e-6)
    lines = read_record(many.folder / "record.jsonl").updates
    if passes == "auto":
        assert max(line["passes"] for line in lines) > 1
        assert {line["padding"] for line in lines} == {0.0}


def test_an_interrupted_run_may_continue_in_other_passes(build_tiny_model, train, monkeypatch):
    """C115."""
    calm = build_tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    settings = {"training.optimizer": "sgd"}
    whole = weights(train("whole", settings, model=calm))
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        train("parts", settings, model=calm)
    more = {**settings, "training.passes": 4, "training.checkpointed_layers": "all"}
    parts = train("parts", more, model=calm)
    assert "passes: 4" in (parts.folder / "config.yaml").read_text()
    for name, tensor in weights(parts).items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_trains_on_fp32_weights(train, precision, monkeypatch):
    if precision == "fp16":
        compute_in_fp16(monkeypatch)
    result = train(precision=precision, epochs=4)
    assert {tensor.dtype for tensor in weights(result).values()} == {torch.float32}
    record = read_record(result.folder / "record.jsonl")
    assert (record.updates[0]["loss_scale"] is not None) == (precision == "fp16")
    losses = [line["loss"] for line in record.updates if line["applied"]]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_fp16_without_a_card_is_fp32_with_one_notice_that_names_the_cause(train, capsys):
    """C061"""
    result = train(precision="fp16", epochs=1)
    (decision,) = [
        line
        for line in read_record(result.folder / "record.jsonl").start["decisions"]
        if line["name"] == "precision"
    ]
    assert decision["value"] == "fp32"
    assert "fp16 was asked for, but no CUDA card is in use (" in decision["because"]
    cause = decision["because"].partition("(")[2].partition(")")[0]
    assert cause
    assert (result.folder / "log.txt").read_text().count(cause) == 1


def test_a_skipped_update_does_not_move_the_schedule(train, monkeypatch):
    real = Step.forward

    def poison(self, batch, *, number, **more):
        loss, denominator = real(self, batch, number=number, **more)
        return (loss * math.inf if number >= 5 else loss), denominator

    monkeypatch.setattr(Step, "forward", poison)
    result = train("run", {"training.warmup_fraction": 0.0}, epochs=1)
    updates = read_record(result.folder / "record.jsonl").updates
    assert [line["applied"] for line in updates] == [True] * 5 + [False] * 2
    assert updates[5]["learning_rate"] == updates[6]["learning_rate"]
    events = read_record(result.folder / "record.jsonl").events
    assert "update 6 was skipped" in events[0]["what"]
    assert "every module gives finite numbers, but the loss is none" in events[0]["why"]
    assert "2 updates skipped" in (result.folder / "log.txt").read_text()


def test_a_model_whose_answers_are_no_numbers_is_never_the_best(train, monkeypatch):
    monkeypatch.setattr(
        "snugtune.training.evaluating.measure", lambda *args, **more: {"accuracy": 1.0, "loss": math.nan}
    )
    assert train().best_update is None


def test_a_file_may_be_given_to_learn_from_and_to_measure_on(train, reviews):
    result = train(validation=reviews, epochs=1)
    assert read_record(result.folder / "record.jsonl").start["data"]["rows"] == {
        "train": 60,
        "validation": 60,
    }


def test_two_runs_with_different_precision_follow_each_other_in_one_process(train):
    assert train("a", precision="fp32").status == train("b", precision="bf16").status == "finished"


def test_the_random_numbers_of_the_caller_are_left_alone(train):
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    train()
    assert torch.equal(torch.rand(2), expected)


def test_class_weights_and_checkpointed_layers_are_used(train):
    plain = train("plain")
    weighted = train("weighted", {"training.class_weights": {"yes": 5.0}})
    layered = train("layered", checkpointed_layers="all")
    assert read_record(layered.folder / "record.jsonl").start["checkpointed_layers"] == 2
    one, other = weights(plain), weights(layered)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], weights(weighted)[name]) for name in one)


def test_an_unwritable_place_is_refused_in_words(train, tmp_path):
    if os.geteuid() == 0:
        output = "/proc/run"  # where not even root may write
    else:
        (tmp_path / "locked").mkdir(mode=0o500)
        output = str(tmp_path / "locked" / "run")
    with pytest.raises(RunFolderError, match="cannot use"):
        train(output)
