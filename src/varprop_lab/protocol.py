"""What is compared: experiments as plain values, their networks, cells and outcomes, and how these are named."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.cli.models import unknown

from .batches import Augmentation

Key = TypeVar("Key", bound=Hashable)
Method = Literal["standard", "weight", "batch", "analytic", "layer", "group"]
Start = Literal["none", "bn", "ap2", "orthogonal", "wn"]

METHODS: tuple[Method, ...] = ("standard", "weight", "batch", "analytic")  # of the paper
SAMPLE_NORMS: tuple[Method, ...] = ("layer", "group")  # they cannot begin from the same function as the others
ALL_METHODS: tuple[Method, ...] = (*METHODS, *SAMPLE_NORMS)
STARTS: tuple[Start, ...] = ("none", "bn", "ap2")  # of the paper
ALL_STARTS: tuple[Start, ...] = (*STARTS, "orthogonal", "wn")

# Names of the curves; one value an epoch, the first after epoch 1.
TRAIN_LOSS = "train_loss"  # running mean of the stochastic loss
TRAIN_EVAL_LOSS = "train_eval_loss"  # evaluation mode, training set
TRAIN_STILL_LOSS = "train_still_loss"  # likewise, but without offsets and flips, as validation images are
VALID_LOSS = "valid_loss"
VALID_ACCURACY = "valid_accuracy"  # missing where the targets are no classes
VALID_BATCH_LOSS = "valid_batch_loss"  # batch norm with the statistics of its batches
VALID_BATCH_ACCURACY = "valid_batch_accuracy"  # likewise


def exact(value: float) -> str:
    """A positive number in scientific form, ``1e-02`` or ``6.4e-03``, with the digits that tell it from all others."""
    forms = (f"{value:.{digits}e}" for digits in range(17))
    return next(form for form in forms if float(form) == value)


@dataclass(frozen=True)
class Cell:
    """One training run of a comparison."""

    experiment: str  # ``mnist``, ``noisy-mnist``, ``noisy-cifar10``, ...
    method: Method  # the parametrization trained
    start: Start  # the point all methods of one start begin from, as a function
    seed: int  # of weights, split, augmentation and order
    batch_size: int = 128  # samples in a step
    # the upper bound of the search for the learning rate; the rate itself where there was no search
    lr_max: float = 1e-2
    variant: str = ""  # what else distinguishes it: ``decay``, ``unit-norm``, ``double`` (w = 2w'), ...; mostly empty

    @property
    def key(self) -> str:
        """A name that is unique within its experiment and safe for a file."""
        fields = [self.method, self.start, f"s{self.seed}", f"b{self.batch_size}", f"lr{exact(self.lr_max)}"]
        return ".".join([*fields, self.variant] if self.variant else fields)


@dataclass(frozen=True)
class Search:
    """How the learning rate was found; `trace` has every evaluation as (lr, loss), infinite where it diverged."""

    lr: float
    loss: float
    trace: list[tuple[float, float]] = field(default_factory=list)
    at_bound: bool = False
    flat: bool = False
    diverged: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a cell."""

    cell: Cell
    search: Search  # of its learning rate
    curves: dict[str, list[float]]  # values by epoch, by the names above; they end early where training diverged
    test_loss: float  # on the official test set, once, at the end, in evaluation mode
    test_accuracy: float  # the same; NaN where the targets are no classes
    diverged: bool  # whether the loss became infinite or NaN in training, which is a result too
    start_gap: float  # largest difference of log-probabilities between this method at its start and the plain network
    seconds: float  # spent on it

    @property
    def bound(self) -> float:
        """The upper bound of the search: that of the cell, moved up by decades as far as rates were tried."""
        bound = self.cell.lr_max
        while max((rate for rate, _ in self.search.trace), default=0.0) > bound * (1 + 1e-9):
            bound *= 10
        return bound

    def last(self, curve: str) -> float | None:
        """The last value of a curve, None where there is none."""
        values = self.curves.get(curve)
        return values[-1] if values else None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outcome:
        """The outcome that `dataclasses.asdict` gave."""
        search = {**values["search"], "trace": [tuple(pair) for pair in values["search"]["trace"]]}
        return cls(**{**values, "cell": Cell(**values["cell"]), "search": Search(**search)}).checked()

    def checked(self) -> Outcome:
        """The outcome itself; raises unless all values are of the kind that everything here relies on."""
        cell, search = self.cell, self.search
        numbers = [cell.seed, cell.batch_size, cell.lr_max, search.lr, search.loss, self.start_gap, self.seconds]
        numbers += [self.test_loss, self.test_accuracy, *(value for pair in search.trace for value in pair)]
        numbers += [value for values in self.curves.values() for value in values]
        texts = [cell.experiment, cell.method, cell.start, cell.variant, *self.curves]
        if not all(isinstance(value, (int, float)) for value in numbers) or not all(isinstance(t, str) for t in texts):
            raise TypeError("it holds values of the wrong kind")
        if min(cell.batch_size, cell.lr_max, search.lr, *(rate for rate, _ in search.trace)) <= 0:
            raise ValueError("a batch size or a learning rate is not positive")
        return self


