"""Which blocks stay allocated on a card after everything is deleted, and who asked for them.

python benchmarks/lasting_blocks.py OUT.json
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def lasting() -> list[dict[str, object]]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    found = []
    for segment in torch.cuda.memory._snapshot()["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                frames = [frame["name"] for frame in block.get("frames", [])][:25]
                found.append(
                    {"size": block["size"], "requested": block.get("requested_size"), "frames": frames}
                )
    return found


def main() -> int:
    torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="all")
    report: dict[str, object] = {"torch": torch.__version__, "card": torch.cuda.get_device_name()}

    def run(name: str, model: nn.Module, *, recompute: bool = False, half: bool = False) -> None:
        model = model.cuda()
        x = torch.randn(256, 256, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.float16, enabled=half):
            y = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        y.float().sum().backward()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        del x, y, model, optimizer
        report[name] = lasting()

    run("linear without bias", nn.Linear(256, 256, bias=False))
    run("linear", nn.Linear(256, 256))
    run("linear recomputed", nn.Linear(256, 256), recompute=True)
    run("linear fp16", nn.Linear(256, 256), half=True)
    run("linear, gelu, dropout", nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)))
    run("layer norm", nn.LayerNorm(256))
    run("convolution", nn.Sequential(nn.Unflatten(1, (1, 16, 16)), nn.Conv2d(1, 8, 3), nn.Flatten()))
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    for backend in (
        torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION,
        torch.nn.attention.SDPBackend.CUDNN_ATTENTION,
    ):
        with torch.nn.attention.sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()
        report[str(backend)] = lasting()
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1))
    for name, blocks in report.items():
        print(name, [block["size"] for block in blocks] if isinstance(blocks, list) else blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
