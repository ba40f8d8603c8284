"""Predictions of whole steps: the real `Step` on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from snugtune.errors import UsageError
from snugtune.memory.allocator import DoesNotFit
from snugtune.planning.asked import predict_memory
from snugtune.planning.cards import planned_card
from snugtune.planning.prediction import Prediction, predict_step, task_of
from snugtune.step import Choices, Hyperparameters
from snugtune.units import MiB


class Net(nn.Module):
    def __init__(self, depth: int = 6, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def batch(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(rows, 512), "labels": torch.zeros(rows, dtype=torch.long)}


def predict(**settings: Any) -> Prediction:
    how = {
        "model": Net,
        "batch": batch,
        "micro_batch": 256,
        "card": "GTX 1080 Ti",
    }
    return predict_memory(**{**how, **settings})  # type: ignore[arg-type]


WEIGHTS = 4 * sum(parameter.numel() for parameter in Net().parameters())


def test_the_parts_are_those_of_the_step() -> None:
    prediction = predict(evaluation_batch=512)
    assert prediction.by_kind["weights"] == WEIGHTS
    # Two moments, and a count for each tensor.
    assert 2 * WEIGHTS <= prediction.by_kind["optimizer"] <= 2 * WEIGHTS + 1024
    held = {
        kind: size for kind, size in prediction.by_kind.items() if kind not in ("fragmentation", "context")
    }
    assert sum(held.values()) == pytest.approx(prediction.peak_allocated_bytes, rel=0.03)
    assert sum(prediction.by_layer.values()) == sum(held.values())
    assert prediction.peak_reserved_bytes >= prediction.peak_allocated_bytes
    least, most = prediction.process_bytes
    assert prediction.peak_reserved_bytes <= least <= most <= prediction.peak_reserved_bytes + 800 * MiB
    assert prediction.evaluation_peak_bytes is not None
    assert 3 * WEIGHTS < prediction.evaluation_peak_bytes < prediction.peak_allocated_bytes
    assert not prediction.assumed


def test_more_samples_in_a_pass_need_more_and_more_passes_do_not() -> None:
    small, large = predict(micro_batch=64), predict(micro_batch=1024)
    assert small.peak_allocated_bytes < large.peak_allocated_bytes
    passes = predict(micro_batch=64, passes=3)
    assert passes.peak_allocated_bytes <= small.peak_allocated_bytes + WEIGHTS + MiB


@pytest.mark.parametrize(("precision", "less"), [("fp16", True), ("bf16", True), ("fp32", False)])
def test_half_precision_keeps_half_of_the_activations(precision: str, less: bool) -> None:
    whole = predict(micro_batch=4096)
    other = predict(micro_batch=4096, precision=precision)
    assert (other.by_kind["activations"] < 0.75 * whole.by_kind["activations"]) == less


def test_the_optimizer_decides_how_much_state_there_is() -> None:
    kinds = {name: predict(optimizer=name).by_kind["optimizer"] for name in ("adamw-fused", "sgd")}
    assert kinds["sgd"] <= 0.6 * kinds["adamw-fused"]


def test_what_does_not_fit_is_said() -> None:
    def within(limit_bytes: int) -> Prediction:
        card = planned_card("GTX 1080 Ti")
        return predict_step(
            task_of(Net, None),
            Choices(),
            Hyperparameters(),
            passes=[batch(256)],
            card=card.choices,
            context_bytes=card.context_bytes,
            limit_bytes=limit_bytes,
        )

    needed = predict().peak_reserved_bytes
    assert within(needed).peak_reserved_bytes <= needed
    with pytest.raises(DoesNotFit):
        within(needed // 2)


def test_a_setting_of_the_allocator_that_is_not_modelled_is_refused() -> None:
    with pytest.raises(UsageError, match="garbage_collection_threshold"):
        predict(allocator="garbage_collection_threshold:0.8")


def test_expandable_segments_reserve_no_more() -> None:
    classic = predict(micro_batch=1000).peak_reserved_bytes
    assert predict(micro_batch=1000, allocator="expandable_segments:True").peak_reserved_bytes <= classic


class Curious(nn.Module):
    """Reads values in its forward pass, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.2, 4)]
        self.layer = nn.Linear(512, 512)
        self.lstm = nn.LSTM(512, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if (labels >= 10).any():
            raise ValueError("a label is out of range")
        kept = x[labels.nonzero().squeeze(1)] if labels.any() else x
        for rate in self.rates:
            kept = F.dropout(self.layer(kept), rate, self.training)
        scale = kept.abs().max().item()
        states, _ = self.lstm((kept / scale).unsqueeze(1))
        chosen = kept[kept[:, 0] > 0]
        return F.cross_entropy(self.head(states[:, -1]), labels) + chosen.sum()


def test_models_that_read_values_are_predicted() -> None:
    prediction = predict(model=Curious, evaluation_batch=8)
    assert prediction.peak_reserved_bytes > 0
    assert prediction.assumed  # the mask of numbers that a layer computed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"card": "GTX 1080 Tie"}, "did you mean NVIDIA GeForce GTX 1080 Ti"),
        ({"card": "a card"}, "snugtune cards"),
        ({"card": 1080}, "no card is called 1080"),
        ({"card": "GTX 1060"}, "several cards are called 'GTX 1060'"),
        ({"micro_batch": -1}, "micro_batch is -1"),
        ({"micro_batch": "eight"}, "micro_batch is 'eight'"),
        ({"micro_batch": True}, "micro_batch is True"),
        ({"passes": 0}, "passes is 0"),
        ({"evaluation_batch": 2.5}, "evaluation_batch is 2.5"),
        ({"checkpointed_layers": "most"}, "checkpointed_layers is 'most'"),
        ({"precision": "fp8"}, "choose from fp32, fp16, bf16"),
        ({"optimizer": "lion"}, "adafactor"),
        ({"attention": "flash"}, "memory-efficient"),
        ({"clip_grad_norm": 0}, "above zero"),
        ({"model": Net()}, r"a model \(Net\)"),
        ({"model": lambda: 1}, r"model\(\) returned an object of type int"),
        ({"batch": lambda rows: [rows]}, "an object of type list"),
    ],
)
def test_what_makes_no_sense_is_said(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        predict(**settings)


def test_the_card_decides_about_workspaces_and_context() -> None:
    pascal, hopper = predict(), predict(card="H200")
    assert pascal.by_kind["workspace"] < hopper.by_kind["workspace"]
    assert hopper.process_bytes[0] - hopper.peak_reserved_bytes >= 749 * MiB
