"""Which of the functions known to the kernels a function is, found by its name or by trying it out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gaussian.activations import SELU_ALPHA, SELU_SCALE
from ..gaussian.normal import Pair
from .backends.derivatives import with_derivatives
from .layout import Function

Kernel = tuple[str | float, ...]
# The text of a single operation on x, without the overload, and the kernel that computes it.
NAMED: dict[str, str] = {
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "silu": "silu",
    "mish": "mish",
    "erf": "erf",
    "hardswish": "hardswish",
    "hardsigmoid": "hardsigmoid",
}
SELU = (SELU_ALPHA, SELU_SCALE, 1.0)


def recognized(
    name: str,
    moments: Callable[..., Pair],
    values: Callable[[Tensor], Tensor] | None,
    arity: int = 1,
    parts: tuple[Function, Function] | None = None,
) -> Function:
    """A function with its kernel, if one computes it.

    Args:
        name: Its text; equal for equal functions.
        moments: How means and variances go through it.
        values: The function itself on numbers, for pointwise ones.
        arity: Number of random arguments.
        parts: The two functions it is composed of.
    """
    found = Function(name, moments, _kernel(name, moments, values, arity, parts), arity)
    return found if found.kernel is None or _agrees(found) else Function(name, moments, None, arity)


def _agrees(function: Function) -> bool:
    """Whether the kernel computes what the engine's rule does, so that a wrong guess costs speed and nothing else."""
    grid = torch.cartesian_prod(torch.linspace(-4, 4, 9), torch.tensor([0.01, 0.3, 1.0, 4.0])).double()
    pairs = [(grid[:, 0], grid[:, 1].square()), (grid[:, 0].flip(0), grid[:, 1].flip(0))][: function.arity]
    (mean, var), _ = with_derivatives(function, pairs)
    expected_mean, expected_var = function.moments(*pairs)
    return _close(mean, expected_mean) and _close(var, expected_var)


def _kernel(name: str, moments: Any, values: Any, arity: int, parts: Any) -> Kernel | None:
    if arity == 2:
        return _of_two(name)
    if parts is not None:
        return _composed(*parts)
    if values is None:
        return _dropout(name) or _tried(moments)
    return _named(name) or _piecewise_linear(values)


def _of_two(name: str) -> Kernel | None:
    alpha = re.search(r"'alpha': ([-\d.e]+)", name)
    factor = float(alpha[1]) if alpha else 1.0
    for op, sign in (("add", 1.0), ("sub", -1.0)):
        if name.startswith(f"aten.{op}.") and "()" in name:
            return "add", sign * factor
    return ("mul",) if name.startswith("aten.mul.") else None


def _composed(first: Function, second: Function) -> Kernel | None:
    if first.kernel is None or second.kernel is None or first.kernel[0] != "maximum":
        return None
    return ("compose", *first.kernel, *second.kernel)


def _dropout(name: str) -> Kernel | None:
    found = re.match(r"aten\.(?:feature_|native_)?dropout\.default\(.*\[([\d.e-]+), True\]", name)
    return ("dropout", float(found[1])) if found and 0 < float(found[1]) < 1 else None


def _named(name: str) -> Kernel | None:
    found = re.fullmatch(r"aten\.(\w+)\.\w+\(x((?:, [^()]*)?)\)", name)
    if found is None:
        return None
    op, rest = found[1], [part for part in found[2].split(", ") if part]
    if op in NAMED and not rest:
        return (NAMED[op],)
    if op == "gelu":
        return ("gelu_tanh" if "approximate='tanh'" in rest else "gelu",)
    numbers = _numbers(rest)
    if numbers is None:
        return None
    if op == "softplus" and (len(numbers) < 2 or numbers[1] >= 20):
        return "softplus", *(numbers[:1] or [1.0])
    if op == "elu":
        return "elu", *(numbers + [1.0, 1.0, 1.0][len(numbers) :])
    if op == "selu":
        return "elu", *SELU
    if op == "hardtanh":
        return "clamp", *(numbers + [-1.0, 1.0][len(numbers) :])
    return ("clamp", *numbers) if op == "clamp" and len(numbers) == 2 else None


def _numbers(texts: list[str]) -> list[float] | None:
    try:
        return [float(text) for text in texts]
    except ValueError:
        return None


def _piecewise_linear(values: Callable[[Tensor], Tensor]) -> Kernel | None:
    """Two slopes that meet at zero, or a line, however the model writes them (relu(x) + 0.03 x)."""
    x = torch.logspace(-6, 6, 100, dtype=torch.float64)
    up, down, zero = (values(t).double() for t in (x, -x, x * 0))
    above, below = (up - zero) / x, (down - zero) / -x
    if not (_equal(above) and _equal(below)):
        return None
    if abs(float(above[0] - below[0])) < 1e-12:
        return "affine", float(above[0]), float(zero[0])
    return ("two_slopes", float(above[0]), float(below[0])) if float(zero[0]) == 0.0 else None


def _equal(numbers: Tensor) -> bool:
    return bool(((numbers - numbers[0]).abs() <= 1e-9 * (1 + numbers[0].abs())).all())


def _tried(moments: Callable[[Pair], Pair]) -> Kernel | None:
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
