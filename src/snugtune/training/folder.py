"""The folder of a run: new, unfinished, finished, or somebody else's."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from snugtune.config import RunConfig, differences, flatten
from snugtune.errors import RunFolderError, UsageError
from snugtune.record import Record, read_record
from snugtune.runfile import load_config
from snugtune.training.positions import facts_of, list_checkpoints, run_of
from snugtune.units import MiB

WRITING = ".writing"
"""How names of what is being written begin; a run that starts removes them."""
LOCK = ".lock"
HOLDER = "running.json"
_SAME = {
    "parameters": "parameters of the model",
    "label_kind": "labels",
    "label_names": "as labels",
    "total_updates": "updates in all",
}
_FIRST = {"log.txt", "record.jsonl", LOCK, HOLDER, "tensorboard", "wandb"}


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and what is in it.

    Args:
        path: The folder.
        state: What it holds.
        record: What its record says.
        run_id: Name of the run, the same after every resume.
        data_digests: SHA-256 of each data file by setting; what is not one local file is left out.
        anyway: Whether it shall continue although settings or data have changed.
        changes: Which ones, in words.
    """

    path: Path
    state: Literal["new", "unfinished", "finished"]
    record: Record
    run_id: str
    data_digests: dict[str, str]
    anyway: bool = False
    changes: tuple[str, ...] = ()

    @property
    def record_path(self) -> Path:
        """The record, JSON lines."""
        return self.path / "record.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Where the finished model lies."""
        return self.path / "model"

    @property
    def log(self) -> Path:
        """The log file."""
        return self.path / "log.txt"


def open_folder(
    config: RunConfig, data_digests: dict[str, str] | None = None, *, anyway: bool = False
) -> RunFolder:
    """Find out what the output folder holds; make it if the run is new.

    A run that never came to its first checkpoint has nothing to lose: it starts again, also with other
    settings.

    Args:
        config: The run's configuration.
        data_digests: SHA-256 of the data by setting; None makes them from the files that are named.
        anyway: Continue, or go beyond its end, although settings or data have changed.

    Raises:
        RunFolderError: It belongs to another run or to something else, or cannot be written.
    """
    path = config.folder
    try:
        names = {entry.name for entry in path.iterdir()} if path.exists() else set()
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"cannot use {path} as the run's folder",
            why=str(error.strerror or error),
            do="give another folder with --output",
        ) from error
    _check_ours(path, names)
    digests = _digests(config) if data_digests is None else data_digests
    new = RunFolder(path, "new", Record(), uuid4().hex, digests, anyway)
    if "config.yaml" not in names:
        return new
    record = read_record(path / "record.jsonl")
    finished = record.end is not None and record.end.get("status") == "finished"
    found = list_checkpoints(new.checkpoints)
    if not finished and not found:
        _check_nothing_lost(path, names)
        return new
    changes = _changes(config, path)
    changes += _changed_data(digests, _digests_before(record, found), strict=data_digests is not None)
    if changes and not (anyway and found):
        raise _refused(path, changes, finished=finished, found=bool(found))
    state: Literal["unfinished", "finished"] = "finished" if finished and not changes else "unfinished"
    return RunFolder(
        path, state, record, _run_id(record, found) or new.run_id, digests, anyway, tuple(changes)
    )


def is_ours(path: Path) -> bool:
    """Whether a folder is a run, or may become one: it is not there, or holds what a run makes first."""
    try:
        return not path.exists() or _ours({entry.name for entry in path.iterdir()})
    except OSError:
        return False


