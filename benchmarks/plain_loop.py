"""The training loop of the tables of measured steps: plain PyTorch, on a card or on fake tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def build_model(row: dict[str, Any], folder: Path) -> nn.Module:
    build = row["build"]
    if "factory" in build:
        file, _, name = build["factory"].partition(":")
        spec = importlib.util.spec_from_file_location(Path(file).stem, folder / file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)()
    import transformers

    config = transformers.AutoConfig.for_model(**build["config"])
    return getattr(transformers, build["auto"]).from_config(config)


class LoraLinear(nn.Module):
    """A linear layer with an adapter, as PEFT's `lora.Linear` without dropout computes it."""

    def __init__(self, base: nn.Module, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False, dtype=dtype, device=base.weight.device)
        self.b = nn.Linear(rank, base.out_features, bias=False, dtype=dtype, device=base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        dtype = result.dtype
        x = x.to(self.a.weight.dtype)
        result = result + self.b(self.a(x)) * 2.0
        return result.to(dtype)


def add_lora(model: nn.Module, lora: dict[str, Any]) -> None:
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in lora["target_modules"]:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(
                parent,
                name.rpartition(".")[2],
                LoraLinear(module, lora["r"], getattr(torch, lora["adapter_dtype"])),
            )


def checkpoint(model: nn.Module, layers: int | str) -> None:
    if layers == 0:
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if layers == "all":
        return
    flagged = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    from transformers.modeling_layers import GradientCheckpointingLayer

    stack = [module for module in flagged if isinstance(module, GradientCheckpointingLayer)]
    for module in stack[layers:]:
        module.gradient_checkpointing = False


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw-foreach":
        return torch.optim.AdamW(parameters, foreach=True)
    if name == "adamw-fused":
        return torch.optim.AdamW(parameters, fused=True)
    if name == "sgd-momentum":
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    return torch.optim.Adafactor(parameters)


def make_batch(row: dict[str, Any], rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    length, vocab = row["length"], row["vocab_size"]
    if row["task"] == "image-classification":
        return {
            "pixel_values": torch.randn(rows, 3, length, length, device=device),
            "labels": torch.randint(0, 2, (rows,), device=device),
        }
    ids = torch.randint(0, vocab, (rows, length), device=device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if row["task"] == "sequence-classification":
        batch["labels"] = torch.randint(0, 2, (rows,), device=device)
    elif row["task"] == "token-classification":
        batch["labels"] = torch.randint(0, 2, (rows, length), device=device)
    else:
        batch["labels"] = (
            ids.clone()
            if row["task"] == "causal-lm"
            else torch.randint(0, vocab, (rows, length), device=device)
        )
    return batch


def loss_of(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return out
    return out["loss"] if isinstance(out, dict) else out.loss if hasattr(out, "loss") else out[0]


def run(
    row: dict[str, Any],
    folder: Path,
    device: torch.device,
    *,
    phase: Callable[[str], AbstractContextManager[Any]],
    updates: int,
    place: Callable[[nn.Module], Any],
    ready: Callable[[nn.Module], Any] = lambda model: None,
) -> None:
    """Build a row's model, train it and evaluate it, in named phases."""
    precision = PRECISIONS.get(row["precision"])
    half = {"device_type": device.type, "dtype": precision, "enabled": precision is not None}
    with phase("load"):
        with device:
            model = build_model(row, folder)
        if row["task"] == "causal-lm" and hasattr(model, "config"):
            model.config.use_cache = False  # keys and values are kept for generating only
        if row["lora"]:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(getattr(torch, row["lora"]["base_dtype"]))
        place(model)
        if row["lora"]:
            add_lora(model, row["lora"])
        ready(model)
        model.train()
        checkpoint(model, row["checkpointed_layers"])
        if row["lora"] and row["checkpointed_layers"]:
            model.enable_input_require_grads()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = optimizer_of(row["optimizer"], parameters)
        scaler = torch.amp.GradScaler(device.type, enabled=row["precision"] == "fp16")
    loss = batch = None
    for number in range(1, updates + 1):
        with phase(f"update {number}"):
            for _ in range(row["accumulation"]):
                batch = make_batch(row, row["micro_batch"], device)
                with torch.autocast(**half):
                    out = model(**batch)
                    loss = loss_of(out) / row["accumulation"]
                del out
                scaler.scale(loss).backward()
            if row["clip_grad_norm"] is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, row["clip_grad_norm"])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    with phase("evaluation"), torch.no_grad():
        model.eval()
        examples = make_batch(row, 2 * row["micro_batch"], device)  # the last batch of training is still held
        with torch.autocast(**half):
            model(**examples)
