"""What is chosen where the settings leave it open."""

from __future__ import annotations

import multiprocessing

import pytest

from snugtune.errors import HardwareError, UsageError
from snugtune.planning.defaults import (
    ModelSize,
    choose_pass_price,
    choose_pass_tokens,
    choose_precision,
    choose_workers,
    decide,
    decide_packing,
    decide_passes,
)
from snugtune.runfile import load_config

CARDS = {
    "NVIDIA GeForce GTX 970": ((5, 2), "fp32"),
    "NVIDIA GeForce GTX 1080 Ti": ((6, 1), "fp32"),
    "Tesla P100-PCIE-16GB": ((6, 0), "fp32"),
    "Tesla V100-PCIE-16GB": ((7, 0), "fp16"),
    "NVIDIA GeForce RTX 2060": ((7, 5), "fp16"),
    "NVIDIA GeForce GTX 1660 Ti": ((7, 5), "fp32"),  # no tensor cores, and reports of NaN in fp16
    "NVIDIA GeForce MX450": ((7, 5), "fp32"),
    "NVIDIA T600 Laptop GPU": ((7, 5), "fp32"),
    "NVIDIA T400 4GB": ((7, 5), "fp32"),
    "Quadro T1000": ((7, 5), "fp32"),
    "Tesla T4": ((7, 5), "fp16"),
    "Tesla T40": ((7, 5), "fp16"),
    "Quadro RTX 4000": ((7, 5), "fp16"),
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


@pytest.mark.parametrize("name", [n for n, (capability, _) in CARDS.items() if capability < (7, 0)])
def test_fp16_on_pascal_is_allowed_with_a_note(name):
    """C059"""
    decision = choose_precision("fp16", device_name=name, capability=CARDS[name][0])
    assert decision.value == "fp16"
    assert "no tensor cores, so it saves memory but hardly time" in decision.because


def test_fp16_without_a_card_computes_in_fp32_and_names_the_cause():
    """C061"""
    decision = choose_precision(
        "fp16", device_name="CPU", capability=None, no_card_because="driver 470 reports no card"
    )
    assert decision.value == "fp32"
    assert "driver 470 reports no card" in decision.because


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5", "gemma3_text"])
def test_families_that_overflow_fp16_get_fp32_and_a_warning_where_fp16_was_asked_for(family):
    """C049: ahead of the run."""
    card = {"device_name": "Tesla T4", "capability": (7, 5), "family": family}
    auto, asked = (choose_precision(wanted, **card) for wanted in ("auto", "fp16"))
    assert (auto.value, asked.value) == ("fp32", "fp16")
    assert f"models of the kind {family} were trained in bf16" in auto.because
    assert "expect skipped updates" in asked.because
    assert choose_precision("auto", **{**card, "capability": (8, 6)}).value == "bf16"
    assert choose_precision("auto", **{**card, "family": "bert"}).value == "fp16"


def test_what_was_asked_for_is_taken():
    config = load_config(
        everyday={"model": "m", "data": "d", "precision": "fp32"}, settings={"training.optimizer": "sgd"}
    )
    decisions = decide(config, device_name="NVIDIA GeForce GTX 1080 Ti", capability=(6, 1))
    chosen = {decision.name: (decision.value, decision.because) for decision in decisions}
    assert chosen["precision"] == ("fp32", "asked for")
    assert chosen["optimizer"] == ("sgd", "asked for")


MINILM, LARGE = ModelSize(parameters=10_600_000, tensors=103), ModelSize(parameters=303_000_000, tensors=391)


def price(
    size: ModelSize, capability: tuple[int, int] | None, precision: str = "fp32", **card: int
) -> object:
    return choose_pass_price(
        None, size=size, precision=precision, capability=capability, **{"multiprocessors": None, **card}
    ).value


def test_a_pass_is_dearer_where_tokens_are_computed_faster():
    pascal = {"capability": (6, 1), "multiprocessors": 28}  # a 1080 Ti
    hopper = {"capability": (9, 0), "multiprocessors": 132}  # an H200
    assert price(MINILM, None) == price(LARGE, None) == 96
    assert 96 < price(LARGE, **pascal) < price(MINILM, **pascal) < price(MINILM, **hopper)
    assert price(MINILM, **pascal) < 2000
    assert 100 < price(LARGE, **hopper) < 2000
    assert price(LARGE, **hopper, precision="fp16") == pytest.approx(16 * price(LARGE, **hopper), abs=16)
    assert price(LARGE, **pascal, precision="fp16") == price(LARGE, **pascal)  # no tensor cores


def test_the_price_of_a_pass_can_be_set():
    decision = choose_pass_price(7, size=MINILM, precision="fp32", capability=(6, 1), multiprocessors=28)
    assert (decision.value, decision.because) == (7, "asked for")


def test_workers_are_started_where_they_help():
    assert choose_workers("auto", on_card=False, task="own").value == 0
    assert choose_workers("auto", on_card=True, task="sequence-classification").value == 0
    assert choose_workers(3, on_card=False, task="sequence-classification").value == 3
    expected = 2 if multiprocessing.get_start_method() == "fork" else 0
    assert choose_workers("auto", on_card=True, task="own").value == expected


def test_layers_in_which_samples_see_each_other_keep_one_pass_unless_asked():
    plain = load_config(everyday={"model": "m", "data": "d"})
    assert decide_passes(plain, interacting=[]).value == "auto"
    kept = decide_passes(plain, interacting=["BatchNorm1d"])
    assert (kept.value, "BatchNorm1d" in kept.because) == (1, True)
    asked = decide_passes(
        load_config(everyday={"model": "m", "data": "d", "passes": 4}), interacting=["BatchNorm1d"]
    )
    assert (asked.value, "changes the result" in asked.because) == (4, True)


def test_without_padding_passes_are_cut_for_memory_alone():
    config = load_config(everyday={"model": "m", "data": "d"})
    assert "by length" in decide_passes(config, interacting=[]).because
    assert "as few as the pass tokens allow" in decide_passes(config, interacting=[], packed=True).because
    limits = [
        choose_pass_tokens(None, price_tokens=96, packed=packed, on_card=card).value
        for packed, card in [(False, True), (True, False), (True, True)]
    ]
    assert limits == [None, 64 * 96, 8 * 96]
    assert choose_pass_tokens(500, price_tokens=96, packed=True, on_card=True).value == 500
    assert decide_packing("auto", packed=True).value is True
    assert decide_packing(False, packed=False).because == "asked for"
    with pytest.raises(UsageError, match="does not go with this model"):
        decide_packing(True, packed=False)
