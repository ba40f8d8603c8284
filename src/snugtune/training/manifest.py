"""What a checkpoint consists of: the size and the checksum of each of its files. No torch."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from snugtune.units import MiB

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Note the files of a folder, as they are now, in a file beside them.

    Raises:
        OSError: A file cannot be read, or this one cannot be written.
    """
    files = {
        path.name: {"bytes": path.stat().st_size, "crc32": _checksum(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def check_files(folder: Path) -> None:
    """Compare the files of a folder with what was noted.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is missing or is not what it was; the message names it.
        LookupError, TypeError, AttributeError: The note itself is damaged.
    """
    text = (folder / MANIFEST).read_text(encoding="utf-8")
    for name, noted in json.loads(text)["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        size = path.stat().st_size
        if size != noted["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes in the place of {noted['bytes']:,}")
        if _checksum(path) != noted["crc32"]:
            raise ValueError(f"{name} is not what was written: its checksum differs")


def _checksum(path: Path) -> str:
    # Against bad disks and broken copies, not against people. Processors without instructions for SHA, of the
    # age of the cards this is for, take several times as long for a cryptographic hash.
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(4 * MiB):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"
