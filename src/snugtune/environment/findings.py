"""What is wrong with a machine, from facts/rules.toml: what must be mended first, no echo of causes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from snugtune import facts
from snugtune.environment.builds import numbers
from snugtune.environment.lines import install_lines, set_variable
from snugtune.environment.situation import Situation, situation
from snugtune.environment.stated import Card, Stated


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule found, in words for this machine."""

    id: str
    severity: str
    """error: training would fail; warning; info."""
    what: str
    why: str
    do: str
    """A command that can be pasted."""
    source: str
    date: str
    """When the fact was checked."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer of the doctor. `ok` is whether training would run with what was stated."""

    ok: bool
    stated: Stated
    findings: tuple[Finding, ...]
    install: Mapping[str, str | None]
    reasons: Mapping[str, str | None]
    """Why each line of `install` is the right one."""
    absent: tuple[Mapping[str, str], ...]
    """What will not work on the weakest of the cards, and what to use in its place."""


def decide(stated: Stated, *, mirror: str | None = None) -> Verdict:
    """Judge a machine by what is known of it. What is not stated counts as the best that works.

    Args:
        stated: What is known.
        mirror: Address that stands for that of PyTorch's index in the commands.
    """
    answers = situation(stated, mirror=mirror)
    findings: list[Finding] = []
    for rule in rules():
        if not {finding.id for finding in findings} & set(rule.get("echo_of", ())):
            words = _fires(rule, answers, stated)
            if words is not None:
                findings.append(_finding(rule, words, stated))
    ok = not any(finding.severity == "error" for finding in findings)
    install = install_lines(stated, broken=not ok, mirror=mirror)
    return Verdict(
        ok=ok,
        stated=stated,
        findings=tuple(findings),
        install={name: line for name, (line, _) in install.items()},
        reasons={name: because for name, (_, because) in install.items()},
        absent=tuple(absent_features(stated.cards or ())),
    )


@cache
def rules() -> tuple[Mapping[str, Any], ...]:
    """The rules, in their order."""
    return tuple(facts.read("rules")["rule"])


def absent_features(cards: Iterable[Card]) -> list[dict[str, str]]:
    """What the weakest of some cards is too old for, and what to use in its place."""
    known = [card.capability for card in cards if card.capability is not None]
    if not known:
        return []
    return [
        {
            "feature": row["feature"],
            "needs": row["capability"],
            "instead": row["instead"],
            "source": row["source"],
            "date": str(row["checked"]),
        }
        for row in facts.read("features")["feature"]
        if min(known) < numbers(row["capability"])
    ]


def _fires(rule: Mapping[str, Any], answers: Situation, stated: Stated) -> dict[str, Any] | None:
    """The words for a rule's sentences if it applies, else None."""
    if not all(answers.get(name) for name in rule.get("when", ())):
        return None
    if any(answers.get(name) for name in rule.get("unless", ())):
        return None
    words = dict(answers)
    if "text" in rule:
        texts = (*stated.texts, *([stated.torch_problem] if stated.torch_problem else []))
        hits = (
            hit
            for text in texts
            for pattern in rule["text"]
            if (hit := re.search(pattern, text, re.MULTILINE))
        )
        hit = next(hits, None)
        if hit is None:
            return None
        words |= {name: value for name, value in hit.groupdict().items() if value}
    return words


def _finding(rule: Mapping[str, Any], words: Mapping[str, Any], stated: Stated) -> Finding:
    sentence = _Words({name: value for name, value in words.items() if value})
    severity, do = rule["severity"], rule.get(f"do_{stated.place.system}", rule["do"]).format_map(sentence)
    if rule.get("of_cards") and words.get("only_good"):
        severity, do = "warning", set_variable("CUDA_VISIBLE_DEVICES", words["only_good"], stated.place)
    return Finding(
        id=rule["id"],
        severity=severity,
        what=_tidy(rule["what"].format_map(sentence)),
        why=_tidy(rule["why"].format_map(sentence)),
        do=do.strip(),
        source=rule["source"],
        date=str(rule["checked"]),
    )


class _Words(dict[str, Any]):
    """Words for sentences; nothing for what is not known."""

    def __missing__(self, key: str) -> str:
        return ""


def _tidy(sentence: str) -> str:
    """Take away what an unknown word leaves behind: spaces, and signs that would introduce it."""
    return re.sub(r"[\s:.,;]+$", "", re.sub(r" +", " ", sentence)).strip()
