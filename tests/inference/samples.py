"""Texts to ask models, and CSV files for them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

MAX_LENGTH = 16

# Of many lengths, some beyond MAX_LENGTH, and with everything that CSV has to quote.
TEXTS = [
    "the film was "
    + "very " * (row * 7 % 23)
    + ["good", "bad", "great, fun", 'a "boring" book', "很好看\n的电影"][row % 5]
    for row in range(23)
]


def write_csv(path: Path, names: Sequence[str], rows: Sequence[Sequence[object]], mark: str = "") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(mark)
        csv.writer(file).writerows([names, *rows])
    return path


def read_csv(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))
