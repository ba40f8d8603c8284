"""What to install on which machine, and what a run notes about its surroundings."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest

from snugtune.environment import install_line, installed, shell_line, snapshot
from snugtune.environment.builds import Place
from snugtune.errors import UsageError
from snugtune.hardware import Gpu, Machine
from snugtune.units import GiB

GTX_970 = Gpu(index=0, name="GTX 970", compute_capability=(5, 2), memory_bytes=4 * GiB)
GTX_1080_TI = Gpu(index=0, name="GTX 1080 Ti", compute_capability=(6, 1), memory_bytes=11 * GiB)
V100 = Gpu(index=0, name="V100", compute_capability=(7, 0), memory_bytes=16 * GiB)
RTX_2060 = Gpu(index=0, name="RTX 2060", compute_capability=(7, 5), memory_bytes=6 * GiB)
RTX_3060 = Gpu(index=0, name="RTX 3060", compute_capability=(8, 6), memory_bytes=12 * GiB)
RTX_4060 = Gpu(index=0, name="RTX 4060", compute_capability=(8, 9), memory_bytes=8 * GiB)
H200 = Gpu(index=0, name="H200", compute_capability=(9, 0), memory_bytes=141 * GiB)
RTX_5090 = Gpu(index=1, name="RTX 5090", compute_capability=(12, 0), memory_bytes=32 * GiB)
K80 = Gpu(index=0, name="Tesla K80", compute_capability=(3, 7), memory_bytes=12 * GiB)
K40 = Gpu(index=0, name="Tesla K40m", compute_capability=(3, 5), memory_bytes=12 * GiB)
JETSON_TX2 = Gpu(index=0, name="Jetson TX2", compute_capability=(6, 2), memory_bytes=8 * GiB)
UNREADABLE = Gpu(index=0, name="a card", compute_capability=None, memory_bytes=8 * GiB)

PYPI_CUDA_13 = 'pip install "torch==2.15.*"'
CUDA_13 = 'pip install "torch==2.14.*" --index-url https://download.pytorch.org/whl/cu130'
CUDA_12_8 = 'pip install "torch==2.11.*" --index-url https://download.pytorch.org/whl/cu128'
PYPI_CUDA_12_8 = 'pip install "torch==2.10.*"'
CUDA_12_6 = 'pip install "torch==2.14.*" --index-url https://download.pytorch.org/whl/cu126'
CUDA_11_8 = 'pip install "torch==2.7.*" --index-url https://download.pytorch.org/whl/cu118'
PLAIN = "pip install torch==2.13.0"
CPU = f"{PLAIN} --extra-index-url https://download.pytorch.org/whl/cpu --timeout 5 --retries 1"


def line_for(*gpus, driver, system="linux", python=(3, 12)):
    place = Place(system=system, python=python, driver=driver)
    return install_line("torch", Machine(gpus, driver, None), place=place)


@pytest.mark.parametrize(
    ("gpus", "driver", "line", "fallback"),
    [
        ([GTX_1080_TI], "580.95.05", CUDA_12_6, "torch==2.7.*"),
        ([GTX_1080_TI], "550.54.14", CUDA_12_6, "torch==2.7.*"),
        ([GTX_1080_TI], "525.60.13", CUDA_12_6, "torch==2.7.*"),
        ([GTX_1080_TI], "525.60.11", CUDA_11_8, None),
        ([GTX_1080_TI], "470.256.02", CUDA_11_8, None),
        ([GTX_1080_TI], "450.80.02", CUDA_11_8, None),
        ([GTX_1080_TI], "390.157", CPU, "torch==2.13.0"),
        ([GTX_1080_TI, GTX_1080_TI], "580.95.05", CUDA_12_6, "torch==2.7.*"),
        ([GTX_970], "550.54.14", CUDA_12_6, "torch==2.7.*"),
        ([V100], "580.95.05", CUDA_12_6, "torch==2.10.*"),
        ([V100, GTX_1080_TI], "580.95.05", CUDA_12_6, "torch==2.7.*"),
        ([RTX_2060], "610.43.02", PYPI_CUDA_13, None),
        ([RTX_3060], "580.65.06", PYPI_CUDA_13, None),
        ([RTX_3060], "550.54.14", CUDA_12_6, "torch==2.10.*"),
        ([RTX_3060], "470.256.02", CUDA_11_8, None),
        ([RTX_3060, GTX_1080_TI], "580.95.05", CUDA_12_6, "torch==2.7.*"),
        ([RTX_4060], "595.58.03", PYPI_CUDA_13, None),
        ([RTX_4060], "470.256.02", CPU, "torch==2.13.0"),
        ([H200], "550.54.14", CUDA_12_6, "torch==2.10.*"),
        ([RTX_5090], "580.95.05", PYPI_CUDA_13, None),
        ([RTX_5090], "575.51.03", CUDA_12_8, "torch==2.10.*"),
        ([RTX_3060, RTX_5090], "575.51.03", CUDA_12_8, "torch==2.10.*"),
        ([V100, RTX_5090], "580.95.05", PYPI_CUDA_12_8, None),
        ([GTX_1080_TI, RTX_5090], "580.95.05", PYPI_CUDA_13, None),
        ([GTX_1080_TI, RTX_5090], "575.51.03", CUDA_12_8, "torch==2.10.*"),
        ([K80], "470.256.02", CUDA_11_8, None),
        ([K80], "580.95.05", CPU, "torch==2.13.0"),
        ([K40], "470.256.02", CPU, "torch==2.13.0"),
        ([JETSON_TX2], "580.95.05", CPU, "torch==2.13.0"),
        ([UNREADABLE], "580.95.05", CUDA_12_6, "torch==2.7.*"),
        ([UNREADABLE], "470.256.02", CUDA_11_8, None),
        ([RTX_3060], None, PYPI_CUDA_13, None),
        ([], None, CPU, "torch==2.13.0"),
    ],
    ids=lambda value: "+".join(gpu.name for gpu in value) if isinstance(value, list) else None,
)
def test_a_linux_machine_gets_the_newest_build_with_code_for_its_cards(gpus, driver, line, fallback):
    answer = line_for(*gpus, driver=driver)
    assert str(answer) == line
    assert answer.fallback == (fallback and (fallback,))
    assert answer.source is not None
    assert answer.source.startswith("https://")


@pytest.mark.parametrize(
    ("gpus", "driver", "line"),
    [
        ([GTX_1080_TI], "582.28", CUDA_12_6),
        ([GTX_1080_TI], "527.41", CUDA_12_6),
        ([GTX_1080_TI], "526.98", CUDA_11_8),
        ([GTX_1080_TI], "452.39", CUDA_11_8),
        ([GTX_1080_TI], "452.06", PLAIN),
        ([RTX_3060], "581.80", CUDA_13),
        ([RTX_5090], "576.02", CUDA_12_8),
        ([V100, RTX_5090], "581.80", CUDA_13),
        ([], None, PLAIN),
    ],
    ids=lambda value: "+".join(gpu.name for gpu in value) if isinstance(value, list) else None,
)
def test_on_windows_every_build_for_cuda_comes_from_the_index_of_pytorch(gpus, driver, line):
    answer = line_for(*gpus, driver=driver, system="windows")
    assert str(answer) == line
    assert answer.fallback is None, "PyPI has no build for CUDA on Windows"


def test_macos_takes_the_file_on_pypi():
    answer = line_for(driver=None, system="macos")
    assert (str(answer), answer.fallback) == (PLAIN, None)
    assert "macOS has no CUDA" in answer.because


def test_a_python_too_new_for_an_old_build_is_named():
    answer = line_for(GTX_1080_TI, driver="470.256.02", python=(3, 14))
    assert str(answer) == CPU
    assert "end at Python 3.13, and this is 3.14" in answer.because


def test_a_fallback_made_for_this_python_only():
    assert line_for(GTX_1080_TI, driver="580.95.05", python=(3, 14)).fallback is None


@pytest.mark.parametrize(
    ("gpus", "driver", "words"),
    [
        (
            [GTX_1080_TI],
            "580.95.05",
            ["PyTorch 2.14 for CUDA 12.6 is the newest", "GTX 1080 Ti", "6.1", "580.95.05"],
        ),
        ([GTX_1080_TI], "390.157", ["too old", "at least 450.80.02", "branch 580, the last for Pascal"]),
        ([RTX_5090], "390.157", ["not made for RTX 5090", "driver 580 or later"]),
        ([RTX_3060], "550.54.14", ["2.15 would run with driver 580 or later"]),
        ([GTX_1080_TI], "470.256.02", ["2.14 would run with a driver of branch 580"]),
        (
            [GTX_1080_TI, RTX_5090],
            "580.95.05",
            ["CUDA 13.2 is the newest for RTX 5090", "unused: GTX 1080 Ti"],
        ),
        ([K40], "470.256.02", ["or later has code for Tesla K40m (compute capability 3.5)"]),
        ([UNREADABLE], "580.95.05", ["capability unknown"]),
        ([RTX_3060], None, ["needs driver 580 or later"]),
        ([RTX_3060], "beta", ["needs driver 580 or later"]),
        ([], "595.58.03", ["reports no card", "after branch 580"]),
        ([], "580.95.05", ["driver 580.95.05 reports no card"]),
        ([], None, ["no NVIDIA driver was found"]),
    ],
)
def test_the_reason_says(gpus, driver, words):
    because = line_for(*gpus, driver=driver).because
    assert all(word in because for word in words), because


def test_a_build_that_is_already_the_best_is_not_told_to_want_a_newer_driver():
    assert "would run" not in line_for(GTX_1080_TI, driver="550.54.14").because


def test_why_the_driver_did_not_answer_is_passed_on():
    machine = Machine((), None, "the NVIDIA driver gave no answer within 5 s")
    answer = install_line("torch", machine, place=Place(python=(3, 12)))
    assert str(answer) == CPU
    assert "gave no answer within 5 s" in answer.because


def test_without_arguments_the_line_is_for_this_python_and_system():
    answer = install_line("torch", Machine((), None, None))
    assert answer.command[0] == "torch==2.13.0"


def test_another_package_is_refused():
    with pytest.raises(UsageError, match="jax"):
        install_line("jax", Machine((), None, None))


@pytest.mark.parametrize("package", ["tensorflow", "bitsandbytes"])
def test_a_package_that_wants_a_card_has_no_line_without_one(package):
    with pytest.raises(UsageError, match="no card was found"):
        install_line(package, Machine((), None, None))


def test_a_mirror_stands_for_the_address_of_the_index():
    machine = Machine((GTX_1080_TI,), "580.95.05", None)
    line = install_line(
        "torch", machine, place=Place(python=(3, 12)), mirror="https://mirror.example/pytorch/"
    )
    assert str(line) == 'pip install "torch==2.14.*" --index-url https://mirror.example/pytorch/cu126'


@pytest.mark.parametrize("gpu", [GTX_1080_TI, RTX_3060, RTX_5090])
def test_a_posix_shell_reads_back_the_words_of_the_line(gpu):
    answer = line_for(gpu, driver="580.95.05")
    assert shlex.split(str(answer)) == ["pip", "install", *answer.command]
    assert "'" not in shell_line(answer.command), "cmd does not know single quotes"


def test_versions_of_packages_are_found_without_importing_them():
    code = (
        "import sys; from snugtune.environment import installed;"
        "print(installed(['torch', 'no-such-package']), 'torch' in sys.modules, 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'no-such-package': None" in done.stdout
    assert done.stdout.endswith("False False\n")
    assert installed(["packaging"])["packaging"] is not None


def test_a_snapshot_is_json_with_cards_and_versions():
    noted = json.loads(json.dumps(snapshot(Machine((GTX_1080_TI,), "580.95.05", None))))
    assert noted["gpus"][0]["compute_capability"] == [6, 1]
    assert noted["driver"] == "580.95.05"
    assert noted["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert {"torch", "transformers", "peft"} <= noted["packages"].keys()


def test_a_snapshot_holds_no_credentials_and_no_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "anna"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "anna"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "anna" / "models"))
    monkeypatch.setenv("HF_ENDPOINT", "https://anna:secret@mirror.example:8443/hub?token=hidden")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    noted = snapshot(Machine((), None, None))
    variables = noted["variables"]
    assert variables["HF_ENDPOINT"] == "https://mirror.example:8443/hub"
    assert variables["HF_HOME"].startswith("~")
    assert variables["OMP_NUM_THREADS"] == "2"
    assert "HF_HUB_OFFLINE" not in variables
    assert not [word for word in ("anna", "secret", "hidden") if word in json.dumps(noted)]


def test_a_home_at_the_root_leaves_paths_alone(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setenv("HF_HOME", "/data/models")
    assert snapshot(Machine((), None, None))["variables"]["HF_HOME"] == "/data/models"


def test_an_address_that_cannot_be_read_is_not_shown(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://anna:secret@[mirror")
    assert "secret" not in json.dumps(snapshot(Machine((), None, None)))
