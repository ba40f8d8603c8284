"""A whole run of two processes, interrupted, continued, and equal to that of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import snugtune
from snugtune.record import read_record


def start(folder: Path, arguments: list[str]) -> subprocess.Popen[str]:
    source = str(Path(snugtune.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "snugtune"]
    return subprocess.Popen(
        [*launcher, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_learn_what_one_does_and_may_be_interrupted(build_tiny_model, tmp_path):
    calm = build_tiny_model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rows = [
        f"the film {row} was {'very ' * (row % 7)}{'good' if row % 2 else 'bad'},{row % 2}"
        for row in range(41)
    ]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    # 37 rows to learn from, in updates of 6: the last of each epoch has one row, and one process none.
    everyday = {"batch_size": 6, "epochs": 8, "learning_rate": 1e-2}
    settings = {"training.optimizer": "sgd", "training.warmup_fraction": 0.0}
    one = snugtune.train(
        model=calm,
        data=tmp_path / "reviews.csv",
        output=tmp_path / "one",
        set=settings,
        quiet=True,
        **everyday,
    )

    arguments = ["train", "--model", str(calm), "--data", "reviews.csv", "--output", "two"]
    for name, value in everyday.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    for name, value in settings.items():
        arguments += ["--set", f"{name}={value}"]
    first = start(tmp_path, arguments)
    said = []
    for line in first.stdout:
        said.append(line)
        if "epoch 2.00" in line:
            first.send_signal(signal.SIGINT)
    assert first.wait(timeout=120) != 0
    assert "with 2 processes" in said[0]
    assert any("and saved; the same command continues" in line for line in said), said
    assert not (tmp_path / "two" / "model").exists()

    second = start(tmp_path, arguments)
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 0, output
    assert output.count("continue  after update") == 1  # one process speaks

    alone, together = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert alone.keys() == together.keys()
    for name in alone:
        torch.testing.assert_close(together[name], alone[name], rtol=0, atol=1e-6)
    record, expected = (read_record(tmp_path / name / "record.jsonl") for name in ("two", "one"))
    for name in ("update", "samples", "tokens", "learning_rate", "applied"):
        assert [line[name] for line in record.updates] == [line[name] for line in expected.updates]
    assert 1 in {line["samples"] for line in record.updates}
    assert record.start["processes"] == 2
    for mine, other in zip(record.evaluations, expected.evaluations, strict=True):
        assert sum(map(sum, mine["metrics"]["confusion"])) == mine["rows"] == 4
        assert mine["metrics"]["confusion"] == other["metrics"]["confusion"]
    assert one.metrics["accuracy"] == record.end["metrics"]["accuracy"]
