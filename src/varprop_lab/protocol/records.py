"""Cells, their outcomes and how they are named: plain values, written as JSON, read by tables, figures and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

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
    seconds: float  # spent on it; the share of it where many trained together

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
START_LABELS = {
    "none": "init = None",
    "bn": "init = BN",
    "ap2": "init = AP2",
    "orthogonal": "init = orthogonal",
    "wn": "init = WN",
}
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
    return START_LABELS.get(start, f"init = {start}")


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
    return _rank(start, START_LABELS)


def experiment_rank(experiment: str) -> tuple[int, str]:
    """Sorts the paper's experiments first, in its order, and others by name."""
    return _rank(experiment, EXPERIMENT_LABELS), experiment


def rate(value: float) -> str:
    """A learning rate in few characters: ``0.01``, ``3.2e-05``."""
    return f"{value:.2g}"


def _rank(name: str, order: Iterable[str]) -> int:
    names = list(order)
    return names.index(name) if name in names else len(names)
