"""Runs that are stopped anywhere and started again: the same rows, rates and weights, bit for bit."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from snugtune.data.batching import Updates
from snugtune.errors import SnugtuneError
from snugtune.record import read_record
from snugtune.step import Step
from snugtune.training import saving
from snugtune.training.manifest import check_files
from snugtune.training.positions import list_checkpoints
from tiny_runs import assert_equal, stop_after

needs_posix = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")


def told(result, *names: str) -> list[list[object]]:
    return [[line[name] for name in names] for line in read_record(result.folder / "record.jsonl").updates]


@needs_posix
@pytest.mark.parametrize(
    ("stops", "settings"),
    [
        ([1], {}),  # after the first update
        ([7], {}),  # at the end of an epoch
        ([6, 7, 8], {}),  # on both sides of it, and there
        ([3, 9, 13], {"training.precision": "fp16"}),
        ([4, 11], {"training.precision": "bf16", "training.checkpointed_layers": "all"}),
        ([5, 10], {"training.batching": "grouped", "training.schedule": "cosine"}),
        ([4], {"training.optimizer": "adafactor", "training.warmup_fraction": 0.5}),
    ],
    ids=str,
)
def test_a_run_with_stops_is_the_run_without(train, monkeypatch, stops, settings):
    """C092, C113: mid-epoch and at its end, with dropout; the rates are those of one run, not of parts."""
    made: dict[int, list[int]] = {}
    ran: list[tuple[int, list[int]]] = []
    real, launch = Updates.__getitem__, Step.launch

    def make(self, update):
        made[update] = self.rows_of(update).tolist()
        return real(self, update)

    def run(self, passes, *, number, **more):
        ran.append((number, made[number]))
        return launch(self, passes, number=number, **more)

    monkeypatch.setattr(Updates, "__getitem__", make)
    monkeypatch.setattr(Step, "launch", run)
    whole = train("whole", settings)
    rows, ran[:] = list(ran), []
    made.clear()
    for update in stops:
        with monkeypatch.context() as patch:
            stop_after(patch, update - 1)
            assert train("parts", settings).updates == update
    last = train("parts", settings)
    assert ran == rows
    epoch = [row for _, batch in rows[:7] for row in batch]
    assert sorted(epoch) == list(range(len(epoch)))
    assert_equal(whole, last)
    names = ("update", "learning_rate", "loss", "grad_norm", "applied", "loss_scale")
    assert told(last, *names) == told(whole, *names)
    assert last.metrics == whole.metrics


@needs_posix
@pytest.mark.parametrize("how", ["signal", "crash"])
def test_a_stop_between_the_passes_of_an_update_loses_and_repeats_none_of_them(train, monkeypatch, how):
    """C116: an update is finished before saving, or done again as a whole."""
    settings = {"training.passes": 4, "checkpoints.every_minutes": 1e-6}
    whole = train("whole", settings)
    real = Step.forward
    passes = []

    def stop(self, batch, **more):
        passes.append(1)
        if len(passes) == 4 * 5 + 2:  # the second pass of the sixth update
            if how == "crash":
                raise RuntimeError("the lamp fell on the keyboard")
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, batch, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "forward", stop)
        if how == "crash":
            with pytest.raises(RuntimeError, match="lamp"):
                train("parts", settings)
        else:
            assert train("parts", settings).updates == 6
            assert len(passes) == 24
    last = train("parts", settings)
    assert read_record(last.folder / "record.jsonl").starts[-1]["resumed_from_update"] == 5 + (
        how == "signal"
    )
    assert_equal(whole, last)


@needs_posix
@pytest.mark.parametrize("stops", [[], [5], [6], [5, 7]])
def test_early_stopping_counts_over_restarts(train, monkeypatch, stops):
    settings = {"evaluation.every_updates": 2, "evaluation.early_stopping": 2}
    scripted = iter([0.5, 0.9, 0.6, 0.7, 0.95])  # after updates 2, 4, 6, 8, 10
    monkeypatch.setattr(
        "snugtune.training.evaluating.measure",
        lambda *args, **more: {"accuracy": next(scripted), "loss": 1.0},
    )
    for update in stops:
        with monkeypatch.context() as patch:
            stop_after(patch, update - 1)
            assert train("run", settings).status == "interrupted"
    result = train("run", settings)
    assert (result.status, result.updates, result.best_update) == ("finished", 8, 4)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_the_best_stays_where_saves_and_evaluations_do_not_coincide(train, monkeypatch, keep_last):
    """C094: metrics 0.5, 0.9, 0.7, 0.6, 0.6; saved every third update, measured every second."""
    scripted = iter([0.5, 0.9, 0.7, 0.6, 0.6, 0.6, 0.6])
    monkeypatch.setattr(
        "snugtune.training.evaluating.measure",
        lambda *args, **more: {"accuracy": next(scripted), "loss": 1.0},
    )
    launched: list[int] = []
    real = Step.launch
    monkeypatch.setattr(
        Step, "launch", lambda self, passes, **more: launched.append(1) or real(self, passes, **more)
    )
    monkeypatch.setattr(saving.Saver, "is_due", lambda self, minutes: len(launched) % 3 == 0)
    kept: list[set[int]] = []
    remove = saving.checkpoints.remove_old

    def look(folder, **more):
        remove(folder, **more)
        kept.append({int(path.name[7:]) for path in list_checkpoints(folder)})

    monkeypatch.setattr(saving.checkpoints, "remove_old", look)
    result = train("run", {"evaluation.every_updates": 2, "checkpoints.keep_last": keep_last})
    saved = [line["update"] for line in read_record(result.folder / "record.jsonl").checkpoints]
    assert saved == [2, 3, 4, 6, 8, 9, 10, 12, 14]
    assert all(4 in there for there in kept[2:])
    assert kept[-1] == {4, *saved[-keep_last:]}
    assert (result.best_update, result.metrics["accuracy"]) == (4, 0.9)
    best = load_file(result.folder / "checkpoints" / "update-00000004" / "model.safetensors")
    model = load_file(result.model_folder / "model.safetensors")
    assert all(torch.equal(best[name], model[name]) for name in model)


@needs_posix
def test_a_ctrl_c_while_a_checkpoint_is_written_harms_none(train, monkeypatch):
    """C096: the first one lets it finish; a second one leaves at once, and the one before still loads."""
    settings = {"checkpoints.every_minutes": 1e-6}
    whole = train("whole", settings)
    real = saving.checkpoints.save_file
    written = []

    def interrupt(tensors, path, **more):
        written.append(path)
        if len(written) == 9:  # the weights of the fifth checkpoint
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        real(tensors, path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(saving.checkpoints, "save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train("parts", settings)
    folder = whole.folder.with_name("parts")
    found = list_checkpoints(folder / "checkpoints")
    assert [int(path.name[7:]) for path in found][-1] == 4
    for path in found:
        check_files(path)
    assert read_record(folder / "record.jsonl").end["status"] == "interrupted"
    last = train("parts", settings)
    assert read_record(folder / "record.jsonl").starts[-1]["resumed_from_update"] == 4
    assert_equal(whole, last)


@needs_posix
def test_a_process_that_is_killed_while_it_deletes_leaves_no_half_checkpoint(train, monkeypatch):
    settings = {"checkpoints.every_minutes": 1e-6, "checkpoints.keep_last": 1}
    whole = train("whole", settings)
    real = saving.checkpoints.shutil.rmtree
    seen = []

    def die(path, **more):
        if "update-" in str(path) and path.exists():
            seen.append(path)
            (path / "model.safetensors").unlink()
            raise KeyboardInterrupt
        real(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(saving.checkpoints.shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            train("parts", settings)
    assert seen
    for path in list_checkpoints(whole.folder.with_name("parts") / "checkpoints"):
        check_files(path)
    last = train("parts", settings)
    assert_equal(whole, last)
    assert not [path for path in last.folder.rglob("*") if "old" in path.name]


@needs_posix
def test_a_start_that_left_only_a_line_in_the_record_does_not_hide_the_run_that_saved(train, monkeypatch):
    """On a full disk the line of the second start may be lost; its checkpoints are its own all the same."""
    with monkeypatch.context() as patch:
        patch.setattr(Step, "launch", lambda *args, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train("run")
    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        folder = train("run").folder
    lines = (folder / "record.jsonl").read_text().splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if '"kind":"start"' in line]
    assert len(starts) == 2
    del lines[starts[1]]
    (folder / "record.jsonl").write_text("".join(lines))
    whole = train("whole")
    assert_equal(whole, train("run"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": "missing.csv"},
        {"model": "missing-model"},
        {"text_column": "texd"},
        {"set": {"training.class_weights": {"perhaps": 2.0}}},
    ],
    ids=str,
)
def test_a_start_that_fails_blocks_no_other(train, wrong):
    everyday = {name: value for name, value in wrong.items() if name != "set"}
    with pytest.raises(SnugtuneError):
        train("run", wrong.get("set"), **everyday)
    assert train("run", epochs=1, batch_size=16).status == "finished"
