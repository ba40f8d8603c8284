"""fp16 is only used on a card that computes in it what it computes in fp32."""

from __future__ import annotations

import logging

import pytest
import torch

from snugtune.config import RunConfig
from snugtune.processes import ALONE
from snugtune.training import assembly, self_test
from snugtune.training.device import Device
from snugtune.training.self_test import _small_forward, half_precision_fault

CPU = torch.device("cpu")


def card(fault: str):
    """A card whose half-precision answers have a fault; in fp32 it is sound."""

    def compute(device: torch.device, half: torch.dtype | None) -> torch.Tensor:
        answers = _small_forward(device, half)
        if half is None or fault == "none":
            return answers
        if fault == "fails":
            raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")
        answers[0, 0, :3] = {"nan": torch.nan, "inf": torch.inf, "off": answers[0, 0, :3] + 3.0}[fault]
        return answers

    return compute


@pytest.mark.parametrize(("fault", "said"), [
    ("nan", "48 of 65536 answers of some small layers are not finite"),
    ("inf", "are not finite in fp16"),
    ("off", "are off by"),
    ("fails", "CUDNN_STATUS_NOT_SUPPORTED"),
])  # fmt: skip
def test_a_card_that_is_wrong_in_fp16_is_found(fault, said):
    """C058"""
    found = half_precision_fault(CPU, card(fault))
    assert found is not None
    assert said in found


def test_a_sound_card_passes():
    assert half_precision_fault(CPU, card("none")) is None
    assert half_precision_fault(CPU) is None  # a CPU emulates fp16 rightly


@pytest.mark.parametrize("asked", ["fp16", "auto"])
@pytest.mark.parametrize(("fault", "precision"), [("nan", "fp32"), ("none", "fp16")])
def test_a_fault_makes_a_run_compute_in_fp32_with_the_reason(fault, precision, asked, monkeypatch, caplog):
    """C058: a healthy card keeps fp16."""
    monkeypatch.setattr(self_test, "half_precision_fault", lambda _: half_precision_fault(CPU, card(fault)))
    config = RunConfig.model_validate(
        {"model": {"name": "m"}, "data": {"train": "d"}, "training": {"precision": asked}}
    )
    device = Device(torch=torch.device("cuda"), name="NVIDIA GeForce RTX 2060", capability=(7, 5))
    with caplog.at_level(logging.WARNING, "snugtune"):
        decision = assembly._decide(config, None, device, ALONE)[0]
    assert decision.value == precision
    assert ("wrong numbers on NVIDIA GeForce RTX 2060" in decision.because) == (fault == "nan")
    assert bool(caplog.messages) == (fault == "nan")
