"""What rules ask about all but driver and PyTorch: packages, variables, toolkits, memory, several cards."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from packaging.version import Version

from snugtune import facts
from snugtune.environment.builds import (
    Place,
    embedded,
    numbers,
    show,
    tensorflow_builds,
    toolkit_compiles,
    version_of,
)
from snugtune.environment.cards import has_tensor_cores
from snugtune.environment.install import (
    best_torch,
    bitsandbytes_line,
    bitsandbytes_oldest,
    tensorflow_line,
    trainable_builds,
)
from snugtune.environment.lines import set_variable, torchvision_for, unset_variable
from snugtune.environment.stated import Card, Stated, latest
from snugtune.hardware import Machine
from snugtune.units import MiB, show_size

_SHADOWS = re.compile(r"cuda|cudnn|nvidia", re.IGNORECASE)
# Less than this is what a driver and an idle desktop take.
_HELD_BYTES = 512 * MiB
# Windows moves memory to the host where others give an error; no share is published, so this is a choice.
_SPILLING = 0.94


def surroundings(stated: Stated, good: Sequence[Card]) -> dict[str, Any]:
    """Answers to what rules ask about a machine's packages, variables and memory.

    Args:
        stated: What is known of the machine.
        good: The cards that nothing keeps from training so far.
    """
    return {
        **_packages(stated),
        **_libraries(stated),
        **_tensorflow(stated),
        **_variables(stated),
        **_memory(stated),
        **_machine(stated),
        **_several(stated, good),
        **_measured(stated.measured),
    }


def _packages(stated: Stated) -> dict[str, Any]:
    packages = stated.packages
    versions = packages.get("torch", ())
    vision = latest(packages, "torchvision")
    pairs = {torch: torchvision_for(torch) for torch in versions}
    unpaired = [
        torch for torch, pair in pairs.items() if vision and pair and not vision.startswith(f"{pair}.")
    ]
    majors = sorted({name[-2:] for name in packages if re.search(r"^nvidia-.*-cu1\d$", name)})
    weakest = min((card.capability for card in stated.cards or () if card.capability), default=None)
    found: dict[str, Any] = {
        "torch_twice": len(versions) > 1 and " and ".join(versions),
        "unpaired_vision": unpaired and f"torchvision {vision}",
        "unpaired_torch": " and ".join(unpaired),
        "cuda_mix": len(majors) > 1 and " and ".join(f"cu{major}" for major in majors),
    }
    for name, below in (("flash-attn", (8, 0)), ("triton", (7, 0)), ("vllm", (7, 5)), ("unsloth", (7, 0))):
        version = latest(packages, name)
        found[f"{name.replace('-', '_')}_in_vain"] = (
            version and weakest and weakest < below and f"{name} {version}"
        )
    xformers = latest(packages, "xformers")
    new = (version_of(xformers) or Version("0")) > Version("0.0.30")
    found["xformers_in_vain"] = xformers and weakest and weakest < (7, 5) and new and f"xformers {xformers}"
    bitsandbytes, cuda = latest(packages, "bitsandbytes"), stated.torch.cuda if stated.torch else None
    if bitsandbytes and cuda and weakest:
        oldest = bitsandbytes_oldest(bitsandbytes, cuda)
        found["bitsandbytes_in_vain"] = (
            oldest is None or weakest < oldest
        ) and f"bitsandbytes {bitsandbytes}"
        found["bitsandbytes_from"] = show(oldest)
        proposal = bitsandbytes_line(
            Machine(tuple(stated.gpus), stated.place.driver, None), stated.place, cuda
        )
        found["install_bitsandbytes"] = str(proposal) if proposal else "pip uninstall -y bitsandbytes"
    return found


def _libraries(stated: Stated) -> dict[str, Any]:
    """cuDNN without code for the card; folders in front of the wheels' own libraries; toolkits."""
    limit = facts.read("builds")["cudnn"]
    installed = next(
        (v for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12") if (v := latest(stated.packages, name))),
        None,
    )
    brought = None if stated.torch or not stated.cards else best_torch(stated.gpus, stated.place)
    cudnn = installed or (
        stated.torch.cudnn if stated.torch else brought.row.get("cudnn") if brought else None
    )
    new = (version_of(cudnn) or Version("0")) >= Version(limit["first_without"])
    torch = stated.torch
    old = [
        card.name
        for card in stated.cards or ()
        if card.capability
        and card.capability < numbers(limit["below"])
        and not (torch and torch.code and card.capability < min(torch.code))
    ]
    entries = [
        entry
        for entry in re.split(r"[:;]", stated.variables.get("LD_LIBRARY_PATH", ""))
        if _SHADOWS.search(entry)
    ]
    toolkit = stated.toolkit
    capabilities = [card.capability for card in stated.cards or () if card.capability]
    unfit = toolkit and any(toolkit_compiles(toolkit, each) is False for each in capabilities)
    older = [card.name for card in stated.cards or () if card.capability and card.capability < (5, 0)]
    ninth = (version_of(cudnn) or Version("0")) >= Version("9")
    return {
        "cudnn_before_maxwell": ninth and older and not new and cudnn,
        "cudnn_in_vain": new and old and cudnn,
        "cudnn_cards": " and ".join(dict.fromkeys(old)),
        "cudnn_last": limit["last"],
        "ld_entries": ":".join(entries),
        "cudnn_folder": ":".join(entries),
        "ld_libraries": ", ".join(stated.libraries),
        "toolkit": toolkit,
        "toolkit_differs": toolkit and not unfit and torch and torch.cuda and toolkit != torch.cuda,
        "toolkit_unfit": unfit,
    }


def _tensorflow(stated: Stated) -> dict[str, Any]:
    version = latest(stated.packages, "tensorflow")
    if version is None or not stated.cards:
        return {}
    place, line = stated.place, ".".join(version.split(".")[:2])
    rows = [row for row in facts.read("builds")["tensorflow"] if row["version"] == line]
    build = next((each for each in tensorflow_builds(place.wheels) if each.version == line), None)
    covers = build and any(build.covers(card.capability, place) for card in stated.cards)
    windows = place.system == "windows" and (not rows or not rows[0]["windows"])
    cudnn = latest(stated.packages, "nvidia-cudnn-cu12")
    limit = facts.read("builds")["cudnn"]
    old = any(card.capability and card.capability < numbers(limit["below"]) for card in stated.cards)
    trap = build and build.row["open_cudnn"] and old and cudnn is None
    proposal = tensorflow_line(Machine(tuple(stated.gpus), place.driver, None), place)
    return {
        "tensorflow_windows": windows and version,
        "tensorflow_in_vain": build is not None and not covers and version,
        "tensorflow_trap": trap and version,
        "install_tensorflow": str(proposal) if proposal else "pip uninstall -y tensorflow",
    }


def _variables(stated: Stated) -> dict[str, Any]:
    variables, place = stated.variables, stated.place
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1")
    wrong = [] if hidden or visible is None else _names_no_card(visible, stated.cards or ())
    allocator = variables.get("PYTORCH_ALLOC_CONF") or variables.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return {
        "hidden": hidden and repr(visible),
        "visible": visible,
        "visible_wrong": wrong and wrong[0],
        "visible_right": ", ".join(
            card.uuid or str(number) for number, card in enumerate(stated.cards or ())
        ),
        "unhide": unset_variable("CUDA_VISIBLE_DEVICES", place),
        "blocking": variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("0", ""),
        "unblock": unset_variable("CUDA_LAUNCH_BLOCKING", place),
        "uncached": variables.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("0", ""),
        "recache": unset_variable("PYTORCH_NO_CUDA_MEMORY_CACHING", place),
        "expandable_in_vain": "expandable_segments:true" in allocator.lower() and place.system == "windows",
        "unset_ld": unset_variable("LD_LIBRARY_PATH", place),
        "nccl_no_p2p": set_variable("NCCL_P2P_DISABLE", "1", place),
    }


def _names_no_card(visible: str, cards: Sequence[Card]) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES that no card of a machine has, as number or UUID."""
    known = [card.uuid for card in cards]
    return [
        name
        for name in (part.strip() for part in visible.split(","))
        if cards
        and (
            (name.isdecimal() and int(name) >= len(cards))
            or (
                name.startswith("GPU-")
                and None not in known
                and not any(str(k).startswith(name) for k in known)
            )
        )
    ]


def _memory(stated: Stated) -> dict[str, Any]:
    """Who holds the memory of the cards; what is true of several cards is one answer."""
    told: dict[str, list[tuple[str, str, str]]] = {}
    for card in stated.cards or ():
        if card.used_bytes is None or card.memory_bytes is None:
            continue
        where = f"{card.name}{'' if card.index is None else f' (number {card.index})'}"
        left = f"{show_size(_free(card))} of {show_size(card.memory_bytes)} are left for training"
        question, phrase, pid = _memory_of(card, card.used_bytes, card.memory_bytes)
        if question is not None:
            told.setdefault(question, []).append((f"{phrase} of {where}", left, pid))
        if card.mig:
            told.setdefault("slice", []).append((f"{show_size(card.memory_bytes)} of {where}", left, ""))
    found: dict[str, Any] = {}
    for question, answers in told.items():
        phrases, lefts, pids = zip(*answers, strict=True)
        found |= {question: " and ".join(phrases), f"{question}_left": "; ".join(lefts)}
        found[f"{question}_pid"] = ",".join(filter(None, pids))
    hot = [card for card in stated.cards or () if card.throttled]
    if hot:
        temperature = hot[0].temperature_c
        found |= {
            "hot": hot[0].name,
            "temperature": "unknown" if temperature is None else f"{temperature} °C",
        }
    return found


def _memory_of(card: Card, used: int, total: int) -> tuple[str | None, str, str]:
    """What is to be said of the memory of one card, the begin of the sentence, and the process."""
    processes = card.processes or ()
    workers = [each for each in processes if not each.draws and (each.memory_bytes or 0) >= _HELD_BYTES]
    if card.display_driver and used / total > _SPILLING:
        return "spilling", f"{used / total:.0%}", ""
    if workers:
        first = max(workers, key=lambda each: each.memory_bytes or 0)
        question = "idle_holder" if card.busy_percent == 0 else "holder"
        return (
            question,
            f"{first.name} (pid {first.pid}) holds {show_size(first.memory_bytes)}",
            str(first.pid),
        )
    if card.processes == () and used >= 2 * _HELD_BYTES and used / total > 0.25 and not card.mig:
        return "unlisted", show_size(used), ""
    if any(each.draws for each in processes) and used >= 2 * _HELD_BYTES:
        return "drawn", show_size(used), ""
    return None, "", ""


def _free(card: Card) -> int | None:
    """Free as reported: some memory is neither used nor free."""
    if card.free_bytes is not None or card.memory_bytes is None or card.used_bytes is None:
        return card.free_bytes
    return card.memory_bytes - card.used_bytes


def _machine(stated: Stated) -> dict[str, Any]:
    cards = stated.cards or ()
    python = stated.place.python
    oldest = facts.read("builds")["index"]["oldest_python"]
    unknown = [card.name for card in cards if card.known is None and not card.one_of]
    return {
        "wsl1": stated.wsl == 1,
        "wsl_shadow": _in_front_of_wsl(stated.texts),
        "no_card": stated.live and not cards and not stated.pci_cards,
        "driver_missing": stated.live and not cards and not stated.container and stated.pci_cards,
        "container_blind": stated.live and not cards and stated.pci_cards and stated.container,
        "threads": os.cpu_count() if stated.live else None,
        "unknown_cards": " and ".join(unknown),
        "several_sizes": "; ".join(
            ", ".join(each.title for each in card.one_of) for card in cards if card.one_of
        ),
        "half_nan": " and ".join(card.name for card in cards if _lacks_tensor_cores(card)),
        "python_too_old": python is not None and python < numbers(oldest) and show(python),
        "oldest_python": oldest,
        "embedded": stated.place.architecture == "aarch64"
        and " and ".join(card.name for card in cards if _is_without_build(card, stated.place)),
    }


def _in_front_of_wsl(texts: Sequence[str]) -> str | None:
    """A libcuda of Linux beside the one of WSL, in what `ldconfig -p` prints; None if there is none."""
    for text in texts:
        paths = re.findall(r"libcuda\.so\.1[^\n]*=> (\S+)", text)
        others = [path for path in paths if not path.startswith("/usr/lib/wsl/")]
        if others and len(others) < len(paths):
            return str(others[0])
    return None


def _lacks_tensor_cores(card: Card) -> bool:
    """Turing without tensor cores (TU116, TU117): fp16 convolutions that give NaN were reported."""
    return (
        card.capability is not None
        and card.capability >= (7, 0)
        and not has_tensor_cores(card.name, card.capability)
    )


def _is_without_build(card: Card, place: Place) -> bool:
    """Whether it is a module for embedded computers that no build of PyTorch's index has code for."""
    builds = trainable_builds(place)
    return card.capability in embedded() and not any(build.covers(card.capability, place) for build in builds)


def _several(stated: Stated, good: Sequence[Card]) -> dict[str, Any]:
    slow = [pair for pair in stated.topology if not pair.startswith("NV")]
    kinds = {card.name for card in good}
    return {
        "no_peer": bool(slow)
        and not any(pair.startswith("NV") for pair in stated.topology)
        and ", ".join(sorted(set(slow))),
        "mixed_cards": stated.live and len(kinds) > 1 and "CUDA_DEVICE_ORDER" not in stated.variables,
        "bus_order": set_variable("CUDA_DEVICE_ORDER", "PCI_BUS_ID", stated.place),
    }


def _measured(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Answers from the self-test; nothing where it did not run."""
    if not measured:
        return {}
    fp32, fp16 = measured.get("fp32_flops_per_s"), measured.get("fp16_flops_per_s")
    ratio = fp16 / fp32 if fp32 and fp16 else None
    return {
        "selftest_failed": measured.get("problem"),
        "exchange_stalled": not measured.get("exchange_corrupt") and measured.get("exchange_problem"),
        "exchange_corrupt": measured.get("exchange_corrupt") and measured.get("exchange_problem"),
        "fp16_gain": None if ratio is None else f"{ratio:.2f}",
        "fp16_in_vain": ratio is not None and ratio < 1.35 and f"{ratio:.2f}",
    }
