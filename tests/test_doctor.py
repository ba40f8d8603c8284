"""The doctor on this machine: broken, missing and hanging drivers and PyTorches, and its self-test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from snugtune import hardware
from snugtune.environment import doctor, exchange, reading, selftest
from snugtune.environment.builds import Place
from snugtune.environment.findings import decide
from snugtune.environment.stated import Stated, card_named, torch_stated
from snugtune.hardware import Gpu, Machine, Usage
from snugtune.units import GiB, MiB

RECORDED = Path(__file__).parent / "recorded"
GTX_1080_TI = Gpu(
    index=0,
    name="NVIDIA GeForce GTX 1080 Ti",
    compute_capability=(6, 1),
    memory_bytes=11264 * MiB,
    uuid="GPU-1a2b",
    bus_id="00000000:01:00.0",
)
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="the stand-ins are shell scripts")


def run(
    *arguments: object, path: str = "/usr/bin:/bin", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `snugtune` with another search path for programs, and variables."""
    return subprocess.run(
        [sys.executable, "-m", "snugtune", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, **variables},
        check=False,
        timeout=200,
    )


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setattr(reading, "_has_torch", lambda: False)


@pytest.fixture
def machine(monkeypatch, without_torch):
    """A machine with these cards, as the driver would tell."""

    def install(*gpus, driver="580.105.08", problem=None, usage=(), said=""):
        found = Machine(gpus, driver, problem, usage, said)
        monkeypatch.setattr(reading.hardware, "find_gpus", lambda _: found)

    for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(reading, "_program", lambda *_: "")
    monkeypatch.setattr(reading, "_toolkit_file", lambda: "")
    monkeypatch.setattr(reading, "_pci_cards", lambda: 0)
    return install


def ids(verdict, severity=None):
    return [finding.id for finding in verdict.findings if severity in (None, finding.severity)]


# Without PyTorch


def test_without_a_card_and_pytorch_only_pytorch_is_missing(machine):
    machine(driver=None)
    report = doctor.examine()
    assert ids(report, "error") == ["torch-missing"]
    assert "no-card" in ids(report)
    assert report.install["torch"].startswith("pip install torch==")


def test_without_pytorch_the_line_is_for_the_card(machine):
    machine(GTX_1080_TI)
    report = doctor.examine()
    assert ids(report, "error") == ["torch-missing"]
    assert "cu126" in report.findings[0].do
    assert "uninstall" not in report.findings[0].do
    (card,) = report.as_dict()["cards"]
    assert (card["uuid"], card["bus_id"], card["known"]) == ("GPU-1a2b", "00000000:01:00.0", True)


def test_a_driver_that_is_too_new_comes_before_the_missing_pytorch(machine):
    machine(GTX_1080_TI, driver="595.58.03")
    assert ids(doctor.examine(), "error") == ["driver-after-card", "torch-missing"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("No devices were found\n", "no-devices"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "driver-silent"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "driver-mismatch"),
        ("\0\xff{", "torch-missing"),
    ],
)
def test_what_nvidia_smi_says_in_the_place_of_cards_is_a_finding(machine, said, expected):
    machine(problem="NVML: Unknown Error", driver=None, said=said)
    assert ids(doctor.examine(), "error")[0] == expected


def test_a_card_without_a_driver_and_a_container_without_a_card(machine, monkeypatch):
    machine(driver=None)
    monkeypatch.setattr(reading, "_pci_cards", lambda: 1)
    monkeypatch.setattr(reading, "_container", lambda: None)
    assert ids(doctor.examine(), "error")[0] == "driver-missing"
    monkeypatch.setattr(reading, "_container", lambda: "Docker")
    assert ids(doctor.examine(), "error")[0] == "container-without-card"


def test_who_holds_the_memory_is_named(machine):
    usage = Usage(used_bytes=9 * GiB, free_bytes=2 * GiB, busy_percent=80, processes=((1, 8 * GiB, False),))
    machine(GTX_1080_TI, usage=(usage,))
    finding = next(each for each in doctor.examine().findings if each.id == "memory-held")
    assert "(pid 1) holds 8.0 GiB" in finding.what
    assert finding.do.startswith("ps -o pid,user,etime,args -p 1")


