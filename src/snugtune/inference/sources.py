"""What a finished model reads: a table and its columns, or a few texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snugtune.data.asked import AskedTable, asked_how
from snugtune.data.checked_table import CheckedTable, sort_out
from snugtune.data.columns import Columns, no_column
from snugtune.data.label_cells import holds_lists
from snugtune.data.readers import open_table
from snugtune.data.reading import How
from snugtune.errors import DataError, UsageError
from snugtune.inference.runs import FinishedRun

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, kw_only=True)
class Source:
    """A table that a model can read.

    Args:
        table: A `datasets.Dataset`.
        columns: Which of its columns are used; no labels where none are needed.
        data: What was read; None for texts that were given by themselves.
        how: What a person wanted of the reader.
        notes: What was repaired and left out, in sentences.
    """

    table: Any
    columns: Columns
    data: str | Path | None = None
    how: How = field(default_factory=How)
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The source, for messages."""
        return "the texts" if self.data is None else str(self.data)


def open_source(
    run: FinishedRun,
    data: str | Path,
    *,
    labels: Sequence[str] | None = None,
    **asked: Unpack[AskedTable],
) -> Source:
    """Read a table, and find the columns of a run in it.

    Args:
        run: The run.
        data: File, folder saved by `datasets`, or hub id of a data set.
        labels: The label columns; None takes those of the training data, empty is none.
        asked: Where it is in the table, and how it is read. Where there are labels, rows without text or
            label are bad too.

    Raises:
        DataError, HubError: It cannot be read, or a column does not hold texts.
        UsageError: A column is not there, or the run does not have that many.
    """
    learnt, answers = run.columns, run.columns.labels if labels is None else labels
    text, text_pair = asked.get("text_column"), asked.get("text_pair_column")
    how = asked_how(asked, [text or learnt.text, text_pair or learnt.text_pair, *answers])
    checked = CheckedTable(reading=open_table(data, split=asked.get("split"), how=how))
    columns = _columns_of(
        run, checked.table.column_names, text=text, text_pair=text_pair, labels=labels, where=str(data)
    )
    _check_readable(checked.table, columns, where=str(data))
    _check_several(run, checked.table, columns, where=str(data))
    if columns.labels:
        sort_out(checked, columns, separator=run.config.data.label_separator, bad_rows=how.bad_rows)
    return Source(table=checked.table, columns=columns, data=data, how=how, notes=tuple(checked.notes()))


def source_of_texts(run: FinishedRun, texts: Sequence[str], pairs: Sequence[str] | None) -> Source:
    """A table of a few texts.

    Args:
        run: The run.
        texts: The texts.
        pairs: The second text of each, for a model of pairs.

    Raises:
        UsageError: The run's model reads pairs and none are given, or the other way round.
    """
    from datasets import Dataset

    wanted = len(texts) if run.columns.text_pair else 0
    if len(pairs or ()) != wanted:
        raise UsageError(
            f"there are {len(texts)} texts and {len(pairs or ())} second texts",
            why=f"the model in {run.path} reads {'pairs of texts' if wanted else 'single texts'}",
            do="give one --text-pair for each --text" if wanted else "leave --text-pair out",
        )
    cells = {"text": list(texts), **({"text_pair": list(pairs)} if pairs else {})}
    columns = Columns(text="text", text_pair="text_pair" if pairs else None, labels=())
    return Source(table=Dataset.from_dict(cells), columns=columns)


def _columns_of(
    run: FinishedRun,
    names: Sequence[str],
    *,
    text: str | None,
    text_pair: str | None,
    labels: Sequence[str] | None,
    where: str,
) -> Columns:
    """Those named, otherwise those of the training data."""
    learnt = run.columns
    if text_pair is not None and learnt.text_pair is None:
        raise UsageError(
            f"{run.path} reads one text, and no second one from a column {text_pair!r}",
            why="it learnt from single texts",
            do="leave --text-pair-column out",
        )
    columns = Columns(
        text=text or learnt.text,
        text_pair=text_pair or learnt.text_pair,
        labels=learnt.labels if labels is None else tuple(labels),
    )
    used = [
        ("text", columns.text),
        ("text_pair", columns.text_pair),
        *(("labels", x) for x in columns.labels),
    ]
    for role, name in used:
        if name is not None and name not in names:
            raise no_column(name, names, role, where)
    several = run.labels.kind == "multi-label"
    if len(columns.labels) > 1 and not (several and len(columns.labels) == len(run.labels.names)):
        order = f"name one column for each, in this order: {', '.join(run.labels.names)}"
        raise UsageError(
            f"{len(columns.labels)} label columns do not fit {run.path}",
            why=f"its model answers {len(run.labels.names)} labels" if several else "it learnt from one",
            do=order if several else "name one column with --label-column",
        )
    return columns


def _check_readable(table: Any, columns: Columns, *, where: str) -> None:
    """Refuse columns that do not hold texts."""
    for name in filter(None, (columns.text, columns.text_pair)):
        kind = str(table.features.arrow_schema.field(name).type)
        # A column in which nothing is given has no type of its own.
        if type(table.features[name]).__name__ == "Json" or kind not in ("string", "large_string", "null"):
            raise DataError(
                f"{where}: the column {name!r} does not hold texts",
                why=f"it holds {kind}",
                do="name another column with --text-column or --text-pair-column",
            )


def _check_several(run: FinishedRun, table: Any, columns: Columns, *, where: str) -> None:
    """Refuse one column of single labels for a model that answers several."""
    names = columns.labels
    if run.labels.kind != "multi-label" or len(names) != 1 or run.config.data.label_separator is not None:
        return
    if not holds_lists(table, names[0]):
        learnt = ", ".join(run.columns.labels[:8])
        raise UsageError(
            f"{where}: the column {names[0]!r} has one label for each row",
            why=f"the model in {run.path} answers several, and learnt from {learnt}",
            do="name a column of lists, or the 0/1 column of each label, with --label-column",
        )
