"""How true the predicted standard deviations stay while a ResNet trains on CIFAR-10.

python benchmarks/truth_of_sigma.py [--data DIR] [--json docs/results/truth_of_sigma.json] [-- options of the example]

For every form of the normalization, after every epoch and for every normalized layer: the standard deviation measured
on training images, over the one that the layer was normalized to have (root mean square over its channels).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from varprop.norm.layers import Normalized
from varprop.text_table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_cifar import Run, parser

VARIANTS = {"deep form": ["--form", "deep"], "paper's form": ["--form", "paper"]}
IMAGES = 2000


@torch.no_grad()
def ratios(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Measured over predicted standard deviation of every normalized layer."""
    found: dict[str, float] = {}

    def hook(path: str, layer: Normalized) -> Any:
        def measure(_: nn.Module, __: Any, output: Tensor) -> None:
            channels = output.ndim - 1 if isinstance(layer, nn.Linear) else 1
            over = [axis for axis in range(output.ndim) if axis != channels]
            true, predicted = output.double().var(over, correction=0), layer.scale.double().square()
            found[path] = float((true.sum() / predicted.sum()).sqrt())

        return layer.register_forward_hook(measure)

    handles = [hook(path, layer) for path, layer in model.named_modules() if isinstance(layer, Normalized)]
    model(images)
    for handle in handles:
        handle.remove()
    return found


def followed(arguments: list[str]) -> dict[str, Any]:
    """Train; the ratios before the first epoch and after every one."""
    run = Run(parser().parse_args(arguments))
    images = run.data.train[0][:IMAGES]
    epochs = [ratios(run.model, images)]
    for epoch in range(run.options.epochs):
        run.history.append({"epoch": epoch + 1, "loss": run.epoch(epoch)})
        epochs.append(ratios(run.model, images))
        low, high = min(epochs[-1].values()), max(epochs[-1].values())
        print(f"epoch {epoch + 1}  loss {run.history[-1]['loss']:.4f}  ratios {low:.3f} to {high:.3f}", flush=True)
    return {"ratios": epochs, "history": run.history, "judged": run.accuracy()}


def shown(results: dict[str, Any]) -> str:
    """Lowest, median and highest layer of some epochs."""
    rows = []
    for name, result in results.items():
        last = len(result["ratios"]) - 1
        for epoch in sorted({min(epoch, last) for epoch in (0, 1, 2, 5, 10, last)}):
            values = sorted(result["ratios"][epoch].values())
            chosen = (values[0], values[len(values) // 2], values[-1])
            rows.append([name, str(epoch), *(f"{value:.2f}" for value in chosen)])
    return Table("", ["form", "epochs", "lowest", "median", "highest"], rows, left=("form",)).markdown()


def main() -> None:
    """Train every form, write and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path)
    chosen, further = options.parse_known_args()
    further = [one for one in further if one != "--"]
    results: dict[str, Any] = {}
    for name, form in VARIANTS.items():
        results[name] = followed([*form, *further])
        if chosen.json:
            chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    print(shown(results))


if __name__ == "__main__":
    main()
