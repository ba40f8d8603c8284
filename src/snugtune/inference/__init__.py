"""Evaluate and predict with a model: bounded passes, results off the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from snugtune.data.batching import EvaluationPasses, Examples
from snugtune.errors import ModelError
from snugtune.step import Step
from snugtune.tasks import Metrics


def measure(
    step: Step,
    examples: Examples,
    *,
    rows_per_pass: int,
    on_pass: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Metrics | None:
    """Scores of a step's model on examples; of several processes each does a part, and all have the scores.

    Args:
        step: The step whose model is measured.
        examples: What it is measured on.
        rows_per_pass: Rows of a pass. As many as in a training pass always fit: without gradients a pass
            keeps less.
        on_pass: Called after each pass with the passes done and all passes.
        stop: Whether someone wants it to end; asked after each pass that is not the last. One process that
            says so stops all.

    Returns:
        The scores; None if it was stopped.
    """
    processes = step.processes
    processes.share_buffers(step.model)
    passes = EvaluationPasses(
        examples,
        step.task.collate,
        rows_per_pass=rows_per_pass,
        rank=processes.rank,
        processes=processes.count,
    )
    loader: Any = DataLoader(
        passes,  # type: ignore[arg-type]
        batch_size=None,
        pin_memory=step.device.type == "cuda",
        generator=torch.Generator(),  # otherwise it draws from the caller's random numbers
    )
    outputs: list[dict[str, torch.Tensor]] = []
    for batch in loader:
        outputs.append(step.evaluate(batch))
        on_pass(len(outputs), len(passes))
        if len(outputs) < passes.fewest and processes.any(stop()):
            return None
    everything = [out for part in processes.gather(outputs) for out in part]
    return step.task.measure({name: _join(name, everything) for name in everything[0]})


def _join(name: str, passes: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """One output of all rows."""
    shapes = {tuple(outputs[name].shape[1:]) if name in outputs else None for outputs in passes}
    if len(shapes) > 1:
        found = sorted("none" if shape is None else str(["rows", *shape]) for shape in shapes)
        raise ModelError(
            f"the output {name!r} of the task has another shape in another pass",
            why=f"it has {' and '.join(found[:3]).replace(chr(39), '')}, and all rows are measured together",
            do="let `outputs` pad it to one width, or reduce it to one number for each row",
        )
    return torch.cat([outputs[name] for outputs in passes])
