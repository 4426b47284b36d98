"""The demonstration: one small convolutional network, three normalizations, small and large batches, in about a minute.

    varprop demo

Every normalization gets the same first weights, the same images in the same order, and the same rates to choose from.
The rate is chosen by the mean accuracy of all seeds on held-out images; the networks of that rate are judged by the
test images. All rates and seeds of a normalization train side by side as one network, whose groups of channels they
are: convolutions and all three normalizations keep groups apart.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.text_table import Table

from . import datasets
from .batches import scaled
from .environment import provenance, reproducible, write_atomically
from .figures import Figure, Panel, PlottedSeries, draw, line_style

METHODS = ("batch norm", "group norm", "analytic")
BATCHES = (2, 4, 32)
SEEDS = (0, 1, 2)
RATES = (0.002, 0.007, 0.02, 0.07)  # with batches of 2; in proportion to the root of the batch
EPOCHS = 2
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
WIDTH = 8  # channels of the first layer
NOISE = 0.1  # variance, on pixels between 0 and 1: clean digits are too easy to tell anything
HELD_OUT = 240
LOOK = {
    "batch norm": line_style("batch"),
    "group norm": {**line_style("group"), "dash": "dashdot"},
    "analytic": line_style("analytic"),
}


@dataclass(frozen=True)
class Digits:
    """Noisy images and labels to train on, to choose rates by, and to judge by."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Trained:
    """A normalization at one batch size."""

    method: str  # one of `METHODS`
    batch: int  # images in a step
    rate: float  # the rate of the highest mean accuracy on held-out images
    at_edge: bool  # true if that is the lowest or the highest of the rates
    held_out: dict[float, list[float]]  # accuracy of every seed on held-out images, by rate
    test: list[float]  # accuracy of every seed on the test images, at that rate
    seconds: float = field(compare=False)  # for all rates and seeds together


def load() -> Digits:
    """Return scikit-learn's digits, with their mean taken off and noise added."""
    digits = datasets.load("digits")
    generator = torch.Generator().manual_seed(0)
    train, test = scaled(digits.train_x), scaled(digits.test_x)
    mean = train.mean()
    noisy = [x - mean + math.sqrt(NOISE) * torch.randn(x.shape, generator=generator) for x in (train, test)]
    order = torch.randperm(len(train), generator=generator)
    chosen, others = order[:HELD_OUT], order[HELD_OUT:]
    labels = digits.train_y
    return Digits((noisy[0][others], labels[others]), (noisy[0][chosen], labels[chosen]), (noisy[1], digits.test_y))


def network(method: str, seed: int, count: int = 1) -> nn.Sequential:
    """Return three convolutions, each with a normalization and ReLU, and a linear layer; weights depend on the seed.

    With a `count` it is as many networks, groups of channels of one.
    """
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, 2 * WIDTH)):
        shape: dict[str, Any] = {"kernel_size": 3, "stride": 2, "padding": 1, "groups": count}
        layers.append(nn.Conv2d(count * inputs, count * outputs, **shape, bias=method == "analytic"))  # norms have one
        if method == "batch norm":
            layers.append(nn.BatchNorm2d(count * outputs))
        elif method == "group norm":
            layers.append(nn.GroupNorm(2 * count, count * outputs))
        layers.append(nn.ReLU())
    head = nn.Conv2d(2 * WIDTH * count, 10 * count, 1, groups=count)  # linear: the average leaves one position
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), head, nn.Flatten())


