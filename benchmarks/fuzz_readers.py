"""Let many damaged files through the readers: each must be read or refused in words, within seconds.

    python benchmarks/fuzz_readers.py --files 10000

Prints how many were read and refused, and every file that ended in a traceback or took too long, with
the seed that makes it again. Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import snugtune
from fuzzed_files import KINDS, fuzzed_file
from snugtune.errors import SnugtuneError

LONGEST_CPU_SECONDS, LONGEST_SECONDS = 10, 300  # a busy machine is no fault
FILES_BETWEEN_CLEANINGS = 200


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=10_000, help="files for each reader")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    asked = parser.parse_args()
    import datasets

    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        for kind in asked.kind or KINDS:
            began, outcomes = time.monotonic(), Counter[str]()
            for seed in range(asked.first_seed, asked.first_seed + asked.files):
                outcomes[try_file(kind, seed, Path(folder))] += 1
                if seed % FILES_BETWEEN_CLEANINGS == 0:
                    shutil.rmtree(Path(folder) / "cache", ignore_errors=True)
                    print(f"{kind}, up to seed {seed}: {dict(outcomes)}", file=sys.stderr, flush=True)
            faults += outcomes["fault"]
            seconds = time.monotonic() - began
            print(f"{kind}: {asked.files:,} files in {seconds:.0f} s: {dict(outcomes)}", flush=True)
    sys.exit(1 if faults else 0)


def try_file(kind: str, seed: int, folder: Path) -> str:
    """What came of one file: "read", "refused" or "fault"."""
    name, content = fuzzed_file(kind, seed)
    path = folder / name
    path.write_bytes(content)
    for sign in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(sign, too_long)
    signal.alarm(LONGEST_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_CPU_SECONDS)
    try:
        stops = [
            snugtune.check_data(path, set={"data.bad_rows": policy}).stops for policy in ("stop", "skip")
        ]
    except SnugtuneError:
        return "refused"
    except Exception:
        print(f"{kind}, seed {seed}, {name}:\n{traceback.format_exc(limit=-4)}", flush=True)
        return "fault"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        path.unlink()
    return "refused" if all(stops) else "read"


def too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"not done after {LONGEST_CPU_SECONDS} s of work, or {LONGEST_SECONDS} s")


if __name__ == "__main__":
    main()
