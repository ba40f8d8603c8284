"""Only the check of the data of a run: what `check-data` answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from snugtune.data.checking import CheckedData, Settings, check_data, count_labels, show_finding
from snugtune.data.checks import Finding
from snugtune.data.encodings import show_encoding
from snugtune.data.reading import DELIMITERS, SHOWN
from snugtune.data.splits import split_rows
from snugtune.data.writers import standard_output
from snugtune.errors import DataError, UsageError

_SHOWN_LABELS = 20


@dataclass(frozen=True, kw_only=True)
class DataCheck:
    """What a check of data found.

    Args:
        rows: Rows of the training data that there are.
        kept: Those that can be used.
        repaired: Places that were changed so that they could be used.
        refused: Rows that cannot be used.
        labels: Rows of each class; empty for numbers, or where the check did not come so far.
        encoding: Of a text file.
        delimiter: Of a file of cells.
        needs_validation: The rows can be learnt from, but are too few to set some aside: a run starts only
            where it is given validation data of its own.
        findings: What a person should know.
    """

    rows: int
    kept: int
    repaired: int
    refused: int
    labels: dict[str, int]
    encoding: str | None
    delimiter: str | None
    needs_validation: bool
    findings: list[Finding]

    @property
    def stops(self) -> bool:
        """Whether a run would stop at this data."""
        return any(finding.stops for finding in self.findings)

    def print(self, *, as_json: bool) -> None:
        """Print it.

        Args:
            as_json: One JSON object in the place of sentences.
        """
        with standard_output() as out:
            if as_json:
                out.write(json.dumps(self.as_dict(), ensure_ascii=False) + "\n")
            else:
                out.writelines(f"{line}\n" for line in self.lines())

    def lines(self) -> list[str]:
        """The same in sentences."""
        form = [show_encoding(self.encoding)] if self.encoding else []
        form += [f"cells separated by {DELIMITERS[self.delimiter]}"] if self.delimiter else []
        said = [f"read      {', '.join(form)}"] if form else []
        said.append(
            f"rows      {self.rows:,} read, {self.kept:,} kept, {self.refused:,} refused, "
            f"{self.repaired:,} places repaired"
        )
        if self.labels:
            shown = [f"{name} {count:,}" for name, count in list(self.labels.items())[:_SHOWN_LABELS]]
            more = len(self.labels) - len(shown)
            said.append(f"labels    {', '.join(shown)}" + (f" and {more} more" if more else ""))
        said += [
            f"{'stops' if finding.stops else 'finding':<9} {show_finding(finding)}"
            for finding in self.findings
        ]
        start = "a run would start" + (", given --validation" if self.needs_validation else "")
        said.append("a run would stop" if self.stops else start)
        return said

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        values = asdict(self)
        del values["needs_validation"]  # a finding says it
        for finding in values["findings"]:
            del finding["stops"]
        return values


def look_at(settings: Settings) -> DataCheck:
    """Check the data of a run, and nothing else.

    Args:
        settings: What a person wants.

    Raises:
        UsageError: A column or an encoding that was named is not there.
        HubError: The hub does not answer.
    """
    data = CheckedData()
    fatal: list[Finding] = []
    try:
        check_data(settings, data, tolerant=True)
    except DataError as error:
        fatal = [Finding(what=error.what, why=error.why, do=error.do, line=_line_in(error), stops=True)]
    except UsageError as error:
        if settings.text_column or settings.label_column or "which column" not in error.what:
            raise
        fatal = [Finding(what=error.what, why=error.why, do=error.do, stops=True)]
    few = [*_too_few(data, settings)]
    table = data.tables.get("train")
    none: dict[str, Any] = {"rows": 0, "kept": 0, "refused": 0, "encoding": None, "delimiter": None}
    facts = table.facts() if table else none
    labels = _labels(data)
    return DataCheck(
        rows=facts["rows"],
        kept=facts["kept"],
        repaired=sum(table.repaired.values()) if table else 0,
        refused=facts["refused"],
        labels=labels,
        encoding=facts["encoding"],
        delimiter=facts["delimiter"],
        needs_validation=bool(few),
        findings=[*fatal, *few, *_report(data, settings), *data.findings],
    )


def _too_few(data: CheckedData, settings: Settings) -> Iterator[Finding]:
    """Whether no rows can be set aside: no fault of the file, as a run may be given others to measure on."""
    if "train" not in data.digests or "validation" in data.tables:
        return
    try:
        split_rows(
            data.answers["train"],
            rows=len(data.tables["train"].table),
            fraction=settings.validation_fraction,
            seed=0,
            kind=data.labels.kind,
            digests=data.digests["train"],
        )
    except DataError as error:
        yield Finding(what=error.what, why=error.why, do=error.do)


def _labels(data: CheckedData) -> dict[str, int]:
    answers = data.answers.get("train")
    if answers is None or not data.labels.names:
        return {}
    return dict(zip(data.labels.names, count_labels(answers, data.labels), strict=True))


def _line_in(error: DataError) -> int | None:
    found = re.search(r"\bline (\d+)", f"{error.what} {error.why}")
    return int(found[1]) if found else None


def _report(data: CheckedData, settings: Settings) -> Iterator[Finding]:
    """What was refused and repaired, as findings."""
    stops = settings.bad_rows == "stop"
    do = (
        "correct it, or leave such rows out with data.bad_rows=skip" if stops else "nothing, if that is meant"
    )
    for table in data.tables.values():
        for row in table.refused[:SHOWN]:
            place = "a row" if row.line is None else f"line {row.line},"
            what = f"{table.reading.source}, {place} {'cannot be used' if stops else 'is left out'}"
            yield Finding(what=what, why=row.why, do=do, line=row.line, stops=stops)
        if table.refused_rows > min(len(table.refused), SHOWN):
            what = f"{table.reading.source}: {table.refused_rows:,} rows in all cannot be used"
            yield Finding(what=what, why="only the first are shown", do=do, stops=stops)
        for how, count in table.repaired.items():
            yield Finding(
                what=f"{table.reading.source}: {how}: {count:,}",
                why="the cells can be used only so",
                do="nothing, if that is meant",
            )
