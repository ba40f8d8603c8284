"""The NVIDIA cards of this machine, as their driver (NVML) reports them. Works without torch."""

from __future__ import annotations

import csv
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from snugtune.units import MiB

_NVML_LIBRARY = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"

# compute_cap comes first to be left out: the nvidia-smi of old drivers refuses the whole question for it.
_SMI_FIELDS = ("compute_cap", "index", "memory.total", "driver_version", "name")
_THERMAL_BITS = 0x20 | 0x40  # NVML's software and hardware thermal slowdown


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card. None is what the driver would not say."""

    index: int
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int | None
    uuid: str | None = None
    bus_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a card was doing when it was asked. None is what the driver would not say."""

    used_bytes: int | None = None
    free_bytes: int | None = None
    busy_percent: int | None = None
    temperature_c: int | None = None
    hot: bool = False
    """Whether the card has slowed itself down because of heat."""
    display_driver: bool = False
    """Whether Windows manages its memory (WDDM)."""
    processes: tuple[tuple[int, int | None, bool], ...] | None = None
    """Number, bytes, and whether it only draws, of each process on the card."""


@dataclass(frozen=True)
class Machine:
    """The cards of a machine, its driver's version, and why there is less to say than expected."""

    gpus: tuple[Gpu, ...]
    driver: str | None
    problem: str | None
    usage: tuple[Usage, ...] = field(default=(), compare=False)
    """One for each card, where the driver was asked by its own bindings."""
    said: str = field(default="", compare=False)
    """What nvidia-smi printed in the place of cards."""


def find_gpus(timeout_seconds: float = 5) -> Machine:
    """Return all NVIDIA cards of this machine. Never raises.

    A CUDA_VISIBLE_DEVICES that is empty or -1 hides all; one that names some cards is ignored here.

    Args:
        timeout_seconds: How long the driver may take to answer, all in all.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return Machine((), None, f"CUDA_VISIBLE_DEVICES={visible!r} hides every card")
    smi, loads = shutil.which("nvidia-smi"), _nvml_library_loads()
    if smi is None and not loads:
        return Machine((), None, None)
    deadline = time.monotonic() + timeout_seconds
    try:
        machine = (
            _ask_nvml(timeout_seconds) if loads else Machine((), None, "NVML: the library does not load")
        )
        if machine.gpus or machine.problem is None or smi is None:
            return machine
        return _ask_smi(smi, deadline, machine)
    except subprocess.TimeoutExpired:
        return Machine((), None, f"the NVIDIA driver gave no answer within {timeout_seconds:g} s")


def process_memory_bytes(gpu_index: int, pid: int) -> int | None:
    """Return the bytes of a card that NVML charges to a process; None where it does not tell.

    Limits: Windows with a display driver (WDDM) never tells, and inside a container NVML may know the
    process under another number.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(gpu_index))
    except nvml.NVMLError:
        return None
    sizes = [process.usedGpuMemory for process in processes if process.pid == pid]
    return sum(sizes) if sizes and None not in sizes else None


def gpu_of_uuid(uuid: str) -> int | None:
    """Return NVML's index of the card with this UUID; "GPU-" in front may be missing, as in torch."""
    nvml = _nvml()
    if nvml is None:
        return None
    full_name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    try:
        return int(nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(full_name)))
    except nvml.NVMLError:
        return None


