"""snugtune against the Trainer of transformers: the same model, rows, seeds, samples per update and epochs.

    python benchmarks/against_trainer.py --model minilm --batch-size 128 32 --seeds 3 --save table.json
    python benchmarks/against_trainer.py --model roberta-large --budget "11 GiB" --as-pascal \\
        --batch-size 128 --trainer-accumulation 16 --pass-tokens 1024

Timed is the training alone, from the end of the second update to the end of the last one, loading of batches
included; reading, tokenising and evaluation are not. Every run has a process of its own, and the order of the
variants rotates from seed to seed, so that a drift of the machine hits all alike. Where rows are grouped by
length, samples are counted by their tokens, as the updates that are not timed may be the longest. bert-base
and roberta-large have random weights and the tokenizer of the demo's model: for speed and memory, not for
accuracy.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from against_trainer_run import WARM_UP_UPDATES, Job
from step_against_plain_loop import write_sentences
from transformers import AutoModel, AutoTokenizer, BertConfig, RobertaConfig

from snugtune.data.demo import demo_model

TRAINER = {
    "trainer-padded": "Trainer, padded to the limit",
    "trainer": "Trainer, padded to the longest",
    "trainer-grouped": "Trainer, grouped by length",
}
OURS = {"snugtune": "snugtune", "snugtune-grouped": "snugtune, grouped"}
VARIANTS = {**TRAINER, **OURS}


def build_model(name: str, folder: Path) -> str:
    """A folder or a hub's name as it is; or the folder of a model made here, with random weights."""
    if name == "minilm":
        return str(demo_model())
    if name not in ("bert-base", "roberta-large"):
        return name
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    config = (
        BertConfig(**vocabulary)
        if name == "bert-base"
        else RobertaConfig(
            **vocabulary, **large, intermediate_size=4096, max_position_embeddings=514, type_vocab_size=1
        )
    )
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_rows(folder: Path, *, rows: int, evaluation_rows: int) -> tuple[Path, Path]:
    """Sentences to learn from, and others to measure on."""
    with write_sentences(folder).open(encoding="utf-8", newline="") as file:
        table = list(csv.reader(file))
    header, sentences = table[0], table[1:]
    if rows + evaluation_rows > len(sentences):
        raise SystemExit(
            f"there are {len(sentences):,} sentences, fewer than {rows:,} and {evaluation_rows:,}"
        )
    random.Random(0).shuffle(sentences)
    parts = {"train": sentences[evaluation_rows:][:rows], "validation": sentences[:evaluation_rows]}
    for name, part in parts.items():
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as out:
            csv.writer(out).writerows([header, *part])
    return folder / "train.csv", folder / "validation.csv"


