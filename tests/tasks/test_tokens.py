"""Tokens as batches: the same as the tokenizer's own padding, read from the table without a copy."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from transformers import AutoTokenizer

from snugtune.tasks.tokens import Padding, TokenRows, tokenise

TEXTS = [
    "the film was good",
    "a",
    "it was not very good but fun",
    "这部电影很好看",
    "i and you and we and they",
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "labels", [np.arange(5), np.linspace(0, 1, 5, dtype=np.float32), np.eye(5, 3, dtype=np.float32)]
)
def test_padding_is_that_of_the_tokenizer(tokenizer, side, labels):
    tokenizer.padding_side = side
    encoded = tokenizer(TEXTS, return_attention_mask=False)
    rows = TokenRows(Dataset.from_dict(dict(encoded)), labels).__getitems__([4, 1, 0, 3])
    batch = Padding(tokenizer)(rows)
    expected = tokenizer.pad(
        [{name: encoded[name][number] for name in encoded} for number in [4, 1, 0, 3]], return_tensors="pt"
    )
    expected["labels"] = torch.tensor(labels)[[4, 1, 0, 3]]
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        assert batch[name].dtype == value.dtype
        assert torch.equal(batch[name], value), name


@pytest.mark.parametrize("copy", [lambda rows: rows, lambda rows: pickle.loads(pickle.dumps(rows))])
def test_rows_are_found_in_a_table_of_many_parts(copy):
    parts = [[[1], [2, 3]], [[4, 5, 6]], [[], [7]]]
    table = concatenate_datasets(
        [Dataset.from_dict({"input_ids": part}) for part in parts[:2]]
        + [Dataset.from_dict({"input_ids": parts[2]}, features=None)]
    )
    rows = copy(TokenRows(table, np.arange(5)))
    assert len(rows) == 5
    assert [row["input_ids"].tolist() for row in rows] == [[1], [2, 3], [4, 5, 6], [], [7]]
    assert [int(row["labels"]) for row in rows.__getitems__([4, 0])] == [4, 0]


def test_a_tokenizer_that_cuts_the_other_end_is_not_mixed_up_with_the_cached_one(tiny_model):
    table = Dataset.from_dict({"text": ["good " * 9 + "bad"] * 3})
    rows = {}
    for side in ("right", "left"):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model, truncation_side=side)
        rows[side] = tokenise(table, ["text"], tokenizer, limit=6)[0]["input_ids"][0]
    assert rows["left"] != rows["right"]
