"""Whether a question to a finished model makes sense; asked before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from snugtune.errors import UsageError


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
            flag = "--" + name.removesuffix("s").replace("_", "-")
            raise UsageError(
                f"{flag} has no effect on {given}", why="nothing would read it", do="leave it out"
            )
