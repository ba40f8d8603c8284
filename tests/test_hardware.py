"""Finding the cards, with drivers that work, lie, break and hang."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from snugtune import hardware
from snugtune.hardware import Gpu, Machine, find_gpus
from snugtune.units import GiB

posix_only = pytest.mark.skipif(
    sys.platform == "win32", reason="the stand-in for nvidia-smi is a shell script"
)

# What both fakes of the driver's bindings share.
BINDINGS = """
class NVMLError(Exception): pass
class Memory: total = 11 * 2**30
class Process:
    def __init__(self, pid, size): self.pid, self.usedGpuMemory = pid, size
CARDS = ["NVIDIA GeForce GTX 1080 Ti"]
def nvmlInit(): pass
def nvmlDeviceGetCount(): return len(CARDS)
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return CARDS[handle]
def nvmlDeviceGetMemoryInfo(handle): return Memory
def nvmlDeviceGetCudaComputeCapability(handle): return [6, 1]
def nvmlSystemGetDriverVersion(): return "580.95.05"
def nvmlDeviceGetComputeRunningProcesses(handle): return [Process(7, 300), Process(8, None), Process(7, 20)]
def nvmlDeviceGetHandleByUUID(uuid):
    if uuid != "GPU-1a2b": raise NVMLError("Not Found")
    return 3
def nvmlDeviceGetIndex(handle): return handle
"""
GTX_1080_TI = Gpu(
    index=0, name="NVIDIA GeForce GTX 1080 Ti", compute_capability=(6, 1), memory_bytes=11 * GiB
)


@pytest.fixture(autouse=True)
def _own_driver(monkeypatch, tmp_path):
    """No test sees this machine's driver, its bindings or its settings."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(hardware, "_NVML_LIBRARY", "no-such-driver.so")
    monkeypatch.setattr(hardware.shutil, "which", lambda name: _which(tmp_path, name))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    hardware._nvml.cache_clear()
    yield
    sys.modules.pop("pynvml", None)
    hardware._nvml.cache_clear()


def _which(folder, name):
    program = folder / "bin" / name
    return str(program) if program.exists() else None


@pytest.fixture
def bindings(monkeypatch, tmp_path):
    """Put a fake pynvml in front of the real one; the driver itself counts as installed."""

    def install(text):
        folder = tmp_path / "modules"
        folder.mkdir()
        (folder / "pynvml.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(hardware, "_nvml_library_loads", lambda: True)

    return install


@pytest.fixture
def smi(tmp_path):
    """Put a fake nvidia-smi on the path."""

    def install(script):
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)

    return install


def test_without_a_driver_there_is_nothing_and_no_problem():
    assert find_gpus() == Machine((), None, None)


def test_without_a_driver_no_process_is_started(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert find_gpus().gpus == ()


@pytest.mark.parametrize("value", ["", " ", "-1"])
def test_hidden_cards_are_none_and_the_variable_is_named(monkeypatch, bindings, value):
    bindings(BINDINGS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    machine = find_gpus()
    assert machine.gpus == ()
    assert "CUDA_VISIBLE_DEVICES" in machine.problem


def test_nvml_tells_the_card_and_the_driver(bindings):
    bindings(BINDINGS)
    assert find_gpus(60) == Machine((GTX_1080_TI,), "580.95.05", None)


def test_a_variable_that_names_one_card_hides_no_other(monkeypatch, bindings):
    bindings(BINDINGS + "CARDS = ['first', 'second']\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.name for gpu in find_gpus(60).gpus] == ["first", "second"]


def test_old_bindings_that_give_bytes_are_read(bindings):
    bindings(
        BINDINGS + "CARDS = [b'Quadro P4000']\ndef nvmlSystemGetDriverVersion(): return b'390.157'\n",
    )
    machine = find_gpus(60)
    assert (machine.gpus[0].name, machine.driver) == ("Quadro P4000", "390.157")


def test_what_nvml_refuses_is_unknown_and_the_rest_is_kept(bindings):
    refusal = "def {name}(*_): raise NVMLError('Not Supported')\n"
    refused = ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability", "nvmlSystemGetDriverVersion"]
    bindings(BINDINGS + "".join(refusal.format(name=name) for name in refused))
    card = Gpu(index=0, name="NVIDIA GeForce GTX 1080 Ti", compute_capability=None, memory_bytes=None)
    assert find_gpus(60) == Machine((card,), None, None)


def test_a_card_that_fell_off_the_bus_is_named_and_the_others_are_found(bindings):
    bindings(
        BINDINGS
        + "CARDS = ['lost', 'NVIDIA GeForce GTX 1080 Ti']\n"
        + "def nvmlDeviceGetHandleByIndex(index):\n"
        + "    if index == 0: raise NVMLError('GPU is lost')\n"
        + "    return index\n"
    )
    machine = find_gpus(60)
    assert [gpu.index for gpu in machine.gpus] == [1]
    assert machine.problem == "NVML: card 0: GPU is lost"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BINDINGS + "def nvmlInit(): raise NVMLError('Driver Not Loaded')\n", "NVML: Driver Not Loaded"),
        ("raise ImportError('no bindings')\n", "NVML: no bindings"),
        ("import os; os.abort()\n", "could not be asked"),
        (BINDINGS + "def nvmlDeviceGetMemoryInfo(handle): return 'eleven'\n", "could not be asked"),
        ("import sys; print('[]', flush=True); sys.exit()\n", "could not be asked"),
        ("import os; os.write(1, b'\\xff{'); os._exit(0)\n", "could not be asked"),
    ],
    ids=["driver-not-loaded", "no-bindings", "crash", "nonsense", "other-json", "garbage"],
)
def test_a_broken_driver_is_a_problem_in_words(bindings, text, problem):
    bindings(text)
    machine = find_gpus(60)
    assert machine.gpus == ()
    assert problem in machine.problem


