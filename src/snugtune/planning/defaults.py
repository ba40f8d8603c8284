"""What the settings leave open, decided from the facts of the card."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

from snugtune import facts
from snugtune.config import RunConfig
from snugtune.environment.cards import has_tensor_cores
from snugtune.errors import HardwareError, UsageError


@dataclass(frozen=True)
class Decision:
    """A value, and the one-line reason for it."""

    name: str
    value: object
    because: str


def decide(
    config: RunConfig,
    *,
    device_name: str,
    capability: tuple[int, int] | None,
    family: str | None = None,
    no_card_because: str | None = None,
) -> list[Decision]:
    """The precision and the optimizer of a run, with the reasons.

    Args:
        config: The run's configuration.
        device_name: Name of the device.
        capability: Compute capability of the card; None without one.
        family: What transformers calls the kind of model, such as t5; None where unknown.
        no_card_because: Why no card is in use; None where one is, or where that is unknown.

    Raises:
        HardwareError: bf16 on a card that only emulates it.
    """
    optimizer = config.training.optimizer
    return [
        choose_precision(
            config.training.precision,
            device_name=device_name,
            capability=capability,
            family=family,
            no_card_because=no_card_because,
        ),
        Decision("optimizer", "adamw-fused", "the variant of AdamW with the smallest peak memory")
        if optimizer == "adamw"
        else Decision("optimizer", optimizer, "asked for"),
    ]


def choose_precision(
    requested: str,
    *,
    device_name: str,
    capability: tuple[int, int] | None,
    family: str | None = None,
    no_card_because: str | None = None,
) -> Decision:
    """The precision to compute in, with the reason.

    Decided by what the card has, not by `torch.cuda.is_bf16_supported()`, which counts emulation.

    Args:
        requested: auto, fp32, fp16 or bf16.
        device_name: Name of the device.
        capability: Compute capability of the card; None without one.
        family: What transformers calls the kind of model, such as t5; None where unknown.
        no_card_because: Why no card is in use; None where one is, or where that is unknown.

    Raises:
        HardwareError: bf16 on a card that only emulates it.
    """
    if requested == "bf16" and capability is not None and capability < (8, 0):
        raise HardwareError(
            f"{device_name} has no bf16 units",
            why=f"its compute capability is {capability[0]}.{capability[1]}, bf16 needs 8.0; "
            "emulated it is slower than fp32",
            do="use --precision fp16 (less memory) or fp32",
        )
    if requested == "fp16":
        return _asked_for_fp16(device_name, capability, family, no_card_because)
    if requested != "auto":
        return Decision("precision", requested, "asked for")
    if capability is None:
        return Decision("precision", "fp32", "no CUDA card in use; half precision is slow on a CPU")
    where = f"{device_name} (compute capability {capability[0]}.{capability[1]})"
    if capability >= (8, 0):
        return Decision("precision", "bf16", f"{where} has bf16 units")
    if not has_tensor_cores(device_name, capability):
        why = f"{where} has no tensor cores: fp16 would save memory but hardly time"
        return Decision("precision", "fp32", why)
    if known := overflows_in_fp16(family):
        return Decision("precision", "fp32", f"{where} has fp16 tensor cores, but {known}")
    return Decision("precision", "fp16", f"{where} has fp16 tensor cores; the loss is scaled")


def _asked_for_fp16(
    device_name: str, capability: tuple[int, int] | None, family: str | None, no_card_because: str | None
) -> Decision:
    """fp16 as it was asked for, with what is to be expected of it; fp32 without a card."""
    if capability is None:
        cause = f" ({no_card_because})" if no_card_because else ""
        why = f"fp16 was asked for, but no CUDA card is in use{cause}; a CPU only emulates it"
        return Decision("precision", "fp32", f"{why}. What is learnt in an update stays the same")
    notes = ["asked for"]
    if not has_tensor_cores(device_name, capability):
        card = f"{device_name} (compute capability {capability[0]}.{capability[1]})"
        notes.append(f"{card} has no tensor cores, so it saves memory but hardly time")
    if known := overflows_in_fp16(family):
        notes.append(f"but {known}: expect skipped updates, and take fp32 then")
    return Decision("precision", "fp16", "; ".join(notes))


def overflows_in_fp16(family: str | None) -> str | None:
    """What is known against a kind of model in fp16; None if nothing is.

    Args:
        family: What transformers calls it, such as t5; None where unknown.
    """
    for entry in facts.read("precision")["overflows_in_fp16"]:
        if family in entry["families"]:
            return f"models of the kind {family} {entry['because']}"
    return None


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What the time of a pass depends on.

    Args:
        parameters: Parameters outside of embeddings: each is multiplied with every token.
        tensors: Parameter tensors: a pass launches kernels for each.
    """

    parameters: int
    tensors: int


