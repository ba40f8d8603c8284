"""The processes that share each update of a run: one per card, started by `torch.distributed.run`.

Gradients are added up by explicit calls, after every process has said that its passes are done. Hooks inside
the backward pass, the usual way, leave the processes in different calls as soon as one of them fails there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from snugtune.errors import ProcessError
from snugtune.units import MiB

T = TypeVar("T")

_BUCKET_BYTES = 25 * MiB  # one call for each gradient would cost more than the transfer


class Processes:
    """One process among several, or alone.

    Args:
        rank: Number of this process, from 0; 0 is the one that speaks and writes.
        count: How many there are.
        talk: Group for words between processes, over the CPU; None means the default group.
    """

    def __init__(self, *, rank: int = 0, count: int = 1, talk: Any = None) -> None:
        self.rank, self.count, self._talk = rank, count, talk

    @property
    def alone(self) -> bool:
        """Whether there is only this one."""
        return self.count == 1

    def any(self, said: bool) -> bool:
        """Whether at least one process says so; all of them must ask."""
        return said if self.alone else self._sum([int(said)])[0] > 0

    def gather(self, thing: T) -> list[T]:
        """What each process gives, in the order of their ranks, for all of them."""
        if self.alone:
            return [thing]
        everything: list[Any] = [None] * self.count
        with _explained():
            distributed.all_gather_object(everything, thing, group=self._talk)
        return everything

    def first_here(self, work: Callable[[], T]) -> T:
        """Do something in process 0 first, so that the others find what it left on the disk.

        Raises:
            ProcessError: It failed there.
        """
        result, error = None, None
        if self.rank == 0:
            try:
                result = work()
            except BaseException as caught:
                error = caught
        if self.any(error is not None):
            raise error or _failed("process 0 failed")
        return work() if result is None else result

    @contextmanager
    def all_or_none(self, parameters: Sequence[nn.Parameter], numbers: list[int]) -> Iterator[None]:
        """Run the passes of an update in the block; go on only if no process failed there.

        Every parameter that has a gradient in one process has one in all of them afterwards.

        Args:
            parameters: Those that learn, in the same order in all processes.
            numbers: Added up over all processes after the block, in place; as many in each process.

        Raises:
            ProcessError: Another process failed.
        """
        if self.alone:
            yield
            return
        error: BaseException | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        has_gradient = [int(parameter.grad is not None) for parameter in parameters]
        failed, *sums = self._sum([int(error is not None), *numbers, *has_gradient])
        if failed:
            raise error or _failed(f"{failed} of {self.count} processes could not compute their share")
        numbers[:], gradients = sums[: len(numbers)], sums[len(numbers) :]
        for parameter, processes in zip(parameters, gradients, strict=True):
            if processes and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def add_up(self, parameters: Sequence[nn.Parameter], sums: Sequence[torch.Tensor]) -> None:
        """Add up gradients and some numbers over all processes, in place."""
        if self.alone:
            return
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for bucket in _buckets([*grads, *sums]):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with _explained():
                distributed.all_reduce(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            torch._foreach_copy_(
                bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)]
            )

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the buffers of process 0, such as the running means of BatchNorm."""
        if not self.alone:
            with _explained():
                for buffer in model.buffers():
                    distributed.broadcast(buffer, src=0)

    def _sum(self, numbers: list[int]) -> list[int]:
        tensor = torch.tensor(numbers)
        with _explained():
            distributed.all_reduce(tensor, group=self._talk)
        return [int(number) for number in tensor.tolist()]


ALONE = Processes()


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one type each, in groups of limited size."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.dtype)):
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what is raised when another process is gone into words."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessError(
            "another process of this run has ended",
            why=str(error).splitlines()[0],
            do="its own message says why; the same command continues from the last checkpoint",
        ) from error


def _failed(what: str) -> ProcessError:
    return ProcessError(what, why="its own message is above or below", do="read that one")
