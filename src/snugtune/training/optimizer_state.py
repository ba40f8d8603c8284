"""The state of an optimizer as tensors and JSON, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from snugtune.step import Step

_AS_LARGE = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # states with the shape of their parameter


def misfit(
    saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], step: Step, *, applied: int
) -> str | None:
    """Why a state would begin anew for some parameters, or for all of them; None where it fits.

    Args:
        saved: What the checkpoint says about its optimizer.
        tensors: What it has of its state.
        step: The step that is to go on with it.
        applied: Updates that it has made.
    """
    if saved["name"] != step.choices.optimizer:
        return f"its optimizer is {saved['name']}, the run's is {step.choices.optimizer}"
    names, shapes = parameter_names(step), dict(step.model.named_parameters())
    if (of_old := saved.get("parameters", names)) != names:  # none before version 4
        odd = sorted(set(of_old) ^ set(names)) or ["the order"]
        return f"other parameters learn than then ({odd[0]})"
    if "tensors" not in saved and applied and not tensors:  # version 1
        return "it has no state of the optimizer"
    for key in saved.get("tensors", tensors):
        number, _, what = key.partition(".")
        if int(number) >= len(names):
            return "its optimizer has more parameters than this run's"
        name = names[int(number)]
        if key not in tensors:
            return f"the state of its optimizer lacks {what} of {name}"
        if what in _AS_LARGE and tensors[key].shape != shapes[name].shape:
            return f"the state of its optimizer is of another size for {name}"
    return None


def parameter_names(step: Step) -> list[str]:
    """Names of the parameters, in the order in which the optimizer numbers them."""
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    return [names[id(each)] for group in step.optimizer.param_groups for each in group["params"]]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a memory of its own: safetensors takes no views."""
    owns = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if owns else tensor.clone(memory_format=torch.contiguous_format)


def own_memory(optimizer: torch.optim.Optimizer) -> None:
    """Copy what still lies in the file: on a network disk, a file that is gone would take the run along."""
    for values in optimizer.state.values():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                values[name] = value.clone()


def split_state(
    state: dict[int, dict[str, Any]],
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
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


def join_state(
    tensors: dict[str, torch.Tensor], rest: dict[str, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """What `split_state` has taken apart."""
    state: dict[int, dict[str, Any]] = {int(parameter): dict(values) for parameter, values in rest.items()}
    for name, tensor in tensors.items():
        parameter, _, key = name.partition(".")
        state.setdefault(int(parameter), {})[key] = tensor
    return state
