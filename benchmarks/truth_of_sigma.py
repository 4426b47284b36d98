"""How true the predicted standard deviations stay while a ResNet trains on CIFAR-10, or a GPT on Python source.

python -m benchmarks.truth_of_sigma resnet [--json docs/results/truth_resnet.json] [options of examples/train_cifar.py]
python -m benchmarks.truth_of_sigma gpt [--json docs/results/truth_gpt.json] [options of examples/train_gpt.py]

For every form of the normalization, as training goes on and for every normalized layer: the standard deviation measured
on data, over the one that the layer was normalized to have (root mean square over its channels). A figure is drawn
beside the JSON file; `--draw` draws what a file has without training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import train_cifar
import train_gpt

from varprop.text_table import Table
from varprop_lab.figures import METHOD_COLOURS, OTHER_COLOUR, Figure, Panel, PlottedSeries, draw

from .ratios import ratios

VARIANTS = {"deep form": ["--form", "deep"], "paper's form": ["--form", "paper"]}
IMAGES = 2000  # training images that are measured on
WINDOWS = 64  # of held-out text


def followed_resnet(arguments: list[str]) -> list[dict[str, Any]]:
    """The loss and the ratios before the first epoch and after every one."""
    run = train_cifar.Run(train_cifar.parser().parse_args(arguments))
    images = run.data.train[0][:IMAGES]
    found: list[dict[str, Any]] = [{"trained": 0, "ratios": ratios(run.model, images)}]
    for epoch in range(run.options.epochs):
        loss = run.epoch(epoch)
        found.append({"trained": epoch + 1, "loss": loss, "ratios": ratios(run.model, images)})
        print(line(found[-1]), flush=True)
    return found


def followed_gpt(arguments: list[str]) -> list[dict[str, Any]]:
    """The same before the first step and after every `--every` ones."""
    run = train_gpt.Run(train_gpt.parse(["--norm", "analytic", *arguments]))
    places = torch.linspace(0, len(run.text.judged) - run.options.context - 1, WINDOWS).long()
    text, _ = train_gpt.windows(run.text.judged, places, run.options.context)

    def measured() -> dict[str, float]:
        with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
            return ratios(run.model, F.one_hot(text, 256).float())

    found: list[dict[str, Any]] = [{"trained": 0, "ratios": measured()}]
    for done in range(0, run.options.steps, run.options.every):
        loss = run.steps(run.options.every)
        found.append({"trained": done + run.options.every, "loss": loss, "ratios": measured()})
        print(line(found[-1]), flush=True)
    return found


def line(state: dict[str, Any]) -> str:
    """A state in few words."""
    values = state["ratios"].values()
    return f"{state['trained']}  loss {state['loss']:.4f}  ratios {min(values):.3f} to {max(values):.3f}"


def shown(results: dict[str, Any]) -> str:
    """Lowest, median and highest layer as training goes on."""
    rows = []
    for name, states in results.items():
        for state in states:
            values = sorted(state["ratios"].values())
            chosen = (values[0], values[len(values) // 2], values[-1])
            rows.append([name, str(state["trained"]), *(f"{value:.2f}" for value in chosen)])
    return Table("", ["form", "trained", "lowest", "median", "highest"], rows, left=("form",)).markdown()


def drawn(results: dict[str, Any], network: str, stem: Path) -> None:
    """The median of the layers as training goes on, and a band from the lowest to the highest."""
    unit = "epochs" if network == "resnet" else "steps"
    colours, series = (METHOD_COLOURS["analytic"], OTHER_COLOUR), []
    for (light, dark), (name, states) in zip(colours, results.items(), strict=False):
        layers = [sorted(state["ratios"].values()) for state in states]
        middle = tuple(values[len(values) // 2] for values in layers)
        low, high = (tuple(values[end] for values in layers) for end in (0, -1))
        trained = tuple(float(state["trained"]) for state in states)
        series.append(PlottedSeries(name, light, dark, "solid", "o", trained, middle, low, high))
    caption = "Median of the layers; bands reach from the lowest to the highest layer."
    panels = (Panel("", tuple(series)),)
    draw(Figure(stem.name, "True over predicted standard deviation", caption, panels, unit, "ratio"), stem)


def main() -> None:
    """Train every form, write, draw and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("network", choices=["resnet", "gpt"])
    options.add_argument("--json", type=Path)
    options.add_argument("--draw", action="store_true")
    chosen, further = options.parse_known_args()
    followed = followed_resnet if chosen.network == "resnet" else followed_gpt
    results: dict[str, Any] = json.loads(chosen.json.read_text()) if chosen.draw else {}
    for name, form in ({} if chosen.draw else VARIANTS).items():
        results[name] = followed([*form, *further])
        if chosen.json:
            chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    if chosen.json:
        drawn(results, chosen.network, chosen.json.with_suffix(""))
    print(shown(results))


if __name__ == "__main__":
    main()
