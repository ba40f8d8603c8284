"""Predicted against measured peak memory, for a table of measured training steps.

    python benchmarks/prediction_error.py TRUTH.jsonl [--json] [--only TEXT]

Prints a line for each row and a summary. Errors are fractions; with --json the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from library_versions import as_measured
from plain_loop import run
from torch.utils.checkpoint import checkpoint

from snugtune.errors import UsageError
from snugtune.memory.allocator import Allocator, parse_settings
from snugtune.memory.cuda import CudaCard, cuda_choices
from snugtune.memory.footprint import repeat, replay
from snugtune.memory.kernels import Kernels
from snugtune.memory.trace import CARD, Tracer, tracing
from snugtune.planning.cards import planned_card
from snugtune.units import MiB

METRICS = ("allocated", "reserved", "evaluation", "process")
UPDATES = 3  # traced; the third stands for all later ones


def card_of(header: dict[str, Any], attention: str) -> CudaCard:
    """The card of a table: by its name, or by the figures in the header where facts/cards.toml lacks it."""
    name = header.get("card", "")
    try:
        return planned_card(name, attention=attention).choices  # type: ignore[arg-type]
    except UsageError as error:
        if not {"capability", "multiprocessors"} <= header.keys():
            raise SystemExit(f"error: {error}") from error
    figures = {"capability": tuple(header["capability"]), "multiprocessors": header["multiprocessors"]}
    return CudaCard(**figures, attention=attention)  # type: ignore[arg-type]


def earlier_case(tracer: Tracer) -> None:
    """What an earlier case of the same process left behind: workspaces of the threads of both passes."""
    with tracer.phase("before"):
        layer = torch.nn.Linear(64, 64, device=CARD)
        x = torch.randn(64, 64, device=CARD, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()  # recomputed by the second thread


def predict(row: dict[str, Any], header: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Peaks of a row in bytes, and the seconds that it took to predict them."""
    card = card_of(header, row["attention"])
    start = time.perf_counter()
    with (
        cuda_choices(card),
        tracing(Kernels(card)) as tracer,
        as_measured(header),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        earlier_case(tracer)
        run(row, folder, CARD, phase=tracer.phase, updates=UPDATES, place=lambda _: None, ready=tracer.watch)
    trace = repeat(tracer.trace, f"update {UPDATES}", f"update {UPDATES - 1}", row["steps"] - UPDATES)
    peaks = replay(trace, Allocator(expandable=parse_settings(row["allocator"])))
    training = [peak for name, peak in peaks.items() if name == "load" or name.startswith("update")]
    reserved = max(peak.reserved_bytes for peak in training)
    return {
        "allocated": max(peak.allocated_bytes for peak in training),
        "reserved": reserved,
        "evaluation": peaks["evaluation"].allocated_bytes,
        "process": reserved + header.get("context_bytes_after_first_step", 0),
        "seconds": time.perf_counter() - start,
        "first": peaks["update 1"].allocated_bytes,
        "trace": trace,
    }


def measured_of(row: dict[str, Any], header: dict[str, Any]) -> dict[str, int]:
    """The measured bytes of a row, by metric."""
    measured = row["measured"]
    names = {
        "allocated": "peak_allocated_bytes",
        "reserved": "peak_reserved_bytes",
        "evaluation": "evaluation_peak_allocated_bytes",
    }
    if "context_bytes_after_first_step" in header:
        names["process"] = "device_used_bytes"
    return {metric: measured[name] for metric, name in names.items() if measured.get(name) is not None}


def summarise(errors: dict[str, list[float]]) -> dict[str, Any]:
    """Median, 95th percentile, worst under-prediction and number of rows of each metric."""
    summary: dict[str, Any] = {}
    for metric in METRICS:
        values = errors.get(metric, [])
        sizes = sorted(map(abs, values))
        summary[metric] = {
            "median": statistics.median(sizes) if sizes else None,
            "p95": sizes[math.ceil(0.95 * len(sizes)) - 1] if sizes else None,
            "worst_under": max(0.0, -min(values)) if values else None,
            "rows": len(values),
        }
    return summary


def load_classes(rows: list[dict[str, Any]]) -> None:
    """Import what the rows need, which is not part of a prediction's time."""
    import transformers

    for row in rows:
        if "auto" in row["build"]:
            config = transformers.AutoConfig.for_model(**row["build"]["config"])
            getattr(transformers, row["build"]["auto"])._model_mapping[type(config)]


def main() -> int:
    """Predict every row of a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.add_argument("--only", default="", help="rows whose id and model contain this")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.table.read_text("utf-8").splitlines() if line.strip()]
    header = next((line["header"] for line in lines if "header" in line), {})
    rows = [line for line in lines if "build" in line and options.only in f"{line['id']} {line['model']}"]
    load_classes(rows)
    errors: dict[str, list[float]] = {}
    seconds: list[float] = []
    failed = 0
    for row in rows:
        how = " ".join(str(row[key]) for key in ("id", "model", "precision", "micro_batch", "length"))
        try:
            made = predict(row, header, options.table.parent)
        except Exception as error:  # the other rows are wanted all the same
            failed += 1
            print(f"{how}: failed: {type(error).__name__}: {error}", flush=True)
            continue
        texts = []
        for metric, measured in measured_of(row, header).items():
            error = made[metric] / measured - 1
            errors.setdefault(metric, []).append(error)
            texts.append(f"{metric} {made[metric] / MiB:.0f} of {measured / MiB:.0f} MiB {error:+.2%}")
        seconds.append(made["seconds"])
        layers, optimizer = row["checkpointed_layers"], row["optimizer"]
        print(f"{how} {layers} {optimizer}: {', '.join(texts)}; {made['seconds']:.1f} s", flush=True)
        del made
        gc.collect()
    summary = summarise(errors)
    summary["seconds_median"] = statistics.median(seconds) if seconds else None
    summary["failed_rows"] = failed
    for metric in METRICS:
        values = summary[metric]
        if values["rows"]:
            print(
                f"{metric}: median {values['median']:.2%}, 95th percentile {values['p95']:.2%}, "
                f"worst under-prediction {values['worst_under']:.2%}, {values['rows']} rows"
            )
    if options.json:
        print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
