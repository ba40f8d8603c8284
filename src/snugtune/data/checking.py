"""The data of a run, read and checked before any model is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from snugtune.data.checked_table import CheckedTable, sort_out
from snugtune.data.checks import (
    Doubt,
    Finding,
    digest_texts,
    odd_texts,
    repeated_texts,
    shared_texts,
)
from snugtune.data.columns import Columns, find_columns, listed
from snugtune.data.label_checks import doubtful_names, repaired_labels, spellings, uneven_classes
from snugtune.data.labels import Labels, encode_labels, learn_labels
from snugtune.data.readers import open_table
from snugtune.data.reading import BadRows, How, Reading
from snugtune.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray


class Settings(Protocol):
    """The settings of a run that are about its data, `snugtune.config.DataSettings`."""

    @property
    def train(self) -> str: ...
    @property
    def validation(self) -> str | None: ...
    @property
    def train_split(self) -> str | None: ...
    @property
    def validation_split(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def text_column(self) -> str | None: ...
    @property
    def text_pair_column(self) -> str | None: ...
    @property
    def label_column(self) -> str | list[str] | None: ...
    @property
    def label_kind(self) -> Any: ...
    @property
    def label_separator(self) -> str | None: ...
    @property
    def validation_fraction(self) -> float: ...
    @property
    def bad_rows(self) -> BadRows: ...
    @property
    def encoding(self) -> str | None: ...
    @property
    def header(self) -> Any: ...


@dataclass(kw_only=True, eq=False, repr=False)
class CheckedData:
    """The data of a run; filled step by step, so that it tells how far a check came.

    Args:
        tables: "train", and "validation" where it is given.
        columns: Which columns are used; not there until it is known.
        labels: What the labels are; not there until it is known.
        answers: The labels as numbers, by table.
        digests: A number for the texts of each row, by table, [rows].
        findings: What a person should know.
    """

    tables: dict[str, CheckedTable] = field(default_factory=dict)
    columns: Columns = field(init=False)
    labels: Labels = field(init=False)
    answers: dict[str, NDArray[Any]] = field(default_factory=dict)
    digests: dict[str, NDArray[np.uint64]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def notes(self) -> list[str]:
        """What there is to say before a run."""
        said = [note for table in self.tables.values() for note in table.notes()]
        return said + [show_finding(finding) for finding in self.findings]


def show_finding(finding: Finding) -> str:
    """A finding as one sentence."""
    known = finding.line is None or f"line {finding.line}" in finding.what
    place = "" if known else f" (line {finding.line})"
    return f"{finding.what}{place}: {finding.why}; {finding.do}"


def check_data(settings: Settings, data: CheckedData | None = None, *, tolerant: bool = False) -> CheckedData:
    """Read and check the data of a run.

    Args:
        settings: What a person wants.
        data: Filled in the place of a new one, so that it can be looked at after an error.
        tolerant: Leave bad rows out whatever the settings say.

    Raises:
        DataError, HubError, UsageError: A run would stop here.
    """
    data = CheckedData() if data is None else data
    bad_rows: BadRows = "skip" if tolerant else settings.bad_rows
    readings = _read(settings, bad_rows)
    data.tables = {where: CheckedTable(reading=reading) for where, reading in readings.items()}
    data.columns = columns = _find_columns(settings, readings["train"].table.column_names)
    separator = settings.label_separator
    for table in data.tables.values():
        _check_columns(table.table, columns, where=table.reading.source)
        sort_out(table, columns, separator=separator, bad_rows=bad_rows)
    train = data.tables["train"]
    with train.located():
        labels = learn_labels(
            train.table, columns, kind=settings.label_kind, separator=separator, where=train.reading.source
        )
    data.labels = labels
    for where, table in data.tables.items():
        with table.located():
            data.answers[where] = encode_labels(
                table.table, columns, labels, separator=separator, where=table.reading.source
            )
        data.digests[where] = digest_texts(table.table, columns)
        table.repaired.update(_repaired(table, columns, labels, separator))
        for doubt in _doubts(data, where, separator):
            data.findings.append(_placed(doubt, table))
    return data


def _read(settings: Settings, bad_rows: BadRows) -> dict[str, Reading]:
    asked = [settings.text_column, settings.text_pair_column, *(_labels(settings) or [])]
    header = settings.header if isinstance(settings.header, bool) else None
    how = How(
        bad_rows=bad_rows,
        encoding=settings.encoding,
        header=header,
        names=tuple(name for name in asked if name is not None),
    )
    found = {
        "train": open_table(settings.train, split=settings.train_split, revision=settings.revision, how=how)
    }
    if settings.validation is not None or settings.validation_split is not None:
        source = settings.validation or settings.train
        # One data set for both means its split "validation"; one file for both means what it says.
        same = source == settings.train and not Path(source).is_file()
        split = settings.validation_split or ("validation" if same else None)
        found["validation"] = open_table(source, split=split, revision=settings.revision, how=how)
    return found


def _labels(settings: Settings) -> list[str] | None:
    return [settings.label_column] if isinstance(settings.label_column, str) else settings.label_column


def _find_columns(settings: Settings, names: Sequence[str]) -> Columns:
    return find_columns(
        names,
        text=settings.text_column,
        text_pair=settings.text_pair_column,
        labels=_labels(settings),
        where=settings.train,
    )


def _check_columns(table: Dataset, columns: Columns, *, where: str) -> None:
    used = [*columns.texts, *columns.labels]
    missing = [name for name in used if name not in table.column_names]
    if missing:
        raise DataError(
            f"{where} has no column {missing[0]!r}",
            why=f"its columns are {listed(table.column_names)}; the training data has {listed(used)}",
            do="give both the same columns",
        )


def _repaired(table: CheckedTable, columns: Columns, labels: Labels, separator: str | None) -> Counter[str]:
    if labels.kind != "single-label":
        return Counter()
    return repaired_labels(spellings(table.table, columns, separator=separator), labels.names)


def _doubts(data: CheckedData, where: str, separator: str | None) -> Iterator[Doubt]:
    """What is doubtful in one of the tables."""
    import numpy as np

    table, columns, labels = data.tables[where].table, data.columns, data.labels
    yield from odd_texts(table, columns)
    if where == "validation":
        yield from shared_texts(data.digests["train"], data.digests["validation"])
        return
    yield from repeated_texts(data.digests[where], data.answers[where], kind=labels.kind)
    if labels.kind == "regression":
        return
    answers = data.answers[where]
    counts = count_labels(answers, labels)
    yield from _with_rows(doubtful_names(labels.names, spellings(table, columns, separator=separator)), data)
    if labels.kind == "single-label":
        yield from uneven_classes(labels.names, np.asarray(counts))


def _with_rows(doubts: Iterator[Doubt], data: CheckedData) -> Iterator[Doubt]:
    """Doubts about labels, with the first row of the label that the sentence names last."""
    import numpy as np

    answers, labels = data.answers["train"], data.labels
    for doubt in doubts:
        row = None
        for number, name in enumerate(labels.names if answers.ndim == 1 else ()):
            if f"label {name} " in doubt.what or f"label {name!r} " in doubt.what:
                row = int(np.argmax(answers == number))
        yield Doubt(what=doubt.what, why=doubt.why, do=doubt.do, row=row)


def count_labels(answers: NDArray[Any], labels: Labels) -> list[int]:
    """Rows of each class, [classes]."""
    import numpy as np

    counts = answers.sum(axis=0) if answers.ndim == 2 else np.bincount(answers, minlength=len(labels.names))
    return [int(count) for count in counts]


def _placed(doubt: Doubt, table: CheckedTable) -> Finding:
    lines = [] if doubt.row is None else table.lines_of([doubt.row])
    return Finding(what=doubt.what, why=doubt.why, do=doubt.do, line=lines[0] if lines else None)
