"""Whether a question to a finished model makes sense; asked before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from snugtune.data.reading import How
from snugtune.errors import UsageError


class AskedTable(TypedDict, total=False):
    """How a finished model finds what it reads in a table; the same names as the flags of the shell.

    text_column, text_pair_column: Columns of the texts; None takes those of the training data.
    split: Which part, where the data has several; None takes "train".
    bad_rows: "stop", or "skip" to leave out rows that cannot be used; None stops.
    encoding: Encoding of a text file; None finds out.
    header: Whether the first line of CSV and TSV names the columns; None finds out.
    """

    text_column: str | None
    text_pair_column: str | None
    split: str | None
    bad_rows: str | None
    encoding: str | None
    header: bool | None


def check_asked(
    texts: Sequence[str] | None, data: str | Path | None, *, useless: Mapping[str, object]
) -> None:
    """Refuse a question without texts or with two kinds of them, and what could have no effect.

    Args:
        texts: Texts to answer.
        data: A table to answer.
        useless: Options that only the other one has, by name.

    Raises:
        UsageError: It does not.
    """
    if (data is None) == (not texts):
        raise UsageError(
            "a model answers either data or texts",
            why="there is neither" if data is None else "both are given",
            do="give --data or --text (in Python: data or texts)",
        )
    for name, value in useless.items():
        if value is not None:
            given = "texts" if data is None else "data"
            flag = "--" + (name if name == "bad_rows" else name.removesuffix("s")).replace("_", "-")
            raise UsageError(
                f"{flag} has no effect on {given}", why="nothing would read it", do="leave it out"
            )


def asked_how(asked: AskedTable, names: Sequence[str | None]) -> How:
    """How a table is to be read, where no run file says it.

    Args:
        asked: What a person wants.
        names: Columns that are looked for.

    Raises:
        UsageError: There is no such word for bad rows.
    """
    bad_rows = asked.get("bad_rows")
    if bad_rows not in (None, "stop", "skip"):
        raise UsageError(
            f"bad_rows cannot be {bad_rows!r}",
            why="rows that cannot be read stop the reading, or are left out",
            do="give stop or skip",
        )
    return How(
        bad_rows="skip" if bad_rows == "skip" else "stop",
        encoding=asked.get("encoding"),
        header=asked.get("header"),
        names=tuple(name for name in names if name is not None),
    )
