"""How methods, starts and experiments are named and ordered: one place, so that every table and figure agrees."""

from __future__ import annotations

from collections.abc import Iterable

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
