"""Rows without padding: the layers of an encoder see the tokens of all rows as one long row.

Everything in such a layer but attention treats each token by itself, so there padding is work for nothing.
Only attention has to know where a row ends. The result is that of padded rows, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from snugtune.data.batching import Batch
from snugtune.errors import ModelError
from snugtune.techniques.checkpointing import checkpointable_layers
from snugtune.techniques.row_attention import Layout, Take, attend

_NAME = "snugtune_packed"
# Encoders in which only attention looks at several tokens, and positions are added before the first layer.
_ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra"})


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
            self.layout = Layout(mask, device=device, price_tokens=self.price_tokens)
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
        take: Any = Take.apply
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
        if layout is None or query.shape[0] != 1 or query.shape[2] != layout.tokens:
            answer: tuple[Any, None] = sdpa_attention_forward(module, query, key, value, mask, **more)
            return answer
        dropout, scaling = more.get("dropout", 0.0), more.get("scaling")
        return attend(query, key, value, layout, dropout=dropout, scaling=scaling), None

    def mask(*args: Any, **more: Any) -> Any:
        # Each group has its own; to find out whether this one is needed, transformers waits for the device.
        return None if _running and _running[-1].in_forward else sdpa_mask(*args, **more)

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, mask)
