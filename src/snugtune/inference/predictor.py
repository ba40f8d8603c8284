"""A finished model that reads a table of any size: a window of rows after another, in bounded passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch

from snugtune.data.columns import Columns
from snugtune.errors import HardwareError
from snugtune.inference.runs import FinishedRun
from snugtune.step import Choices, Hyperparameters, Precision, Step
from snugtune.tasks.pretrained import load_tokenizer
from snugtune.tasks.sequence_classification import build_task
from snugtune.tasks.tokens import encode_texts
from snugtune.units import show_count

# Rows that are tokenised, sorted by length and kept in memory together. More of them pad less.
WINDOW_ROWS = 4096

# A CPU gains nothing from large passes, and loses its caches: with MiniLM on one core, 143 texts of up to 45
# tokens in a second with 1,024 positions in a pass, 112 with 4,096 (docs/log.md).
_CPU_POSITIONS = 1024


@dataclass(frozen=True, kw_only=True)
class Window:
    """What the model said to some rows that follow each other.

    Args:
        start: Number of the first row, from 0.
        logits: [rows, classes], in the order of the table.
        without_text: Rows with a text that is missing or empty.
        cut_off: Rows that are longer than the model takes.
    """

    start: int
    logits: torch.Tensor
    without_text: int
    cut_off: int


class Predictor:
    """The model of a finished run on a device.

    Args:
        run: The run.
        device: Where it computes.
        precision: In which precision.
        say: Takes a message for people.

    Raises:
        ModelError: The model cannot be loaded.
        HardwareError: It does not fit the card.
    """

    def __init__(
        self, run: FinishedRun, *, device: torch.device, precision: Precision, say: Callable[[str], None]
    ) -> None:
        self.run, self.say = run, say
        self._tokenizer = load_tokenizer(run.config.model)
        task = build_task(run.config, run.labels, self._tokenizer, run.max_length, None, new_head=False)
        try:
            self.step = Step(task, Choices(precision=precision), Hyperparameters(), device=device)
        except torch.OutOfMemoryError as error:
            raise _too_small(error) from None
        settings = run.config.training
        rows = ceil(settings.batch_size / (settings.passes if isinstance(settings.passes, int) else 1))
        # A pass of the training had up to so many positions and fitted, and keeps less without gradients.
        self._positions = rows * run.max_length
        if device.type == "cpu":
            self._positions = min(self._positions, _CPU_POSITIONS)

    def windows(self, table: Any, columns: Columns, *, on_rows: Callable[[int], None]) -> Iterator[Window]:
        """Read a table.

        Args:
            table: A `datasets.Dataset`; what is in memory at a time is a window.
            columns: Which of its columns are read.
            on_rows: Called after each pass with the rows done.

        Raises:
            HardwareError: A single row does not fit the card.
        """
        names = [columns.text, *([columns.text_pair] if columns.text_pair else [])]
        texts_only = table.select_columns(names)
        for start in range(0, len(table), WINDOW_ROWS):
            cells = texts_only[start : start + WINDOW_ROWS]
            texts = [[text or "" for text in cells[name]] for name in names]
            encoded = encode_texts(texts, self._tokenizer, limit=self.run.max_length)
            cut = encoded.pop("cut")
            yield Window(
                start=start,
                logits=self._read(encoded, partial(_add, on_rows, start)),
                without_text=sum(not all(text.strip() for text in row) for row in zip(*texts, strict=True)),
                cut_off=int(np.sum(cut)),
            )

    def _read(self, encoded: dict[str, Any], on_rows: Callable[[int], None]) -> torch.Tensor:
        """The logits of tokenised rows, [rows, classes], in passes of rows of like length."""
        lengths = np.maximum(encoded.pop("length"), 1)
        waiting = np.argsort(-lengths, kind="stable")
        logits: torch.Tensor | None = None
        done = 0
        while len(waiting):
            longest = int(lengths[waiting[0]])
            rows = waiting[: max(1, self._positions // longest)]
            found = self._pass([self._row(encoded, row) for row in rows.tolist()])
            if found is None:
                self._positions = self._halved(len(rows)) * longest
                continue
            if logits is None:
                logits = torch.empty(len(lengths), found.shape[-1])
            logits[torch.from_numpy(rows)] = found
            waiting, done = waiting[len(rows) :], done + len(rows)
            on_rows(done)
        return torch.empty(0, 1) if logits is None else logits

    def _row(self, encoded: dict[str, Any], row: int) -> dict[str, Any]:
        # Some tokenizers make nothing of an empty text, but a model needs something to look at.
        nothing = {"input_ids": self._tokenizer.pad_token_id}
        return {name: values[row] or [nothing.get(name, 0)] for name, values in encoded.items()}

    def _pass(self, rows: list[dict[str, Any]]) -> torch.Tensor | None:
        """The logits of a pass; None if it does not fit the card."""
        try:
            return self.step.evaluate(self.step.task.collate(rows))["logits"]
        except torch.OutOfMemoryError as error:
            if len(rows) == 1:
                raise _too_small(error) from None
            return None

    def _halved(self, rows: int) -> int:
        if self.step.device.type == "cuda":
            torch.cuda.empty_cache()
        half = rows // 2
        self.say(f"memory    {show_count(rows, 'row')} in a pass did not fit the card: on with {half:,}")
        return half


def _add(on_rows: Callable[[int], None], before: int, rows: int) -> None:
    on_rows(before + rows)


def _too_small(error: torch.OutOfMemoryError) -> HardwareError:
    return HardwareError(
        "the card ran out of memory",
        why=str(error).splitlines()[0],
        do="end other programs that use the card; or set CUDA_VISIBLE_DEVICES=-1 to compute on the CPU",
    )
