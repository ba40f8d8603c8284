"""What to tell pip, so that PyTorch, TensorFlow and bitsandbytes have code for the cards of a machine."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from packaging.version import Version

from snugtune import facts
from snugtune.environment.builds import (
    Build,
    Capability,
    Place,
    architecture_of,
    driver_fault,
    driver_runs,
    needed_driver,
    numbers,
    show,
    tensorflow_builds,
    torch_builds,
    unknown_capabilities,
    version_of,
)
from snugtune.errors import UsageError
from snugtune.hardware import Gpu, Machine

_PLAIN_WORD = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
_SYSTEMS = {"Linux": "linux", "Windows": "windows", "Darwin": "macos"}


@dataclass(frozen=True, kw_only=True)
class InstallLine:
    """What to tell pip. str() gives the line for a shell."""

    command: tuple[str, ...]
    """The words after `pip install`."""
    because: str
    source: str | None
    fallback: tuple[str, ...] | None = None
    """Words to try where PyTorch's own index cannot be reached but PyPI can."""
    build: Build | None = None
    """The build that the line brings; None for the CPU."""

    def __str__(self) -> str:
        return shell_line(self.command)

    @property
    def other(self) -> str | None:
        """The line for a shell to take when this one fails; None if there is no other."""
        return None if self.fallback is None else shell_line(self.fallback)


def shell_line(words: Sequence[str]) -> str:
    """The pip command with these words, quoted so that sh, cmd and PowerShell all read the same."""
    # Double quotes: cmd knows no others, and a bare "<" would redirect in all three.
    quoted = (word if _PLAIN_WORD.fullmatch(word) else f'"{word}"' for word in words)
    return " ".join(("pip", "install", *quoted))


