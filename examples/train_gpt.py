"""Train a byte-level GPT on Python source with layer norm, RMS norm, DyT, Derf, analytic normalization or none.

    python examples/train_gpt.py --norm analytic          # judged on files that are held out
    python examples/train_gpt.py --norm analytic --test   # judged on other files, for the record

The text is what every machine with torch has: the sources of Python and torch, shuffled by file. Machines with other
versions have another text, which its hash in the result tells. AdamW with weight decay on matrices, warmup and cosine,
clipped gradients; bfloat16 on a GPU. The same seed gives every method the same text in the same order. The last line is
the result as JSON; losses are nats per byte, and a run that diverges ends there with loss null.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import random
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop_lab.training import captured_step

STD = 0.02  # of the first weights
SETTINGS = (
    "norm", "form", "layers", "width", "heads", "context", "batch", "steps", "lr", "warmup", "decay", "clip", "seed",
    "residual", "weights", "scale_rate", "logits", "qk_norm", "squash", "compile", "alpha",
)  # fmt: skip


class DyT(nn.Module):
    """Dynamic tanh (Zhu et al., 2025): tanh of a learned multiple, then a factor and a bias per channel."""

    def __init__(self, width: int, alpha: float = 1.0) -> None:  # as published for language models up to 1024 wide
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x) * self.weight + self.bias


class Derf(nn.Module):
    """Dynamic erf (Chen et al., 2025): erf of a learned multiple and shift, then a factor and a bias per channel."""

    def __init__(self, width: int, alpha: float = 0.5) -> None:  # as published
        super().__init__()
        self.alpha, self.shift = nn.Parameter(torch.tensor(alpha)), nn.Parameter(torch.zeros(()))
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha * x + self.shift) * self.weight + self.bias


class Squash(nn.Module):
    """DyT without its parameters: bounds what a normalized layer reads, of which it knows mean and variance."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * x)


NORMS: dict[str, Any] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "dyt": DyT, "derf": Derf}
BOUNDED = ("dyt", "derf")  # which do not make small values larger


def norm_of(
    options: argparse.Namespace, unnormalized: Any = nn.Identity, **alphas: float
) -> Callable[[int], nn.Module]:
    """What stands where a norm does, by the width; `alphas` are first values where the options have none."""
    if options.norm in BOUNDED:
        alpha = alphas.get(options.norm) if options.alpha is None else options.alpha
        return functools.partial(NORMS[options.norm], **({} if alpha is None else {"alpha": alpha}))
    return NORMS.get(options.norm, lambda width: unnormalized())


