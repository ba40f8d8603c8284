"""Proves on the card, in a child process, that what training needs runs there, and how fast.

The child may crash or hang without harm to its caller. It prints one line of JSON after each part, so that
what came before a crash is known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from snugtune.environment.builds import driver_fault
from snugtune.environment.exchange import run_exchange
from snugtune.environment.stated import Card, Stated

if TYPE_CHECKING:
    import torch

_SECONDS = 120.0
_SIDE = 4096
_COPIED_BYTES = 256 * 2**20
_TIMED_SECONDS = 0.3


def run_selftest(stated: Stated, *, timeout_seconds: float = _SECONDS) -> dict[str, Any]:
    """Run the self-test if there is a card that PyTorch should be able to use; empty if there is none.

    Returns:
        Rates in operations and bytes per second, bytes of the context, the parts that passed, and under
        "problem" the first that failed.
    """
    torch = stated.torch
    seen = [card for card in stated.cards or () if driver_fault(card.capability, stated.place.driver) is None]
    if not seen or torch is None or torch.made_for:
        return {}
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from snugtune.environment import selftest; selftest.main()"
    )
    found = run_child((sys.executable, "-c", code), timeout_seconds)
    count = found.get("count", 0)
    if found.get("context_bytes") is None:
        found["context_bytes"] = _context_by_difference(found, seen)
    return found if count < 2 or "problem" in found else {**found, **run_exchange(count)}


def _context_by_difference(found: dict[str, Any], cards: Sequence[Card]) -> int | None:
    """What more of the card was in use than before, where the driver does not tell of single processes."""
    used, uuid = found.get("used_bytes"), str(found.get("uuid"))
    before = next((card.used_bytes for card in cards if card.uuid and uuid in card.uuid), None)
    return None if used is None or before is None or used <= before else used - before


def run_child(command: tuple[str, ...], timeout_seconds: float) -> dict[str, Any]:
    """Run a child that prints JSON lines, and put them together; a crash becomes the "problem"."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
        output, problem = done.stdout, None if done.returncode == 0 else _last(done.stderr, done.returncode)
    except subprocess.TimeoutExpired as error:
        output = (
            error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        )
        problem = f"it gave no answer within {timeout_seconds:g} s"
    except OSError as error:
        return {"problem": str(error)}
    found: dict[str, Any] = {"passed": []}
    for line in output.splitlines():
        try:
            part = json.loads(line)
            found["passed"] += part.pop("passed", [])
            found |= part
        except (ValueError, AttributeError, TypeError):
            continue
    if problem is not None and "problem" not in found:
        after = f" after {found['passed'][-1]}" if found["passed"] else ""
        found["problem"] = f"the child process ended{after}: {problem}"
    return found


def _last(stderr: str, returncode: int) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {returncode}"


def main(device: str = "cuda") -> None:
    """Run every part on a device, and print what came of each. Runs in the child process."""
    import torch

    where = torch.device(device)
    for name, part in _parts(where):
        try:
            _tell({**(part() or {}), "passed": [name]})
        except Exception as error:  # whatever a card, a driver or a library comes up with
            text = str(error).strip().splitlines()
            _tell({"problem": f"{name}: {text[0] if text else type(error).__name__}"})
            if "out of memory" not in str(error):
                break  # after most errors of CUDA every further call fails


def _parts(device: torch.device) -> Iterator[tuple[str, Callable[[], dict[str, Any] | None]]]:
    import torch

    yield "context", lambda: _context(device)
    yield "fp32 matrix product", lambda: _matrix_product(device, torch.float32, "fp32")
    yield "fp16 matrix product", lambda: _matrix_product(device, torch.float16, "fp16")
    yield "bf16 matrix product", lambda: _matrix_product(device, torch.bfloat16, "bf16")
    yield "convolution", lambda: _convolution(device)
    yield "memory-efficient attention", lambda: _attention(device)
    yield "AdamW update", lambda: _update(device)
    yield "memory bandwidth", lambda: _bandwidth(device)


def _context(device: torch.device) -> dict[str, Any]:
    """Bytes that are gone from the card after the first use of CUDA, without the tensors and their cache."""
    import torch

    torch.zeros(1, device=device)
    if device.type != "cuda":
        return {}
    from snugtune import hardware

    found = torch.cuda.get_device_properties(device)
    index = hardware.gpu_of_uuid(str(found.uuid))
    own = None if index is None else hardware.process_memory_bytes(index, os.getpid())
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "context_bytes": None if own is None else own - reserved,
        "used_bytes": total - free - reserved,
        "uuid": str(found.uuid),
        "tested": found.name,
        "count": torch.cuda.device_count(),
    }


def _matrix_product(device: torch.device, dtype: torch.dtype, name: str) -> dict[str, Any]:
    """A product of square matrices, a small one checked against fp64, and its operations per second."""
    import torch

    generator = torch.Generator().manual_seed(0)
    small = torch.randn(64, 64, generator=generator)
    exact = small.double() @ small.double()
    answer = (small.to(device, dtype) @ small.to(device, dtype)).double().cpu()
    if not torch.allclose(answer, exact, rtol=0.1, atol=0.5):
        raise RuntimeError("the product is wrong")
    side = _SIDE if device.type == "cuda" else 256
    matrix = torch.randn(side, side, device=device, dtype=torch.float32).to(dtype)
    seconds = _seconds_of(lambda: matrix @ matrix, device)
    return {f"{name}_flops_per_s": 2 * side**3 / seconds}


def _convolution(device: torch.device) -> None:
    import torch
    from torch.nn import functional

    images = torch.randn(2, 3, 32, 32, device=device)
    filters = torch.randn(8, 3, 3, 3, device=device, requires_grad=True)
    functional.conv2d(images, filters).square().mean().backward()  # type: ignore[no-untyped-call]
    _finite(filters.grad)


def _attention(device: torch.device) -> None:
    """Attention through the memory-efficient kernel alone, which is the one that old cards have."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    half = torch.float16 if device.type == "cuda" else torch.float32
    query = torch.randn(2, 4, 128, 64, device=device, dtype=half, requires_grad=True)
    kernel = SDPBackend.EFFICIENT_ATTENTION if device.type == "cuda" else SDPBackend.MATH
    with sdpa_kernel(kernel):
        scaled_dot_product_attention(query, query, query).float().square().mean().backward()  # type: ignore[no-untyped-call]
    _finite(query.grad)


def _update(device: torch.device) -> None:
    import torch

    model = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    before = model.weight.detach().clone()
    model(torch.randn(8, 64, device=device)).square().mean().backward()
    optimizer.step()
    if torch.equal(before, model.weight):
        raise RuntimeError("the weights did not change")
    _finite(model.weight)


def _bandwidth(device: torch.device) -> dict[str, Any]:
    """Bytes per second, read and written, of a copy inside the card."""
    import torch

    size = _COPIED_BYTES if device.type == "cuda" else 2**20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"bandwidth_bytes_per_s": 2 * size / _seconds_of(lambda: target.copy_(source), device)}


def _seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one run, of as many as fit into a fraction of a second, after a warm-up."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        work()
    wait()
    runs, start = 0, time.perf_counter()
    while runs < 3 or time.perf_counter() - start < _TIMED_SECONDS:
        work()
        runs += 1
        if runs % 8 == 0:
            wait()  # otherwise the launches run far ahead of the card
    wait()
    return (time.perf_counter() - start) / runs


def _finite(tensor: torch.Tensor | None) -> None:
    if tensor is None or not bool(tensor.isfinite().all()):
        raise RuntimeError("the result is not finite")


def _tell(part: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(part) + "\n")
    sys.stdout.flush()
