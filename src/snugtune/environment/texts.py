"""Recorded texts: nvidia-smi, package lists, nvcc, variables, kernel, errors. Each takes what it knows."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snugtune.environment.builds import numbers
from snugtune.environment.smi_text import read_csv, read_list, read_table, read_topology
from snugtune.environment.stated import Stated, Torch, card_named, card_told, latest, torch_stated
from snugtune.errors import UsageError
from snugtune.units import MiB, show_size

# torch==2.9.1+cpu | torch  2.9.1+cpu | pytorch  2.4.1  py3.11_cpu_0  pytorch | torch @ file:///.../torch-2.9.1...whl
_PACKAGE = re.compile(
    r"^\s*(?P<name>[A-Za-z][\w.-]*)\s*(?:==|\s)\s*v?(?P<version>\d+(?:\.\w+)+(?:\+\w[\w.]*)?)"
    r"(?:\s+(?P<build>[\w.]+))?(?:\s+(?P<channel>[\w/-]+))?\s*$",
    re.MULTILINE,
)
_LISTED_WITH_TORCH = re.compile(
    r"^(torch|pytorch|tensorflow|bitsandbytes|nvidia-|cuda|transformers|flash)", re.I
)
_VARIABLE = re.compile(
    r"^\s*(?:export\s+|\$env:|set\s+)?(?P<name>[A-Z][A-Z0-9_]+)\s*=\s*(?P<value>.*)$", re.MULTILINE
)
_MATTERS = re.compile(
    r"CUDA|^LD_LIBRARY_PATH$|NVIDIA|TORCH|NCCL|^TF_|^CONDA_PREFIX$|^VIRTUAL_ENV$|XLA|^OMP_NUM_THREADS$|COLAB_|KAGGLE_"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
_NVCC = re.compile(r"Cuda compilation tools, release (\d+\.\d+)|^CUDA Version (\d+\.\d+)", re.MULTILINE)
_WSL = re.compile(r"^Linux version \S+?-microsoft-standard\S*|^Linux version \S+-Microsoft\b", re.MULTILINE)
_NVRM = re.compile(
    r"NVRM(?: version)?: (?:loading )?NVIDIA UNIX (?P<open>Open )?"
    r".*?Kernel Module(?: for \w+)?\s+(?P<driver>\d+\.[\d.]+)"
)
_COLLECTED = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^PyTorch version: (\d\S+)",
        r"^Nvidia driver version: (\d[\d.]+)",
        r"^Python version: (\d+\.\d+)",
    )
)
_MOST_BYTES = MiB
_CEILING = re.compile(r"driver on your system is too old \(found version (\d+)\)")
_WARNED = re.compile(
    r"^\s*(?P<card>\S[^\n]*?) with CUDA capability sm_(?P<major>\d+)(?P<minor>\d) is not compatible with"
    r"|Found (?P<card2>[^\n]+?) which is too old to be supported.{0,400}?capability (?P<cap2>\d+\.\d)"
    r"|Found GPU\d+ (?P<card3>[^\n]+?) which is of cuda capability (?P<cap3>\d+\.\d)",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)
# What only an installed PyTorch, or a program that imported one, says.
_OF_TORCH = re.compile(
    r"no kernel image is available|Torch not compiled with CUDA|current PyTorch install|site-packages/torch/"
    r"|PyTorch was compiled|NVIDIA driver on your system is too old|upgrade torch to at least"
    r"|torchvision::nms"
)
_ARCH_LIST = re.compile(r"(?:sm|compute)_(\d+)(\d)[af]?\b")
_BUILT_FOR = re.compile(r"supports CUDA capabilities ((?:(?:sm|compute)_\d+[af]?[\s,.]*)+)")


def matters(name: str) -> bool:
    """Whether a variable may change how training runs; secrets never do."""
    return bool(_MATTERS.search(name)) and not _SECRET.search(name)


def read_file(path: Path) -> str:
    """The text of a file, whatever its encoding: PowerShell writes UTF-16 when it redirects.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"--input {path} cannot be read",
            why=error.strerror or str(error),
            do="name a text file that is there",
        ) from None
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    why = None
    if len(data) > _MOST_BYTES:
        why = f"it has {show_size(len(data))}, and {show_size(_MOST_BYTES)} are read at most"
    elif not data.strip():
        why = "it is empty"
    elif not wide and b"\0" in data:
        why = "it is no text: it has bytes that are zero"
    if why is not None:
        raise UsageError(
            f"--input {path} says nothing",
            why=why,
            do="record again what the program printed, or take the part with the message: tail -n 200 FILE",
        )
    return data.decode("utf-16" if wide else "utf-8-sig", errors="replace")


