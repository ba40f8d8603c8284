"""The table of cards, and the page "Which PyTorch for which card", both made from the facts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

from snugtune import facts
from snugtune.environment.builds import (
    Capability,
    Place,
    architecture_of,
    embedded,
    needed_driver,
    numbers,
    show,
    tensorflow_builds,
    torch_builds,
)
from snugtune.environment.cards import KnownCard, all_cards
from snugtune.environment.install import bitsandbytes_oldest, trainable_builds
from snugtune.units import show_size

_COLUMNS = ("card", "capability", "memory", "GB/s", "driver", "PyTorch", "PyPI", "TensorFlow", "bitsandbytes")


# What ends with a generation of cards, in the order of the columns.
_ENDS = ("last_driver", "torch", "torch_pypi", "tensorflow", "bitsandbytes")


def card_rows() -> list[dict[str, Any]]:
    """Every card with its figures, and the last builds that have code for it."""
    return [{**_plain(card), **last_builds(card.capability)} for card in all_cards()]


def print_cards(*, as_json: bool) -> None:
    """Print the table of cards, or one JSON object with everything that is known of them."""
    text = [json.dumps({"cards": card_rows()}, ensure_ascii=False)] if as_json else table_lines()
    sys.stdout.writelines(f"{line}\n" for line in text)


@cache
def last_builds(capability: Capability) -> dict[str, Any]:
    """The last driver branch and the last builds for a card; None where there is none."""
    module, row = capability in embedded(), architecture_of(capability)
    place = Place(architecture="aarch64" if module else "x86_64")
    torch = next((build for build in trainable_builds(place) if build.covers(capability, place)), None)
    every = torch_builds("linux", place.architecture)
    pypi = next((build for build in every if build.pypi and build.covers(capability, place)), None)
    tensorflow = next(
        (build for build in tensorflow_builds("linux") if build.covers(capability, place)), None
    )
    return {
        "architecture": row["name"] if row else None,
        "last_driver": row.get("driver_last") if row else None,
        "torch": f"{torch.line} {torch.tag}" if torch else None,
        "torch_pypi": pypi.line if pypi else None,
        "tensorflow": tensorflow.version if tensorflow else None,
        "bitsandbytes": _bitsandbytes(capability, torch.cuda if torch and not module else None),
    }


def table_lines() -> Iterator[str]:
    """The table of cards for a terminal."""
    rows = [_COLUMNS, *(_cells(card) for card in all_cards())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    newest = max(card.checked for card in all_cards())
    yield ""
    yield f"As of {newest}. driver: last branch that sees the card, - where the newest does."
    yield "PyTorch: newest on its own index. PyPI: newest that plain pip takes on Linux."
    yield "Sources, one for each card: snugtune cards --json"


def page(language: str) -> str:
    """The page "Which PyTorch for which card" in Markdown.

    Args:
        language: en or zh.
    """
    words = facts.read("page")[language]
    return "\n".join(
        [
            f"# {words['title']}",
            "",
            words["links"],
            "",
            words["introduction"].strip(),
            "",
            f"## {words['cards']}",
            "",
            *_markdown(words["card_columns"], _generations(words)),
            "",
            words["after_cards"].strip(),
            "",
            f"## {words['drivers']}",
            "",
            *_markdown(words["driver_columns"], _drivers()),
            "",
            words["after_drivers"].strip(),
            "",
            f"## {words['builds']}",
            "",
            *_markdown(words["build_columns"], _builds(words)),
            "",
            words["after_builds"].strip(),
            "",
            f"## {words['features']}",
            "",
            *_markdown(words["feature_columns"], _features()),
            "",
            f"## {words['add']}",
            "",
            words["adding"].strip(),
            "",
        ]
    )


def _plain(card: KnownCard) -> dict[str, Any]:
    return {**asdict(card), "name": card.name, "capability": show(card.capability)}


def _bitsandbytes(capability: Capability, cuda: str | None) -> str | None:
    for row in facts.read("builds")["bitsandbytes"] if cuda else ():
        oldest = bitsandbytes_oldest(row["first"], cuda or "")
        if oldest is not None and oldest <= capability:
            return str(row["spec"].removeprefix("bitsandbytes"))
    return None


def _cells(card: KnownCard) -> tuple[str, ...]:
    last = last_builds(card.capability)
    memory = (
        show_size(card.memory_bytes)
        if card.memory_bytes
        else f"{card.nominal_gib:g} GB"
        if card.nominal_gib
        else "-"
    )
    bandwidth = "-" if card.bandwidth_gb_s is None else f"{card.bandwidth_gb_s:.0f}"
    ends = (str(last[name] or "-") for name in _ENDS)
    return (card.name, show(card.capability) or "-", memory, bandwidth, *ends)


def _generations(words: Any) -> Iterator[list[str]]:
    """One row for each compute capability, with the cards that have it."""
    for capability in sorted({card.capability for card in all_cards()}):
        last = last_builds(capability)
        names = [
            card.name.removeprefix("NVIDIA ").removeprefix("GeForce ")
            for card in all_cards()
            if card.capability == capability
        ]
        some = ", ".join(
            dict.fromkeys(name for name in names if "Laptop" not in name and "Max-Q" not in name)
        )
        yield [
            f"{show(capability)} {last['architecture']}",
            some,
            *(str(last[name] or words["none"]) for name in _ENDS),
        ]


def _drivers() -> Iterator[list[str]]:
    for row in facts.read("builds")["cuda_major"]:
        yield [f"CUDA {row['major']}", row["driver"]["linux"], row["driver"]["windows"]]


def _builds(words: Any) -> Iterator[list[str]]:
    for build in torch_builds("linux"):
        code = " ".join(str(show(each)) for each in sorted(build.code))
        low, high = build.python
        evidence = words["evidence"][build.row["evidence"]]
        yield [
            f"{build.version} {build.tag}{' (PyPI)' if build.pypi else ''}",
            code,
            f"{show(low)} - {show(high)}",
            needed_driver(build.cuda, Place()) or "",
            f"[{evidence}]({build.source})",
        ]


def _features() -> Iterator[list[str]]:
    rows = sorted(facts.read("features")["feature"], key=lambda row: numbers(row["capability"]))
    yield from (
        [row["feature"], row["capability"], row["instead"], f"[{row['checked']}]({row['source']})"]
        for row in rows
    )


def _markdown(heading: list[str], rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heading)} |"
    yield f"|{'---|' * len(heading)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
