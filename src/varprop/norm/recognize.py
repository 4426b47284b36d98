"""Functions with the kernels that compute them, which the rule of an operation names, or a trial finds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..gaussian.normal import Pair
from .backends.torch import with_derivatives
from .fold.layout import Function

Kernel = tuple[str | float, ...]


def recognized(name: str, moments: Callable[..., Pair], kernel: Kernel | None, arity: int = 1) -> Function:
    """A function with its kernel, if that computes what the engine's rule does.

    Args:
        name: Its text; equal for equal functions.
        moments: How means and variances go through it.
        kernel: The one that may compute it: a wrong one costs speed and nothing else.
        arity: Number of random arguments.
    """
    found = Function(name, moments, kernel, arity)
    return found if kernel is None or _agrees(found) else Function(name, moments, None, arity)


def _agrees(function: Function) -> bool:
    grid = torch.cartesian_prod(torch.linspace(-4, 4, 9), torch.tensor([0.01, 0.3, 1.0, 4.0])).double()
    pairs = [(grid[:, 0], grid[:, 1].square()), (grid[:, 0].flip(0), grid[:, 1].flip(0))][: function.arity]
    (mean, var), _ = with_derivatives(function, pairs)
    expected_mean, expected_var = function.moments(*pairs)
    return _close(mean, expected_mean) and _close(var, expected_var)


def composed(first: Function, second: Function) -> Kernel | None:
    """Of a function behind a maximum."""
    if first.kernel is None or second.kernel is None or first.kernel[0] != "maximum":
        return None
    return ("compose", *first.kernel, *second.kernel)


def piecewise_linear(values: Callable[[Tensor], Tensor]) -> Kernel | None:
    """Two slopes that meet at zero, or a line, however the model writes them (relu(x) + 0.03 x)."""
    x = torch.logspace(-6, 6, 100, dtype=torch.float64)
    up, down, zero = (values(t).double() for t in (x, -x, x * 0))
    above, below = (up - zero) / x, (down - zero) / -x
    if not (_equal(above) and _equal(below)):
        return None
    rise, fall = float(above[-1]), float(below[-1])  # far out, where an offset costs no digits
    if abs(rise - fall) < 1e-12:
        return "affine", rise, float(zero[0])
    return ("two_slopes", rise, fall) if float(zero[0]) == 0.0 else None


def _equal(numbers: Tensor) -> bool:
    return bool(((numbers - numbers[0]).abs() <= 1e-9 * (1 + numbers[0].abs())).all())


def of_positions(moments: Callable[[Pair], Pair]) -> Kernel | None:
    """Averages and maxima over a channel's positions: linear in mean, variance and standard deviation."""
    mean = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    var = torch.tensor([1.0, 4.0, 0.25, 2.0, 0.04], dtype=torch.float64)
    out_mean, out_var = moments((mean, var))
    gain, share = float(moments((mean * 0 + 1, var * 0))[0][0]), float(out_var[0] / var[0])
    lift = float(out_mean[0] / var[0].sqrt())
    if not _close(out_var, share * var):
        return None
    if abs(lift) < 1e-12 and _close(out_mean, gain * mean):
        return "gain", gain, share
    return ("maximum", lift, share) if _close(out_mean, mean + lift * var.sqrt()) else None


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= 1e-9 * (1 + b.abs())).all())
