"""Settings that have changed: refused by name, and what --continue-anyway does with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from snugtune import cli
from snugtune.data.batching import Updates
from snugtune.errors import RunFolderError
from snugtune.record import read_record
from snugtune.step import Step
from snugtune.training.positions import Position, facts_of, list_checkpoints
from snugtune.training.schedule import learning_rate
from tiny_runs import assert_equal, stop_after


@pytest.fixture
def part(train, monkeypatch):
    """A function that makes a run of 14 updates and interrupts it."""

    def make(update: int = 4, settings: dict[str, object] | None = None) -> Path:
        with monkeypatch.context() as patch:
            stop_after(patch, update - 1)
            return train("run", settings).folder

    return make


def events(folder: Path) -> list[str]:
    return [f"{line['what']} ({line['why']})" for line in read_record(folder / "record.jsonl").events]


def learnt(monkeypatch) -> dict[int, list[int]]:
    """Update -> its rows, of the runs from here on."""
    seen: dict[int, list[int]] = {}
    real = Updates.__getitem__

    def look(self, update):
        seen[update] = self.rows_of(update).tolist()
        return real(self, update)

    monkeypatch.setattr(Updates, "__getitem__", look)
    return seen


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("training.epochs", 3, "training.epochs 2 -> 3"),
        ("training.batch_size", 4, "training.batch_size 8 -> 4"),
        ("training.learning_rate", 1e-3, "training.learning_rate 0.01 -> 0.001"),
        ("training.optimizer", "sgd", "training.optimizer adamw -> sgd"),
        ("training.weight_decay", 0.1, "training.weight_decay 0.01 -> 0.1"),
        ("evaluation.metric", "loss", "evaluation.metric None -> loss"),
        ("data.max_length", 16, "data.max_length 128 -> 16"),
    ],
)
def test_a_setting_that_changes_what_is_learnt_is_named_and_refused_unless_asked_for(
    train, part, name, value, said
):
    folder = part()
    before = (folder / "config.yaml").read_bytes()
    with pytest.raises(RunFolderError, match="holds another run") as caught:
        train("run", {name: value})
    assert said in caught.value.why
    assert "--continue-anyway" in caught.value.do
    assert (folder / "config.yaml").read_bytes() == before
    result = train("run", {name: value}, continue_anyway=True)
    assert result.status == "finished"
    record = read_record(folder / "record.jsonl")
    assert record.starts[-1]["resumed_from_update"] == 4
    assert any(f"continues with other settings: {said}" in line for line in events(folder))
    assert f"warning   continues with other settings: {said}" in (folder / "log.txt").read_text()


def test_another_batch_size_goes_on_at_the_same_rows_by_the_new_plan(train, part, monkeypatch):
    """C115, C092: samples seen are the truth, and no row of the epoch comes twice or not at all."""
    seen = learnt(monkeypatch)
    folder = part(4)
    first = [row for update in range(4) for row in seen[update]]
    seen.clear()
    result = train("run", {"training.batch_size": 4}, continue_anyway=True)
    rows = result.updates and read_record(folder / "record.jsonl").start["data"]["rows"]["train"]
    per_epoch = -(-rows // 4)
    assert result.updates == 4 + (2 * per_epoch - 8)  # 32 rows are 8 updates of 4
    later = [row for update in range(4, 4 + per_epoch - 8) for row in seen[update]]
    assert sorted(first + later) == list(range(rows))
    updates = read_record(folder / "record.jsonl").updates
    assert [line["update"] for line in updates] == list(range(1, result.updates + 1))
    config = type("Settings", (), {"warmup_fraction": 0.06, "learning_rate": 1e-2, "schedule": "linear"})
    expected = [learning_rate(config, applied=8 + done, total=2 * per_epoch) for done in range(per_epoch)]
    assert [line["learning_rate"] for line in updates[4 : 4 + per_epoch]] == expected
    assert [line["epoch"] for line in updates[4:]] == [1] * (per_epoch - 8) + [2] * per_epoch
    ends = [line["update"] for line in read_record(folder / "record.jsonl").evaluations]
    assert ends == [4 + per_epoch - 8, result.updates]


def test_a_larger_batch_does_part_of_an_update_again_and_skips_no_row(train, part, monkeypatch):
    seen = learnt(monkeypatch)
    folder = part(3)
    first = {row for update in range(3) for row in seen[update]}
    seen.clear()
    result = train("run", {"training.batch_size": 16}, continue_anyway=True)
    rows = read_record(folder / "record.jsonl").start["data"]["rows"]["train"]
    assert result.updates == 3 + 2 * -(-rows // 16) - 1  # 24 rows are one update of 16, and 8 come again
    later = [row for update in range(3, 3 + -(-rows // 16) - 1) for row in seen[update]]
    assert first | set(later) == set(range(rows))
    assert len(first & set(later)) == 8


@pytest.mark.parametrize("batch_size", [4, 16])
def test_what_continues_so_can_itself_be_interrupted_without_a_difference(
    train, part, monkeypatch, batch_size
):
    folder = part(4)
    other = folder.with_name("copy")
    shutil.copytree(folder, other)
    settings = {"training.batch_size": batch_size, "training.epochs": 3}
    whole = train("copy", settings, continue_anyway=True)
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        assert train("run", settings, continue_anyway=True).updates == 7
    assert_equal(whole, train("run", settings))  # it has been asked for once


def test_a_crash_before_the_next_checkpoint_forgets_nothing_of_it(train, part, monkeypatch):
    folder = part(4)
    other = folder.with_name("copy")
    shutil.copytree(folder, other)
    settings = {"training.batch_size": 4, "evaluation.metric": "loss"}
    whole = train("copy", settings, continue_anyway=True)
    with monkeypatch.context() as patch:
        patch.setattr(Step, "launch", lambda *args, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train("run", settings, continue_anyway=True)
    again = train("run", settings)
    assert_equal(whole, again)
    assert again.best_update == whole.best_update


def test_another_optimizer_begins_anew_with_the_weights_that_are_there(train, part, monkeypatch):
    """C114: never in silence, and only when asked for."""
    folder = part(4)
    kept = load_file(list_checkpoints(folder / "checkpoints")[-1] / "model.safetensors")
    begun = {}
    real = Step.launch

    def look(self, passes, *, number, **more):
        if not begun:
            begun.update({name: each.detach().clone() for name, each in self.model.named_parameters()})
            assert not self.optimizer.state
        return real(self, passes, number=number, **more)

    monkeypatch.setattr(Step, "launch", look)
    train("run", {"training.optimizer": "sgd"}, continue_anyway=True)
    assert all(torch.equal(kept[name], tensor) for name, tensor in begun.items())
    assert any("the optimizer begins anew" in line and "adamw-fused" in line for line in events(folder))


def test_a_state_of_the_optimizer_that_lacks_a_part_begins_anew_when_asked_for(train, part):
    from safetensors.torch import save_file

    from snugtune.training.manifest import write_manifest

    path = list_checkpoints(part(4) / "checkpoints")[-1]
    tensors = load_file(path / "optimizer.safetensors")
    del tensors["0.exp_avg_sq"]
    save_file(tensors, path / "optimizer.safetensors")
    write_manifest(path)
    with pytest.raises(RunFolderError, match="cannot continue from") as caught:
        train("run")
    assert "--continue-anyway" in caught.value.do
    result = train("run", continue_anyway=True)
    assert result.status == "finished"
    assert any("lacks exp_avg_sq" in line for line in events(result.folder))


@pytest.mark.parametrize(
    ("settings", "anew"),
    [({"evaluation.metric": "loss"}, True), ({"training.seed": 1}, True), ({"training.epochs": 3}, False)],
    ids=str,
)
def test_the_best_model_is_chosen_anew_where_scores_mean_something_else(
    train, part, monkeypatch, settings, anew
):
    """C117: a score is compared with scores of its own kind only."""
    scores = iter([0.9, *[0.5] * 9])
    monkeypatch.setattr(
        "snugtune.training.evaluating.measure",
        lambda *args, **more: {"accuracy": (score := next(scores)), "loss": 1 - score},
    )
    part(9)  # after the evaluation of update 7, which is the best of all
    result = train("run", settings, continue_anyway=True)
    assert (result.best_update == 7) != anew
    assert any("chosen anew" in line for line in events(result.folder)) == anew


def test_a_finished_run_is_trained_further(train):
    first = train("run")
    with pytest.raises(RunFolderError) as caught:
        train("run", epochs=3)
    assert "train its model further" in caught.value.do
    result = train("run", epochs=3, continue_anyway=True)
    assert (result.status, result.updates) == ("finished", 21)
    assert result.best_update >= first.best_update
    two, three = (
        load_file(path / "model.safetensors") for path in list_checkpoints(result.folder / "checkpoints")[-2:]
    )
    assert not all(torch.equal(two[name], three[name]) for name in two)
    assert train("run", epochs=3).updates == 21  # nothing to do, and nothing to ask for


def test_a_finished_run_without_checkpoints_says_how_to_begin_with_its_model(train):
    result = train("run")
    shutil.rmtree(result.folder / "checkpoints")
    for more in ({}, {"continue_anyway": True}):
        with pytest.raises(RunFolderError) as caught:
            train("run", epochs=3, **more)
        assert f"--model {result.model_folder}" in caught.value.do


def test_fewer_epochs_than_are_done_end_the_run_with_its_best_model(train, part):
    part(9)
    result = train("run", epochs=1, continue_anyway=True)
    assert (result.status, result.updates) == ("finished", 9)
    assert result.best_update == 7


def test_other_data_are_refused_unless_asked_for_and_other_labels_always(train, part, reviews):
    folder = part(4)
    reviews.write_text(reviews.read_text() + "one more film was great,yes\n" * 3)
    with pytest.raises(RunFolderError) as caught:
        train("run")
    assert "the contents of data.train" in caught.value.why
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    assert train("copy", continue_anyway=True).status == "finished"
    assert any("the contents of data.train" in line for line in events(copy))
    reviews.write_text(reviews.read_text().replace(",yes", ",perhaps"))
    with pytest.raises(RunFolderError, match="holds another run") as caught:
        train("run", continue_anyway=True)
    assert "no, yes as labels, this one no, perhaps" in caught.value.why


def test_another_model_is_refused_also_when_asked_for(train, part, build_tiny_model):
    part(4)
    with pytest.raises(RunFolderError) as caught:
        train("run", model=build_tiny_model(num_hidden_layers=3), continue_anyway=True)
    assert "parameters of the model" in caught.value.why


def test_data_and_model_that_have_moved_can_go_on(train, part, reviews, tiny_model, monkeypatch):
    whole = train("whole")
    part(9)
    moved = reviews.with_name("moved.csv")
    reviews.rename(moved)
    result = train("run", data=moved, continue_anyway=True)
    assert_equal(whole, result)
    assert not any("chosen anew" in line for line in events(result.folder))


def test_without_a_change_asking_changes_nothing(train, part):
    whole = train("whole")
    folder = part(4)
    assert_equal(whole, train("run", continue_anyway=True))
    assert events(folder) == []


def test_the_command_has_the_flag(train, part, reviews, tiny_model, monkeypatch, capsys):
    folder = part(4)
    words = ["snugtune", "train", "--model", str(tiny_model), "--data", str(reviews), "--batch-size", "8"]
    words += ["--epochs", "1", "--learning-rate", "1e-2", "--output", str(folder), "--quiet"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert "training.epochs 2 -> 1" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*words, "--continue-anyway"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    assert read_record(folder / "record.jsonl").end["status"] == "finished"


# The record


@pytest.mark.parametrize("what", ["emptied", "deleted", "cut"])
def test_a_record_that_lost_its_lines_is_noticed_and_the_run_is_the_same(train, part, what):
    whole = train("whole")
    folder = part(9)
    record = folder / "record.jsonl"
    if what == "emptied":
        record.write_text("")
    elif what == "deleted":
        record.unlink()
    else:
        record.write_text("\n".join(record.read_text().splitlines()[:5]) + "\n")
    result = train("run")
    assert_equal(whole, result)
    noticed = [line for line in events(folder) if "of the 9 updates before this" in line]
    assert len(noticed) == 1
    assert ("emptied or deleted" in noticed[0]) == (what != "cut")
    assert "of the 9 updates before this" in (folder / "log.txt").read_text()
    known = {"accuracy": whole.metrics["accuracy"]}
    assert known.items() <= result.metrics.items()
    if whole.best_update <= 9:  # no scores of another update in the place of those that are lost
        assert result.metrics == known


def test_other_data_are_noticed_without_the_record_too(train, part, reviews):
    folder = part(4)
    (folder / "record.jsonl").unlink()
    reviews.write_text(reviews.read_text() + "one more film was great,yes\n")
    with pytest.raises(RunFolderError) as caught:
        train("run")
    assert "the contents of data.train" in caught.value.why


def test_a_model_whose_record_is_gone_is_not_replaced(train):
    result = train("run")
    shutil.rmtree(result.folder / "checkpoints")
    (result.folder / "record.jsonl").write_text("")
    before = (result.model_folder / "model.safetensors").read_bytes()
    with pytest.raises(RunFolderError, match="holds a model, but not the record"):
        train("run")
    assert (result.model_folder / "model.safetensors").read_bytes() == before


# Checkpoints of earlier versions


def test_version_2_goes_on_with_the_settings_it_was_made_with(train, part):
    whole = train("whole")
    folder = part(4)
    for path in list_checkpoints(folder / "checkpoints"):
        state = json.loads((path / "state.json").read_text())
        del state["facts"], state["position"]["epoch"], state["position"]["rows"]
        (path / "state.json").write_text(json.dumps({**state, "version": 2}))
        from snugtune.training.manifest import write_manifest

        write_manifest(path)
        assert facts_of(path) == {}
    with pytest.raises(RunFolderError) as caught:
        train("run", {"training.batch_size": 4}, continue_anyway=True)
    assert "does not say how far in the data it is" in caught.value.why
    assert_equal(whole, train("run"))
    state = json.loads((list_checkpoints(folder / "checkpoints")[-1] / "state.json").read_text())
    assert Position(**state["position"]).epoch == 2
