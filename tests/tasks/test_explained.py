"""What PyTorch raises inside a model, in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from snugtune.errors import ModelError
from snugtune.tasks.explained import explained_forward

TEXTS = {
    "at::Half": "value cannot be converted to type at::Half without overflow: -1e+09",
    "c10::Half": "value cannot be converted to type c10::Half without overflow",
    "c10::BFloat16": "value cannot be converted to type c10::BFloat16 without overflow: 1e+40",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_constant_that_half_precision_does_not_hold_has_one_cause_in_all_versions(text):
    """C054"""
    with (
        pytest.raises(ModelError, match="too large for half precision") as caught,
        explained_forward(4, half=True),
    ):
        raise RuntimeError(text)
    assert "torch.finfo" in caught.value.do


def test_the_line_that_holds_the_constant_is_named():
    """C054: with file and line."""
    scores = torch.zeros(2, 2, dtype=torch.float16)
    with pytest.raises(ModelError) as caught, explained_forward(4, half=True):
        scores.masked_fill(scores == 0, -1e9)  # this line
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    here = next(number for number, line in enumerate(lines, start=1) if "# this line" in line)
    assert f"{__file__}, line {here}" in caught.value.what


def test_a_float_mask_beside_half_precision_works_or_its_type_is_named():
    """C060: whichever of both this version of PyTorch does."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, mask = torch.randn(1, 4, 8), torch.zeros(4, 4)
    said = "an attention mask"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            with explained_forward(1, half=True):
                attention(x, x, x, attn_mask=mask, need_weights=False)
        except ModelError as error:
            said = error.what
    assert said.startswith("an attention mask")


@pytest.mark.parametrize(("text", "said"), [
    ("Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
     "float and query.dtype: c10::Half instead.", "attention mask has another type"),
    ("expected scalar type Half but found Float", "mixes types"),
    ("mat1 and mat2 must have the same dtype, but got Half and Float", "mixes types"),
    ("expected m1 and m2 to have the same dtype, but got: float != c10::Half", "mixes types"),
])  # fmt: skip
def test_types_that_do_not_go_together_are_explained_in_half_precision_alone(text, said):
    """C060, variants"""
    with pytest.raises(ModelError, match=said), explained_forward(1, half=True):
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match=r"dtype|scalar"), explained_forward(1, half=False):
        raise RuntimeError(text)


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), explained_forward(1, half=True):
        torch.ones(2, 3) @ torch.ones(2, 3)
