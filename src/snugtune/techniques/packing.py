"""Rows without padding: the layers of an encoder see the tokens of all rows as one long row.

Everything in such a layer but attention treats each token by itself, so there padding is work for nothing.
Only around attention the tokens take their places in their rows again, in groups of rows of like length. The
result is that of padded rows, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from snugtune.data.batching import Batch, cut_passes
from snugtune.errors import ModelError
from snugtune.techniques.checkpointing import checkpointable_layers

_NAME = "snugtune_packed"
# Encoders in which only attention looks at several tokens, and positions are added before the first layer.
_ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra"})


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


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a batch are.

    Args:
        shape: Rows and places of the padded batch.
        positions: The places of all tokens in it, [tokens].
        groups: The rows, in groups for attention.
    """

    shape: tuple[int, int]
    positions: torch.Tensor
    groups: tuple[Group, ...]


def lay_out(mask: torch.Tensor, *, price_tokens: int) -> Layout:
    """Where the tokens of a batch are.

    Args:
        mask: Its attention mask on the CPU, [rows, places].
        price_tokens: What one more group costs, in places that could be computed in its time.
    """
    present = mask.numpy().astype(bool)
    lengths = present.sum(axis=1)
    rows = np.arange(len(lengths))
    is_sorted = bool((np.diff(lengths) <= 0).all())
    parts = cut_passes(rows, lengths, passes=None, price_tokens=price_tokens) if is_sorted else [rows]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    groups = [_group(lengths[part], int(ends[part[0]]), int(ends[part[-1] + 1])) for part in parts]
    positions = torch.from_numpy(np.flatnonzero(present.reshape(-1)))
    return Layout(shape=(present.shape[0], present.shape[1]), positions=positions, groups=tuple(groups))


def _group(lengths: np.ndarray, start: int, stop: int) -> Group:
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
        torch.from_numpy(places.reshape(-1)),
        torch.from_numpy(np.flatnonzero(is_token)),
        torch.from_numpy(is_token)[:, None, None, :],
    )


# PyTorch's own gradient of index_select adds atomically, which is slow in half precision on old cards. Here
# every place is taken at most once, or its gradient is zero, so a copy does.


class _Take(torch.autograd.Function):
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


class Packing:
    """The packing of one model, after `pack_layers`.

    Args:
        price_tokens: What one more group of rows costs in attention, in places that could be computed then.
    """

    def __init__(self, price_tokens: int = 0) -> None:
        self.price_tokens = price_tokens
        self.layout: Layout | None = None
        self.in_forward = False

    @contextmanager
    def of(self, mask: torch.Tensor | None, device: torch.device) -> Iterator[None]:
        """Run the model on a batch in the block; its backward pass may come after it.

        Args:
            mask: The batch's attention mask on the CPU, [rows, places]. None packs nothing, and neither does
                padding on the left: a head that answers at the first place would look at it.
            device: Where the model is.
        """
        if mask is None or not bool(mask[:, 0].all()):
            self.layout = None
        else:
            self.layout = _to(lay_out(mask, price_tokens=self.price_tokens), device)
        self.in_forward = self.layout is not None
        _running.append(self)
        try:
            yield
        finally:
            _running.pop()
            self.in_forward = False

    def pack(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the first layer: [rows, places, width] -> [1, tokens, width]."""
        if not self.in_forward or self.layout is None:
            return None
        hidden, *rest = args
        take: Any = _Take.apply
        tokens = take(hidden.reshape(-1, hidden.shape[-1]), self.layout.positions)
        return (tokens.unsqueeze(0), *rest), kwargs

    def unpack(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """After the last layer: [1, tokens, width] -> [rows, places, width], zero where there is no token."""
        if not self.in_forward or self.layout is None:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        rows, places = self.layout.shape
        padded = hidden.new_zeros(rows * places, hidden.shape[-1])
        padded = padded.index_copy(0, self.layout.positions, hidden.squeeze(0)).view(rows, places, -1)
        return (padded, *output[1:]) if isinstance(output, tuple) else padded


_running: list[Packing] = []  # the packings whose models are in a forward pass now


def pack_layers(
    model: nn.Module,
    outputs: Callable[[nn.Module, Batch], dict[str, torch.Tensor]],
    example_batch: Callable[[int, int], Batch] | None,
) -> Packing | None:
    """Let the layers of an encoder see tokens only; None for models of which that is not known to be right.

    Args:
        model: A transformers model on the CPU.
        outputs: (model, batch) -> what it answers.
        example_batch: (rows, tokens) -> a batch, on which the answers are compared with those of padded rows;
            without it nothing is packed.

    Raises:
        ModelError: The answers differ.
    """
    config: Any = getattr(model, "config", None)
    layers = checkpointable_layers(model)
    encoder = getattr(config, "model_type", None) in _ENCODERS and not getattr(config, "is_decoder", False)
    usual = getattr(config, "_attn_implementation", None) == "sdpa"
    if not (encoder and usual and layers) or example_batch is None:
        return None
    _register()
    model.set_attn_implementation(_NAME)  # type: ignore[operator]
    packing = Packing()
    for module in model.modules():
        module._packing = packing  # type: ignore[assignment]
    layers[0].register_forward_pre_hook(packing.pack, with_kwargs=True)
    layers[-1].register_forward_hook(packing.unpack)
    _compare(model, packing, outputs, example_batch(3, 8))
    return packing


@torch.no_grad()
def _compare(model: nn.Module, packing: Packing, outputs: Any, batch: Batch) -> None:
    for row, tokens in enumerate([8, 5, 2]):
        batch["attention_mask"][row, tokens:] = 0
    was_training = model.training
    model.eval()
    with packing.of(None, torch.device("cpu")):
        padded = outputs(model, batch)
    with packing.of(batch["attention_mask"], torch.device("cpu")):
        packed = outputs(model, batch)
    model.train(was_training)
    if not all(torch.allclose(padded[name], packed[name], rtol=1e-3, atol=1e-4) for name in padded):
        raise ModelError(
            "the model answers differently without padding",
            why="its layers look at several tokens outside of attention, unlike others of its kind",
            do="set training.packing=false",
        )


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> tuple[Any, None]:
        layout = module._packing.layout
        if layout is None or query.shape[0] != 1 or query.shape[2] != len(layout.positions):
            answer: tuple[Any, None] = sdpa_attention_forward(module, query, key, value, mask, **more)
            return answer
        return _attend(query, key, value, layout, more.get("dropout", 0.0), more.get("scaling")), None

    def mask(*args: Any, **more: Any) -> Any:
        # Each group has its own; to find out whether this one is needed, transformers waits for the device.
        return None if _running and _running[-1].in_forward else sdpa_mask(*args, **more)

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, mask)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Attention inside each row: three times [1, heads, tokens, size] -> [1, tokens, heads, size]."""
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    heads = query.shape[1:]
    place: Any = _Place.apply
    take: Any = _Take.apply
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


def _to(layout: Layout, device: torch.device) -> Layout:
    if device.type == "cpu":
        return layout

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.pin_memory().to(device, non_blocking=True)

    groups = tuple(
        replace(group, places=moved(group.places), tokens=moved(group.tokens), mask=moved(group.mask))
        for group in layout.groups
    )
    positions = layout.positions.pin_memory().to(device, non_blocking=True)
    return replace(layout, positions=positions, groups=groups)
