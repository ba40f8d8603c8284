"""The results of a run for people: scores, a table of classes, what was mistaken for what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from snugtune.training.result import TrainResult, show_numbers
from snugtune.units import show_count, show_duration

# Wider tables than this are for the record and the report, not for a terminal.
_MOST_CLASSES = 20


def print_result(result: TrainResult, console: Console) -> None:
    """Print what a finished run reached, and where its model is."""
    when = "" if result.best_update is None else f" (best model: update {result.best_update})"
    console.print(
        f"done      {show_count(result.updates, 'update')} in {show_duration(result.seconds)}{when}: "
        f"{show_numbers(result.metrics)}"
    )
    if result.best_update is None:
        console.print("warning   no evaluation gave a number: the learning rate is probably far too high")
    classes = result.metrics.get("per_class", [])
    if 0 < len(classes) <= _MOST_CLASSES:
        console.print(_class_table(classes))
    confusion = result.metrics.get("confusion", [])
    if 0 < len(confusion) <= _MOST_CLASSES:
        console.print(_confusion_table(confusion, result.label_names))
    console.print(f"model     {result.model_folder}")
    console.print(f"record    {result.folder / 'record.jsonl'}")


def _class_table(classes: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE, title="each label", title_justify="left")
    table.add_column("label")
    for name in ("precision", "recall", "F1", "rows"):
        table.add_column(name, justify="right")
    for row in classes:
        scores = [f"{row[name]:.3f}" for name in ("precision", "recall", "f1")]
        table.add_row(row["label"], *scores, str(row["rows"]))
    return table


def _confusion_table(confusion: Sequence[Sequence[int]], names: Sequence[str]) -> Table:
    table = Table(box=SIMPLE, title="right label (row) and answer (column)", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for name, row in zip(names, confusion, strict=True):
        table.add_row(name, *(str(count) if count else "." for count in row))
    return table