def grouped(outcomes: Iterable[Outcome], key: Callable[[Cell], Key]) -> dict[Key, list[Outcome]]:
    """Outcomes whose cells have the same key, in the order in which keys come first."""
    groups: dict[Key, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome.cell), []).append(outcome)
    return groups


METHOD_LABELS = {"standard": "Standard", "weight": "WN", "batch": "BN", "analytic": "AP2", "layer": "LN", "group": "GN"}
METHOD_MEANINGS = {
    "standard": "no normalization",
    "weight": "weight normalization",
    "batch": "batch normalization",
    "analytic": "analytic normalization",
    "layer": "layer normalization",
    "group": "group normalization",
}
START_NAMES = {"none": "None", "bn": "BN", "ap2": "AP2", "orthogonal": "orthogonal", "wn": "WN"}
VARIANT_LABELS = {"double": "w = 2w'", "decay": "decay", "unit-norm": "||w|| = 1", "momentum": "momentum 0.01"}
EXPERIMENT_LABELS = {
    "mnist": "MNIST",
    "noisy-mnist": "Noisy MNIST",
    "noisy-cifar10": "Noisy CIFAR-10",
    "naive": "Equal learning rates",
    "relu": "ReLU of a Gaussian",
    "small-batches": "Small batches",
    "orthogonal": "Orthogonal weights",
    "decay": "Decay or projection",
    "recurrent": "Recurrent network",
    "momentum": "Batch norm's momentum",
    "overfitting": "Overfitting",
    "still-mnist": "MNIST without offsets",
    "reparametrized": "w = 2w' with rates found",
    "digits": "Digits",
    "compare": "Comparison",
}


def method_label(method: str, variant: str = "", evaluation: bool = False) -> str:
    """``BN``, ``BN eval``, ``Standard, w = 2w'``."""
    name = METHOD_LABELS.get(method, method) + (" eval" if evaluation else "")
    return f"{name}, {VARIANT_LABELS.get(variant, variant)}" if variant else name


def start_label(start: str) -> str:
    """``init = None`` and so on, as in the paper."""
    return f"init = {START_NAMES.get(start, start)}"


def experiment_label(experiment: str) -> str:
    """The name of an experiment in a heading."""
    return EXPERIMENT_LABELS.get(experiment, experiment)


def method_rank(method: str, variant: str = "") -> tuple[int, int, str]:
    """Sorts methods in the order of the paper, the plain variant first."""
    return _rank(method, METHOD_LABELS), _rank(variant, ["", *VARIANT_LABELS]), variant


def series_rank(method: str, variant: str = "", evaluation: bool = False) -> int:
    """Sorts lines: methods in the order of the paper, evaluation mode after training, variants after the plain."""
    return 100 * _rank(method, METHOD_LABELS) + 2 * _rank(variant, ["", *VARIANT_LABELS]) + evaluation


def start_rank(start: str) -> int:
    """Sorts starts in the order of the paper."""
    return _rank(start, START_NAMES)


def experiment_rank(experiment: str) -> tuple[int, str]:
    """Sorts the paper's experiments first, in its order, and others by name."""
    return _rank(experiment, EXPERIMENT_LABELS), experiment


def _rank(name: str, order: Iterable[str]) -> int:
    names = list(order)
    return names.index(name) if name in names else len(names)


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
    train_samples: int | None = None  # only so many training images are used; all by default
    # what a method trains from its own start (BN from ``bn``, AP2 from ``ap2``): the ``original`` weights with s and
    # b introduced, as the paper says, or the ``converted`` ones that all other methods get there. The function is the
    # same; the steps of Adam are not, for the weights differ in length
    own_weights: OwnWeights = "original"
    # how AP2 counts the zeros around images: ``pooled`` over positions, or not at all, with ``plain`` sums of kernels,
    # as the paper writes them
    borders: Borders = "pooled"
    protocol: Protocol = field(default_factory=Protocol)  # how each is trained
    precision: Precision = field(default_factory=Precision)  # how a step is computed on a GPU

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

        Raises a SettingError if a value is out of range, a name unknown, or no cell is left.
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


def logistic(inputs: int, hidden: int, units: int = 20, layers: Layers = _alone) -> nn.Module:
    """Hidden layers of logistic units, fully connected.

    `layers` makes every layer but the last, with whatever is to follow it, from its kind and arguments.
    """
    modules: list[nn.Module] = [nn.Flatten()]
    for index in range(hidden):
        modules += [*layers(nn.Linear, units if index else inputs, units), nn.Sigmoid()]
    return nn.Sequential(*modules, nn.Linear(units, 10))


def convolutional(width: int = 96, layers: Layers = _alone) -> nn.Module:
    """The paper's network for CIFAR-10: nine convolutions, then the mean over positions; `layers` as of `logistic`."""
    modules: list[nn.Module] = []
    before = 3
    for kernel, stride, factor in _CONVOLUTIONS:
        modules += [*layers(nn.Conv2d, before, width * factor, kernel, stride, padding=kernel // 2), LeakyRelu()]
        before = width * factor
    return nn.Sequential(*modules, nn.Conv2d(before, 10, 1), GlobalAverage())


FACTORIES: dict[str, Factory] = {
    "digits": functools.partial(logistic, 64, hidden=3),  # no lambdas, which cannot be sent to other processes
    "mnist": functools.partial(logistic, 784, hidden=6),
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
