"""A table whose rows without text or label are left out or refused, with the lines where they stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from snugtune.data.checks import missing_cells
from snugtune.data.columns import Columns
from snugtune.data.label_cells import refuse_missing
from snugtune.data.labels import check_text_types
from snugtune.data.reading import SHOWN, BadRows, Reading, Refused
from snugtune.errors import DataError
from snugtune.units import show_count

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray

_MOST_REFUSED = 1000  # rows whose lines are looked up


@dataclass(kw_only=True)
class CheckedTable:
    """A table without the rows that cannot be used.

    Args:
        reading: How it was read.
        table: The rows that are used; all that could be read, until `sort_out` leaves some out.
        kept: Their numbers in what was read, [rows]; None if all are used.
        refused: The rows that are not used; the first of very many.
        refused_rows: How many these are.
        repaired: What was changed, and in how many places.
    """

    reading: Reading
    table: Dataset = field(init=False)
    kept: NDArray[np.int64] | None = None
    refused: list[Refused] = field(init=False)
    refused_rows: int = field(init=False)
    repaired: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.table = self.reading.table
        self.refused, self.refused_rows = [*self.reading.refused], self.reading.refused_rows

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


def sort_out(table: CheckedTable, columns: Columns, *, separator: str | None, bad_rows: BadRows) -> None:
    """Leave out the rows without text or label, or stop at them.

    Args:
        table: The table; its rows that cannot be used are left out.
        columns: Which of its columns are used.
        separator: What separates several labels in one cell.
        bad_rows: What a person wants.

    Raises:
        DataError: There are such rows and stopping is wanted, or there are no others.
    """
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
