"""The shift before an activation from which on errors of scale die out (mathematics.md, section 11)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .normal import Pair

LARGEST = 4.0  # beyond, hardly any unit would still be bent
DAMPING = 0.9  # what is to be left of a small error behind a layer, or less
_POINTS, _ROUNDS = 65, 4  # 64^-4 of the largest: 2e-7
_TOLERANCE = 1e-9
_NEAR = 0.01  # octaves
_FAR = (_NEAR, *(k / 4 for k in range(1, 17)), *range(5, 21))  # how far a scale is off; 2^20 stands for infinity

MomentsAfter = Callable[[Tensor, Tensor], Pair]


def stable_shift(moments: MomentsAfter) -> float:
    """The shift b nearest to 0 that damps small errors of scale to `DAMPING`, and lets no large one grow.

    No scale r > 1 grows if E (f(b + r Z) - E f(b + Z))^2 <= r^2 Var f(b + Z). Where no shift damps small errors enough,
    the last condition alone decides. The shift is positive if both signs serve; 0 for an activation that damps by
    itself, and also for one that never does, up to a shift of `LARGEST`.

    Args:
        moments: Mean and variance after the activation f for means and standard deviations before it, all flat; results
            may have further axes (channels with parameters of their own), over which the squares are averaged.
    """
    choices = ((damping, sign) for damping in (DAMPING, 1.0) for sign in (1.0, -1.0))
    shifts = (_nearest(moments, damping, sign * LARGEST) for damping, sign in choices)
    return next((shift for shift in shifts if shift is not None), 0.0)


def _nearest(moments: MomentsAfter, damping: float, largest: float) -> float | None:
    """The stable shift between 0 and the largest that is nearest to 0; None if there is none."""
    low, high = 0.0, largest
    for _ in range(_ROUNDS):
        shifts = torch.linspace(low, high, _POINTS, dtype=torch.float64)
        rate, growth = response(moments, shifts)
        stable = (rate <= damping + _TOLERANCE) & (growth <= 1 + _TOLERANCE).all(1)
        if not bool(stable.any()):
            return None
        first = int(stable.int().argmax())
        if first == 0:
            return low
        low, high = float(shifts[first - 1]), float(shifts[first])
    return high


def response(moments: MomentsAfter, shifts: Tensor) -> tuple[Tensor, Tensor]:
    """For every shift, what is left of a small error of scale, and for every large r the squared error over r^2."""
    scales = torch.exp2(torch.tensor((-_NEAR, 0.0, *_FAR), dtype=torch.float64))
    before = torch.cartesian_prod(shifts, scales)
    mean, var = (x.double().reshape(len(shifts), len(scales), -1) for x in moments(before[:, 0], before[:, 1]))
    below, above = var[:, 0].mean(1), var[:, 2].mean(1)
    rate = (above / below).log() / (4 * _NEAR * math.log(2))  # d log variance / d log scale^2
    squares = (var + (mean - mean[:, 1:2]).square()).mean(2)
    return rate, squares[:, 2:] / squares[:, 1:2] / scales[2:].square()
