"""The data of a run, read and checked before any model is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from snugtune.data.checks import (
    Doubt,
    Finding,
    digest_texts,
    missing_cells,
    odd_texts,
    repeated_texts,
    shared_texts,
)
from snugtune.data.columns import Columns, find_columns, listed
from snugtune.data.label_cells import refuse_missing
from snugtune.data.label_checks import doubtful_names, repaired_labels, spellings, uneven_classes
from snugtune.data.labels import Labels, check_text_types, encode_labels, learn_labels
from snugtune.data.readers import open_table
from snugtune.data.reading import SHOWN, BadRows, How, Reading, Refused
from snugtune.errors import DataError
from snugtune.units import show_count

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray


_MOST_REFUSED = 1000  # rows whose lines are looked up


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


@dataclass(kw_only=True)
class CheckedTable:
    """A table without the rows that cannot be used.

    Args:
        reading: How it was read.
        table: The rows that are used.
        kept: Their numbers in what was read, [rows]; None if all are used.
        refused: The rows that are not used; the first of very many.
        refused_rows: How many these are.
        repaired: What was changed, and in how many places.
    """

    reading: Reading
    table: Dataset
    kept: NDArray[np.int64] | None = None
    refused: list[Refused] = field(default_factory=list)
    refused_rows: int = 0
    repaired: Counter[str] = field(default_factory=Counter)

    def lines_of(self, rows: Sequence[int]) -> list[int]:
        """The lines on which rows of the table (from 0, ascending) begin; empty where there are no lines."""
        if self.reading.lines is None or not rows:
            return []
        return self.reading.lines([row if self.kept is None else int(self.kept[row]) for row in rows])

    @contextmanager
    def located(self) -> Iterator[None]:
        """Errors about rows of the table also name their lines."""
        try:
            yield
        except DataError as error:
            lines = self.lines_of([row - 1 for row in error.rows])
            if not lines:
                raise
            numbers = ", ".join(map(str, lines))
            raise DataError(f"{error.what} (line {numbers})", why=error.why, do=error.do) from error

    def facts(self) -> dict[str, Any]:
        """What a record says about it."""
        return {
            "rows": len(self.table) + self.refused_rows,
            "kept": len(self.table),
            "repaired": dict(self.repaired),
            "refused": self.refused_rows,
            "first_refused": [asdict(row) for row in self.refused[:SHOWN]],
            "encoding": self.reading.encoding,
            "delimiter": self.reading.delimiter,
        }

    def notes(self) -> list[str]:
        """The same in sentences, where there is something to say."""
        said = [f"{self.reading.source}: {kind}"] if (kind := self.reading.kind) else []
        said += [f"{self.reading.source}: {how}: {count:,}" for how, count in self.repaired.items()]
        if self.refused_rows:
            rows = len(self.table) + self.refused_rows
            first = "; ".join(map(str, self.refused[:SHOWN]))
            said.append(
                f"{self.reading.source}: {rows:,} rows read, {len(self.table):,} kept, "
                f"{self.refused_rows:,} left out: {first}" + ("; ..." if self.refused_rows > SHOWN else "")
            )
        return said


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
    place = f" (line {finding.line})" if finding.line is not None else ""
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
    data.tables = {where: CheckedTable(reading=r, table=r.table) for where, r in readings.items()}
    for table in data.tables.values():
        table.refused, table.refused_rows = [*table.reading.refused], table.reading.refused_rows
    data.columns = columns = _find_columns(settings, readings["train"].table.column_names)
    separator = settings.label_separator
    for table in data.tables.values():
        _check_columns(table.table, columns, where=table.reading.source)
        _sort_out(table, columns, separator=separator, bad_rows=bad_rows)
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


def _sort_out(table: CheckedTable, columns: Columns, *, separator: str | None, bad_rows: BadRows) -> None:
    """Leave out the rows without text or label, or stop at them."""
    import numpy as np

    where = table.reading.source
    changed = [
        row for name in (*columns.texts, *columns.labels) for row in table.reading.changed.get(name, [])
    ]
    table.repaired.update(table.reading.repaired)
    if changed and bad_rows == "stop":
        lines = "; ".join(map(str, changed[:SHOWN]))
        raise DataError(
            f"{where}: {show_count(len(changed), 'row')} cannot be used",
            why=lines,
            do="correct them, or leave such rows out with data.bad_rows=skip",
        )
    check_text_types(table.table, columns, where=where)
    bad = np.zeros(len(table.table), dtype=bool)
    for what, missing in missing_cells(table.table, columns, separator=separator, where=where):
        if bad_rows == "stop":
            with table.located():
                refuse_missing(missing, what, where)
        rows = np.flatnonzero(missing & ~bad)
        known = {row.line: row for row in changed}
        some = rows[:_MOST_REFUSED].tolist()
        numbers = table.lines_of(some)
        if numbers:
            table.refused += [known.get(line, Refused(line, f"it has no {what}")) for line in numbers]
        else:
            table.refused += [Refused(None, f"row {row + 1} has no {what}") for row in some]
        bad |= missing
    if bad.all():
        raise DataError(
            f"{where} has no row with text and label", why="all were left out", do="look at the file"
        )
    if bad.any():
        table.kept = np.flatnonzero(~bad)
        table.table = table.table.select(table.kept)
        table.refused_rows += int(bad.sum())
        table.refused.sort(key=lambda row: row.line or 0)


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