def test_this_process_is_not_among_those_that_hold_memory(machine):
    usage = Usage(used_bytes=9 * GiB, free_bytes=2 * GiB, processes=((os.getpid(), 8 * GiB, False),))
    machine(GTX_1080_TI, usage=(usage,))
    assert "memory-held" not in ids(doctor.examine())


def test_hidden_cards_are_a_warning(machine, monkeypatch):
    machine(driver=None, problem="CUDA_VISIBLE_DEVICES='-1' hides every card")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    report = doctor.examine()
    assert "cards-hidden" in ids(report, "warning")
    assert "no-card" not in ids(report)


def test_cards_of_the_kernel_are_known_where_nothing_else_answers(machine, monkeypatch):
    machine(driver=None, problem="the NVIDIA driver gave no answer within 1 s")
    card = replace(card_named("NVIDIA GeForce GTX 1080 Ti"), uuid="GPU-1a2b")
    monkeypatch.setattr(reading, "_cards_of_proc", lambda: [card])
    report = doctor.examine()
    assert "driver-slow" in ids(report, "warning")
    assert "driver-silent" not in ids(report)
    assert "cu126" in report.install["torch"]


def test_two_folders_of_one_package_are_seen(monkeypatch, tmp_path):
    for name in (
        "torch-2.6.0.dist-info",
        "torch-2.8.0+cu128.dist-info",
        "nvidia_cudnn_cu12-9.1.0.70.dist-info",
    ):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert reading._packages() == {"torch": ("2.6.0", "2.8.0+cu128"), "nvidia-cudnn-cu12": ("9.1.0.70",)}


def test_libraries_in_front_of_the_wheels_are_listed(machine, monkeypatch, tmp_path):
    """C008"""
    machine(GTX_1080_TI)
    folder = tmp_path / "cuda" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libcudnn.so.8").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'other'}:{folder}")
    finding = next(each for each in doctor.examine().findings if each.id == "library-path")
    assert str(folder) in finding.what
    assert "libcudnn.so.8" in finding.why


# In a process of its own


@posix_only
def test_a_machine_without_card_and_programs_gets_a_plan_and_exit_code_0():
    """C016"""
    done = run("doctor", "--json", path="")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["cards"]) == (True, [])
    assert "no-card" in [each["id"] for each in found["findings"]]
    assert done.stderr == ""


@posix_only
def test_an_nvidia_smi_that_hangs_ends_with_a_finding(tmp_path):
    """C105"""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    code = (
        "import sys; sys.argv = ['snugtune', 'doctor']; from snugtune.environment import reading\n"
        "reading._has_torch = lambda: False\nfrom snugtune.cli import main; main()"
    )
    start = time.monotonic()
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert time.monotonic() - start < 10
    assert done.returncode == 1
    assert "driver-silent" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@posix_only
