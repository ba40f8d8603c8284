"""Updates per second of snugtune's step against a hand-written PyTorch loop of the same step.

    python benchmarks/step_against_plain_loop.py --pairs 10 --batch-size 32

Both get the same batches in one pass, the same optimizer and clipping, and take turns; the median over the
pairs counts. Then the step cuts the same updates into passes by length, which the plain loop does not.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from snugtune import tasks
from snugtune.data.batching import Batch, Plan, Updates
from snugtune.data.demo import demo_model, write_articles
from snugtune.planning.defaults import choose_pass_price
from snugtune.runfile import load_config
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Task


def write_sentences(folder: Path) -> Path:
    """Sentences of the demo's articles with their labels: short texts, as people have them."""
    articles = write_articles(folder / "articles.csv").path
    path = folder / "sentences.csv"
    with (
        articles.open(encoding="utf-8", newline="") as source,
        path.open("w", encoding="utf-8", newline="") as out,
    ):
        writer = csv.writer(out)
        writer.writerow(["text", "label"])
        for number, row in enumerate(csv.DictReader(source)):
            if number % 7 == 0:
                sentences = re.split(r"(?<=[.!?]) ", row["text"])
                writer.writerows([text, row["label"]] for text in sentences if 20 < len(text) < 600)
    return path


def plain_loop(task: Task, device: torch.device) -> Callable[[list[Batch]], None]:
    """The loop that people write by hand."""
    model = task.build_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01, fused=True)

    def update(passes: list[Batch]) -> None:
        (batch,) = passes
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return update


def seconds(update: Callable[[], object]) -> float:
    """Time of one call, the device's work included."""
    began = time.perf_counter()
    update()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        data = write_sentences(Path(temporary))
        config = load_config(everyday={"model": demo_model(), "data": data})
        prepared = tasks.prepare(config)
    price = int(str(choose_pass_price(None, capability=(9, 0) if device.type == "cuda" else None).value))
    plans = {
        "one pass": Plan(batch_size=options.batch_size, passes=1),
        "cut": Plan(batch_size=options.batch_size, price_tokens=price),
    }
    updates = {
        name: Updates(prepared.train, prepared.task.collate, plan=plan, seed=1, epochs=1)
        for name, plan in plans.items()
    }
    step = Step(prepared.task, Choices(), Hyperparameters(), device=device)
    plain = plain_loop(prepared.task, device)
    ratios: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(options.pairs + 1):
        whole, cut = updates["one pass"][number], updates["cut"][number]
        by_hand = seconds(lambda: plain(whole))  # noqa: B023 - called at once
        ours = seconds(lambda: step.update(whole, number=number, learning_rate=5e-5))  # noqa: B023
        by_length = seconds(lambda: step.update(cut, number=number, learning_rate=5e-5))  # noqa: B023
        if number:  # the first pair warms up
            ratios["one pass"].append(by_hand / ours)
            ratios["cut"].append(by_hand / by_length)
    lengths = prepared.train.lengths
    print(
        f"{device}, {options.batch_size} samples per update, texts of {lengths.mean():.0f} tokens in the mean"
    )
    for name, values in ratios.items():
        low, high = min(values), max(values)
        middle = statistics.median(values)
        print(f"{name:<10} {middle:.3f} times the plain loop ({low:.3f} to {high:.3f}, {len(values)} pairs)")


if __name__ == "__main__":
    main()
