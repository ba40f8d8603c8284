"""Which builds run where: the tables of facts/builds.toml and the rules of NVIDIA's compatibility.

Code for X.y runs on X.z with z >= y. PTX for X.y is compiled by the driver for every newer card, if the
driver is as new as the CUDA that made it. A driver runs programs of its own CUDA major version and of older
ones.
Source: https://docs.nvidia.com/deploy/cuda-compatibility/
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from packaging.version import InvalidVersion, Version

from snugtune import facts

Capability = tuple[int, int]


def numbers(text: str) -> tuple[int, int]:
    """'6.1' -> (6, 1); for compute capabilities and versions of Python and CUDA."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def show(pair: tuple[int, int] | None) -> str | None:
    """(6, 1) -> '6.1'; None stays None."""
    return None if pair is None else f"{pair[0]}.{pair[1]}"


@cache
def version_of(text: str | None) -> Version | None:
    """A version, or None if the text is none."""
    try:
        return None if text is None else Version(text)
    except InvalidVersion:
        return None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a build has to run. None is what was not stated, and is not held against a build."""

    system: str = "linux"
    """linux, windows, wsl or macos."""
    architecture: str = "x86_64"
    python: tuple[int, int] | None = None
    driver: str | None = None
    told_cuda: str | None = None
    """The driver's newest CUDA, as nvidia-smi or an error message has it; counts where no driver is named."""

    @property
    def driver_version(self) -> Version | None:
        """The driver for comparisons: of a branch that is named alone ("525") the newest."""
        return version_of(f"{self.driver}.9999" if self.driver and self.driver.isdecimal() else self.driver)

    @property
    def driver_in_words(self) -> str:
        """'550.54.14', or what is known of it."""
        return self.driver or f"with CUDA up to {self.told_cuda}"

    @property
    def wheels(self) -> str:
        """The system that wheels are made for: WSL is a Linux."""
        return "linux" if self.system == "wsl" else self.system

    @property
    def drivers(self) -> str:
        """The system that the driver belongs to: in WSL it is the one of Windows."""
        return "windows" if self.system == "wsl" else self.system


@dataclass(frozen=True, kw_only=True)
class Build:
    """One build of PyTorch or TensorFlow, as it is for one system."""

    package: str
    version: str
    cuda: str
    code: frozenset[Capability]
    ptx: frozenset[Capability]
    python: tuple[tuple[int, int], tuple[int, int]]
    pypi: bool
    source: str
    checked: str
    row: Any
    """The block of builds.toml."""

    @property
    def tag(self) -> str:
        """'12.6' -> 'cu126', as indexes and local versions write it."""
        return "cu" + self.cuda.replace(".", "")

    @property
    def line(self) -> str:
        """'2.14.1' -> '2.14': all patches of a line have the same code."""
        return ".".join(self.version.split(".")[:2])

    def runs_in(self, place: Place) -> bool:
        """Whether Python and driver suit it."""
        low, high = self.python
        python_fits = place.python is None or low <= place.python <= high
        return python_fits and driver_runs(self.cuda, place) is not False

    def covers(self, capability: Capability | None, place: Place) -> bool:
        """Whether it has code for a card; a card of unknown capability needs both ends of a range."""
        wanted = [capability] if capability else unknown_capabilities()
        ptx_works = bool(self.ptx) and self._ptx_works(place)
        return all(holds_code(self.code, self.ptx, each, ptx_works=ptx_works) for each in wanted)

    def _ptx_works(self, place: Place) -> bool:
        driver, needed = place.driver_version, version_of(native_driver(self.cuda, place))
        return driver is None or needed is None or driver >= needed


def holds_code(
    code: Sequence[Capability] | frozenset[Capability],
    ptx: Sequence[Capability] | frozenset[Capability],
    capability: Capability,
    *,
    ptx_works: bool = True,
) -> bool:
    """Whether machine code or PTX in a build serves a card.

    Args:
        code: Capabilities whose machine code is inside.
        ptx: Capabilities whose PTX is inside.
        capability: The card's.
        ptx_works: Whether the driver can compile this PTX.
    """
    if capability in embedded():
        return capability in code
    machine = any(major == capability[0] and minor <= capability[1] for major, minor in code)
    return machine or (ptx_works and any(each <= capability for each in ptx))


@cache
def torch_builds(system: str, architecture: str = "x86_64") -> tuple[Build, ...]:
    """The builds of PyTorch for CUDA of a system (linux, windows), the newest first."""
    builds = [_build("torch", row, system, architecture) for row in facts.read("builds")["torch"]]
    return tuple(sorted((build for build in builds if build is not None), key=_newest, reverse=True))


@cache
def tensorflow_builds(system: str) -> tuple[Build, ...]:
    """The builds of TensorFlow that know cards on a system, the newest first."""
    rows = [row for row in facts.read("builds")["tensorflow"] if system == "linux" or row["windows"]]
    builds = [
        _build("tensorflow", {"systems": [system], "pypi": True, **row}, system, "x86_64") for row in rows
    ]
    return tuple(sorted((build for build in builds if build is not None), key=_newest, reverse=True))


def find_torch(version: str, cuda: str, place: Place) -> Build | None:
    """The known build of a version of PyTorch ('2.7.0') with a CUDA ('12.6'); None if there is none."""
    line = ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])
    builds = torch_builds(place.wheels, place.architecture)
    return next((build for build in builds if build.line == line and build.cuda == cuda), None)


