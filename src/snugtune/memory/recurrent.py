"""Recurrent layers as cuDNN runs them: one call for all layers and steps, with a reserve and a workspace.

The order of allocations is that of aten/src/ATen/native/cudnn/RNN.cpp. The reserve keeps the gates of
every step for the backward pass; its size was found to be exact, that of the workspace to a few percent
(H200, cuDNN 9.19).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_KINDS = {"lstm.input": "LSTM", "gru.input": "GRU", "rnn_tanh.input": "RNN", "rnn_relu.input": "RNN"}
# Numbers of a step that the reserve keeps for each cell, and those that the workspace has for each of one
# direction and of two.
_KEPT = {"LSTM": 5, "GRU": 6, "RNN": 1}
_AT_WORK = {"LSTM": (5, 14), "GRU": (4, 12), "RNN": (4, 12)}


@dataclass(frozen=True)
class _Layers:
    kind: str
    biases: bool
    count: int
    dropout: float
    training: bool
    bidirectional: bool
    batch_first: bool

    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def reserve_bytes(self, steps: int, hidden: int, element_bytes: int) -> int:
        """Bytes that are kept from the forward pass for the backward pass."""
        directions, between = self.directions(), (self.count - 1) * self.directions()
        numbers = _KEPT[self.kind] * self.count * directions + between
        masks = steps * hidden * between * directions // 8 if self.dropout else 0
        return steps * hidden * numbers * element_bytes + masks + 256

    def workspace_bytes(
        self, steps: int, batch: int, width: int, hidden: int, weights: int, element_bytes: int
    ) -> int:
        """Bytes that are needed during a pass."""
        cells = self.count * self.directions()
        at_work = _AT_WORK[self.kind][self.directions() - 1]
        if self.dropout and self.count > 1 and not self.bidirectional:
            at_work += 1
        numbers = steps * (at_work * hidden + width) + batch * (10 * hidden * cells + 2) + weights
        return numbers * element_bytes + 32 * hidden**2 * cells + 256


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: _Layers, data: torch.Tensor, *rest: torch.Tensor) -> Any:
        states = 2 if layers.kind == "LSTM" else 1
        hidden, weights = rest[:states], rest[states:]
        inner = _steps_first(layers, data)
        size = hidden[0].shape[-1]
        shape = (*inner.shape[:2], size * layers.directions())
        out = data.new_empty(shape)
        last = [state.new_empty(state.shape) for state in hidden]
        steps, batch = inner.shape[0] * inner.shape[1], inner.shape[1]
        matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
        need = layers.workspace_bytes(steps, batch, data.shape[-1], size, matrices, data.element_size())
        workspace = _bytes(data, need)
        if layers.training:
            reserve = _bytes(data, layers.reserve_bytes(steps, size, data.element_size()))
            ctx.save_for_backward(data, reserve, out, *rest)
        del workspace, inner
        ctx.layers, ctx.need, ctx.states = layers, need, states
        return (out.transpose(0, 1) if layers.batch_first else out, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        data, _, _, *rest = ctx.saved_tensors
        layers, hidden, weights = ctx.layers, rest[: ctx.states], rest[ctx.states :]
        inner = _steps_first(layers, data)
        of_data = torch.empty_like(inner)
        of_states = [torch.empty_like(state) for state in hidden]
        workspace = _bytes(data, ctx.need)
        del workspace, inner
        inner = _steps_first(layers, data)
        flat = data.new_zeros(sum(weight.numel() for weight in weights))
        workspace = _bytes(data, ctx.need)
        del workspace, inner
        parts, place = [], 0
        for weight in weights:
            parts.append(flat[place : place + weight.numel()].view(weight.shape))
            place += weight.numel()
        return (None, of_data.transpose(0, 1) if layers.batch_first else of_data, *of_states, *parts)


def _steps_first(layers: _Layers, data: torch.Tensor) -> torch.Tensor:
    return data.transpose(0, 1).contiguous() if layers.batch_first else data.contiguous()


def _bytes(like: torch.Tensor, count: int) -> torch.Tensor:
    return like.new_empty(count, dtype=torch.uint8)


def recurrent_operations(half: Callable[[], torch.dtype | None]) -> dict[str, Callable[..., Any]]:
    """The recurrent operations by name, to be run on fake tensors.

    Args:
        half: The type that autocast computes in at the moment; None without autocast.
    """

    def operation(kind: str) -> Callable[..., Any]:
        def run(data: torch.Tensor, states: Any, weights: Any, *settings: Any) -> Any:
            biases, count, dropout, training, bidirectional, batch_first = settings
            layers = _Layers(kind, biases, count, dropout, training, bidirectional, batch_first)
            hidden = list(states) if kind == "LSTM" else [states]
            dtype = half()
            if dtype is not None:
                weights = [weight.to(dtype) for weight in weights]
                hidden = [state.to(dtype) for state in hidden]
                data = data.to(dtype)
            out: Any = _Recurrent.apply(layers, data, *hidden, *weights)  # type: ignore[no-untyped-call]
            return out

        return run

    return {name: operation(kind) for name, kind in _KINDS.items()}
