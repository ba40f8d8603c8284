"""Verdicts and install lines for many machines, worked out from the sources and not from the code.

The tables are NVIDIA's and PyTorch's, as of 2026-11-30:
https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/ (drivers by CUDA major version),
https://docs.nvidia.com/datacenter/tesla/drivers/cuda-toolkit-driver-and-architecture-matrix.html (branches),
https://github.com/pytorch/pytorch/blob/main/RELEASE.md and the files on PyPI (builds).
"""

from __future__ import annotations

import itertools

import pytest
from packaging.version import Version

from snugtune.environment.builds import Place
from snugtune.environment.doctor import examine
from snugtune.environment.findings import decide
from snugtune.environment.stated import Stated, card_named, torch_stated

INDEX = "https://download.pytorch.org/whl"
LINES = {
    "2.15": 'pip install "torch==2.15.*"',
    "2.14": 'pip install "torch==2.14.*"',
    "2.14 cu130": f'pip install "torch==2.14.*" --index-url {INDEX}/cu130',
    "2.14 cu126": f'pip install "torch==2.14.*" --index-url {INDEX}/cu126',
    "2.11 cu128": f'pip install "torch==2.11.*" --index-url {INDEX}/cu128',
    "2.8": 'pip install "torch==2.8.*"',
    "2.8 cu128": f'pip install "torch==2.8.*" --index-url {INDEX}/cu128',
    "2.8 cu126": f'pip install "torch==2.8.*" --index-url {INDEX}/cu126',
    "2.7 cu118": f'pip install "torch==2.7.*" --index-url {INDEX}/cu118',
    None: None,
}

