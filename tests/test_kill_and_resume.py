"""The program that kills runs, for three of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import snugtune

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "kill_and_resume.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its runs by fork")
@pytest.mark.skipif(not PROGRAM.exists(), reason="the benchmarks are not in this package")
def test_three_kills_change_nothing() -> None:
    source = str(Path(snugtune.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--kills", "3", "--rows", "60"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3, weights the same" in done.stdout
    assert done.stdout.endswith("all the same, nothing damaged\n")