@pytest.mark.parametrize("script", ["exit 9", "printf '\\000\\377\\n'", "echo one, two"])
def test_nonsense_of_nvidia_smi_is_handled(tmp_path, script):
    """C105"""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    done = run("doctor", "--quick", path=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stdout + done.stderr


@posix_only
def test_a_pytorch_that_does_not_import_names_the_variable_behind_it(tmp_path):
    """C009"""
    (tmp_path / "torch").mkdir()
    text = (RECORDED / "nvjitlink.txt").read_text().removeprefix("ImportError: ").strip()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise ImportError({text!r})\n")
    source = str(Path(doctor.__file__).parents[2])
    folder = (RECORDED / "env_ld.txt").read_text().partition("=")[2].strip()
    done = run("doctor", "--json", PYTHONPATH=f"{tmp_path}:{source}", LD_LIBRARY_PATH=folder)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    first = json.loads(done.stdout)["findings"][0]
    assert first["id"] == "system-cuda-first"
    assert "/usr/local/cuda-12.3/lib64" in first["what"]


def test_a_pytorch_that_kills_its_process_is_broken(machine, monkeypatch, tmp_path):
    machine(GTX_1080_TI)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os.abort()\n")
    monkeypatch.setattr(reading, "_has_torch", lambda: True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    report = doctor.examine()
    assert ids(report, "error") == ["torch-broken"]
    assert report.install["torch"].startswith("pip uninstall -y torch")


def test_a_pytorch_that_hangs_is_left_alone(machine, monkeypatch, tmp_path):
    machine(GTX_1080_TI)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time; time.sleep(600)\n")
    monkeypatch.setattr(reading, "_has_torch", lambda: True)
    monkeypatch.setattr(reading, "_TORCH_SECONDS", 1.0)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    report = doctor.examine()
    assert "gave no answer within 1 s" in report.findings[0].why


FAKE_TORCH = """
__version__ = "{version}"
class version: cuda = {cuda!r}; hip = None
class _C: _cuda_getArchFlags = staticmethod(lambda: {flags!r})
class backends:
    class cudnn: version = staticmethod(lambda: {cudnn})
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    class nccl: version = staticmethod(lambda: (2, 27, 3))
"""


@pytest.mark.parametrize(
    ("version", "cuda", "flags", "cudnn", "expected"),
    [
        ("2.15.0+cu132", "13.2", "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", 92600, ["torch-without-code"]),
        ("2.14.1+cu126", "12.6", "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", 91002, []),
        ("2.14.1+cu126", "12.6", "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", 91100, ["cudnn-without-code"]),
        ("2.9.0a0+git1", "12.8", "sm_61", 91002, []),
        ("2.9.1+cu128", "12.8", "sm_80 sm_90 compute_52", 91002, []),
        ("2.9.1+cpu", None, "", None, ["torch-on-cpu"]),
    ],
)
def test_an_installed_pytorch_is_judged_by_the_code_inside(
    machine, monkeypatch, tmp_path, version, cuda, flags, cudnn, expected
):
    """C001: by what it says itself, never by its name."""
    machine(GTX_1080_TI)
    (tmp_path / "torch").mkdir()
    text = FAKE_TORCH.format(version=version, cuda=cuda, flags=flags, cudnn=cudnn)
    (tmp_path / "torch" / "__init__.py").write_text(text)
    monkeypatch.setattr(reading, "_has_torch", lambda: True)
    monkeypatch.setattr(reading, "_packages", dict)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    report = doctor.examine(quick=True)
    assert ids(report, "error") == expected
    assert report.as_dict()["torch"]["version"] == version


def test_torchvision_is_never_imported(tmp_path):
    """C007"""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator does not exist')\n")
    source = str(Path(doctor.__file__).parents[2])
    done = run("doctor", "--quick", PYTHONPATH=f"{tmp_path}:{source}")
    assert "operator does not exist" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--card", "GTX 1080 Ti", "--torch", "2.15.0+cu132"], 1),
        (["--card", "GTX 1080 Ti", "--driver", "550.54.14", "--python", "3.12", "--os", "linux"], 0),
        (["--card", "GTX 1080 Ti", "--driver", "yesterday"], 2),
        (["--input", "no-such-file"], 2),
    ],
)
def test_exit_codes(arguments, code):
    done = run("doctor", *arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_only_the_line_for_a_described_machine():
    line = run(
        "doctor", "--card", "GTX 1080 Ti", "--install-line", "torch", "--mirror", "https://m.example"
    ).stdout
    assert line == 'pip install "torch==2.14.*" --index-url https://m.example/cu126\n'
    line = run(
        "doctor",
        "--card",
        "GTX 1080 Ti",
        "--os",
        "windows",
        "--python",
        "3.10",
        "--install-line",
        "tensorflow",
    )
    assert line.stdout == 'pip install "tensorflow==2.10.*" "numpy<2"\n'
    nothing = run("doctor", "--card", "GTX 680", "--install-line", "torch")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "GTX 680" in nothing.stderr
    assert run("doctor", "--card", "GTX 680", "--install-line", "numpy").returncode == 2
    assert run("doctor", "--fallback").returncode == 2


def test_the_json_has_the_promised_keys():
    found = json.loads(run("doctor", "--card", "GTX 1080 Ti", "--torch", "2.15.0", "--json").stdout)
    assert {"ok", "cards", "findings", "install"} <= found.keys()
    assert {"name", "compute_capability", "memory_bytes"} <= found["cards"][0].keys()
    keys = {"id", "severity", "what", "why", "do", "source", "date"}
    assert all(each.keys() == keys for each in found["findings"])
    assert found["install"].keys() == {"torch", "tensorflow", "bitsandbytes"}


def test_the_table_of_cards_is_printed_and_has_sources():
    done = run("cards")
    assert done.returncode == 0
    assert "NVIDIA GeForce GTX 1080 Ti" in done.stdout
    rows = json.loads(run("cards", "--json").stdout)["cards"]
    (row,) = [row for row in rows if row["name"] == "NVIDIA GeForce GTX 1080 Ti"]
    assert (row["capability"], row["torch"], row["torch_pypi"], row["last_driver"]) == (
        "6.1",
        "2.14 cu126",
        "2.7",
        "580",
    )
    assert all(row["source"].startswith("https://") for row in rows)


# The self-test


def test_the_self_test_passes_on_this_processor():
    done = selftest.run_child(
        (sys.executable, "-c", "from snugtune.environment import selftest; selftest.main('cpu')"), 200
    )
    assert "problem" not in done
    assert done["passed"] == [
        "context", "fp32 matrix product", "fp16 matrix product", "bf16 matrix product", "convolution",
        "memory-efficient attention", "AdamW update", "memory bandwidth",
    ]  # fmt: skip
    assert all(done[f"{name}_flops_per_s"] > 1e6 for name in ("fp32", "fp16", "bf16"))
    assert done["bandwidth_bytes_per_s"] > 1e6


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ('print(\'{"passed": ["a"]}\', flush=True); import os; os.abort()', "ended after a: exit code -6"),
        ("raise ValueError('no')", "ended: ValueError: no"),
        (
            'print(\'{"passed": ["a"]}\', flush=True); import time; time.sleep(60)',
            "ended after a: it gave no answer",
        ),
        ("print('nonsense'); print('[]'); print('{\"problem\": \"x: y\"}'); raise SystemExit(1)", "x: y"),
    ],
)
def test_a_self_test_that_dies_or_hangs_says_how_far_it_came(code, problem):
    found = selftest.run_child((sys.executable, "-c", code), 3)
    assert problem in found["problem"]


