"""Folders that are not finished runs, and what the error says about each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import snugtune
from snugtune.errors import ModelError, RunFolderError
from snugtune.inference.runs import open_run


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """A copy of a finished run, to be spoilt."""
    return Path(shutil.copytree(finished("single"), tmp_path / "run"))


def rewrite_record(run: Path, change) -> None:
    path = run / "record.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in map(change, lines) if line), "utf-8")


def refusal(path: Path) -> str:
    with pytest.raises(RunFolderError) as caught:
        open_run(path)
    return str(caught.value)


def test_a_finished_run_says_what_its_model_reads_and_answers(finished):
    run = open_run(finished("pair"))
    assert (run.columns.text, run.columns.text_pair, run.columns.labels) == (
        "sentence1",
        "sentence2",
        ("label",),
    )
    assert (run.labels.kind, run.labels.names, run.max_length) == ("single-label", ("0", "1"), 16)
    assert run.config.model.name == str(finished("pair") / "model")
    assert run.config.training.precision == "auto"
    assert open_run(finished("pair"), precision="bf16").config.training.precision == "bf16"


def test_what_is_no_run_is_refused_and_a_near_miss_is_named(finished, tmp_path):
    run = finished("single")
    assert "there is no such folder" in refusal(tmp_path / "none")
    assert "it has no config.yaml" in refusal(tmp_path)
    assert f"give the folder of the run: {run}" in refusal(run / "model")
    assert f"give the folder of the run: {run}" in refusal(run / "config.yaml")
    assert f"give one of the runs in it: {run}" in refusal(run.parent)


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_an_unfinished_run_is_refused_with_the_command_that_continues(copied, status):
    rewrite_record(copied, lambda line: {**line, "status": status} if line["kind"] == "end" else line)
    text = refusal(copied)
    assert f"its record ends with '{status}'" in text
    assert f"snugtune train {copied / 'config.yaml'} --output {copied}" in text


def test_a_run_without_an_end_is_refused(copied):
    rewrite_record(copied, lambda line: None if line["kind"] == "end" else line)
    assert "still running, or crashed" in refusal(copied)
    (copied / "record.jsonl").unlink()
    assert "is not finished" in refusal(copied)


def test_a_run_whose_model_is_gone_is_refused(copied):
    (copied / "model" / "config.json").unlink()
    assert "has no model" in refusal(copied)


def test_a_run_of_another_kind_is_refused(copied):
    rewrite_record(copied, lambda line: {**line, "data": {"rows": 1}} if line["kind"] == "start" else line)
    assert "its record does not say what a run of sequence-classification says" in refusal(copied)


def test_a_run_of_a_model_of_ones_own_says_how_to_load_it(tmp_path):
    def loss(model, batch):
        return model(batch["x"]).square().sum(), len(batch["x"])

    task = snugtune.Task(build_model=lambda: nn.Linear(2, 1), loss=loss)
    run = snugtune.train(task=task, data={"x": torch.ones(9, 2)}, output=tmp_path / "run", quiet=True).folder
    for use in (open_run, lambda path: snugtune.predict(path, texts=["good"])):
        with pytest.raises(RunFolderError) as caught:
            use(run)
        assert "has a model of somebody's own" in str(caught.value)
        line = caught.value.do.partition(": ")[2]
        names = {"build_model": task.build_model}
        exec(line, names)
        assert torch.equal(names["model"].weight, load_file(run / "model" / "model.safetensors")["weight"])
    (run / "model" / "model.safetensors").unlink()
    assert "what `save` of the task wrote" in refusal(run)


def test_a_run_with_settings_of_another_version_is_refused(copied):
    text = (copied / "config.yaml").read_text("utf-8")
    (copied / "config.yaml").write_text(
        text.replace("task: sequence-classification", "task: translation"), "utf-8"
    )
    assert "task cannot be 'translation'" in refusal(copied)


def test_a_model_with_other_labels_is_refused(copied, finished):
    shutil.copy(finished("pair") / "model" / "config.json", copied / "model" / "config.json")
    with pytest.raises(ModelError, match="answers 0, 1; the run learnt 好评, 差评, no"):
        open_run(copied)


def test_a_model_without_weights_or_without_its_head_is_refused(copied):
    weights = copied / "model" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if "classifier" not in name}, weights)
    with pytest.raises(ModelError, match="classifier"):
        snugtune.predict(copied, texts=["good"], quiet=True)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot load the model"):
        snugtune.predict(copied, texts=["good"], quiet=True)
    weights.unlink()
    with pytest.raises(ModelError, match="cannot load the model"):
        snugtune.predict(copied, texts=["good"], quiet=True)
