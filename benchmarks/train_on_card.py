"""What `snugtune train` takes and does on this card: speed and peak memory of the demo's model and articles.

    python benchmarks/train_on_card.py --budget "11 GiB" --as-pascal --save table.json

Every configuration runs in a process of its own. Speed is the median over the updates after the first five;
memory is the peak of the run. `--as-pascal` switches off the attention kernels that Pascal does not have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from snugtune.data.demo import demo_model, write_articles
from snugtune.record import read_record

CONFIGURATIONS = {
    "fp32": {"precision": "fp32"},
    "fp32, all layers checkpointed": {"precision": "fp32", "checkpointed_layers": "all"},
    "fp32, 4 passes": {"precision": "fp32", "set": {"training.passes": 4}},
    "fp16": {"precision": "fp16"},
    "fp16, all layers checkpointed": {"precision": "fp16", "checkpointed_layers": "all"},
    "bf16": {"precision": "bf16"},
    "fp32, AdamW foreach": {"precision": "fp32", "set": {"training.optimizer": "adamw-foreach"}},
    "fp32, SGD": {"precision": "fp32", "set": {"training.optimizer": "sgd"}},
    "fp32, Adafactor": {"precision": "fp32", "set": {"training.optimizer": "adafactor"}},
}

_CHILD = """
import json, sys, torch, snugtune
arguments, as_pascal = json.loads(sys.argv[1]), sys.argv[2] == "1"
if as_pascal:
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
snugtune.train(quiet=True, **arguments)
"""


def run(name: str, articles: Path, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Train one configuration and read its record."""
    arguments = {
        "model": str(demo_model()),
        "data": str(articles),
        "epochs": 1,
        "learning_rate": 2e-4,
        "batch_size": options.batch_size,
        "budget": options.budget,
        "output": str(folder),
        **CONFIGURATIONS[name],
    }
    command = [sys.executable, "-c", _CHILD, json.dumps(arguments), str(int(options.as_pascal))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    record = read_record(folder / "record.jsonl")
    if done.returncode or not record.updates:
        return {"configuration": name, "failed": done.stderr.strip().splitlines()[-3:]}
    steady = record.updates[5:]
    return {
        "configuration": name,
        "device": record.start["device"] if record.start else None,
        "samples_per_second": statistics.median(line["samples"] / line["seconds"] for line in steady),
        "update_seconds": statistics.median(line["seconds"] for line in steady),
        "peak_allocated_bytes": max(line.get("allocated_bytes") or 0 for line in record.updates) or None,
        "peak_reserved_bytes": max(line.get("reserved_bytes") or 0 for line in record.updates) or None,
        "process_bytes": max(line.get("process_bytes") or 0 for line in record.updates) or None,
        "accuracy": record.end["metrics"]["accuracy"] if record.end else None,
        "updates": len(record.updates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--budget", help="cap on the allocator, such as '11 GiB'")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--as-pascal", action="store_true", help="no flash and no cuDNN attention")
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows = []
    print(
        f"{'configuration':<32}{'samples/s':>10}{'allocated':>12}{'reserved':>12}{'process':>12}{'accuracy':>10}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        articles = write_articles(Path(temporary) / "articles.csv").path
        for number, name in enumerate(CONFIGURATIONS):
            row = run(name, articles, Path(temporary) / str(number), options)
            rows.append(row)
            if "failed" in row:
                print(f"{name:<32}failed: {row['failed']}", flush=True)
                continue
            sizes = [row["peak_allocated_bytes"], row["peak_reserved_bytes"], row["process_bytes"]]
            shown = "".join(
                f"{'-' if size is None else f'{int(size) / 2**20:,.0f} MiB':>12}" for size in sizes
            )
            print(f"{name:<32}{row['samples_per_second']:>10.1f}{shown}{row['accuracy']:>10.4f}", flush=True)
    if options.save:
        settings = {
            "budget": options.budget,
            "batch_size": options.batch_size,
            "as_pascal": options.as_pascal,
        }
        options.save.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
