"""The page that is made from the facts, and the program that compares wheels with them."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from snugtune.environment.tables import page

ROOT = Path(__file__).parent.parent
PAGES = {"en": "which-pytorch.md", "zh": "which-pytorch.zh.md"}


@pytest.mark.parametrize("language", PAGES)
def test_the_page_is_what_the_facts_say(language):
    """When it fails: python docs/write_which_pytorch.py"""
    assert (ROOT / "docs" / PAGES[language]).read_text("utf-8") == page(language)


def test_the_command_writes_the_page(tmp_path):
    script = tmp_path / "write_which_pytorch.py"
    script.write_bytes((ROOT / "docs" / script.name).read_bytes())
    subprocess.run([sys.executable, script], check=True, timeout=120)
    for language, name in PAGES.items():
        assert (tmp_path / name).read_text("utf-8") == page(language)


def test_both_languages_have_the_same_tables():
    english, chinese = (page(language).splitlines() for language in PAGES)
    assert sum(line.startswith("|") for line in english) == sum(line.startswith("|") for line in chinese)


@pytest.fixture(scope="module")
def lister():
    spec = importlib.util.spec_from_file_location(
        "lister", ROOT / "benchmarks" / "list_wheel_architectures.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fat_binary(*entries: tuple[int, int]) -> bytes:
    """A fat binary with entries of a kind and an architecture, as nvcc makes them."""
    body = b"".join(
        struct.pack("<HHIQ", kind, 0x101, 64, 16)
        + bytes(12)
        + struct.pack("<I", architecture)
        + bytes(32 + 16)
        for kind, architecture in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_architectures_in_fat_binaries_are_counted(lister):
    data = b"ELF" + fat_binary((2, 60), (2, 61), (1, 90)) + bytes(7) + fat_binary((2, 61)) + b"end"
    assert lister.count_architectures(data) == {"sm_60": 1, "sm_61": 2, "compute_90": 1}
    assert lister.count_architectures(b"no code") == {}
    assert lister.count_architectures(fat_binary((2, 60))[:20]) == {}


def wheel(path: Path, version: str, flags: str) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("torch/version.py", f"__version__ = '{version}'\ncuda = '12.6'\n")
        file.writestr("torch/lib/libtorch_python.so", b"\0" + flags.encode() + b"\0")
        file.writestr("torch/lib/libtorch_cuda.so", b"\0sm_10 sm_20 sm_30\0")
    return path


@pytest.mark.parametrize(
    ("version", "flags", "code", "said"),
    [
        ("2.7.1+cu126", "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", 0, "agrees"),
        ("2.7.1+cu126", "sm_60 sm_70 sm_75", 1, "says sm_50"),
        ("2.7.1+cu126", "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90 compute_90", 1, "says sm_50"),
        ("2.7.1+cu999", "sm_50 sm_60 sm_70", 0, "no such build"),
        ("2.13.0+cpu", "", 0, "for the CPU"),
    ],
)
def test_a_wheel_is_compared_with_the_facts(
    lister, monkeypatch, capsys, tmp_path, version, flags, code, said
):
    path = wheel(tmp_path / "torch.whl", version, flags)
    monkeypatch.setattr(sys, "argv", ["lister", str(path)])
    assert lister.main() == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("oldest", "code"), [(60, 0), (75, 1)])
def test_a_library_of_bitsandbytes_is_compared_with_the_facts(lister, monkeypatch, tmp_path, oldest, code):
    path = tmp_path / "bitsandbytes-0.50.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("bitsandbytes/libbitsandbytes_cuda126.so", fat_binary((2, oldest), (2, 80)))
    monkeypatch.setattr(sys, "argv", ["lister", str(path)])
    assert lister.main() == code


def test_installed_packages_are_read(lister, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lister", "--installed", "torch"])
    assert lister.main() == 0
    assert "torch" in capsys.readouterr().out
