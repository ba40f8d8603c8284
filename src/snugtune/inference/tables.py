"""A finished model on a whole table: scores, or the answer to each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from snugtune.data.labels import check_texts, encode_labels
from snugtune.data.readers import cells_as_written
from snugtune.data.writers import Write, open_output, open_standard_output
from snugtune.inference.answers import answer_names, answer_table, show_answer
from snugtune.inference.predictor import Predictor
from snugtune.inference.sources import Source
from snugtune.tasks import Metrics
from snugtune.units import show_count

STANDARD_OUTPUT = "-"


@dataclass(kw_only=True)
class Predictions:
    """What became of the rows that a model was asked about.

    Args:
        rows: Rows answered.
        without_text: Rows with a text that is missing or empty; they are answered like the empty text.
        cut_off: Rows longer than the model takes, of which it read the beginning.
        output: The file that was written; None if there is none.
        answers: The answer to each row, by the names of the columns; None if they were written or printed.
    """

    rows: int = 0
    without_text: int = 0
    cut_off: int = 0
    output: Path | None = None
    answers: list[dict[str, Any]] | None = None

    def lines(self, texts: Sequence[str]) -> Iterator[str]:
        """The answers that are in memory as lines for people, each before its text."""
        for answer, text in zip(self.answers or [], texts, strict=False):
            yield f"{show_answer(answer)}  {' '.join(text.split())}"


def evaluate_source(
    predictor: Predictor, source: Source, *, on_rows: Callable[[int], None]
) -> tuple[Metrics, int]:
    """Scores of a model on a table with labels, and how many rows were cut off.

    Limits: the answers to all rows are in memory, four bytes for each class.

    Args:
        predictor: The model.
        source: The table.
        on_rows: Called after each pass with the rows done.

    Raises:
        DataError: Texts or labels are missing, or a label was not in the training data.
    """
    check_texts(source.table, source.columns, where=source.name)
    labels = encode_labels(
        source.table,
        source.columns,
        predictor.run.labels,
        separator=predictor.run.config.data.label_separator,
        where=source.name,
    )
    try:
        windows = list(predictor.windows(source.table, source.columns, on_rows=on_rows))
    except KeyboardInterrupt:
        predictor.say("interrupted: there are scores only when all rows are read")
        raise
    outputs = {"logits": torch.cat([window.logits for window in windows]), "labels": torch.from_numpy(labels)}
    return predictor.step.task.measure(outputs), sum(window.cut_off for window in windows)


def predict_source(
    predictor: Predictor,
    source: Source,
    *,
    output: str | Path | None,
    as_json: bool,
    on_rows: Callable[[int], None],
) -> Predictions:
    """Answer every row of a table.

    Args:
        predictor: The model.
        source: The table.
        output: The file for rows and answers; "-" is the standard output, None keeps the answers in memory.
        as_json: Whether the standard output gets JSON lines, not CSV.
        on_rows: Called after each pass with the rows done.

    Raises:
        DataError: The output cannot be written.
    """
    labels, separator = predictor.run.labels, predictor.run.config.data.label_separator
    names = answer_names(labels, source.table.column_names)
    if names != answer_names(labels, []):
        predictor.say(
            f"columns   the data has such columns already, so the answers are in {', '.join(names)}"
        )
    whole = source.table.with_format("arrow")
    done = Predictions(answers=[] if output is None else None)
    try:
        with _open_sink(output, source, as_json, done) as write:
            for window in predictor.windows(source.table, source.columns, on_rows=on_rows):
                answers = answer_table(window.logits, labels, separator=separator).rename_columns(names)
                write(whole[window.start : window.start + len(answers)], answers)
                done.rows += len(answers)
                done.without_text += window.without_text
                done.cut_off += window.cut_off
    except KeyboardInterrupt:
        where = "" if output in (None, STANDARD_OUTPUT) else f"; {output} was not written"
        predictor.say(f"interrupted after {done.rows:,} of {show_count(len(whole), 'row')}{where}")
        raise
    return done


@contextmanager
def _open_sink(
    output: str | Path | None, source: Source, as_json: bool, done: Predictions
) -> Iterator[Write]:
    rows = None if source.data is None else cells_as_written(source.data, source.how)
    if output is None:
        kept = done.answers if done.answers is not None else []
        yield lambda part, answers: kept.extend(answers.to_pylist())
    elif output == STANDARD_OUTPUT:
        with open_standard_output(".jsonl" if as_json else ".csv", rows=rows) as write:
            yield write
    else:
        done.output = Path(output)
        with open_output(done.output, source=source.data, rows=rows) as write:
            yield write
