"""How often `Prediction.reliable` is right: samples that it flags, and samples whose std is off by more than 10 %.

    python -m benchmarks.error_marks run RECORDS [--data DIR] [--noise weights] [--max-seconds N] [--tiny]
    python -m benchmarks.error_marks show RECORDS      # the table, as Markdown

Small networks are trained on scikit-learn's digits and on MNIST, and predict 16 test samples each under dropout, input
noise and noise of the weights, every one at three strengths. The limits were chosen on `CHOSEN_ON` and seed 0; other
seeds and other architectures are held out. RECORDS is a file of JSON lines; what it has is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.error_bars import (
    Attention,
    Block,
    Case,
    Task,
    Transformer,
    about,
    captured,
    cnn,
    draws_of,
    mlp,
    task_of,
    train,
)
from torch import Tensor, nn

import varprop as vp
from varprop.predict.reliability import Grounds, holds
from varprop.text_table import Table

DRAWS, SAMPLES = 500, 16
TOGETHER = 20  # draws in a batch, of noise that every sample draws for itself
LEVELS = {"dropout": (0.1, 0.3, 0.5), "input": (0.1, 0.3, 1.0), "weights": (0.01, 0.05, 0.2)}


def small_cnn(act: Callable[[], nn.Module], widths: tuple[int, ...], pool: Callable[[int], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in zip((1, *widths), widths, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), act(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, pool(2), nn.Flatten(), nn.Linear(16 * widths[-1], 10))


def small_resnet(widths: tuple[int, ...]) -> nn.Module:
    stem = [nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    pairs = zip((widths[0], *widths), widths, strict=False)
    blocks = [Block(before, after, 2 if after > before else 1, 0.2) for before, after in pairs]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


class Rows(nn.Module):
    """The rows of a small image through a recurrent layer, or several."""

    def __init__(self, layer: type[nn.LSTM | nn.GRU | nn.RNN], width: int, columns: int, layers: int = 1) -> None:
        super().__init__()
        self.recurrent = layer(columns, width, layers, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.recurrent(self.dropout(x.squeeze(1)))[0][:, -1]))


class RowTransformer(nn.Module):
    """The rows of a small image as tokens of a transformer."""

    def __init__(self, depth: int, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Linear(8, width), nn.Parameter(0.02 * torch.randn(8, width))
        self.blocks = nn.Sequential(*(Attention(width, 0.2) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(x.squeeze(1)) + self.positions)).mean(1))


class ColourTransformer(Transformer):
    """The ViT of the error bars for one channel of 28 x 28 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1))


