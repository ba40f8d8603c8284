"""The device of a run, with cards that are not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from snugtune import hardware
from snugtune.errors import HardwareError
from snugtune.hardware import Gpu, Machine
from snugtune.training.device import MemoryMeter, open_device

GiB = 2**30


@pytest.fixture
def card(monkeypatch):
    """Pretend that torch sees a GTX 1080 Ti; returns a function that sets what torch was built for."""
    name = "NVIDIA GeForce GTX 1080 Ti"
    found = SimpleNamespace(
        name=name, major=6, minor=1, total_memory=11 * GiB, multi_processor_count=28, uuid="GPU-1"
    )
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def set_fraction(fraction, device):
        assert device.index is not None  # torch refuses a device without a number
        fractions.append(fraction)

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    gpu = Gpu(index=0, name=name, compute_capability=(6, 1), memory_bytes=11 * GiB)
    monkeypatch.setattr(hardware, "find_gpus", lambda: Machine((gpu,), "580.173.02", None))
    monkeypatch.setattr(hardware, "gpu_of_uuid", lambda uuid: 0)

    def built_for(*targets: str) -> list[float]:
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(targets))
        return fractions

    return built_for


def test_the_cpu_has_no_memory_to_report_and_no_cap():
    with open_device(torch.device("cpu"), budget_bytes=GiB) as device:
        assert (device.name, device.capability, device.is_cuda) == ("CPU", None, False)
        assert MemoryMeter(device).read() is None


@pytest.mark.parametrize("targets", [
    ("sm_60",), ("sm_50", "sm_60", "sm_70"), ("sm_61",), ("sm_75", "compute_50"), ("sm_75", "compute_61"),
    (), ("gfx906",),
])  # fmt: skip
def test_code_for_the_same_generation_or_to_be_compiled_runs(card, targets):
    card(*targets)
    with open_device(torch.device("cuda"), budget_bytes=None) as device:
        assert device.capability == (6, 1)
        assert device.torch == torch.device("cuda", 0)


@pytest.mark.parametrize("targets", [
    ("sm_75", "sm_90a", "sm_120f", "compute_120"), ("sm_70",), ("sm_62",), ("sm_52",), ("compute_62",),
])  # fmt: skip
def test_a_build_without_code_for_the_card_is_refused_with_the_line_that_has(card, targets):
    card(*targets)
    with pytest.raises(HardwareError, match="has no code for NVIDIA GeForce GTX 1080 Ti") as caught:
        open_device(torch.device("cuda"), budget_bytes=None).__enter__()
    assert "https://download.pytorch.org/whl/cu126" in caught.value.do
    assert "6.1" in caught.value.why


def test_the_budget_holds_inside_the_block_and_ends_with_it(card):
    fractions = card("sm_60")
    block = open_device(torch.device("cuda"), budget_bytes=GiB)
    block.__enter__()
    assert fractions == [pytest.approx(1 / 11)]
    block.__exit__(KeyError, KeyError(), None)  # also when the run fails
    assert fractions[-1] == 1.0


def test_a_budget_larger_than_the_card_is_refused(card):
    card("sm_60")
    with pytest.raises(HardwareError, match=r"12.0 GiB is more than .* has"):
        open_device(torch.device("cuda"), budget_bytes=12 * GiB).__enter__()
