"""Predicted against measured peak memory, for a table of measured training steps.

    python benchmarks/prediction_error.py TRUTH.jsonl [--json] [--only TEXT]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from plain_loop import run

from snugtune.memory.allocator import Allocator, parse_settings
from snugtune.memory.cuda import CudaCard, cuda_choices
from snugtune.memory.footprint import repeat, replay
from snugtune.memory.kernels import Kernels
from snugtune.memory.trace import CARD, place_on_card, tracing

def predict(row: dict[str, Any], header: dict[str, Any], folder: Path) -> dict[str, Any]:
    card = CudaCard(capability=(9, 0), multiprocessors=132, attention=row["attention"])
    start = time.perf_counter()
    with cuda_choices(card), tracing(Kernels(card)) as tracer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(row, folder, CARD, phase=tracer.phase, updates=3, place=place_on_card, ready=tracer.watch)
        trace = tracer.trace
    seconds_trace = time.perf_counter() - start
    trace = repeat(trace, "update 3", "update 2", row["steps"] - 3)
    peaks = replay(trace, Allocator(expandable=parse_settings(row["allocator"])))
    seconds = time.perf_counter() - start
    training = [peak for name, peak in peaks.items() if name != "evaluation" and name]
    end = max(trace.spans[f"update {n}"][1] for n in (1, 2, 3))
    return {
        "allocated": max(peak.allocated_bytes for peak in training),
        "reserved": max(peak.reserved_bytes for peak in training),
        "first": peaks["update 1"].allocated_bytes,
        "evaluation": peaks["evaluation"].allocated_bytes if "evaluation" in peaks else None,
        "seconds": seconds,
        "trace": trace,
        "peaks": peaks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.table.read_text().splitlines() if line.strip()]
    header = next((line["header"] for line in lines if "header" in line), {})
    errors: dict[str, list[float]] = {}
    seconds, failed = [], 0
    for row in lines:
        if "build" not in row or options.only not in f"{row['id']} {row['model']}":
            continue
        try:
            made = predict(row, header, options.table.parent)
        except Exception as error:
            import traceback; traceback.print_exc()
            failed += 1
            print(row["id"], row["model"], "FAILED", error)
            continue
        m = row["measured"]
        pairs = {
            "allocated": (made["allocated"], m["peak_allocated_bytes"]),
            "reserved": (made["reserved"], m["peak_reserved_bytes"]),
        }
        if "evaluation_peak_allocated_bytes" in m:
            pairs["evaluation"] = (made["evaluation"], m["evaluation_peak_allocated_bytes"])
        if "context_bytes_after_first_step" in header:
            pairs["process"] = (made["reserved"] + header["context_bytes_after_first_step"], m["device_used_bytes"])
        text = []
        for name, (predicted, measured) in pairs.items():
            error = predicted / measured - 1
            errors.setdefault(name, []).append(error)
            text.append(f"{name} {predicted / 2**20:.1f}/{measured / 2**20:.1f} {100 * error:+.2f}%")
        if "first_step_peak_allocated_bytes" in m:
            text.append(f"first {made['first'] / 2**20:.1f}/{m['first_step_peak_allocated_bytes'] / 2**20:.1f}")
        seconds.append(made["seconds"])
        print(row["id"], row["model"], row["precision"], row["micro_batch"], row["length"], row["checkpointed_layers"], row["optimizer"], *text, f"{made['seconds']:.1f}s", flush=True)
        del made
        gc.collect()
    summary: dict[str, Any] = {}
    for name, values in errors.items():
        sizes = sorted(map(abs, values))
        summary[name] = {
            "median": statistics.median(sizes),
            "p95": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))],
            "worst_under": max(0.0, -min(values)),
            "rows": len(values),
        }
    summary["seconds_median"] = statistics.median(seconds) if seconds else None
    summary["failed_rows"] = failed
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
