"""What can be wrong with texts that could all be read. Whole columns at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snugtune.data.columns import Columns
from snugtune.data.label_cells import holds_lists, missing_labels, parts_of
from snugtune.units import show_count

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset
    from numpy.typing import NDArray

_HUGE_CHARACTERS = 100_000


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about the data that a person should know.

    Args:
        what: What was found.
        why: Why it matters.
        do: What to do about it.
        line: The first line of the file where it is seen; None where there is none.
        stops: Whether a run would stop for it.
    """

    what: str
    why: str
    do: str
    line: int | None = None
    stops: bool = False


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A finding that knows its row, not yet its line.

    Args:
        what, why, do: As in `Finding`.
        row: The first row where it is seen, from 0; None for the whole.
    """

    what: str
    why: str
    do: str
    row: int | None = None


def missing_cells(
    dataset: Dataset, columns: Columns, *, separator: str | None, where: str
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """What rows may lack, each with a mask of the rows that do, [rows].

    Args:
        dataset: The table.
        columns: Which of its columns are used.
        separator: What separates several labels in one cell: then an empty one is an answer.
        where: The table, for messages.

    Raises:
        DataError: A column cannot hold labels.
    """
    import numpy as np

    for name in columns.texts:
        yield f"text in the column {name!r}", blank_texts(dataset, name)
    for name in columns.labels:
        what = f"label in the column {name!r}"
        if holds_lists(dataset, name):
            nothing = [np.asarray(part.is_null()) for part in parts_of(dataset, name)]
            yield what, np.concatenate([np.zeros(0, dtype=bool), *nothing])
        elif separator is None:
            yield what, missing_labels(dataset, name, where)


def blank_texts(dataset: Dataset, name: str) -> NDArray[np.bool_]:
    """Which texts of a column are missing, empty or nothing but space, [rows]."""
    import numpy as np
    import pyarrow.compute as pc

    blank = [np.zeros(0, dtype=bool)]
    for texts in parts_of(dataset, name):
        nothing = pc.or_(pc.equal(pc.binary_length(texts), 0), pc.utf8_is_space(texts))
        blank.append(nothing.fill_null(True).to_numpy(zero_copy_only=False))
    return np.concatenate(blank)


def digest_texts(dataset: Dataset, columns: Columns) -> NDArray[np.uint64]:
    """A number for the texts of each row, [rows]; the same for the same texts but for space around them.

    Of 64 bits: two different texts among ten million have the same with a chance of 3 in a million. The
    numbers hold in this process only.
    """
    import numpy as np
    import pyarrow.compute as pc

    digests = np.zeros(len(dataset), dtype=np.uint64)
    for name in columns.texts:
        done = 0
        for part in parts_of(dataset, name):
            texts = pc.utf8_trim_whitespace(part).to_pylist()
            # Python's own hash of texts: keyed, and several times as fast as any other from here.
            numbers = np.fromiter(map(hash, texts), np.int64, len(texts)).view(np.uint64)
            span = slice(done, done + len(numbers))
            digests[span] = digests[span] * np.uint64(0x9E3779B97F4A7C15) + numbers
            done += len(numbers)
    return digests


def repeated_texts(digests: NDArray[np.uint64], answers: NDArray[Any], *, kind: str) -> Iterator[Doubt]:
    """Texts that occur more than once, and those that do with different labels.

    Args:
        digests: From `digest_texts`, [rows].
        answers: The encoded labels, [rows] or [rows, classes].
        kind: The kind of the labels.
    """
    import numpy as np

    rows = rows_of_copies(digests)
    if len(rows) == 0:
        return
    same_text, differs, order = _neighbours(digests[rows], answers[rows], kind=kind)
    copies = same_text & ~differs
    count = int(copies.sum())
    if count:
        yield Doubt(
            what=f"{show_count(count, 'row')} repeat{'s' if count == 1 else ''} an earlier one",
            why="copies count more than other texts; where rows are set aside, all copies stay on one side",
            do="remove them unless they are meant",
            row=int(rows[order[copies]].min()),
        )
    if differs.any():
        texts = len(np.unique(digests[rows[order[differs]]]))
        yield Doubt(
            what=f"{show_count(texts, 'text')} {'has' if texts == 1 else 'have'} several different labels",
            why="the model cannot answer both",
            do="decide for one label",
            row=int(rows[np.maximum(order[1:], order[:-1])[differs[1:]]].min()),
        )


def rows_of_copies(digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The rows whose text occurs more than once, ascending. Where none does, this needs 9 bytes for each row.

    Args:
        digests: From `digest_texts`, [rows].
    """
    import numpy as np

    ordered = np.sort(digests)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if len(repeated) == 0:
        return np.zeros(0, dtype=np.int64)
    at_most = len(repeated) - 1
    return np.flatnonzero(repeated[np.minimum(np.searchsorted(repeated, digests), at_most)] == digests)


