"""The doctor: this machine, or one that was described in flags and recorded texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from snugtune.environment.builds import Place, embedded
from snugtune.environment.cards import names_like
from snugtune.environment.findings import decide
from snugtune.environment.install import index_address
from snugtune.environment.reading import read_machine
from snugtune.environment.selftest import run_selftest
from snugtune.environment.showing import Report
from snugtune.environment.stated import Card, Stated, card_named, python_stated, torch_stated
from snugtune.environment.texts import read_file, read_texts
from snugtune.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

SYSTEMS = ("linux", "windows", "wsl")


class Described(TypedDict, total=False):
    """A machine in the words of people."""

    cards: Sequence[str]
    """Names of its cards: "GTX 1080 Ti"."""
    driver: str | None
    """Its driver: "550.54.14"."""
    python: str | None
    """Its Python: "3.12"."""
    system: str | None
    """linux, windows or wsl."""
    torch: str | None
    """Its PyTorch: "2.15.0+cu132"."""
    inputs: Sequence[str | Path]
    """Files with recorded text: nvidia-smi, pip list, dmesg, an error message."""
    quick: bool
    """Leave out the self-test on the card."""
    mirror: str | None
    """Address that stands for that of PyTorch's index in the commands."""


def examine(**described: Unpack[Described]) -> Report:
    """Judge this machine if nothing is described, else the one that is described.

    Raises:
        UsageError: Something that cannot be read, a name that no card has, or a file that is not there.
    """
    quick, mirror = described.get("quick", False), described.get("mirror")
    index_address(mirror)
    machine = {name: value for name, value in described.items() if name not in ("quick", "mirror")}
    if any(value is not None and value not in ((), []) for value in machine.values()):
        stated = _described(**machine)  # type: ignore[arg-type]
    else:
        stated = read_machine()
        if not quick:
            stated = replace(stated, measured=run_selftest(stated))
    return Report(**vars(decide(stated, mirror=mirror)))


def _card(name: str) -> Card:
    card = card_named(name)
    if card.known is None and not card.one_of:
        like = "; ".join(names_like(name))
        shown = name if len(name) <= 60 else f"{name[:60]}..."
        raise UsageError(
            f"--card {shown!r} is no name of a card in the table",
            why=f"names like it are {like}" if like else "it is neither a name of the driver's nor an alias",
            do="take a name from `snugtune cards`; or give what this prints on that machine with --input:"
            " nvidia-smi --query-gpu=name,compute_cap,memory.total --format=csv",
        )
    return card


def _described(
    *,
    cards: Sequence[str] = (),
    driver: str | None = None,
    python: str | None = None,
    system: str | None = None,
    torch: str | None = None,
    inputs: Sequence[str | Path] = (),
) -> Stated:
    if system is not None and system not in SYSTEMS:
        raise UsageError(
            f"--os {system!r} is not known", why=f"it is one of {', '.join(SYSTEMS)}", do="give one of these"
        )
    if driver is not None and not re.fullmatch(r"\d{3}(\.\d{1,4}){0,2}", driver, re.ASCII):
        raise UsageError(
            f"--driver {driver!r} is no version of a driver",
            why="a version looks like 580.105.08, or 582.28 on Windows; 12.4 or 13.0 is the driver's CUDA",
            do="give the Driver Version that nvidia-smi shows",
        )
    place = Place(system=system or "linux", python=None if python is None else python_stated(python))
    stated = read_texts(
        map(read_file, map(Path, inputs)), Stated(place=place, system_given=system is not None)
    )
    if cards:
        named = (replace(_card(name), index=number) for number, name in enumerate(cards))
        stated = replace(stated, cards=tuple(named))
        if any(card.capability in embedded() for card in stated.cards or ()):
            stated = replace(stated, place=replace(stated.place, architecture="aarch64"))
    if driver:
        stated = replace(stated, place=replace(stated.place, driver=driver, told_cuda=None))
    if torch is not None:
        stated = replace(stated, torch=torch_stated(torch, stated.place))
    return stated
