"""The cards of facts/cards.toml, found by what people or the driver call them. Never a near match."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from snugtune import facts
from snugtune.environment.builds import Capability, numbers, show
from snugtune.units import GiB

_MAKER = re.compile(r"^(?:nvidia|geforce)+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?gi?b\b")


@dataclass(frozen=True, kw_only=True)
class KnownCard:
    """One block of cards.toml. None is what the block does not say."""

    names: tuple[str, ...]
    aliases: tuple[str, ...]
    chip: str
    capability: Capability
    multiprocessors: int | None
    nominal_gib: float | None
    memory_bytes: int | None
    bandwidth_gb_s: float | None
    fp32_tflops: float | None
    fp16_ratio: float | None
    tensor_cores: bool
    source: str
    checked: str

    @property
    def name(self) -> str:
        """What today's driver calls it."""
        return self.names[0]

    @property
    def title(self) -> str:
        """The name, with the size where it is not a part of it: two sizes may share a name."""
        size = (
            ""
            if self.nominal_gib is None or _SIZE.search(self.name.lower())
            else f", {self.nominal_gib:g} GB"
        )
        return f"{self.name}{size}"


@cache
def all_cards() -> tuple[KnownCard, ...]:
    """All cards, in the order of the file."""
    return tuple(
        KnownCard(
            names=tuple(row["names"]),
            aliases=tuple(row["aliases"]),
            chip=row["chip"],
            capability=numbers(row["capability"]),
            multiprocessors=row.get("multiprocessors"),
            nominal_gib=row.get("nominal_gib"),
            memory_bytes=row.get("memory_bytes"),
            bandwidth_gb_s=row.get("bandwidth_gb_s"),
            fp32_tflops=row.get("fp32_tflops"),
            fp16_ratio=row.get("fp16_ratio"),
            tensor_cores=has_tensor_cores(row["names"][0], numbers(row["capability"])),
            source=row["source"],
            checked=str(row["checked"]),
        )
        for row in facts.read("cards")["card"]
    )


def has_tensor_cores(name: str, capability: Capability) -> bool:
    """Whether a card of this name and capability has tensor cores: from 7.0 on, but for some chips of 7.5."""
    lacking = facts.read("precision")["without_tensor_cores"]
    without = show(capability) == lacking["capability"] and re.search(lacking["names"], name)
    return capability >= (7, 0) and not without


def cards_called(text: str) -> tuple[KnownCard, ...]:
    """The cards that a name or an alias means: none, one, or one for each memory size of that name.

    Case, spaces, "NVIDIA", "GeForce" and the size ("6GB", "6 GB") are optional; nothing else is.
    """
    wanted, size = _split(text)
    found = [card for card in all_cards() if wanted in _bare_names(card)]
    if size is None:
        return tuple(found)
    # A size that is a part of the driver's name says more than one that is not.
    in_name = [card for card in found if (wanted, size) in map(_split, card.names)]
    return tuple(in_name or [card for card in found if card.nominal_gib == size])


def names_like(text: str) -> list[str]:
    """Names that a person may have meant by a name that no card has; the likeliest first."""
    names = {_split(name)[0]: card.title for card in all_cards() for name in (*card.names, *card.aliases)}
    wanted = _split(text[:80])[0]
    close = [
        *(bare for bare in names if wanted and bare.startswith(wanted)),
        *get_close_matches(wanted, names, 9, 0.7),
    ]
    return list(dict.fromkeys(names[bare] for bare in close))[:5]


def card_of(name: str, memory_bytes: int | None) -> KnownCard | None:
    """The card that the driver calls so and that has about this much memory; None if there is none.

    Both are needed, because some names are sold with two memory sizes.
    """
    found = list(named_so(name))
    if memory_bytes is not None:
        found = [
            card
            for card in found
            if card.nominal_gib is None or 0.88 < memory_bytes / (card.nominal_gib * GiB) < 1.05
        ]
    return found[0] if len(found) == 1 else None


def named_so(name: str) -> tuple[KnownCard, ...]:
    """The cards that the driver calls exactly so, with or without the maker in front."""
    bare = _without_maker(name)
    return tuple(card for card in all_cards() if bare in map(_without_maker, card.names))


@cache
def _bare_names(card: KnownCard) -> frozenset[str]:
    return frozenset(_split(text)[0] for text in (*card.names, *card.aliases))


def _split(text: str) -> tuple[str, float | None]:
    """'NVIDIA GeForce GTX 1060 6GB' -> ('gtx1060', 6); people put spaces where they like."""
    text = " ".join(text.lower().replace("(r)", "").split())
    size = _SIZE.search(text)
    bare = _MAKER.sub("", _SIZE.sub("", text).replace(" ", ""))
    return bare, float(size[1]) if size else None


def _without_maker(name: str) -> str:
    return " ".join(name.split()).removeprefix("NVIDIA ")
