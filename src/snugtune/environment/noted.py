"""What a run notes about its surroundings. Imports no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from snugtune.hardware import Machine

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
        "variables": {name: without_person(os.environ[name]) for name in _VARIABLES if name in os.environ},
    }


def _ram_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def without_person(value: str) -> str:
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
