"""Time and memory of reading and checking a table, against `datasets` alone, which checks nothing.

    python benchmarks/read_speed.py --rows 1000000 --pairs 5
    python benchmarks/read_speed.py --rows 5000000 --pairs 1 --format jsonl

Writes a file of short texts with two labels. Each measurement is a process of its own with an empty cache;
the two alternate, and imports are not counted. Ours is all that `train` does with data before it loads a
model: encoding, delimiter, bad rows, labels, copies, doubts. The other is `datasets.load_dataset`, Arrow file
included. Peak memory is that of the process; `own` leaves out mapped files, which the system takes back when
it needs room.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WORDS = (
    "good bad fine film book phone battery screen slow fast great never again happy broke price noisy cheap"
)
BUILDERS = {"csv": "csv", "jsonl": "json", "json": "json"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--format", choices=[*BUILDERS], default="csv")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.measure[0], Path(asked.measure[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{asked.format}"
        write_rows(path, asked.rows)
        print(f"{asked.rows:,} rows, {path.stat().st_size / 1e6:.0f} MB")
        found: dict[str, list[dict[str, float]]] = {"datasets": [], "snugtune": []}
        for number in range(asked.pairs):
            for what, results in found.items():
                results.append(in_process(what, path, Path(folder) / f"cache-{what}-{number}"))
        for what, results in found.items():
            seconds = statistics.median(result["seconds"] for result in results)
            cpu = statistics.median(result["cpu"] for result in results)
            peak, own, before = (
                max(result[name] for result in results) for name in ("peak_mib", "own_mib", "before_mib")
            )
            print(f"{what:<9} {seconds:6.2f} s ({cpu:.2f} s of processor), peak {peak:,.0f} MiB", end="")
            print(f", own {own:,.0f} MiB, of which {before:,.0f} MiB before")
        # On a machine with others at work, the time of the processor says more than that of the clock.
        for what, name in (("clock", "seconds"), ("processor", "cpu")):
            pairs = zip(found["snugtune"], found["datasets"], strict=True)
            ratios = sorted(ours[name] / theirs[name] for ours, theirs in pairs)
            print(f"{what:<9} ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def write_rows(path: Path, rows: int) -> None:
    """Texts of 4 to 14 words, one in twenty with a comma; no two are alike."""
    source, words = random.Random(0), WORDS.split()
    as_list = path.suffix == ".json"
    with path.open("w", encoding="utf-8") as file:
        file.write("text,label\n" if path.suffix == ".csv" else "[\n" * as_list)
        for number in range(rows):
            text = f"{' '.join(source.choices(words, k=source.randint(4, 14)))} {number}"
            text, label = ("well, " if source.random() < 0.05 else "") + text, source.randint(0, 1)
            if path.suffix == ".csv":
                file.write(f'"{text}",{label}\n' if "," in text else f"{text},{label}\n")
            else:
                end = "," if as_list and number < rows - 1 else ""
                file.write(json.dumps({"text": text, "label": label}) + f"{end}\n")
        file.write("]\n" * as_list)


def in_process(what: str, path: Path, cache: Path) -> dict[str, float]:
    """One measurement in a process with a cache of its own."""
    command = [sys.executable, __file__, "--measure", what, str(path)]
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(what: str, path: Path) -> None:
    """Print seconds and memory of one reading."""
    import datasets

    from snugtune.config import DataSettings
    from snugtune.data.look import look_at

    datasets.disable_progress_bars()
    before, peak, done = own_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, worked = time.perf_counter(), time.process_time()
    if what == "snugtune":
        rows = look_at(DataSettings(train=str(path))).rows
    else:
        rows = len(datasets.load_dataset(BUILDERS[path.suffix[1:]], data_files=str(path), split="train"))
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    done.set()
    watcher.join()
    everything = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    mib = {"peak_mib": everything, "own_mib": peak[0], "before_mib": before}
    print(
        json.dumps(
            {"rows": rows, "seconds": seconds, "cpu": cpu, **{name: n / 2**20 for name, n in mib.items()}}
        )
    )


def own_bytes() -> int:
    """Memory of this process without mapped files (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
