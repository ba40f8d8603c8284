"""Checkpoints: what an interrupted run continues from. Safetensors and JSON, written aside and renamed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from snugtune.errors import ModelError, RunFolderError
from snugtune.step import Step
from snugtune.training.folder import WRITING
from snugtune.training.manifest import MANIFEST, check_files, write_manifest
from snugtune.training.optimizer_state import (
    join_state,
    misfit,
    own_memory,
    parameter_names,
    split_state,
    whole,
)
from snugtune.training.positions import Position, belongs, checkpoint_path, list_checkpoints, update_of

VERSION = 4
"""1 had no manifest and no run_id, 2 no facts and no place in the data; both are still read."""

_ANYWAY = "; --continue-anyway goes on with its weights where only the optimizer does not fit"
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError)


class BadCheckpoint(RunFolderError):
    """A checkpoint that is damaged or of another run: the one before may do."""


def save_checkpoint(
    folder: Path,
    step: Step,
    position: Position,
    *,
    run_id: str = "",
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write the state of a step; the checkpoint appears only when it is complete.

    Args:
        folder: Where the checkpoints lie.
        step: The step.
        position: How far the run is.
        run_id: The run it belongs to.
        facts: What else tells later whether the same run continues.

    Raises:
        RunFolderError: The disk is full, or the folder cannot be written. Earlier checkpoints stay.
    """
    final = checkpoint_path(folder, position.update)
    aside = folder / WRITING
    tensors, rest = split_state(step.optimizer.state_dict()["state"])
    state = {
        "version": VERSION,
        "run_id": run_id,
        "position": dataclasses.asdict(position),
        "optimizer": {
            "name": step.choices.optimizer,
            "parameters": parameter_names(step),
            "state": rest,
            "tensors": sorted(tensors),
        },
        "scaler": step.scaler.state_dict(),
        "facts": dict(facts or {}),
    }
    old = None
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for name, parts in (("model", model_tensors(step.model)), ("optimizer", tensors)):
            dense = {key: whole(tensor) for key, tensor in parts.items()}
            save_file(dense, aside / f"{name}.safetensors", metadata={"format": "pt"})
        (aside / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        write_manifest(aside)
        sync(aside)
        old = _make_way(final, run_id)
        aside.rename(final)
        _sync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        if old is not None and not final.exists():
            with suppress(OSError):
                old.rename(final)
        raise RunFolderError(
            f"cannot write the checkpoint {final}",
            why=str(error),
            do="make room or give another --output; earlier checkpoints are whole",
        ) from error
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_checkpoint(
    path: Path,
    step: Step,
    *,
    run_id: str | None = None,
    without_optimizer: Callable[[str], None] | None = None,
) -> Position:
    """Put a step into the state of a checkpoint, after a look at every byte of it.

    Args:
        path: The checkpoint.
        step: The step.
        run_id: The run it must belong to; None takes any.
        without_optimizer: Called with the reason where the state of the optimizer does not fit and begins
            anew; None refuses that.

    Raises:
        BadCheckpoint: It is damaged, or belongs to another run.
        RunFolderError: It is whole, but of another model, optimizer or version.
    """
    try:
        state = _read_state(path)
        _check_version(state)
        _check_whole(path, state, run_id)
        tensors = load_file(path / "optimizer.safetensors")
        load_file(path / "model.safetensors")
        optimizer = step.optimizer.state_dict()
        optimizer["state"] = join_state(tensors, state["optimizer"]["state"])
        position = Position(**state["position"])
    except _Mismatch as error:
        raise _cannot_continue(RunFolderError, path, error) from error
    except _DAMAGE as error:
        raise _cannot_continue(BadCheckpoint, path, error) from error
    try:
        why = misfit(state["optimizer"], tensors, step, applied=position.applied)
        if why is not None and without_optimizer is None:
            raise ValueError(why)
        load_weights(path, step)
        if why is not None and without_optimizer is not None:
            without_optimizer(why)
            return position
        step.optimizer.load_state_dict(optimizer)
        own_memory(step.optimizer)
        if state["scaler"]:  # empty if the run began in another precision, on another device
            step.scaler.load_state_dict(state["scaler"])
    except (*_DAMAGE, RuntimeError) as error:
        raise _cannot_continue(RunFolderError, path, error) from error
    return position


def load_weights(path: Path, step: Step) -> None:
    """Copy only the model's tensors from a checkpoint, through the CPU.

    Raises:
        OSError, SafetensorError: The file cannot be read.
        ValueError: It belongs to another model.
    """
    saved = load_file(path / "model.safetensors")
    tensors = model_tensors(step.model)
    if saved.keys() != tensors.keys():
        odd = sorted(saved.keys() ^ tensors.keys())[0]
        raise ValueError(f"it is of another model: {odd} is only in one of the two")
    for name, tensor in tensors.items():
        if saved[name].shape != tensor.shape:
            raise ValueError(f"it is of another model: {name} has another size")
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


def load_best(path: Path, step: Step) -> None:
    """Copy the model's tensors from a checkpoint that is verified before.

    Raises:
        BadCheckpoint: It is not there, or damaged.
    """
    try:
        _check_whole(path, _read_state(path), None)
        load_weights(path, step)
    except _DAMAGE as error:
        raise _cannot_continue(BadCheckpoint, path, error) from error


def remove_old(folder: Path, *, run_id: str, keep_last: int, best_update: int | None, update: int) -> None:
    """Delete the run's checkpoints but the newest `keep_last` and the best one; others are left alone.

    Args:
        folder: Where the checkpoints lie.
        run_id: The run.
        keep_last: How many stay.
        best_update: Update of the best one.
        update: The update the run is at. Checkpoints of later ones were damaged, so they are void.
    """
    own = [path for path in list_checkpoints(folder) if belongs(path, run_id)]
    keep = {*[path for path in own if update_of(path) <= update][-keep_last:]}
    if best_update is not None:
        keep.add(checkpoint_path(folder, best_update))
    for path in own:
        if path not in keep:
            with suppress(OSError):  # a folder that cannot be renamed cannot be emptied either
                shutil.rmtree(_put_aside(path), ignore_errors=True)


def check_savable(step: Step) -> None:
    """Find out before the first update whether the model is of a kind that can be saved at all.

    Raises:
        ModelError: It has tensors that safetensors does not know.
    """
    for name, tensor in model_tensors(step.model).items():
        try:
            save({name: torch.empty(0, dtype=tensor.dtype, layout=tensor.layout)})
        except (ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ModelError(
                f"{name} of the model cannot be saved",
                why=f"it is {tensor.dtype}, {tensor.layout}: {' '.join(str(error).split())}",
                do="make it a dense tensor, or a buffer with persistent=False",
            ) from error


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by name, each once: tied weights under their first."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *buffers.items()]}


def sync(folder: Path) -> None:
    """Wait until the files of a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


class _Mismatch(Exception):
    """A checkpoint that this run cannot use, though nothing is damaged."""


def _read_state(path: Path) -> dict[str, Any]:
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise ValueError("state.json does not hold a state")
    return state


def _check_version(state: dict[str, Any]) -> None:
    if state["version"] not in range(1, VERSION + 1):
        raise _Mismatch(f"it has version {state['version']}, this snugtune reads versions 1 to {VERSION}")


def _check_whole(path: Path, state: dict[str, Any], run_id: str | None) -> None:
    if state["version"] == 1 and not (path / MANIFEST).exists():
        return
    check_files(path)
    if run_id is not None and state["run_id"] != run_id:
        raise ValueError("it belongs to another run")


def _cannot_continue(kind: type[RunFolderError], path: Path, error: Exception) -> RunFolderError:
    why = str(error) if not isinstance(error, KeyError) else f"{error} is missing in state.json"
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        why = f"{Path(error.filename).name} is missing"
    return kind(
        f"cannot continue from the checkpoint {path}",
        why=" ".join(why.split()),
        do=f"delete {path}, and the same command continues from the one before{_ANYWAY}",
    )


def _put_aside(path: Path) -> Path:
    """Rename what is to be deleted: a process that is killed meanwhile leaves no half checkpoint."""
    aside = path.with_name(f"{WRITING}-old-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def _make_way(final: Path, run_id: str) -> Path | None:
    """Clear the place of a new checkpoint; what lies there was skipped, as damaged or another run's.

    Returns:
        What is to be deleted when the new one is there.
    """
    if belongs(final, run_id):
        return _put_aside(final)
    if final.exists():
        number = 1
        while (kept := final.with_name(f"{final.name}.kept-{number}")).exists():
            number += 1
        final.rename(kept)
    return None


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # where a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can do it for folders
            os.fsync(handle)
    finally:
        os.close(handle)
