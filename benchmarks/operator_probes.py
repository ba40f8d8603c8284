# ruff: noqa: B008, E501
"""What single operators allocate on a card: each runs twice, and the second run's allocations are noted."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Probe = tuple[str, Callable[[torch.device], tuple[Callable[[], Any], ...]]]


def probe_operators(
    device: torch.device,
    allocations: Callable[[], list[dict[str, Any]]],
    events_of: Callable[[list[dict[str, Any]]], list[int]],
) -> dict[str, Any]:
    """Name of a probe -> events of each of its parts (forward, backward)."""
    found: dict[str, Any] = {}
    for name, make in probes():
        try:
            parts: list[list[int]] = []
            for _ in range(2):
                torch.manual_seed(0)
                parts, held = [], []
                for call in make(device):
                    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=100_000)
                    held.append(call())
                    torch.cuda.synchronize()
                    parts.append(events_of(allocations()))
                    torch.cuda.memory._record_memory_history(enabled=None)
                del held
            found[name] = parts
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            torch.cuda.memory._record_memory_history(enabled=None)
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _both(build: Callable[[torch.device], Callable[[], torch.Tensor]]) -> Callable[[torch.device], Any]:
    """Forward and backward of something that returns one tensor."""

    def make(device: torch.device) -> tuple[Callable[[], Any], ...]:
        forward = build(device)
        made: list[torch.Tensor] = []

        def run() -> None:
            made.append(forward())

        def back() -> None:
            made[0].backward(torch.ones_like(made[0]))

        return run, back

    return make


def probes() -> Iterator[tuple[str, Callable[[torch.device], Any]]]:
    yield from _convolutions()
    yield from _recurrent()
    yield from _tensors()
    yield from _attention()


def _convolutions() -> Iterator[tuple[str, Callable[[torch.device], Any]]]:
    shapes = [  # batch, channels in, channels out, size, kernel, stride, padding, groups
        (8, 3, 64, 224, 7, 2, 3, 1),
        (64, 3, 64, 224, 7, 2, 3, 1),
        (8, 3, 768, 224, 16, 16, 0, 1),
        (32, 3, 768, 224, 16, 16, 0, 1),
        (8, 64, 64, 56, 1, 1, 0, 1),
        (64, 64, 64, 56, 1, 1, 0, 1),
        (8, 64, 64, 56, 3, 1, 1, 1),
        (64, 64, 64, 56, 3, 1, 1, 1),
        (64, 64, 256, 56, 1, 1, 0, 1),
        (64, 256, 64, 56, 1, 1, 0, 1),
        (64, 128, 128, 56, 3, 2, 1, 1),
        (64, 128, 128, 28, 3, 1, 1, 1),
        (64, 256, 512, 56, 1, 2, 0, 1),
        (64, 256, 256, 14, 3, 1, 1, 1),
        (64, 512, 512, 7, 3, 1, 1, 1),
        (8, 512, 512, 7, 3, 1, 1, 1),
        (64, 512, 2048, 7, 1, 1, 0, 1),
        (64, 2048, 512, 7, 1, 1, 0, 1),
        (16, 96, 96, 56, 7, 1, 3, 96),
        (16, 32, 32, 112, 3, 1, 1, 32),
        (16, 144, 144, 56, 3, 2, 1, 144),
        (16, 128, 128, 56, 3, 1, 1, 4),
        (32, 3, 96, 224, 4, 4, 0, 1),
        (16, 64, 128, 32, 5, 1, 2, 1),
        (128, 3, 32, 32, 3, 1, 1, 1),
        (128, 64, 64, 32, 3, 1, 1, 1),
    ]
    for batch, inner, outer, size, kernel, stride, padding, groups in shapes:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for grad in (True, False):
                if dtype == torch.bfloat16 and (batch != 64 or kernel == 1 or not grad):
                    continue

                def build(device: torch.device, s: Any = None, d: Any = dtype, g: bool = grad) -> Any:
                    b, i, o, n, k, st, p, gr = s
                    weight = torch.randn(o, i // gr, k, k, device=device, dtype=d, requires_grad=True)
                    x = torch.randn(b, i, n, n, device=device, dtype=d, requires_grad=g)
                    return lambda: F.conv2d(x, weight, stride=st, padding=p, groups=gr)

                shape = (batch, inner, outer, size, kernel, stride, padding, groups)
                name = f"conv2d {' '.join(map(str, shape))} {str(dtype)[6:]} {'grad' if grad else 'no'}"
                yield name, _both(lambda device, s=shape, b=build: b(device, s))
    for inner, outer, length, kernel in (
        (80, 384, 3000, 3),
        (384, 384, 3000, 3),
        (512, 512, 1600, 3),
        (1, 512, 16000, 10),
    ):

        def build1(device: torch.device, c: Any = (inner, outer, length, kernel)) -> Any:
            weight = torch.randn(c[1], c[0], c[3], device=device, requires_grad=True)
            x = torch.randn(4, c[0], c[2], device=device, requires_grad=True)
            return lambda: F.conv1d(x, weight, padding=1)

        yield f"conv1d 4 {inner} {outer} {length} {kernel} 1 1 1 float32 grad", _both(build1)


def _recurrent() -> Iterator[tuple[str, Callable[[torch.device], Any]]]:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for layers, hidden, both, drop in (
            (1, 512, False, 0.0),
            (2, 512, False, 0.0),
            (2, 512, True, 0.3),
            (1, 256, True, 0.0),
            (3, 650, False, 0.5),
        ):
            for batch, length in ((8, 128), (32, 128), (32, 64), (64, 200)):
                for dtype in (torch.float32, torch.float16):
                    if dtype == torch.float16 and batch != 32:
                        continue

                    def build(
                        device: torch.device,
                        a: Any = (kind, layers, hidden, both, drop, batch, length, dtype),
                    ) -> Any:
                        kind, layers, hidden, both, drop, batch, length, dtype = a
                        net = kind(
                            300, hidden, layers, batch_first=True, bidirectional=both, dropout=drop
                        ).to(device)
                        x = torch.randn(batch, length, 300, device=device, requires_grad=True)

                        def call() -> Any:
                            with torch.autocast("cuda", dtype=torch.float16, enabled=dtype == torch.float16):
                                return net(x)[0]

                        return call

                    yield (
                        f"{kind.__name__} layers={layers} hidden={hidden} both={both} drop={drop} batch={batch} length={length} {str(dtype)[6:]}",
                        _both(build),
                    )


def _tensors() -> Iterator[tuple[str, Callable[[torch.device], Any]]]:
    def of(
        function: Callable[[torch.Tensor], torch.Tensor],
        *shape: int,
        dtype: Any = torch.float32,
        grad: bool = True,
    ) -> Any:
        def build(device: torch.device) -> Any:
            x = torch.randn(*shape, device=device).to(dtype).requires_grad_(grad)
            return lambda: function(x)

        return _both(build)

    def once(function: Callable[[torch.device], Callable[[], Any]]) -> Any:
        return lambda device: (function(device),)

    def embedding(rows: int, width: int, tokens: int, padding: int | None) -> Any:
        def build(device: torch.device) -> Any:
            weight = torch.randn(rows, width, device=device, requires_grad=True)
            ids = torch.randint(0, rows, (tokens,), device=device)
            return lambda: F.embedding(ids, weight, padding)

        return _both(build)

    for tokens in (128, 1024, 3072, 4096, 8192, 32768):
        yield f"embedding 30522 768 {tokens} None", embedding(30522, 768, tokens, None)
        yield f"embedding 30522 768 {tokens} 0", embedding(30522, 768, tokens, 0)
        yield f"embedding 512 768 {tokens} None", embedding(512, 768, tokens, None)
        yield f"embedding 2 768 {tokens} None", embedding(2, 768, tokens, None)
        yield f"embedding 50257 1024 {tokens} None", embedding(50257, 1024, tokens, None)
        for width in (768, 1024, 4096):
            yield (
                f"layer_norm {tokens} {width}",
                of(
                    lambda x: F.layer_norm(
                        x,
                        x.shape[-1:],
                        torch.ones(x.shape[-1:], device=x.device, requires_grad=True),
                        torch.zeros(x.shape[-1:], device=x.device, requires_grad=True),
                    ),
                    tokens,
                    width,
                ),
            )
            yield f"sum0 {tokens} {width} float32", of(lambda x: x.sum(0), tokens, width)
            yield f"sum0 {tokens} {width} float16", of(lambda x: x.sum(0), tokens, width, dtype=torch.float16)
        yield f"sum01 8 {tokens // 8} 768", of(lambda x: x.sum((0, 1)), 8, tokens // 8, 768)
        yield f"sum {tokens} 768", of(lambda x: x.sum(), tokens, 768)
        yield f"mean {tokens} 768", of(lambda x: x.mean(), tokens, 768)
        yield f"norm {tokens} 768", of(lambda x: x.norm(), tokens, 768)
    for shape in ((2048, 30522), (2048, 50257), (512, 151936), (64, 2)):

        def loss(x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long, device=x.device))

        yield f"cross_entropy {shape}", of(loss, *shape)
        yield (
            f"linear_bias {shape}",
            of(
                lambda x: F.linear(
                    x,
                    torch.ones(16, x.shape[1], device=x.device, requires_grad=True),
                    torch.ones(16, device=x.device, requires_grad=True),
                ),
                *shape,
            ),
        )
    for dtype in (torch.float32, torch.float16):
        for rows in (128, 2048, 8192):
            yield (
                f"linear {rows} 768 3072 {str(dtype)[6:]}",
                of(
                    lambda x: F.linear(
                        x,
                        torch.ones(3072, 768, device=x.device, dtype=x.dtype, requires_grad=True),
                        torch.ones(3072, device=x.device, dtype=x.dtype, requires_grad=True),
                    ),
                    rows,
                    768,
                    dtype=dtype,
                ),
            )
    for size in (1024, 65536, 4_000_000):
        yield (
            f"cumsum {size}",
            once(lambda device, n=size: lambda x=torch.ones(n, device=device, dtype=torch.long): x.cumsum(0)),
        )
        yield f"sort {size}", once(lambda device, n=size: lambda x=torch.randn(n, device=device): x.sort())
        yield f"topk {size}", once(lambda device, n=size: lambda x=torch.randn(n, device=device): x.topk(8))
        yield (
            f"nonzero {size}",
            once(lambda device, n=size: lambda x=torch.ones(n, device=device): x.nonzero()),
        )
        yield (
            f"any {size}",
            once(lambda device, n=size: lambda x=torch.ones(n, device=device, dtype=torch.bool): x.any()),
        )
        yield (
            f"unique {size}",
            once(lambda device, n=size: lambda x=torch.arange(n, device=device): x.unique()),
        )
        yield f"mask {size}", once(lambda device, n=size: lambda x=torch.ones(n, device=device): x[x > 0])
        yield (
            f"foreach_norm {size}",
            once(
                lambda device, n=size: (
                    lambda x=tuple(torch.ones(n, device=device) for _ in range(5)): torch._foreach_norm(x)
                )
            ),
        )
    for rows in (1024, 8192):
        yield f"gather {rows}", of(lambda x: x[torch.arange(x.shape[0], device=x.device).flip(0)], rows, 768)
        yield (
            f"batch_norm {rows}",
            of(
                lambda x: F.batch_norm(
                    x,
                    None,
                    None,
                    torch.ones(x.shape[1], device=x.device, requires_grad=True),
                    torch.zeros(x.shape[1], device=x.device, requires_grad=True),
                    training=True,
                ),
                rows // 64,
                64,
                32,
                32,
            ),
        )
        yield (
            f"batch_norm_running {rows}",
            of(
                lambda x: F.batch_norm(
                    x,
                    torch.zeros(64, device=x.device),
                    torch.ones(64, device=x.device),
                    torch.ones(64, device=x.device, requires_grad=True),
                    torch.zeros(64, device=x.device, requires_grad=True),
                    training=True,
                ),
                rows // 64,
                64,
                32,
                32,
            ),
        )
        yield (
            f"group_norm {rows}",
            of(
                lambda x: F.group_norm(
                    x,
                    8,
                    torch.ones(64, device=x.device, requires_grad=True),
                    torch.zeros(64, device=x.device, requires_grad=True),
                ),
                rows // 64,
                64,
                32,
                32,
            ),
        )
        yield (
            f"rms_norm {rows}",
            of(
                lambda x: F.rms_norm(
                    x, x.shape[-1:], torch.ones(x.shape[-1:], device=x.device, requires_grad=True)
                ),
                rows,
                768,
            ),
        )
        yield f"max_pool {rows}", of(lambda x: F.max_pool2d(x, 3, 2, 1), rows // 64, 64, 32, 32)
        yield (
            f"interpolate {rows}",
            of(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), rows // 64, 64, 32, 32),
        )
        yield f"dropout {rows}", of(lambda x: F.dropout(x, 0.1), rows, 768)
        yield f"gelu {rows}", of(F.gelu, rows, 768)
        yield f"einsum {rows}", of(lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x), 4, 12, rows // 8, 64)


def _attention() -> Iterator[tuple[str, Callable[[torch.device], Any]]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
        "default": None,
    }
    for batch, heads, length, width in (
        (8, 12, 128, 64),
        (2, 12, 1000, 64),
        (4, 16, 512, 64),
        (2, 8, 512, 128),
        (2, 8, 300, 32),
        (1, 4, 256, 256),
        (2, 12, 512, 80),
    ):
        for dtype in (torch.float32, torch.float16):
            for how in ("plain", "causal", "mask"):
                for name, backend in backends.items():

                    def build(
                        device: torch.device, a: Any = (batch, heads, length, width, dtype, how, backend)
                    ) -> Any:
                        batch, heads, length, width, dtype, how, backend = a
                        qkv = [
                            torch.randn(
                                batch, length, heads * width, device=device, dtype=dtype, requires_grad=True
                            )
                            for _ in range(3)
                        ]
                        mask = (
                            torch.zeros(batch, 1, length, length, device=device, dtype=dtype)
                            if how == "mask"
                            else None
                        )

                        def call() -> Any:
                            q, k, v = (t.view(batch, length, heads, width).transpose(1, 2) for t in qkv)
                            if backend is None:
                                return (
                                    F.scaled_dot_product_attention(q, k, v, mask, 0.1, how == "causal")
                                    .transpose(1, 2)
                                    .reshape(batch, length, -1)
                                )
                            with sdpa_kernel(backend):
                                return (
                                    F.scaled_dot_product_attention(q, k, v, mask, 0.1, how == "causal")
                                    .transpose(1, 2)
                                    .reshape(batch, length, -1)
                                )

                        return call

                    yield (
                        f"attention {name} {batch} {heads} {length} {width} {str(dtype)[6:]} {how}",
                        _both(build),
                    )