def read_texts(texts: Iterable[str], stated: Stated) -> Stated:
    """What recorded texts tell, on top of what is stated already."""
    for text in texts:
        stated = stated.with_text(text)
        for reader in (
            read_table,
            read_topology,
            read_csv,
            read_list,
            _read_collected,
            _read_packages,
            _read_nvcc,
            _read_variables,
            _read_kernel,
            _read_error,
        ):
            try:
                stated = reader(text, stated) or stated
            except (ValueError, LookupError, OverflowError):  # a text that looks like one and is none
                continue
    torch = latest(stated.packages, "torch")
    if torch is not None and stated.torch is None:  # last, because a later text may tell the system
        with suppress(UsageError):  # a list that is cut off in the middle of a version
            stated = replace(stated, torch=torch_stated(torch, stated.place))
    return stated


def decode_ceiling(number: int) -> str:
    """11040 -> '11.4': PyTorch's message has the CUDA of the driver as 1000 major + 10 minor."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _read_packages(text: str, stated: Stated) -> Stated | None:
    found = [match for match in _PACKAGE.finditer(text) if match["name"]]
    if not any(_LISTED_WITH_TORCH.match(match["name"]) for match in found):
        return None
    packages = {name: list(versions) for name, versions in stated.packages.items()}
    for match in found:
        name = re.sub(r"[-_.]+", "-", match["name"]).lower()
        version = match["version"]
        if name == "pytorch":
            name, version = "torch", _conda_version(version, match["build"] or "")
        packages.setdefault(name, [])
        if version not in packages[name]:
            packages[name].append(version)
    return replace(stated, packages={name: tuple(versions) for name, versions in packages.items()})


def _conda_version(version: str, build: str) -> str:
    """'2.4.1', 'py3.11_cpu_0' -> '2.4.1+cpu'; '2.5.1', 'py3.12_cuda12.4_cudnn9.1.0_0' -> '2.5.1+cu124'."""
    cuda = re.search(r"cuda_?(\d+)\.?(\d)", build)
    if cuda:
        return f"{version}+cu{cuda[1]}{cuda[2]}"
    return f"{version}+cpu" if "cpu" in build else version


def _read_collected(text: str, stated: Stated) -> Stated | None:
    """What `python -m torch.utils.collect_env` prints, which people paste into reports."""
    torch, driver, python = (
        found[1] if found else None for found in (each.search(text) for each in _COLLECTED)
    )
    if torch is None:
        return None
    place = replace(stated.place, driver=stated.place.driver or driver)
    if python and place.python is None:
        place = replace(place, python=numbers(python))
    return replace(stated, place=place, packages={**stated.packages, "torch": (torch,)})


def _read_nvcc(text: str, stated: Stated) -> Stated | None:
    found = _NVCC.search(text)
    if found:
        return replace(stated, toolkit=found[1] or found[2])
    if '"cuda"' in text:  # version.json of toolkits from 11.1 on
        version = json.loads(text)["cuda"]["version"]
        return replace(stated, toolkit=".".join(str(version).split(".")[:2]))
    return None


def _read_variables(text: str, stated: Stated) -> Stated | None:
    found = {
        m["name"]: m["value"].strip().strip("\"'") for m in _VARIABLE.finditer(text) if matters(m["name"])
    }
    return replace(stated, variables={**stated.variables, **found}) if found else None


def _read_kernel(text: str, stated: Stated) -> Stated | None:
    wsl, module = _WSL.search(text), _NVRM.search(text)
    if wsl:
        version = 2 if "microsoft-standard" in wsl[0] else 1
        stated = replace(stated.in_system("wsl"), wsl=version)
    if module:
        driver = stated.place.driver or module["driver"]
        stated = replace(stated, open_module=bool(module["open"]), place=replace(stated.place, driver=driver))
    return stated if wsl or module else None


def _read_error(text: str, stated: Stated) -> Stated:
    """Cards, lists and numbers that error messages name."""
    if _OF_TORCH.search(text):
        stated = replace(stated, torch_spoke=True)
    ceiling, warned, built = _CEILING.search(text), _WARNED.search(text), _BUILT_FOR.search(text)
    if ceiling:
        stated = replace(stated, place=replace(stated.place, told_cuda=decode_ceiling(int(ceiling[1]))))
    if warned and not stated.cards:
        name = (warned["card"] or warned["card2"] or warned["card3"]).rpartition("Warning:")[2].strip()
        written = (
            f"{warned['major']}.{warned['minor']}" if warned["major"] else warned["cap2"] or warned["cap3"]
        )
        card = card_told(name, None, numbers(written))
        known = card_named(name)
        stated = replace(stated, cards=(replace(known, capability=card.capability) if known.known else card,))
    if built:
        pairs = {(int(a), int(b)) for a, b in _ARCH_LIST.findall(built[1].replace("compute_", "x_"))}
        ptx = {(int(a), int(b)) for a, b in re.findall(r"compute_(\d+)(\d)", built[1])}
        base = stated.torch or Torch(version="unknown", cuda=None)
        stated = replace(
            stated, torch=replace(base, code=tuple(sorted(pairs)), ptx=tuple(sorted(ptx)), listed=True)
        )
    return stated
