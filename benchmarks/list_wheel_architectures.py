"""Open wheels, or what is installed, and compare the GPU code inside with src/snugtune/facts/builds.toml.

python benchmarks/list_wheel_architectures.py FILE.whl ...
python benchmarks/list_wheel_architectures.py --installed torch nvidia-cudnn-cu12 bitsandbytes

pip download --no-deps torch==2.7.1 brings a file. For PyTorch the list is that of torch.cuda.get_arch_list,
a string inside libtorch_python; for others the headers of all fat binaries are counted. The exit code is 1 if
builds.toml says something else.
"""

from __future__ import annotations

import argparse
import re
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from snugtune import facts
from snugtune.environment.install import bitsandbytes_oldest

# A fat binary: magic, version, size of header, size of all entries; each entry: kind (1 PTX, 2 machine code),
# size of header, size of payload, and at byte 28 the architecture, as cuobjdump lists them.
_FATBIN = struct.pack("<I", 0xBA55ED50)
_HEADER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
_FLAGS = re.compile(rb"(?:(?:sm|compute)_\d+[af]?[ ;]?){3,}")
_LIBRARY = re.compile(r"\.(?:so(?:\.\d+)*|dll|pyd|fatbin|cubin)$")


def main() -> int:
    """Report on every file; 1 if one differs from the facts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.whl")
    parser.add_argument("--installed", nargs="+", default=[], metavar="PACKAGE")
    options = parser.parse_args()
    sources = [(path.name, list(_in_wheel(path))) for path in options.files]
    sources += [(f"{name} {metadata.version(name)}", list(_installed(name))) for name in options.installed]
    return max((report(name, members) for name, members in sources), default=0)


def report(name: str, members: list[tuple[str, bytes]]) -> int:
    """Print the architectures inside one package, and whether builds.toml agrees."""
    version = next(
        (_torch_version(data) for path, data in members if path.endswith("torch/version.py")), None
    )
    if version is None:
        return max((_report_library(name, path, data) for path, data in members), default=0)
    flags = {flag for path, data in members if "torch_python" in path for flag in _FLAGS.findall(data)}
    inside = sorted({part for flag in flags for part in flag.decode().replace(";", " ").split()}, key=_order)
    print(f"{name}: torch {version}: {' '.join(inside) or 'no GPU code'}")
    row = _row(version)
    if row is None or not inside:
        print("  builds.toml: no such build" if inside else "  builds for the CPU are not listed")
        return 0
    names = [
        *(_name("sm", each) for each in row["code"]),
        *(_name("compute", each) for each in row.get("ptx", ())),
    ]
    agrees = sorted(names, key=_order) == inside
    print(f"  builds.toml: {'agrees' if agrees else 'says ' + ' '.join(names)} (evidence: {row['evidence']})")
    return 0 if agrees else 1


def _report_library(package: str, path: str, data: bytes) -> int:
    """Print the architectures inside one library; for those of bitsandbytes whether builds.toml agrees."""
    found = count_architectures(data)
    if not found:
        return 0
    counts = ", ".join(f"{each} x{found[each]}" for each in sorted(found, key=_order))
    print(f"{package}: {Path(path).name}: {counts}")
    tag = re.search(r"libbitsandbytes_cuda(\d+)(\d)", path)
    version = re.search(r"bitsandbytes[- ](\d+\.\d+)", package)
    if tag is None or version is None:
        return 0
    oldest = bitsandbytes_oldest(version[1], f"{tag[1]}.{tag[2]}")
    inside = min(_order(each)[1] for each in found if each.startswith("sm"))
    agrees = oldest is not None and oldest[0] * 10 + oldest[1] == inside
    print(f"  builds.toml: {'agrees' if agrees else f'says from {oldest} on'}")
    return 0 if agrees else 1


def count_architectures(data: bytes) -> Counter[str]:
    """Entries of each architecture in all fat binaries of a library: {'sm_61': 12, 'compute_90': 1}."""
    found: Counter[str] = Counter()
    start = data.find(_FATBIN)
    while start >= 0:
        _, _, header, size = _HEADER.unpack_from(data, start)
        at, end = start + header, min(start + header + size, len(data))
        while at + 32 <= end:
            kind, _, entry, payload = _ENTRY.unpack_from(data, at)
            (architecture,) = struct.unpack_from("<I", data, at + 28)
            if kind not in (1, 2) or not 32 <= entry <= 4096 or not 20 <= architecture <= 200:
                break
            found[f"{'compute' if kind == 1 else 'sm'}_{architecture}"] += 1
            at += entry + payload
        start = data.find(_FATBIN, start + 4)
    return found


def _in_wheel(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if _wanted(name):
                yield name, wheel.read(name)


def _installed(name: str) -> Iterator[tuple[str, bytes]]:
    for file in metadata.files(name) or ():
        if _wanted(str(file)):
            yield str(file), Path(str(file.locate())).read_bytes()


def _wanted(name: str) -> bool:
    # Of PyTorch two files suffice, and its largest are larger than some memories.
    if "torch/lib/" in name:
        return "torch_python" in name
    return name.endswith("torch/version.py") or bool(_LIBRARY.search(name))


def _torch_version(data: bytes) -> str | None:
    found = re.search(rb"__version__ = '([^']+)'", data)
    return found[1].decode() if found else None


def _row(version: str) -> dict | None:
    number, _, tag = version.partition("+")
    line = number.split(".")[:2]
    rows = facts.read("builds")["torch"]
    return next(
        (r for r in rows if r["version"].split(".")[:2] == line and f"cu{r['cuda'].replace('.', '')}" == tag),
        None,
    )


def _name(kind: str, capability: str) -> str:
    return f"{kind}_{capability.replace('.', '')}"


def _order(name: str) -> tuple[str, int]:
    kind, _, number = name.partition("_")
    return ("" if kind == "sm" else kind), int(re.sub(r"\D", "", number))


if __name__ == "__main__":
    sys.exit(main())
