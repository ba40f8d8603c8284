"""Which columns of a table mean text and label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from snugtune.errors import DataError, UsageError

_TEXTS = (
    *("text", "sentence", "content", "review", "comment", "document"),
    *("文本", "内容", "评论", "句子"),
)
_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
_LABELS = (
    *("label", "labels", "class", "category", "target", "score", "sentiment"),
    *("标签", "类别", "情感"),
)
_USUAL = {"text": _TEXTS, "labels": _LABELS}
USUAL_NAMES = frozenset({*_TEXTS, *_LABELS, *(name for pair in _PAIRS for name in pair)})
_FLAGS = {
    "text": "--text-column (data.text_column)",
    "text_pair": "--text-pair-column (data.text_pair_column)",
    "labels": "--label-column (data.label_column)",
}
_REPEATED = re.compile(r"(.*) \(column (\d+)\)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a table are used."""

    text: str
    text_pair: str | None
    labels: tuple[str, ...]

    @property
    def texts(self) -> list[str]:
        """The column of the text, and that of the second text of a pair."""
        return [self.text, self.text_pair] if self.text_pair else [self.text]


def find_columns(
    names: Sequence[str],
    *,
    text: str | None,
    text_pair: str | None,
    labels: Sequence[str] | None,
    where: str,
) -> Columns:
    """Decide which columns hold texts and labels: those asked for, otherwise the usual names.

    Args:
        names: The columns that are there.
        text: Column of the text, if named.
        text_pair: Column of the second text, if named.
        labels: Columns of the label, if named.
        where: The table, for messages.

    Raises:
        DataError: A column that is needed is there twice.
        UsageError: A named column is not there, one is used twice, or the usual names do not decide.
    """
    asked: dict[str, list[str | None]] = {
        "text": [text],
        "text_pair": [text_pair],
        "labels": [*(labels or [])],
    }
    for role, wanted in asked.items():
        for name in wanted:
            if name is not None and name not in names:
                _refuse_repeated(names, {name}, where)
                raise no_column(name, names, role, where)
    taken = {text, text_pair, *(labels or [])}
    if text is None:
        _refuse_repeated(names, _TEXTS, where)
    if not labels:
        _refuse_repeated(names, _LABELS, where)
    free = {name.lower(): name for name in names if name not in taken}
    if not labels and (found := next((free[name] for name in _LABELS if name in free), None)):
        labels = [found]
        del free[found.lower()]
    if text is None:
        text, usual_pair = _usual_texts(free)
        text_pair = text_pair or usual_pair
    if len(names) == 2 and text_pair is None:  # one is known, so the other is the other
        if text is None and labels:
            text = next((name for name in names if name not in labels), None)
        elif text is not None and not labels:
            labels = [name for name in names if name != text]
    if text is None or not labels:
        role = "labels" if text is not None else "text"
        raise UsageError(
            f"{where}: which column holds the {role.removesuffix('s')} is not clear",
            why=f"its columns are {listed(names)}; none has a usual name ({listed(_USUAL[role])})",
            do=f"name it with {_FLAGS[role]}",
        )
    used = [text, *([text_pair] if text_pair else []), *labels]
    if len(set(used)) < len(used):
        raise UsageError(
            f"{where}: a column is used twice: {listed(used)}",
            why="text, second text and labels are different columns",
            do=f"name others with {', '.join(_FLAGS.values())}",
        )
    return Columns(text=text, text_pair=text_pair, labels=tuple(labels))


def _usual_texts(free: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The text column by its usual name, or the two of a pair."""
    pair = next((pair for pair in _PAIRS if free.keys() >= set(pair)), None)
    single = next((free[name] for name in _TEXTS if name in free and name not in (pair or ())), None)
    if single is None and pair is not None:
        return free[pair[0]], free[pair[1]]
    return single, None


def distinct_names(names: Sequence[str]) -> list[str]:
    """Names of columns, with the number of the column behind those that several columns have."""
    return [
        f"{name} (column {number})" if names.count(name) > 1 else name
        for number, name in enumerate(names, start=1)
    ]


def _refuse_repeated(names: Sequence[str], wanted: Iterable[str], where: str) -> None:
    """Stop where a wanted name belongs to several columns."""
    lower = {name.lower() for name in wanted}
    found = [match for name in names if (match := _REPEATED.fullmatch(name)) and match[1].lower() in lower]
    if found:
        same = [match for match in found if match[1] == found[0][1]]
        numbers = " and ".join(match[2] for match in same)
        raise DataError(
            f"{where} has several columns named {found[0][1]!r}: columns {numbers}",
            why="a column is chosen by its name",
            do=f"rename them in the first line, or name one of them as {found[0][0]!r}",
        )


def no_column(name: str, names: Sequence[str], role: str, where: str) -> UsageError:
    """The error for a column that is not there.

    Args:
        name: The column.
        names: The columns that are there.
        role: What it is for: "text", "text_pair" or "labels".
        where: The table, for messages.
    """
    lower = {known.lower(): known for known in names}
    near = [lower[found] for found in get_close_matches(name.lower(), lower, n=1)]
    return UsageError(
        f"{where} has no column {name!r}",
        why=f"its columns are {listed(names)}",
        do=(f"did you mean {near[0]!r}? " if near else "") + f"name one of them with {_FLAGS[role]}",
    )


def listed(names: Iterable[str], limit: int = 12) -> str:
    """Names in a row, the first few of many."""
    names = list(names)
    return ", ".join(map(str, names[:limit])) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )
