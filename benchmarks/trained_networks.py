"""Alarms on healthy trained networks: how many `vp.inspect` raises, and how far computed standard deviations are off.

python -m benchmarks.trained_networks [--seeds 2] [--json docs/results/trained_networks.json]

Small networks of several kinds are trained on scikit-learn's digits until they classify well. Of each: the findings of
an inspection without data and of one with the test images, and for every layer with weights the computed std over the
one on the images, and over the one of the trial on random inputs. A finding counts as false if the inspection with data
does not have one of its kind.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import varprop as vp

STANDARD, EXAMPLE = vp.Moments(0.0, 1.0), (1, 64)
HEALTHY = 0.85  # accuracy on images that were not trained on


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x)))


class Transformer(nn.Module):
    """The rows of an image are its tokens."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Linear(8, width), nn.Parameter(0.02 * torch.randn(8, width))
        settings: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 2 * width, **settings) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.view(-1, 8, 8)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def chain(width: int, depth: int, act: Callable[[], nn.Module]) -> nn.Module:
    sizes = [64, *[width] * depth]
    hidden = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), act())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def convolutions(width: int, depth: int, norm: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for index in range(depth):
        layers.append(nn.Conv2d(width if index else 1, width, 3, padding=1))
        layers += [nn.BatchNorm2d(width), nn.ReLU()] if norm else [nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if index == 1 else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * width, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "1 layer, ReLU": lambda: chain(256, 1, nn.ReLU),
    "3 layers, ReLU": lambda: chain(128, 3, nn.ReLU),
    "6 layers, ReLU": lambda: chain(64, 6, nn.ReLU),
    "4 layers, tanh": lambda: chain(128, 4, nn.Tanh),
    "3 layers, GELU": lambda: chain(128, 3, nn.GELU),
    "3 layers, SiLU": lambda: chain(96, 3, nn.SiLU),
    "2 layers, logistic": lambda: chain(64, 2, nn.Sigmoid),
    "3 convolutions": lambda: convolutions(16, 3),
    "5 convolutions": lambda: convolutions(24, 5),
    "3 convolutions, batch norm": lambda: convolutions(16, 3, norm=True),
    "residual blocks": lambda: nn.Sequential(nn.Linear(64, 64), *(Residual(64) for _ in range(3)), nn.Linear(64, 10)),
    "transformer": lambda: Transformer(),
}


def digits() -> tuple[Tensor, Tensor]:
    loaded = load_digits()
    x = torch.tensor(loaded.data, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - x.mean()) / x.std())[order], torch.tensor(loaded.target)[order]


def trained(name: str, seed: int, steps: int, rate: float) -> tuple[nn.Module, float]:
    """A network after some steps of Adam, in evaluation mode, and its accuracy on the last 297 images."""
    torch.manual_seed(seed)
    model, (x, y) = NETWORKS[name](), digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        chosen = torch.randint(0, 1500, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return model, float((model(x[1500:]).argmax(1) == y[1500:]).float().mean())


def studied(name: str, seed: int, steps: int, rate: float) -> dict[str, Any]:
    model, accuracy = trained(name, seed, steps, rate)
    images = digits()[0][1500:]
    without = vp.inspect(model, STANDARD, example=EXAMPLE)
    measured = vp.inspect(model, STANDARD, example=EXAMPLE, check=images)
    layers = [(a, b) for a, b in zip(without.rows, measured.rows, strict=True) if a.weighted]
    alarms, seen = (
        [(one.kind, one.where) for one in report.findings if one.severity != "note"] for report in (without, measured)
    )
    kinds = {kind for kind, _ in seen}
    return {
        "network": name,
        "seed": seed,
        "steps": steps,
        "accuracy": accuracy,
        "alarms": alarms,
        "false": [alarm for alarm in alarms if alarm[0] not in kinds],
        "with data": [alarm for alarm in seen if alarm[0] != "disagreement"],
        "refuted": [one.kind for one in without.findings if "not on random inputs" in one.text],
        "computed over data": [round(b.numbers["std"] / b.measured["std"]["value"], 3) for _, b in layers],
        "computed over trial": [round(a.numbers["std"] / a.trial["std"]["value"], 3) for a, _ in layers],
    }


def line(record: dict[str, Any]) -> str:
    ratios = " ".join(
        f"{data:.2g}/{trial:.2g}"
        for data, trial in zip(record["computed over data"], record["computed over trial"], strict=True)
    )
    return (
        f"{record['network']}, seed {record['seed']}: accuracy {record['accuracy']:.2f}, alarms {record['alarms']}, "
        f"false {record['false']}, refuted by the trial {record['refuted']}, with data {record['with data']}; {ratios}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    records = []
    for name in NETWORKS:
        for seed in range(options.seeds):
            records.append(studied(name, seed, options.steps, options.rate))
            print(line(records[-1]), flush=True)
    healthy = [record for record in records if record["accuracy"] >= HEALTHY]
    wrong = sum(bool(record["false"]) for record in healthy)
    before = sum(bool(record["false"] or record["refuted"]) for record in healthy)
    print(f"{len(healthy)} of {len(records)} networks are healthy; false alarms on {wrong}, {before} without the trial")
    if options.json is not None:
        about = {
            "steps": options.steps,
            "rate": options.rate,
            "healthy": len(healthy),
            "false": wrong,
            "before": before,
        }
        options.json.write_text(json.dumps(about | {"networks": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