def pypi_cuda(version: str, place: Place) -> str | None:
    """The CUDA in PyPI's file of a version without "+..."; None for the CPU or an unknown version."""
    line = ".".join(version.split(".")[:2])
    if place.wheels != "linux" or place.architecture != "x86_64":
        return None
    return next((build.cuda for build in torch_builds("linux") if build.line == line and build.pypi), None)


def driver_runs(cuda: str, place: Place) -> bool | None:
    """Whether the driver runs programs of this CUDA; None if that is not known."""
    driver, needed = place.driver_version, version_of(needed_driver(cuda, place))
    if driver is None and place.told_cuda is not None:
        return numbers(place.told_cuda)[0] >= numbers(cuda)[0]
    return None if driver is None or needed is None else driver >= needed


def needed_driver(cuda: str, place: Place) -> str | None:
    """The oldest driver for a CUDA's major version; None if unknown."""
    major = numbers(cuda)[0]
    rows = [row for row in facts.read("builds")["cuda_major"] if row["major"] == major]
    return rows[0]["driver"].get(place.drivers) if rows else None


def native_driver(cuda: str, place: Place) -> str | None:
    """The driver that came with a CUDA toolkit, from which on its PTX can be compiled; None if unknown."""
    rows = [row for row in facts.read("builds")["cuda"] if row["version"] == cuda]
    return rows[0]["driver"].get(place.drivers) if rows else None


def ceiling(place: Place) -> str | None:
    """The newest CUDA that a driver knows, which is what nvidia-smi shows; None if unknown."""
    if place.told_cuda is not None:
        return place.told_cuda
    driver = place.driver_version
    known = [
        row["version"]
        for row in facts.read("builds")["cuda"]
        if driver is not None
        and (needed := row["driver"].get(place.drivers)) is not None
        and driver >= Version(needed)
    ]
    return max(known, key=numbers, default=None)


def too_old_for_toolkit(cuda: str, capability: Capability) -> bool:
    """Whether a card is older than all that a CUDA compiles for: nobody can have built code for it."""
    rows = [row for row in facts.read("builds")["cuda"] if row["version"] == cuda]
    return bool(rows) and capability < min(map(numbers, rows[0]["capabilities"]))


def is_published(version: str, cuda: str) -> bool:
    """Whether some system has a build of this line of PyTorch for this CUDA."""
    places = (Place(system="linux"), Place(system="windows"), Place(architecture="aarch64"))
    return any(find_torch(version, cuda, place) is not None for place in places)


def toolkit_compiles(cuda: str, capability: Capability) -> bool | None:
    """Whether nvcc of this version compiles for a card; None for one that is not in the table."""
    rows = [row for row in facts.read("builds")["cuda"] if row["version"] == cuda]
    if not rows:
        return None
    return any(
        numbers(each)[0] == capability[0] and numbers(each) <= capability for each in rows[0]["capabilities"]
    )


def architecture_of(capability: Capability | None) -> Any | None:
    """The block of NVIDIA's architecture; None for a capability that none of them has."""
    for row in facts.read("builds")["architecture"]:
        low, high = map(numbers, row["capabilities"])
        if capability is not None and low <= capability <= high:
            return row
    return None


def branch_of(driver: str | None) -> int | None:
    """'580.105.08' -> 580."""
    version = version_of(driver)
    return None if version is None else version.major


def driver_fault(capability: Capability | None, driver: str | None) -> str | None:
    """'new' if the driver no longer sees the card, 'old' if it does not know it yet, else None."""
    row, branch = architecture_of(capability), branch_of(driver)
    if row is None or branch is None:
        return None
    if branch < int(row["driver_first"]):
        return "old"
    return "new" if "driver_blind" in row and branch >= int(row["driver_blind"]) else None


@cache
def embedded() -> frozenset[Capability]:
    """Capabilities of modules for embedded computers."""
    return frozenset(map(numbers, facts.read("builds")["embedded"]["capabilities"]))


@cache
def unknown_capabilities() -> tuple[Capability, ...]:
    """The two ends of the range that a build must cover for a card of unknown capability."""
    return tuple(map(numbers, facts.read("builds")["unknown_card"]["capabilities"]))


def _build(package: str, row: Any, system: str, architecture: str) -> Build | None:
    code = row["code"]
    if architecture != "x86_64":
        code = row.get(f"code_{architecture}")
    elif system == "windows":
        code = row.get("code_windows", code)
    if system not in row["systems"] or code is None:
        return None
    return Build(
        package=package,
        version=row["version"],
        cuda=row["cuda"],
        code=frozenset(map(numbers, code)),
        ptx=frozenset(map(numbers, row.get("ptx", ()))),
        python=(numbers(row["python"][0]), numbers(row["python"][1])),
        pypi=row["pypi"] and architecture == "x86_64" and (package != "torch" or system == "linux"),
        source=row["source"],
        checked=str(row["checked"]),
        row=row,
    )


def _newest(build: Build) -> tuple[Version, bool, tuple[int, int]]:
    """Newer versions first; of one version the CUDA that PyPI chose, then the newest CUDA."""
    default = build.row["pypi"]
    return Version(build.version), default, numbers(build.cuda)
