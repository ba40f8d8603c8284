"""One contract over all cards and builds in the facts."""

from __future__ import annotations

from collections import Counter
from datetime import date

import pytest
from packaging.version import Version

from snugtune import facts
from snugtune.environment.builds import Place, architecture_of, embedded, numbers, toolkit_compiles
from snugtune.environment.cards import all_cards, card_of, cards_called, has_tensor_cores
from snugtune.environment.findings import decide
from snugtune.environment.stated import Stated, card_named
from snugtune.units import GiB

CARDS = [
    pytest.param(row, id=f"{row['names'][0]}-{row.get('nominal_gib')}") for row in facts.read("cards")["card"]
]
BUILDS = facts.read("builds")
FIELDS = {
    "names", "aliases", "chip", "capability", "nominal_gib", "memory_bytes", "bandwidth_gb_s", "fp32_tflops",
    "fp16_ratio", "source", "checked", "multiprocessors",
}  # fmt: skip
VALUES = {
    "bandwidth_gb_s": (8, 20_000),
    "fp32_tflops": (0.2, 200),
    "fp16_ratio": (1 / 65, 4.1),
    "multiprocessors": (1, 200),
}


@pytest.mark.parametrize("row", CARDS)
def test_a_card_is_well_formed(row):
    assert row.keys() <= FIELDS
    assert row["source"].startswith("https://")
    assert isinstance(row["checked"], date)
    assert architecture_of(numbers(row["capability"])) is not None
    for name, (low, high) in VALUES.items():
        assert low <= row.get(name, low) <= high


@pytest.mark.parametrize("row", CARDS)
def test_the_memory_of_a_card_is_what_a_driver_shows(row):
    if "memory_bytes" in row and "nominal_gib" in row:
        assert 0.9 < row["memory_bytes"] / (row["nominal_gib"] * GiB) < 1.02


@pytest.mark.parametrize("row", CARDS)
def test_a_card_is_found_by_all_that_it_is_called(row):
    for name in [*row["names"], *row["aliases"]]:
        for text in (name, name.upper(), name.lower(), f"NVIDIA {name}", f" {name} "):
            assert row["chip"] in {card.chip for card in cards_called(text)}, text
    for name in row["names"]:
        memory = row.get("memory_bytes") or (row["nominal_gib"] * GiB if "nominal_gib" in row else None)
        card = card_of(name, memory)
        assert card is not None
        assert (card.name, card.nominal_gib) == (row["names"][0], row.get("nominal_gib"))
        old = card_of(name.removeprefix("NVIDIA "), memory)
        assert old == card


@pytest.mark.parametrize("row", CARDS)
def test_every_card_gets_a_verdict(row):
    verdict = decide(Stated(cards=(card_named(row["names"][0]),), place=Place(python=(3, 12))))
    assert verdict.ok == (
        numbers(row["capability"]) >= (3, 7) and numbers(row["capability"]) not in embedded()
    )
    assert (verdict.install["torch"] is not None) == verdict.ok


@pytest.mark.parametrize("row", CARDS)
def test_the_name_tells_what_the_chip_tells(row):
    """Turing's TU116 and TU117 have no tensor cores; facts/precision.toml knows them by name."""
    tensor_cores = numbers(row["capability"]) >= (7, 0) and not row["chip"].startswith(("TU116", "TU117"))
    assert has_tensor_cores(row["names"][0], numbers(row["capability"])) == tensor_cores


def test_no_two_cards_are_the_same():
    twice = Counter((card.name, card.nominal_gib) for card in all_cards())
    assert [name for name, count in twice.items() if count > 1] == []


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("GTX 1080 Ti", ["NVIDIA GeForce GTX 1080 Ti, 11 GB"]),
        ("nvidia geforce gtx 1080 TI", ["NVIDIA GeForce GTX 1080 Ti, 11 GB"]),
        ("1080ti", ["NVIDIA GeForce GTX 1080 Ti, 11 GB"]),
        ("GTX 1080 Ti 11GB", ["NVIDIA GeForce GTX 1080 Ti, 11 GB"]),
        ("GTX 1060 6 GB", ["NVIDIA GeForce GTX 1060 6GB"]),
        ("gtx 1060 3gb", ["NVIDIA GeForce GTX 1060 3GB"]),
        ("RTX 3060", ["NVIDIA GeForce RTX 3060, 8 GB", "NVIDIA GeForce RTX 3060, 12 GB"]),
        ("RTX 3060 12GB", ["NVIDIA GeForce RTX 3060, 12 GB"]),
        ("rtx 2060 12 gb", ["NVIDIA GeForce RTX 2060, 12 GB"]),
        ("Tesla P40", ["Tesla P40, 24 GB"]),
        ("GTX TITAN X", ["NVIDIA GeForce GTX TITAN X, 12 GB"]),
        ("TITAN X (Pascal)", ["NVIDIA TITAN X (Pascal), 12 GB"]),
        ("H200", ["NVIDIA H200, 141 GB"]),
        ("GTX1080Ti", ["NVIDIA GeForce GTX 1080 Ti, 11 GB"]),
        ("gtx 1080ti 11 gb", ["NVIDIA GeForce GTX 1080 Ti, 11 GB"]),
        ("P2000", ["Quadro P2000, 5 GB"]),
        ("GTX 1080 Ti 8 GB", []),
        ("GTX 1080Tii", []),
        ("GTX 108", []),
        ("1080 Ti Super", []),
        ("RTX 3060 16GB", []),
        ("TITAN X", []),
        ("", []),
    ],
)
def test_a_name_is_taken_as_it_is_and_never_for_a_similar_one(text, titles):
    assert [card.title for card in cards_called(text)] == titles


def test_two_sizes_of_one_name_are_told_apart_by_memory():
    assert card_of("NVIDIA GeForce RTX 3060", 12288 * 2**20).nominal_gib == 12
    assert card_of("NVIDIA GeForce RTX 3060", 8192 * 2**20).nominal_gib == 8
    assert card_of("NVIDIA GeForce RTX 3060", 10240 * 2**20) is None
    assert card_of("NVIDIA GeForce RTX 3060", None) is None
    assert card_of("NVIDIA GeForce ...", 11175 * 2**20) is None


@pytest.mark.parametrize(
    "kind", ["architecture", "cuda_major", "cuda", "torch", "tensorflow", "bitsandbytes"]
)
def test_every_block_of_the_builds_has_source_and_date(kind):
    for row in BUILDS[kind]:
        assert row["source"].startswith("https://")
        assert isinstance(row["checked"], date)


@pytest.mark.parametrize("row", BUILDS["torch"], ids=lambda row: f"{row['version']}+{row['cuda']}")
def test_a_build_is_one_that_its_cuda_can_make(row):
    assert set(row["systems"]) <= {"linux", "windows"}
    assert numbers(row["python"][0]) <= numbers(row["python"][1])
    for capability in map(numbers, [*row["code"], *row.get("code_windows", []), *row.get("ptx", [])]):
        assert toolkit_compiles(row["cuda"], capability), capability
    assert Version(row["cudnn"]) if "cudnn" in row else True


def test_drivers_of_newer_toolkits_are_newer():
    for system in ("linux", "windows"):
        known = [Version(row["driver"][system]) for row in BUILDS["cuda"] if system in row["driver"]]
        assert known == sorted(known)