def test_a_failing_part_is_named_and_ends_the_self_test(monkeypatch, capsys):
    def fail(_):
        raise RuntimeError("CUDA error: no kernel image\nmore")

    monkeypatch.setattr(selftest, "_convolution", fail)
    selftest.main("cpu")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == {"problem": "convolution: CUDA error: no kernel image"}


def test_without_a_usable_card_there_is_no_self_test(monkeypatch):
    monkeypatch.setattr(selftest, "run_child", lambda *_: pytest.fail("it ran"))
    place = Place()
    card, torch = card_named("GTX 1080 Ti"), torch_stated("2.14.1+cu126", place)
    assert selftest.run_selftest(Stated(cards=(card,), torch=None)) == {}
    assert selftest.run_selftest(Stated(cards=(), torch=torch)) == {}
    assert selftest.run_selftest(Stated(cards=(card,), torch=torch_stated("2.9.1+cpu", place))) == {}


@pytest.mark.parametrize(("fp16", "gain"), [(1.2e13, 1.2), (6e13, None)])
def test_measured_rates_answer_the_claim_about_fp16(fp16, gain):
    stated = Stated(
        live=True,
        cards=(card_named("GTX 1080 Ti"),),
        measured={"fp32_flops_per_s": 1e13, "fp16_flops_per_s": fp16},
    )
    found = [each for each in decide(stated).findings if each.id == "fp16-not-faster"]
    assert bool(found) == (gain is not None)
    assert not found or f"{gain:.2f} times" in found[0].what