def test_a_driver_that_hangs_is_left_alone_after_the_time_limit(bindings):
    bindings("import time; time.sleep(3600)\n")
    start = time.monotonic()
    machine = find_gpus(0.3)
    assert machine == Machine((), None, "the NVIDIA driver gave no answer within 0.3 s")
    assert time.monotonic() - start < 30


@posix_only
def test_nvidia_smi_answers_where_the_bindings_are_missing(bindings, smi):
    bindings("raise ImportError('no bindings')\n")
    smi("echo '6.1, 0, 11264, 580.95.05, NVIDIA GeForce GTX 1080 Ti'\necho '12.0, 1, 32607, 580.95.05, RTX'")
    machine = find_gpus(60)
    assert machine.gpus[0] == GTX_1080_TI
    assert (machine.gpus[1].index, machine.gpus[1].compute_capability) == (1, (12, 0))
    assert (machine.driver, machine.problem) == ("580.95.05", None)


@posix_only
def test_fields_that_nvidia_smi_does_not_know_are_unknown(bindings, smi):
    bindings("raise ImportError('no bindings')\n")
    smi("echo '[N/A], 0, [Not Supported], [N/A], [Unknown Error]'")
    card = Gpu(index=0, name="unknown NVIDIA card", compute_capability=None, memory_bytes=None)
    assert find_gpus(60) == Machine((card,), None, None)


@posix_only
def test_an_old_nvidia_smi_that_refuses_one_field_is_asked_without_it(bindings, smi):
    bindings("raise ImportError('no bindings')\n")
    smi(
        'case "$1" in *compute_cap*) echo "compute_cap is not a valid field to query."; exit 2;; esac\n'
        "echo '0, 11264, 470.256.02, GeForce GTX 1080 Ti'"
    )
    machine = find_gpus(60)
    assert machine.driver == "470.256.02"
    assert (machine.gpus[0].compute_capability, machine.gpus[0].memory_bytes) == (None, 11 * GiB)


@posix_only
@pytest.mark.parametrize(
    "script",
    [
        "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9",
        "printf '\\000\\377,\\n\\n,,,,\\n\"'",
        "echo 'a, b, c, d, e'",
        "exit 0",
    ],
    ids=["no-driver", "bytes", "words", "silence"],
)
def test_nonsense_from_nvidia_smi_leaves_the_problem_of_nvml(bindings, smi, script):
    bindings(BINDINGS + "def nvmlInit(): raise NVMLError('Driver Not Loaded')\n")
    smi(script)
    assert find_gpus(60) == Machine((), None, "NVML: Driver Not Loaded")


@posix_only
def test_an_nvidia_smi_that_hangs_is_left_alone_after_the_time_limit(bindings, smi):
    bindings("raise ImportError('no bindings')\n")
    smi("exec sleep 3600")
    start = time.monotonic()
    assert "gave no answer within 2 s" in find_gpus(2).problem
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("pid", "size_bytes"), [(7, 320), (8, None), (9, None)], ids=["two-parts", "not-told", "not-there"]
)
def test_memory_of_a_process_is_what_nvml_charges_to_it(bindings, pid, size_bytes):
    bindings(BINDINGS)
    assert hardware.process_memory_bytes(0, pid) == size_bytes


@pytest.mark.parametrize(
    ("uuid", "index"), [("1a2b", 3), ("GPU-1a2b", 3), ("ffff", None), ("MIG-1a2b", None)]
)
def test_a_card_is_found_by_its_uuid_as_torch_writes_it(bindings, uuid, index):
    bindings(BINDINGS)
    assert hardware.gpu_of_uuid(uuid) == index


def test_without_a_driver_process_memory_and_uuid_are_unknown(bindings):
    bindings(BINDINGS + "def nvmlInit(): raise NVMLError('Driver Not Loaded')\n")
    assert hardware.process_memory_bytes(0, 7) is None
    assert hardware.gpu_of_uuid("1a2b") is None


@pytest.mark.gpu
def test_this_machine_s_card_is_described(monkeypatch):
    monkeypatch.undo()
    machine = find_gpus()
    assert machine.gpus
    assert machine.driver is not None
    assert all(gpu.compute_capability is not None and gpu.memory_bytes for gpu in machine.gpus)