@torch.no_grad()
def joined(method: str, seeds: Sequence[int]) -> nn.Sequential:
    """Return one network that has the networks of these seeds side by side."""
    model = network(method, 0, len(seeds))
    apart = [network(method, seed).parameters() for seed in seeds]
    for parameter, *parts in zip(model.parameters(), *apart, strict=True):
        parameter.copy_(torch.cat(parts))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def train(method: str, batch: int, digits: Digits, epochs: int = EPOCHS) -> Trained:
    """Train networks of all rates and seeds, and return their accuracies."""
    start = time.perf_counter()
    images, labels = digits.train
    rates = [float(f"{rate * math.sqrt(batch / BATCHES[0]):.2g}") for rate in RATES]
    members = [(rate, seed) for rate in rates for seed in SEEDS]
    model: nn.Module
    with torch.random.fork_rng():
        model = joined(method, [seed for _, seed in members])
    if method == "analytic":
        moments = vp.input_moments(images)
        mean, var = (moment.expand(1, len(members), 1, 1).clone() for moment in (moments.mean, moments.var))
        example = (batch, len(members), *images.shape[2:])
        model = vp.normalize(model, vp.Moments(mean, var), example=example, form="deep")
    model.train()
    momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
    steps = len(images) // batch
    for number in range(epochs):
        generators = [torch.Generator().manual_seed(1000 * seed + number) for _, seed in members]
        order = torch.stack([torch.randperm(len(images), generator=g) for g in generators], 1)  # images, networks
        for step, chosen in enumerate(order[: steps * batch].split(batch)):
            share = one_cycle(number * steps + step, steps * epochs)
            model.zero_grad(set_to_none=True)
            logits = model(images[chosen].squeeze(2)).unflatten(1, (len(members), -1))
            (F.cross_entropy(logits.flatten(0, 1), labels[chosen].flatten(), reduction="sum") / batch).backward()
            move_(model, momenta, torch.tensor([rate * share for rate, _ in members]))

    @torch.no_grad()
    def by_rate(images: Tensor, labels: Tensor) -> dict[float, list[float]]:
        logits = model.eval()(images.expand(-1, len(members), -1, -1)).unflatten(1, (len(members), -1))
        accuracies = iter((logits.argmax(2) == labels[:, None]).double().mean(0).tolist())
        return {rate: [next(accuracies) for _ in SEEDS] for rate in rates}

    held_out = by_rate(*digits.held_out)
    best = max(rates, key=lambda rate: statistics.mean(held_out[rate]))
    seconds = round(time.perf_counter() - start, 1)
    return Trained(method, batch, best, best in (rates[0], rates[-1]), held_out, by_rate(*digits.test)[best], seconds)


def one_cycle(step: int, steps: int) -> float:
    """Return the rate over the highest one, as `OneCycleLR` has it with a quarter of the steps up."""
    top, last = 0.25 * steps - 1, steps - 1
    rising = (1 / 25, 1.0, step / top if top else 1.0)  # of 4 steps the first is the top
    start, end, part = rising if step <= top else (1.0, 1 / 25e4, (step - top) / (last - top))
    return end + (start - end) / 2 * (1 + math.cos(math.pi * part))


