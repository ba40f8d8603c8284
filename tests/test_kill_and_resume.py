"""The program that kills runs and fills their disks, for three of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import snugtune

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "kill_and_resume.py"


pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its runs by fork"),
    pytest.mark.skipif(not PROGRAM.exists(), reason="the benchmarks are not in this package"),
]


def run_program(*arguments: str) -> str:
    source = str(Path(snugtune.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--rows", "60", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all the same, nothing damaged\n")
    return done.stdout


@pytest.mark.parametrize("signal", ["KILL", "TERM"])
def test_three_signals_change_nothing(signal: str) -> None:
    assert "3 of 3, weights the same" in run_program("--kills", "3", "--signal", signal)


def test_one_of_two_processes_is_killed_and_the_other_ends_too() -> None:
    """C109: both continue from the same checkpoint, which one of them wrote."""
    assert "3 of 3, weights the same" in run_program("--kills", "3", "--processes", "2")


def test_three_times_a_full_disk_changes_nothing(small_disk: Path) -> None:
    assert "3 of 3, weights the same" in run_program("--kills", "3", "--fill", "--folder", str(small_disk))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB in memory, which only root can make."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)
