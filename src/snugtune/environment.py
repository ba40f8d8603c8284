"""What is installed here, and which PyTorch build fits the cards of this machine. Imports no torch."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from packaging.version import InvalidVersion, Version

from snugtune import facts
from snugtune.errors import UsageError
from snugtune.hardware import Gpu, Machine

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "pyarrow",
    "torchmetrics",
    "peft",
    "bitsandbytes",
)
_VARIABLES = (
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "OMP_NUM_THREADS",
)
_PYPI = "PyPI"

Capability = tuple[int, int]
_PLAIN_WORD = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class InstallLine:
    """What to tell pip. str() gives the line for a shell."""

    command: tuple[str, ...]
    """The words after `pip install`."""
    because: str
    source: str | None
    fallback: tuple[str, ...] | None = None
    """Words to try where PyTorch's own index cannot be reached but PyPI can."""

    def __str__(self) -> str:
        return shell_line(self.command)


def shell_line(words: Sequence[str]) -> str:
    """The pip command with these words, quoted so that sh, cmd and PowerShell all read the same."""
    # Double quotes: cmd knows no others, and a bare "<" would redirect in all three.
    quoted = (word if _PLAIN_WORD.fullmatch(word) else f'"{word}"' for word in words)
    return " ".join(("pip", "install", *quoted))


def install_line(
    package: str,
    machine: Machine,
    *,
    system: str | None = None,
    python: tuple[int, int] | None = None,
) -> InstallLine:
    """Choose the build of a package that has code for this machine's cards.

    Where no build has code for all cards, those with the most memory win, and the reason names the
    others.

    Args:
        package: So far only "torch".
        machine: What `hardware.find_gpus` found.
        system: Operating system, as `platform.system` names it; None for this one.
        python: Version of Python; None for this one.

    Raises:
        UsageError: A package that nothing is known about.
    """
    if package != "torch":
        raise UsageError(
            f"no install line is known for {package!r}",
            why="it is known for torch alone",
            do="ask for torch; other packages install as usual",
        )
    system = system or platform.system()
    python = python or sys.version_info[:2]
    if not machine.gpus:
        return _cpu_line(_why_no_card(machine, system), system)
    builds = _builds(system)
    usable = [build for build in builds if build.runs_on(machine.driver) and build.runs_in(python)]
    # max() takes the first of equals, and the builds stand in order of preference.
    best = max(usable, key=lambda build: _worth(build.covered(machine)), default=None)
    if best is None or not best.covered(machine):
        return _cpu_line(_why_no_build(builds, machine, python), system)
    better = [build for build in builds[: builds.index(best)] if build.runs_in(python)]
    on_pypi = [build for build in usable if build.index == _PYPI and _covers_as_much(build, best, machine)]
    return InstallLine(
        command=(best.torch,) if best.index == _PYPI else (best.torch, "--index-url", best.index),
        because=_why(best, better, machine),
        source=best.source,
        fallback=(on_pypi[0].torch,) if on_pypi and best.index != _PYPI else None,
    )


def installed(names: Sequence[str]) -> dict[str, str | None]:
    """Return the installed versions of packages, None for a missing one. Imports none of them."""
    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def snapshot(machine: Machine) -> dict[str, object]:
    """Return what a run notes about its surroundings; no home folder, no credentials."""
    return {
        "snugtune": installed(["snugtune"])["snugtune"],
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "architecture": platform.machine(),
        "cpu_count": os.cpu_count(),
        "ram_bytes": _ram_bytes(),
        "packages": installed(_PACKAGES),
        "gpus": [asdict(gpu) for gpu in machine.gpus],
        "driver": machine.driver,
        "driver_problem": machine.problem,
        "variables": {name: _without_person(os.environ[name]) for name in _VARIABLES if name in os.environ},
    }


@dataclass(frozen=True, kw_only=True)
class _Build:
    """One [[build]] of facts/builds.toml, as it is for one operating system."""

    cuda: str
    torch: str
    index: str
    driver: str
    code: frozenset[Capability]
    python: tuple[Capability, Capability]
    because: str
    source: str

    def runs_on(self, driver: str | None) -> bool:
        """Whether the driver is new enough. An unknown version is not held against a build."""
        version = _version(driver)
        return version is None or version >= Version(self.driver)

    def runs_in(self, python: tuple[int, int]) -> bool:
        return self.python[0] <= python <= self.python[1]

    def covered(self, machine: Machine) -> list[Gpu]:
        """The cards that this build has code for."""
        unknown = _capabilities(facts.read("builds")["unknown_card"]["capabilities"])
        return [
            gpu
            for gpu in machine.gpus
            if all(map(self._has_code, [gpu.compute_capability] if gpu.compute_capability else unknown))
        ]

    def _has_code(self, wanted: Capability) -> bool:
        if wanted in _capabilities(facts.read("builds")["embedded"]["capabilities"]):
            return wanted in self.code
        return any(major == wanted[0] and minor <= wanted[1] for major, minor in self.code)


