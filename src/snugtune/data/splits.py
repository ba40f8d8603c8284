"""Which rows are set aside to measure the model, the same ones for the same arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from snugtune.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def split_rows(
    encoded_labels: NDArray[Any] | None, *, rows: int, fraction: float, seed: int, kind: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide rows into training and validation; classes keep their shares where labels are single.

    A class keeps at least one row in training, so a class of one row is not measured.

    Args:
        encoded_labels: Class numbers, [rows]; read for single-label only.
        rows: How many rows there are.
        fraction: Share of the rows for validation, between 0 and 1.
        seed: Start of the random numbers.
        kind: "single-label", or another kind, which is divided at random.

    Returns:
        The row numbers of training and of validation, each in ascending order.

    Raises:
        DataError: There are too few rows to set one aside.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    if kind == "single-label" and encoded_labels is not None:
        groups = [np.flatnonzero(encoded_labels == label) for label in np.unique(encoded_labels)]
    else:
        groups = [np.arange(rows)]
    takes = _shares(np.array([len(group) for group in groups], dtype=np.int64), fraction)
    if takes.sum() == 0:
        raise DataError(
            f"{rows} rows are too few to set some aside for validation",
            why=f"each of {len(groups)} classes needs one row to learn from, and one more row measures",
            do="add rows, or give validation data of its own; if the labels are numbers to be predicted, set "
            "data.label_kind to regression",
        )
    chosen = [random.permutation(group)[:take] for group, take in zip(groups, takes, strict=True)]
    validation = np.sort(np.concatenate(chosen))
    return np.setdiff1d(np.arange(rows), validation, assume_unique=True), validation


def _shares(sizes: NDArray[np.int64], fraction: float) -> NDArray[np.int64]:
    """How many rows of each group are set aside: the largest remainders get what rounding down left over."""
    import numpy as np

    wanted = np.minimum(sizes * fraction, np.maximum(sizes - 1, 0))
    takes = np.floor(wanted).astype(np.int64)
    total = max(round(float(sizes.sum() * fraction)), 1)
    for group in np.argsort(takes - wanted, kind="stable"):
        if takes.sum() >= total:
            break
        takes[group] += takes[group] < sizes[group] - 1
    return cast("NDArray[np.int64]", takes)
