"""Where a function of a Gaussian variable crosses zero."""

from __future__ import annotations

import torch
from torch import Tensor

from .quadrature import Pointwise


def crossings(g: Pointwise, mean: Tensor, std: Tensor, most: int) -> list[Tensor]:
    """Up to `most` zeros of g within 9 standard deviations, by sign changes on a grid and bisection."""
    with torch.no_grad():
        z = torch.linspace(-9, 9, 145, dtype=torch.float64, device=mean.device).view(-1, *[1] * mean.ndim)
        grid = mean.double() + std.double() * z
        signs = _sign(g(grid))
        change = (signs[1:] * signs[:-1] < 0).double()
        order = change.topk(most, dim=0).indices
        found = change.gather(0, order) > 0
        shape = (len(z), *change.shape[1:])
        low, high = (grid.expand(shape).gather(0, order + k) for k in (0, 1))
        low_sign = signs.gather(0, order)
        for _ in range(60):
            middle = (low + high) / 2
            left = _sign(g(middle)) == low_sign
            low, high = torch.where(left, middle, low), torch.where(left, high, middle)
        return list(torch.where(found, (low + high) / 2, mean.double()))


def _sign(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0)  # never zero, so that a zero on the grid is a change of sign too
