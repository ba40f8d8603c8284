"""From what is known of a machine to the words that rules ask for: a pure function of stated facts.

Every key is one question. What is empty, False or missing has not happened; all else is the answer in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from snugtune import facts
from snugtune.environment.builds import (
    Place,
    architecture_of,
    ceiling,
    driver_fault,
    driver_runs,
    find_torch,
    holds_code,
    is_published,
    native_driver,
    needed_driver,
    numbers,
    show,
    too_old_for_toolkit,
    torch_builds,
    version_of,
)
from snugtune.environment.install import best_torch, driver_advice, torch_line, trainable_builds, why_no_build
from snugtune.environment.lines import install_driver, torch_command
from snugtune.environment.stated import Card, Stated, Torch
from snugtune.environment.surroundings import surroundings
from snugtune.hardware import Machine

Situation = dict[str, Any]


@dataclass(frozen=True)
class _Verdict:
    """One card, and the first thing that keeps it from training; None if nothing does."""

    card: Card
    fault: str | None


def situation(stated: Stated, *, mirror: str | None = None) -> Situation:
    """Answer every question that a rule may ask.

    Args:
        stated: What is known of the machine.
        mirror: Address that stands for that of PyTorch's index in the commands.
    """
    verdicts = [_Verdict(card, _fault(card, stated)) for card in stated.cards or ()]
    good = [each.card for each in verdicts if each.fault is None]
    found: Situation = {
        "cards": _names([each.card for each in verdicts]),
        "driver": stated.place.driver,
        "python": show(stated.place.python),
        "ceiling": ceiling(stated.place),
        **{f"{name}_cards": _names([v.card for v in verdicts if v.fault == name]) for name in _FAULTS},
    }
    found |= _about_driver(stated, verdicts)
    found |= _about_torch(stated, mirror)
    found |= surroundings(stated, good)
    if good and len(good) < len(verdicts):
        found["only_good"] = ",".join(card.uuid or str(card.index or 0) for card in good)
    return found


_FAULTS = ("blind", "early_driver", "open_module", "unbuilt", "no_code")


def _fault(card: Card, stated: Stated) -> str | None:
    """The first thing that keeps a card from training: the driver, then the code."""
    row = architecture_of(card.capability)
    fault = driver_fault(card.capability, stated.place.driver)
    if fault is not None:
        return "blind" if fault == "new" else "early_driver"
    if stated.open_module and row is not None and not row["open_module"]:
        return "open_module"
    if stated.torch is not None and _has_code(stated.torch, card, stated.place) is False:
        return "no_code" if _any_build(card, stated.place) else "unbuilt"
    if stated.torch is None and not _any_build(card, stated.place):
        return "unbuilt"
    return None


def _has_code(torch: Torch, card: Card, place: Place) -> bool | None:
    """Whether a PyTorch has code for a card; None if that is not known."""
    if card.capability is None or torch.made_for:
        return None
    if torch.code is not None:
        driver = place.driver_version
        native = version_of(native_driver(torch.cuda, place) if torch.cuda else None)
        ptx_works = driver is None or native is None or driver >= native
        return holds_code(torch.code, torch.ptx, card.capability, ptx_works=ptx_works)
    if torch.cuda is not None and too_old_for_toolkit(torch.cuda, card.capability):
        return False
    newest = torch_builds("linux")[0]
    version = version_of(torch.version)
    if version is not None and version >= Version(newest.version) and card.capability < (7, 5):
        return False  # CUDA 12.6 was dropped for good
    return None


def _any_build(card: Card, place: Place) -> bool:
    free = Place(system=place.system, architecture=place.architecture)
    return any(build.covers(card.capability, free) for build in trainable_builds(place))


def _about_driver(stated: Stated, verdicts: Sequence[_Verdict]) -> Situation:
    place, torch = stated.place, stated.torch
    cards = [each.card for each in verdicts]
    oldest = min((card.capability for card in cards if card.capability), default=None)
    row = architecture_of(oldest)
    found: Situation = {
        "install_driver": install_driver(oldest, place),
        "driver_advice": driver_advice(oldest),
        "last_branch": row.get("driver_last") if row else None,
        "architecture": row["name"] if row else None,
    }
    if torch is not None and torch.cuda is not None:
        too_old = driver_runs(torch.cuda, place) is False
        found |= {
            "torch_cuda": torch.cuda,
            "needed_driver": needed_driver(torch.cuda, place),
            "driver_too_old": too_old and place.driver_in_words,
        }
    if torch is None and stated.gpus and place.driver:
        now, then = best_torch(stated.gpus, place), best_torch(stated.gpus, _without_driver(place))
        behind = now is not None and then is not None and Version(now.version) < Version(then.version)
        name = "driver_holds_back" if now is not None and numbers(now.cuda) < (12, 0) else "driver_could_more"
        found[name] = behind and now is not None and f"PyTorch {now.line} for CUDA {now.cuda}"
        found["newer_torch"] = then.line if then else None
    shown = ceiling(place)
    found["runnable"] = _runnable(shown, place)
    dropped = shown is not None and numbers(shown) >= (13, 0)
    if dropped and any(card.capability and card.capability < (7, 5) for card in cards):
        found["ceiling_misleads"] = shown
    return found


def _runnable(shown: str | None, place: Place) -> str | None:
    """Which builds a driver of this ceiling still runs, as the end of a sentence."""
    builds = [
        build for build in trainable_builds(place) if shown and numbers(build.cuda)[0] <= numbers(shown)[0]
    ]
    tags = sorted({build.tag for build in builds if driver_runs(build.cuda, place) is not False})
    return f". With the driver as it is, builds for {', '.join(tags)} run" if tags else None


def _about_torch(stated: Stated, mirror: str | None) -> Situation:
    torch, place = stated.torch, stated.place
    machine = Machine(tuple(stated.gpus), place.driver, None)
    line = torch_line(machine, place, mirror=mirror) if machine.gpus or stated.live else None
    if line is None or (line.build is None and machine.gpus):
        # Nothing is right as things are: what will be right with the driver that is advised.
        cards = machine.gpus or (Card(name="a card that was not named").as_gpu(0),)
        line = torch_line(Machine(cards, None, None), _without_driver(place), mirror=mirror)
    found: Situation = {
        "install_torch": torch_command(line, stated, uninstall=stated.has_torch),
        "torch_because": line.because,
        "torch_missing": stated.torch_missing,
        "torch_problem": stated.torch_problem,
    }
    if machine.gpus and torch is None and best_torch(machine.gpus, place) is None:
        helps = best_torch(machine.gpus, _without_driver(place)) is not None
        found["no_build_driver" if helps else "no_build_python"] = why_no_build(machine.gpus, place)
    if torch is None:
        return found
    version = version_of(torch.version)
    lines = {build.line for build in torch_builds("linux")}
    known = version is not None and f"{version.major}.{version.minor}" in lines
    build = (
        find_torch(torch.version, torch.cuda, place) if torch.cuda and torch.version != "unknown" else None
    )
    # A line that is in the table, for a CUDA that none of its builds has.
    unpublished = not torch.listed and known and torch.cuda and not is_published(torch.version, torch.cuda)
    oldest = facts.read("builds")["index"]["oldest_torch"]
    found |= {
        "torch": torch.version,
        "torch_code": _code(torch),
        "made_for": torch.made_for,
        "torch_of_other_kind": torch.made_for and bool(machine.gpus) and torch.version,
        "cpu_build_alone": torch.made_for == "the CPU" and not machine.gpus and torch.version,
        "torch_unpublished": unpublished and torch.version,
        "torch_unlisted": not torch.listed and not unpublished and torch.version,
        "torch_before": version is not None and version < Version(oldest) and torch.version,
        "oldest_torch": oldest,
    }
    if build and place.python and not build.python[0] <= place.python <= build.python[1]:
        found["torch_python"] = f"{show(build.python[0])} to {show(build.python[1])}"
    return found


def _without_driver(place: Place) -> Place:
    return Place(system=place.system, architecture=place.architecture, python=place.python)


def _code(torch: Torch) -> str | None:
    if torch.code is None:
        return None
    return ", ".join([*map(str, map(show, torch.code)), *(f"{show(each)} as PTX" for each in torch.ptx)])


def _names(cards: Sequence[Card]) -> str | None:
    """'NVIDIA GeForce GTX 1080 Ti (6.1) and Tesla P40 (6.1)'; None for no card."""
    words = [f"{card.name} (compute capability {show(card.capability) or 'unknown'})" for card in cards]
    return " and ".join(dict.fromkeys(words)) or None
