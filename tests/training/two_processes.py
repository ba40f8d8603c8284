"""A run of a model of one's own in each of several processes: started by `torch.distributed.run`.

Arguments: the run's folder, what happens, and settings as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import snugtune
from snugtune.errors import RunFolderError, SnugtuneError
from snugtune.training import checkpoints, saving


class Net(nn.Module):
    """Layers that are checkpointed, frozen ones before them, and one that nothing uses."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8).requires_grad_(not unused)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 2)
        if unused:
            self.pooler = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def disturb(what: str) -> None:
    """Let process 0 save slowly, or not at all."""
    real = checkpoints.save_checkpoint

    def slow(*args: Any, **more: Any) -> Path:
        time.sleep(1)
        return real(*args, **more)

    def full(folder: Path, *args: Any, **more: Any) -> Path:
        raise RunFolderError(f"cannot write {folder}", why="No space left on device", do="make room")

    if what == "slow":
        checkpoints.save_checkpoint = slow
    if what.startswith("full"):
        checkpoints.save_checkpoint = full
    if what == "full for the model too":
        saving.has_room = lambda *args: False


def main(folder: str, what: str, more: dict[str, Any]) -> int:
    disturb(what)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(3))
    data = {"x": x, "y": (x[:, 0] > 0).long()}
    settings = more.pop("set", {})
    unused = what.startswith("unused")
    try:
        result = snugtune.train(
            task=snugtune.Task(build_model=lambda: Net(unused=unused), loss=loss),
            data=data,
            validation=data,
            output=folder,
            set={"training.optimizer": "sgd", **settings},
            **{"batch_size": 8, "epochs": 2, "learning_rate": 0.1, **more},
        )
    except SnugtuneError as error:
        print(error, flush=True)
        return error.exit_code
    print(result.status, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
