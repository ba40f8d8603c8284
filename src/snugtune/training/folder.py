"""The folder of a run: new, unfinished, finished, or somebody else's."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import uuid4

from snugtune.config import RunConfig, differences
from snugtune.errors import RunFolderError, UsageError
from snugtune.record import Record, read_record
from snugtune.runfile import load_config
from snugtune.training.positions import list_checkpoints, run_of
from snugtune.units import MiB

WRITING = ".writing"
"""How names of what is being written begin; a run that starts removes them."""
LOCK = ".lock"
HOLDER = "running.json"
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
    """

    path: Path
    state: Literal["new", "unfinished", "finished"]
    record: Record
    run_id: str
    data_digests: dict[str, str]

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


def open_folder(config: RunConfig, data_digests: dict[str, str] | None = None) -> RunFolder:
    """Find out what the output folder holds; make it if the run is new.

    A run that never came to its first checkpoint has nothing to lose: it starts again, also with other
    settings.

    Args:
        config: The run's configuration.
        data_digests: SHA-256 of the data by setting; None makes them from the files that are named.

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
    new = RunFolder(path, "new", Record(), uuid4().hex, digests)
    if "config.yaml" not in names:
        return new
    record = read_record(path / "record.jsonl")
    finished = record.end is not None and record.end.get("status") == "finished"
    found = list_checkpoints(new.checkpoints)
    if not finished and not found:
        return new
    _check_same(config, path)
    _check_data(digests, record, path, strict=data_digests is not None)
    told = [line["run_id"] for line in record.starts if "run_id" in line]
    run_id = told[-1] if told else next(filter(None, map(run_of, reversed(found))), new.run_id)
    return RunFolder(path, "finished" if finished else "unfinished", record, run_id, digests)


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


def check_same_run(folder: RunFolder, *, parameters: int, updates: int) -> None:
    """Refuse to continue a run with another model or other data, where nothing else tells them apart.

    Args:
        folder: The run's folder.
        parameters: Parameters of the model now.
        updates: Updates of the whole run now.

    Raises:
        RunFolderError: The run had others.
    """
    before = folder.record.start or {}
    for name, what, now in (
        ("parameters", "parameters of the model", parameters),
        ("total_updates", "updates in all", updates),
    ):
        if before.get(name, now) != now:
            raise RunFolderError(
                f"{folder.path} holds another run",
                why=f"it has {before[name]:,} {what}, this one {now:,}",
                do=f"give another folder, such as --output {folder.path}-2; the run stays as it is",
            )


def _check_data(digests: dict[str, str], record: Record, path: Path, *, strict: bool) -> None:
    before = (record.start or {}).get("data_digests", {})
    # A file that is gone since changes nothing; data that were given in another way do.
    names = before.keys() | digests.keys() if strict else before.keys() & digests.keys()
    changed = sorted(name for name in names if digests.get(name) != before.get(name))
    if changed:
        raise RunFolderError(
            f"{path} holds a run on other data",
            why=f"the data of {changed[0]} have changed since",
            do=f"give another folder, such as --output {path}-2; the run in {path} stays as it is",
        )


def _check_same(config: RunConfig, path: Path) -> None:
    try:
        there = load_config(path / "config.yaml")
    except UsageError as error:
        raise RunFolderError(
            f"cannot read {path / 'config.yaml'}",
            why=f"{error.what}: {error.why}",
            do="give another folder with --output",
        ) from error
    names = differences(there, config)
    if names:
        raise RunFolderError(
            f"{path} holds another run",
            why=f"it differs in {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}",
            do=f"give another folder, such as --output {path}-2; the run in {path} stays as it is",
        )
