"""DP-SGD on MNIST at one epsilon: no normalization, group norm, and the analytic normalization.

    python examples/private_training.py --root DATA    # prints a table, writes docs/results/private.json

The rate of each method is chosen from one grid by the accuracy on held-out training images (seed 0), then every seed is
trained with it. As usual, the search is not charged to epsilon. Methods that the record has already, by the same
settings, are not trained again. Needs `varprop[opacus,lab]`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import varprop as vp
from varprop.opacus import PrivacyEngine
from varprop_lab.data import datasets
from varprop_lab.environment import provenance

METHODS = ("none", "group norm", "analytic", "analytic, plain head")
MEAN, STD = 0.1307, 0.3081  # of MNIST's pixels, as published: public numbers, which the guarantee needs them to be
DELTA, BOUND = 1e-5, 1.0


def make_model(method: str) -> nn.Module:
    """A small convolutional network; group norm stands where the analytic normalization is, but for the last layer."""

    def normed(layer: nn.Module, channels: int) -> list[nn.Module]:
        return [layer, nn.GroupNorm(4, channels)] if method == "group norm" else [layer]

    model = nn.Sequential(
        *normed(nn.Conv2d(1, 8, 5, stride=2), 8),
        nn.ReLU(),
        *normed(nn.Conv2d(8, 16, 4, stride=2), 16),
        nn.ReLU(),
        nn.Flatten(),
        *normed(nn.Linear(16 * 25, 32), 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )
    if not method.startswith("analytic"):
        return model
    head = len(model) - 1
    only = None if method == "analytic" else [str(k) for k, m in enumerate(model) if k < head and list(m.parameters())]
    moments = vp.Moments(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1))  # of standardized pixels
    return vp.normalize(model, moments, example=torch.zeros(1, 1, 28, 28), form="paper", only=only)


def train(method: str, x: Tensor, y: Tensor, rate: float, seed: int, settings: argparse.Namespace) -> Any:
    """A privately trained model, and what it cost: epsilon and seconds."""
    torch.manual_seed(seed)
    model = make_model(method)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    engine = PrivacyEngine(accountant="rdp")
    twin, private, criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=settings.batch),
        target_epsilon=settings.epsilon,
        target_delta=DELTA,
        epochs=settings.epochs,
        max_grad_norm=BOUND,
        grad_sample_mode="ghost",
        criterion=nn.CrossEntropyLoss(),
    )
    start = time.perf_counter()
    for _ in range(settings.epochs):
        for data, labels in loader:
            private.zero_grad()
            criterion(twin(data), labels).backward()
            private.step()
    return model, engine.get_epsilon(DELTA), time.perf_counter() - start


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In percent."""
    model.eval()
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(2000), y.split(2000), strict=True))
    return 100 * right / len(x)


def standardized(images: Tensor) -> Tensor:
    return (images.float() / 255 - MEAN) / STD


def search(method: str, data: Any, settings: argparse.Namespace) -> dict[str, float]:
    """The accuracy on held-out images for every rate."""
    own, held_out = datasets.split(data, seed=0)
    x, y = standardized(data.train_x), data.train_y
    found = {}
    for rate in settings.rates:
        model, _, seconds = train(method, x[own], y[own], rate, 0, settings)
        found[str(rate)] = round(accuracy(model, x[held_out], y[held_out]), 2)
        print(f"{method:<11} rate {rate:<5} held out {found[str(rate)]:6.2f} %  ({seconds:.0f} s)", flush=True)
    return found


def measure(method: str, data: Any, rate: float, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Test accuracy of every seed, trained on all training images."""
    x, test = standardized(data.train_x), standardized(data.test_x)
    rows = []
    for seed in range(settings.seeds):
        model, epsilon, seconds = train(method, x, data.train_y, rate, seed, settings)
        row = {"seed": seed, "test": round(accuracy(model, test, data.test_y), 2), "epsilon": round(epsilon, 3)}
        rows.append({**row, "seconds": round(seconds, 1)})
        print(
            f"{method:<11} seed {seed}  test {row['test']:6.2f} %  epsilon {row['epsilon']}  ({seconds:.0f} s)",
            flush=True,
        )
    return rows


def summary(found: dict[str, Any]) -> str:
    """The table of docs/private.md."""
    lines = ["| method | rate | test accuracy | seeds | epsilon |", "|---|---|---|---|---|"]
    for method, each in found.items():
        tests = [row["test"] for row in each["runs"]]
        spread = f" ± {statistics.stdev(tests):.2f}" if len(tests) > 1 else ""
        seeds = ", ".join(f"{test:.2f}" for test in tests)
        epsilon = max(row["epsilon"] for row in each["runs"])
        lines.append(
            f"| {method} | {each['rate']} | {statistics.mean(tests):.2f}{spread} % | {seeds} | {epsilon:.2f} |"
        )
    return "\n".join(lines)


def already(file: Path, made: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run by the same settings has found."""
    record = json.loads(file.read_text("utf-8")) if file.exists() else {}
    methods: dict[str, Any] = record.pop("methods", {})
    return methods if record == made else {}


def main() -> None:
    """Search, train, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="where MNIST lies; else $VARPROP_DATA or the cache directory")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.03, 0.1, 0.3, 1.0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/private.json"))
    settings = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus' notes on secure mode
    data = datasets.load("mnist", settings.root)
    names = ("epsilon", "epochs", "batch", "seeds", "rates")
    made = {"delta": DELTA, "bound": BOUND, **{name: getattr(settings, name) for name in names}}
    found = already(settings.out, made)
    for method in METHODS:
        if method not in found:
            held_out = search(method, data, settings)
            rate = max(settings.rates, key=lambda rate: held_out[str(rate)])
            made_by = provenance(torch.device("cpu"))
            runs = measure(method, data, rate, settings)
            found[method] = {"rate": rate, "held_out": held_out, "runs": runs, "made by": made_by}
            settings.out.write_text(json.dumps({**made, "methods": found}, indent=1) + "\n", "utf-8")
    print(summary(found))


if __name__ == "__main__":
    main()
