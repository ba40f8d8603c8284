"""Whole runs of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

import snugtune

WORDS = {"yes": "good great fun", "no": "bad awful boring"}


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """60 short texts of two classes that a tiny model can tell apart."""
    lines = ["text,label"]
    for row in range(60):
        label = "yes" if row % 2 else "no"
        word = WORDS[label].split()[row % 3]
        lines.append(f"the film was {'very ' * (row % 7)}{word},{label}")
    path = tmp_path / "reviews.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def train(tiny_model, reviews, tmp_path):
    """Train the tiny model quietly; settings by dotted name."""

    def run(output: str = "run", settings: dict[str, object] | None = None, **everyday: object):
        arguments = {
            "model": tiny_model,
            "data": reviews,
            "batch_size": 8,
            "epochs": 2,
            "learning_rate": 1e-2,
        }
        return snugtune.train(
            **{**arguments, **everyday, "output": tmp_path / output}, set=settings, quiet=True
        )

    return run
