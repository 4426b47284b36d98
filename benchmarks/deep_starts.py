"""Which start trains deep chains best: depths 10, 30 and 100, with skips and without, four activations.

    python -m benchmarks.deep_starts run RECORDS [--data DIR] [--device cuda] [--max-seconds 240] [--tiny]
    python -m benchmarks.deep_starts show RECORDS      # the tables, as Markdown, and which start ranks first

MNIST, 10,000 training images, width 128. A chain is a first layer, hidden ones and a last one with an activation
between any two; with skips, pairs of layers are branches of a stream, h + W2 f(W1 h). Every start is trained with five
rates from three seeds; the rate is chosen by the loss on 5,000 held-out images, and the test images count for the
chosen rate alone. All networks of a cell (depth, skips, activation, optimizer) are trained together: their weights
are stacked, and a step is recorded as a CUDA graph. RECORDS is a file of JSON lines, one a cell; cells that it has are
not made again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from varprop.gaussian.stability import stable_shift
from varprop.norm.fold.layout import EPS
from varprop.text_table import Table
from varprop_lab.datasets import load
from varprop_lab.environment import provenance

Activation = Callable[[Tensor], Tensor]
Value = TypeVar("Value")
ACTIVATIONS: dict[str, Activation] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh}
RATES = {  # by optimizer and depth
    ("adam", 10): (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    ("adam", 30): (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    ("adam", 100): (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
    ("sgd", 10): (0.003, 0.01, 0.03, 0.1, 0.3),
    ("sgd", 30): (0.003, 0.01, 0.03, 0.1, 0.3),
    ("sgd", 100): (0.001, 0.003, 0.01, 0.03, 0.1),
}
GROWTHS = {
    "0.15": 0.15,
    "0.4": math.log(1.5),
    "1": 1.0,
    "2.5": 2.5,
}  # logarithms of what squared gradients may grow by from end to end


@dataclass(frozen=True)
class Cell:
    """Networks that are trained together."""

    depth: int
    skips: bool
    activation: str
    optimizer: str


@dataclass(frozen=True)
class Sizes:
    """How large and how long."""

    width: int = 128
    steps: int = 500
    batch: int = 128
    seeds: int = 3
    train: int = 10_000
    held_out: int = 5_000
    test: int = 10_000


TINY = Sizes(width=16, steps=20, batch=32, seeds=2, train=500, held_out=200, test=200)


def cells(depths: list[int]) -> list[Cell]:
    """All cells, the most telling first."""
    return [
        Cell(depth, skips, activation, optimizer)
        for optimizer, skips, depth, activation in itertools.product(
            ("adam", "sgd"), (False, True), depths, ACTIVATIONS
        )
    ]


def walk(
    x: Value,
    cell: Cell,
    linear: Callable[[int, Value], Value],
    activation: Callable[[Value], Value],
    add: Callable[[Value, Value], Value],
) -> Value:
    """Run a network, whatever its values are: samples, or their moments while weights are chosen."""
    h = linear(0, x)
    if not cell.skips:
        for layer in range(1, cell.depth):
            h = linear(layer, activation(h))
        return h
    for layer in range(1, cell.depth - 1, 2):
        h = add(h, linear(layer + 1, activation(linear(layer, h))))
    return linear(cell.depth - 1, h)


def feeds_activation(layer: int, cell: Cell) -> bool:
    """True if an activation reads the outputs of a layer."""
    return layer % 2 == 1 and layer < cell.depth - 1 if cell.skips else layer < cell.depth - 1


def reads_activation(layer: int, cell: Cell) -> bool:
    """True if a layer reads the outputs of an activation."""
    return layer % 2 == 0 and layer > 0 if cell.skips else layer > 0


# --- activations of Gaussian units ---

NODES = 4000  # of integrals over a standard normal variable, between -9 and 9; an even number has no node at 0


def nodes(count: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Points between -9 and 9 and their weights under a standard normal density."""
    z = torch.linspace(-9, 9, count, dtype=torch.float64, device=device)
    weights = torch.exp(-z.square() / 2)
    return z, weights / weights.sum()


