"""What is known of a machine, from whatever source. What nobody stated is None, or missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from snugtune.environment.builds import Capability, Place, find_torch, numbers, pypi_cuda, version_of
from snugtune.environment.cards import KnownCard, card_of, cards_called, named_so
from snugtune.errors import UsageError
from snugtune.hardware import Gpu

# Builds without CUDA, by the begin of their local version.
_OTHER_BUILDS = {"cpu": "the CPU", "rocm": "AMD cards (ROCm)", "xpu": "Intel cards (XPU)"}


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that holds memory of a card. `memory_bytes` is None where the driver does not tell."""

    pid: int
    name: str
    memory_bytes: int | None
    draws: bool = False
    """Whether it is there for the screen and does not compute."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card: what the driver or a person says of it, and its block in cards.toml."""

    name: str
    capability: Capability | None = None
    memory_bytes: int | None = None
    known: KnownCard | None = None
    one_of: tuple[KnownCard, ...] = ()
    """The cards that a name means which is sold in several sizes."""
    index: int | None = None
    uuid: str | None = None
    bus_id: str | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    busy_percent: int | None = None
    temperature_c: int | None = None
    throttled: bool = False
    display_driver: bool = False
    """Whether Windows manages its memory (WDDM), so that it spills over into that of the computer."""
    mig: bool = False
    processes: tuple[Process, ...] | None = None
    """None where nobody listed them; empty where the list was empty."""

    def as_gpu(self, index: int) -> Gpu:
        """The card as the chooser of builds wants it; the nominal memory where the real one is unknown."""
        memory = self.memory_bytes
        if memory is None and self.known is not None and self.known.nominal_gib is not None:
            memory = round(self.known.nominal_gib * 2**30)
        return Gpu(index=index, name=self.name, compute_capability=self.capability, memory_bytes=memory)


@dataclass(frozen=True, kw_only=True)
class Torch:
    """A PyTorch that is installed, or stated."""

    version: str
    cuda: str | None
    """CUDA inside; None for a build for the CPU, and where it is unknown."""
    made_for: str | None = None
    """What a build without CUDA is made for, in words; None for CUDA, and where it is unknown."""
    code: tuple[Capability, ...] | None = None
    """Capabilities whose machine code is inside; None if unknown."""
    ptx: tuple[Capability, ...] = ()
    listed: bool = True
    """Whether builds.toml has it, or its lists were read from itself."""
    cudnn: str | None = None
    nccl: str | None = None