def _neighbours(
    digests: NDArray[np.uint64], answers: NDArray[Any], *, kind: str
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.int64]]:
    """In the order of texts and labels: which rows have the text of the one before, and not its label."""
    import numpy as np

    if kind == "regression":
        ranks = np.zeros(len(digests), dtype=np.int64)  # two amounts for one text contradict nothing
    elif answers.ndim == 2:
        ranks = np.unique(answers, axis=0, return_inverse=True)[1].reshape(-1)
    else:
        ranks = answers
    order = np.lexsort((ranks, digests))
    same = np.concatenate([[False], digests[order][1:] == digests[order][:-1]])
    differs = np.concatenate([[False], ranks[order][1:] != ranks[order][:-1]])
    return same, same & differs, order


def shared_texts(learnt: NDArray[np.uint64], measured: NDArray[np.uint64]) -> Iterator[Doubt]:
    """Texts to measure on that are also learnt from.

    Args:
        learnt: Digests of the training data, [rows].
        measured: Digests of the validation data, [rows].
    """
    import numpy as np

    both = np.flatnonzero(np.isin(measured, learnt))
    if len(both):
        yield Doubt(
            what=f"{len(both):,} of {len(measured):,} rows to measure on have a text that is learnt from",
            why="the scores will look better than the model is",
            do="remove these texts from one of the two",
            row=int(both[0]),
        )


def odd_texts(dataset: Dataset, columns: Columns) -> Iterator[Doubt]:
    """Texts of extreme length, and those that were damaged before."""
    import numpy as np
    import pyarrow.compute as pc

    for name in columns.texts:
        done, longest, longest_row = 0, 0, 0
        damaged, damaged_row = 0, 0
        for part in parts_of(dataset, name):
            lengths = pc.utf8_length(part).fill_null(0).to_numpy(zero_copy_only=False)
            if len(lengths) and lengths.max() > longest:
                longest, longest_row = int(lengths.max()), done + int(lengths.argmax())
            if _holds_damage(part):
                broken = pc.match_substring_regex(part, "\ufffd|\\x00").fill_null(False)
                if (count := broken.true_count) and not damaged:
                    damaged_row = done + int(np.argmax(broken.to_numpy(zero_copy_only=False)))
                damaged += count
            done += len(part)
        if longest > _HUGE_CHARACTERS:
            yield Doubt(
                what=f"the longest text in the column {name!r} has {longest:,} characters",
                why="an open quote can make one text of many; what is beyond the longest length is cut off",
                do="look at this row",
                row=longest_row,
            )
        if damaged:
            yield Doubt(
                what=f"{show_count(damaged, 'text')} in the column {name!r} hold signs of earlier damage",
                why="U+FFFD stands for a character that could not be read; a text has no zero bytes",
                do="export the data again, in UTF-8",
                row=damaged_row,
            )


def _holds_damage(part: pa.Array) -> bool:
    """Whether there is a sign of damage in a part: one look at all its bytes."""
    import numpy as np
    import pyarrow as pa

    _, offsets, texts = part.buffers()
    if texts is None:
        return False
    places = np.frombuffer(offsets, np.int64 if pa.types.is_large_string(part.type) else np.int32)
    start, end = int(places[part.offset]), int(places[part.offset + len(part)])
    data = texts.slice(start, end - start).to_pybytes()
    return "\ufffd".encode() in data or b"\0" in data