# fp32 units of a multiprocessor: CUDA C++ Programming Guide, throughput of arithmetic instructions.
_UNITS = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_USUAL_UNITS = 128
_OPERATIONS_PER_SECOND = 2 * 1.5e9 * 0.75  # of a unit: multiply and add, at a usual clock, most of the time
# Of a tensor's kernels, forward and backward: a pass of BERT-base, 201 tensors, takes an H200's host 30 ms.
_LAUNCH_SECONDS = 1.2e-4
# How much faster half precision is with tensor cores, from NVIDIA's data sheets; a usual card has 4.
_TENSOR_CORES = {(7, 0): 8, (8, 0): 16, (9, 0): 16, (10, 0): 16}


def choose_pass_price(
    requested: int | None,
    *,
    size: ModelSize,
    precision: str,
    capability: tuple[int, int] | None,
    multiprocessors: int | None,
) -> Decision:
    """What one more pass costs, in tokens that could be computed in its time.

    Args:
        requested: The number to take; None estimates it.
        size: The model's size.
        precision: What it computes in.
        capability: Compute capability of the card; None without one.
        multiprocessors: Multiprocessors of the card; None where unknown.
    """
    if requested is not None:
        return Decision("pass price", requested, "asked for")
    if capability is None or multiprocessors is None:
        # Measured with MiniLM on 2 cores, 128 sentences per update: best from 64 to 256 (docs/log.md). What a
        # pass costs there, adding to the gradients, grows with the model as its tokens do.
        return Decision("pass price", 96, "starting a pass costs a CPU little")
    units = multiprocessors * _UNITS.get(capability, _USUAL_UNITS)
    speed = units * _OPERATIONS_PER_SECOND
    if precision != "fp32" and capability >= (7, 0):
        speed *= _TENSOR_CORES.get(capability, 4)
    # Forward and backward take six operations for each parameter and token.
    token_seconds = 6 * max(size.parameters, 1) / speed
    price = round(size.tensors * _LAUNCH_SECONDS / token_seconds)
    why = f"about {size.tensors * _LAUNCH_SECONDS * 1e3:.0f} ms to launch a pass of this model"
    return Decision("pass price", price, f"{why}, in which the card could compute so many tokens")


def decide_passes(
    config: RunConfig, *, interacting: list[str], processes: int = 1, packed: bool = False
) -> Decision:
    """How an update is cut into passes.

    Args:
        config: The run's configuration.
        interacting: Where the samples of a pass see each other.
        processes: Processes that share each update.
        packed: Whether layers see tokens only.
    """
    passes = config.training.passes
    who = ", ".join(interacting)
    alone = "" if processes == 1 else f"; {processes} processes have a share each, and {who} see only theirs"
    if isinstance(passes, int):
        note = f"; {who} see only their pass, so this changes the result"
        return Decision("passes", passes, f"asked for{note if interacting and passes > 1 else ''}")
    if interacting:
        return Decision("passes", 1, f"{who} must see the whole update{alone}")
    how = "one, or as few as the pass tokens allow" if packed else "cut by length, so that little is padded"
    return Decision("passes", "auto", f"{how}; the result is the same")


def decide_packing(requested: bool | str, *, packed: bool) -> Decision:
    """Whether layers see tokens only.

    Args:
        requested: true, false or auto.
        packed: Whether the model could be packed.

    Raises:
        UsageError: It was asked for, and this model cannot be packed.
    """
    if requested is True and not packed:
        raise UsageError(
            "training.packing=true does not go with this model",
            why="its padding can only be left out where nothing but attention looks at several tokens: BERT, "
            "RoBERTa, DistilBERT, ELECTRA and their like",
            do="leave the setting out; passes are then cut by length",
        )
    if packed:
        return Decision("packing", True, "the layers of this model see tokens only, and no padding")
    return Decision("packing", False, "asked for" if requested is False else "not known for this model")


# A packed pass has no padding to save, so it is only cut for memory, at so many times the price of a pass.
# That costs an eighth on a card, whose memory is small, and next to nothing on a CPU.
_PACKED_PRICES = {True: 8, False: 64}


def choose_pass_tokens(requested: int | None, *, price_tokens: int, packed: bool, on_card: bool) -> Decision:
    """Most positions of a pass.

    Args:
        requested: The number to take; None chooses.
        price_tokens: What a pass costs, in tokens.
        packed: Whether layers see tokens only.
        on_card: Whether a card computes.
    """
    if requested is not None:
        return Decision("pass tokens", requested, "asked for")
    if not packed:
        return Decision("pass tokens", None, "no limit was set")
    times = _PACKED_PRICES[on_card]
    return Decision("pass tokens", max(1, times * price_tokens), f"{times} times the price of a pass")


def choose_workers(requested: int | str, *, on_card: bool, task: str) -> Decision:
    """How many processes prepare batches beside the one that trains.

    Args:
        requested: How many, or auto.
        on_card: Whether a card computes.
        task: Name of the task in the run file.
    """
    if isinstance(requested, int):
        return Decision("workers", requested, "asked for")
    if not on_card:
        return Decision("workers", 0, "they would take the cores that compute")
    if task != "own":
        return Decision(
            "workers", 0, "a batch of texts is made in less time than another process hands it over"
        )
    if multiprocessing.get_start_method() != "fork":
        return Decision("workers", 0, "this system starts processes slowly; set data.workers to have some")
    return Decision("workers", 2, "the next batches are prepared while the card computes")
