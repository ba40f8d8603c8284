"""One contract over all rules: each finds what its example states, and stays quiet where it must."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from datetime import date

import pytest

from snugtune import facts
from snugtune.environment.builds import Place, numbers
from snugtune.environment.findings import decide, rules
from snugtune.environment.stated import Card, Stated, card_named, python_stated, torch_stated
from snugtune.environment.texts import read_texts

RULES = [pytest.param(rule, id=rule["id"]) for rule in rules()]
FIELDS = {
    "id", "severity", "when", "unless", "text", "echo_of", "of_cards", "what", "why", "do", "do_windows",
    "do_wsl", "source", "checked", "example", "quiet",
}  # fmt: skip


def stated_by(example: dict) -> Stated:
    """The facts that an example in rules.toml states."""
    assert example.keys() <= {"card", "driver", "python", "os", "torch", "text", "live"}
    live = example.get("live")
    python = example.get("python")
    place = Place(
        system=example.get("os", "linux"),
        driver=example.get("driver"),
        python=python_stated(python) if python else None,
        architecture=(live or {}).get("architecture", "x86_64"),
    )
    stated = Stated(place=place, system_given="os" in example, live=live is not None)
    if live is not None:
        known = {"pci_cards", "container", "torch_problem", "torch_missing", "measured"}
        stated = replace(stated, cards=(), **{name: live[name] for name in live.keys() & known})
        if "cards" in live:
            stated = replace(stated, cards=tuple(map(card_named, live["cards"])))
        if "capability" in live:
            stated = replace(stated, cards=(Card(name="a board", capability=numbers(live["capability"])),))
    stated = read_texts([example["text"]] if "text" in example else [], stated)
    if "card" in example:
        stated = replace(stated, cards=tuple(map(card_named, example["card"])))
    if "torch" in example:
        stated = replace(stated, torch=torch_stated(example["torch"], stated.place))
    return stated


def found(example: dict) -> list[str]:
    return [finding.id for finding in decide(stated_by(example)).findings]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_finds_its_example(rule):
    assert rule["id"] in found(rule["example"])


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_stays_quiet_where_it_must(rule):
    assert rule["id"] not in found(rule["quiet"])


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_well_formed(rule):
    assert rule.keys() <= FIELDS
    assert rule["severity"] in ("error", "warning", "info")
    assert rule.keys() & {"when", "text"}
    assert rule["source"].startswith("https://")
    assert isinstance(rule["checked"], date)
    assert set(rule.get("echo_of", ())) <= {other["id"] for other in rules()}


@pytest.mark.parametrize("rule", RULES)
def test_the_sentences_of_a_rule_are_complete(rule):
    verdict = decide(stated_by(rule["example"]))
    (finding,) = [each for each in verdict.findings if each.id == rule["id"]]
    for sentence in (finding.what, finding.why, finding.do):
        assert sentence
        assert not set("{}") & set(sentence)
        assert "None" not in sentence
    assert not [word for word in ("False", "True", "  ") if word in finding.what + finding.why]
    assert finding.date == str(rule["checked"])


@pytest.mark.parametrize("rule", RULES)
def test_the_words_of_a_rule_are_answers_or_groups_of_its_patterns(rule):
    from snugtune.environment.situation import situation

    answers = set(situation(stated_by(rule["example"])))
    groups = {name for pattern in rule.get("text", ()) for name in re.compile(pattern).groupindex}
    words = {
        name
        for field in ("what", "why", "do", "do_windows", "do_wsl")
        for _, name, _, _ in string.Formatter().parse(rule.get(field, ""))
        if name
    }
    assert words <= answers | groups


def test_causes_stand_before_their_echo():
    order = [rule["id"] for rule in rules()]
    assert len(set(order)) == len(order)
    for rule in rules():
        assert all(order.index(cause) < order.index(rule["id"]) for cause in rule.get("echo_of", ()))


def test_nothing_is_found_on_a_machine_that_is_well():
    for card, driver in [("RTX 3090", "580.95.05"), ("H200", "580.95.05"), ("GTX 1080 Ti", "550.54.14")]:
        torch = "2.14.1+cu126" if card == "GTX 1080 Ti" else "2.14.1+cu130"
        assert found({"card": [card], "driver": driver, "torch": torch, "python": "3.12"}) == []


@pytest.mark.parametrize("row", facts.read("features")["feature"], ids=lambda row: row["feature"])
def test_every_feature_is_well_formed(row):
    assert row.keys() == {"feature", "capability", "instead", "source", "checked"}
    assert numbers(row["capability"]) <= (12, 1)
    assert row["source"].startswith("https://")
    assert isinstance(row["checked"], date)


@pytest.mark.parametrize("row", facts.read("guide")["claim"], ids=lambda row: row["claim"])
def test_every_claim_is_answered_by_a_finding_or_in_words(row):
    assert row["verdict"] in ("true", "false", "partly", "unsupported")
    assert set(row["finding"]) <= {rule["id"] for rule in rules()}
    assert row["answer"]
    assert row["source"].startswith("https://")
    assert isinstance(row["checked"], date)
