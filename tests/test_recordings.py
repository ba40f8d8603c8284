"""What was measured on a real card, kept as files: the reader takes them, and they say what the log says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snugtune.record import read_record

RECORDINGS = Path(__file__).parent / "recordings"


def test_the_record_of_a_run_on_an_h200_has_the_memory_of_every_update():
    record = read_record(RECORDINGS / "h200_demo_record.jsonl")
    assert (record.damaged_lines, record.unknown_lines) == (0, 0)
    assert record.start["device"] == "NVIDIA H200"
    assert record.end["metrics"]["accuracy"] > 0.95
    assert len(record.updates) == record.start["total_updates"] == 50
    for line in record.updates:
        assert 0 < line["allocated_bytes"] <= line["reserved_bytes"] < line["process_bytes"]


def test_the_measured_table_shows_what_each_choice_does_to_the_peak():
    table = json.loads((RECORDINGS / "h200_train_on_card.json").read_text())
    peaks = {row["configuration"]: row["peak_reserved_bytes"] for row in table["rows"]}
    assert peaks["fp32, all layers checkpointed"] < 0.6 * peaks["fp32"]
    assert peaks["fp32, 4 passes"] < 0.6 * peaks["fp32"]
    assert peaks["fp16"] < 0.8 * peaks["fp32"]
    assert peaks["fp32, AdamW foreach"] > peaks["fp32"]
    assert all(row["peak_reserved_bytes"] < 11 * 2**30 for row in table["rows"])


# What rows without padding must reach where arithmetic is the limit, and where launches are.
GOALS = {
    ("roberta-large", 128): {"trainer-padded": 3, "trainer": 2.5, "trainer-grouped": 0.9},
    ("roberta-large", 32): {"trainer-padded": 2.3, "trainer": 1.8, "trainer-grouped": 0.75},
    ("bert-base", 128): {"trainer-padded": 0.98, "trainer": 0.98, "trainer-grouped": 0.98},
    ("bert-base", 32): {"trainer-padded": 0.98, "trainer": 0.98, "trainer-grouped": 0.98},
}


@pytest.mark.parametrize(("case", "goals"), GOALS.items())
def test_the_measured_runs_beat_the_trainer_on_a_card_under_a_cap(case, goals):
    table = json.loads((RECORDINGS / "h200_against_trainer.json").read_text())
    rows = {row["variant"]: row for row in table["rows"] if (row["model"], row["batch_size"]) == case}
    assert all(row["peak_reserved_bytes"] < 11 * 2**30 for row in rows.values())
    for variant, goal in goals.items():
        ratio = rows["snugtune"]["samples_per_second"] / rows[variant]["samples_per_second"]
        assert ratio >= goal, variant
