"""Attention inside each row of a batch whose tokens lie one after another, without padding between them.

On a card, PyTorch's memory-efficient kernel takes the borders of the rows, so nothing is computed for
padding. It does without tensor cores and is there for every card since compute capability 5.0. On a CPU,
which has no such kernel, rows of like length go through attention together, padded to the longest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from snugtune.data.cutting import cut_passes

# query, key, value, layout, dropout, scaling -> answers, as `attend`.
Way = Callable[..., torch.Tensor]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """Rows that go through attention together, padded to the longest of them.

    Args:
        rows: How many they are.
        longest: Tokens of the longest.
        start: Where their tokens begin among all tokens.
        stop: Where they end.
        places: For each place, padding included, the token that stands there, counted from `start`;
            [rows * longest]. Padding repeats a token of its row. None where all rows are equally long.
        tokens: For each token its place, [stop - start]; None as above.
        mask: Which places are tokens, [rows, 1, 1, longest]; None as above.
    """

    rows: int
    longest: int
    start: int
    stop: int
    places: torch.Tensor | None
    tokens: torch.Tensor | None
    mask: torch.Tensor | None


class Layout:
    """Where the tokens of a batch are.

    Args:
        mask: Its attention mask on the CPU, [rows, places].
        device: Where the tokens are.
        price_tokens: What one more group of rows costs, in places that could be computed in its time.
    """

    def __init__(self, mask: torch.Tensor, *, device: torch.device, price_tokens: int) -> None:
        present = mask.numpy().astype(bool)
        self.shape: tuple[int, int] = present.shape
        self.device, self.price_tokens = device, price_tokens
        self.lengths = present.sum(axis=1)
        self.longest = int(self.lengths.max())
        self.tokens = int(self.lengths.sum())
        # The places of all tokens in the padded batch, [tokens].
        self.positions = self._move(torch.from_numpy(np.flatnonzero(present.reshape(-1))))

    @cached_property
    def borders(self) -> torch.Tensor:
        """Where each row begins among the tokens, and where the last ends, [rows + 1], int32."""
        return self._move(torch.from_numpy(self._ends().astype(np.int32)))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The rows, in groups that share the places of attention."""
        rows = np.arange(len(self.lengths))
        is_sorted = bool((np.diff(self.lengths) <= 0).all())
        parts = (
            cut_passes(rows, self.lengths, passes=None, price_tokens=self.price_tokens)
            if is_sorted
            else [rows]
        )
        ends = self._ends()
        return tuple(
            self._group(self.lengths[part], int(ends[part[0]]), int(ends[part[-1] + 1])) for part in parts
        )

    def _ends(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def _group(self, lengths: np.ndarray, start: int, stop: int) -> Group:
        rows, longest = len(lengths), int(lengths.max())
        if (lengths == longest).all():
            return Group(rows, longest, start, stop, None, None, None)
        first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        place = np.arange(longest)
        places = first[:, None] + np.minimum(place, lengths[:, None] - 1)
        is_token = place < lengths[:, None]
        return Group(
            rows,
            longest,
            start,
            stop,
            self._move(torch.from_numpy(places.reshape(-1))),
            self._move(torch.from_numpy(np.flatnonzero(is_token))),
            self._move(torch.from_numpy(is_token)[:, None, None, :]),
        )

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    *,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Attention inside each row: three times [1, heads, tokens, size] -> [1, tokens, heads, size]."""
    alike = query.dtype == key.dtype == value.dtype
    if alike and _has_kernel(query.device, query.dtype, query.shape[1], query.shape[3]):
        return _by_kernel(query, key, value, layout, dropout, scaling)
    return _by_groups(query, key, value, layout, dropout, scaling)


def _by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    # The public functions give this kernel no borders, or only through nested tensors, whose overhead on the
    # host is larger than what is saved.
    answers: torch.Tensor = torch.ops.aten._efficient_attention_forward(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        bias=None,
        cu_seqlens_q=layout.borders,
        cu_seqlens_k=layout.borders,
        max_seqlen_q=layout.longest,
        max_seqlen_k=layout.longest,
        dropout_p=dropout,
        custom_mask_type=0,
        compute_log_sumexp=torch.is_grad_enabled() and query.requires_grad,
        scale=scaling,
    )[0]
    return answers


@lru_cache
def _has_kernel(device: torch.device, dtype: torch.dtype, heads: int, size: int) -> bool:
    """Whether PyTorch's kernel with borders is here, and right: tried once.

    It is not part of PyTorch's public interface, and a build may lack it, or code for the card.
    """
    if device.type != "cuda":
        return False
    try:
        right = _is_right(_by_kernel, device, dtype, heads, size)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        _log.info("attention goes by groups of rows: the kernel with borders is not here (%s)", error)
        return False
    if not right:
        _log.warning("attention goes by groups of rows: the kernel with borders gives other answers")
    return right


def _is_right(way: Way, device: torch.device, dtype: torch.dtype, heads: int, size: int) -> bool:
    """Whether a way of attention is about as near to the exact answers and gradients as the groups are.

    Each may differ from fp64 by its own rounding, so twice the error of the groups is allowed, and one unit
    of the last place of the largest number.
    """
    mask = torch.arange(5) < torch.tensor([[5], [3], [1]])
    numbers = torch.linspace(-1, 1, 3 * heads * int(mask.sum()) * size, dtype=torch.float64).sin()
    tensors = numbers.view(3, 1, heads, -1, size).to(dtype)
    exact = _answer_and_gradients(_by_groups, tensors.double(), torch.device("cpu"), mask)
    groups = _answer_and_gradients(_by_groups, tensors, device, mask)
    found = _answer_and_gradients(way, tensors, device, mask)
    return all(
        float((one - right).abs().max())
        <= 2 * float((other - right).abs().max()) + torch.finfo(dtype).eps * float(right.abs().max())
        for one, other, right in zip(found, groups, exact, strict=True)
    )


def _answer_and_gradients(
    way: Way, tensors: torch.Tensor, device: torch.device, mask: torch.Tensor
) -> list[torch.Tensor]:
    layout = Layout(mask, device=device, price_tokens=0)
    # As in the layers: [1, tokens, heads, size] in memory.
    leaves = [part.to(device).transpose(1, 2).contiguous().requires_grad_() for part in tensors]
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        answer = way(*(leaf.transpose(1, 2) for leaf in leaves), layout, 0.0, None)
        weights = torch.linspace(-1, 1, answer.numel(), dtype=torch.float64).view_as(answer)
        gradients = torch.autograd.grad(answer, leaves, weights.to(answer))
    return [tensor.detach().double().cpu() for tensor in (answer, *gradients)]


# PyTorch's own gradient of index_select adds atomically, which is slow in half precision on old cards. Here
# every place is taken at most once, or its gradient is zero, so a copy does.


class Take(torch.autograd.Function):
    """Some rows of a tensor, each at most once."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(numbers)
        ctx.rows = source.shape[0]
        return source.index_select(0, numbers)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (numbers,) = ctx.saved_tensors
        whole = gradient.new_zeros(ctx.rows, *gradient.shape[1:])
        return whole.index_copy_(0, numbers, gradient), None


class _Place(torch.autograd.Function):
    """Tokens at their places; padding repeats a token, and what becomes of it is never used."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        return source.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        return gradient.index_select(0, tokens), None, None


def _by_groups(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    heads = query.shape[1:]
    place: Any = _Place.apply
    take: Any = Take.apply
    parts = []
    for group in layout.groups:

        def placed(tensor: torch.Tensor, group: Group = group) -> torch.Tensor:
            tokens = tensor[group.start : group.stop]
            if group.places is not None:
                tokens = place(tokens, group.places, group.tokens)
            return tokens.view(group.rows, group.longest, *heads).transpose(1, 2)

        answers = nn.functional.scaled_dot_product_attention(
            placed(query), placed(key), placed(value), attn_mask=group.mask, dropout_p=dropout, scale=scaling
        )
        answers = answers.transpose(1, 2).reshape(group.rows * group.longest, *heads)
        parts.append(answers if group.tokens is None else take(answers, group.tokens))
    return torch.cat(parts).unsqueeze(0)
