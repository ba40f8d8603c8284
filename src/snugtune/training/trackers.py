"""The numbers of a run for TensorBoard, Weights & Biases or MLflow, through the trackers of Accelerate."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate import tracking

from snugtune.config import RunConfig, flatten
from snugtune.errors import MissingDependency, UsageError
from snugtune.record import RecordWriter
from snugtune.training.folder import RunFolder
from snugtune.training.positions import list_checkpoints
from snugtune.units import GiB

_PROJECT = "snugtune"
_RUN_ID = "snugtune.run_id"
# A tracker that fails may take long to do so; waiting for it takes about a hundredth of a run at most.
_PAUSE_PER_LOST_SECOND = 100

_log = logging.getLogger(__name__)


class Trackers:
    """Where the numbers of a run go: to one tracker, or nowhere.

    A tracker that fails does not end the run: that is said once, and tried again after a while.

    Args:
        name: Its name, for messages.
        tracker: A tracker of Accelerate that has started; None keeps nothing.
    """

    def __init__(self, name: str = "", tracker: Any = None) -> None:
        self._name, self._tracker = name, tracker
        self._warned = False
        self._try_at = 0.0

    def log(self, values: Mapping[str, float], *, update: int) -> None:
        """Hand on numbers.

        Args:
            values: Name -> number; slashes in a name make groups.
            update: Updates done.
        """
        began = time.monotonic()
        if self._tracker is None or not values or began < self._try_at:
            return
        try:
            self._tracker.log(dict(values), step=update)
        except Exception as error:  # whatever a server, a disk or somebody's package raises
            self._failed(error, began)

    def close(self) -> None:
        """Hand on what still waits."""
        began = time.monotonic()
        if self._tracker is not None:
            try:
                self._tracker.finish()
            except Exception as error:
                self._failed(error, began)
            self._tracker = None

    def _failed(self, error: Exception, began: float) -> None:
        now = time.monotonic()
        self._try_at = now + _PAUSE_PER_LOST_SECOND * (now - began)
        if not self._warned:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            _log.warning("%s takes no numbers, and the run goes on without it (%s)", self._name, why)
        self._warned = True


class TrackedRecord(RecordWriter):
    """A record whose numbers go to trackers as well.

    Args:
        path: The file of the record.
        trackers: Where the numbers go.

    Raises:
        RunFolderError: The file cannot be opened for writing.
    """

    def __init__(self, path: Path, trackers: Trackers) -> None:
        super().__init__(path, patient=True)
        self._trackers = trackers

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one line; see `RecordWriter.write`."""
        super().write(kind, **fields)
        self._trackers.log(numbers_of(kind, fields), update=fields.get("update", 0))


def numbers_of(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """What trackers are told of a line of the record; nothing for lines other than updates and evaluations.

    Args:
        kind: The kind of the line.
        fields: Its fields.
    """
    if kind == "evaluation":
        return _numbers(fields["metrics"], "evaluation/")
    if kind != "update":
        return {}
    learning = {name: fields[name] for name in ("loss", "learning_rate", "grad_norm", "padding")}
    if fields["seconds"] > 0:
        learning["samples_per_second"] = fields["samples"] / fields["seconds"]
    sizes = {name: fields.get(f"{name}_bytes") for name in ("allocated", "reserved", "process")}
    memory = {f"{name}_gib": size / GiB for name, size in sizes.items() if size is not None}
    return {**_numbers(learning, "training/"), **_numbers(memory, "memory/")}


def _numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        prefix + name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


@contextmanager
def open_trackers(config: RunConfig, folder: RunFolder, *, is_main: bool = True) -> Iterator[Trackers]:
    """Start the tracker that `training.report_to` names. A run that continues goes on in the same place.

    Args:
        config: The run's configuration; the tracker keeps it with the numbers.
        folder: The run's folder.
        is_main: Whether this process speaks for the run; the others report nothing.

    Raises:
        MissingDependency: The tracker's package is not installed.
        UsageError: The tracker cannot be started.
    """
    name = config.training.report_to
    if name is None or not is_main:
        yield Trackers()
        return
    _need(name)
    try:
        tracker = _start(name, folder)
    except Exception as error:
        raise UsageError(
            f"training.report_to: {name} could not be started",
            why=" ".join(f"{type(error).__name__}: {error}".split())[:500],
            do=f"try {name} by itself first (login, address of its server), or leave training.report_to out",
        ) from error
    trackers = Trackers(name, tracker)
    try:
        if (
            folder.state == "new"
        ):  # later settings, such as passes, may differ, and not all trackers take that
            _keep_settings(tracker, config, name)
        yield trackers
    finally:
        trackers.close()


def _need(name: str) -> None:
    try:
        import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f"training.report_to: {name} needs the package {name!r}, which did not import",
            why=str(error),
            do=f"pip install {name}, or leave training.report_to out",
        ) from error


def _start(name: str, folder: RunFolder) -> Any:
    known = {"name": folder.path.name, "id": folder.run_id}
    tracker: Any
    if name == "tensorboard":
        done = list_checkpoints(folder.checkpoints)
        last = int(done[-1].name.removeprefix("update-")) if done else 0
        # What was shown of updates after the last checkpoint is void: they come again.
        tracker = tracking.TensorBoardTracker("tensorboard", str(folder.path), purge_step=last + 1)
    elif name == "wandb":
        place = {"dir": str(folder.path), "resume": "allow", "settings": {"console": "off"}}
        tracker = tracking.WandBTracker(os.environ.get("WANDB_PROJECT", _PROJECT), **known, **place)
    else:
        tags = {_RUN_ID: folder.run_id}
        tracker = tracking.MLflowTracker(
            _PROJECT, run_name=folder.path.name, run_id=_mlflow_run(folder.run_id), tags=tags
        )
    if hasattr(tracker, "start"):  # in older versions it started when it was made
        tracker.start()
    return tracker


def _mlflow_run(run_id: str) -> str | None:
    """MLflow's own name of the run, if it knows it already."""
    import mlflow

    found = mlflow.search_runs(
        experiment_names=[os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)],
        filter_string=f"tags.`{_RUN_ID}` = '{run_id}'",
        output_format="list",
    )
    return str(found[0].info.run_id) if found else None


def _keep_settings(tracker: Any, config: RunConfig, name: str) -> None:
    """Trackers take numbers, texts, and yes or no; everything else is written as in a JSON file."""
    values = dict(flatten(config.model_dump(mode="json")))
    plain = (bool, int, float, str)
    try:
        tracker.store_init_configuration(
            {key: value if isinstance(value, plain) else json.dumps(value) for key, value in values.items()}
        )
    except Exception as error:
        _log.warning("%s did not keep the settings of the run: %s: %s", name, type(error).__name__, error)
