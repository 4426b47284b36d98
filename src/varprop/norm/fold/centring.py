"""Rows of a weight minus their mean: what the deep form of the normalization folds instead of the rows themselves."""

from __future__ import annotations

from torch import Tensor


def minus_row_mean(rows: Tensor, axes: tuple[int, ...]) -> Tensor:
    """A tensor minus its mean over `axes`, which make up a row.

    The mean is taken of what is left when the first entry of the row is subtracted. So equal weights leave exactly
    zero, and a row far from zero keeps the digits of its spread: the difference of close numbers is exact.
    """
    first = rows.detach()  # cancels out, and so does its derivative
    for axis in axes:
        first = first.narrow(axis, 0, 1)
    apart = rows - first
    return apart.sub_(apart.mean(axes, keepdim=True))
