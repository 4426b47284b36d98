"""The two forms of the normalization on the paper's network for MNIST: training and validation after a few epochs.

python -m benchmarks.forms [--data DIR] [--epochs 10] [--images 20000] [--seeds 3] [--json FILE]

Six hidden layers of 20 units, logistic as in the paper or rectified, batches of 128, Adam. Every form is trained at
every learning rate of the list from the same weights on the same batches, and reported at the rate with the lowest
final training loss; validation is on 5000 training images that nothing is trained on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop_lab.datasets import load
from varprop_lab.environment import provenance

ACTIVATIONS = {"logistic": nn.Sigmoid, "relu": nn.ReLU}
RATES = (0.003, 0.01, 0.03)
FORMS: tuple[Literal["paper", "deep"], ...] = ("paper", "deep")
HELD_OUT, BATCH, UNITS, LAYERS = 5000, 128, 20, 6


def network(activation: type[nn.Module], seed: int) -> nn.Sequential:
    """The paper's, with torch's own first weights."""
    torch.manual_seed(seed)
    sizes = (784, *[UNITS] * LAYERS)
    hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*hidden, nn.Linear(UNITS, 10))


def images(folder: Path | None, count: int) -> tuple[Tensor, ...]:
    """Images and labels to train on, then those held out."""
    mnist = load("mnist", folder)
    x, y = mnist.train_x.flatten(1).float() / 255, mnist.train_y
    return x[:count], y[:count], x[-HELD_OUT:], y[-HELD_OUT:]


def train(model: nn.Module, rate: float, seed: int, data: tuple[Tensor, ...], epochs: int) -> dict[str, float]:
    """Train, and measure in evaluation mode."""
    x, y, valid_x, valid_y = data
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for chosen in order[: len(x) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        plain = vp.fold(model)
        valid = plain(valid_x)
        error = (valid.argmax(1) != valid_y).float().mean()
        return {
            "training loss": float(F.cross_entropy(plain(x), y)),
            "validation loss": float(F.cross_entropy(valid, valid_y)),
            "error": float(error),
        }


def options_of(description: str | None, epochs: int) -> argparse.Namespace:
    """What is given on the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    for option, default in (("epochs", epochs), ("images", 20_000), ("seeds", 3)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def write(path: Path | None, command: str, results: dict[str, Any]) -> None:
    """Results with what made them, if a file is asked for."""
    if path is not None:
        about = {
            **provenance(torch.device("cpu")),
            "command": f"{command} {shlex.join(sys.argv[1:])}",
            "rates": RATES,
        }
        path.write_text(json.dumps({**about, **results}, indent=1) + "\n")


def main() -> None:
    """Train all, print a line for each, and write JSON if asked."""
    options = options_of(__doc__, epochs=10)
    data = images(options.data, options.images)
    moments = vp.input_moments(data[0])
    results: dict[str, Any] = {}
    for activation, form, seed in itertools.product(ACTIVATIONS, FORMS, range(options.seeds)):
        found = {}
        for rate in RATES:
            model = vp.normalize(network(ACTIVATIONS[activation], seed), moments, form=form)
            found[rate] = train(model, rate, seed, data, options.epochs)
        best = min(found, key=lambda rate: found[rate]["training loss"])
        results.setdefault(f"{activation}, {form}", []).append({"seed": seed, "rate": best, **found[best]})
        print(activation, form, seed, best, {name: round(value, 4) for name, value in found[best].items()}, flush=True)
    for name, runs in results.items():
        means = {
            what: statistics.mean(one[what] for one in runs) for what in ("training loss", "validation loss", "error")
        }
        print(f"{name}: " + ", ".join(f"{what} {value:.4f}" for what, value in means.items()))
    write(options.json, "python -m benchmarks.forms", results)


if __name__ == "__main__":
    main()
