"""Numbers that stand for a whole layer, computed alike from propagated and from measured statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DEAD, ALWAYS_ON = 1e-3, 1 - 1e-3  # how often a unit is on
ROWS = 256  # of a weight at most, evenly chosen, by which its effective rank is judged
LARGEST = 2**16  # elements; quantiles of more are those of an even choice


@dataclass(frozen=True)
class UnitSpread:
    """A quantity over the units of a layer; the quartiles are `lower`, `median` and `upper`."""

    least: float
    lower: float
    median: float
    upper: float
    most: float
    average: float


def spread_of(values: Tensor) -> UnitSpread:
    """Extremes, quartiles and average of a tensor."""
    flat = values.detach().flatten().double()
    chosen = flat if flat.numel() <= LARGEST else flat[:: flat.numel() // LARGEST + 1]
    quartiles = torch.quantile(chosen, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device=flat.device))
    return UnitSpread(*map(float, (flat.min(), *quartiles, flat.max(), flat.mean())))


@dataclass(frozen=True)
class UnitStatistics:
    """What is known of the units at one place; tensors have one element a unit."""

    mean: Tensor  # their means
    var: Tensor  # their variances
    flat: Tensor | None = None  # probability that the activation which made them was in a flat part, if it has one
    on: Tensor | None = None  # probability that the rectifier which made them was on, if it is one
    linear: Tensor | None = None  # probability that it passed everything
    gradient: Tensor | None = None  # second moment of the gradient


def numbers(s: UnitStatistics) -> dict[str, float]:
    """The layer's numbers: mean, std (root mean square over units), shift, shares of units, gradient scale.

    The shift is the share of the mean square that is a constant: m^2 / (m^2 + v), both averaged over units.
    """
    square, var = _average(s.mean.double().square()), _average(s.var)
    total = square + var
    found = {"mean": _average(s.mean), "std": var**0.5, "shift": square / total if total > 0 else 0.0}
    if s.flat is not None:
        found |= {"flat": _average(s.flat), "saturated": _average((s.flat > 0.5).double())}
    if s.on is not None:
        found["dead"] = _average((s.on < DEAD).double())
    if s.linear is not None:
        found["always_on"] = _average((s.linear > ALWAYS_ON).double())
    if s.gradient is not None:
        found["gradient"] = _average(s.gradient) ** 0.5
    return found


def effective_rank(weight: Tensor, groups: int = 1) -> tuple[float, int]:
    """The effective rank of a weight, and the largest that it could have; of several groups those of the first.

    It is exp(H) for the entropy H of the singular values divided by their sum (Roy & Vetterli 2007): as many as there
    are where all are equal, 1 where a single one counts. Of large weights it is that of some of their rows.
    """
    matrix = weight.detach().flatten(1).unflatten(0, (groups, -1))[0].double()
    matrix = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    matrix = matrix[:: -(-matrix.shape[0] // ROWS)]
    if not bool(matrix.isfinite().all()) or not bool(matrix.any()):
        return 0.0, len(matrix)
    singular = torch.linalg.eigvalsh(matrix @ matrix.T / matrix.square().sum()).clamp_min(0).sqrt()
    singular = singular[singular > 1e-7 * singular.max()]  # what is below is rounding of the squares
    shares = singular / singular.sum()
    return float((-(shares * shares.log()).sum()).exp()), len(matrix)


def _average(values: Tensor) -> float:
    return float(values.double().mean())
