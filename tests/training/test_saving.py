"""Saving that fails, checkpoints that are damaged, and what a run does about them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from snugtune.errors import ModelError, RunFolderError
from snugtune.record import read_record
from snugtune.step import Step
from snugtune.training import checkpoints, saving, space
from snugtune.training.folder import WRITING
from snugtune.training.manifest import MANIFEST, check_files, write_manifest
from snugtune.training.positions import list_checkpoints
from tiny_runs import assert_equal, stop_after, weights

EVERY = {"evaluation.every_updates": 4, "checkpoints.keep_last": 3}


@pytest.fixture
def interrupted(train, monkeypatch):
    """A run with checkpoints after updates 4, 8 and 10, and the whole run that it is to equal."""

    def make(output: str = "parts"):
        whole = train("whole", EVERY)
        with monkeypatch.context() as patch:
            stop_after(patch, 9)
            parts = train(output, EVERY)
        assert [path.name[-2:] for path in list_checkpoints(parts.folder / "checkpoints")] == [
            "04",
            "08",
            "10",
        ]
        return whole, parts.folder

    return make


def newest(folder: Path) -> Path:
    return list_checkpoints(folder / "checkpoints")[-1]


def full_disk(monkeypatch, *, when=lambda path: True) -> None:
    """No checkpoint's file can be written where `when` says so."""
    real = checkpoints.save_file

    def save(tensors, path, **more):
        if when(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path, **more)

    monkeypatch.setattr(checkpoints, "save_file", save)


# Damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path / "model.safetensors", 0),
        lambda path: os.truncate(
            path / "optimizer.safetensors", (path / "optimizer.safetensors").stat().st_size // 2
        ),
        lambda path: (path / "optimizer.safetensors").unlink(),
        lambda path: (path / "state.json").write_text("{"),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: shutil.rmtree(path) or path.mkdir(),
    ],
    ids=["empty", "cut", "no optimizer", "state", "no manifest", "nothing in it"],
)
def test_a_damaged_checkpoint_is_skipped_in_favour_of_the_one_before(interrupted, train, damage):
    """C093."""
    whole, folder = interrupted()
    damage(newest(folder))
    last = train("parts", EVERY)
    assert_equal(whole, last)
    record = read_record(folder / "record.jsonl")
    assert record.starts[-1]["resumed_from_update"] == 8
    assert "update-00000010 is skipped" in record.events[0]["what"]
    assert "update-00000010 is skipped" in (folder / "log.txt").read_text()
    for path in list_checkpoints(folder / "checkpoints"):
        if path.name != "update-00000010":
            check_files(path)