def moments_after(f: Activation, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of f(mean + std Z)."""
    z, weights = nodes(NODES if mean.numel() < 1000 else NODES // 8, mean.device)
    values = f(mean.double()[..., None] + std.double()[..., None] * z)
    first = values @ weights
    return first, (values - first[..., None]).square() @ weights


def squared_slope(f: Activation, shift: float, std: float) -> float:
    """E f'(shift + std Z)^2."""
    z, weights = nodes(NODES)
    x = (shift + std * z).requires_grad_()
    (slope,) = torch.autograd.grad(f(x).sum(), x)
    return float(slope.square() @ weights)


def response(f: Activation, shift: float, std: float) -> tuple[float, float]:
    """What a layer of centred outputs multiplies squared gradients by (chi), and small errors of scale (lambda)."""
    b = torch.full((3,), shift, dtype=torch.float64)
    _, variance = moments_after(f, b, std * torch.tensor([0.99, 1.0, 1.01], dtype=torch.float64))
    chi = std**2 * squared_slope(f, shift, std) / float(variance[1])
    return chi, float((variance[2] / variance[0]).log()) / (2 * math.log(1.01 / 0.99))


def crossing(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that is positive at `low` and not at `high` changes its sign."""
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high


def shift_for(f: Activation, chi: float) -> float:
    """The smallest shift, at standard deviation 1, from which on squared gradients grow by no more than chi."""
    return crossing(lambda shift: response(f, shift, 1.0)[0] - chi, 0.0, 5.0)


@functools.cache
def shape_for(f: Activation, chi: float) -> tuple[float, float]:
    """Shift and standard deviation with chi, and lambda at most 1 at the shift nearest to 0 (deep kernel shaping)."""

    def std_for(shift: float) -> float:
        return crossing(lambda std: response(f, shift, std)[0] - chi, 2.0, 1e-3)

    if response(f, 0.0, std_for(0.0))[1] <= 1:
        return 0.0, std_for(0.0)
    shift = crossing(lambda b: response(f, b, std_for(b))[1] - 1, 0.0, 1.0)
    return shift, std_for(shift)


def slope_for(f: Activation, chi: float) -> float:
    """The share s for which f(y) - s f(-y) lets squared gradients grow by chi; 1 makes rectifiers linear."""
    return crossing(lambda s: response(lambda y: f(y) - s * f(-y), 0.0, 1.0)[0] - chi, 0.0, 1.0)


# --- starts ---


@dataclass
class Draws:
    """Weights (seeds, out, in) to start from: Gaussian of variance 1, or with orthonormal rows or columns."""

    seeds: int
    device: torch.device

    def gaussian(self, layer: int, out: int, inputs: int) -> Tensor:
        generators = [torch.Generator().manual_seed(1000 * seed + layer) for seed in range(self.seeds)]
        draws = [torch.randn(out, inputs, generator=generator) for generator in generators]
        return torch.stack(draws).to(self.device)

    def orthogonal(self, layer: int, out: int, inputs: int) -> Tensor:
        weight = self.gaussian(layer, out, inputs).cpu()
        q, r = torch.linalg.qr(weight if out >= inputs else weight.mT)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        return (q if out >= inputs else q.mT).to(self.device)


@dataclass
class Start:
    """The weights and biases of a start, (seeds, out, in) and (seeds, out) of each layer, chosen one after another.

    Attributes:
        cell: What is trained.
        sizes: The widths and the number of seeds.
        data: Training images, standardized, of which the first layer may know the moments.
        cache: Orthogonal weights that have been computed.
    """

    cell: Cell
    sizes: Sizes
    data: Tensor
    cache: dict[tuple[str, int, int, int], Tensor]

    def __post_init__(self) -> None:
        self.f = ACTIVATIONS[self.cell.activation]
        self.weights: list[Tensor] = []
        self.biases: list[Tensor] = []

    def draw(self, kind: str, layer: int, out: int, inputs: int) -> Tensor:
        key = kind, layer, out, inputs
        if key not in self.cache:
            self.cache[key] = getattr(Draws(self.sizes.seeds, self.data.device), kind)(layer, out, inputs)
        return self.cache[key].clone()

    def extents(self, layer: int) -> tuple[int, int]:
        width = self.sizes.width
        return 10 if layer == self.cell.depth - 1 else width, width if layer else self.data.shape[1]

    def set(self, weight: Tensor, bias: Tensor) -> None:
        self.weights.append(weight.float())
        self.biases.append(bias.float())

    @property
    def zero(self) -> Tensor:
        return torch.tensor(0.0, device=self.data.device)

    # by the fan alone, or by data

    def by_gain(self, kind: str, gain: float, zero_branches: bool = False) -> None:
        """Weights of a variance gain^2 / inputs behind activations and 1 / inputs elsewhere; no biases.

        Branches have a factor blocks^-1/2, or are zero.
        """
        blocks = (self.cell.depth - 2) // 2
        for layer in range(self.cell.depth):
            out, inputs = self.extents(layer)
            weight = self.draw(kind, layer, out, inputs)
            # orthonormal columns, where there are more rows than columns: the mean square of an entry is 1 / out
            size = 1.0 if kind == "gaussian" else 1 / math.sqrt(max(out, inputs))
            factor = (gain if reads_activation(layer, self.cell) else 1.0) / math.sqrt(inputs) / size
            if self.cell.skips and reads_activation(layer, self.cell):
                factor *= 0.0 if zero_branches else 1 / math.sqrt(blocks)
            self.set(weight * factor, self.zero.expand(self.sizes.seeds, out))

    def by_torch(self) -> None:
        """PyTorch's own: uniform weights of variance 1 / (3 inputs), and biases like them."""
        for layer in range(self.cell.depth):
            out, inputs = self.extents(layer)
            draws = self.draw("gaussian", layer, out, inputs + 1)
            uniform = torch.erf(draws / math.sqrt(2)) / math.sqrt(inputs)
            self.set(uniform[..., :-1], uniform[..., -1])

    def by_data(self) -> None:
        """LSUV: orthogonal weights, each layer scaled so that its outputs over a batch have variance 1."""

        def linear(layer: int, x: Tensor) -> Tensor:
            out, inputs = self.extents(layer)
            weight = self.draw("orthogonal", layer, out, inputs)
            y = x @ weight.mT
            std = y.flatten(1).std(1)[:, None, None]
            self.set(weight / std, self.zero.expand(self.sizes.seeds, out))
            return y / std

        samples = self.data[:1024].expand(self.sizes.seeds, -1, -1)
        walk(samples, self.cell, linear, self.f, torch.add)

    # by moments

    def by_moments(
        self,
        kind: str,
        choose: Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]],
    ) -> None:
        """Choose each layer by the mean and variance of what it reads, units independent.

        Args:
            kind: Of the weights that are drawn.
            choose: From a layer's number, its weight, and mean and variance of its inputs: weight, bias, and mean and
                variance of its outputs.
        """
        moments = tuple[Tensor, Tensor]

        def linear(layer: int, x: moments) -> moments:
            weight = self.draw(kind, layer, *self.extents(layer)).double()
            weight, bias, mean, variance = choose(layer, weight, *x)
            self.set(weight, bias)
            return mean, variance

        def activation(x: moments) -> moments:
            return moments_after(self.f, x[0], x[1].sqrt())

        data = self.data.double()
        first = data.mean(0).expand(self.sizes.seeds, -1), data.var(0).expand(self.sizes.seeds, -1)
        walk(first, self.cell, linear, activation, lambda a, b: (a[0] + b[0], a[1] + b[1]))

    def projected(self, kind: str, shift: float = 0.0, std: float = 1.0, branches: float = 1.0) -> None:
        """vp.init_: every unit of mean 0 and variance 1, and before activations of mean `shift` and deviation `std`."""

        def choose(layer: int, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            b, s = (shift, std) if feeds_activation(layer, self.cell) else (0.0, 1.0)
            s = s * branches if self.cell.skips and reads_activation(layer, self.cell) else s
            mu, sigma = self.outputs(weight, mean, variance)
            factor = s / sigma
            return weight * factor[..., None], b - mu * factor, torch.full_like(mu, b), torch.full_like(mu, s * s)

        self.by_moments(kind, choose)

    def second_moment(self, kind: str) -> None:
        """vp.init_(center=False): every unit of second moment 1, counted as mean 0 and variance 1; biases zero."""

        def choose(layer: int, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            none, size = self.outputs(weight, torch.zeros_like(mean), variance + mean.square())
            return weight / size[..., None], none, none, torch.ones_like(none)

        self.by_moments(kind, choose)

    def partly_centred(self, kind: str, growth: float) -> None:
        """Take off such a share of the means that squared gradients grow by exp(growth) from end to end.

        A layer is scaled as one, so that orthogonal weights stay so; the units before activations have second moment 1.
        """
        slope = squared_slope(self.f, 0.0, 1.0)

        def choose(layer: int, weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            mu, sigma = self.outputs(weight, mean, variance)
            rows = weight.square().sum(2).mean(1, keepdim=True)  # mean squares of the rows, 1 for orthonormal ones
            varies, constant = sigma.square().mean(1, keepdim=True) / rows, mu.square().mean(1, keepdim=True) / rows
            if reads_activation(layer, self.cell):
                wanted = slope / math.exp(growth / self.cell.depth)
                left = ((wanted - varies) / constant.clamp_min(1e-12)).clamp(0, 1).sqrt()
            else:
                left = torch.zeros_like(varies)
            factor = (rows * (varies + left.square() * constant)).rsqrt()
            bias = -(1 - left) * mu * factor
            return weight * factor[..., None], bias, mu * factor + bias, (sigma * factor).square()

        self.by_moments(kind, choose)

    @staticmethod
    def outputs(weight: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        mu = (weight @ mean[..., None])[..., 0]
        return mu, (weight.square() @ (variance + EPS)[..., None])[..., 0].sqrt()

    def paired(self, share: float) -> None:
        """Units in pairs y, -y, of which the next layer reads f(y) - share f(-y): an activation that is nearly linear.

        With share 1 a network of rectifiers is linear (Balduzzi et al. 2017); with less they are leaky, as those that
        Zhang et al. (2022) tailor. Orthogonal weights, centred, every unit of mean 0 and variance 1.
        """
        mean, variance = moments_after(
            lambda y: self.f(y) - share * self.f(-y), torch.zeros((), dtype=torch.float64), torch.ones(())
        )
        data, stream = self.data.double(), 1.0
        for layer in range(self.cell.depth):
            out, inputs = self.extents(layer)
            mirrored, reads = feeds_activation(layer, self.cell), reads_activation(layer, self.cell)
            weight = self.draw("orthogonal", layer, out // 2 if mirrored else out, inputs // 2 if reads else inputs)
            weight = weight.double()
            if layer == 0:
                read = data.mean(0).expand(len(weight), -1), data.var(0).expand(len(weight), -1)
            else:
                shape = weight.shape[0], weight.shape[2]
                spread = float(variance) if reads else stream
                read = (
                    torch.full(shape, float(mean) if reads else 0.0, dtype=torch.float64, device=data.device),
                    torch.full(shape, spread, dtype=torch.float64, device=data.device),
                )
            mu, sigma = self.outputs(weight, *read)
            weight, bias = weight / sigma[..., None], -mu / sigma
            weight = torch.cat([weight, -share * weight], 2) if reads else weight
            self.set(
                torch.cat([weight, -weight], 1) if mirrored else weight,
                torch.cat([bias, -bias], 1) if mirrored else bias,
            )
            stream += float(self.cell.skips and reads)


def starts(cell: Cell) -> dict[str, Callable[[Start], None]]:
    """All starts of a cell, by name."""
    f = ACTIVATIONS[cell.activation]
    one, none = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    mean, variance = moments_after(f, none, one)
    gain, odd = 1 / math.sqrt(float(variance + mean**2)), cell.activation == "tanh"
    first = stable_shift(lambda mean, std: moments_after(f, mean, std))
    result: dict[str, Callable[[Start], None]] = {
        "PyTorch": lambda start: start.by_torch(),
        "He": lambda start: start.by_gain("gaussian", gain),
        "orthogonal": lambda start: start.by_gain("orthogonal", gain),
        "LSUV": lambda start: start.by_data(),
    }
    if odd:
        result["Xavier"] = lambda start: start.by_gain("gaussian", 1.0)
        result["orthogonal, gain 1"] = lambda start: start.by_gain("orthogonal", 1.0)
    for kind in ("gaussian", "orthogonal"):
        if first:
            result[f"first shift, {kind}"] = lambda start, kind=kind: start.projected(kind, first)
        result[f"mean 0, {kind}"] = lambda start, kind=kind: start.projected(kind)
        result[f"second moment, {kind}"] = lambda start, kind=kind: start.second_moment(kind)
    if cell.skips:
        blocks = (cell.depth - 2) // 2
        result["zero branches"] = lambda start: start.by_gain("orthogonal", gain, zero_branches=True)
        for name, size in (("even", blocks**-0.5), ("small", 1 / blocks)):
            result[f"first shift, orthogonal, {name} branches"] = lambda start, size=size: start.projected(
                "orthogonal", first, branches=size
            )
        if not odd:
            result["linear by pairs"] = lambda start: start.paired(1.0)
        return result
    result["partly centred 1, orthogonal"] = lambda start: start.partly_centred("orthogonal", 1.0)
    for name, growth in GROWTHS.items():
        chi = math.exp(growth / cell.depth)
        for kind in ("orthogonal", "gaussian") if growth == 1 else ("orthogonal",):
            if not odd:
                result[f"shift by depth {name}, {kind}"] = lambda start, chi=chi, kind=kind: start.projected(
                    kind, shift_for(f, chi)
                )
            if cell.activation != "relu":
                result[f"shaped {name}, {kind}"] = lambda start, chi=chi, kind=kind: start.projected(
                    kind, *shape_for(f, chi)
                )
    if not odd:
        result["leaky by pairs 1"] = lambda start: start.paired(slope_for(f, math.exp(1 / cell.depth)))
        result["linear by pairs"] = lambda start: start.paired(1.0)
    return result


# --- training ---


class Data:
    """Standardized images of a device: for training, held out, for testing."""

    def __init__(self, sizes: Sizes, root: str | None, device: torch.device) -> None:
        mnist = load("mnist", root)
        order = torch.randperm(len(mnist.train_x), generator=torch.Generator().manual_seed(0))
        train, held_out = order[: sizes.train], order[sizes.train : sizes.train + sizes.held_out]
        raw = mnist.train_x[train].flatten(1).float()
        mean, std = raw.mean(), raw.std()

        def prepared(images: Tensor) -> Tensor:
            return ((images.flatten(1).float() - mean) / std).to(device)

        self.train = prepared(mnist.train_x[train]), mnist.train_y[train].to(device)
        self.held_out = prepared(mnist.train_x[held_out]), mnist.train_y[held_out].to(device)
        self.test = prepared(mnist.test_x[: sizes.test]), mnist.test_y[: sizes.test].to(device)


class Stack:
    """Networks of one form side by side: those of a rate one after another, the seeds of a start together.

    Attributes:
        parameters: For each layer its weights (networks, in, out), then its biases (networks, 1, out).
    """

    def __init__(self, cell: Cell, begins: list[Start], rates: tuple[float, ...], optimizer: str) -> None:
        self.cell, self.f, self.seeds = cell, ACTIVATIONS[cell.activation], begins[0].sizes.seeds
        weights = [torch.cat([start.weights[layer].mT for start in begins]) for layer in range(cell.depth)]
        biases = [torch.cat([start.biases[layer][:, None] for start in begins]) for layer in range(cell.depth)]
        self.first = [tensor for pair in zip(weights, biases, strict=True) for tensor in pair]
        device = self.first[0].device
        self.parameters = [tensor.repeat(len(rates), 1, 1).requires_grad_() for tensor in self.first]
        self.rates = torch.tensor(rates, device=device)
        self.per_rate = len(begins) * self.seeds
        self.networks = self.per_rate * len(rates)
        # views of the parameters, rate by rate: an optimizer has one rate for a tensor
        self.slices = [[p.detach()[self.of_rate(r)] for p in self.parameters] for r in range(len(rates))]
        self.moving_rates = [torch.zeros((), device=device) for _ in rates]
        groups = [{"params": group, "lr": rate} for group, rate in zip(self.slices, self.moving_rates, strict=True)]
        adam = torch.optim.Adam(groups, fused=True, capturable=device.type == "cuda")
        self.adam = adam if optimizer == "adam" else None
        # torch's SGD cannot be recorded in a CUDA graph
        self.momenta = [] if self.adam else [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self.restart()

    def of_rate(self, index: int) -> slice:
        return slice(index * self.per_rate, (index + 1) * self.per_rate)

    @torch.no_grad()
    def restart(self) -> None:
        """Back to the first weights, and nothing remembered of gradients."""
        for parameter, first in zip(self.parameters, self.first, strict=True):
            parameter.copy_(first.repeat(len(self.rates), 1, 1))
        states = self.adam.state.values() if self.adam else ()
        for tensor in [*self.momenta, *(value for state in states for value in state.values())]:
            tensor.zero_()

    def outputs(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:
        """Logits (networks, samples, 10) of images (networks, samples, pixels); `seen` collects outputs of layers."""

        def linear(layer: int, h: Tensor) -> Tensor:
            weight, bias = self.parameters[2 * layer : 2 * layer + 2]
            y = torch.baddbmm(bias, h, weight)
            if seen is not None:
                seen.append(y)
            return y

        return walk(x, self.cell, linear, self.f, torch.add)

    def losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of every network."""
        logits = self.outputs(x)
        return F.cross_entropy(logits.mT, labels, reduction="none").mean(1)

    def step(self, x: Tensor, labels: Tensor, left: Tensor) -> Tensor:
        """One step of all, gradients of each network clipped to norm 1; `left` is the share of steps that are left."""
        losses = self.losses(x, labels)
        gradients = list(torch.autograd.grad(losses.sum(), self.parameters))
        squares = [torch.linalg.vector_norm(gradient, dim=(1, 2)).square() for gradient in gradients]
        factor = (1 / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1)[:, None, None]
        gradients = [gradient.mul_(factor) for gradient in gradients]
        if self.adam is None:
            rates = (self.rates * left).repeat_interleave(self.per_rate)[:, None, None]
            with torch.no_grad():
                for parameter, momentum, gradient in zip(self.parameters, self.momenta, gradients, strict=True):
                    parameter.addcmul_(momentum.mul_(0.9).add_(gradient), rates, value=-1)
            return losses.detach()
        for index, (group, rate) in enumerate(zip(self.slices, self.moving_rates, strict=True)):
            rate.copy_(self.rates[index] * left)
            for view, gradient in zip(group, gradients, strict=True):
                view.grad = gradient[self.of_rate(index)]
        self.adam.step()
        return losses.detach()


def train(stack: Stack, data: Data, sizes: Sizes, eager: bool = False) -> Tensor:
    """Train all networks; the mean loss of every network over the last tenth of the steps."""
    images, labels = data.train
    generator = torch.Generator().manual_seed(1)
    order = torch.stack([
        torch.stack([torch.randperm(len(images), generator=generator)[: sizes.batch] for _ in range(sizes.seeds)])
        for _ in range(sizes.steps)
    ]).to(images.device)  # fmt: skip
    seed = torch.arange(stack.networks, device=images.device) % sizes.seeds
    step = torch.zeros(1, dtype=torch.long, device=images.device)
    tail = torch.zeros(stack.networks, device=images.device)
    last = max(1, sizes.steps // 10)

    def one() -> None:
        chosen = order[step][0]
        left = 1 - step[0] / sizes.steps
        losses = stack.step(images[chosen][seed], labels[chosen][seed], left)
        tail.add_(losses * (step >= sizes.steps - last) / last)
        step.add_(1)

    if eager or images.device.type != "cuda":
        for _ in range(sizes.steps):
            one()
        return tail
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one()
    stack.restart()
    step.zero_()
    tail.zero_()
    for _ in range(sizes.steps):
        graph.replay()
    torch.cuda.synchronize()
    return tail


@torch.no_grad()
def evaluated(stack: Stack, images: Tensor, labels: Tensor, batch: int = 500) -> tuple[Tensor, Tensor]:
    """Loss and accuracy of every network."""
    loss = torch.zeros(stack.networks, device=images.device)
    right = torch.zeros_like(loss)
    for begin in range(0, len(images), batch):
        x, y = images[begin : begin + batch], labels[begin : begin + batch]
        logits = stack.outputs(x.expand(stack.networks, -1, -1))
        y = y.expand(stack.networks, -1)
        loss += F.cross_entropy(logits.mT, y, reduction="none").sum(1)
        right += (logits.argmax(2) == y).sum(1)
    return loss / len(images), right / len(images)


def at_the_start(stack: Stack, data: Data) -> tuple[Tensor, Tensor]:
    """Gradient of the first layer's outputs over that of the last hidden ones, and the std of those over samples."""
    images, labels = (tensor[:128].expand(stack.networks, *[-1] * tensor.ndim) for tensor in data.train)
    seen: list[Tensor] = []
    logits = stack.outputs(images, seen)
    loss = F.cross_entropy(logits.mT, labels, reduction="sum")
    first, last = torch.autograd.grad(loss, [seen[0], seen[-2]])
    growth = first.double().square().mean((1, 2)).sqrt() / last.double().square().mean((1, 2)).sqrt()
    return growth, seen[-2].detach().var(1).mean(1).sqrt()


def study(cell: Cell, sizes: Sizes, data: Data, cache: dict[Any, Tensor], eager: bool = False) -> dict[str, Any]:
    """All starts of a cell: losses held out by rate, the rate chosen, and the test images for it."""
    begun = time.perf_counter()
    makers = starts(cell)
    begins = []
    for make in makers.values():
        begins.append(Start(cell, sizes, data.train[0], cache))
        make(begins[-1])
    rates = RATES[cell.optimizer, cell.depth if cell.depth in (10, 30, 100) else 10]
    stack = Stack(cell, begins, rates, cell.optimizer)
    growth, spread = at_the_start(stack, data)
    prepared = time.perf_counter()
    training = train(stack, data, sizes, eager)
    loss, accuracy = evaluated(stack, *data.held_out)
    tested = evaluated(stack, *data.test)
    shape = len(rates), len(makers), sizes.seeds
    training, loss, accuracy, growth, spread, *test = (
        tensor.view(shape).cpu() for tensor in (training, loss, accuracy, growth, spread, *tested)
    )
    result = {}
    for index, name in enumerate(makers):
        means = loss[:, index].mean(1).nan_to_num(math.inf, math.inf)
        best = int(means.argmin())
        result[name] = {
            "rate": rates[best],
            "held-out loss by rate": [_number(value) for value in means.tolist()],
            "held-out loss": _numbers(loss[best, index]),
            "held-out accuracy": _numbers(accuracy[best, index]),
            "training loss": _numbers(training[best, index]),
            "test loss": _numbers(test[0][best, index]),
            "test accuracy": _numbers(test[1][best, index]),
            "gradient, first over last": _numbers(growth[0, index]),
            "std over samples": _numbers(spread[0, index]),
        }
    return {
        "rates": rates,
        "starts": result,
        "seconds": [round(prepared - begun, 1), round(time.perf_counter() - prepared, 1)],
    }


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _numbers(values: Tensor) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


# --- the command line ---


def records(path: Path) -> list[dict[str, Any]]:
    """What a file of records has."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(options: argparse.Namespace) -> None:
    """Train all cells that the records do not have, as far as the time allows."""
    begun = time.perf_counter()
    device = torch.device(options.device)
    sizes = TINY if options.tiny else Sizes()
    data = Data(sizes, options.data, device)
    about = provenance(device) | ({"git": {"commit": options.commit}} if options.commit else {})
    had = [record["cell"] for record in records(options.records)]
    cache: dict[Any, Tensor] = {}
    longest: dict[int, float] = {}
    options.records.parent.mkdir(parents=True, exist_ok=True)
    for cell in cells(options.depths):
        if asdict(cell) in had or (options.optimizers and cell.optimizer not in options.optimizers):
            continue
        spent = time.perf_counter() - begun
        if spent + longest.get(cell.depth, 0.0) > options.max_seconds:
            print(f"no time left for {cell}", flush=True)
            continue
        result = study(cell, sizes, data, cache, options.eager)
        longest[cell.depth] = max(longest.get(cell.depth, 0.0), time.perf_counter() - begun - spent)
        record = {"cell": asdict(cell), "sizes": asdict(sizes), **result, **about}
        with options.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
        best = sorted(result["starts"].items(), key=lambda item: _mean(item[1]["held-out loss"]))[:3]
        names = ", ".join(f"{name} {_mean(row['held-out loss']):.3f}" for name, row in best)
        print(f"{cell}: {result['seconds']} s; {names}", flush=True)


def _mean(values: list[float | None]) -> float:
    """The mean; a loss that is not finite counts as that of a network that knows nothing."""
    return statistics.fmean(math.log(10) if value is None else value for value in values)


def main() -> None:
    """Run or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "show"])
    parser.add_argument("records", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--depths", type=int, nargs="+", default=[30, 100, 10])
    parser.add_argument("--optimizers", nargs="*", choices=["adam", "sgd"])
    parser.add_argument("--what", default="held-out loss", help="the number that show prints, as records name it")
    parser.add_argument("--commit", help="of the sources, where they are no repository")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="small networks, for a test")
    options = parser.parse_args()
    {"run": run, "show": show}[options.action](options)


# Where a start does not exist for an activation, the next one of its line is taken.
POLICIES: dict[str, tuple[str, ...]] = {
    "vp.init_": ("shaped 0.4, orthogonal", "shift by depth 1, orthogonal", "first shift, orthogonal, even branches"),
    "PyTorch": ("PyTorch",),
    "He (Xavier for tanh)": ("Xavier", "He"),
    "orthogonal, gain of He": ("orthogonal",),
    "orthogonal (gain 1 for tanh)": ("orthogonal, gain 1", "orthogonal"),
    "LSUV": ("LSUV",),
    "zero branches": ("zero branches",),
    **{
        f"{name}, {kind}": (f"{name}, {kind}", f"mean 0, {kind}")
        for name in ("first shift", "mean 0", "second moment")
        for kind in ("gaussian", "orthogonal")
    },
    "first shift, orthogonal, small branches": ("first shift, orthogonal, small branches",),
    "partly centred 1, orthogonal": ("partly centred 1, orthogonal",),
    "shift by depth 1, gaussian": ("shift by depth 1, gaussian", "shaped 1, gaussian"),
    "shaped 1, gaussian": ("shaped 1, gaussian", "shift by depth 1, gaussian"),
    **{
        f"{first} {growth}, orthogonal": (f"{first} {growth}, orthogonal", f"{second} {growth}, orthogonal")
        for first, second in (("shift by depth", "shaped"), ("shaped", "shift by depth"))
        for growth in GROWTHS
    },
    "leaky by pairs 1": ("leaky by pairs 1", "shaped 1, orthogonal"),
    "linear by pairs": ("linear by pairs", "shaped 1, orthogonal", "orthogonal, gain 1"),
}


def show(options: argparse.Namespace) -> None:
    """Print the tables of the records."""
    for optimizer, skips in itertools.product(("adam", "sgd"), (False, True)):
        chosen = [
            record
            for record in records(options.records)
            if (record["cell"]["optimizer"], record["cell"]["skips"]) == (optimizer, skips)
        ]
        if chosen:
            print(f"\n### {optimizer}, {'with' if skips else 'without'} skips\n\n{table(chosen, options.what)}")


def table(chosen: list[dict[str, Any]], what: str) -> str:
    """A number of every start by activation, for all depths; and how far the loss held out is from the best start's.

    The last columns rest on the loss held out: its ratio to the smallest of the cell, as a geometric mean over cells
    and in the worst of them, and the rank. The first start by that mean is at the top.
    """
    depths = sorted({record["cell"]["depth"] for record in chosen})
    names = [name for name in ACTIVATIONS if any(record["cell"]["activation"] == name for record in chosen)]
    by_cell = {(record["cell"]["activation"], record["cell"]["depth"]): record["starts"] for record in chosen}
    rows: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for policy, line in POLICIES.items():
        taken = {cell: next((row[start] for start in line if start in row), None) for cell, row in by_cell.items()}
        if None not in taken.values():
            rows[policy] = taken  # type: ignore[assignment]
    loss = {
        policy: {cell: _mean(row["held-out loss"]) for cell, row in taken.items()} for policy, taken in rows.items()
    }
    least = {cell: min(values[cell] for values in loss.values()) for cell in by_cell}
    ratios = {policy: [values[cell] / least[cell] for cell in by_cell] for policy, values in loss.items()}
    ranks = {
        policy: statistics.fmean(1 + sum(other[cell] < values[cell] for other in loss.values()) for cell in by_cell)
        for policy, values in loss.items()
    }
    lines = []
    for policy in sorted(rows, key=lambda policy: statistics.geometric_mean(ratios[policy])):
        cells_of = [
            " / ".join(_text(rows[policy], name, depth, what) for depth in depths if (name, depth) in by_cell)
            for name in names
        ]
        mean, worst = statistics.geometric_mean(ratios[policy]), max(ratios[policy])
        lines.append([policy, *cells_of, f"{mean:.2f}", f"{worst:.2f}", f"{ranks[policy]:.1f}"])
    heads = [f"{name} {' / '.join(map(str, depths))}" for name in names]
    columns = ["start", *heads, "over the best", "worst", "rank"]
    return Table("", columns, lines, left=["start"]).markdown()


def _text(rows: dict[tuple[str, int], dict[str, Any]], name: str, depth: int, what: str) -> str:
    return f"{_mean(rows[name, depth][what]):#.3g}"


if __name__ == "__main__":
    main()
