"""Shifts before an activation with which errors of scale die out, or gradients keep their size (mathematics.md, 11)."""

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

    def is_stable(shifts: Tensor) -> Tensor:
        rate, growth = response(moments, shifts)
        return (rate <= damping + _TOLERANCE) & (growth <= 1 + _TOLERANCE).all(1)

    return _first_where(is_stable, 0.0, largest)


def _first_where(holds: Callable[[Tensor], Tensor], low: float, high: float, count: int = _POINTS) -> float | None:
    """The number between two, nearest to the first, from which on something holds; None if it never does."""
    for _ in range(_ROUNDS):
        points = torch.linspace(low, high, count, dtype=torch.float64)
        true = holds(points)
        if not bool(true.any()):
            return None
        first = int(true.int().argmax())
        if first == 0:
            return low
        low, high = float(points[first - 1]), float(points[first])
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


# --- gradients ---

SMALLEST = 1e-3  # standard deviation of units before an activation
MomentsAndSlope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


# By what squared gradients may grow from end to end of a deep chain: what trained best (initialization.md)
SMOOTH, KINKED = 1.5, math.e


def start_for(moments: MomentsAndSlope, stable: float, length: int) -> tuple[float, float]:
    """Shift and standard deviation before an activation with which gradients keep their size in a chain of a length.

    Behind a layer that takes means off they grow by chi = std^2 E f'^2 / Var f, which is above 1 unless f is a line on
    what it reads. So the units are brought where it nearly is one. For a function that is smooth at 0 they become
    smaller, with the shift nearest to 0 where errors of scale do not grow either; for one with a kink they are shifted
    away from it. Where the `stable_shift` is enough, or nothing helps, that is what it is.

    `moments` as for `stable_shift`, with the mean square of the slope. `length` is how many layers share what squared
    gradients may grow by: `SMOOTH`, or `KINKED` with a kink at 0.
    """
    one = torch.ones(1, dtype=torch.float64)
    is_smooth = bool(chi(moments, 0 * one, SMALLEST * one) <= SMOOTH ** (1 / length))
    growth = (SMOOTH if is_smooth else KINKED) ** (1 / length)
    if bool(chi(moments, stable * one, one) <= growth):
        return stable, 1.0
    if is_smooth:
        return _shaped(moments, growth)
    for end in (LARGEST, -LARGEST) if stable >= 0 else (-LARGEST, LARGEST):
        shift = _first_where(lambda shifts: chi(moments, shifts, torch.ones_like(shifts)) <= growth, stable, end)
        if shift is not None:
            return shift, 1.0
    return stable, 1.0


def chi(moments: MomentsAndSlope, shifts: Tensor, stds: Tensor) -> Tensor:
    """The factor by which a centred layer multiplies squared gradients, for shifts and stds before its activation."""
    _, var, slope = (x.double().reshape(len(shifts), -1).mean(1) for x in moments(shifts, stds))
    return stds.square() * slope / var


def scale_rate(moments: MomentsAndSlope, shifts: Tensor, stds: Tensor) -> Tensor:
    """The share of a small error of scale that is left behind a layer (lambda), for shifts and deviations before it."""
    variances = (moments(shifts, stds * size)[1].double() for size in (1 / 2.0**_NEAR, 2.0**_NEAR))
    below, above = (var.reshape(len(shifts), -1).mean(1) for var in variances)
    return (above / below).log() / (4 * _NEAR * math.log(2))


def correlation(moments: MomentsAndSlope, before: float, shift: float = 0.0, std: float = 1.0) -> float:
    """The correlation after an activation of two units with one before it; its slope at 1 is `chi`.

    X and Y share U: X = sqrt(c) U + sqrt(1 - c) V, so that E f(X) f(Y) is the mean square of E[f(X) | U].
    """
    u = torch.linspace(-9, 9, 2000, dtype=torch.float64)
    weights = torch.exp(-u.square() / 2)
    means = shift + std * math.sqrt(before) * u
    within = torch.full_like(u, std * math.sqrt(1 - before))
    at = torch.tensor([shift], dtype=torch.float64), torch.tensor([std], dtype=torch.float64)
    mean, var, _ = (x.double().reshape(1, -1).mean(1) for x in moments(*at))
    shared = moments(means, within)[0].double().reshape(len(u), -1).mean(1) - mean
    return float((shared.square() * weights).sum() / weights.sum() / var)


def _shaped(moments: MomentsAndSlope, growth: float) -> tuple[float, float]:
    """The shift nearest to 0 with which errors of scale do not grow, and the largest deviation that it allows."""

    def is_steady(shifts: Tensor) -> Tensor:
        return scale_rate(moments, shifts, _largest_stds(moments, shifts, growth)) <= 1 + 1e-6

    shifts = (_first_where(is_steady, 0.0, end, 9) for end in (1.0, -1.0))  # to 8^-4
    shift = next((shift for shift in shifts if shift is not None), 0.0)
    return shift, float(_largest_stds(moments, torch.tensor([shift], dtype=torch.float64), growth))


def _largest_stds(moments: MomentsAndSlope, shifts: Tensor, growth: float) -> Tensor:
    """For every shift the deviation, up to 1, up to which squared gradients grow by no more than the factor."""
    low, high = torch.full_like(shifts, math.log(SMALLEST)), torch.zeros_like(shifts)
    steps = torch.linspace(0, 1, 33, dtype=torch.float64)
    for _ in range(3):  # to 7 * 32^-3 of the deviation
        stds = torch.lerp(low[:, None], high[:, None], steps)
        factors = chi(moments, shifts.repeat_interleave(len(steps)), stds.exp().flatten()).view_as(stds)
        last = ((factors <= growth).int().cumprod(1).sum(1, keepdim=True) - 1).clamp_min(0)
        low, high = (stds.gather(1, index).squeeze(1) for index in (last, (last + 1).clamp(max=len(steps) - 1)))
    return low.exp()