def start(job: Job, device: str) -> dict[str, Any]:
    """Run a job in a process of its own; its numbers, or why there are none."""
    folder = Path(job.folder)
    folder.mkdir(parents=True)
    given, found = folder.with_suffix(".job.json"), folder.with_suffix(".numbers.json")
    given.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
    # Several cards would make the Trainer spread a batch over them.
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "" if device == "cpu" else cards}
    program = Path(__file__).with_name("against_trainer_run.py")
    command = [sys.executable, str(program), str(given), str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    same = {"variant": job.variant, "batch_size": job.batch_size, "seed": job.seed}
    if done.returncode or not found.is_file():
        return {**same, "failed": " ".join(done.stderr.strip().splitlines()[-3:])}
    return {**same, **json.loads(found.read_text(encoding="utf-8"))}


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every variant with every batch size and seed."""
    runs = []
    taken = [field.name for field in dataclasses.fields(Job) if field.name in vars(options)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = build_model(options.model, folder / "model")
        for batch_size in options.batch_size:
            rows = min(options.rows, batch_size * (options.max_updates or options.rows))
            if math.ceil(rows / batch_size) * options.epochs <= WARM_UP_UPDATES:
                raise SystemExit(f"{rows} rows make too few updates of {batch_size} samples to time any")
            train, validation = write_rows(folder, rows=rows, evaluation_rows=options.evaluation_rows)
            for seed in range(1, options.seeds + 1):
                turn = (seed - 1) % len(options.variants)
                for variant in options.variants[turn:] + options.variants[:turn]:
                    job = {name: getattr(options, name) for name in taken}
                    job |= {"variant": variant, "batch_size": batch_size, "seed": seed, "model": model}
                    job |= {"train": str(train), "validation": str(validation)}
                    output = folder / f"{variant}-{batch_size}-{seed}"
                    runs.append(start(Job(**job, folder=str(output)), options.device))
                    rate = runs[-1].get("samples_per_second")
                    said = runs[-1].get("failed") if rate is None else f"{rate:.1f} samples/s"
                    print(f"  batch {batch_size}, seed {seed}, {VARIANTS[variant]}: {said}", file=sys.stderr)
    return runs


def show(runs: list[dict[str, Any]], variants: list[str]) -> None:
    """A table for the runs with one batch size: each variant, and ours as multiples of the Trainer's."""
    done: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in variants}
    for run in runs:
        if "failed" not in run:
            done[run["variant"]][run["seed"]] = run
    first = next((run for run in runs if "failed" not in run), {})
    print(f"\n{first.get('device', 'device unknown')}, {runs[0]['batch_size']} samples per update")
    print(f"{'variant':<32}{'samples/s':>10}{'from':>9}{'to':>9}{'passes':>8}{'reserved':>12}  accuracy")
    for name in variants:
        found = list(done[name].values())
        if not found:
            print(
                f"{VARIANTS[name]:<32}failed: {next(run['failed'] for run in runs if run['variant'] == name)}"
            )
            continue
        rates = [run["samples_per_second"] for run in found]
        scores = [run["accuracy"] for run in found]
        peak = max((run["peak_reserved_bytes"] or 0 for run in found), default=0)
        spread = f" +- {statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
        print(
            f"{VARIANTS[name]:<32}{statistics.median(rates):>10.1f}{min(rates):>9.1f}{max(rates):>9.1f}"
            f"{statistics.mean(run['passes_per_update'] for run in found):>8.1f}"
            f"{f'{peak / 2**20:,.0f} MiB' if peak else '-':>12}  {statistics.mean(scores):.4f}{spread}"
        )
    for ours in [name for name in variants if name in OURS]:
        for theirs in [name for name in variants if name in TRAINER]:
            both = sorted(done[ours].keys() & done[theirs].keys())
            ratios = [
                done[ours][seed]["samples_per_second"] / done[theirs][seed]["samples_per_second"]
                for seed in both
            ]
            if ratios:
                print(
                    f"{VARIANTS[ours]} / {VARIANTS[theirs]}: {statistics.median(ratios):.2f} "
                    f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} seeds)"
                )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model", default="minilm", help="folder, hub id, minilm, bert-base or roberta-large"
    )
    parser.add_argument("--batch-size", type=int, nargs="+", default=[128, 32], help="samples per update")
    parser.add_argument("--rows", type=int, default=4096, help="rows to learn from")
    parser.add_argument("--evaluation-rows", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--budget", help="cap on the allocator, such as '11 GiB'")
    parser.add_argument("--as-pascal", action="store_true", help="no flash and no cuDNN attention")
    parser.add_argument("--passes", default="auto", help="passes of snugtune's updates")
    parser.add_argument("--pass-tokens", type=int, help="most positions of a pass of snugtune's")
    parser.add_argument("--checkpointed-layers", default="0", help="checkpointed layers of snugtune")
    parser.add_argument("--trainer-accumulation", type=int, default=1, help="passes of the Trainer's updates")
    parser.add_argument("--trainer-checkpointing", action="store_true", help="its gradient checkpointing")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--max-updates", type=int, help="use only so many rows that an epoch has these updates"
    )
    parser.add_argument("--save", type=Path, help="write the runs as JSON")
    options = parser.parse_args()
    if any(size % options.trainer_accumulation for size in options.batch_size):
        parser.error("--trainer-accumulation must divide every batch size")
    return options


def main() -> None:
    options = parse()
    runs = run_all(options)
    for batch_size in options.batch_size:
        show([run for run in runs if run["batch_size"] == batch_size], options.variants)
    if options.save:
        settings = {name: value for name, value in vars(options).items() if name != "save"}
        options.save.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
