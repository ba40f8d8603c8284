"""The model of a finished run, ready to answer: on the card where there is one, otherwise on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from snugtune.inference.predictor import Predictor
from snugtune.inference.progress import open_bar
from snugtune.inference.runs import FinishedRun
from snugtune.inference.tables import Predictions
from snugtune.planning.defaults import choose_precision
from snugtune.processes import ALONE
from snugtune.tasks.pretrained import load_config, quiet_transformers
from snugtune.training.console import console
from snugtune.training.device import describe, open_device, why_no_card
from snugtune.training.self_test import checked_precision
from snugtune.units import show_count

Say = Callable[[str], None]


@contextmanager
def open_predictor(
    run: FinishedRun, *, rows: int, quiet: bool
) -> Iterator[tuple[Predictor, Callable[[int], None], Say]]:
    """Load the model of a run, and show how far it is until the block ends.

    Args:
        run: The run; the precision is what its configuration says.
        rows: Rows that it will read; 0 shows no progress.
        quiet: Say nothing.

    Yields:
        The model; what takes the number of rows done; what takes a message for people. Messages and the bar
        go to the standard error, because answers may go to the standard output.

    Raises:
        ModelError: The model cannot be loaded.
        HardwareError: The card cannot do it.
    """
    out = console(sys.stderr)
    out.quiet = quiet
    card = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with open_device(card, budget_bytes=None) as device, quiet_transformers():
        asked = run.config.training.precision
        precision = choose_precision(
            asked,
            device_name=device.name,
            capability=device.capability,
            family=load_config(run.config.model).model_type,
            no_card_because=why_no_card() if asked == "fp16" and not device.is_cuda else None,
        )
        precision = checked_precision(precision, device, ALONE)
        if precision.value != asked != "auto":
            out.print(f"precision {precision.value}: {precision.because}")
        if rows:
            out.print(f"run       {run.path} on {describe(device, None)}, {precision.value}")
        predictor = Predictor(
            run,
            device=device.torch,
            precision=precision.value,  # type: ignore[arg-type]
            say=out.print,
        )
        with open_bar(rows, out, show=rows > 0 and not quiet and out.is_terminal) as on_rows:
            yield predictor, on_rows, out.print


def say_notes(notes: Sequence[str], say: Say) -> None:
    """Say what was repaired and left out of the data.

    Args:
        notes: Sentences.
        say: Takes a message for people.
    """
    for note in notes:
        say(f"data      {note}")


def say_done(done: Predictions, run: FinishedRun, say: Say) -> None:
    """Say what is remarkable about the rows that were read, and where the answers are.

    Args:
        done: What became of the rows.
        run: The run whose model answered.
        say: Takes a message for people.
    """
    if done.cut_off:
        rows = show_count(done.cut_off, "row")
        say(f"texts     {rows} longer than {run.max_length} tokens: cut off there")
    if done.without_text:
        say(f"texts     {show_count(done.without_text, 'row')} without text: answered like the empty text")
    if done.output is not None:
        say(f"answers   {show_count(done.rows, 'row')} in {done.output}")
