"""Reads what nvidia-smi printed: table, CSV, matrix of connections. What it would not say is None."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from snugtune.environment.builds import numbers
from snugtune.environment.stated import Card, Process, Stated, card_named, card_told
from snugtune.units import MiB

_HEADER = re.compile(
    r"NVIDIA-SMI\s+(?P<smi>[\d.]+).*?Driver Version:\s*(?P<driver>[\d.]+)"
    r"(?:.*?CUDA Version:\s*(?P<cuda>[\d.]+))?"
)
# | 0  NVIDIA GeForce GTX 1080 Ti   Off |   00000000:01:00.0  On |   N/A |
_CARD = re.compile(
    r"^\|\s+(?P<index>\d+)\s+(?P<name>\S.*?)\s+(?P<mode>On|Off|WDDM|TCC|MCDM|N/A)\s+\|\s*"
    r"(?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s+(?P<display>\S+)\s+\|"
)
_USE = re.compile(
    r"^\|\s*(?P<fan>\S+)\s+(?P<temperature>\d+C|N/A|ERR!)\s.*\|\s*(?P<used>\d+)\s*MiB\s*/\s*(?P<total>\d+)\s*MiB\s*\|"
    r"\s*(?P<busy>\d+%|\S+)"
)
_PROCESS = re.compile(
    r"^\|\s+(?P<index>\d+)\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(?P<pid>\d+)\s+(?P<type>C\+G|M\+C|C|G|M)\s+(?P<name>\S.*?)"
    r"\s+(?P<memory>\d+\s*MiB|N/A)\s*\|"
)
_SLICE = re.compile(
    r"^\|\s+(?P<index>\d+)\s+\d+\s+\d+\s+\d+\s+\|\s*(?P<used>\d+)\s*MiB\s*/\s*(?P<total>\d+)\s*MiB"
)
_PROCESSES_FOLLOW = re.compile(r"^\|\s*Processes:", re.MULTILINE)
_LINK = re.compile(r"^\s*GPU\d+\s")
# nvidia-smi -L, PyTorch's collect_env, and lspci, which has the name in the last square brackets
_LISTED = re.compile(
    r"^(?:(?:GPU models and configuration: )?GPU (?P<index>\d+): (?P<name>[^\n]+?)"
    r"(?: \(UUID: (?P<uuid>GPU-[\w-]+)\))?"
    r"|(?P<bus>[\w:]+\.\d) [^\n]*NVIDIA Corporation [^\n]*\[(?P<chip>[^\]\n]+)\](?: \(rev \w+\))?)\s*$",
    re.MULTILINE,
)
_MOST_CARDS = 64  # no machine has more
_THERMAL_BITS = 0x20 | 0x40  # NVML's software and hardware thermal slowdown


def read_table(text: str, stated: Stated) -> Stated | None:
    """The table that plain `nvidia-smi` prints; None if the text is none."""
    header = _HEADER.search(text)
    if header is None:
        return None
    cards = list(_cards(text))
    system = None
    if any(card.display_driver for card in cards):
        system = "windows"
    elif header["smi"] != header["driver"] and header["driver"].count(".") == 1:
        system = "wsl"  # the program is Linux's, the driver Windows': different numbers are normal there
    stated = stated.in_system(system)
    if cards:
        stated = stated.with_cards(cards)
    told = header["cuda"] or stated.place.told_cuda
    return replace(stated, place=replace(stated.place, driver=header["driver"], told_cuda=told))


def _cards(text: str) -> Iterator[Card]:
    lines = text.splitlines()
    processes = _processes(lines) if _PROCESSES_FOLLOW.search(text) else None
    slices = {found["index"]: found for line in lines if (found := _SLICE.match(line))}
    for number, line in enumerate(lines):
        found = _CARD.match(line)
        if found is None:
            continue
        use = next((hit for each in lines[number + 1 : number + 3] if (hit := _USE.match(each))), None)
        part = slices.get(found["index"])
        memory = part or use
        used, total = (_mib(memory["used"]), _mib(memory["total"])) if memory else (None, None)
        board = _mib(use["total"]) if use else None
        card = card_told(
            found["name"].strip(),
            board,
            index=int(found["index"]),
            bus_id=found["bus"],
            used_bytes=used,
            free_bytes=None if used is None or total is None else max(0, total - used),
            busy_percent=_number(use["busy"]) if use else None,
            temperature_c=_number(use["temperature"]) if use else None,
            display_driver=found["mode"] in ("WDDM", "MCDM"),
            mig=part is not None,
            processes=None if processes is None else tuple(p for i, p in processes if i == found["index"]),
        )
        yield replace(card, memory_bytes=total) if part else card


def _processes(lines: list[str]) -> list[tuple[str, Process]]:
    return [
        (
            found["index"],
            Process(
                pid=int(found["pid"]),
                name=found["name"],
                memory_bytes=_mib(found["memory"]),
                draws=found["type"] != "C",
            ),
        )
        for line in lines
        if (found := _PROCESS.match(line))
    ]


def read_csv(text: str, stated: Stated) -> Stated | None:
    """The answer to `nvidia-smi --query-gpu=... --format=csv`, also without heading; None if it is none."""
    try:
        rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    except csv.Error:
        return None
    if not rows or len(rows[0]) < 2:
        return None
    heading = [name.partition(" [")[0].strip() for name in rows[0]]
    if "name" in heading or "memory.total" in heading or "compute_cap" in heading:
        table = [dict(zip(heading, row, strict=False)) for row in rows[1:]]
    elif all(len(row) >= 3 and row[0].strip().isdecimal() and re.match(r"[A-Z]", row[1]) for row in rows):
        # Without a heading nothing but the first two columns can be told for sure.
        table = [{"index": row[0], "name": row[1]} for row in rows]
    else:
        return None
    drivers = [driver for row in table if (driver := _known(row.get("driver_version")))]
    place = replace(stated.place, driver=drivers[0]) if drivers else stated.place
    return replace(stated.with_cards([_card_of_row(row) for row in table]), place=place)


def _card_of_row(row: Mapping[str, str]) -> Card:
    bits = _known(row.get("clocks_throttle_reasons.active") or row.get("clocks_event_reasons.active"))
    capability = _known(row.get("compute_cap"))
    more: dict[str, Any] = {
        "index": _number(row.get("index")),
        "uuid": _known(row.get("uuid") or row.get("gpu_uuid")),
        "bus_id": _known(row.get("pci.bus_id") or row.get("gpu_bus_id")),
        "used_bytes": _mib(row.get("memory.used")),
        "free_bytes": _mib(row.get("memory.free")),
        "busy_percent": _number(row.get("utilization.gpu")),
        "temperature_c": _number(row.get("temperature.gpu")),
        "throttled": bool(bits and bits.startswith("0x") and int(bits, 16) & _THERMAL_BITS),
    }
    name = _known(row.get("name")) or "unknown NVIDIA card"
    exact = numbers(capability) if capability and re.fullmatch(r"\d+\.\d", capability) else None
    return card_told(name, _mib(row.get("memory.total")), exact, **more)


def read_list(text: str, stated: Stated) -> Stated | None:
    """The lists of `nvidia-smi -L`, collect_env and lspci, which have names only; None for other texts."""
    cards = [
        card_told(found["name"] or found["chip"], None, index=number, uuid=found["uuid"], bus_id=found["bus"])
        for number, found in enumerate(islice(_LISTED.finditer(text), _MOST_CARDS))
        if found["name"] or "Audio" not in found[0]
    ]
    return stated.with_cards([_by_alias(card) for card in cards]) if cards and not stated.cards else None


def _by_alias(card: Card) -> Card:
    """lspci's names are those of people: found among the aliases where the driver's are not."""
    named = card_named(card.name)
    if card.known or card.one_of or not (named.known or named.one_of):
        return card
    return replace(named, index=card.index, uuid=card.uuid, bus_id=card.bus_id)


def read_topology(text: str, stated: Stated) -> Stated | None:
    """The matrix that `nvidia-smi topo -m` prints; None if the text is none."""
    rows = [words for line in text.splitlines() if _LINK.match(line) and "X" in (words := line.split())]
    if len(rows) < 2:
        return None
    pairs = [row[1 + column] for number, row in enumerate(rows) for column in range(number)]
    return replace(stated, topology=tuple(pairs))


def _known(text: str | None) -> str | None:
    """A field, or None for "[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!" and the like."""
    text = (text or "").strip()
    return None if not text or text.startswith("[") or text in ("N/A", "ERR!") else text


def _number(text: str | None) -> int | None:
    found = re.match(r"\d+", _known(text) or "")
    return int(found[0]) if found else None


def _mib(text: str | None) -> int | None:
    number = _number(text)
    return None if number is None else number * MiB
