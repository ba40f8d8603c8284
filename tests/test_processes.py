"""Several processes share each update: the same result as one process, whatever each of them has to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snugtune.processes import ALONE, _buckets

COUNT = 3


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What three processes saw (several_processes.py)."""
    folder = tmp_path_factory.mktemp("processes")
    script = Path(__file__).with_name("several_processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(COUNT), str(script)]
    source = str(Path(sys.modules["snugtune"].__file__ or "").parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(COUNT)]


def test_processes_agree_and_tell_each_other_things(seen):
    assert [process["any"] for process in seen] == [[False, True]] * COUNT
    assert [process["gather"] for process in seen] == [[0, 10, 20]] * COUNT
    assert [process["buffers"] for process in seen] == [[0.0, 0.0]] * COUNT


def test_all_of_them_stop_when_one_fails(seen):
    assert [process["failures"] for process in seen] == [
        ["ProcessError", "nothing"],
        ["MemoryError", "nothing"],
        ["ProcessError", "nothing"],
    ]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused"])
def test_an_update_of_unequal_shares_is_the_update_of_the_whole_batch(seen, optimizer):
    for process in seen:
        update = process[optimizer]
        assert update["difference"] < 1e-6
        assert update["loss"][1] == pytest.approx(update["loss"][0], rel=1e-6)
        assert update["norm"][1] == pytest.approx(update["norm"][0], rel=1e-5)


def test_one_process_alone_has_nobody_to_ask():
    assert ALONE.alone
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert ALONE.gather("x") == ["x"]
    assert ALONE.first_here(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError), ALONE.all_or_none([], []):
        _ = 1 / 0


def test_buckets_hold_one_type_each_and_everything_once():
    kinds = [torch.float32, torch.float16, torch.float32, torch.float16]
    tensors = [
        torch.zeros(size, dtype=kind) for size, kind in zip([10, 20, 9_000_000, 5], kinds, strict=True)
    ]
    buckets = list(_buckets(tensors))
    assert all(len({tensor.dtype for tensor in bucket}) == 1 for bucket in buckets)
    assert sorted(tensor.numel() for bucket in buckets for tensor in bucket) == [5, 10, 20, 9_000_000]
    assert len(buckets) == 3  # the large one does not fit beside the small one