def place_of(machine: Machine, *, system: str | None = None, python: tuple[int, int] | None = None) -> Place:
    """Where this process runs, with the driver of a machine.

    Args:
        machine: What `hardware.find_gpus` found.
        system: linux, windows, wsl or macos; None for this one.
        python: Version of Python; None for this one.
    """
    here = _SYSTEMS.get(platform.system(), "linux")
    if here == "linux" and "microsoft" in platform.release().lower():
        here = "wsl"
    return Place(
        system=system or here,
        architecture={"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine()),
        python=python or sys.version_info[:2],
        driver=machine.driver,
    )


def install_line(
    package: str, machine: Machine, *, place: Place | None = None, mirror: str | None = None
) -> InstallLine:
    """Choose the newest build of a package that has code for this machine's cards.

    Where no build has code for all cards, those with the most memory win, and the reason names the others.

    Args:
        package: torch, tensorflow or bitsandbytes.
        machine: What `hardware.find_gpus` found.
        place: Where it has to run; None for here.
        mirror: Address that stands for that of PyTorch's index.

    Raises:
        UsageError: A package that nothing is known about.
    """
    place = place or place_of(machine)
    if package == "torch":
        return torch_line(machine, place, mirror=mirror)
    if package not in ("tensorflow", "bitsandbytes"):
        raise UsageError(
            f"no install line is known for {package!r}",
            why="it is known for torch, tensorflow and bitsandbytes",
            do="ask for one of these; other packages install as usual",
        )
    line = tensorflow_line(machine, place) if package == "tensorflow" else bitsandbytes_line(machine, place)
    if line is None:
        raise UsageError(
            f"no {package} works on this machine's cards",
            why=f"none has code for {show_cards(machine.gpus)}" if machine.gpus else "no card was found",
            do="see `snugtune doctor`",
        )
    return line


def torch_line(machine: Machine, place: Place, *, mirror: str | None = None) -> InstallLine:
    """The line for PyTorch; where nothing suits the cards, that for the CPU, with the reason."""
    if not machine.gpus:
        return _cpu_line(_why_no_card(machine, place), place, mirror)
    builds = trainable_builds(place)
    best = best_torch(machine.gpus, place)
    if best is None:
        return _cpu_line(why_no_build(machine.gpus, place), place, mirror)
    covered = covered_by(best, machine.gpus, place)
    others = [build for build in builds if build.runs_in(place) and build.pypi]
    on_pypi = [build for build in others if set(covered) <= set(covered_by(build, machine.gpus, place))]
    spec = f"torch=={best.line}.*"
    return InstallLine(
        command=(spec,) if best.pypi else (spec, "--index-url", f"{index_address(mirror)}/{best.tag}"),
        because=_why(best, builds, machine, place),
        source=best.source,
        fallback=(f"torch=={on_pypi[0].line}.*",) if on_pypi and not best.pypi else None,
        build=best,
    )


def best_torch(cards: Sequence[Gpu], place: Place) -> Build | None:
    """The newest build that serves the most memory of the cards; None if none serves any."""
    usable = [build for build in trainable_builds(place) if build.runs_in(place)]
    # max() takes the first of equals, and the newest come first.
    best = max(usable, key=lambda build: _worth(covered_by(build, cards, place)), default=None)
    return best if best is not None and covered_by(best, cards, place) else None


def tensorflow_line(machine: Machine, place: Place) -> InstallLine | None:
    """The line for TensorFlow; None if no version knows these cards here."""
    builds = [build for build in tensorflow_builds(place.wheels) if build.runs_in(place)]
    builds = [build for build in builds if place.architecture == "x86_64" or not machine.gpus]
    best = max(builds, key=lambda build: _worth(covered_by(build, machine.gpus, place)), default=None)
    if best is None or not machine.gpus or not covered_by(best, machine.gpus, place):
        return None
    words = [f"tensorflow{'[and-cuda]' if best.row['extra'] else ''}=={best.version}.*"]
    because = f"TensorFlow {best.version} is the newest for {show_cards(machine.gpus)} here"
    cudnn = facts.read("builds")["cudnn"]
    if best.row["open_cudnn"] and any(_below(gpu.compute_capability, cudnn["below"]) for gpu in machine.gpus):
        words.append(f"nvidia-cudnn-cu12<={cudnn['last']}")
        because += (
            f"; cuDNN is held back, because {cudnn['first_without']} and later have no code for these cards"
        )
    if Version(best.version) < Version("2.18"):
        words.append("numpy<2")  # TensorFlow up to 2.17 is built against NumPy 1
    if not best.row["extra"]:
        because += f"; CUDA {best.cuda} and cuDNN {best.row['cudnn']} must be installed beside it"
    return InstallLine(command=tuple(words), because=because, source=best.source, build=best)


def bitsandbytes_line(machine: Machine, place: Place, torch_cuda: str | None = None) -> InstallLine | None:
    """The line for bitsandbytes, whose code depends on the CUDA of PyTorch; None if none serves the cards.

    Args:
        machine: The cards.
        place: Where it has to run.
        torch_cuda: CUDA of the PyTorch that is there; None for that of the line for PyTorch.
    """
    if torch_cuda is None:
        best = best_torch(machine.gpus, place)
        torch_cuda = best.cuda if best else None
    if torch_cuda is None or not machine.gpus:
        return None
    for row in facts.read("builds")["bitsandbytes"]:
        low, high = map(numbers, row["python"])
        oldest = bitsandbytes_oldest(row["first"], torch_cuda)
        fits = [
            gpu
            for gpu in machine.gpus
            if oldest and oldest <= (gpu.compute_capability or unknown_capabilities()[0])
        ]
        if fits and (place.python is None or low <= place.python <= high):
            because = f"with PyTorch for CUDA {torch_cuda} it has code from {show(oldest)} on"
            return InstallLine(command=(row["spec"],), because=because, source=row["source"])
    return None


def bitsandbytes_oldest(version: str, torch_cuda: str) -> Capability | None:
    """The oldest capability that a bitsandbytes has code for with a PyTorch for this CUDA; None for none."""
    for row in facts.read("builds")["bitsandbytes"]:
        if (version_of(version) or Version("0")) >= Version(row["first"]):
            known = [cuda for cuda in row["oldest"] if numbers(cuda) <= numbers(torch_cuda)]
            return numbers(row["oldest"][max(known, key=numbers)]) if known else None
    return None


@cache
def trainable_builds(place: Place) -> tuple[Build, ...]:
    """The builds of PyTorch that snugtune trains with, the newest first."""
    oldest = Version(facts.read("builds")["index"]["oldest_torch"])
    builds = torch_builds(place.wheels, place.architecture)
    return tuple(build for build in builds if Version(build.version) >= oldest)


def covered_by(build: Build, cards: Sequence[Gpu], place: Place) -> list[Gpu]:
    """The cards that a build has code for, and that the driver sees."""
    return [
        card
        for card in cards
        if build.covers(card.compute_capability, place)
        and driver_fault(card.compute_capability, place.driver) is None
    ]


def why_no_build(cards: Sequence[Gpu], place: Place) -> str:
    """Why there is no build of PyTorch for these cards here: code, driver or Python, in this order."""
    names = show_cards(cards)
    builds = trainable_builds(place)
    with_code = [
        build for build in builds if any(build.covers(card.compute_capability, place) for card in cards)
    ]
    if not with_code:
        oldest_torch = facts.read("builds")["index"]["oldest_torch"]
        return f"no build of PyTorch {oldest_torch} or later has code for {names}"
    seen = [card for card in cards if driver_fault(card.compute_capability, place.driver) is None]
    if not seen:
        advice = driver_advice(cards[0].compute_capability)
        return f"driver {place.driver} is not made for {names}; install {advice}"
    right_driver = [build for build in with_code if driver_runs(build.cuda, place) is not False]
    if right_driver and place.python is not None:
        low, high = min(b.python[0] for b in right_driver), max(b.python[1] for b in right_driver)
        unnamed = place.driver is None and place.told_cuda is None
        driver = "" if unnamed else f" with driver {place.driver_in_words}"
        end = f"end at Python {show(high)}" if place.python > high else f"begin at Python {show(low)}"
        return f"the builds for {names}{driver} {end}, and this is {show(place.python)}"
    oldest = min((needed_driver(build.cuda, place) or "0" for build in with_code), key=Version)
    return (
        f"the driver ({place.driver_in_words}) is too old for {names}, every build needs at least {oldest};"
        f" install {driver_advice(cards[0].compute_capability)}"
    )


def driver_advice(capability: Capability | None, at_least: str = "580") -> str:
    """The driver to install, in words: old cards have a last branch."""
    row = architecture_of(capability)
    if row is not None and "driver_last" in row:
        return f"a driver of branch {row['driver_last']}, the last for {row['name']} cards"
    if capability is None:
        return f"a driver of branch {at_least}, the last that also knows Maxwell, Pascal and Volta cards"
    return f"driver {at_least} or later"


def show_cards(cards: Sequence[Gpu]) -> str:
    """'NVIDIA GeForce GTX 1080 Ti (compute capability 6.1), ...'."""
    return ", ".join(
        f"{card.name} (compute capability {show(card.compute_capability) or 'unknown'})" for card in cards
    )


def _why(best: Build, builds: Sequence[Build], machine: Machine, place: Place) -> str:
    """Why this build; what a newer driver would allow; which cards it leaves out."""
    covered = covered_by(best, machine.gpus, place)
    driver = f" with driver {place.driver}"
    if version_of(place.driver) is None:
        driver = f", which needs driver {needed_driver(best.cuda, place)} or later"
    text = f"PyTorch {best.line} for CUDA {best.cuda} is the newest for {show_cards(covered)}{driver}"
    free = Place(system=place.system, architecture=place.architecture, python=place.python)
    better = [
        build
        for build in builds
        if build.runs_in(free) and set(covered) <= set(covered_by(build, covered, free))
    ]
    if better and Version(better[0].version) > Version(best.version):
        needed = needed_driver(better[0].cuda, place) or "580"
        text += f"; {better[0].line} would run with {driver_advice(covered[0].compute_capability, needed)}"
    unused = [gpu for gpu in machine.gpus if gpu not in covered]
    if unused:
        text += f"; unused: {show_cards(unused)}, as no build that runs here has code for all cards"
    return text


def _cpu_line(because: str, place: Place, mirror: str | None) -> InstallLine:
    cpu = facts.read("builds")["cpu"]
    plain: tuple[str, ...] = (cpu["torch"],)
    extra = place.system in cpu["extra_index_systems"]
    longer = (*plain, "--extra-index-url", f"{index_address(mirror)}/cpu", *cpu["extra_index_options"])
    return InstallLine(
        command=longer if extra else plain,
        because=f"the build for the CPU: {because}",
        source=cpu["source"],
        fallback=plain if extra else None,
    )


def _why_no_card(machine: Machine, place: Place) -> str:
    if machine.problem is not None:
        return machine.problem
    version = version_of(machine.driver)
    if version is None:
        return "macOS has no CUDA" if place.system == "macos" else "no NVIDIA driver was found"
    text = f"driver {machine.driver} reports no card"
    if version.major >= 590:
        text += "; drivers after branch 580 do not see Maxwell, Pascal and Volta cards"
    return text


def index_address(mirror: str | None) -> str:
    """The address of PyTorch's index, or of the mirror that stands for it.

    Raises:
        UsageError: The mirror is no address, or one that a shell would not leave whole.
    """
    if mirror and not re.fullmatch(r"(?:https?|file)://[\w@%+=:,./~-]+", mirror, re.ASCII):
        raise UsageError(
            f"--mirror {mirror!r} is no address of an index",
            why="it has to begin with https://, http:// or file://, and to have no spaces or quotes",
            do="give the address below which cu126, cu130 and cpu lie: https://HOST/whl",
        )
    return str(mirror or facts.read("builds")["index"]["address"]).rstrip("/")


def _below(capability: Capability | None, bound: str) -> bool:
    return capability is None or capability < numbers(bound)


def _worth(cards: Sequence[Gpu]) -> tuple[int, int]:
    return sum(card.memory_bytes or 0 for card in cards), len(cards)