Network = tuple[str, float, Callable[[], nn.Module]]  # its data and epochs
CHOSEN_ON: dict[str, Network] = {
    "MLP, 2 layers": ("digits", 10, lambda: mlp(2, 0.2, 64, 10, 64)),
    "MLP, 4 layers": ("digits", 10, lambda: mlp(4, 0.2, 64, 10, 64)),
    "MLP, 8 layers": ("digits", 20, lambda: mlp(8, 0.2, 64, 10, 48)),
    "CNN, 2 layers": ("digits", 10, lambda: small_cnn(nn.ReLU, (8, 16), nn.MaxPool2d)),
    "CNN, 5 layers": ("digits", 15, lambda: small_cnn(nn.ReLU, (8, 8, 16, 16, 16), nn.AvgPool2d)),
    "ResNet, 3 blocks": ("digits", 10, lambda: small_resnet((8, 8, 16))),
    "ResNet, 6 blocks": ("digits", 10, lambda: small_resnet((8, 8, 16, 16, 32, 32))),
    "LSTM": ("digits", 20, lambda: Rows(nn.LSTM, 48, 8)),
    "transformer, 2 blocks": ("digits", 20, lambda: RowTransformer(2)),
    "transformer, 4 blocks": ("digits", 20, lambda: RowTransformer(4)),
    "MLP on MNIST": ("mnist", 1, lambda: mlp(3, 0.2)),
    "CNN on MNIST": ("mnist", 0.5, cnn),
}
HELD_OUT: dict[str, Network] = {
    "MLP, 3 layers, wide": ("digits", 10, lambda: mlp(3, 0.2, 64, 10, 160)),
    "MLP, 6 layers": ("digits", 15, lambda: mlp(6, 0.2, 64, 10, 64)),
    "CNN, 3 layers, GELU": ("digits", 10, lambda: small_cnn(nn.GELU, (8, 16, 16), nn.AvgPool2d)),
    "CNN, 4 layers, maxima": ("digits", 15, lambda: small_cnn(nn.ReLU, (16, 16, 16, 16), nn.MaxPool2d)),
    "ResNet, 4 blocks": ("digits", 10, lambda: small_resnet((12, 12, 24, 24))),
    "ResNet, 8 blocks": ("digits", 10, lambda: small_resnet((8, 8, 8, 16, 16, 16, 32, 32))),
    "GRU": ("digits", 20, lambda: Rows(nn.GRU, 48, 8)),
    "RNN": ("digits", 20, lambda: Rows(nn.RNN, 48, 8)),
    "LSTM, 2 layers": ("digits", 20, lambda: Rows(nn.LSTM, 32, 8, 2)),
    "ResNet on MNIST": ("mnist", 0.3, lambda: small_resnet((8, 8, 16, 16))),
    "ViT on MNIST": ("mnist", 0.3, lambda: ColourTransformer(32, 2, 0.2)),
}


def plans() -> Iterator[tuple[str, int]]:
    """Networks and seeds, the largest held out ones last."""
    small = [name for name in HELD_OUT if HELD_OUT[name][0] == "digits"]
    yield from ((name, 0) for name in [*CHOSEN_ON, *small])
    yield from ((name, 1) for name in CHOSEN_ON)
    yield from ((name, 0) for name in HELD_OUT if name not in small)


def has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) for module in model.modules())


