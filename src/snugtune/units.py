"""Bytes and seconds inside, GiB and minutes for people."""

from __future__ import annotations

import re

from snugtune.errors import UsageError

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

# "GiB" counts in powers of two, "GB" in powers of ten, as IEC 80000-13 and disk makers have it; a bare "G"
# is a power of two, as for Slurm, Docker and Java.
_UNITS = {
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": TiB,
    "k": KiB,
    "m": MiB,
    "g": GiB,
    "t": TiB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]+)\s*")


def parse_size(text: str) -> int:
    """'11 GiB' -> bytes. GiB is 2^30 bytes, GB is 10^9 bytes.

    Raises:
        UsageError: No number with a known unit, or not above zero.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"cannot read the size {text!r}",
            why="a size is a number and a unit: KiB, MiB, GiB (powers of two) or KB, MB, GB (of ten)",
            do="write it like '11 GiB' or '512 MiB'",
        )
    size_bytes = round(float(match.group(1)) * unit)
    if size_bytes <= 0:
        raise UsageError(
            f"the size {text!r} is not above zero",
            why="nothing fits into no memory",
            do="write it like '11 GiB' or '512 MiB'",
        )
    return size_bytes


def show_size(size_bytes: int | None) -> str:
    """bytes -> '11.2 GiB' ('640 MiB' below one GiB); None -> 'unknown'."""
    if size_bytes is None:
        return "unknown"
    if abs(size_bytes) >= GiB:
        return f"{size_bytes / GiB:.1f} GiB"
    if abs(size_bytes) >= MiB:
        return f"{size_bytes / MiB:.0f} MiB"
    if abs(size_bytes) >= KiB:
        return f"{size_bytes / KiB:.0f} KiB"
    return f"{size_bytes} B"


def show_count(number: int, noun: str) -> str:
    """(1, 'epoch') -> '1 epoch', (1200, 'epoch') -> '1,200 epochs'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_duration(seconds: float | None) -> str:
    """seconds -> '42 s', '3 min 20 s', '2 h 05 min'; None -> 'unknown'."""
    if seconds is None:
        return "unknown"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