def test_a_flipped_bit_is_found_in_every_file(interrupted, train):
    _, folder = interrupted()
    path = newest(folder)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        content = bytearray((path / name).read_bytes())
        content[-3] ^= 1
        (path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not what was written"):
            check_files(path)
        content[-3] ^= 1
        (path / name).write_bytes(content)
    check_files(path)


def test_when_no_checkpoint_is_whole_each_is_named_with_its_reason(interrupted, train):
    _, folder = interrupted()
    for path in list_checkpoints(folder / "checkpoints"):
        (path / "optimizer.safetensors").unlink()
    with pytest.raises(RunFolderError, match=r"no checkpoint in .* can be used") as caught:
        train("parts", EVERY)
    for update in ("04", "08", "10"):
        assert f"update-000000{update}: optimizer.safetensors is missing" in caught.value.why
    assert not (folder / "model").exists()


def test_a_best_model_that_is_damaged_is_replaced_by_the_last_one_and_that_is_told(train, monkeypatch):
    scripted = iter([0.5, 0.9, 0.6, 0.7])
    real = saving.Saver.save

    def damage(self, position, why):
        if position.update == 12:
            os.truncate(self.folder.checkpoints / "update-00000008" / "model.safetensors", 10)
        return real(self, position, why)

    monkeypatch.setattr(saving.Saver, "save", damage)
    monkeypatch.setattr(
        "snugtune.training.evaluating.measure",
        lambda *args, **more: {"accuracy": next(scripted), "loss": 1.0},
    )
    result = train("run", EVERY)
    assert (result.best_update, result.metrics["accuracy"]) == (14, 0.7)
    saved = load_file(result.folder / "checkpoints" / "update-00000014" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights(result).items())
    assert "the best model, of update 8, is lost" in (result.folder / "log.txt").read_text()


def test_checkpoints_of_version_1_are_still_read(interrupted, train):
    whole, folder = interrupted()
    for path in list_checkpoints(folder / "checkpoints"):
        (path / MANIFEST).unlink()
        state = json.loads((path / "state.json").read_text())
        del state["run_id"], state["optimizer"]["tensors"]
        (path / "state.json").write_text(json.dumps({**state, "version": 1}))
    last = train("parts", EVERY)
    assert_equal(whole, last)
    record = read_record(folder / "record.jsonl")
    assert record.starts[-1]["resumed_from_update"] == 10
    assert record.events == []


# The state of the optimizer


def rewrite(path: Path, change) -> None:
    """Change the state of the optimizer in a checkpoint that stays whole."""
    tensors = load_file(path / "optimizer.safetensors")
    change(tensors)
    save_file(tensors, path / "optimizer.safetensors")
    write_manifest(path)


def test_a_state_of_the_optimizer_that_is_partial_is_refused_by_name(interrupted, train):
    """C114."""
    _, folder = interrupted()
    rewrite(newest(folder), lambda tensors: tensors.pop("0.exp_avg_sq"))
    with pytest.raises(RunFolderError, match="cannot continue from") as caught:
        train("parts", EVERY)
    assert "lacks exp_avg_sq of bert.embeddings.word_embeddings.weight" in caught.value.why


def test_a_state_of_the_optimizer_that_is_empty_is_refused_in_version_1_too(interrupted, train):
    _, folder = interrupted()
    path = newest(folder)
    rewrite(path, dict.clear)
    (path / MANIFEST).unlink()
    state = json.loads((path / "state.json").read_text())
    del state["optimizer"]["tensors"]
    (path / "state.json").write_text(json.dumps({**state, "version": 1}))
    with pytest.raises(RunFolderError) as caught:
        train("parts", EVERY)
    assert "no state of the optimizer" in caught.value.why


def test_the_state_lies_in_memory_of_its_own_after_loading(interrupted, train, monkeypatch):
    whole, folder = interrupted()
    real = Step.launch

    def forget(self, passes, *, number, **more):
        if number == 10:  # the files are gone and others lie in their place
            for path in list_checkpoints(folder / "checkpoints"):
                for file in path.iterdir():
                    file.write_bytes(b"\xff" * file.stat().st_size)
        return real(self, passes, number=number, **more)

    monkeypatch.setattr(Step, "launch", forget)
    train("parts", EVERY)
    one, other = (load_file(newest(path) / "model.safetensors") for path in (whole.folder, folder))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_changed_in_between_is_named(interrupted, train, monkeypatch):
    _, folder = interrupted()
    train("parts", {**EVERY, "training.passes": 2})
    events = read_record(folder / "record.jsonl").events
    assert "changed since the interruption: passes" in events[0]["what"]
    assert "-> 2" in events[0]["what"]


# Full disks


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_not_the_run(train, monkeypatch):
    """C093."""
    whole = train("whole", EVERY)
    full_disk(monkeypatch, when=lambda path: list_checkpoints(path.parent.parent) and not freed)
    freed: list[int] = []
    real = saving.Saver.save

    def save(self, position, why):
        if position.update == 14:
            freed.append(1)
        return real(self, position, why)

    monkeypatch.setattr(saving.Saver, "save", save)
    result = train("run", EVERY)
    assert result.status == "finished"
    one, other = (load_file(newest(run.folder) / "model.safetensors") for run in (whole, result))
    assert all(torch.equal(one[name], other[name]) for name in one)
    record = read_record(result.folder / "record.jsonl")
    assert [line["update"] for line in record.checkpoints] == [4, 14]
    assert len(record.events) == 1  # said once, though two could not be written
    assert os.strerror(errno.ENOSPC) in record.events[0]["why"]
    assert "has the checkpoint of update 4, and tries again" in record.events[0]["do"]
    assert not list(result.folder.rglob(f"{WRITING}*"))


def test_a_best_model_that_could_not_be_saved_is_not_the_best(train, monkeypatch):
    scripted = iter([0.5, 0.9, 0.6, 0.4])
    monkeypatch.setattr(
        "snugtune.training.evaluating.measure",
        lambda *args, **more: {"accuracy": next(scripted), "loss": 1.0},
    )
    full_disk(monkeypatch, when=lambda path: len(list_checkpoints(path.parent.parent)) == 1 and not tries)
    tries: list[int] = []
    real = saving.Saver._tell
    monkeypatch.setattr(saving.Saver, "_tell", lambda self, error: tries.append(1) or real(self, error))
    result = train("run", EVERY)
    assert result.best_update == 12
    assert result.metrics["accuracy"] == 0.6


def test_a_run_that_could_never_save_goes_on_while_its_model_would_fit(train, monkeypatch):
    full_disk(monkeypatch)
    result = train("run", EVERY)
    assert result.status == "finished"
    assert list_checkpoints(result.folder / "checkpoints") == []
    assert "has nothing, and tries again" in (result.folder / "log.txt").read_text()


def test_a_run_that_could_never_save_stops_where_its_model_would_not_fit_either(train, monkeypatch):
    full_disk(monkeypatch)
    monkeypatch.setattr(saving, "has_room", lambda folder, size: False)
    with pytest.raises(RunFolderError, match="the first checkpoint could not be written") as caught:
        train("run", EVERY)
    assert os.strerror(errno.ENOSPC) in caught.value.why


def test_a_model_that_cannot_be_written_leaves_the_last_checkpoint(train, monkeypatch):
    whole = train("whole")
    with monkeypatch.context() as patch:
        patch.setattr(
            "snugtune.training.finish.write_card",
            lambda *args, **more: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")),
        )
        with pytest.raises(RunFolderError, match="cannot write the finished model"):
            train("run")
    folder = whole.folder.parent / "run"
    check_files(newest(folder))
    assert not (folder / "model").exists()
    assert not list(folder.rglob(f"{WRITING}*"))
    again = train("run")
    assert_equal(whole, again)
    assert read_record(folder / "record.jsonl").starts[-1]["resumed_from_update"] == 14


def test_the_room_that_is_needed_is_stated_and_checked_before_training(train, monkeypatch):
    said = (train("run").folder / "log.txt").read_text()
    assert "disk      checkpoints of " in said
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(RunFolderError, match="too little room") as caught:
        train("other")
    assert "1000 B are free" in caught.value.why
    assert "checkpoints.keep_last=1" in caught.value.do
    assert not list((said and Path(caught.value.what.split()[0])).glob("checkpoints/*"))


def test_room_is_what_can_really_be_written(tmp_path):
    assert space.has_room(tmp_path, 1000)
    assert not space.has_room(tmp_path, 2**60)
    assert not space.has_room(tmp_path / "missing", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_can_never_be_saved_is_refused_before_the_first_update(train, monkeypatch):
    """C098: at minute 0."""
    from snugtune.training import assembly

    real = assembly.Step

    def sparse(*args, **more):
        step = real(*args, **more)
        step.model.register_buffer("odd", torch.eye(3).to_sparse())
        return step

    monkeypatch.setattr(assembly, "Step", sparse)
    with pytest.raises(ModelError, match="odd of the model cannot be saved"):
        train("run")


# What is left of other times


def test_leftovers_of_a_killed_run_go_when_it_starts(interrupted, train):
    _, folder = interrupted()
    for path in (folder / "checkpoints" / WRITING, folder / f"{WRITING}-model"):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    (folder / f"{WRITING}-config.yaml").write_text("half")
    train("parts", EVERY)
    assert not list(folder.rglob(f"{WRITING}*"))


def test_rotation_leaves_checkpoints_of_others_and_what_it_cannot_read(interrupted, train):
    whole, folder = interrupted()
    place = folder / "checkpoints"
    shutil.copytree(newest(folder), place / "update-00000002")
    state = json.loads((place / "update-00000002" / "state.json").read_text())
    (place / "update-00000002" / "state.json").write_text(json.dumps({**state, "run_id": "another"}))
    (place / "update-00000003").mkdir()
    (place / "update-00000003" / "thesis.docx").write_text("years of work")
    shutil.copytree(place / "update-00000002", place / "update-00000012")
    last = train("parts", {**EVERY, "checkpoints.keep_last": 1})
    assert_equal(whole, last)
    left = sorted(path.name for path in place.iterdir())
    assert left[:2] == ["update-00000002", "update-00000003"]
    assert "update-00000012.kept-1" in left
    assert "update-00000014" in left
    assert "update-00000010" not in left or last.best_update == 10


@pytest.mark.parametrize(
    "left", [["log.txt"], ["log.txt", "record.jsonl"], [".writing-config.yaml", ".lock"]]
)
def test_a_run_that_was_killed_before_its_first_update_starts_again(train, tmp_path, left):
    (tmp_path / "run").mkdir()
    for name in left:
        (tmp_path / "run" / name).touch()
    assert train("run", epochs=1).status == "finished"


def test_a_run_that_stopped_early_and_was_killed_before_its_end_does_not_go_on(train, monkeypatch):
    scripted = iter([0.9, 0.7, 0.6])
    monkeypatch.setattr(
        "snugtune.training.evaluating.measure",
        lambda *args, **more: {"accuracy": next(scripted), "loss": 1.0},
    )
    settings = {"evaluation.every_updates": 2, "evaluation.early_stopping": 2}
    with monkeypatch.context() as patch:
        patch.setattr("snugtune.training.loop.finish_model", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train("run", settings)
    result = train("run", settings)
    assert (result.status, result.updates, result.best_update) == ("finished", 6, 2)


def test_a_run_that_first_failed_with_other_settings_can_be_continued(train, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Step, "launch", lambda *args, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train("run", batch_size=16)
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train("run").status == "interrupted"
    assert train("run").status == "finished"
