"""Texts as tokens: tokenised once, kept on disk, and found there by the next run."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from snugtune.data.batching import Batch, Row
from snugtune.data.readers import quiet_datasets
from snugtune.errors import ModelError, UsageError


class TokenRows:
    """Tokenised rows with their labels, read from the table on disk without a copy.

    Args:
        table: What `tokenise` made.
        labels: The label of each row, [rows] or [rows, classes].
    """

    def __init__(self, table: Any, labels: np.ndarray) -> None:
        self.table, self.labels = table, labels
        self._columns = {name: _Lists(table.data.column(name)) for name in table.column_names}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> Row:
        row: Row = self.__getitems__([number])[0]
        return row

    def __getitems__(self, numbers: list[int]) -> TokenBatch:
        columns: dict[str, Any] = {name: column.take(numbers) for name, column in self._columns.items()}
        return TokenBatch({**columns, "labels": self.labels[numbers]})

    def __reduce__(self) -> tuple[type[TokenRows], tuple[Any, np.ndarray]]:
        return TokenRows, (self.table, self.labels)  # another process maps the file itself


class TokenBatch(Sequence[Row]):
    """Some rows, column by column: a dictionary for each row takes longer to make than to use.

    Args:
        columns: The cells of each column, one for each row.
    """

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, number: Any) -> Any:
        return {name: cells[number] for name, cells in self.columns.items()}


class _Lists:
    """A column of lists of numbers."""

    def __init__(self, column: Any) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._values = [chunk.values.to_numpy(zero_copy_only=True) for chunk in chunks]
        self._offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self._begins = np.cumsum([0, *(len(chunk) for chunk in chunks)])

    def take(self, numbers: list[int]) -> list[np.ndarray]:
        """The lists of some rows."""
        rows = np.asarray(numbers)
        chunks = self._begins.searchsorted(rows, side="right") - 1
        rows = rows - self._begins[chunks]
        offsets, values = self._offsets, self._values
        return [
            values[chunk][offsets[chunk][row] : offsets[chunk][row + 1]]
            for chunk, row in zip(chunks.tolist(), rows.tolist(), strict=True)
        ]


class Padding:
    """Rows of tokens -> one batch, padded to its longest row on the tokenizer's side.

    The tokenizer's own `pad` does the same in ten times the time, which a card would spend waiting.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._fill = {
            "input_ids": tokenizer.pad_token_id,
            "token_type_ids": tokenizer.pad_token_type_id,
        }
        self._left = tokenizer.padding_side == "left"

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """Rows as `TokenRows` gives them, or dictionaries with the same names."""
        columns = (
            rows.columns
            if isinstance(rows, TokenBatch)
            else {name: [row[name] for row in rows] for name in rows[0]}
        )
        lengths = np.fromiter(map(len, columns["input_ids"]), dtype=np.int64, count=len(rows))
        place = np.arange(lengths.max())[:: -1 if self._left else 1]
        is_token = place < lengths[:, None]
        arrays = {"attention_mask": is_token.astype(np.int64)}
        for name, cells in columns.items():
            if name == "labels":
                arrays[name] = np.asarray(cells)
                continue
            arrays[name] = np.full(is_token.shape, self._fill.get(name, 0), dtype=np.int64)
            arrays[name][is_token] = np.concatenate(cells)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def tokenise(
    table: Any, columns: Sequence[str], tokenizer: Any, *, limit: int
) -> tuple[Any, np.ndarray, float]:
    """Tokenise the texts of a table.

    Args:
        table: A `datasets.Dataset`.
        columns: The column of the text, and that of the second text for pairs.
        tokenizer: The model's tokenizer.
        limit: Longest row in tokens; what is beyond is cut off.

    Returns:
        The tokenised rows, a table on disk; the tokens of each, [rows]; the share of rows that were cut off.
    """

    def encode(cells: dict[str, list[str]]) -> dict[str, Any]:
        return encode_texts([list(map(str, cells[name])) for name in columns], tokenizer, limit=limit)

    # Two seconds of work need no bar, and a log file none at all.
    with quiet_datasets(show_bars=len(table) > 20_000 and sys.stderr.isatty()):
        rows = table.map(
            encode,
            batched=True,
            remove_columns=table.column_names,
            new_fingerprint=_fingerprint(table, columns, tokenizer, limit),
            desc="tokenising",
        )
    numbers = rows.select_columns(["length", "cut"]).with_format("numpy")[:]
    rows = rows.remove_columns(["length", "cut"])
    return rows, numbers["length"].astype(np.int64), float(numbers["cut"].mean())


