"""What each of several processes does in the tests: started by `torch.distributed.run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed, nn

from snugtune import processes
from snugtune.errors import ProcessError
from snugtune.processes import ALONE, Processes
from snugtune.step import Choices, Hyperparameters, Step
from snugtune.tasks import Task
from snugtune.training.device import _leave


class Net(nn.Module):
    """A layer for all rows, one for rows that are marked, one for none, and one in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.marked = nn.Linear(8, 3)
        self.unused = nn.Linear(8, 3)
        self.last = nn.Linear(8, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = self.first(batch["x"])
        answers = self.last(hidden)
        if bool(batch["marked"].any()):
            answers = answers + self.marked(hidden) * batch["marked"].unsqueeze(1)
        return answers


WEIGHTS = torch.tensor([0.2, 1.0, 5.0])


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(model(batch), batch["y"], WEIGHTS, reduction="sum"), WEIGHTS[batch["y"]].sum()


def update(
    together: Processes, batch: dict[str, torch.Tensor], shares: list[list[int]], optimizer: str
) -> Any:
    """The weights after one update of which each process has a share of rows, in passes of two rows."""
    step = Step(
        Task(build_model=Net, loss=loss),
        Choices(optimizer=optimizer),
        Hyperparameters(learning_rate=0.1, clip_grad_norm=0.05),
        device=torch.device("cpu"),
        processes=together,
    )
    mine = shares[together.rank]
    passes = [
        {name: column[mine[i : i + 2]] for name, column in batch.items()} for i in range(0, len(mine), 2)
    ]
    did = step.launch(passes, number=0, learning_rate=0.1, samples=sum(map(len, shares))).result()
    return did, dict(step.model.named_parameters())


def largest_difference(one: Any, other: Any) -> float:
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def failure(together: Processes, where: int) -> str:
    """What a process sees when one of them fails."""
    try:
        with together.all_or_none([], [1]):
            if together.rank == where:
                raise MemoryError("too small")
    except (MemoryError, ProcessError) as error:
        return type(error).__name__
    return "nothing"


def main(folder: Path) -> None:
    distributed.init_process_group("gloo")
    together = Processes(rank=distributed.get_rank(), count=distributed.get_world_size())
    processes._BUCKET_BYTES = 100  # several buckets, also with a small net
    generator = torch.Generator().manual_seed(3)
    batch = {
        "x": torch.randn(7, 4, generator=generator),
        "y": torch.tensor([0, 1, 2, 0, 1, 2, 2]),
        "marked": torch.tensor([0.0, 0, 0, 1, 0, 0, 0]),
    }
    seen: dict[str, Any] = {"any": [together.any(False), together.any(together.rank == 1)]}
    seen["gather"] = together.gather(together.rank * 10)
    marker = folder / "made"
    together.first_here(
        lambda: marker.write_text("x") if together.rank == 0 else int(marker.exists()) or 1 / 0
    )
    seen["failures"] = [failure(together, 1), failure(together, 7)]
    for optimizer in ("sgd", "adamw-fused"):
        expected, whole = update(ALONE, batch, [list(range(7))], optimizer)
        # Process 1 has the only marked row, process 2 has no row at all.
        did, ours = update(together, batch, [[0, 2, 4], [1, 3, 5, 6], []], optimizer)
        seen[optimizer] = {
            "difference": largest_difference(whole, ours),
            "loss": [expected.loss, did.loss],
            "norm": [expected.grad_norm, did.grad_norm],
        }
    model = nn.BatchNorm1d(2)
    model.running_mean += together.rank
    together.share_buffers(model)
    seen["buffers"] = model.running_mean.tolist()
    (folder / f"{together.rank}.json").write_text(json.dumps(seen))
    _leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
