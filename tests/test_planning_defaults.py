"""What is chosen where the settings leave it open."""

from __future__ import annotations

import pytest

from snugtune.errors import HardwareError
from snugtune.planning.defaults import choose_pass_price, choose_precision, decide, decide_passes
from snugtune.runfile import load_config

CARDS = {
    "NVIDIA GeForce GTX 970": ((5, 2), "fp32"),
    "NVIDIA GeForce GTX 1080 Ti": ((6, 1), "fp32"),
    "Tesla P100-PCIE-16GB": ((6, 0), "fp32"),
    "Tesla V100-PCIE-16GB": ((7, 0), "fp16"),
    "NVIDIA GeForce RTX 2060": ((7, 5), "fp16"),
    "NVIDIA GeForce GTX 1660 Ti": ((7, 5), "fp32"),  # no tensor cores, and reports of NaN in fp16
    "NVIDIA GeForce RTX 3060": ((8, 6), "bf16"),
    "NVIDIA GeForce RTX 4060": ((8, 9), "bf16"),
    "NVIDIA GeForce RTX 5090": ((12, 0), "bf16"),
}


@pytest.mark.parametrize("name", CARDS)
def test_the_precision_of_each_card_comes_with_a_reason_that_names_it(name):
    capability, precision = CARDS[name]
    decision = choose_precision("auto", device_name=name, capability=capability)
    assert decision.value == precision
    assert name in decision.because


def test_without_a_card_it_is_fp32():
    assert choose_precision("auto", device_name="CPU", capability=None).value == "fp32"


@pytest.mark.parametrize("name", [n for n, (capability, _) in CARDS.items() if capability < (8, 0)])
def test_bf16_is_refused_where_it_would_be_emulated(name):
    with pytest.raises(HardwareError, match="has no bf16 units") as caught:
        choose_precision("bf16", device_name=name, capability=CARDS[name][0])
    assert "fp16" in caught.value.do


def test_what_was_asked_for_is_taken():
    config = load_config(
        everyday={"model": "m", "data": "d", "precision": "fp16"}, settings={"training.optimizer": "sgd"}
    )
    decisions = decide(config, device_name="NVIDIA GeForce GTX 1080 Ti", capability=(6, 1))
    chosen = {decision.name: (decision.value, decision.because) for decision in decisions}
    assert chosen["precision"] == ("fp16", "asked for")
    assert chosen["optimizer"] == ("sgd", "asked for")


def test_a_pass_is_dearer_on_a_card_than_on_a_cpu_and_the_price_can_be_set():
    prices = [choose_pass_price(None, capability=capability).value for capability in (None, (6, 1), (9, 0))]
    assert prices[0] < prices[1] < prices[2]
    assert choose_pass_price(7, capability=(6, 1)).value == 7


def test_layers_in_which_samples_see_each_other_keep_one_pass_unless_asked():
    plain = load_config(everyday={"model": "m", "data": "d"})
    assert decide_passes(plain, interacting=[]).value == "auto"
    kept = decide_passes(plain, interacting=["BatchNorm1d"])
    assert (kept.value, "BatchNorm1d" in kept.because) == (1, True)
    asked = decide_passes(
        load_config(everyday={"model": "m", "data": "d", "passes": 4}), interacting=["BatchNorm1d"]
    )
    assert (asked.value, "changes the result" in asked.because) == (4, True)
