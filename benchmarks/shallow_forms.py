"""The forms of the normalization in a shallow network with a global average, at constant rates in batches of 4.

python -m benchmarks.shallow_forms [--epochs 2] [--seeds 3] [--json FILE]

Three convolutions with batch norm and ReLU, a global average and a linear layer on scikit-learn's digits; SGD with
momentum 0.9. `default` is the form that is chosen where none is asked for: here the paper's, with the average as one
position.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop_lab.batches import scaled
from varprop_lab.datasets import load
from varprop_lab.environment import provenance

RATES = (0.005, 0.02)
FORMS: dict[str, Any] = {"paper": "paper", "default": None, "deep": "deep"}
NAMES = ("batch norm", *FORMS)
BATCH, WIDTH, FIRST_STEPS = 4, 16, 50


def network(form: str, seed: int, images: Tensor) -> nn.Module:
    """Return the network with batch norms, or normalized in a form."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))
    if form == "batch norm":
        return model
    return vp.normalize(model, vp.input_moments(images), form=FORMS[form])


def train(form: str, rate: float, seed: int, data: tuple[Tensor, ...], epochs: int) -> dict[str, Any]:
    """Return the accuracy after training, and the median norm of the first gradients."""
    x, y, test_x, test_y = data
    model, norms = network(form, seed, x), []
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for chosen in order[: len(x) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            if len(norms) < FIRST_STEPS:
                norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
            optimizer.step()
    with torch.no_grad():
        accuracy = float((model.eval()(test_x).argmax(1) == test_y).float().mean())
    about = {"form": form, "rate": rate, "seed": seed}
    return {**about, "accuracy": round(accuracy, 4), "gradient": round(statistics.median(norms), 2)}


def main() -> None:
    """Train all, print a line for each form and rate, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    digits = load("digits")
    mean = scaled(digits.train_x).mean()
    data = scaled(digits.train_x) - mean, digits.train_y, scaled(digits.test_x) - mean, digits.test_y
    runs = []
    for form, rate in itertools.product(NAMES, RATES):
        runs += [train(form, rate, seed, data, options.epochs) for seed in range(options.seeds)]
        print(form, rate, [(run["accuracy"], run["gradient"]) for run in runs[-options.seeds :]], flush=True)
    if options.json:
        options.json.write_text(json.dumps({**provenance(torch.device("cpu")), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