class Block(nn.Module):
    """Attention and two layers with GELU, each with a norm before it and added to the stream."""

    def __init__(self, width: int, heads: int, norm: Any, qk_norm: bool, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.qkv, self.proj = norm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = norm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.q_norm, self.k_norm = (nn.RMSNorm(width // heads) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = turned(self.q_norm(q), turns).to(v.dtype), turned(self.k_norm(k), turns).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: the two halves of the channels as coordinates of points, which turn from token to token."""
    (cos, sin), (a, b) = turns, x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class GPT(nn.Module):
    """Bytes come as one-hot vectors: the embedding is a linear layer, and positions are known to attention alone."""

    turns: Tensor

    def __init__(self, options: argparse.Namespace, norm: Any) -> None:
        super().__init__()
        width, half = options.width, options.width // options.heads // 2
        angles = torch.arange(options.context)[:, None] * 10_000 ** (-torch.arange(half) / half)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        self.embedding = nn.Linear(256, width)
        self.blocks = nn.ModuleList(Block(width, options.heads, norm, options.qk_norm) for _ in range(options.layers))
        self.norm, self.head = norm(width), nn.Linear(width, 256)
        # as published for language models with DyT
        self.gain = nn.Parameter(torch.tensor(math.sqrt(width))) if options.norm in BOUNDED else 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next byte."""
        x = self.embedding(x).float() * self.gain  # the stream keeps its digits in mixed precision
        for block in self.blocks:
            x = block(x, self.turns[:, : x.shape[1]])
        return self.head(self.norm(x))


def make_model(options: argparse.Namespace, text: Tensor) -> nn.Module:
    torch.manual_seed(options.seed)
    model = GPT(options, norm_of(options, Squash if options.squash else nn.Identity))
    set_first_weights_(model, options.layers)
    return normalized(model, options, text) if options.norm == "analytic" else model


def set_first_weights_(model: nn.Module, layers: int) -> None:
    """Small ones, those that a branch adds to the stream smaller, and no biases."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            last = name.endswith(("proj.weight", "down.weight"))  # of a branch
            nn.init.normal_(parameter, std=STD / math.sqrt(2 * layers) if last else STD)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


@torch.no_grad()
def normalized(model: nn.Module, options: argparse.Namespace, text: Tensor) -> nn.Module:
    """The analytic normalization, its weights and scales where the options want them to start."""
    share = torch.bincount(text.long(), minlength=256).view(1, 1, 256) / len(text)
    moments = vp.Moments(share, share * (1 - share))  # of the one-hot vector of a random byte
    model = vp.normalize(model, moments, example=(1, options.context, 256), form=options.form)
    for name, parameter in model.named_parameters():
        if name.endswith(("proj.scale", "down.scale")):
            parameter.mul_(options.residual)
        elif name == "head.scale":
            parameter.mul_(options.logits)
        elif parameter.ndim > 1:  # changes no output, but by how much a step turns a row
            parameter.div_(parameter.std()).mul_(options.weights)
    return model


class Text(NamedTuple):
    """Bytes to train on, bytes to judge by, and the hash of all."""

    train: Tensor
    judged: Tensor
    hash: str


@functools.cache
def source_files() -> list[Path]:
    """Of Python and torch, in an order that depends on nothing but their names."""
    python, library = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent
    files = [f for f in python.rglob("*.py") if not {"site-packages", "dist-packages"} & set(f.parts)]
    files = sorted(files) + sorted(library.rglob("*.py"))
    random.Random(0).shuffle(files)
    return files


def load_text(options: argparse.Namespace, device: torch.device) -> Text:
    """The last 4 % of the bytes are held out: the first half of them to judge by, the second for `--test`."""
    taken, size = [], 0
    for file in source_files():
        if size < options.bytes:
            taken.append(file.read_bytes())
            size += len(taken[-1])
    every = bytearray(b"".join(taken)[: options.bytes])
    part = len(every) // 50
    text = torch.frombuffer(every, dtype=torch.uint8).to(device)
    judged = text[-part:] if options.test else text[-2 * part : -part]
    return Text(text[: -2 * part], judged, hashlib.sha256(every).hexdigest()[:16])


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Bytes and the bytes that follow them."""
    found = text[starts.to(text.device)[:, None] + torch.arange(context + 1, device=text.device)].long()
    return found[:, :-1], found[:, 1:]


class Run:
    """A training run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.device = options, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.text = load_text(options, self.device)
        self.model = make_model(options, self.text.train.cpu()).to(self.device)
        self.call = torch.compile(self.model) if options.compile else self.model
        self.optimizer = torch.optim.AdamW(self.groups(), options.lr, betas=(0.9, 0.95))
        self.rate = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.share)
        self.order = torch.Generator().manual_seed(options.seed)
        self.gradients: Callable[[Tensor, Tensor], Tensor] = self._gradients

    def groups(self) -> list[dict[str, Any]]:
        """Weight decay on matrices only, and a rate of their own for all else: scales and shifts."""
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        rate = self.options.lr * self.options.scale_rate
        return [
            {"params": matrices, "weight_decay": self.options.decay},
            {"params": others, "weight_decay": 0.0, "lr": rate},
        ]

    def share(self, step: int) -> float:
        """Of the peak rate: up in a line, down to a tenth along a cosine."""
        if step < self.options.warmup:
            return (step + 1) / self.options.warmup
        left = 1 - (step - self.options.warmup) / max(1, self.options.steps - self.options.warmup)
        return 0.1 + 0.45 * (1 - math.cos(math.pi * left))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.call(F.one_hot(x, 256).float())
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def train(self) -> dict[str, Any]:
        """All steps, and the result."""
        history: list[dict[str, Any]] = []
        for done in range(0, self.options.steps, self.options.every):
            count = min(self.options.every, self.options.steps - done)
            start = time.perf_counter()
            loss = self.steps(count)
            seconds = (time.perf_counter() - start) / count
            history.append({"step": done + count, "loss": loss, "validation": self.validation(), "seconds": seconds})
            print("  ".join(f"{name} {value:.5g}" for name, value in history[-1].items()), flush=True)
            if not math.isfinite(loss + history[-1]["validation"]):
                history[-1] |= {"loss": None, "validation": None}
                break
        memory = torch.cuda.max_memory_allocated() / 2**20 if self.device.type == "cuda" else None
        judged = "test" if self.options.test else "held out"
        return {
            **{name: getattr(self.options, name) for name in SETTINGS},
            **{"text": self.text.hash, "parameters": sum(p.numel() for p in self.model.parameters())},
            **{judged: history[-1]["validation"], "seconds": statistics.median(part["seconds"] for part in history)},
            **{"peak MiB": memory and round(memory), "history": history},
        }

    def steps(self, count: int) -> float:
        """Some steps; their mean loss."""
        total = torch.zeros((), device=self.device)
        for _ in range(count):
            last = len(self.text.train) - self.options.context
            starts = torch.randint(last, (self.options.batch,), generator=self.order)
            batch = windows(self.text.train, starts, self.options.context)
            if self.options.graph and self.gradients == self._gradients:
                self.gradients = captured_step(self._gradients, *batch)
            total += self.gradients(*batch)
            self.optimizer.step()
            self.rate.step()
        return float(total) / count

    def _gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss; its gradients are in the parameters."""
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        return loss.detach()

    @torch.no_grad()
    def validation(self) -> float:
        """The mean loss on windows from all over the bytes to judge by, always the same ones."""
        self.model.eval()
        places = torch.linspace(0, len(self.text.judged) - self.options.context - 1, self.options.windows).long()
        parts = places.split(self.options.batch)
        found = [self.loss(*windows(self.text.judged, part, self.options.context)) * len(part) for part in parts]
        self.model.train()
        return float(sum(found)) / len(places)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", choices=[*NORMS, "analytic", "none"], default="analytic")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=1e-3, help="at the peak")
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--decay", type=float, default=0.1, help="of matrices, times the rate")
    parser.add_argument("--clip", type=float, default=1.0, help="norm of the gradient")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes", type=int, default=40_000_000, help="of text, if there are so many")
    parser.add_argument("--windows", type=int, default=2048, help="of the held-out text to judge by")
    parser.add_argument("--every", type=int, default=200, help="steps from one validation to the next")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graph", action="store_true", help="replay a CUDA graph instead of launching every kernel")
    parser.add_argument("--scale-rate", type=float, default=1.0, help="of scales and shifts, times --lr")
    parser.add_argument("--alpha", type=float, help="first value of DyT's or Derf's (default: as published)")
    parser.add_argument("--qk-norm", action="store_true", help="RMS norm of queries and keys, with any --norm")
    only = parser.add_argument_group("of the analytic normalization")
    only.add_argument("--form", choices=["paper", "deep"], default="deep")
    only.add_argument("--residual", type=float, default=1.0, help="first scale of what a branch adds to the stream")
    only.add_argument(
        "--weights", type=float, default=STD, help="first std of weights, which changes the steps and no output"
    )
    only.add_argument("--logits", type=float, default=1.0, help="first scale of the last layer")
    only.add_argument("--squash", action="store_true", help="tanh(x/2) where other norms stand, also with --norm none")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(json.dumps(Run(parse()).train()))