# card, driver, PyTorch, Python, system -> whether training runs, newest line for that machine
MATRIX = [
    # Kepler: R470 is its last branch; 3.7 has code in builds for CUDA 11.8, 3.0 and 3.5 in none from 2.6 on
    ("GTX 680", "470.256.02", None, "3.12", "linux", False, None),
    ("GTX 780 Ti", None, None, "3.12", "linux", False, None),
    ("Tesla K40m", "470.256.02", "2.7.1+cu118", "3.12", "linux", False, None),
    ("Tesla K80", "470.256.02", None, "3.12", "linux", True, "2.7 cu118"),
    ("Tesla K80", "470.256.02", "2.7.1+cu118", "3.10", "linux", True, "2.7 cu118"),
    ("Tesla K80", "470.256.02", "2.7.1+cu126", "3.12", "linux", False, "2.7 cu118"),
    ("Tesla K80", "535.274.02", None, "3.12", "linux", False, None),
    ("Tesla K80", "470.256.02", None, "3.14", "linux", False, None),
    # Maxwell
    ("GTX 970", "550.54.14", None, "3.12", "linux", True, "2.14 cu126"),
    ("GTX 980 Ti", "580.105.08", "2.14.1+cu126", "3.14", "linux", True, "2.14 cu126"),
    ("GTX 980 Ti", "580.105.08", "2.14.1", "3.12", "linux", False, "2.14 cu126"),
    ("GTX 750 Ti", "590.44.01", "2.14.1+cu126", "3.12", "linux", False, None),
    ("Tesla M40", "450.80.02", None, "3.11", "linux", True, "2.7 cu118"),
    ("GTX TITAN X", "582.28", None, "3.12", "windows", True, "2.14 cu126"),
    # Pascal
    ("GTX 1080 Ti", None, None, None, "linux", True, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", None, "3.12", "linux", True, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.15.0+cu132", "3.12", "linux", False, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.15.0", "3.12", "linux", False, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.14.1", "3.12", "linux", False, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.14.1+cu126", "3.12", "linux", True, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.14.0+cu126", "3.10", "linux", True, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.8.0", "3.12", "linux", False, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.8.0+cu126", "3.12", "linux", True, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.7.1", "3.12", "linux", True, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.7.1+cu128", "3.12", "linux", False, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.15.0+cu126", "3.12", "linux", False, "2.14 cu126"),
    ("GTX 1080 Ti", "595.58.03", "2.14.1+cu126", "3.12", "linux", False, None),
    ("GTX 1080 Ti", "610.43.02", None, "3.12", "linux", False, None),
    ("GTX 1080 Ti", "470.256.02", None, "3.12", "linux", True, "2.7 cu118"),
    ("GTX 1080 Ti", "470.256.02", "2.14.1+cu126", "3.12", "linux", False, "2.7 cu118"),
    ("GTX 1080 Ti", "470.256.02", "2.15.0+cu132", "3.12", "linux", False, "2.7 cu118"),
    ("GTX 1080 Ti", "470.256.02", None, "3.14", "linux", False, None),
    ("GTX 1080 Ti", "525.60.13", None, "3.14", "linux", True, "2.14 cu126"),
    ("GTX 1080 Ti", "525.60.11", None, "3.12", "linux", True, "2.7 cu118"),
    ("GTX 1080 Ti", "390.157", None, "3.10", "linux", False, None),
    ("GTX 1080 Ti", "580.105.08", None, "3.9", "linux", True, "2.8 cu126"),
    ("GTX 1080 Ti", "582.28", None, "3.12", "windows", True, "2.14 cu126"),
    ("GTX 1080 Ti", "582.28", "2.14.1", "3.12", "windows", False, "2.14 cu126"),
    ("GTX 1080 Ti", "527.41", "2.14.1+cu126", "3.12", "windows", True, "2.14 cu126"),
    ("GTX 1080 Ti", "526.98", "2.14.1+cu126", "3.12", "windows", False, "2.7 cu118"),
    ("GTX 1080 Ti", "581.80", None, "3.12", "wsl", True, "2.14 cu126"),
    ("GTX 1080 Ti", "526.98", None, "3.12", "wsl", True, "2.7 cu118"),
    ("Tesla P40", "550.163.01", "2.9.1", "3.12", "linux", False, "2.14 cu126"),
    ("Tesla P100", "550.163.01", "2.9.1+cu126", "3.12", "linux", True, "2.14 cu126"),
    ("GTX 1060 6GB", "535.54.03", "2.1.2+cu121", "3.11", "linux", True, "2.14 cu126"),
    ("GTX 1050 Ti", "535.54.03", "1.12.1+cu113", "3.10", "linux", True, "2.14 cu126"),
    # Volta: in PyPI's files to 2.10, in those for CUDA 12.8 from 2.8 to 2.10, in those for 12.6 to 2.14
    ("Tesla V100-SXM2-16GB", "580.65.06", None, "3.12", "linux", True, "2.14 cu126"),
    ("TITAN V", "580.65.06", "2.10.0", "3.12", "linux", True, "2.14 cu126"),
    ("TITAN V", "580.65.06", "2.11.0+cu128", "3.12", "linux", False, "2.14 cu126"),
    ("TITAN V", "580.65.06", "2.7.1+cu128", "3.12", "linux", False, "2.14 cu126"),
    ("TITAN V", "590.44.01", None, "3.12", "linux", False, None),
    # Turing
    ("RTX 2060", "580.65.06", "2.15.0+cu132", "3.12", "linux", True, "2.15"),
    ("RTX 2080 Ti", "610.43.02", None, "3.12", "linux", True, "2.15"),
    ("GTX 1660 Ti", "580.65.06", None, "3.10", "linux", True, "2.14"),
    ("Tesla T4", "535.54.03", None, "3.12", "linux", True, "2.14 cu126"),
    ("Tesla T4", "450.80.02", None, "3.12", "linux", True, "2.7 cu118"),
    # Ampere and Ada
    ("RTX 3060", "550.54.14", "2.15.0+cu132", "3.12", "linux", False, "2.14 cu126"),
    ("RTX 3060", "550.54.14", "2.14.1+cu126", "3.12", "linux", True, "2.14 cu126"),
    ("RTX 3090", "580.65.06", "2.15.0", "3.10", "linux", False, "2.14"),
    ("RTX 3090", "581.80", None, "3.12", "windows", True, "2.14 cu130"),
    ("RTX 3090", "581.80", "2.14.1+cpu", "3.12", "windows", False, "2.14 cu130"),
    ("RTX 3090", "580.65.06", None, "3.9", "linux", True, "2.8"),
    ("A100-SXM4-40GB", "450.80.02", None, "3.12", "linux", True, "2.7 cu118"),
    ("RTX 4090", "470.256.02", None, "3.12", "linux", False, None),
    ("RTX 4060", "581.80", "2.13.0+cu130", "3.13", "wsl", True, "2.15"),
    # what is not known of Windows is not held against it, and what no CUDA can compile is
    ("RTX 3090", "610.43", "2.15.0+cu132", "3.12", "windows", True, "2.14 cu130"),
    ("GTX 1080 Ti", "582.28", "2.15.0+cu132", "3.12", "windows", False, "2.14 cu126"),
    ("RTX 3090", "610.43.02", "2.16.0+cu134", "3.12", "linux", True, "2.15"),
    ("GTX 1080 Ti", "580.105.08", "2.16.0+cu134", "3.12", "linux", False, "2.14 cu126"),
    ("GTX 1080 Ti", "580.105.08", "2.16.0+cu126", "3.12", "linux", False, "2.14 cu126"),
    # Hopper and Blackwell: 10.0 and 12.0 have code from CUDA 12.8 on
    ("H100 PCIe", "550.54.14", "2.6.0+cu124", "3.12", "linux", True, "2.14 cu126"),
    ("H200", "580.65.06", None, "3.13", "linux", True, "2.15"),
    ("RTX 5090", "580.65.06", "2.14.1+cu126", "3.12", "linux", False, "2.15"),
    ("RTX 5090", "575.51.03", None, "3.12", "linux", True, "2.11 cu128"),
    ("RTX 5090", "575.51.03", "2.15.0+cu132", "3.12", "linux", False, "2.11 cu128"),
    ("RTX 5090", "550.54.14", None, "3.12", "linux", False, None),
    ("RTX 5070", "576.02", None, "3.12", "windows", True, "2.11 cu128"),
    ("RTX 5070", "580.65.06", "2.5.1", "3.12", "linux", False, "2.15"),
    ("B200", "580.65.06", None, "3.12", "linux", True, "2.15"),
    ("GB10", "580.65.06", None, "3.12", "linux", True, "2.15"),
    # odd ones: only a branch of the driver is named, builds for other makers' cards, modules, small cards
    ("GTX 960", "525", None, "3.12", "linux", True, "2.14 cu126"),
    ("GTX 960", "515.105.01", None, "3.12", "linux", True, "2.7 cu118"),
    ("GTX 980 Ti", "591.20", None, "3.12", "windows", False, None),
    ("Tesla M40 24GB", "418.56", None, "3.10", "linux", False, None),
    ("GTX TITAN Z", "475.14", None, "3.12", "windows", False, None),
    ("MX130", "560.94", "2.12.1+cu126", "3.13", "windows", True, "2.14 cu126"),
    ("MX150", "550", "2.12.1+cu130", "3.13", "linux", False, "2.14 cu126"),
    ("MX330", "535.54.03", "2.0.1+cu117", "3.9", "linux", True, "2.8 cu126"),
    ("P2000", "580", "1.13.1+cu117", "3.10", "linux", True, "2.14 cu126"),
    ("P2000", "580", "1.13.1+cu117", "3.11", "linux", False, "2.14 cu126"),
    ("TITAN Xp", "527.37", None, "3.11", "windows", True, "2.7 cu118"),
    ("Tesla P4", "450.51.05", None, "3.11", "linux", False, None),
    ("GTX1080Ti", "575.51.03", "2.9.1+rocm6.4", "3.12", "linux", False, "2.14 cu126"),
    ("V100", "582.28", "2.6.0+cu124", "3.13", "windows", True, "2.14 cu126"),
    ("V100", "570.26", "2.9.1+cu128", "3.14", "linux", True, "2.14 cu126"),
    ("V100 32GB", "590.44.01", "2.10.0", "3.12", "linux", False, None),
    ("TITAN V", "440.33", None, "3.10", "linux", False, None),
    ("MX450", "580.65.06", "2.15.0+cu130", "3.15", "linux", True, "2.15"),
    ("MX550", "566.36", "2.14.1+cu132", "3.12", "windows", False, "2.14 cu126"),
    ("T550", "581.80", None, "3.10", "windows", True, "2.14 cu130"),
    ("RTX 2060 12GB", "470", None, "3.13", "linux", True, "2.7 cu118"),
    ("RTX 2050", "610.43.02", "2.13.0+xpu", "3.14", "wsl", False, "2.15"),
    ("RTX 3050 6GB", "536.67", "2.4.1+cu118", "3.12", "wsl", True, "2.14 cu126"),
    ("RTX 3060 Laptop", "551.61", None, "3.9", "windows", True, "2.8 cu128"),
    ("RTX 3080 12GB", "453.10", None, "3.12", "windows", False, None),
    ("A100 80GB", "535.54.03", "2.11.0", "3.12", "linux", False, "2.14 cu126"),
    ("RTX 4060 Ti 16GB", "580", "1.13.1+cu116", "3.9", "linux", True, "2.8"),
    ("RTX 4060 Ti 16GB", "517.40", None, "3.12", "windows", False, None),
    ("H100", "525.60.13", "1.13.1+cu117", "3.10", "linux", False, "2.14 cu126"),
    ("B300", "570.26", None, "3.12", "linux", False, None),
    ("RTX 5060 Ti 16GB", "580", "2.7.1+cu126", "3.13", "linux", False, "2.15"),
    ("RTX 5060 Ti 8GB", "572.16", "2.7.1+cu128", "3.13", "windows", True, "2.11 cu128"),
    ("Jetson AGX Orin", None, None, "3.10", "linux", False, None),
    ("Jetson TX2", None, None, None, "linux", False, None),
    ("Jetson AGX Thor", "580.65.06", None, "3.12", "linux", True, "2.14 cu130"),
    ("RTX 4090", "580.65.06", "2.15.0", "3.16", "linux", False, None),
]


@pytest.mark.parametrize(("card", "driver", "torch", "python", "system", "ok", "line"), MATRIX)
def test_a_machine_gets_its_verdict_and_its_line(card, driver, torch, python, system, ok, line):
    report = examine(cards=[card], driver=driver, torch=torch, python=python, system=system)
    assert report.ok == ok, [finding.what for finding in report.findings]
    found = report.install["torch"]
    wanted = LINES[line]
    if found is not None and torch is not None and not ok:
        uninstall, _, found = found.partition("; " if system == "windows" else " && ")
        assert uninstall == "pip uninstall -y torch"
    assert found == wanted
    assert ok or any(finding.severity == "error" for finding in report.findings)


# The same from tables, for every combination. Machine code in the wheels, by version and CUDA; Linux, x86-64.
OLD, NEW = "5.0 6.0 7.0 7.5 8.0 8.6 9.0", "7.5 8.0 8.6 9.0 10.0 12.0"
WHEELS = {
    "1.13.1+cu117": ("3.7 5.0 6.0 7.0 7.5 8.0 8.6", "3.7-3.10"),
    "2.0.1+cu118": ("3.7 " + OLD, "3.8-3.11"),
    "2.4.1+cu118": ("3.7 " + OLD, "3.8-3.12"),
    "2.5.1+cu124": (OLD, "3.9-3.13"),
    "2.6.0+cu118": ("3.7 " + OLD, "3.9-3.13"),
    "2.6.0+cu126": (OLD, "3.9-3.13"),
    "2.7.1+cu126": (OLD, "3.9-3.13"),
    "2.7.1+cu128": (NEW, "3.9-3.13"),
    "2.8.0+cu128": ("7.0 " + NEW, "3.9-3.13"),
    "2.9.1+cu130": (NEW, "3.10-3.14"),
    "2.10.0+cu128": ("7.0 " + NEW, "3.10-3.14"),
    "2.11.0+cu128": (NEW, "3.10-3.14"),
    "2.12.1+cu126": (OLD, "3.10-3.14"),
    "2.14.1+cu126": (OLD, "3.10-3.15"),
    "2.14.1+cu130": (NEW, "3.10-3.15"),
    "2.15.0+cu132": (NEW, "3.11-3.15"),
}
# card: capability, branches of the driver that see it
SEEN = {
    "Tesla K80": ("3.7", 304, 494),
    "Tesla K40m": ("3.5", 304, 494),
    "GTX 750 Ti": ("5.0", 340, 589),
    "GTX 970": ("5.2", 340, 589),
    "Tesla P100-PCIE-16GB": ("6.0", 367, 589),
    "GTX 1080 Ti": ("6.1", 367, 589),
    "TITAN V": ("7.0", 384, 589),
    "GTX 1650": ("7.5", 410, 999),
    "A100-SXM4-80GB": ("8.0", 450, 999),
    "RTX 3060 12GB": ("8.6", 455, 999),
    "RTX 4090": ("8.9", 520, 999),
    "H200": ("9.0", 520, 999),
    "B200": ("10.0", 570, 999),
    "B300": ("10.3", 575, 999),
    "RTX 5090": ("12.0", 570, 999),
    "GB10": ("12.1", 575, 999),
}
OLDEST_DRIVER = {
    "linux": {"11": "450.80.02", "12": "525.60.13", "13": "580"},
    "wsl": {"11": "452.39", "12": "527.41", "13": "580"},
}
DRIVERS = ["440.33", "450.80.02", "470.256.02", "525.60.13", "550.54.14", "570.26", "580.65.06", "595.58.03"]


def runs(card: str, driver: str, torch: str, python: str, system: str) -> bool:
    """Whether training runs, from the tables alone."""
    capability, first, last = SEEN[card]
    code, pythons = WHEELS[torch]
    low, high = pythons.split("-")
    major, minor = map(int, capability.split("."))
    cuda = torch.partition("+cu")[2][:2]
    return (
        first <= Version(driver).major <= last
        and Version(driver) >= Version(OLDEST_DRIVER[system][cuda])
        and any(int(x) == major and int(y) <= minor for x, y in (each.split(".") for each in code.split()))
        and Version(low) <= Version(python) <= Version(high)
    )


@pytest.mark.parametrize("card", SEEN)
@pytest.mark.parametrize("torch", WHEELS)
def test_every_combination_agrees_with_the_tables(card, torch):
    for driver, python, system in itertools.product(DRIVERS, ["3.10", "3.14"], OLDEST_DRIVER):
        place = Place(system=system, driver=driver, python=tuple(map(int, python.split("."))))
        verdict = decide(Stated(cards=(card_named(card),), place=place, torch=torch_stated(torch, place)))
        assert verdict.ok == runs(card, driver, torch, python, system), (
            driver,
            python,
            system,
            verdict.findings,
        )


# TensorFlow: card, driver, Python, system -> line. Newest wheel with code; cuDNN held back from 2.20 on
CUDNN = '"nvidia-cudnn-cu12<=9.10.2.21"'


@pytest.mark.parametrize(
    ("card", "driver", "python", "system", "line"),
    [
        ("GTX 1080 Ti", "580.105.08", "3.12", "linux", f'pip install "tensorflow[and-cuda]==2.21.*" {CUDNN}'),
        ("GTX 1080 Ti", "580.105.08", "3.9", "linux", f'pip install "tensorflow[and-cuda]==2.20.*" {CUDNN}'),
        ("TITAN V", "580.105.08", "3.12", "linux", f'pip install "tensorflow[and-cuda]==2.21.*" {CUDNN}'),
        ("RTX 3060", "580.105.08", "3.12", "wsl", 'pip install "tensorflow[and-cuda]==2.21.*"'),
        ("GTX 970", "550.54.14", "3.11", "linux", 'pip install "tensorflow[and-cuda]==2.16.*" "numpy<2"'),
        (
            "GTX 1080 Ti",
            "470.256.02",
            "3.11",
            "linux",
            'pip install "tensorflow[and-cuda]==2.14.*" "numpy<2"',
        ),
        ("GTX 1080 Ti", "582.28", "3.10", "windows", 'pip install "tensorflow==2.10.*" "numpy<2"'),
        ("GTX 1080 Ti", "582.28", "3.12", "windows", None),
        ("GTX 1080 Ti", "580.105.08", "3.14", "linux", None),
        ("GTX 680", "470.256.02", "3.10", "linux", None),
    ],
)
def test_tensorflow_has_a_line_of_its_own(card, driver, python, system, line):
    report = examine(cards=[card], driver=driver, python=python, system=system)
    assert report.install["tensorflow"] == line


# bitsandbytes: the library for CUDA 11.8 to 12.6 begins at 6.0 (0.47: 5.0), for 12.8 at 7.0, for 13 at 7.5
@pytest.mark.parametrize(
    ("card", "torch", "line"),
    [
        ("GTX 1080 Ti", None, 'pip install "bitsandbytes>=0.48"'),
        ("GTX 1080 Ti", "2.14.1+cu126", 'pip install "bitsandbytes>=0.48"'),
        ("GTX 970", None, 'pip install "bitsandbytes==0.47.*"'),
        ("Tesla K80", None, None),
        ("RTX 5090", None, 'pip install "bitsandbytes>=0.48"'),
    ],
)
def test_bitsandbytes_has_a_line_of_its_own(card, torch, line):
    assert examine(cards=[card], torch=torch, python="3.12").install["bitsandbytes"] == line