def test_the_context_is_the_difference_where_the_driver_does_not_tell(monkeypatch):
    child = {
        "passed": ["context"],
        "used_bytes": 900 * MiB,
        "uuid": "1a2b",
        "context_bytes": None,
        "count": 1,
    }
    monkeypatch.setattr(selftest, "run_child", lambda *_: dict(child))
    card = replace(card_named("GTX 1080 Ti"), uuid="GPU-1a2b", used_bytes=500 * MiB)
    stated = Stated(cards=(card,), torch=torch_stated("2.14.1+cu126", Place()))
    assert selftest.run_selftest(stated)["context_bytes"] == 400 * MiB
    unknown = replace(stated, cards=(replace(card, used_bytes=None),))
    assert selftest.run_selftest(unknown)["context_bytes"] is None


# The exchange between cards


def test_an_exchange_that_works_passes():
    assert exchange.run_exchange(2, device="cpu") == {"exchange": "passed"}


def test_a_process_that_sleeps_ends_the_exchange_of_all(monkeypatch):
    """C107"""
    real, started = exchange.rank_code, []

    class Watched(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def sleeping(rank, *rest):
        return "import time; time.sleep(600)" if rank == 1 else real(rank, *rest)

    monkeypatch.setattr(exchange, "rank_code", sleeping)
    monkeypatch.setattr(exchange.subprocess, "Popen", Watched)
    found = exchange.run_exchange(2, device="cpu", timeout_seconds=5)
    assert "did not end within 5 s" in found["exchange_problem"]
    assert len(started) == 2
    assert all(process.returncode is not None for process in started), "a process was left behind"
    verdict = decide(Stated(live=True, cards=(card_named("RTX 3090"),) * 2, measured=found))
    assert not verdict.ok
    assert verdict.findings[0].id == "exchange-stalled"
    assert "NCCL_P2P_DISABLE=1" in verdict.findings[0].do


def test_a_wrong_value_is_a_corrupt_copy(monkeypatch):
    """C107"""
    real = exchange.rank_code
    monkeypatch.setattr(
        exchange, "rank_code", lambda rank, *rest: real(rank, *rest).replace("'cpu')", "'cpu', value=0.0)")
    )
    found = exchange.run_exchange(2, device="cpu")
    assert found["exchange_corrupt"] is True
    verdict = decide(Stated(live=True, cards=(card_named("RTX 3090"),) * 2, measured=found))
    assert ids(verdict, "error") == ["exchange-corrupt"]


@pytest.mark.gpu
def test_this_machine_s_card_passes():
    report = doctor.examine()
    assert report.ok, report.findings
    assert "memory-efficient attention" in report.stated.measured["passed"]
    assert report.stated.cards[0].uuid
    assert hardware.find_gpus().usage[0].used_bytes


def test_a_silent_driver_is_no_reason_to_take_a_pytorch_for_the_cpu(machine):
    machine(driver=None, said="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    stated = reading.read_machine()
    torch = torch_stated("2.14.1+cu126", Place())
    verdict = decide(replace(stated, torch=torch, torch_missing=False))
    assert ids(verdict, "error") == ["driver-silent"]
    assert verdict.install["torch"] is None


@pytest.mark.parametrize("version", ["None", "not a version"])
def test_a_pytorch_that_does_not_know_its_version_is_broken(machine, monkeypatch, tmp_path, version):
    machine(GTX_1080_TI)
    (tmp_path / "torch").mkdir()
    text = f"__version__ = {version!r}\nclass version: cuda = None\n"
    (tmp_path / "torch" / "__init__.py").write_text(text)
    monkeypatch.setattr(reading, "_has_torch", lambda: True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert ids(doctor.examine(), "error") == ["torch-broken"]
