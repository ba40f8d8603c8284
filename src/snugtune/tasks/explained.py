"""Errors inside somebody's model that say little by themselves, in words."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from snugtune.errors import ModelError

# PyTorch's own texts, of versions 1.8 to 2.13. The number and the name of the type differ between them.
_HALF_OVERFLOW = re.compile(r"cannot be converted to type (?:at|c10)::(?:Half|BFloat16) without overflow")
_MASK_TYPE = re.compile(r"attn_mask dtype to be bool|mask.*dtype.*(?:match|same).*query", re.IGNORECASE)
_MIXED_TYPES = re.compile(
    r"expected .*(?:same dtype|scalar type \w+ but found)|must have the same dtype|dtypes? .* match"
)


@contextmanager
def explained_forward(rows: int, *, half: bool) -> Iterator[None]:
    """Turn what is raised inside the forward pass of a batch into what, why and do, where that is known.

    Args:
        rows: Rows of the batch.
        half: Whether the pass computes in half precision.

    Raises:
        ModelError: The model cannot compute this batch, or not in this precision.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        known = _known(" ".join(str(error).split()), rows, half=half, place=_place(error))
        if known is None:
            raise
        raise known from error


def _known(text: str, rows: int, *, half: bool, place: str) -> ModelError | None:
    if "more than 1 value per channel" in text:
        return ModelError(
            f"BatchNorm got a pass of {rows} row",
            why="it compares rows; the last update of an epoch, its passes or processes left one alone",
            do="choose another batch_size, fewer passes or fewer processes",
        )
    if _HALF_OVERFLOW.search(text):
        return ModelError(
            f"a constant in the model is too large for half precision{place}",
            why=f"fp16 ends at 65,504, and masks are often filled with -1e9 ({text})",
            do="use torch.finfo(scores.dtype).min or -inf there, or --precision fp32",
        )
    if half and _MASK_TYPE.search(text):
        return ModelError(
            f"an attention mask has another type than what it masks{place}",
            why=f"autocast computes in half precision, and the mask is a float one ({text})",
            do="give a mask of booleans, or mask.to(query.dtype); or --precision fp32",
        )
    if half and _MIXED_TYPES.search(text):
        return ModelError(
            f"the model mixes types{place}",
            why=f"autocast gives some of its operations half precision, and others fp32 ({text})",
            do="bring both to one type there, or put that module's forward into "
            'torch.autocast("cuda", enabled=False); or --precision fp32',
        )
    return None


def _place(error: Exception) -> str:
    """The last line of somebody's own code on the way to an error: ' (model.py, line 17, in forward)'."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = tuple(
        str(module.__file__).rpartition("__init__")[0]
        for name in ("torch", "snugtune")
        if (module := sys.modules.get(name)) is not None
    )
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
