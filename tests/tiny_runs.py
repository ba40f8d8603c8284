"""What tests of whole runs share: their weights, and signals in the middle."""

from __future__ import annotations

import os
import signal

import torch
from safetensors.torch import load_file

from snugtune.planning.defaults import Decision
from snugtune.step import Step


def weights(result) -> dict[str, torch.Tensor]:
    return load_file(result.model_folder / "model.safetensors")


def assert_equal(one, other) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def stop_after(monkeypatch, update: int, with_signal: signal.Signals = signal.SIGINT) -> None:
    """Send the process a signal while it runs the given update."""
    real = Step.launch

    def run(self, passes, *, number, **more):
        if number == update:
            os.kill(os.getpid(), with_signal)
        return real(self, passes, number=number, **more)

    monkeypatch.setattr(Step, "launch", run)


def compute_in_fp16(monkeypatch) -> None:
    """Let runs compute in fp16, which they refuse to do without a card."""
    monkeypatch.setattr(
        "snugtune.planning.defaults.choose_precision", lambda *args, **more: Decision("precision", "fp16", "")
    )
