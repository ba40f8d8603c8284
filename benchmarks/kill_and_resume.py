"""Kill a run at random moments, continue it each time, and compare it with an undisturbed run.

    python benchmarks/kill_and_resume.py --kills 50
    python benchmarks/kill_and_resume.py --kills 50 --signal TERM
    python benchmarks/kill_and_resume.py --kills 20 --fill --folder /mnt/small
    python benchmarks/kill_and_resume.py --kills 20 --processes 2

A small model learns on the CPU and saves after every update. Half of the kills come at any moment, from
reading the data to writing the finished model; the other half wait until a checkpoint is being written.
After each, every checkpoint is compared with its manifest. A run that is killed is started again until it
ends, then its weights are compared with those of the undisturbed run, bit for bit, and the next one begins.

With --fill the disk is filled in the place of a kill, and some of the runs are killed as well while it is
full. That needs a folder on a small file system of its own, such as a tmpfs of 64 MiB:

    mount -t tmpfs -o size=64m tmpfs /mnt/small

With --processes 2 each run has two processes, as on two cards. One of them is killed, and as a launcher does,
the other gets SIGTERM; then it must end by itself. Other signals go to both.

The exit code is 0 if all weights are the same and no file is damaged, otherwise 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes with threads must not be forked
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, BertTokenizerFast

import snugtune
import snugtune.training.loop
from snugtune.record import read_record
from snugtune.training.manifest import check_files
from snugtune.training.positions import checkpoint_path, list_checkpoints
from snugtune.units import MiB

# Where processes can be forked, a run starts in milliseconds, because everything is imported already.
CONTEXT = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
MOST_FREE_BYTES = 2**30
MOST_SECONDS_TO_END = 60.0


def build_model(folder: Path) -> Path:
    """A random BERT of two layers with the words of the data."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "was", "very", "good", "bad"]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    BertTokenizerFast.from_pretrained(folder, model_max_length=32).save_pretrained(folder)
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=32, **shape)).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: int) -> Path:
    """Texts of two classes."""
    lines = [
        f"the film was {'very ' * (row % 7)}{'good' if row % 2 else 'bad'},{row % 2}" for row in range(rows)
    ]
    path.write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    return path


def train(
    model: Path, data: Path, output: Path, failures: Path, keep_last: int, variables: dict[str, str]
) -> None:
    """One process of a run; what goes wrong is left in a file."""
    os.environ.update(variables)
    try:
        result = snugtune.train(
            model=model,
            data=data,
            output=output,
            batch_size=8,
            epochs=2,
            learning_rate=1e-3,
            quiet=True,
            set={
                "checkpoints.every_minutes": 1e-6,
                "checkpoints.keep_last": keep_last,
                "evaluation.every_updates": 5,
            },
        )
    except BaseException:
        failures.write_text(traceback.format_exc(), encoding="utf-8")
        os._exit(1)
    os._exit(0 if result.status == "finished" else 130)


def damaged(output: Path) -> list[str]:
    """Checkpoints that are not what their manifests say."""
    found = []
    for path in list_checkpoints(output / "checkpoints"):
        try:
            check_files(path)
        except Exception as error:
            found.append(f"{path}: {error}")
    return found


def best_update(output: Path) -> int:
    """The update that a finished run took its model from."""
    return int((read_record(output / "record.jsonl").end or {})["best_update"])


