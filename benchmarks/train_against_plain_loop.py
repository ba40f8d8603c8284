"""Updates per second of `snugtune train` against a hand-written PyTorch loop of the same step.

    python benchmarks/train_against_plain_loop.py --model minilm --batch-size 32 128 --pairs 10
    python benchmarks/train_against_plain_loop.py --model bert-base --precision fp32 fp16 --budget "11 GiB"

snugtune runs as people run it: with its record and its data loader. The plain loop gets the same batches
ready-made, and neither logs nor measures. Both train the same model from the same weights, in one pass for
each update with its padding, and take turns; the first updates of each turn do not count.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch
from step_against_plain_loop import write_sentences

import snugtune
from snugtune import tasks
from snugtune.data.batching import Batch, Plan, Updates
from snugtune.data.demo import demo_model
from snugtune.record import read_record
from snugtune.runfile import load_config
from snugtune.tasks.pretrained import quiet_transformers
from snugtune.training import checkpoints, loop
from snugtune.units import parse_size

_WARM_UP = 3
_SHAPES = {"bert-base": (768, 12), "roberta-large": (1024, 24)}


def build_model(name: str, folder: Path) -> Path:
    """The folder of a model: the demo's, or one of a usual size with random weights."""
    if name == "minilm":
        return Path(demo_model())
    if Path(name).is_dir():
        return Path(name)
    from transformers import AutoTokenizer, BertConfig, BertModel

    hidden, layers = _SHAPES[name]
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return folder / name


class PlainLoop:
    """The loop that people write by hand."""

    def __init__(self, model_folder: Path, precision: str, labels: int) -> None:
        from transformers import AutoModelForSequenceClassification

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with quiet_transformers():
            self.model = AutoModelForSequenceClassification.from_pretrained(
                model_folder, num_labels=labels, dtype=torch.float32
            )
        self.model.to(self.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5, weight_decay=0.01, fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)

    def seconds(self, batches: Sequence[Batch]) -> float:
        """Seconds of an update."""
        began = 0.0
        for number, batch in enumerate(batches):
            if number == _WARM_UP:
                wait()
                began = time.perf_counter()
            on_device = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
            with torch.autocast(self.device.type, dtype=self.half, enabled=self.half is not None):
                loss = self.model(**on_device).loss
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        wait()
        return (time.perf_counter() - began) / (len(batches) - _WARM_UP)


def our_seconds(
    output: Path, model: Path, data: Path, precision: str, batch_size: int, updates: int
) -> float:
    """Seconds of an update by `snugtune train`, without the writing of checkpoint and model at the end."""
    shutil.rmtree(output, ignore_errors=True)
    with (
        mock.patch.object(checkpoints, "save_checkpoint", lambda folder, *rest, **more: folder),
        mock.patch.object(loop, "finish_model", return_value={}),
    ):
        (output / "checkpoints").mkdir(parents=True)
        (output / "config.yaml").touch()
        snugtune.train(
            model=model,
            data=data,
            epochs=1,
            batch_size=batch_size,
            passes=1,
            precision=precision,
            output=output,
            set={
                "data.validation_fraction": 0.01,
                "evaluation.every_updates": 10**6,
                "checkpoints.every_minutes": None,
                "training.packing": False,
                "training.seed": 1,
            },
            quiet=True,
        )
    lines = read_record(output / "record.jsonl").updates
    return statistics.mean(line["seconds"] for line in lines[_WARM_UP:updates])


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def some_sentences(sentences: Path, rows: int, path: Path) -> Path:
    """A CSV file of `rows` sentences in random order, or of all if they are fewer."""
    with sentences.open(encoding="utf-8", newline="") as source:
        header, *lines = csv.reader(source)
    with path.open("w", encoding="utf-8", newline="") as out:
        random.Random(0).shuffle(lines)
        csv.writer(out).writerows([header, *lines[:rows]])
    return path


def same_batches(model: Path, data: Path, batch_size: int) -> tuple[list[Batch], int]:
    """The batches that snugtune will use, and the number of labels."""
    config = load_config(
        everyday={"model": model, "data": data},
        settings={"data.validation_fraction": 0.01, "training.seed": 1},
    )
    ready = tasks.prepare(config)
    plan = Plan(batch_size=batch_size, passes=1)
    updates = Updates(ready.train, ready.task.collate, plan=plan, seed=1, epochs=1)
    batches = [batch for number in range(len(updates)) for batch in updates[number]]
    if torch.cuda.is_available():
        batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
    return batches, len(ready.facts["label_names"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="minilm", help="minilm, bert-base, roberta-large or a folder")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--precision", nargs="+", default=["fp32"])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--updates", type=int, default=12, help="updates of each turn")
    parser.add_argument("--budget", help="cap on the memory of the card")
    parser.add_argument("--as-pascal", action="store_true", help="without the attention kernels Pascal lacks")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    if options.budget:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_size(options.budget) / total)
    if options.as_pascal:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = build_model(options.model, folder)
        sentences = write_sentences(folder)
        for batch_size, precision in itertools.product(options.batch_size, options.precision):
            data = some_sentences(
                sentences, round(batch_size * options.updates / 0.99) + 8, folder / "some.csv"
            )
            batches, labels = same_batches(model, data, batch_size)
            plain = PlainLoop(model, precision, labels)
            pairs = []
            for _ in range(options.pairs):
                theirs = plain.seconds(batches[: options.updates])
                ours = our_seconds(folder / "run", model, data, precision, batch_size, options.updates)
                pairs.append((theirs, ours))
            del plain
            ratios = [theirs / ours for theirs, ours in pairs]
            results.append(
                {
                    "model": options.model,
                    "batch_size": batch_size,
                    "precision": precision,
                    "pairs": len(pairs),
                    "plain_updates_per_second": 1 / statistics.median(theirs for theirs, _ in pairs),
                    "snugtune_updates_per_second": 1 / statistics.median(ours for _, ours in pairs),
                    "ratio": statistics.median(ratios),
                    "ratio_lowest": min(ratios),
                    "ratio_highest": max(ratios),
                }
            )
            print(json.dumps(results[-1]), flush=True)
    if options.save:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        options.save.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