@torch.no_grad()
def move_(model: nn.Module, momenta: Sequence[Tensor], rates: Tensor) -> None:
    """Make a step of SGD with Nesterov momentum, every network at its rate; scales and shifts do not decay."""
    for parameter, momentum in zip(model.parameters(), momenta, strict=True):
        gradient = parameter.grad
        assert gradient is not None
        if parameter.numel() > len(parameter):
            gradient = gradient.add(parameter, alpha=WEIGHT_DECAY)
        momentum.mul_(MOMENTUM).add_(gradient)
        by_row = rates.repeat_interleave(len(parameter) // len(rates)).view(-1, *[1] * (parameter.ndim - 1))
        parameter.sub_(by_row * gradient.add(momentum, alpha=MOMENTUM))


def table(results: list[Trained]) -> Table:
    """Return a row for every batch size and normalization."""
    rows = [
        [
            str(result.batch),
            result.method,
            f"{result.rate:g}{' (at the edge)' if result.at_edge else ''}",
            f"{100 * statistics.mean(result.test):.1f}",
            f"{100 * min(result.test):.1f} to {100 * max(result.test):.1f}",
        ]
        for result in results
    ]
    return Table("", ["batch", "normalization", "rate", "test accuracy, %", "seeds"], rows, left=("normalization",))


def answer(results: list[Trained]) -> str:
    """Return the result in plain words: how far each normalization falls from the largest batch to the smallest."""
    small, large = min(result.batch for result in results), max(result.batch for result in results)
    accuracies = {(result.method, result.batch): result.test for result in results}
    sentences = []
    for method in METHODS:
        first, last = accuracies[method, large], accuracies[method, small]
        change = 100 * (statistics.mean(last) - statistics.mean(first))
        if max(last) < min(first) or min(last) > max(first):
            words = f"{'loses' if change < 0 else 'gains'} {abs(change):.1f} points, more than its seeds differ"
        else:
            words = f"changes by {change:+.1f} points, no more than its seeds differ"
        sentences.append(f"From batches of {large} to batches of {small}, {method} {words}.")
    batch, analytic = accuracies["batch norm", small], accuracies["analytic", small]
    ahead = 100 * (statistics.mean(analytic) - statistics.mean(batch))
    apart = min(analytic) > max(batch) or max(analytic) < min(batch)
    certain = "in every seed" if apart else "which these seeds do not decide"
    where = "ahead of" if ahead >= 0 else "behind"
    sentences.append(f"With batches of {small}, analytic is {abs(ahead):.1f} points {where} batch norm, {certain}.")
    return "\n".join(sentences)


def explanation(seconds: float) -> str:
    """Return what was done, for the report."""
    return f"""\
What was trained: three convolutions of stride 2 with ReLU and a linear layer, on scikit-learn's digits with noise,
{EPOCHS} epochs, {len(SEEDS)} seeds, in {seconds:.0f} s. Behind the last convolution an image has one position left, so
that batch norm has as many values there as the batch has images. In networks with many positions it falls less.

Starts: networks of one seed have the same first weights and see the same images in the same order. Batch and group norm
start with scale 1 and shift 0. The analytic normalization divides every layer by the standard deviation that follows
from its weights and the moments of the data. It starts with scale 1 and a shift at which ReLU lets errors of scale die
out, 0.377.

Rates: the same {len(RATES)} for all, chosen by the mean accuracy on held-out images. The test images only judge."""


def figure(results: list[Trained]) -> Figure:
    """Return test accuracy over the batch size; bands from the lowest to the highest seed."""
    series = []
    for rank, method in enumerate(METHODS):
        chosen = [result for result in results if result.method == method]
        percent = [[100 * accuracy for accuracy in result.test] for result in chosen]
        sizes = tuple(float(result.batch) for result in chosen)
        means = tuple(map(statistics.mean, percent))
        low, high = (tuple(map(extreme, percent)) for extreme in (min, max))
        series.append(
            PlottedSeries(method, **LOOK[method], x=sizes, y=means, low=low, high=high, seeds=len(SEEDS), rank=rank)
        )
    caption = "Every normalization at its best rate on held-out images; bands from the lowest to the highest seed."
    labels = "batch size", "test accuracy (%)"
    return Figure("demo", "Digits by batch size", caption, (Panel("", tuple(series)),), *labels, True, False)


def run(folder: Path, say: Callable[[str], None] = print, epochs: int = EPOCHS) -> list[Trained]:
    """Train everything, and write ``report.md``, ``demo.png``, ``demo.svg`` and ``demo.json`` into a folder."""
    digits, results, start = load(), [], time.perf_counter()
    for batch in BATCHES:
        for method in METHODS:
            with reproducible(torch.device("cpu")):
                results.append(train(method, batch, digits, epochs))
            mean = 100 * statistics.mean(results[-1].test)
            say(f"batches of {batch}, {method}: {mean:.1f} % ({results[-1].seconds:.0f} s)")
    about = explanation(time.perf_counter() - start)
    folder.mkdir(parents=True, exist_ok=True)
    records = {**provenance(torch.device("cpu")), "results": [asdict(result) for result in results]}
    write_atomically(folder / "demo.json", json.dumps(records, indent=1).encode())
    draw(figure(results), folder / "demo")
    pieces = ["# Small batches", answer(results), table(results).markdown(), "![accuracy](demo.png)", about]
    write_atomically(folder / "report.md", ("\n\n".join(pieces) + "\n").encode())
    say(f"\n{answer(results)}\n\n{table(results).plain()}\n\n{about}\n")
    return results
