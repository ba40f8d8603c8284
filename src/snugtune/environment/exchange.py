"""A short exchange between cards before a long training: does it end, and do the values arrive?

There are consumer cards whose direct copies stall or arrive as zeros. The exchange runs in child processes,
one for each card, which all end with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_SECONDS = 60.0
_WRONG = "wrong value"


def run_exchange(count: int, *, device: str = "cuda", timeout_seconds: float = _SECONDS) -> dict[str, Any]:
    """Add up one tensor over all cards, and copy one from each card to the next.

    Args:
        count: Number of cards.
        device: cuda, or cpu for an exchange over gloo.
        timeout_seconds: After this the processes are ended.

    Returns:
        {"exchange": "passed"}, or under "exchange_problem" stalled, corrupt or failed, and why.
    """
    with tempfile.TemporaryDirectory(prefix="snugtune-") as folder:
        meeting = Path(folder, "meeting").as_uri()
        processes = [
            subprocess.Popen(
                (sys.executable, "-c", rank_code(rank, count, meeting, device)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
            for rank in range(count)
        ]
        try:
            return _wait(processes, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=5)


def rank_code(rank: int, count: int, meeting: str, device: str) -> str:
    """The program of one process."""
    call = f"exchange.main({rank}, {count}, {meeting!r}, {device!r})"
    return f"import sys; sys.path[:] = {sys.path!r}; from snugtune.environment import exchange; {call}"


def main(rank: int, count: int, meeting: str, device: str, value: float | None = None) -> None:
    """Exchange with the others. Runs in a child process; says on standard error what is wrong.

    Args:
        rank: Number of this process.
        count: Number of processes.
        meeting: Address of the file through which they find each other.
        device: cuda or cpu.
        value: What this process adds; its number plus one unless given.
    """
    import torch
    from torch import distributed

    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(where)
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=meeting, rank=rank, world_size=count)
    tensor = torch.full((1024,), float(rank + 1) if value is None else value, device=where)
    distributed.all_reduce(tensor)
    expected = count * (count + 1) / 2
    if not bool((tensor == expected).all()):
        sys.exit(f"{_WRONG}: the sum over {count} processes is {tensor[0].item():g}, not {expected:g}")
    if device == "cuda":
        other = tensor.to(torch.device(device, (rank + 1) % count))
        if not bool((other == expected).all()):
            sys.exit(f"{_WRONG}: a copy from card {rank} to the next arrived as {other[0].item():g}")
    sys.stderr.flush()
    os._exit(0)  # leaving a group can stall on just these cards


def _wait(processes: list[subprocess.Popen[str]], timeout_seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        failed = [process for process, code in zip(processes, codes, strict=True) if code]
        if failed:
            said = (failed[0].communicate()[1] or "").strip().splitlines()
            problem = said[-1] if said else f"a process ended with code {failed[0].returncode}"
            return {"exchange_problem": problem, "exchange_corrupt": problem.startswith(_WRONG)}
        if all(code == 0 for code in codes):
            return {"exchange": "passed"}
        time.sleep(0.05)
    return {"exchange_problem": f"it did not end within {timeout_seconds:g} s", "exchange_corrupt": False}
