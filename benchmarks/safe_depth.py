"""How deep a plain chain of layers stays in range right after `vp.init_`: random MLPs over Gaussian input.

python -m benchmarks.safe_depth [--widths 256 32] [--depth 100] [--seeds 3] [--samples 8192] [--json FILE]

For every layer: the standard deviation of its units over the samples (median and root mean square over the units) and
their second moment, in the median over the seeds; the safe depth is the last layer up to which the root mean square
stays in [0.9, 1.1]. And what the chain does to gradients: root mean square of those by the first layer's outputs over
that by the last ones, for a random gradient at the end, beside He's rule.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp
from varprop_lab.environment import provenance

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky relu 0.03": lambda: nn.LeakyReLU(0.03),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}
STARTS: dict[str, dict[str, Any]] = {
    "by depth": {},
    "first shift": {"shift": "first", "orthogonal": False},
    "mean 0": {"shift": False, "orthogonal": False},
    "center=False": {"center": False, "orthogonal": False},
    "He": {"center": False},
}
SHOWN = (1, 5, 10, 15, 20, 30, 40, 50, 70, 100)
RANGE = (0.9, 1.1)


def chain(activation: Callable[[], nn.Module], width: int, depth: int, seed: int) -> nn.Sequential:
    """Linear layers with torch's own random start, an activation after each but the last."""
    torch.manual_seed(seed)
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers[:-1])


def gradient_growth(net: nn.Sequential, samples: int, seed: int) -> float:
    """Gradients by the outputs of the first layer over those by the last layer's, as root mean squares."""
    generator = torch.Generator().manual_seed(2000 + seed)
    first = net[0](torch.randn(min(samples, 512), net[0].in_features, generator=generator))
    last = net[1:](first)
    weights = torch.randn(last.shape, generator=generator)
    (gradient,) = torch.autograd.grad(last, first, weights)
    return float((gradient.double().square().mean() / weights.double().square().mean()).sqrt())


def by_he(net: nn.Sequential) -> nn.Sequential:
    """He's rule for rectifiers: weights of variance 2 / n, no biases."""
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    return net


@torch.no_grad()
def measure(net: nn.Sequential, samples: int, seed: int) -> dict[str, list[float]]:
    """The true statistics of every linear layer's outputs."""
    x = torch.randn(samples, net[0].in_features, generator=torch.Generator().manual_seed(1000 + seed))
    found: dict[str, list[float]] = {"median std": [], "rms std": [], "median |mean|": [], "second moment": []}
    for part in net:
        x = part(x)
        if isinstance(part, nn.Linear):
            wide = x.double()
            var, mean = torch.var_mean(wide, 0)
            row = (var.sqrt().median(), var.mean().sqrt(), mean.abs().median(), wide.square().mean())
            for values, value in zip(found.values(), row, strict=True):
                values.append(float(value))
    return found


def safe_depth(stds: list[float]) -> int:
    """The last layer up to which every standard deviation lies in the range."""
    outside = (layer for layer, std in enumerate(stds) if not RANGE[0] <= std <= RANGE[1])
    return next(outside, len(stds))


def study(name: str, start: str, width: int, options: argparse.Namespace) -> dict[str, Any]:
    """All seeds of one activation; only the layers shown, and the safe depths."""
    moments = vp.Moments(torch.zeros(1, width), torch.ones(1, width))
    runs, gradients, center = [], [], STARTS[start].get("center", True)
    for seed in range(options.seeds):
        plain = chain(ACTIVATIONS[name], width, options.depth, seed)
        net = by_he(plain) if start == "He" else vp.init_(plain, moments, **STARTS[start])
        runs.append(measure(net, options.samples, seed))
        gradients.append(gradient_growth(net, options.samples, seed))
    shown = [layer for layer in SHOWN if layer <= options.depth]
    table: dict[str, Any] = {
        what: {layer: rounded(statistics.median(run[what][layer - 1] for run in runs)) for layer in shown}
        for what in runs[0]
    }
    table["second moment, seeds' extremes at any layer"] = [
        rounded(pick(pick(run["second moment"]) for run in runs)) for pick in (min, max)
    ]
    table["gradient of the first layer over the last"] = rounded(statistics.median(gradients))
    what = "rms std" if center else "second moment"
    tracks = [run[what] if center else [value**0.5 for value in run[what]] for run in runs]
    table["safe depth of each seed"] = [safe_depth(track) for track in tracks]
    middle = [statistics.median(values) for values in zip(*tracks, strict=True)]
    table["safe depth"] = safe_depth(middle)
    table["smallest and largest of any layer"] = [rounded(pick(middle)) for pick in (min, max)]
    table["of any seed"] = [rounded(pick(pick(track) for track in tracks)) for pick in (min, max)]
    return table


def rounded(value: float | Tensor) -> float:
    """To four digits, which is more than the seeds agree on."""
    return float(f"{float(value):.4g}")


def show(name: str, heading: str, table: dict[str, Any]) -> None:
    """A line of what the safe depth goes by."""
    what = "rms std" if "shift" in heading or "mean" in heading else "second moment"
    values = "  ".join(f"{layer}: {value:.3g}" for layer, value in table[what].items())
    growth = table["gradient of the first layer over the last"]
    depth = table["safe depth"]
    print(f"{name:<16} {heading:<24} safe depth {depth:>3}  gradient x {growth:<9.3g} {what:<14} {values}", flush=True)


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 32])
    for option, default in (("depth", 100), ("seeds", 3), ("samples", 8192)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begun = time.perf_counter()
    results: dict[str, Any] = {}
    for start in STARTS:
        for width in options.widths:
            for name in ACTIVATIONS:
                heading = f"{start}, width {width}"
                results.setdefault(heading, {})[name] = table = study(name, start, width, options)
                show(name, heading, table)
    if options.json:
        about = {
            **provenance(torch.device("cpu")),
            "command": shlex.join(["python", "benchmarks/safe_depth.py", *sys.argv[1:]]),
            "depth, seeds, samples": [options.depth, options.seeds, options.samples],
            "range of the safe depth": RANGE,
            "hardware": f"{cpu()}, {torch.get_num_threads()} thread(s), no GPU",
            "seconds": round(time.perf_counter() - begun),
        }
        options.json.write_text(json.dumps({**about, **results}, indent=1) + "\n")


def cpu() -> str:
    """The processor's name where the system tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    main()
