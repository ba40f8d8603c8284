"""Looks at this machine: cards, driver, packages, variables. PyTorch is touched in a child process only."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from snugtune import hardware
from snugtune.environment.install import place_of
from snugtune.environment.stated import Card, Process, Stated, Torch, card_named, card_told, torch_stated
from snugtune.environment.texts import matters, read_texts
from snugtune.errors import UsageError
from snugtune.hardware import Machine, Usage

# Without PyTorch the whole answer is due in two seconds; with it, its import takes longer than a slow driver.
_DRIVER_SECONDS, _PATIENT_DRIVER_SECONDS = 0.8, 7.0
_PROGRAM_SECONDS = 1.0
_TORCH_SECONDS = 60.0
_DIST_INFO = re.compile(r"(?P<name>[\w.]+?)-(?P<version>\d[^-]*?)(?:-py[\d.]+)?\.(?:dist|egg)-info")
_PACKAGES = re.compile(
    r"torch|torchvision|torchaudio|tensorflow|tensorflow_cpu|bitsandbytes|triton|flash_attn|xformers|transformers"
    r"|vllm|unsloth|nvidia_[a-z_]+_cu1\d|nvidia_cudnn|snugtune"
)
# What the child process says of PyTorch: one line of JSON, the last one.
_ASK_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
def ask(name, question):
    try:
        found[name] = question()
    except Exception:
        found[name] = None
ask("flags", lambda: torch._C._cuda_getArchFlags())
ask("cudnn", lambda: torch.backends.cudnn.version())
ask("nccl", lambda: ".".join(map(str, torch.cuda.nccl.version())))
ask("cards", lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0)
print("\\n" + json.dumps(found))
"""


def read_machine() -> Stated:
    """All that can be known of this machine. Never raises, whatever is broken."""
    has_torch = _has_torch()
    machine = hardware.find_gpus(_PATIENT_DRIVER_SECONDS if has_torch else _DRIVER_SECONDS)
    stated = Stated(
        cards=tuple(_cards(machine)),
        place=place_of(machine),
        packages=_packages(),
        variables={name: value for name, value in os.environ.items() if matters(name)},
        container=_container(),
        pci_cards=_pci_cards(),
        live=True,
    )
    hidden = (machine.problem or "").startswith("CUDA_VISIBLE_DEVICES")
    texts = [
        *([machine.problem] if machine.problem and not hidden else []),
        *([machine.said] if machine.said else []),
    ]
    texts += [text for name in ("version", "driver/nvidia/version") if (text := _file(Path("/proc", name)))]
    if not machine.gpus and stated.pci_cards:
        texts += [_program("dmesg")]
    texts += [_program("nvcc", "--version") or _toolkit_file()]
    if len(machine.gpus) > 1:
        texts += [_program("nvidia-smi", "topo", "-m")]
    stated = read_texts([text for text in texts if text], stated)
    if not stated.cards and not hidden:
        stated = replace(stated, cards=tuple(_cards_of_proc()))
    stated = replace(stated, libraries=tuple(_shadowing(stated.variables.get("LD_LIBRARY_PATH", ""))))
    return _with_torch(stated) if has_torch else replace(stated, torch=None, torch_missing=True)


def surroundings_in_words(stated: Stated) -> str:
    """'Docker, conda environment' and the like: where this process runs."""
    variables = stated.variables
    config = _file(Path(sys.prefix, "pyvenv.cfg")) or ""
    words = [
        {2: "WSL 2", 1: "WSL 1"}.get(stated.wsl or 0),
        stated.container and f"{stated.container} container",
        "Colab" if any(name.startswith("COLAB_") for name in variables) else None,
        "Kaggle" if any(name.startswith("KAGGLE_") for name in variables) else None,
        "conda environment" if Path(sys.prefix, "conda-meta").is_dir() else None,
        ("uv environment" if re.search(r"^uv\s*=", config, re.MULTILINE) else "virtual environment")
        if config
        else None,
    ]
    return ", ".join(word for word in words if word)


def _cards(machine: Machine) -> Iterator[Card]:
    usages = machine.usage or (Usage(),) * len(machine.gpus)
    for gpu, usage in zip(machine.gpus, usages, strict=False):
        yield card_told(
            gpu.name,
            gpu.memory_bytes,
            gpu.compute_capability,
            index=gpu.index,
            uuid=gpu.uuid,
            bus_id=gpu.bus_id,
            used_bytes=usage.used_bytes,
            free_bytes=usage.free_bytes,
            busy_percent=usage.busy_percent,
            temperature_c=usage.temperature_c,
            throttled=usage.hot,
            display_driver=usage.display_driver,
            processes=_processes(usage),
        )


