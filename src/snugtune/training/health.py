"""Whether a run learns at all: updates that are skipped, and parameters that no gradient reaches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from snugtune.config import RunConfig
from snugtune.data.batching import Updates
from snugtune.errors import ModelError
from snugtune.step import Step, Updated
from snugtune.tasks import Prepared
from snugtune.training.locating import Located, locate
from snugtune.training.reports import Reports
from snugtune.units import show_count

_IN_A_ROW = 10  # skipped updates after which a run stops
_SMALLEST_SCALE = 1.0  # a gradient that overflows fp16 with this loss scale does so with every useful one
_LOCATED = 3  # skipped updates of a run that are looked into; each costs about two updates
_FIRST_UPDATES = 10  # after which every parameter must have had a gradient
_SHOWN = 8


class Health:
    """Looks at each update that has ended; it reads nothing from the device that was not read before.

    Args:
        config: The run's configuration.
        prepared: The task with its data.
        step: The step.
        updates: The updates of the run.
        reports: What is told.
        first: Number of the first update of this part of the run, from 0.
    """

    def __init__(
        self,
        config: RunConfig,
        prepared: Prepared,
        step: Step,
        updates: Updates,
        reports: Reports,
        *,
        first: int,
    ) -> None:
        self.step, self.updates, self.reports = step, updates, reports
        self.processes, self.places = step.processes, prepared.places
        unused = config.training.unused_parameters
        # The loss of the other tasks is ours: it uses of a model whatever it can.
        self.allows_unused = unused == "allow" or (unused == "auto" and config.task != "own")
        self.causes: Counter[str] = Counter()
        """Skipped updates of this part of the run, by cause."""
        self._in_a_row = 0
        self._looks = 0
        self._last: Located | None = None
        self._first = first
        self._look_at = min(first + _FIRST_UPDATES, -(-(first + 1) // updates.per_epoch) * updates.per_epoch)

    def look(self, did: Updated, number: int, *, saved: int | None) -> None:
        """Look at an update.

        Args:
            did: What it did.
            number: Its number, from 1.
            saved: Update of the newest checkpoint; None before the first.

        Raises:
            ModelError: Going on makes no sense.
        """
        if number == self._look_at and not did.denominator:
            self._look_at += 1  # nothing that could have had a gradient
        elif number == self._look_at:
            self._check_parameters(number - self._first)
        if did.applied:
            self._in_a_row, self._last = 0, None
            return
        self._in_a_row += 1
        overflow = did.loss_scale is not None and math.isfinite(did.loss)
        found = self._explain(did, number, overflow=overflow)
        self._last = found or self._last
        hopeless = found is not None and found.kind == "weights"
        fallen = overflow and (did.loss_scale or math.inf) <= _SMALLEST_SCALE
        if hopeless or fallen or (not overflow and self._in_a_row >= _IN_A_ROW):
            raise self._stopped(did, number, saved)

    def finish(self, *, applied: int, updates: int) -> None:
        """Look at the whole run.

        Args:
            applied: Updates that changed the parameters.
            updates: Updates in all.

        Raises:
            ModelError: None did.
        """
        if updates and not applied:
            raise ModelError(
                f"none of {show_count(updates, 'update')} changed the model",
                why=self._last.why if self._last else "the gradient of none of them was finite",
                do=self._last.do
                if self._last
                else "more updates are needed than the loss scale takes to fall: "
                "take more epochs, a smaller batch_size, or --precision fp32",
            )
        for cause, count in self.causes.items():
            self.reports.journal.say(f"{show_count(count, 'update')} skipped: {cause} (log.txt)")

    def _explain(self, did: Updated, number: int, *, overflow: bool) -> Located | None:
        """Tell why an update was skipped, as far as it is looked into."""
        found = None
        if not did.denominator:
            rows = self.updates.rows_of(number - 1)
            names = "; ".join(self.places(rows[:5].tolist())) + (" ..." if len(rows) > 5 else "")
            why, do = f"no label of its rows counts ({names})", None
            self.causes["no label of their rows counts"] += 1
            found = Located("labels", why, "look at the labels of these rows")
        elif overflow:
            why, do = f"its gradient left the range of fp16 at a loss scale of {did.loss_scale:g}", None
            self.causes["the loss scale was too large for fp16"] += 1
            if did.loss_scale is not None and did.loss_scale <= _SMALLEST_SCALE:
                found = self._locate(did, number)
        else:
            why, do = f"its gradient is not finite (loss {did.loss:g}, loss scale {did.loss_scale})", None
            self.causes["gradients that were not finite"] += 1
            if self._looks < _LOCATED:
                self._looks += 1
                found = self._locate(did, number)
                why, do = (why, None) if found is None else (found.why, found.do)
        self.reports.skipped(number, why=why, do=do)
        return found

    def _locate(self, did: Updated, number: int) -> Located | None:
        """The first thing in the update that is not finite, in whichever process; None if it is not found."""
        found: Located | None
        try:
            passes, rows = self.updates[number - 1], self.updates.passes_of(number - 1)
            found = locate(
                self.step,
                passes,
                [part.tolist() for part in rows],
                number=number - 1,
                loss_scale=did.loss_scale,
                places=self.places,
            )
        except Exception as error:  # whatever somebody's model does when it is looked at must not end the run
            self.reports.journal.log(f"could not look into update {number}: {type(error).__name__}: {error}")
            found = None
        return next((each for each in self.processes.gather(found) if each is not None), None)

    def _stopped(self, did: Updated, number: int, saved: int | None) -> ModelError:
        last = self._last
        scale = "" if did.loss_scale is None else f"; the loss scale has fallen to {did.loss_scale:g}"
        why = last.why if last else f"their gradients are not finite (loss {did.loss:g})"
        do = last.do if last else "lower the learning rate"
        where = "nothing was saved before"
        if saved is not None:
            where = f"the checkpoint of update {saved} is whole, and the same command continues from it"
        skipped = show_count(self._in_a_row, "update")
        return ModelError(
            f"stopped at update {number}: {skipped} in a row changed nothing{scale}",
            why=why,
            do=f"{do}; {where}",
        )

    def _check_parameters(self, updates: int) -> None:
        """Tell of parameters that do not learn, after the first updates."""
        if strangers := self.step.strangers():
            raise ModelError(
                f"parameters of the model are unknown to the optimizer: {_some(strangers)}",
                why="they were made after the model was built, in its forward pass, and would never learn",
                do="make all layers in __init__, so that build_model returns the whole model",
            )
        if not (names := list(self.step.without_gradient)):
            return
        what = (
            f"{show_count(len(names), 'parameter')} got no gradient in the first "
            f"{show_count(updates, 'update')}: {_some(_modules(names))}"
        )
        if self.allows_unused:
            do = "nothing, if that is meant; they stay as they were, and cost memory and time"
            self.reports.trouble(what, why="the loss does not depend on them", do=do)
            return
        raise ModelError(
            what,
            why="the loss does not depend on them: a layer that forward leaves out, an answer that is not "
            "used, detach() or no_grad() on the way, or reentrant checkpointing behind frozen layers; they "
            "would stay as they began",
            do="let the loss use them, or freeze them with requires_grad_(False) in build_model; where only "
            "some rows reach them, or all is meant so: training.unused_parameters=allow",
        )


def _modules(names: Iterable[str]) -> list[str]:
    """The modules of some parameters, each once: 'pooler.dense.weight' -> 'pooler.dense'."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
