"""Checkpoints: what an interrupted run continues from. Safetensors and JSON, written aside and renamed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from snugtune.errors import RunFolderError
from snugtune.step import Step
from snugtune.training.positions import Position, checkpoint_path, list_checkpoints

VERSION = 1


def save_checkpoint(folder: Path, step: Step, position: Position) -> Path:
    """Write the state of a step; the checkpoint appears only when it is complete.

    Raises:
        RunFolderError: The disk is full, or the folder cannot be written. Earlier checkpoints stay.
    """
    final = checkpoint_path(folder, position.update)
    aside = folder / ".writing"
    optimizer_tensors, optimizer_rest = _split(step.optimizer.state_dict()["state"])
    state = {
        "version": VERSION,
        "position": dataclasses.asdict(position),
        "optimizer": {"name": step.choices.optimizer, "state": optimizer_rest},
        "scaler": step.scaler.state_dict(),
    }
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for name, tensors in (("model", model_tensors(step.model)), ("optimizer", optimizer_tensors)):
            whole = {key: _whole(tensor) for key, tensor in tensors.items()}
            save_file(whole, aside / f"{name}.safetensors", metadata={"format": "pt"})
        (aside / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        for path in aside.iterdir():
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunFolderError(
            f"cannot write the checkpoint {final}",
            why=str(error),
            do="make room or give another --output; earlier checkpoints are whole",
        ) from error
    return final


def load_checkpoint(path: Path, step: Step) -> Position:
    """Put a step into the state of a checkpoint.

    Raises:
        RunFolderError: The checkpoint is damaged, or belongs to another model or optimizer.
    """
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        _check(state, step)
        optimizer_tensors = load_file(path / "optimizer.safetensors")
        load_weights(path, step)
        whole = step.optimizer.state_dict()
        whole["state"] = _join(optimizer_tensors, state["optimizer"]["state"])
        step.optimizer.load_state_dict(whole)
        if state["scaler"]:  # empty if the run began in another precision, on another device
            step.scaler.load_state_dict(state["scaler"])
        return Position(**state["position"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise RunFolderError(
            f"cannot continue from the checkpoint {path}",
            why=" ".join(str(error).split()),
            do=f"delete {path}, and the same command continues from the one before",
        ) from error


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


def remove_old(folder: Path, *, keep_last: int, best_update: int | None) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best one."""
    paths = list_checkpoints(folder)
    keep = {*paths[-keep_last:]}
    if best_update is not None:
        keep.add(checkpoint_path(folder, best_update))
    for path in paths:
        if path not in keep:
            shutil.rmtree(path, ignore_errors=True)


def model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by name, each once: tied weights under their first."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *buffers.items()]}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a memory of its own: safetensors takes no views."""
    owns = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if owns else tensor.clone(memory_format=torch.contiguous_format)


def _check(state: dict[str, Any], step: Step) -> None:
    if state["version"] != VERSION:
        raise ValueError(f"it has version {state['version']}, this snugtune reads version {VERSION}")
    if state["optimizer"]["name"] != step.choices.optimizer:
        raise ValueError(
            f"its optimizer is {state['optimizer']['name']}, the run's is {step.choices.optimizer}"
        )


def _split(state: dict[int, dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Tensors under "parameter.name", everything else as JSON."""
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, values in state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{parameter}.{name}"] = value.detach()
            else:
                rest.setdefault(str(parameter), {})[name] = value
    return tensors, rest


def _join(tensors: dict[str, torch.Tensor], rest: dict[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {int(parameter): dict(values) for parameter, values in rest.items()}
    for name, tensor in tensors.items():
        parameter, _, key = name.partition(".")
        state.setdefault(int(parameter), {})[key] = tensor
    return state


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