def same_weights(whole: Path, output: Path) -> bool:
    """Whether a run's model has, bit for bit, the weights that the undisturbed run had after that update."""
    expected = checkpoint_path(whole / "checkpoints", best_update(output))
    first, second = (load_file(folder / "model.safetensors") for folder in (expected, output / "model"))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Run:
    """The processes of a run that has been started."""

    def __init__(self, members: list[Any]) -> None:
        self.members = members
        for member in members:
            member.start()

    def is_alive(self) -> bool:
        """Whether one of them is at work."""
        return any(member.is_alive() for member in self.members)

    def join(self, seconds: float | None = None) -> None:
        """Wait for all of them, so long at most. Where one has died, the others are told to end."""
        until = time.monotonic() + (float("inf") if seconds is None else seconds)
        told = False
        while self.is_alive() and time.monotonic() < until:
            if not told and any((member.exitcode or 0) not in (0, 130) for member in self.members):
                told = True
                self.send(signal.SIGTERM)
            for member in self.alive()[:1]:
                member.join(0.02)

    def alive(self) -> list[Any]:
        """Those that are at work."""
        return [member for member in self.members if member.is_alive()]

    def send(self, number: signal.Signals, most: int = 10**6) -> None:
        """Send all of them a signal, or so many at random."""
        alive = self.alive()
        for member in random.sample(alive, min(most, len(alive))):
            os.kill(member.pid, number)

    @property
    def exitcode(self) -> int:
        """0: all have finished; below: one was killed; 1: one has failed; 130: interrupted."""
        codes = [member.exitcode or 0 for member in self.members]
        return min(codes) if min(codes) < 0 else 1 if 1 in codes else max(codes)


class Trial:
    """Runs that are disturbed until enough has happened to them.

    Args:
        folder: Where they live.
        model: The model they begin with.
        data: What they learn from.
        failures: Where they leave what went wrong, on another disk than the one that is filled.
        number: Signal that ends them.
        fill: Fill the disk instead, and send the signal to every other one.
        processes: Processes of each run.
        seed: Of the moments.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        data: Path,
        failures: Path,
        *,
        number: signal.Signals,
        fill: bool,
        processes: int,
        seed: int,
    ) -> None:
        self.folder, self.model, self.data, self.failures = folder, model, data, failures
        self.number, self.fill, self.processes = number, fill, processes
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.seconds = 0.0

    def start(self, output: Path, keep_last: int = 2) -> Run:
        """The processes of the run in a folder."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"WORLD_SIZE": str(self.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        members = []
        for rank in range(self.processes):
            variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} if self.processes > 1 else {}
            arguments = (self.model, self.data, output, self.failure(rank), keep_last, variables)
            members.append(CONTEXT.Process(target=train, args=arguments))
        return Run(members)

    def failure(self, rank: int = 0) -> Path:
        """Where a process leaves what went wrong."""
        return self.failures / f"failure-{rank}.txt"

    def undisturbed(self) -> Path:
        """The run that the others are compared with."""
        output, began = self.folder / "undisturbed", time.monotonic()
        process = self.start(output, keep_last=10**6)  # the weights after each update
        process.join()
        self.seconds = time.monotonic() - began
        if process.exitcode != 0:
            raise SystemExit(self.failure().read_text(encoding="utf-8"))
        return output

    def disturb(self, kills: int) -> Iterator[str]:
        """Run after run, until there were enough kills; yields what happened."""
        whole, done, number = self.undisturbed(), 0, 0
        yield f"undisturbed: {self.seconds:.1f} s"
        while done < kills:
            number += 1
            output = self.folder / f"run-{number}"
            while True:
                process = self.start(output)
                hit = done < kills and self.strike(process, output)
                process.join()
                done += hit
                self.faults += damaged(output)
                if process.exitcode == 0:
                    break
                if process.exitcode == 1 and not self.excused(output):
                    files = map(self.failure, range(self.processes))
                    self.faults += [file.read_text(encoding="utf-8") for file in files if file.exists()]
                    return
            equal = same_weights(whole, output)
            if best_update(output) != best_update(whole):
                # A best model that a full disk did not take loses its title.
                self.counts["another best model"] += 1
                equal = equal and self.fill
            if not equal:
                self.faults.append(f"{output} ended with other weights")
            yield f"run {number}: {done} of {kills}, weights {'the same' if equal else 'DIFFERENT'}"
            if equal:
                shutil.rmtree(output)

    def excused(self, output: Path) -> bool:
        """Whether a run ended in words because the disk was full."""
        failure = self.failure().read_text(encoding="utf-8")
        if self.fill and "RunFolderError" in failure:
            line = next(line for line in reversed(failure.splitlines()) if "RunFolderError: " in line)
            self.counts[f"ended in words: {line.partition(': ')[2].replace(str(output), 'RUN')}"] += 1
            return True
        return False

    def strike(self, process: Run, output: Path) -> bool:
        """Kill a process, or fill its disk, at a random moment; False if it ended before."""
        writing = output / "checkpoints" / ".writing"
        if self.random.random() < 0.5:
            process.join(self.random.uniform(0.0, self.seconds))
        else:
            # Not the first time that something is written, but one of the first.
            until = time.monotonic() + self.random.uniform(0.0, self.seconds)
            while process.is_alive() and not (writing.exists() and time.monotonic() > until):
                time.sleep(0.0005)
            time.sleep(self.random.uniform(0.0, 0.005))
        if not process.is_alive():
            return False
        if self.fill:
            return self.fill_disk(process)
        self.hit(process)
        self.note(output, writing)
        return process.exitcode != 0

    def hit(self, process: Run) -> None:
        """Send the signal, and wait for the end."""
        process.send(self.number, *([1] if self.number == signal.SIGKILL else []))
        process.join(MOST_SECONDS_TO_END)
        if process.is_alive():
            self.faults.append(f"{len(process.alive())} processes did not end")
            process.send(signal.SIGKILL)
            process.join()

    def note(self, output: Path, writing: Path) -> None:
        """Count what the kill has hit."""
        if writing.exists():
            self.counts["while saving"] += 1
        elif (output / ".writing-model").exists():
            self.counts["while writing the model"] += 1
        elif not list_checkpoints(output / "checkpoints"):
            self.counts["before the first checkpoint"] += 1
        else:
            self.counts["between"] += 1

    def fill_disk(self, process: Run) -> bool:
        """Leave no room for a while."""
        ballast = self.folder / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            for size in (MiB, 4096, 1):
                with suppress(OSError):
                    while file.write(b"\0" * size):
                        pass
        process.join(self.random.uniform(0.0, self.seconds / 4))
        self.counts["filled"] += 1
        if process.is_alive() and self.random.random() < 0.5:
            self.hit(process)
            self.counts["killed while full"] += 1
        elif process.is_alive():
            self.counts["went on until there was room again"] += 1
        ballast.unlink()
        return True


