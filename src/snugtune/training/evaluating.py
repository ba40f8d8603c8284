"""An evaluation in the middle of a run, and what follows from it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from snugtune.data.batching import Plan
from snugtune.inference import measure
from snugtune.step import Step
from snugtune.tasks import Prepared, is_better
from snugtune.training.assembly import evaluation_rows
from snugtune.training.positions import Position
from snugtune.training.reports import Reports


def evaluate(
    step: Step,
    prepared: Prepared,
    plan: Plan,
    reports: Reports,
    position: Position,
    *,
    stop: Callable[[], bool],
) -> Position:
    """Measure, tell, and see whether it is the best so far.

    Args:
        step: The step.
        prepared: The task with its data.
        plan: How the data is cut; rows that fit while training fit here.
        reports: What is told.
        position: Where the run is.
        stop: Whether someone wants the run to stop; an evaluation may take long, so it does not wait for its
            end.

    Returns:
        The position with the best so far; or one that is `unmeasured`, if it was stopped.
    """
    began = time.monotonic()
    rows = evaluation_rows(plan, prepared.validation)
    on_pass = reports.evaluation_pass
    metrics = measure(step, prepared.validation, rows_per_pass=rows, on_pass=on_pass, stop=stop)
    if metrics is None:
        return dataclasses.replace(position, unmeasured=True)
    value = metrics[step.task.metric]
    # A model whose answers are not numbers has a loss that is none, whatever its accuracy.
    sound = math.isfinite(metrics.get("loss", 0.0))
    best = sound and is_better(value, than=position.best_value, smaller=step.task.smaller_is_better)
    if best:
        changed = {"best_update": position.update, "best_value": value, "stale": 0}
    else:
        changed = {"stale": position.stale + 1}
    position = dataclasses.replace(position, unmeasured=False, **changed)
    seconds = time.monotonic() - began
    reports.evaluation(metrics, position, rows=len(prepared.validation), seconds=seconds, best=best)
    return position