def measured(
    name: str, seed: int, task: Task, tiny: bool, noises: Sequence[str] = tuple(LEVELS)
) -> Iterator[dict[str, Any]]:
    """A trained network under noises: what its mark rests on, and predicted over true std, sample by sample."""
    data, epochs, build = {**CHOSEN_ON, **HELD_OUT}[name]
    torch.manual_seed(seed)
    model = build()
    train(model, task, epochs if data == "mnist" or tiny else 4 * epochs, tiny)  # of 1,400 images
    draws, samples = (50, 4) if tiny else (DRAWS, SAMPLES)
    x = task.test[SAMPLES * seed : SAMPLES * seed + samples].contiguous()
    for kind in noises:
        for level in LEVELS[kind]:
            dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
            for module in dropouts:
                module.p = level if kind == "dropout" else 0.0
            settings: dict[str, Any] = {"input_var": level**2} if kind == "input" else {}
            variances = {
                key: torch.full_like(p, level * float(p.detach().square().mean()))
                for key, p in model.named_parameters()
                if kind == "weights" and p.ndim > 1 and key.endswith("weight")
            }
            settings |= {"parameter_var": variances} if variances else {}
            found = vp.predict(captured(model, x), x, **settings)
            times = 1 if variances else min(TOGETHER, draws)
            many, noise = x.repeat(times, 1, 1, 1), level if kind == "input" else 0.0
            truth = draws_of(model, many, Case(build, data), variances, noise, draws // times)
            truth = truth.unflatten(1, (times, len(x))).flatten(0, 1)
            ratio = (found.var.sum(1) / truth.var(0).sum(1)).sqrt()
            assert found.diagonal_var is not None
            outputs, attends = torch.eye(found.mean.shape[1]), any(isinstance(m, Attention) for m in model.modules())
            grounds = Grounds.of(found.shares, found.diagonal_var, found.mean, outputs, attends)
            rows = zip(grounds.curved, grounds.explained, grounds.shared, grounds.dropped, ratio, strict=True)
            relative = found.var.sum(1) / (found.mean - found.mean.mean(1, keepdim=True)).square().sum(1)
            yield {
                "network": name, "seed": seed, "noise": kind, "level": level, "draws": draws,
                "samples": [[float(f"{value:.4g}") for value in row] for row in rows],
                "relative": [float(f"{value:.4g}") for value in relative],
                "bent": [float(f"{value:.4g}") for value in grounds.bent], "attends": attends, **about("cpu"),
            }  # fmt: skip


def marked(record: dict[str, Any], least: float = 0.1) -> tuple[Tensor, Tensor]:
    """For every sample whether it is flagged, and whether it is off by more than 10 %, or another share."""
    *shares, ratio = torch.tensor(record["samples"]).unbind(1)
    bent = torch.tensor(record.get("bent", [0.0] * len(ratio)))  # of networks without recurrent layers not recorded
    grounds = Grounds(*shares, torch.tensor(record["relative"]), bent, record.get("attends", False))
    return ~holds(grounds), (ratio - 1).abs() > least


def is_held_out(record: dict[str, Any]) -> bool:
    return record["seed"] > 0 or record["network"] in HELD_OUT


def share(part: Tensor, of: Tensor) -> str:
    return f"{100 * float((part & of).sum()) / int(of.sum()):.0f} %" if of.any() else "-"


def table(records: list[dict[str, Any]]) -> Table:
    """What is flagged and what is off, by what the limits were chosen on, and by noise."""
    rows = []
    for title, held_out in (("limits chosen on these", False), ("held out", True)):
        for kind in (*LEVELS, "all"):
            chosen = [r for r in records if is_held_out(r) is held_out and kind in (r["noise"], "all")]
            if chosen:
                flagged, off = (torch.cat(values) for values in zip(*map(marked, chosen), strict=True))
                everything = torch.ones_like(off)
                cells = [share(off, everything), share(flagged, everything), share(off, flagged), share(off, ~flagged)]
                far = torch.cat([marked(r, 0.2)[1] for r in chosen])
                rows.append([title, kind, str(len(off)), *cells, share(flagged, off), share(flagged, far)])
    titles = ["networks", "noise", "samples", "off", "flagged", "flagged that are off", "others that are off"]
    titles += ["off that are flagged", "off by 20 % that are flagged"]
    return Table("", titles, rows, left=titles[:2])


def main() -> None:
    """Measure, or show what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "show"])
    parser.add_argument("records", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--noise", choices=LEVELS, help="one kind alone")
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--tiny", action="store_true", help="a trial of a few steps on digits")
    options = parser.parse_args()
    lines = options.records.read_text().splitlines() if options.records.exists() else []
    records = [json.loads(line) for line in lines]
    if options.action == "show":
        print(table(records).markdown())
        return
    start, done = time.monotonic(), {(r["network"], r["seed"], r["noise"]) for r in records}
    torch.set_num_threads(1)
    tasks: dict[str, Task] = {}
    for name, seed in plans():
        data, _, build = {**CHOSEN_ON, **HELD_OUT}[name]
        noises = [
            noise
            for noise in LEVELS
            if options.noise in (None, noise) and (noise != "dropout" or has_dropout(build()))
            if (name, seed, noise) not in done
        ]
        if not noises or time.monotonic() - start > options.max_seconds:
            continue
        if data not in tasks:
            tasks[data] = digits() if data == "digits" else task_of("mnist", options.data, "cpu", options.tiny)
        found = list(measured(name, seed, tasks[data], options.tiny, noises))
        print(name, seed, f"{time.monotonic() - start:.0f} s", flush=True)
        with options.records.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in found)


def digits() -> Task:
    """The digits of scikit-learn, 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    x, y = (torch.tensor(values) for values in load_digits(return_X_y=True))
    x = ((x - x.mean()) / x.std()).float().view(-1, 1, 8, 8)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return Task(x[:1437], y[:1437], x[1437:], y[1437:], nn.functional.cross_entropy)


if __name__ == "__main__":
    main()
