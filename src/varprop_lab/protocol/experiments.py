"""The experiments as plain values: what is trained, from where, on what, for how long."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.cli.models import unknown

from ..data.batches import Augmentation
from .records import ALL_METHODS, ALL_STARTS, METHODS, STARTS, Cell, Method, Start

PAPER_BATCH = 128
PAPER_LR_MAX = 1e-2
WIDE_LR_MAX = 1e-1

PAPER_GRIDS = ("mnist", "noisy-mnist", "noisy-cifar10")  # experiments with every method from every start

# Variants of a cell.
DOUBLE = "double"  # the weight of every linear layer is written as w = 2w'
DECAY = "decay"  # weight decay on weights whose scale does not matter
UNIT_NORM = "unit-norm"  # these weights are projected to unit norm after every step
MOMENTUM = "momentum"  # batch norm's running statistics take in a tenth as much of every batch

# A search by its name, as fields of `Protocol`: the paper's; one that noise does not lead astray so easily, which found
# the published rates; and the same that tries the bound.
SEARCHES: dict[str, dict[str, Any]] = {
    "brent": {"evaluations": 10, "grids": (), "try_bounds": False},
    "grid+brent": {"evaluations": 12, "grids": (4, 4), "try_bounds": False},
    "grid+brent+bound": {"evaluations": 12, "grids": (4, 4), "try_bounds": True},
}
OwnWeights = Literal["original", "converted"]
Borders = Literal["pooled", "plain"]
Combination = tuple[Method, Start, str]  # the last is the variant


class SettingError(vp.VarpropError, ValueError):
    """An experiment cannot have the settings asked for; the message says why."""


@dataclass(frozen=True)
class Protocol:
    """How every cell of an experiment is trained (Shekhovtsov & Flach 2018, sections 4 and 5)."""

    epochs: int = 50  # of the training that is reported
    decay: float = 0.96  # the learning rate in epoch k, counted from 0, is lr * decay^k
    lr_min: float = 1e-6  # the lower bound of the search
    search_epochs: int = 5  # the horizon of the search
    evaluations: int = 12  # at most so many in a search, those on grids included
    grids: tuple[int, ...] = (4, 4)  # rates tried before Brent's method, as for `vp.find_lr`; see `SEARCHES`
    try_bounds: bool = True  # as for `vp.find_lr`: one evaluation more where the best rate lies next to a bound
    remain: float = 0.1  # what is left, one epoch later, of the weight of a loss in the running mean
    weight_decay: float = 5e-4  # of the variant with decay
    checkpoint_epochs: int = 5  # state is kept after so many epochs, to resume from


@dataclass(frozen=True)
class Precision:
    """How a step is computed on a GPU; on a CPU it is float32 throughout."""

    half: bool = False  # matrix products in bfloat16, parameters and statistics in float32
    channels_last: bool = False  # the memory layout in which convolutions on tensor cores are fastest
    compiled: bool = False  # whether torch.compile is used


@dataclass(frozen=True)
class Experiment:
    """A comparison: every method from every start, with every seed, batch size and bound of the search."""

    name: str  # of the experiment and of its folder
    dataset: str  # as `datasets.load` knows it
    model: str  # as `models.build` knows it
    augmentation: Augmentation = field(default_factory=Augmentation)  # of the training images
    methods: tuple[Method, ...] = METHODS  # the parametrizations
    starts: tuple[Start, ...] = STARTS  # the starting points
    combinations: tuple[Combination, ...] = ()  # instead of all methods x starts, these
    seeds: tuple[int, ...] = (0,)  # of weights, split, augmentation and order
    batch_sizes: tuple[int, ...] = (PAPER_BATCH,)  # samples in a step
    # upper bounds of the search; without search, the learning rates themselves
    lr_max: tuple[float, ...] = (PAPER_LR_MAX,)
    search: bool = True  # whether learning rates are searched for
    lr_limit: float | None = None  # a bound at which the best rate lies is moved up, at most to here; None: it stays
    together: bool = True  # whether all cells are trained as one batched ensemble
    train_samples: int | None = None  # only so many training images are used; all by default
    # what a method trains from its own start (BN from ``bn``, AP2 from ``ap2``): the ``original`` weights with s and
    # b introduced, as the paper says, or the ``converted`` ones that all other methods get there. The function is the
    # same; the steps of Adam are not, for the weights differ in length
    own_weights: OwnWeights = "original"
    # how AP2 counts the zeros around images: ``pooled`` over positions, or not at all, with ``plain`` sums of kernels,
    # as the paper writes them
    borders: Borders = "pooled"
    protocol: Protocol = field(default_factory=Protocol)  # how each is trained
    # how a step is computed on a GPU, where cells are trained one at a time
    precision: Precision = field(default_factory=Precision)

    def cells(self) -> list[Cell]:
        """All its training runs, those of one seed and bound next to each other."""
        chosen = self.combinations or tuple(itertools.product(self.methods, self.starts, ("",)))
        return [
            Cell(self.name, method, start, seed, size, bound, variant)
            for size, bound, seed in itertools.product(self.batch_sizes, self.lr_max, self.seeds)
            for method, start, variant in chosen
        ]

    def configuration(self) -> dict[str, Any]:
        """The settings that two runs must share to belong together, as plain values."""
        return {name: value for name, value in asdict(self).items() if name not in _MAY_GROW}

    def adapted(
        self,
        seeds: int | None = None,
        epochs: int | None = None,
        lr_max: tuple[float, ...] | None = None,
        methods: tuple[Method, ...] | None = None,
        starts: tuple[Start, ...] | None = None,
        compiled: bool | None = None,
        own_weights: str | None = None,
        borders: str | None = None,
        search: str | None = None,
    ) -> Experiment:
        """A copy with other settings; those that are left out stay.

        Raises:
            SettingError: If a value is out of range, a name unknown, or no cell is left.
        """
        _require(seeds is None or seeds >= 1, f"seeds must be at least 1, got {seeds}.")
        _require(epochs is None or epochs >= 1, f"epochs must be at least 1, got {epochs}.")
        _require_known("search", search, SEARCHES)
        _require_known("own_weights", own_weights, get_args(OwnWeights))
        _require_known("borders", borders, get_args(Borders))
        protocol, least = self.protocol, self.protocol.lr_min
        if not self.search:  # a rate that is not searched for has no bound
            search = lr_max = None
        for rate in lr_max or ():
            _require(least < rate < math.inf, f"The largest learning rate must be above {least:g}, got {rate:g}.")
        if epochs is not None:
            protocol = replace(protocol, epochs=epochs, search_epochs=min(protocol.search_epochs, epochs))
        if search is not None:
            protocol = replace(protocol, **SEARCHES[search])
        changes: dict[str, Any] = {
            "protocol": protocol,
            "seeds": None if seeds is None else tuple(range(seeds)),
            "lr_max": None if lr_max is None else tuple(dict.fromkeys(lr_max)),
            "own_weights": own_weights,
            "borders": borders,
            "precision": None if compiled is None else replace(self.precision, compiled=compiled),
        }
        result = replace(self, **{name: value for name, value in changes.items() if value is not None})
        return result._only(methods or self.methods, starts or self.starts) if methods or starts else result

    def _only(self, methods: tuple[Method, ...], starts: tuple[Start, ...]) -> Experiment:
        check_names(methods, starts)
        chosen = tuple(c for c in self.combinations if c[0] in methods and c[1] in starts)
        names = f"the methods {', '.join(methods)} from the starts {', '.join(starts)}"
        _require(bool(chosen) or not self.combinations, f"{self.name} has no cells with {names}.")
        return replace(self, methods=methods, starts=starts, combinations=chosen)


# A run may be continued with more of these.
_MAY_GROW = {"seeds", "lr_max", "methods", "starts", "combinations", "batch_sizes"}


def check_names(methods: Sequence[str], starts: Sequence[str]) -> None:
    """Refuse methods and starts that do not exist."""
    for kind, names, available in (("method", methods, ALL_METHODS), ("start", starts, ALL_STARTS)):
        for name in names:
            _require(name in available, unknown(kind, name, available))


def _require_known(name: str, value: str | None, available: Collection[str]) -> None:
    _require(value is None or value in available, f"{name} must be one of {', '.join(available)}, got {value!r}.")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingError(message)


Factory = Callable[[], nn.Module]
Layers = Callable[..., list[nn.Module]]

# Kernel size, stride, and channels as multiples of the width; a last layer gives the classes.
_CONVOLUTIONS = ((3, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 2), (3, 1, 2), (3, 2, 2), (3, 1, 2), (1, 1, 2))


class LeakyRelu(nn.Module):
    """max(0, x) + 0.03 x, as the paper has it."""

    def forward(self, x: Tensor) -> Tensor:
        """The activation of every element."""
        return F.relu(x) + 0.03 * x


class GlobalAverage(nn.Module):
    """The mean over all positions."""

    def forward(self, x: Tensor) -> Tensor:
        """One value a channel."""
        return x.mean((2, 3))


class RowByRow(nn.Module):
    """A recurrent network that reads an image from top to bottom: h = tanh(W x + b + U h + c), classes from the last h.

    It is written with linear layers, so that every method can normalize after each of them. The first rows have no
    state before them and are read by W alone. Several rows are read at once: the statistics of every reading are
    propagated by themselves, so few readings train faster.
    """

    def __init__(self, columns: int = 28, rows: int = 4, units: int = 48, classes: int = 10) -> None:
        super().__init__()
        self.rows = rows
        self.input = nn.Linear(rows * columns, units)
        self.state = nn.Linear(units, units)
        self.output = nn.Linear(units, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        first, *later = images.squeeze(1).unflatten(1, (-1, self.rows)).flatten(2).unbind(1)
        state = torch.tanh(self.input(first))
        for strip in later:
            state = torch.tanh(self.input(strip) + self.state(state))
        scores: Tensor = self.output(state)
        return scores


def _alone(kind: type[nn.Module], *settings: int, **more: int) -> list[nn.Module]:
    return [kind(*settings, **more)]


def logistic(inputs: int, hidden: int, units: int = 20, classes: int = 10, layers: Layers = _alone) -> nn.Module:
    """Hidden layers of logistic units, fully connected.

    `layers` makes every layer but the last, with whatever is to follow it, from its kind and arguments.
    """
    modules: list[nn.Module] = [nn.Flatten()]
    for index in range(hidden):
        modules += [*layers(nn.Linear, units if index else inputs, units), nn.Sigmoid()]
    return nn.Sequential(*modules, nn.Linear(units, classes))


def convolutional(width: int = 96, classes: int = 10, layers: Layers = _alone) -> nn.Module:
    """The paper's network for CIFAR-10: nine convolutions, then the mean over positions; `layers` as of `logistic`."""
    modules: list[nn.Module] = []
    before = 3
    for kernel, stride, factor in _CONVOLUTIONS:
        modules += [*layers(nn.Conv2d, before, width * factor, kernel, stride, padding=kernel // 2), LeakyRelu()]
        before = width * factor
    return nn.Sequential(*modules, nn.Conv2d(before, classes, 1), GlobalAverage())


FACTORIES: dict[str, Factory] = {
    "digits": lambda: logistic(64, hidden=3),
    "mnist": lambda: logistic(784, hidden=6),
    "rows": RowByRow,
    "cifar10": convolutional,
}


def build(factory: str | Factory, seed: int, **placed: Any) -> nn.Module:
    """A network with PyTorch's default weights for a seed, drawn on the CPU, so that every device gets the same ones.

    The global generator is left as it was. `placed` is device and dtype, as for `nn.Module.to`.
    """
    make = FACTORIES[factory] if isinstance(factory, str) else factory
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
    if not isinstance(model, nn.Module):
        raise TypeError(f"The factory of the model must return an nn.Module, not {type(model).__name__}.")
    return model.to(**placed)
