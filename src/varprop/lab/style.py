"""How methods and starts are named, ordered and coloured: one place, so that every table and figure agrees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

METHOD_LABELS = {"standard": "Standard", "weight": "WN", "batch": "BN", "analytic": "AP2"}
START_LABELS = {"none": "init = None", "bn": "init = BN", "ap2": "init = AP2", "orthogonal": "init = orthogonal"}
VARIANT_LABELS = {"double": "w = 2w'", "decay": "decay", "unit-norm": "||w|| = 1"}
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
    "digits": "Digits",
}

# Close to Okabe and Ito's palette, and apart under every kind of colour blindness; the second is for dark pages.
METHOD_COLOURS = {
    "standard": ("#4a4d50", "#e0e3e6"),
    "weight": ("#009e73", "#2bd4a4"),
    "batch": ("#0064a8", "#4aa3ff"),
    "analytic": ("#d55e00", "#ff8c42"),
}
DOUBLE_COLOUR = ("#d16aa8", "#cc66aa")
OTHER_COLOUR = ("#8a7a00", "#e6d44a")

METHOD_MARKERS = {"standard": "s", "weight": "^", "batch": "o", "analytic": "D"}
DASHES = {"": "solid", "decay": "dashdot", "unit-norm": "dotted"}

# What matplotlib is told.
LOOK = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e5e8",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#80868b",
    "xtick.color": "#3c4043",
    "ytick.color": "#3c4043",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "svg.hashsalt": "varprop",  # the same figure gives the same bytes
    "svg.fonttype": "path",
}
LINESTYLES: dict[str, Any] = {
    "solid": "-",
    "dashed": (0, (4, 2)),
    "dashdot": (0, (6, 2, 1.5, 2)),
    "dotted": (0, (1.2, 1.6)),
}
MARKS: dict[str, dict[str, Any]] = {
    "diverged": {"marker": "x", "s": 34, "linewidths": 1.6},
    "chosen": {"marker": "o", "s": 60, "linewidths": 1.5},
    "at bound": {"marker": "*", "s": 110, "linewidths": 0.7},
}
LEGEND_MARKS: dict[str, dict[str, Any]] = {
    "chosen": {"marker": "o", "mfc": "none", "ms": 9},
    "at bound": {"marker": "*", "ms": 11},
    "diverged": {"marker": "x", "ms": 7, "mew": 1.6},
}


@dataclass(frozen=True)
class Style:
    """How one line looks; `dash` is one of ``solid``, ``dashed``, ``dashdot``, ``dotted``."""

    colour: str
    dark_colour: str
    dash: str
    marker: str


def style(method: str, variant: str = "", evaluation: bool = False) -> Style:
    """The look of a method, the same in every figure; evaluation mode is dashed."""
    light, dark = DOUBLE_COLOUR if variant == "double" else METHOD_COLOURS.get(method, OTHER_COLOUR)
    dash = "dashed" if evaluation else DASHES.get(variant, "solid" if variant == "double" else "dashdot")
    return Style(light, dark, dash, "v" if variant == "double" else METHOD_MARKERS.get(method, "P"))


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
