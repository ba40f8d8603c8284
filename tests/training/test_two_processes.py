"""What two processes do where one of them is slow, has no disk, or a layer that nothing uses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import snugtune
from snugtune.record import read_record
from snugtune.training.positions import list_checkpoints
from training.two_processes import main

SCRIPT = Path(__file__).with_name("two_processes.py")


def run(folder: Path, what: str = "nothing", **more: Any) -> tuple[int, str]:
    """Exit code and output of a run; one that hangs fails the test."""
    source = str(Path(snugtune.__file__).parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(SCRIPT), str(folder), what, json.dumps(more)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def test_a_slow_save_leaves_one_set_of_files_that_both_continue_from(tmp_path):
    """C109: process 0 takes a second for each checkpoint."""
    folder = tmp_path / "run"
    code, output = run(folder, "slow")
    assert code == 0, output
    assert len(read_record(folder / "record.jsonl").checkpoints) == 2
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["update-00000004", "update-00000008"]
    whole = weights(folder)
    # As if the run had ended after the first epoch.
    for path in (folder / "model", list_checkpoints(folder / "checkpoints")[-1]):
        shutil.rmtree(path)
    lines = (folder / "record.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] != "end"]
    (folder / "record.jsonl").write_text("\n".join(kept) + "\n")
    code, output = run(folder, "slow")
    assert code == 0, output
    assert output.count("continue  after update 4 of 8") == 1
    assert output.count("finished") == 2
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(folder).items())


@pytest.mark.parametrize("room", [True, False])
def test_a_full_disk_of_process_0_lets_both_go_on_or_stops_both(tmp_path, room):
    """C109: none of them hangs; `run` would not come back."""
    folder = tmp_path / "run"
    code, output = run(folder, "full" if room else "full for the model too")
    if room:
        assert code == 0, output
        assert output.count("finished") == 2
        assert output.count("No space left on device") == 1  # said once, by one process
        assert (folder / "model" / "model.safetensors").exists()
    else:
        assert code != 0
        assert "the first checkpoint could not be written" in output
        assert not (folder / "model").exists()


def test_the_batch_is_that_of_all_processes_and_its_formula_is_said(tmp_path, capsys):
    """C110: 8 rows in an update, as 2 passes of 4, or as 2 processes with 4 each: the same updates."""
    assert main(str(tmp_path / "one"), "nothing", {"passes": 2}) == 0
    code, said = run(tmp_path / "two", passes=1)
    assert code == 0, said
    assert "batch     8 samples in each update = 2 passes x 4 samples" in capsys.readouterr().out
    assert "batch     8 samples in each update = 2 processes x 4 samples, each in one pass" in said
    one, two = (read_record(tmp_path / name / "record.jsonl").updates for name in ("one", "two"))
    assert len(one) == len(two) == 8
    assert [line["learning_rate"] for line in one] == [line["learning_rate"] for line in two]
    expected, found = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


def test_a_layer_that_nothing_uses_is_listed_and_stops_nothing_where_that_is_allowed(tmp_path):
    """C111, and C067: with checkpointed layers behind frozen ones."""
    allow = {"training.unused_parameters": "allow"}
    code, output = run(tmp_path / "run", "unused", checkpointed_layers="all", set=allow)
    assert code == 0, output
    assert output.count("2 parameters got no gradient in the first 4 updates: pooler") == 1
    assert output.count("finished") == 2


def test_where_it_is_not_allowed_both_processes_stop_with_its_name(tmp_path):
    """C111: a variant; the default for a model of one's own."""
    code, output = run(tmp_path / "run", "unused")
    assert code != 0
    assert "got no gradient in the first 4 updates: pooler" in output
    assert "another process of this run has ended" not in output
