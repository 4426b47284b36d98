"""Attention on a CPU: propagation as a multiple of one forward pass, a normalized step as one of a plain step.

python -m benchmarks.attention [--json FILE] [--only NAME ...] [--threads N]

Models have random weights. Every ratio is of CPU times measured in turn in one process; wall times depend on whoever
else uses the machine. timm's models are measured where timm is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop_lab.environment import provenance

SECONDS = 20.0  # of CPU, after which no further round is measured
TIMM = ("nest_tiny", "maxxvit_rmlp_nano_rw_256", "mvitv2_tiny")


class Block(nn.Module):
    """A transformer block with the norm first, or none."""

    def __init__(self, width: int, heads: int, causal: bool, norm: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = (nn.LayerNorm(width) if norm else nn.Identity() for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(-2)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """ViT-S/16 for images of 224 x 224."""

    def __init__(self, width: int = 384, heads: int = 6, depth: int = 12) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.first, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)
        _start(self)

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class GPT(nn.Module):
    """GPT-2, or a small one."""

    def __init__(self, tokens: int, width: int, heads: int, depth: int, context: int, norm: bool = True) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(1, context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, True, norm) for _ in range(depth)))
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.head = nn.Linear(width, tokens, bias=False)
        _start(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token."""
        return self.head(self.norm(self.blocks(self.embedding(x) + self.positions)))


def _start(model: nn.Module) -> None:
    """Weights as these models are started with."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
    for name, parameter in model.named_parameters():
        if name in ("positions", "first"):
            nn.init.normal_(parameter, std=0.02)


def _images(size: int) -> tuple[Tensor, vp.Moments]:
    return torch.randn(1, 3, size, size), vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))


def _timm(name: str) -> tuple[nn.Module, Tensor, Any]:
    with contextlib.suppress(RuntimeError):  # torchvision beside a CPU build of torch
        for op in ("nms", "qnms"):
            torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm

    model = timm.create_model(name)
    return model, *_images(model.default_cfg["input_size"][-1])


def _timed(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def _in_turn(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Medians; the first round warms up, and no round begins after some time."""
    times: list[dict[str, float]] = []
    start = time.process_time()
    while len(times) < 2 or (len(times) <= rounds and time.process_time() - start < SECONDS):
        times.append({name: _timed(function) for name, function in functions.items()})
    return {name: statistics.median(found[name] for found in times[1:]) for name in functions}


@torch.no_grad()
def propagation(model: nn.Module, example: Tensor, moments: Any, rounds: int = 5) -> dict[str, float]:
    """Seconds of CPU for a forward pass, the capture and a propagation."""
    model.eval()
    start = time.process_time()
    program = vp.capture(model, example)
    capture = time.process_time() - start
    functions = {"forward": lambda: model(example), "propagate": lambda: vp.propagate(program, moments)}
    return {"capture": capture, **_in_turn(functions, rounds)}


def steps(
    context: int, width: int, heads: int, depth: int, batch: int, norm: bool, rounds: int = 7
) -> dict[str, float]:
    """Seconds of CPU for a training step of a GPT, plain and normalized."""
    torch.manual_seed(0)
    plain = GPT(65, width, heads, depth, context, norm)
    x = torch.randint(0, 65, (batch, context))
    normalized = vp.normalize(copy.deepcopy(plain), vp.Tokens.uniform(65), example=x)

    def step(model: nn.Module) -> None:
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        model.zero_grad()

    return _in_turn({"plain": lambda: step(plain), "normalized": lambda: step(normalized)}, rounds)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Any]]] = {
    "ViT-S/16 at 224": lambda: (ViT(), *_images(224)),
    "GPT-2, 128 tokens": lambda: (
        GPT(50257, 768, 12, 12, 128),
        torch.zeros(1, 128, dtype=torch.long),
        vp.Tokens.uniform(50257),
    ),
    **{f"timm {name}": lambda name=name: _timm(name) for name in TIMM},
}
STEPS: dict[str, dict[str, Any]] = {
    f"GPT {depth} x {width}, {context} tokens, batch {batch}{', layer norm' if norm else ''}": {
        "context": context, "width": width, "heads": heads, "depth": depth, "batch": batch, "norm": norm,
    }
    for depth, width, heads, context, batch in ((2, 128, 4, 64, 32), (6, 384, 6, 256, 8))
    for norm in (False, True)
}  # fmt: skip


def _row(name: str, times: dict[str, float], above: str, below: str) -> str:
    shown = "".join(f"{key} {value:8.3f} s   " for key, value in times.items())
    return f"{name:<48} {shown} ratio {times[above] / times[below]:6.2f}"


def main() -> None:
    """Print the table; write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", help="parts of names")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    wanted = arguments.only or [""]
    made_by = {**provenance(torch.device("cpu")), "processor": _processor()}
    found: dict[str, Any] = {**made_by, "propagate": {}, "step": {}}
    for name, settings in STEPS.items():
        if any(part in name for part in wanted):
            found["step"][name] = times = steps(**settings)
            _tell(_row(name, times, "normalized", "plain"), found, arguments.json)
    for name, make in MODELS.items():
        if any(part in name for part in wanted):
            torch.manual_seed(0)
            try:
                times = propagation(*make())
            except ImportError as missing:
                print(f"{name:<48} left out: {missing}", flush=True)
                continue
            found["propagate"][name] = times
            _tell(_row(name, times, "propagate", "forward"), found, arguments.json)


def _tell(row: str, found: dict[str, Any], file: Path | None) -> None:
    """Print a row, and write what there is so far."""
    print(row, flush=True)
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(": ")[2]
    return platform.processor()


if __name__ == "__main__":
    main()
