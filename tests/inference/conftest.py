"""Finished runs of each kind of labels, trained once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import snugtune
from inference.samples import MAX_LENGTH, write_csv

Ask = Callable[[str], Path]


def _rows(kind: str) -> tuple[list[str], list[list[object]], dict[str, Any]]:
    """Columns and rows of training data, and what else training needs."""
    rows: list[list[object]] = []
    for number in range(40):
        liked, film = number % 2, int(number % 3 > 0)
        text = f"the {'good' if liked else 'bad'} {'film' if film else 'book'}"
        rows.append(
            {
                "single": [text, "好评" if liked else "差评, no"],
                "several": [text, liked, film],
                "tags": [text, ";".join(["liked"] * liked + ["film"] * film)],
                "number": [text, liked + film / 4],
                "pair": [text, f"it was {'fun' if film else 'awful'}", liked],
            }[kind]
        )
    names, more = {
        "single": (["text", "label"], {}),
        "several": (["text", "liked", "film"], {"label_column": ["liked", "film"]}),
        "tags": (["text", "label"], {"set": {"data.label_separator": ";"}}),
        "number": (["text", "label"], {}),
        "pair": (["sentence1", "sentence2", "label"], {}),
    }[kind]
    return names, rows, more


@pytest.fixture(scope="session")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """A function that gives the folder of a finished run: single, several, tags, number or pair."""

    @cache
    def train(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        names, rows, more = _rows(kind)
        result = snugtune.train(
            model=tiny_model,
            data=write_csv(folder / "data.csv", names, rows),
            epochs=1,
            batch_size=8,
            learning_rate=1e-2,
            max_length=MAX_LENGTH,
            output=folder / "run",
            quiet=True,
            **more,
        )
        return result.folder

    return train