def encode_texts(texts: Sequence[list[str]], tokenizer: Any, *, limit: int) -> dict[str, Any]:
    """Texts as tokens, in memory.

    Args:
        texts: The texts of all rows, and the second texts for pairs.
        tokenizer: The model's tokenizer.
        limit: Longest row in tokens; what is beyond is cut off.

    Returns:
        What the model reads, a list for each row; `length`, its tokens; `cut`, whether it was cut.
    """
    encoded = tokenizer(*texts, truncation=True, max_length=limit, return_attention_mask=False)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    # Only the fast tokenizers tell what they cut; for the others a full row counts as cut.
    cut = [bool(e.overflowing) for e in encoded.encodings] if encoded.encodings else np.equal(lengths, limit)
    return {**encoded, "length": lengths, "cut": cut}


def _fingerprint(table: Any, columns: Sequence[str], tokenizer: Any, limit: int) -> str:
    """A name for the tokenised table, so that the next run finds it again on disk."""
    if tokenizer.is_fast:
        # What the last call left behind would make a difference between the first table and the next.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        state = tokenizer.backend_tokenizer.to_str()
    else:
        settings = {name: str(value) for name, value in tokenizer.init_kwargs.items()}
        state = repr((sorted(tokenizer.get_vocab().items()), sorted(settings.items())))
    what = (
        table._fingerprint,
        list(columns),
        limit,
        type(tokenizer).__name__,
        tokenizer.model_input_names,
        tokenizer.truncation_side,
        state,
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


def check_limit(limit: int, tokenizer: Any, *, texts: int) -> None:
    """Refuse a limit that leaves no room for text.

    Args:
        limit: Longest row in tokens.
        tokenizer: The model's tokenizer.
        texts: Texts of a row: 1, or 2 for pairs.

    Raises:
        UsageError: The tokenizer's own tokens fill it.
    """
    own = tokenizer.num_special_tokens_to_add(pair=texts == 2)
    if limit < own + texts:
        raise UsageError(
            f"max_length {limit} leaves no room for text",
            why=f"the tokenizer adds {own} tokens of its own to each row",
            do=f"set data.max_length to {own + texts} or more; 128 is usual",
        )


def check_vocabulary(tables: Sequence[Any], tokenizer: Any, model_config: Any) -> None:
    """Refuse a tokenizer that makes tokens the model does not know.

    Args:
        tables: Tokenised tables.
        tokenizer: What made them.
        model_config: The model's configuration.

    Raises:
        ModelError: There are such tokens; they would end the run inside the first update.
    """
    known = getattr(model_config.get_text_config(), "vocab_size", None)
    ids = [tokens for table in tables for tokens in _chunks(table)]
    largest = max([tokenizer.pad_token_id, *(pc.max(tokens).as_py() or 0 for tokens in ids)])
    if known is not None and largest >= known:
        raise ModelError(
            f"the tokenizer does not belong to the model: it made token number {largest}",
            why=f"the model knows {known} tokens, 0 to {known - 1}",
            do="take the tokenizer's files that belong to these weights",
        )


def _chunks(table: Any) -> list[Any]:
    column = table.select_columns(["input_ids"]).with_format("arrow")[:].column("input_ids")
    return [chunk.flatten() for chunk in column.chunks]
