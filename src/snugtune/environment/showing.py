"""The doctor's report as JSON and as text, and the guide's claims with their answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from snugtune import facts
from snugtune.environment.builds import branch_of, ceiling, show
from snugtune.environment.findings import Verdict
from snugtune.environment.noted import without_person
from snugtune.environment.reading import surroundings_in_words
from snugtune.environment.stated import Card, Stated
from snugtune.errors import HardwareError, UsageError
from snugtune.units import show_size

_WIDTH = 12


class Report(Verdict):
    """A verdict that can be shown."""

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return as_dict(self)

    def line_for(self, package: str) -> str:
        """The command that installs a package.

        Raises:
            UsageError: No line is known for such a package.
            HardwareError: Nothing suits the cards, the driver or the Python.
        """
        if package not in self.install:
            raise UsageError(
                f"no install line is known for {package!r}",
                why=f"it is known for {', '.join(self.install)}",
                do="ask for one of these; other packages install as usual",
            )
        line = self.install[package]
        if line is None:
            errors = [finding.what for finding in self.findings if finding.severity == "error"]
            raise HardwareError(
                f"no {package} suits this machine",
                why=errors[0] if errors else "no version has code for its cards, driver and Python",
                do="leave out --install-line to see everything",
            )
        return line

    def print(self, *, as_json: bool) -> None:
        """Print it, as one JSON object or as sentences."""
        text = [json.dumps(as_dict(self), ensure_ascii=False)] if as_json else lines(self)
        sys.stdout.writelines(f"{line}\n" for line in text)


def as_dict(report: Verdict) -> dict[str, Any]:
    """The report as JSON has it; null is what is unknown."""
    stated, torch = report.stated, report.stated.torch
    return {
        "ok": report.ok,
        "cards": [_card(card) for card in stated.cards or ()],
        "findings": [asdict(finding) for finding in report.findings],
        "install": dict(report.install),
        "reasons": dict(report.reasons),
        "not_on_this_card": [dict(row) for row in report.absent],
        "driver": {
            "version": stated.place.driver,
            "branch": branch_of(stated.place.driver),
            "cuda": ceiling(stated.place),
            "open_module": stated.open_module,
        },
        "torch": torch
        and {
            "version": torch.version,
            "cuda": torch.cuda,
            "code": None if torch.code is None else [show(each) for each in torch.code],
            "ptx": [show(each) for each in torch.ptx],
            "cudnn": torch.cudnn,
            "nccl": torch.nccl,
        },
        "packages": {name: list(versions) for name, versions in sorted(stated.packages.items())},
        "toolkit": stated.toolkit,
        "python": show(stated.place.python),
        "system": stated.place.system,
        "architecture": stated.place.architecture,
        "surroundings": surroundings_in_words(stated) if stated.live else None,
        "variables": {name: without_person(value) for name, value in stated.variables.items()},
        "measured": dict(stated.measured) or None,
        "claims": list(claims(report)),
    }


def lines(report: Verdict) -> Iterator[str]:
    """The report for people."""
    stated = report.stated
    for card in stated.cards or ():
        yield _row("card", ", ".join(_about(card)))
    if stated.cards == ():
        yield _row("card", "none")
    for name, value in _facts(stated):
        yield _row(name, value)
    yield from _measured(stated)
    for finding in report.findings:
        yield ""
        yield _row(finding.severity, f"{finding.what}  [{finding.id}]")
        yield _row("  why", finding.why)
        yield _row("  do", finding.do)
        yield _row("  source", f"{finding.source} ({finding.date})")
    if report.absent:
        yield ""
        yield "Not on this card, and what to use:"
        yield from (f"  {row['feature']} (from {row['needs']} on): {row['instead']}" for row in report.absent)
    if stated.cards or stated.live:
        yield ""
        yield "Newest that works here:"
        for name, line in report.install.items():
            yield f"  {name:<13} {line or 'none'}"
            if report.reasons[name]:
                yield f"  {'':<13} {report.reasons[name]}"
    yield ""
    yield _verdict(report)


def claims(report: Verdict) -> Iterator[dict[str, Any]]:
    """What is often read, with the right answer, and the findings or the number that show it here."""
    found = {finding.id for finding in report.findings}
    measured = report.stated.measured
    fp32, fp16 = measured.get("fp32_flops_per_s"), measured.get("fp16_flops_per_s")
    numbers = {"fp16_gain": fp16 / fp32 if isinstance(fp32, float) and isinstance(fp16, float) else None}
    for row in facts.read("guide")["claim"]:
        yield {
            "claim": row["claim"],
            "verdict": row["verdict"],
            "answer": row["answer"],
            "findings": [name for name in row["finding"] if name in found],
            "measured": numbers.get(row.get("measured", "")),
            "source": row["source"],
            "date": str(row["checked"]),
        }


def _card(card: Card) -> dict[str, Any]:
    sizes = [
        {"name": each.title, "memory_bytes": each.memory_bytes, "nominal_gib": each.nominal_gib}
        for each in card.one_of
    ]
    return {
        "name": card.name,
        "compute_capability": show(card.capability),
        "memory_bytes": card.memory_bytes,
        "known": card.known is not None or bool(card.one_of),
        "one_of": sizes,
        "index": card.index,
        "uuid": card.uuid,
        "bus_id": card.bus_id,
        "used_bytes": card.used_bytes,
        "free_bytes": card.free_bytes,
        "utilization_percent": card.busy_percent,
        "temperature_c": card.temperature_c,
        "processes": None if card.processes is None else [asdict(process) for process in card.processes],
        "source": card.known.source if card.known else None,
    }


def _about(card: Card) -> Iterator[str]:
    yield card.name
    yield f"compute capability {show(card.capability) or 'unknown'}"
    nominal = card.known.nominal_gib if card.known and not card.one_of else None
    memory = (
        f"nominally {nominal:g} GB" if nominal and card.memory_bytes is None else show_size(card.memory_bytes)
    )
    yield f"memory {memory}" + ("" if card.free_bytes is None else f", {show_size(card.free_bytes)} free")
    if card.uuid:
        yield card.uuid
    if card.bus_id:
        yield f"bus {card.bus_id}"
    if card.known is None and not card.one_of:
        yield "not in the table of cards"


def _facts(stated: Stated) -> Iterator[tuple[str, str]]:
    place, torch = stated.place, stated.torch
    if place.driver:
        module = {True: ", open module", False: ", proprietary module", None: ""}[stated.open_module]
        shown = ceiling(place)
        yield (
            "driver",
            f"{place.driver}, branch {branch_of(place.driver)}, CUDA up to {shown or 'unknown'}{module}",
        )
    where = surroundings_in_words(stated) if stated.live else ""
    yield "system", ", ".join(filter(None, (place.system, place.architecture, where)))
    if place.python:
        yield "Python", show(place.python) or ""
    if torch:
        parts = [torch.version]
        parts += [f"CUDA {torch.cuda}"] if torch.cuda else [f"for {torch.made_for}"] if torch.made_for else []
        parts += [f"code for {', '.join(str(show(each)) for each in torch.code)}"] if torch.code else []
        parts += [f"cuDNN {torch.cudnn}"] if torch.cudnn else []
        parts += [f"NCCL {torch.nccl}"] if torch.nccl else []
        yield "torch", ", ".join(parts)
    others = {
        name: versions
        for name, versions in stated.packages.items()
        if name != "torch" and not name.startswith("nvidia-")
    }
    if others:
        yield (
            "packages",
            ", ".join(f"{name} {' and '.join(versions)}" for name, versions in sorted(others.items())),
        )
    if stated.toolkit:
        yield "nvcc", f"{stated.toolkit} (matters only to compile extensions)"


def _measured(stated: Stated) -> Iterator[str]:
    measured: dict[str, Any] = dict(stated.measured)
    for name, word in (("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16")):
        rate = measured.get(f"{name}_flops_per_s")
        if rate:
            yield _row(f"  {word}", f"{rate / 1e12:.1f} TFLOP/s in matrix products (measured)")
    if measured.get("bandwidth_bytes_per_s"):
        yield _row("  memory", f"{measured['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s (measured)")
    if measured.get("context_bytes"):
        yield _row(
            "  context", f"{show_size(measured['context_bytes'])} that CUDA takes for itself (measured)"
        )
    passed = measured.get("passed")
    if passed:
        yield _row("  self-test", f"passed: {', '.join(passed)}")


def _verdict(report: Verdict) -> str:
    cards = report.stated.cards
    if not report.ok:
        return "Training would fail: the first error above comes first."
    if cards:
        return "Training would run."
    return (
        "Training would run on the CPU."
        if report.stated.live
        else "Nothing in this keeps training from running."
    )


def _row(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}}{text}"