@cache
def _nvml() -> Any:
    """NVML's bindings, opened once for this process; None if there is nothing to open."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # broken bindings fail in more ways than NVMLError
        return None
    return pynvml


def _nvml_library_loads() -> bool:
    """Whether a driver is installed, in about a millisecond: no process is started for it."""
    try:
        ctypes.CDLL(_NVML_LIBRARY)
    except OSError:
        return False
    return True


def _ask_nvml(timeout_seconds: float) -> Machine:
    """Ask in a child process: a driver that hangs, hangs its caller, even against being killed."""
    # The child looks for modules where this process does.
    code = f"import sys; sys.path[:] = {sys.path!r}; from snugtune import hardware; hardware._print_nvml()"
    answer = output_of((sys.executable, "-c", code), timeout_seconds)
    try:
        found = json.loads(answer.splitlines()[-1])
        gpus = tuple(
            Gpu(**{**gpu, "compute_capability": _pair(gpu["compute_capability"])}) for gpu in found["gpus"]
        )
        usage = tuple(
            Usage(**{**each, "processes": _triples(each["processes"])}) for each in found.get("usage", ())
        )
        return Machine(gpus, found["driver"], found["problem"], usage)
    except (ValueError, LookupError, TypeError):
        return Machine((), None, "the NVIDIA driver's library (NVML) could not be asked")


def _pair(value: Sequence[int] | None) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))


def _triples(rows: Sequence[Any] | None) -> tuple[tuple[int, int | None, bool], ...] | None:
    return None if rows is None else tuple((int(pid), size, bool(draws)) for pid, size, draws in rows)


def _print_nvml() -> None:
    """Print what NVML says as one line of JSON. Runs in the child process."""
    sys.stdout.write(json.dumps(asdict(_read_nvml())) + "\n")


def _read_nvml() -> Machine:
    try:
        import pynvml

        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
    except Exception as error:
        return Machine((), None, f"NVML: {_text(error) or type(error).__name__}")

    def ask(question: str, *arguments: Any) -> Any:
        with suppress(pynvml.NVMLError, AttributeError):  # old bindings do not have every question
            return getattr(pynvml, question)(*arguments)
        return None

    gpus, usage, problem = [], [], None
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            problem = f"NVML: card {index}: {_text(error)}"
            continue
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        gpus.append(
            Gpu(
                index=index,
                name=_text(ask("nvmlDeviceGetName", handle)) or "unknown NVIDIA card",
                compute_capability=_pair(ask("nvmlDeviceGetCudaComputeCapability", handle)),
                memory_bytes=None if memory is None else int(memory.total),
                uuid=_text(ask("nvmlDeviceGetUUID", handle)) or None,
                bus_id=_text(getattr(ask("nvmlDeviceGetPciInfo", handle), "busId", None)) or None,
            )
        )
        usage.append(_usage(lambda question, *rest, handle=handle: ask(question, handle, *rest), memory))
    driver = _text(ask("nvmlSystemGetDriverVersion")) or None
    return Machine(tuple(gpus), driver, problem, tuple(usage))


def _usage(ask: Callable[..., Any], memory: Any) -> Usage:
    """What a card is doing; `ask` puts a question of NVML about it, with None for no answer."""
    lists = [ask("nvmlDeviceGetComputeRunningProcesses"), ask("nvmlDeviceGetGraphicsRunningProcesses")]
    processes = [
        (int(each.pid), getattr(each, "usedGpuMemory", None), draws)
        for found, draws in zip(lists, (False, True), strict=True)
        for each in found or ()
    ]
    busy = ask("nvmlDeviceGetUtilizationRates")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    model = ask("nvmlDeviceGetDriverModel")
    return Usage(
        used_bytes=_whole(getattr(memory, "used", None)),
        free_bytes=_whole(getattr(memory, "free", None)),
        busy_percent=_whole(getattr(busy, "gpu", None)),
        temperature_c=_whole(ask("nvmlDeviceGetTemperature", 0)),  # 0: the chip
        hot=bool((reasons or 0) & _THERMAL_BITS),
        display_driver=model is not None
        and _whole(model[0] if isinstance(model, list | tuple) else model) == 0,
        processes=None if lists[0] is None else tuple(processes),
    )


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _text(value: object) -> str:
    """Text of what NVML gave: older bindings give bytes."""
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _ask_smi(program: str, deadline: float, otherwise: Machine) -> Machine:
    """Ask nvidia-smi instead; `otherwise` with its words added if it knows no more than NVML did."""
    said = ""
    for fields in (_SMI_FIELDS, _SMI_FIELDS[1:]):
        command = (program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        answer = output_of(command, max(0.1, deadline - time.monotonic()))
        said = said or answer[:2000]
        try:
            table = list(csv.reader(answer.splitlines(), skipinitialspace=True))
        except csv.Error:
            continue
        rows = [dict(zip(fields, row, strict=True)) for row in table if len(row) == len(fields)]
        gpus = tuple(gpu for row in rows if (gpu := _gpu_of_row(row)) is not None)
        if gpus:
            drivers = [row["driver_version"] for row in rows if row["driver_version"][:1].isdecimal()]
            return Machine(gpus, drivers[0] if drivers else None, None)
    return Machine(otherwise.gpus, otherwise.driver, otherwise.problem, said=said)


def _gpu_of_row(row: dict[str, str]) -> Gpu | None:
    """A card from nvidia-smi's fields, of which any may be "[N/A]", "[Not Supported]" or the like."""
    if not row["index"].isdecimal():
        return None
    major, dot, minor = row.get("compute_cap", "").partition(".")
    known = dot and major.isdecimal() and minor.isdecimal()
    memory = row["memory.total"]
    return Gpu(
        index=int(row["index"]),
        name=row["name"] if row["name"] and not row["name"].startswith("[") else "unknown NVIDIA card",
        compute_capability=(int(major), int(minor)) if known else None,
        memory_bytes=int(memory) * MiB if memory.isdecimal() else None,
    )


def output_of(command: Sequence[str], timeout_seconds: float) -> str:
    """Standard output of a program; empty if it cannot be started.

    Raises:
        subprocess.TimeoutExpired: It took longer. It is killed, and not waited for, because a program
            that hangs inside a driver does not die.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError:
        return ""
    try:
        return process.communicate(timeout=timeout_seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        if process.stdout is not None:
            process.stdout.close()
        raise
