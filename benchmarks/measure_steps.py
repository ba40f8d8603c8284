"""Measure training steps on a card: peaks, and every allocation of the caching allocator in its order.

    python benchmarks/measure_steps.py --out FOLDER [--rows TABLE.jsonl] [--only TEXT] [--seconds 240]

Writes steps.jsonl (a table of the form that prediction_error.py reads), for each row allocations/ID.json
(sizes and frees by phase), and operators.json (what single operators allocate).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from operator_probes import probe_operators
from plain_loop import run
from step_rows import ROWS

DEVICE = torch.device("cuda")
HISTORY = 2_000_000


def allocations() -> list[dict[str, Any]]:
    return torch.cuda.memory._snapshot()["device_traces"][0]


class Recorder:
    """Peaks and allocations by phase."""

    def __init__(self) -> None:
        self.peaks: dict[str, list[int]] = {}
        self.births: dict[str, int] = {}  # allocations before a phase
        self.seconds: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.births[name] = torch.cuda.memory_stats()["allocation.all.allocated"]
        start = time.perf_counter()
        yield
        torch.cuda.synchronize()
        if name.startswith("update"):
            self.seconds.append(time.perf_counter() - start)
        self.peaks[name] = [
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
            torch.cuda.memory_allocated(),
        ]


def events_of(entries: list[dict[str, Any]]) -> list[int]:
    """Births as sizes in bytes, deaths as minus one minus the number of the birth."""
    events, born, count = [], {}, 0
    for entry in entries:
        if entry["action"] == "alloc":
            born[entry["addr"]] = count
            count += 1
            events.append(entry["size"])
        elif entry["action"] == "free_requested" and entry["addr"] in born:
            events.append(-1 - born.pop(entry["addr"]))
    return events


def measure(row: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.backends.cuda.enable_flash_sdp(row["attention"] == "default")
    torch.backends.cuda.enable_cudnn_sdp(row["attention"] == "default")
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=HISTORY)
    recorder = Recorder()
    run(
        row,
        folder,
        DEVICE,
        phase=recorder.phase,
        updates=row["steps"],
        place=lambda model: model.to(DEVICE),
    )
    entries = allocations()
    torch.cuda.memory._record_memory_history(enabled=None)
    updates = [peaks for name, peaks in recorder.peaks.items() if name.startswith("update")]
    free, total = torch.cuda.mem_get_info()
    measured = {
        "peak_allocated_bytes": max(peak[0] for peak in updates),
        "peak_reserved_bytes": max(peak[1] for peak in updates),
        "device_used_bytes": total - free,
        "resident_bytes": updates[-1][2],
        "first_step_peak_allocated_bytes": updates[0][0],
        "evaluation_peak_allocated_bytes": recorder.peaks["evaluation"][0],
        "step_seconds": statistics.median(recorder.seconds),
    }
    first = recorder.births["load"]
    births = {name: count - first for name, count in recorder.births.items()}
    details = {"events": events_of(entries), "births_before": births, "peaks": recorder.peaks}
    return {**row, "measured": measured}, details


def header() -> dict[str, Any]:
    import transformers

    free, total = torch.cuda.mem_get_info()
    before = total - free - torch.cuda.memory_reserved()
    a = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    (a @ a).sum().backward()
    free, total = torch.cuda.mem_get_info()
    return {
        "card": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "transformers": transformers.__version__,
        "total_bytes": total,
        "context_bytes_before_any_work": before,
        "context_bytes_after_first_step": total - free - torch.cuda.memory_reserved(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--from", dest="first", type=int, default=0, help="number of the first row")
    parser.add_argument("--skip-operators", action="store_true")
    parser.add_argument("--seconds", type=float, default=240.0)
    options = parser.parse_args()
    start = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    (options.out / "allocations").mkdir(parents=True, exist_ok=True)
    folder = options.rows.parent if options.rows else Path(__file__).parent
    rows = list(map(json.loads, options.rows.read_text().splitlines())) if options.rows else ROWS
    with (options.out / "steps.jsonl").open("w") as table:
        table.write(json.dumps({"header": header()}) + "\n")
        if not options.skip_operators:
            found = probe_operators(DEVICE, allocations, events_of)
            (options.out / "operators.json").write_text(json.dumps(found))
            print(f"operators {time.perf_counter() - start:.0f} s", flush=True)
        for row in rows[options.first :]:
            if "build" not in row or options.only not in f"{row['id']} {row['model']}":
                continue
            if time.perf_counter() - start > options.seconds:
                print("out of time before", row["id"])
                break
            try:
                line, details = measure(row, folder)
            except Exception as error:  # one row less
                print(row["id"], row["model"], "failed:", type(error).__name__, error, flush=True)
                torch.cuda.memory._record_memory_history(enabled=None)
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            table.write(json.dumps(line) + "\n")
            table.flush()
            (options.out / "allocations" / f"{row['id']}.json").write_text(json.dumps(details))
            print(row["id"], row["model"], f"{time.perf_counter() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
