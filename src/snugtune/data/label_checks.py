"""What can be wrong with labels that could all be read."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from snugtune.data.checks import Doubt
from snugtune.data.columns import Columns
from snugtune.data.label_cells import parts_of, type_of

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from numpy.typing import NDArray

_MOST_SPELLINGS = 10_000
_STRONG_SHARE = 0.9
_QUOTES = "\"'`“”‘’«»"
_NO_VALUE = {"", "na", "n/a", "nan", "null", "none", "nil", "undefined", "#n/a", "-", "?", "inf", "-inf"}
_AMOUNT = re.compile(r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"-?\d+", re.ASCII)


def spellings(dataset: Dataset, columns: Columns, *, separator: str | None) -> Counter[str]:
    """The cells of a column of single labels as they are written, with counts; empty for other columns."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = type_of(dataset, columns.labels[0])
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if len(columns.labels) > 1 or separator is not None or not texts:
        return Counter()
    found = Counter[str]()
    for part in parts_of(dataset, columns.labels[0]):
        for item in pc.value_counts(part.drop_null()).to_pylist():
            found[item["values"]] += item["counts"]
        if len(found) > _MOST_SPELLINGS:
            return Counter()
    return found


def repaired_labels(written: Counter[str], names: Iterable[str]) -> Counter[str]:
    """What was changed in label cells so that they became class names, and how often.

    Args:
        written: From `spellings`.
        names: The classes.
    """
    repaired, known = Counter[str](), set(names)
    for cell, count in written.items():
        if cell.strip() != cell and cell.strip():
            repaired["spaces around labels removed"] += count
        if cell.strip() and cell.strip() not in known:
            repaired["whole numbers with a point read without it (1.0 as 1)"] += count
    return repaired


def doubtful_names(names: Iterable[str], written: Counter[str]) -> Iterator[Doubt]:
    """Class names that are probably the same, or none.

    Args:
        names: The classes.
        written: From `spellings`.
    """
    names = list(names)
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[_bare(name)].append(name)
    for bare, same in alike.items():
        if len(same) > 1:
            cells = sorted(cell for cell in written if _bare(cell) == bare) or same
            yield Doubt(
                what="labels that differ only in case, space, quotes or invisible characters: "
                + _shown(cells),
                why=f"they are {len(same)} different classes",
                do="write them alike, if they mean the same",
            )
    numbers: dict[int, list[str]] = defaultdict(list)
    for name in filter(_WHOLE.fullmatch, names):
        if len(name) < 30:
            numbers[int(name)].append(name)
    for same in numbers.values():
        if len(same) > 1:
            yield Doubt(
                what=f"labels that differ only in zeros in front: {_shown(same)}",
                why=f"they are {len(same)} different classes: a code is not a number",
                do="write them alike, if they mean the same",
            )
    yield from _nearly_amounts(names)
    yield from _truth_and_numbers(names)
    nothing = [name for name in names if name.strip().lower() in _NO_VALUE]
    if nothing:
        yield Doubt(
            what=f"the label {_shown(nothing)} is learnt like any other",
            why="other programs write this where there is no label",
            do="empty these cells, if they mean that",
        )
    yield from _negatives(names)


def _truth_and_numbers(names: list[str]) -> Iterator[Doubt]:
    truth = [name for name in names if name.lower() in ("true", "false")]
    numbers = [name for name in names if name in ("0", "1")]
    if truth and numbers:
        yield Doubt(
            what=f"labels that may mean the same: {_shown(truth + numbers)}",
            why=f"they are {len(truth) + len(numbers)} different classes",
            do="write them alike, if they mean the same",
        )


def _nearly_amounts(names: list[str]) -> Iterator[Doubt]:
    """Numbers that are not all whole, and a few labels that are no numbers and make classes of all."""
    amounts = [name for name in names if _AMOUNT.fullmatch(name)]
    others = [name for name in names if not (_AMOUNT.fullmatch(name) or _WHOLE.fullmatch(name))]
    if others and len(amounts) > len(others):
        yield Doubt(
            what=f"the labels are numbers such as {amounts[0]!r}, except {_shown(others)}",
            why=f"so each of the {len(names)} different ones is learnt as a class of its own",
            do="correct or empty these cells, if the numbers are amounts; then they are learnt as such",
        )


def _negatives(names: list[str]) -> Iterator[Doubt]:
    whole = [name for name in names if _WHOLE.fullmatch(name) and len(name) < 30]
    below = [name for name in whole if name.startswith("-")]
    if (
        len(below) == 1
        and len(whole) == len(names)
        and (len(names) < 3 or int(below[0]) < -1 or "1" in names)
    ):
        symmetric = set(names) == {"-1", "0", "1"} or set(names) == {"-1", "1"}
        yield Doubt(
            what=f"the label {below[0]} is learnt as a class of its own",
            why="-1 and -100 often mark rows without a label"
            + (", though it may as well mean negative" if symmetric else ""),
            do="empty these cells, if they mean that",
        )


def uneven_classes(names: tuple[str, ...], counts: NDArray[np.int64]) -> Iterator[Doubt]:
    """Classes with too few rows, and one that has nearly all.

    Args:
        names: The classes.
        counts: Rows of each, [classes].
    """
    total, largest = int(counts.sum()), int(counts.argmax())
    single = [name for name, count in zip(names, counts, strict=True) if count == 1]
    if single:
        many = len(single) > 1
        yield Doubt(
            what=f"the {'classes' if many else 'class'} {_shown(single)} {'have' if many else 'has'} one row"
            + (" each" if many else ""),
            why="a row that is learnt from is not measured on",
            do="add rows, or join such classes with others",
        )
    share = counts[largest] / max(total, 1)
    if share >= _STRONG_SHARE:
        yield Doubt(
            what=f"{share:.1%} of the rows have the label {names[largest]!r}",
            why=f"always answering {names[largest]!r} would have an accuracy of {share:.1%}",
            do="look at macro_f1 (evaluation.metric=macro_f1), and think of training.class_weights=balanced",
        )


def _bare(name: str) -> str:
    """A name without case, space, quotes and invisible characters."""
    letters = unicodedata.normalize("NFKC", name).casefold()
    bare = "".join(
        sign
        for sign in letters
        if not sign.isspace() and sign not in _QUOTES and unicodedata.category(sign) not in ("Cf", "Cc")
    )
    return bare or name


def _shown(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    # `ascii` for what cannot be seen.
    words = [repr(name) if name.isprintable() else ascii(name) for name in names[:most]]
    return ", ".join(words) + (f" and {len(names) - most} more" if len(names) > most else "")
