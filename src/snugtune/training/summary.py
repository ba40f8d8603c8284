"""The results of a run for people: scores, a table of classes, what was mistaken for what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from snugtune.data.writers import as_json_text, standard_output
from snugtune.training.card import class_scores, show_score
from snugtune.training.console import console
from snugtune.training.result import TrainResult, show_numbers
from snugtune.units import show_count, show_duration

if TYPE_CHECKING:
    from snugtune.tasks import Metrics

# Wider tables than this are for the record and the report, not for a terminal.
_MOST_CLASSES = 20


def print_result(result: TrainResult, out: Console) -> None:
    """Print what a finished run reached, and where its model is."""
    when = "" if result.best_update is None else f" (best model: update {result.best_update})"
    out.print(
        f"done      {show_count(result.updates, 'update')} in {show_duration(result.seconds)}{when}: "
        f"{show_numbers(result.metrics)}"
    )
    if result.best_update is None:
        out.print("warning   no evaluation gave a number: the learning rate is probably far too high")
    print_tables(result.metrics, result.label_names, out)
    out.print(f"model     {result.model_folder}")
    out.print(f"record    {result.folder / 'record.jsonl'}")


def print_scores(
    metrics: Metrics, names: Sequence[str], *, run: str | Path, data: str | Path, rows: int, as_json: bool
) -> None:
    """Print what a model reached on data that was measured after the run.

    Args:
        metrics: What a task measured.
        names: The label names.
        run: The run's folder.
        data: What was measured on.
        rows: Its rows.
        as_json: Whether to print one JSON object, in which null stands for what is not a number.
    """
    if as_json:
        whole = {"run": str(run), "data": str(data), "rows": rows, "metrics": metrics}
        with standard_output() as stream:
            stream.write(as_json_text(whole) + "\n")
        return
    out = console()
    out.print(f"done      {show_count(rows, 'row')} of {data}: {show_numbers(metrics)}")
    print_tables(metrics, names, out)


def print_tables(metrics: Metrics, names: Sequence[str], out: Console) -> None:
    """Print how each label did, and what was mistaken for what, where there are labels.

    Args:
        metrics: What a task measured.
        names: The label names.
        out: Where to print.
    """
    classes = class_scores(metrics)
    if 0 < len(classes) <= _MOST_CLASSES:
        out.print(_class_table(classes))
    confusion = metrics.get("confusion", [])
    if 0 < len(names) <= _MOST_CLASSES and _is_square(confusion, len(names)):
        out.print(_confusion_table(confusion, names))


def _is_square(confusion: Any, classes: int) -> bool:
    """Whether it has a row and a column for each class; a task may mean something else by the name."""
    rows = confusion if isinstance(confusion, list) else []
    return len(rows) == classes and all(isinstance(row, list) and len(row) == classes for row in rows)


def _class_table(classes: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE, title="each label", title_justify="left")
    table.add_column("label")
    for name in ("precision", "recall", "F1", "rows"):
        table.add_column(name, justify="right")
    for row in classes:
        scores = [show_score(row, name) for name in ("precision", "recall", "f1")]
        table.add_row(str(row["label"]), *scores, str(row["rows"]))
    return table


def _confusion_table(confusion: Sequence[Sequence[int]], names: Sequence[str]) -> Table:
    table = Table(box=SIMPLE, title="right label (row) and answer (column)", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for name, row in zip(names, confusion, strict=True):
        table.add_row(name, *(str(count) if count else "." for count in row))
    return table
