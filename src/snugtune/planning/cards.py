"""Cards by name, as predictions need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snugtune import facts
from snugtune.environment.cards import KnownCard, cards_called, names_like
from snugtune.errors import UsageError
from snugtune.memory.cuda import CudaCard
from snugtune.units import MiB

Attention = Literal["default", "memory-efficient", "math"]


@dataclass(frozen=True, kw_only=True)
class PlannedCard:
    """A card that something is planned for.

    Args:
        name: What the driver calls it.
        choices: What decides which kernels run.
        context_bytes: Fewest and most bytes that CUDA takes besides the allocator.
    """

    name: str
    choices: CudaCard
    context_bytes: tuple[int, int]


def planned_card(name: str, *, attention: Attention = "default") -> PlannedCard:
    """The card of that name or alias.

    Raises:
        UsageError: No card is called so, or several different ones are.
    """
    known = _known_card(name)
    if known.multiprocessors is None:
        raise UsageError(
            f"nothing can be predicted for {known.name}",
            why="cards.toml does not say how many multiprocessors it has",
            do="add them there, or name another card of the same chip",
        )
    return PlannedCard(
        name=known.name,
        choices=CudaCard(
            capability=known.capability,
            multiprocessors=known.multiprocessors,
            attention=attention,
        ),
        context_bytes=_context_bytes(known),
    )


def _known_card(name: str) -> KnownCard:
    found = cards_called(name) if isinstance(name, str) else ()
    if not found:
        names = ", ".join(names_like(str(name)))
        raise UsageError(
            f"no card is called {name!r}",
            why="it is neither a name nor an alias in the table of cards",
            do=f"did you mean {names}?" if names else "`snugtune cards` lists them",
        )
    if len({(card.capability, card.multiprocessors) for card in found}) > 1:
        raise UsageError(
            f"several cards are called {name!r}",
            why="they differ: " + "; ".join(card.title for card in found),
            do="give the memory too, such as " + repr(found[0].title.replace(",", "").replace(" GB", "GB")),
        )
    return found[0]


def _context_bytes(card: KnownCard) -> tuple[int, int]:
    table = facts.read("contexts")
    row = next((row for row in table["measured"] if row["card"] in card.names), table["unknown"])
    return row["fewest_mib"] * MiB, row["most_mib"] * MiB
