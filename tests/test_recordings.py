"""What was measured on a real card, kept as files: the reader takes them, and they say what the log says."""

from __future__ import annotations

import json
from pathlib import Path

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
