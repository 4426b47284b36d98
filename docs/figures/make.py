"""Make the figures of docs/idea.md: python docs/figures/make.py (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from torch import nn

import varprop as vp

matplotlib.use("svg")
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parent
BLUE, ORANGE, GREY = "#0064a8", "#d55e00", "#777777"
plt.rcParams.update({"font.size": 9, "svg.hashsalt": "varprop", "axes.spines.top": False, "axes.spines.right": False})


def save(figure: plt.Figure, name: str) -> None:
    """Write an SVG that is the same every time."""
    figure.savefig(FOLDER / name, metadata={"Date": None, "Creator": None})


def moments() -> None:
    """Histograms of samples at input, linear layer and ReLU, with the propagated Gaussians and moments."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(32, 1), nn.ReLU())
    with torch.no_grad():
        model[0].weight.mul_(4)
        model[0].bias.add_(0.3 - model[0](torch.full((1, 32), 0.5)).item())
    data = torch.rand(20_000, 32)
    result = vp.propagate(model, vp.input_moments(data))
    columns = [("input, one of 32", data[:, 0], None), ("linear layer", model[0](data)[:, 0], result["0"])]
    columns.append(("ReLU", model(data)[:, 0], result["1"]))
    figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.6), layout="constrained")
    for axis, (title, samples, computed) in zip(axes, columns, strict=True):
        samples = samples.detach()
        axis.hist(samples.numpy(), 60, density=True, color="#bbd3e6", label="20,000 samples")
        mean = 0.5 if computed is None else float(computed.mean.flatten()[0])
        std = (1 / 12) ** 0.5 if computed is None else float(computed.var.flatten()[0]) ** 0.5
        axis.axvline(mean, color=ORANGE, label="computed mean ± std")
        axis.axvspan(mean - std, mean + std, color=ORANGE, alpha=0.15)
        axis.set_title(
            f"{title}: {mean:.2f} ± {std:.2f}\nsamples: {samples.mean():.2f} ± {samples.std():.2f}", fontsize=9
        )
        axis.set_yticks([])
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    save(figure, "idea_moments.svg")


def batches() -> None:
    """The std of one unit as batches of several sizes estimate it, beside the computed one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    data = torch.rand(40_000, 32)
    outputs = model(data)[:, 0].detach()
    computed = float(vp.propagate(model, vp.input_moments(data)).output.var.detach().sqrt())
    sizes = [2, 4, 8, 16, 32, 64, 128, 256]
    estimates = [outputs[: len(outputs) // n * n].view(-1, n).var(1, correction=0).sqrt() for n in sizes]
    figure, axis = plt.subplots(figsize=(4.6, 2.6), layout="constrained")
    quantiles = torch.tensor([0.05, 0.5, 0.95])
    low, middle, high = zip(*(e.quantile(quantiles).tolist() for e in estimates), strict=True)
    axis.fill_between(sizes, low, high, color=BLUE, alpha=0.2, label="std of a batch, 90 % of batches")
    axis.plot(sizes, middle, "o-", color=BLUE, markersize=4, label="std of a batch, median")
    axis.axhline(float(outputs.std()), color=GREY, linestyle="dashed", label="std of the data")
    axis.axhline(computed, color=ORANGE, label="computed from the weights")
    axis.set(xscale="log", xlabel="batch size", ylabel="standard deviation of a unit", ylim=(0, None))
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.minorticks_off()
    axis.legend(fontsize=7, frameon=False, loc="lower right")
    save(figure, "idea_batches.svg")


if __name__ == "__main__":
    moments()
    batches()