def main() -> int:
    """Read the command line, and say what happened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--signal", choices=["KILL", "TERM", "INT"], default="KILL")
    parser.add_argument("--fill", action="store_true", help="fill the disk of --folder")
    parser.add_argument("--folder", type=Path, help="where the runs live; default: a temporary folder")
    parser.add_argument("--rows", type=int, default=120, help="rows to learn from; 9/80 updates each")
    parser.add_argument("--processes", type=int, default=1, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.fill and arguments.folder is None:
        parser.error("--fill needs --folder, on a small file system of its own")
    if arguments.folder is not None and arguments.fill:
        free = shutil.disk_usage(arguments.folder).free
        if free > MOST_FREE_BYTES:
            parser.error(f"{arguments.folder} has {free / 2**30:.0f} GiB free: too much to fill")
    number = getattr(signal, f"SIG{arguments.signal}", signal.SIGTERM)
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as place,
        tempfile.TemporaryDirectory() as failures,
    ):
        folder = Path(place)
        model = build_model(folder / "model")
        data = write_rows(folder / "rows.csv", arguments.rows)
        how = {"fill": arguments.fill, "processes": arguments.processes, "seed": arguments.seed}
        trial = Trial(folder, model, data, Path(failures), number=number, **how)
        for line in trial.disturb(arguments.kills):
            print(line, flush=True)
    for name, count in sorted(trial.counts.items()):
        print(f"{count:4}  {name}")
    for fault in trial.faults:
        print(f"FAULT: {fault}")
    print("all the same, nothing damaged" if not trial.faults else f"{len(trial.faults)} faults")
    return 1 if trial.faults else 0


if __name__ == "__main__":
    sys.exit(main())