@dataclass(frozen=True, kw_only=True)
class Stated:
    """All that is known of a machine."""

    cards: tuple[Card, ...] | None = None
    """None where nobody said whether there is a card; empty where there is none."""
    place: Place = field(default_factory=Place)
    system_given: bool = False
    """Whether a person said which system it is, so that texts do not."""
    open_module: bool | None = None
    torch: Torch | None = None
    torch_missing: bool = False
    torch_spoke: bool = False
    """Whether a text is the word of a PyTorch that is installed, whichever."""
    torch_problem: str | None = None
    """What `import torch` said when it failed."""
    packages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Versions by package; several where an environment has several."""
    toolkit: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    """Libraries that the variables put in front of those of the wheels."""
    topology: tuple[str, ...] = ()
    """How pairs of cards are connected, as `nvidia-smi topo -m` writes it: PHB, NV2 ..."""
    wsl: int | None = None
    container: str | None = None
    pci_cards: int | None = None
    """NVIDIA cards on the PCI bus, also without a driver."""
    texts: tuple[str, ...] = ()
    """What programs said; the rules look for signs in it."""
    live: bool = False
    measured: Mapping[str, object] = field(default_factory=dict)

    @property
    def has_torch(self) -> bool:
        """Whether a PyTorch is there, so that it has to go before another build of the same version comes."""
        return self.torch is not None or self.torch_problem is not None or self.torch_spoke

    def with_text(self, text: str) -> Stated:
        """The same, with one more text."""
        return replace(self, texts=(*self.texts, text))

    def with_cards(self, cards: Sequence[Card]) -> Stated:
        """The same with more cards; what two texts tell of one card is put together."""
        known = list(self.cards or ())
        for card in cards:
            for place, before in enumerate(known):
                same = (before.index, before.name) == (card.index, card.name) and card.index is not None
                if same or (card.uuid is not None and card.uuid == before.uuid):
                    told = {
                        name: value for name, value in vars(card).items() if value not in (None, (), False)
                    }
                    known[place] = replace(
                        before, **{n: v for n, v in told.items() if not getattr(before, n)}
                    )
                    break
            else:
                known.append(card)
        return replace(self, cards=tuple(known))

    def in_system(self, system: str | None) -> Stated:
        """The same in a system that a text tells of; None tells nothing."""
        if system is None or self.system_given:
            return self
        return replace(self, place=replace(self.place, system=system))

    @property
    def gpus(self) -> list[Gpu]:
        """The cards as the chooser of builds wants them."""
        return [card.as_gpu(number) for number, card in enumerate(self.cards or ())]


def card_named(name: str) -> Card:
    """The card that a person names: a block, the blocks of several sizes, or an unknown card."""
    found = cards_called(name)
    if not found:
        return Card(name=name)
    capabilities = {card.capability for card in found}
    if len(found) == 1:
        only = found[0]
        return Card(name=only.name, capability=only.capability, memory_bytes=only.memory_bytes, known=only)
    names = {card.name for card in found}
    return Card(
        name=names.pop() if len(names) == 1 else name,
        capability=capabilities.pop() if len(capabilities) == 1 else None,
        known=found[0] if len({card.chip for card in found}) == 1 else None,
        one_of=found,
    )


def card_told(
    name: str, memory_bytes: int | None, capability: Capability | None = None, **more: object
) -> Card:
    """The card that a driver tells of: its block if name and memory fit one."""
    known = card_of(name, memory_bytes)
    # Without its memory a card may be any of those that share the name; they share the capability, too.
    alike = named_so(name) if known is None and memory_bytes is None else ()
    shared = {card.capability for card in (known, *alike) if card is not None}
    return Card(
        name=name,
        capability=capability or (shared.pop() if len(shared) == 1 else None),
        memory_bytes=memory_bytes,
        known=known,
        one_of=alike,
        **more,  # type: ignore[arg-type]
    )


def torch_stated(text: str, place: Place) -> Torch:
    """'2.15.0+cu132', '2.9.1+cpu' or '2.8.0' (then PyPI's file) -> what is inside, as far as it is known.

    Raises:
        UsageError: No version of PyTorch.
    """
    version = version_of(text)
    if version is None:
        raise UsageError(
            f"--torch {text!r} is no version of PyTorch",
            why="a version looks like 2.15.0+cu132, 2.14.1+cpu or 2.8.0",
            do="give what `pip list` shows; without +... it is taken for the file on PyPI",
        )
    text, tag = str(version), version.local  # "v2.8" is "2.8", too
    if tag is None:
        cuda = pypi_cuda(text, place)
        if cuda is None:
            known = place.wheels != "linux"
            return Torch(version=text, cuda=None, made_for="the CPU" if known else None, listed=known)
    elif re.fullmatch(r"cu\d{2,3}", tag):
        cuda = f"{tag[2:-1]}.{tag[-1]}"
    else:
        made_for = next((what for start, what in _OTHER_BUILDS.items() if tag.startswith(start)), None)
        return Torch(version=text, cuda=None, made_for=made_for, listed=made_for is not None)
    build = find_torch(text, cuda, place)
    if build is None:
        return Torch(version=text, cuda=cuda, listed=False)
    return Torch(
        version=text,
        cuda=cuda,
        code=tuple(sorted(build.code)),
        ptx=tuple(sorted(build.ptx)),
        cudnn=build.row.get("cudnn"),
    )


def python_stated(text: str) -> tuple[int, int]:
    """'3.12' or '3.12.4' -> (3, 12).

    Raises:
        UsageError: No version of Python.
    """
    parts = text.removesuffix("t").split(".")  # 3.14t is 3.14 without the lock around the interpreter
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        raise UsageError(
            f"--python {text!r} is no version of Python",
            why="a version looks like 3.12",
            do="write it like 3.12",
        )
    return numbers(".".join(parts[:2]))


def latest(packages: Mapping[str, Sequence[str]], name: str) -> str | None:
    """The version of a package, the last one if there are several; None if it is not there."""
    versions = packages.get(name)
    return versions[-1] if versions else None