def clear_leftovers(folder: RunFolder) -> None:
    """Remove what a run that was killed while it wrote has left half."""
    for place in (folder.path, folder.checkpoints):
        for path in place.glob(f"{WRITING}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def write_aside(path: Path, text: str) -> None:
    """Write a file so that it is never half: a run that is killed meanwhile leaves the one of before.

    Raises:
        RunFolderError: It cannot be written.
    """
    aside = path.with_name(f"{WRITING}-{path.name}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}",
            why=str(error.strerror or error),
            do="make room, or mend the permissions; the same command then continues",
        ) from error


def _ours(names: set[str]) -> bool:
    """Names in a folder -> whether it is a run. What is made before config.yaml may be there alone."""
    return "config.yaml" in names or all(name in _FIRST or name.startswith(WRITING) for name in names)


def _check_ours(path: Path, names: set[str]) -> None:
    if not _ours(names):
        raise RunFolderError(
            f"{path} is not a run of snugtune",
            why=f"it has no config.yaml, but holds {', '.join(sorted(names - {LOCK})[:3])}",
            do="give an empty or new folder with --output",
        )


def _digests(config: RunConfig) -> dict[str, str]:
    files = {"data.train": config.data.train, "data.validation": config.data.validation}
    digests = {}
    for name, source in files.items():
        if source is not None and Path(source).is_file():
            digest = hashlib.sha256()
            with Path(source).open("rb") as file:
                while block := file.read(MiB):
                    digest.update(block)
            digests[name] = digest.hexdigest()
    return digests


def check_same_run(folder: RunFolder, **facts: Any) -> None:
    """Refuse to continue a run with another model or other data, where nothing else tells them apart.

    Args:
        folder: The run's folder.
        facts: Now: parameters, label_names, total_updates. What the run does not know is not compared.

    Raises:
        RunFolderError: The run had others.
    """
    before = (folder.record.starts or [{}])[-1]
    before = {**before.get("data", {}), **before}
    for name, what in _SAME.items():
        if name in facts and before.get(name) not in (None, facts[name]):
            raise RunFolderError(
                f"{folder.path} holds another run",
                why=f"it has {_show(before[name])} {what}, this one {_show(facts[name])}",
                do=f"give another folder, such as --output {folder.path}-2; the run stays as it is",
            )


def _show(value: object) -> str:
    return (
        f"{value:,}"
        if isinstance(value, int)
        else ", ".join(value)
        if isinstance(value, list)
        else str(value)
    )


def _check_nothing_lost(path: Path, names: set[str]) -> None:
    if "model" in names:
        raise RunFolderError(
            f"{path} holds a model, but not the record of its run",
            why="record.jsonl does not say that the run has finished, and there is no checkpoint: a run that "
            "starts here would replace the model",
            do=f"put record.jsonl back, or give another folder, such as --output {path}-2",
        )


def _run_id(record: Record, found: list[Path]) -> str | None:
    """The run that a folder holds: the last one that the record tells of, if any checkpoint is of it."""
    told = [line["run_id"] for line in record.starts if "run_id" in line]
    known = [run for run in map(run_of, reversed(found)) if run is not None]
    # On a full disk the line of a start may be missing, and then the last one is of a run that left nothing.
    if told and (told[-1] in known or not any(known)):
        return str(told[-1])
    return next(filter(None, known), None)


def _digests_before(record: Record, found: list[Path]) -> dict[str, str]:
    if record.starts:
        return dict(record.starts[-1].get("data_digests", {}))
    return dict(facts_of(found[-1]).get("data_digests", {})) if found else {}


def _changed_data(digests: dict[str, str], before: dict[str, str], *, strict: bool) -> list[str]:
    # A file that is gone since changes nothing; data that were given in another way do.
    names = before.keys() | digests.keys() if strict else before.keys() & digests.keys()
    return [f"the contents of {name}" for name in sorted(names) if digests.get(name) != before.get(name)]


def _changes(config: RunConfig, path: Path) -> list[str]:
    """The settings that differ from those in the folder, with both values."""
    try:
        there = load_config(path / "config.yaml")
    except UsageError as error:
        raise RunFolderError(
            f"cannot read {path / 'config.yaml'}",
            why=f"{error.what}: {error.why}",
            do="give another folder with --output",
        ) from error
    return show_changes(there, config)


def show_changes(before: RunConfig, now: RunConfig) -> list[str]:
    """The settings by which a run learns something else than another: 'training.epochs 2 -> 3'."""
    old, new = dict(flatten(before.model_dump())), dict(flatten(now.model_dump()))
    return [f"{name} {old[name]} -> {new[name]}" for name in differences(before, now)]


def _refused(path: Path, changes: list[str], *, finished: bool, found: bool) -> RunFolderError:
    on = "train its model further" if finished else "continue from its last checkpoint"
    return RunFolderError(
        f"{path} holds another run",
        why=f"these differ: {', '.join(changes[:5])}{' ...' if len(changes) > 5 else ''}",
        do=f"for a new run give another folder, such as --output {path}-2; "
        + (
            f"to {on} with what differs, add --continue-anyway"
            if found
            else f"to begin with its model, add --model {path / 'model'} too"
        ),
    )
