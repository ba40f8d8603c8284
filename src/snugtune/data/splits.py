"""Which rows are set aside to measure the model, the same ones for the same arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from snugtune.data.checks import rows_of_copies
from snugtune.errors import DataError
from snugtune.units import show_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def split_rows(
    encoded_labels: NDArray[Any] | None,
    *,
    rows: int,
    fraction: float,
    seed: int,
    kind: str,
    digests: NDArray[np.uint64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide rows into training and validation; classes keep their shares where labels are single.

    A class keeps at least one row in training, so a class of one row is not measured. Rows with the same text
    stay together: the first of them is dealt out, and the others follow it.

    Args:
        encoded_labels: Class numbers, [rows]; read for single-label only.
        rows: How many rows there are.
        fraction: Share of the rows for validation, between 0 and 1.
        seed: Start of the random numbers.
        kind: "single-label", or another kind, which is divided at random.
        digests: A number for the text of each row, [rows]; None takes all for different.

    Returns:
        The row numbers of training and of validation, each in ascending order.

    Raises:
        DataError: There are too few rows to set one aside.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    copies = np.zeros(0, dtype=np.int64) if digests is None else rows_of_copies(digests)
    texts = np.zeros(0, dtype=np.uint64) if digests is None else digests[copies]
    first = copies[np.sort(np.unique(texts, return_index=True)[1])]
    dealt = np.setdiff1d(np.arange(rows), np.setdiff1d(copies, first)) if len(copies) else np.arange(rows)
    if kind == "single-label" and encoded_labels is not None:
        groups = [dealt[encoded_labels[dealt] == label] for label in np.unique(encoded_labels[dealt])]
    else:
        groups = [dealt]
    takes = _shares(np.array([len(group) for group in groups], dtype=np.int64), fraction)
    if takes.sum() == 0:
        raise _too_few(rows, len(groups))
    chosen = [random.permutation(group)[:take] for group, take in zip(groups, takes, strict=True)]
    aside = np.zeros(rows, dtype=bool)
    aside[np.concatenate(chosen)] = True
    aside[copies] = np.isin(texts, texts[aside[copies]])
    if kind == "single-label" and encoded_labels is not None:
        # A class whose rows all repeat texts with another label must not vanish from what is learnt.
        lost = np.setdiff1d(np.unique(encoded_labels), np.unique(encoded_labels[~aside]))
        kept = np.isin(texts, texts[np.isin(encoded_labels[copies], lost)])
        aside[copies] &= ~kept
        aside &= ~np.isin(encoded_labels, lost)
    if not aside.any():
        raise _too_few(rows, len(groups))
    return np.flatnonzero(~aside), np.flatnonzero(aside)


def _too_few(rows: int, classes: int) -> DataError:
    return DataError(
        f"{show_count(rows, 'row')} {'is' if rows == 1 else 'are'} too few to set some aside for validation",
        why=f"each of {classes} classes needs one text to learn from, and one more text measures",
        do="add rows, or give validation data of its own; if the labels are numbers to be predicted, set "
        "data.label_kind to regression",
    )


def _shares(sizes: NDArray[np.int64], fraction: float) -> NDArray[np.int64]:
    """How many rows of each group are set aside: the largest remainders get what rounding down left over.

    A group of three rows or more gets one of the largest share, where that stays above none: the recall of a
    class that is not measured is unknown.
    """
    import numpy as np

    wanted = np.minimum(sizes * fraction, np.maximum(sizes - 1, 0))
    takes = np.floor(wanted).astype(np.int64)
    total = max(round(float(sizes.sum() * fraction)), 1)
    for group in np.argsort(takes - wanted, kind="stable"):
        if takes.sum() >= total:
            break
        takes[group] += takes[group] < sizes[group] - 1
    for group in np.flatnonzero((takes == 0) & (sizes >= 3)):
        largest = int(takes.argmax())
        if takes[largest] < 2:
            break
        takes[largest] -= 1
        takes[group] = 1
    return cast("NDArray[np.int64]", takes)
