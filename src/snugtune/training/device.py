"""The device a run uses, its name, its memory, and the processes that share the run."""

from __future__ import annotations

import atexit
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from accelerate import Accelerator
from torch import distributed

if distributed.is_available():
    # Imported after the processes have joined, it keeps their group alive: its threads then meet a Python
    # that is ending, and abort the process.
    import torch.distributed.nn.functional

from snugtune import environment, hardware
from snugtune.errors import HardwareError, ProcessError
from snugtune.processes import ALONE, Processes
from snugtune.training.progress import Memory
from snugtune.units import show_size

_NVML_SECONDS = 1.0  # NVML answers in about a millisecond: often enough, and not felt


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a run computes.

    Args:
        torch: The device for PyTorch.
        name: Its name; "CPU" without a card.
        capability: Compute capability; None without a card.
        memory_bytes: Memory of the card; None without one.
        gpu_index: Its number for NVML; None without one or when unknown.
        multiprocessors: Its multiprocessors; None without one.
    """

    torch: torch.device
    name: str = "CPU"
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    gpu_index: int | None = None
    multiprocessors: int | None = None

    @property
    def is_cuda(self) -> bool:
        """Whether it is an NVIDIA card."""
        return self.torch.type == "cuda"


@contextmanager
def open_device(device: torch.device, *, budget_bytes: int | None) -> Iterator[Device]:
    """Look at the device, check that torch has code for it, and cap its memory while the block runs.

    Raises:
        HardwareError: torch has no code for the card, or the budget is larger than the card.
    """
    if device.type != "cuda":
        yield Device(torch=device, name="CPU" if device.type == "cpu" else device.type.upper())
        return
    # Accelerate says "cuda" for a single card; capping the memory needs its number.
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    found = torch.cuda.get_device_properties(device)
    capability = (found.major, found.minor)
    _check_build(found.name, capability)
    if budget_bytes is not None and budget_bytes > found.total_memory:
        raise HardwareError(
            f"the budget of {show_size(budget_bytes)} is more than {found.name} has",
            why=f"the card has {show_size(found.total_memory)}",
            do="give a smaller --budget, or none",
        )
    if budget_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(budget_bytes / found.total_memory, device)
    try:
        yield Device(
            torch=device,
            name=found.name,
            capability=capability,
            memory_bytes=found.total_memory,
            gpu_index=hardware.gpu_of_uuid(str(found.uuid)),
            multiprocessors=found.multi_processor_count,
        )
    finally:
        if budget_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def open_processes(accelerator: Accelerator) -> Processes:
    """The processes that `torch.distributed.run` has started; this one alone without it.

    Raises:
        ProcessError: There are several that do not know of each other, and would write over each other.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise ProcessError(
            f"{started} processes were started, but this one found {accelerator.num_processes}",
            why="they did not join; an Accelerator was perhaps made before, alone",
            do="start them with: python -m torch.distributed.run --nproc-per-node N -m snugtune train ...",
        )
    if started == 1:
        return ALONE
    # Words go over the CPU, so that they do not wait for what the cards still compute. The launcher notices a
    # process that has died; one that reads a large file may take longer than the usual half hour.
    talk = distributed.new_group(backend="gloo", timeout=timedelta(days=1))
    atexit.register(_leave)
    return Processes(rank=accelerator.process_index, count=accelerator.num_processes, talk=talk)


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def describe(device: Device, budget_bytes: int | None) -> str:
    """The device and its cap in words.

    Args:
        device: The device.
        budget_bytes: What PyTorch may take of it; None for all.
    """
    if not device.is_cuda:
        ignored = f"; the budget of {show_size(budget_bytes)} is for cards and caps nothing here"
        return f"{device.name}, {torch.get_num_threads()} threads{'' if budget_bytes is None else ignored}"
    cap = f", at most {show_size(budget_bytes)} ({budget_bytes:,} bytes) for PyTorch" if budget_bytes else ""
    return f"{device.name}, {show_size(device.memory_bytes)}{cap}"


def why_no_card() -> str:
    """Why PyTorch sees no card here, as far as that can be found out."""
    machine = hardware.find_gpus()
    if torch.version.cuda is None:
        why = f"this torch, {torch.__version__}, is a build without CUDA"
        return f"{why}; see snugtune doctor --install-line torch" if machine.gpus else why
    if machine.problem is not None:
        return machine.problem
    if machine.driver is None:
        return "no NVIDIA driver was found"
    if not machine.gpus:
        return f"driver {machine.driver} reports no card"
    return f"torch {torch.__version__} cannot use {machine.gpus[0].name} with driver {machine.driver}"


class MemoryMeter:
    """Memory of the card at its highest since the last look."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._process_bytes: int | None = None
        self._asked = -_NVML_SECONDS

    def read(self) -> Memory | None:
        """What was in use since the last call; None without a card."""
        if not self.device.is_cuda:
            return None
        now = time.monotonic()
        if self.device.gpu_index is not None and now - self._asked >= _NVML_SECONDS:
            self._process_bytes = hardware.process_memory_bytes(self.device.gpu_index, os.getpid())
            self._asked = now
        # As a nested dictionary: the flat one costs a tenth of a millisecond more, at every update.
        found = torch.cuda.memory.memory_stats_as_nested_dict(self.device.torch)
        memory = Memory(
            allocated_bytes=found["allocated_bytes"]["all"]["peak"],
            reserved_bytes=found["reserved_bytes"]["all"]["peak"],
            process_bytes=self._process_bytes,
        )
        torch.cuda.reset_peak_memory_stats(self.device.torch)
        return memory


@contextmanager
def explained_out_of_memory(device: Device, *, passes: int | str) -> Iterator[None]:
    """Turn an out-of-memory error inside the block into what, why and do.

    Args:
        device: Where the block computes.
        passes: Passes of an update now, or auto.

    Raises:
        HardwareError: The memory did not suffice.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The frames of the traceback hold the tensors of the run, and notebooks hold the last error.
        traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()
        more = 2 * passes if isinstance(passes, int) else 4
        raise HardwareError(
            f"{device.name} ran out of memory",
            why=str(error).splitlines()[0],
            do=f"add --passes {more} or --checkpointed-layers all to the same command: it learns the same "
            "in less memory, and continues from the last checkpoint",
        ) from None


def _check_build(name: str, capability: tuple[int, int]) -> None:
    """Fail with the right install line instead of "no kernel image is available" in the first update."""
    # sm_60 code runs on 6.0 to 6.9; compute_60 is a text that the driver compiles for anything newer.
    # Builds for cards of other makers name none of the two, and are not judged.
    targets = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", target) for target in torch.cuda.get_arch_list()]
    codes = [(target[1], (int(target[2]), int(target[3]))) for target in targets if target]
    fits = any(code <= capability and (kind == "compute" or code[0] == capability[0]) for kind, code in codes)
    if codes and not fits:
        line = environment.install_line("torch", hardware.find_gpus())
        raise HardwareError(
            f"this torch ({torch.__version__}) has no code for {name}",
            why=f"it was built for {', '.join(torch.cuda.get_arch_list())}; the card has compute capability "
            f"{capability[0]}.{capability[1]}",
            do=f"install the right build: {line} --force-reinstall",
        )
