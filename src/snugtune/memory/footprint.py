"""From a trace to bytes: replay through the allocator, and peaks by phase, kind, layer and operation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from snugtune.memory.allocator import Allocator, Block
from snugtune.memory.trace import Trace

AGAIN = ", again"


@dataclass(frozen=True)
class Peak:
    """The largest values in a phase.

    Args:
        allocated_bytes: In tensors, by the allocator's count.
        reserved_bytes: Taken from the card.
        event: Number of the event in the trace at which most was allocated.
    """

    allocated_bytes: int
    reserved_bytes: int
    event: int


def repeat(trace: Trace, span: str, previous: str, times: int) -> Trace:
    """A trace in which one of two equal updates runs more often.

    What an update frees of the one before it, a repetition frees of the repetition before it. The repetitions
    are a span of their own, whose name ends with `AGAIN`; their storages have numbers of their own.

    Args:
        trace: The trace.
        span: Name of the update to repeat.
        previous: Name of the update before it.
        times: How many more times it runs; nothing is repeated where the two updates differ.
    """
    begin, end = trace.spans[span]
    body = trace.events[begin:end]
    born = [event for event in body if event >= 0]
    earlier = [event for event in trace.events[slice(*trace.spans[previous])] if event >= 0]
    if times <= 0 or [trace.storages[n].size_bytes for n in born] != [
        trace.storages[n].size_bytes for n in earlier
    ]:
        return trace
    storages, events = list(trace.storages), trace.events[:end]
    place = {number: index for index, number in enumerate(born)}
    place_before = {number: index for index, number in enumerate(earlier)}
    current = born
    for _ in range(times):
        last, current = current, [len(storages) + index for index in range(len(born))]
        storages.extend(trace.storages[number] for number in born)
        for event in body:
            number = event if event >= 0 else ~event
            if number in place:
                events.append(current[place[number]] if event >= 0 else ~current[place[number]])
            elif number in place_before:
                events.append(~last[place_before[number]])
    shift = len(events) - end
    for event in trace.events[end:]:
        events.append(~current[place[~event]] if event < 0 and ~event in place else event)
    spans = {name: (a + shift, b + shift) if a >= end else (a, b) for name, (a, b) in trace.spans.items()}
    spans[f"{span}{AGAIN}"] = end, end + shift
    return replace(trace, storages=storages, events=events, spans=spans)


def replay(trace: Trace, allocator: Allocator) -> dict[str, Peak]:
    """The peaks of each phase of a trace; "" is the whole.

    Raises:
        DoesNotFit: The allocator's limit would be passed.
    """
    starts: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    for name, (begin, end) in {**trace.spans, "": (0, len(trace.events))}.items():
        starts.setdefault(begin, []).append(name)
        ends.setdefault(end, []).append(name)
    blocks: dict[int, Block | None] = {}
    running: dict[str, list[int]] = {}
    peaks: dict[str, Peak] = {}
    sizes = [storage.size_bytes for storage in trace.storages]
    for position, event in enumerate([*trace.events, None]):
        for name in ends.get(position, ()):
            if name in running:
                peaks[name] = Peak(*running.pop(name))
        for name in starts.get(position, ()):
            running[name] = [allocator.allocated_bytes, allocator.reserved_bytes, position]
        if event is None:
            break
        if event < 0:
            allocator.free(blocks.pop(~event))
            continue
        blocks[event] = allocator.allocate(sizes[event])
        for values in running.values():
            if allocator.allocated_bytes > values[0]:
                values[0], values[2] = allocator.allocated_bytes, position
            values[1] = max(values[1], allocator.reserved_bytes)
    return peaks


def held_at(trace: Trace, event: int) -> list[int]:
    """Numbers of the storages that are alive after an event."""
    alive: dict[int, None] = {}
    for entry in trace.events[: event + 1]:
        if entry >= 0:
            alive[entry] = None
        else:
            alive.pop(~entry, None)
    return list(alive)


def by_kind(trace: Trace, held: list[int], *, gradients: set[int], optimizer: set[int]) -> dict[str, int]:
    """Bytes of the storages that are held, by what they are for.

    Args:
        trace: The trace.
        held: Numbers of storages, as from `held_at`.
        gradients: Numbers of those that are gradients of parameters.
        optimizer: Numbers of those that are the optimizer's.
    """
    kinds = dict.fromkeys(KINDS, 0)
    for number in held:
        storage = trace.storages[number]
        if storage.workspace:
            kind = "workspace"
        elif number in gradients:
            kind = "gradients"
        elif number in optimizer:
            kind = "optimizer"
        elif storage.phase == "load":
            kind = "weights"
        elif storage.backward:
            kind = "temporary"
        else:
            kind = "activations" if storage.module else "logits and loss"
        kinds[kind] += storage.size_bytes
    return kinds


def by_layer(trace: Trace, held: list[int]) -> dict[str, int]:
    """Bytes of the storages that are held, by the module that made them; "" stands for the code around it."""
    layers: dict[str, int] = {}
    for number in held:
        storage = trace.storages[number]
        layers[storage.module] = layers.get(storage.module, 0) + storage.size_bytes
    return dict(sorted(layers.items(), key=lambda item: -item[1]))


KINDS = ("weights", "gradients", "optimizer", "activations", "logits and loss", "temporary", "workspace")
