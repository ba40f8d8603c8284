"""The demo: a real model, real articles, and the figures that the README promises."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from snugtune.data.demo import write_articles
from snugtune.record import read_record


def test_the_articles_are_real_and_each_appears_once(tmp_path):
    articles = write_articles(tmp_path / "articles.csv")
    with articles.path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == articles.rows == 2225 - articles.copies
    assert len({row["text"] for row in rows}) == len(rows)
    assert {row["label"] for row in rows} == {"business", "entertainment", "politics", "sports", "tech"}
    assert min(len(row["text"]) for row in rows) > 400


def demo(folder: Path) -> str:
    """Run the demo with all processors and return what it prints."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "snugtune", "demo", "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, env=variables, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return done.stdout.decode("utf-8")


@pytest.mark.timeout(1800)
def test_the_demo_reaches_95_per_cent_and_explains_itself(tmp_path):
    first = demo(tmp_path / "demo")
    metrics = read_record(tmp_path / "demo" / "record.jsonl").end["metrics"]
    assert metrics["accuracy"] >= 0.95
    assert sum(row["rows"] for row in metrics["per_class"]) == 531  # a quarter of the articles
    assert "never learns from these" in first
    assert f"puts {metrics['accuracy']:.0%} into the right section" in first
    for question, section in zip(("striker", "phone", "Shares"), ("sports", "tech", "business"), strict=True):
        assert any(question in line and section in line for line in first.splitlines())
    second = demo(tmp_path / "demo")
    assert second.partition("done ")[2] == first.partition("done ")[2]
    assert "learning rate" not in second
