"""Sharing a card with TensorFlow: against stand-ins, and against the real package where it is installed.

The real one lives in an environment of its own, as it and PyTorch's packages may want different versions:

python -m venv .tensorflow
.tensorflow/bin/pip install tensorflow-cpu pytest pytest-timeout .
.tensorflow/bin/python -m pytest --noconftest tests/test_tensorflow.py
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest

from snugtune.errors import HardwareError, MissingDependency, UsageError
from snugtune.tensorflow import share_gpu

real = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed here"
)


class Config:
    """TensorFlow's tf.config with some cards, which notes what it is told."""

    def __init__(self, *cards: str) -> None:
        self.cards = [SimpleNamespace(name=name) for name in cards]
        self.calls: list[tuple] = []
        self.in_use = False
        self.experimental = SimpleNamespace(set_memory_growth=self._grow)

    def list_physical_devices(self, kind):
        assert kind == "GPU"
        return self.cards

    def LogicalDeviceConfiguration(self, memory_limit):
        return memory_limit

    def set_logical_device_configuration(self, card, limits):
        self._check()
        self.calls.append(("limit", card.name, limits))

    def _grow(self, card, wanted):
        self._check()
        self.calls.append(("growth", card.name, wanted))

    def _check(self):
        if self.in_use:
            raise RuntimeError("Physical devices cannot be modified after being initialized\nmore")


@pytest.fixture
def tensorflow(monkeypatch):
    def install(*cards):
        module = ModuleType("tensorflow")
        module.config = Config(*cards)
        monkeypatch.setitem(sys.modules, "tensorflow", module)
        return module.config

    return install


def test_growth_is_turned_on_for_every_card(tensorflow):
    config = tensorflow("GPU:0", "GPU:1")
    assert share_gpu() == 2
    assert config.calls == [("growth", "GPU:0", True), ("growth", "GPU:1", True)]


@pytest.mark.parametrize("budget", ["6 GiB", 6 * 2**30])
def test_a_limit_is_set_on_every_card_in_mib_and_without_growth(tensorflow, budget):
    config = tensorflow("GPU:0", "GPU:1")
    assert share_gpu(budget) == 2
    assert [call for call in config.calls if call[0] == "limit"] == [
        ("limit", "GPU:0", [6144]),
        ("limit", "GPU:1", [6144]),
    ]
    assert ("growth", "GPU:0", True) not in config.calls


def test_a_late_call_says_so(tensorflow):
    tensorflow("GPU:0").in_use = True
    with pytest.raises(HardwareError) as caught:
        share_gpu()
    assert "already uses GPU:0" in caught.value.what
    assert caught.value.why == "Physical devices cannot be modified after being initialized"
    assert "right after `import tensorflow`" in caught.value.do


def test_without_a_card_nothing_happens(tensorflow):
    config = tensorflow()
    assert share_gpu() == share_gpu("1 GiB") == 0
    assert config.calls == []


@pytest.mark.parametrize("budget", ["much", "-1 GiB", 0, 1000])
def test_a_budget_that_is_no_size_is_refused(tensorflow, budget):
    tensorflow("GPU:0")
    with pytest.raises(UsageError):
        share_gpu(budget)


def test_without_tensorflow_the_line_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(MissingDependency, match="--install-line tensorflow"):
        share_gpu()


def run_in_tensorflow(code: str) -> str:
    """What a fresh process prints that has the real TensorFlow, and a made-up card in its list."""
    start = """
        import tensorflow as tf
        from tensorflow.python.eager import context
        from snugtune.errors import HardwareError
        from snugtune.tensorflow import share_gpu
        def add_card():
            context.context()._initialize_physical_devices()
            card = context.PhysicalDevice("/physical_device:GPU:0", "GPU")
            context.context()._physical_devices.append(card)
            return card
    """
    script = textwrap.dedent(start) + textwrap.dedent(code)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@real
def test_the_real_package_without_a_card_computes_before_and_after():
    code = """
        print(share_gpu(), share_gpu("1 GiB"))
        print(float(tf.reduce_sum(tf.ones((2, 2)))))
        print(share_gpu())
    """
    assert run_in_tensorflow(code).split() == ["0", "0", "4.0", "0"]


@real
def test_the_real_package_notes_growth():
    code = "card = add_card(); print(share_gpu(), tf.config.experimental.get_memory_growth(card))"
    assert run_in_tensorflow(code) == "1 True"


@real
def test_the_real_package_notes_a_limit():
    code = """
        card = add_card()
        print(share_gpu("2 GiB"), tf.config.get_logical_device_configuration(card)[0].memory_limit)
    """
    assert run_in_tensorflow(code) == "1 2048"


@real
def test_the_real_package_refuses_a_late_call():
    code = """
        add_card()
        context.context()._context_handle = object()  # as after the first operation
        try:
            share_gpu()
        except HardwareError as error:
            print(error.what)
        context.context()._context_handle = None
    """
    assert "already uses /physical_device:GPU:0" in run_in_tensorflow(code)


@real
def test_the_real_package_refuses_growth_after_a_limit():
    code = """
        add_card()
        share_gpu("1 GiB")
        try:
            share_gpu()
        except HardwareError as error:
            print(error.why)
    """
    assert "virtual devices configured" in run_in_tensorflow(code)