def _processes(usage: Usage) -> tuple[Process, ...] | None:
    if usage.processes is None:
        return None
    return tuple(
        Process(pid=pid, name=_file(Path(f"/proc/{pid}/comm")) or "a process", memory_bytes=size, draws=draws)
        for pid, size, draws in usage.processes
        if pid != os.getpid()
    )


def _cards_of_proc() -> Iterator[Card]:
    """The cards that the kernel module lists, where nothing else answers."""
    for number, path in enumerate(sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))):
        fields = dict(re.findall(r"^(\w[\w ]*):\s*(.+?)\s*$", _file(path) or "", re.MULTILINE))
        if "Model" in fields:
            known = card_named(fields["Model"])
            yield replace(known, index=number, uuid=fields.get("GPU UUID"), bus_id=fields.get("Bus Location"))


def _pci_cards() -> int | None:
    """NVIDIA's display controllers on the PCI bus, as lspci would list them; None where there is no /sys."""
    folder = Path("/sys/bus/pci/devices")
    try:
        devices = list(folder.iterdir())
    except OSError:
        return None
    return sum(
        (_file(path / "vendor") or "").strip() == "0x10de"
        and (_file(path / "class") or "").startswith("0x03")
        for path in devices
    )


def _container() -> str | None:
    if Path("/.dockerenv").exists():
        return "Docker"
    if Path("/run/.containerenv").exists():
        return "Podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    return "Apptainer" if "APPTAINER_NAME" in os.environ or "SINGULARITY_NAME" in os.environ else None


def _packages() -> dict[str, tuple[str, ...]]:
    """Installed packages that matter, from the names of their folders: their metadata may be broken."""
    found: dict[str, list[str]] = {}
    for folder in dict.fromkeys(sys.path):
        with suppress(OSError):
            for entry in os.scandir(folder or "."):
                match = _DIST_INFO.fullmatch(entry.name)
                if match and _PACKAGES.fullmatch(match["name"].lower()):
                    found.setdefault(match["name"].lower().replace("_", "-"), []).append(match["version"])
    return {name: tuple(sorted(set(versions))) for name, versions in found.items()}


def _has_torch() -> bool:
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec("torch") is not None
    return False


def _with_torch(stated: Stated) -> Stated:
    """Ask PyTorch about itself in a child process, which may die or hang."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n{_ASK_TORCH}"
    try:
        done = subprocess.run(
            (sys.executable, "-c", code),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TORCH_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return replace(
            stated, torch=None, torch_problem=f"`import torch` gave no answer within {_TORCH_SECONDS:g} s"
        )
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        torch = _torch_found(found, stated)
    except (ValueError, LookupError, TypeError, AttributeError, UsageError):
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        problem = lines[-1] if lines else f"`import torch` ended with exit code {done.returncode}"
        return replace(stated, torch=None, torch_problem=problem)
    stated = replace(stated, torch=torch)
    return read_texts([done.stderr], stated) if "UserWarning" in done.stderr else stated


def _torch_found(found: Mapping[str, Any], stated: Stated) -> Torch:
    flags = str(found["flags"] or "")
    code = re.findall(r"sm_(\d+)(\d)", flags)
    if not code:
        base = torch_stated(str(found["version"]), stated.place)
        if found["cuda"] is not None:
            return base
        made_for = "AMD cards (ROCm)" if found["hip"] else base.made_for or "the CPU"
        return Torch(version=base.version, cuda=None, made_for=made_for)
    number = found["cudnn"]
    return Torch(
        version=str(found["version"]),
        cuda=found["cuda"],
        code=tuple((int(major), int(minor)) for major, minor in code),
        ptx=tuple((int(major), int(minor)) for major, minor in re.findall(r"compute_(\d+)(\d)", flags)),
        cudnn=None if number is None else _cudnn_version(int(number)),
        nccl=found["nccl"],
    )


def _cudnn_version(number: int) -> str:
    """91002 -> '9.10.2', 8902 -> '8.9.2': cuDNN 9 counts in ten-thousands."""
    unit = 10_000 if number >= 90_000 else 1_000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"


def _toolkit_file() -> str:
    for name in ("version.json", "version.txt"):
        text = _file(Path("/usr/local/cuda", name))
        if text:
            return text
    return ""


def _shadowing(search_path: str) -> Iterator[str]:
    """Libraries of CUDA in the folders of LD_LIBRARY_PATH."""
    for entry in filter(None, search_path.split(":")):
        with suppress(OSError):
            for pattern in ("libcudnn*.so*", "libcudart.so*", "libnvJitLink.so*", "libcublas.so*"):
                yield from (str(path) for path in sorted(Path(entry).glob(pattern))[:1])


def _program(*words: str) -> str:
    """What a program prints; nothing if it is missing, fails or hangs."""
    if shutil.which(words[0]) is None:
        return ""
    with suppress(OSError, subprocess.TimeoutExpired):
        return hardware.output_of(words, _PROGRAM_SECONDS)
    return ""


def _file(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