def _builds(system: str) -> list[_Build]:
    return [
        _Build(
            cuda=row["cuda"],
            torch=row["torch"],
            index=row["index"][system],
            driver=row["driver"][system],
            code=frozenset(_capabilities(row["code"])),
            python=(_capability(row["python"][0]), _capability(row["python"][1])),
            because=row["because"],
            source=row["source"],
        )
        for row in facts.read("builds")["build"]
        if system in row["index"]
    ]


def _cpu_line(because: str, system: str) -> InstallLine:
    cpu = facts.read("builds")["cpu"]
    plain = (cpu["torch"],)
    index = cpu["extra_index"].get(system)
    return InstallLine(
        command=plain if index is None else (*plain, "--extra-index-url", index, *cpu["extra_index_options"]),
        because=f"the build for the CPU: {because}",
        source=cpu["source"],
        fallback=None if index is None else plain,
    )


def _why(best: _Build, preferred: Sequence[_Build], machine: Machine) -> str:
    """Why this build; what a newer driver would allow; which cards it leaves out.

    Args:
        best: The build that was chosen.
        preferred: Builds that would come before it.
        machine: The cards and their driver.
    """
    covered = best.covered(machine)
    driver = f"driver {machine.driver}"
    if _version(machine.driver) is None:
        driver = f"a driver of unknown version ({best.driver} is needed)"
    text = f"CUDA {best.cuda} for {_show(covered)} with {driver}: {best.because}"
    better = [
        build
        for build in preferred
        if not build.runs_on(machine.driver) and _covers_as_much(build, best, machine)
    ]
    if better:
        text += f"; {better[0].torch} would run with {_driver_advice(better[0].driver, covered)}"
    unused = [gpu for gpu in machine.gpus if gpu not in covered]
    if unused:
        text += f"; unused: {_show(unused)}, as no build that runs here has code for all cards"
    return text


def _why_no_card(machine: Machine, system: str) -> str:
    driver = facts.read("builds")["driver"]
    if machine.problem is not None:
        return machine.problem
    version = _version(machine.driver)
    if version is None:
        return "macOS has no CUDA" if system == "Darwin" else "no NVIDIA driver was found"
    text = f"driver {machine.driver} reports no card"
    if version >= Version(driver["blind_from"]):
        text += (
            f"; drivers from {driver['blind_from']} on do not see Maxwell, Pascal and Volta cards,"
            f" whose last branch is {driver['last_branch']}"
        )
    return text


def _why_no_build(builds: Sequence[_Build], machine: Machine, python: tuple[int, int]) -> str:
    cards = _show(machine.gpus)
    with_code = [build for build in builds if build.covered(machine)]
    if not with_code:
        return f"no build has code for {cards}"
    right_driver = [build for build in with_code if build.runs_on(machine.driver)]
    if right_driver:
        newest = ".".join(map(str, max(build.python[1] for build in right_driver)))
        here = ".".join(map(str, python))
        return (
            f"the builds for {cards} with driver {machine.driver} end at Python {newest}, and this is {here}"
        )
    oldest = min((build.driver for build in with_code), key=Version)
    needed = facts.read("builds")["driver"]["newest_needed"]
    return (
        f"driver {machine.driver} is too old for {cards}, every build needs at least {oldest};"
        f" install {_driver_advice(needed, machine.gpus)}"
    )


def _driver_advice(at_least: str, gpus: Sequence[Gpu]) -> str:
    """The driver to install: old cards have a last branch too."""
    driver = facts.read("builds")["driver"]
    below = _capability(driver["last_branch_below"])
    if any(gpu.compute_capability is None or gpu.compute_capability < below for gpu in gpus):
        last = driver["last_branch"]
        return f"a driver of branch {last}, the last for Maxwell, Pascal and Volta cards"
    return f"driver {at_least} or later"


def _covers_as_much(build: _Build, best: _Build, machine: Machine) -> bool:
    covered = build.covered(machine)
    return all(gpu in covered for gpu in best.covered(machine))


def _worth(gpus: Sequence[Gpu]) -> tuple[int, int]:
    return sum(gpu.memory_bytes or 0 for gpu in gpus), len(gpus)


def _show(gpus: Sequence[Gpu]) -> str:
    return ", ".join(
        f"{gpu.name} (compute capability "
        + (
            f"{'.'.join(map(str, gpu.compute_capability))})"
            if gpu.compute_capability
            else "could not be read)"
        )
        for gpu in gpus
    )


def _capabilities(texts: Sequence[str]) -> list[Capability]:
    return [_capability(text) for text in texts]


def _capability(text: str) -> Capability:
    major, minor = text.split(".")
    return int(major), int(minor)


def _version(text: str | None) -> Version | None:
    try:
        return None if text is None else Version(text)
    except InvalidVersion:
        return None


def _ram_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def _without_person(value: str) -> str:
    """A variable's value without what belongs to its owner: home folder, credentials in an address."""
    if "://" in value:
        try:
            address = urlsplit(value)
        except ValueError:
            return "(unreadable address)"
        return urlunsplit((address.scheme, address.netloc.rpartition("@")[2], address.path, "", ""))
    try:
        home = Path.home()
    except RuntimeError:  # a container's user may have none
        return value
    return value if home == Path(home.anchor) else value.replace(str(home), "~")
