"""Mean and variance after the named functions together with their derivatives, in one go and in float64.

Everything here is elementwise: from mean m and variance v of the arguments to mean M and variance V of the result and
the derivatives of both by m and v, which a backward pass then only multiplies. Formulas: mathematics.md, sections 1, 2
and 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .activations import CURVES, Curve
from .normal import LEAST_STD, ROOT_TWO_PI, Pair, Slopes, constant, gauss_legendre, readable
from .rectifier import clamp_with_slopes, learned_slope, relu_of_sum_and_derivatives, two_slopes_by_variance
from .shortcuts import FORMULAS

WINDOW = 8.5  # standard deviations; what lies beyond weighs 2e-17
SINGLE, DOUBLE = 16, 20  # nodes for each half of a panel: relative error of the variance 4e-9 and 5e-11
_LEGENDRE = {nodes: gauss_legendre(nodes) for nodes in (SINGLE, DOUBLE)}


def _linear(x: Pair, gain: float, var_gain: float, offset: float = 0.0) -> Slopes:
    mean, var = x
    none = torch.zeros_like(mean)
    moments = torch.stack([mean * gain + offset, var * var_gain])
    return moments, [torch.stack([none + gain, none, none, none + var_gain])]


def _dropout(x: Pair, p: float) -> Slopes:
    mean, var = x
    unit, none = torch.ones_like(mean), torch.zeros_like(mean)
    moments = torch.stack([mean, (var + p * mean.square()) / (1 - p)])
    return moments, [torch.stack([unit, none, 2 * p / (1 - p) * mean, unit / (1 - p)])]


def _maximum(x: Pair, lift: float, share: float) -> Slopes:
    """The largest of k independent equal Gaussians: m + e std, d v."""
    mean, var = x
    std = var.sqrt()
    unit, none = torch.ones_like(mean), torch.zeros_like(mean)
    moments = torch.stack([mean + lift * std, share * var])
    return moments, [torch.stack([unit, 0.5 * lift / std.clamp(min=LEAST_STD), none, share * unit])]


def _hardsigmoid(x: Pair) -> Slopes:
    moments, [derivatives] = clamp_with_slopes((x[0] + 3.0, x[1]), 0.0, 6.0)
    scale = constant((1.0 / 6.0, 1.0 / 6.0, 1.0 / 36.0, 1.0 / 36.0), moments).unsqueeze(1)
    return moments * scale[::2], [derivatives * scale]


def _add(x: Pair, y: Pair, alpha: float) -> Slopes:
    unit, none = torch.ones_like(x[0]), torch.zeros_like(x[0])
    power = alpha * alpha
    moments = torch.stack([x[0] + alpha * y[0], x[1] + power * y[1]])
    return moments, [torch.stack([unit, none, none, unit]), torch.stack([alpha * unit, none, none, power * unit])]


def _mul(x: Pair, y: Pair) -> Slopes:
    (m1, v1), (m2, v2) = x, y
    none = torch.zeros_like(m1)
    second1, second2 = v1 + m1 * m1, v2 + m2 * m2
    moments = torch.stack([m1 * m2, v1 * second2 + m1 * m1 * v2])
    return moments, [torch.stack([m2, none, 2 * m1 * v2, second2]), torch.stack([m1, none, 2 * m2 * v1, second1])]


def _compose(nodes: int) -> Callable[..., Slopes]:
    """A maximum (three entries), then any function of one argument."""

    def composed(x: Pair, *kernels: Any) -> Slopes:
        (mean, var), [inner] = _maximum(x, *kernels[1:3])
        moments, [outer] = KERNELS[nodes][kernels[3]]((mean, var), *kernels[4:])
        product = torch.einsum("ikn,kjn->ijn", outer.view(2, 2, -1), inner.view(2, 2, -1))
        return moments, [product.flatten(0, 1)]

    return composed


def _quadrature(curve: Curve, nodes: int) -> Callable[..., Slopes]:
    """The trapezoidal rule where no channel is wide, else Gauss-Legendre on panels between the knots, each halved.

    The trapezoidal rule converges geometrically for an analytic function, the slower the wider the channel; how wide
    the widest is can be asked without waiting on a CPU only.
    """

    def integrate(x: Pair, *numbers: float) -> Slopes:
        mean, var = x
        std = var.sqrt().clamp_(min=LEAST_STD)
        count = _grid_size(std, curve.narrow / max([1.0, *numbers]), nodes) if curve.narrow else None
        if count is not None:
            return _on_grid(mean, std, lambda t: curve.with_slope(t, *numbers), count)
        z, weight = _nodes(mean, std, curve.knots(*numbers), nodes)
        f, slope = curve.with_slope(torch.addcmul(mean, std, z), *numbers)
        m = (weight * f).sum(0)
        f = f - m
        leaning = weight * slope
        risen = leaning * f
        by_std = [0.5 / std * (weighted * z).sum(0) for weighted in (leaning, risen)]
        derivatives = torch.stack([leaning.sum(0), by_std[0], 2.0 * risen.sum(0), 2.0 * by_std[1]])
        return torch.stack([m, (weight * f * f).sum(0)]), [derivatives]

    return integrate


def _grid_size(std: Tensor, narrow: float, nodes: int) -> int | None:
    """Nodes of the trapezoidal rule for an error of 1e-8 (single precision) or 1e-12; None if too many were needed."""
    if not readable(std):
        return None
    widest = float(std.max())
    if nodes == SINGLE and widest <= narrow:
        return 64
    return 128 if widest <= (2 * narrow if nodes == SINGLE else narrow) else None


@functools.cache
def grid(count: int) -> tuple[Tensor, Tensor]:
    """Equidistant nodes as a column; their weights, and the weights times half the nodes, as rows."""
    with torch.inference_mode(False):
        z = torch.linspace(-WINDOW, WINDOW, count, dtype=torch.float64)
        weight = torch.exp(-0.5 * z * z)
        weight = weight / weight.sum()
        return z[:, None], torch.stack([weight, 0.5 * z * weight])


def _on_grid(mean: Tensor, std: Tensor, curve: Callable[[Tensor], Pair], count: int) -> Slopes:
    z, weights = grid(count)
    f, slope = curve(torch.addcmul(mean, std, z))
    m = weights[0] @ f
    f = f - m
    derivatives = torch.cat([weights @ slope, (weights @ slope.mul_(f)).mul_(2.0)])
    derivatives[1::2] /= std
    return torch.stack([m, weights[0] @ f.square_()]), [derivatives]


def _nodes(mean: Tensor, std: Tensor, knots: Sequence[float], nodes: int) -> Pair:
    """Nodes in units of std from the mean, and weights that sum to one, on a new first axis."""
    ends = constant((-WINDOW, *(0.0 for _ in knots), WINDOW), mean)[:, None].expand(-1, len(mean)).clone()
    inner = (constant(tuple(knots), mean)[:, None] - mean) / std
    ends[1:-1] = inner.clamp(-WINDOW, WINDOW)  # in order, as the knots are
    low, quarter = ends[:-1], 0.25 * (ends[1:] - ends[:-1])
    node, weight = (constant(values, mean) for values in _LEGENDRE[nodes])
    halves = torch.stack([low + quarter, low + 3.0 * quarter]).unsqueeze(2)  # half, panel, node, channel
    z = halves + quarter[None, :, None] * node[:, None]
    density = torch.exp(-0.5 * z * z) * (quarter[None, :, None] * weight[:, None] / ROOT_TWO_PI)
    z, density = z.flatten(0, 2), density.flatten(0, 2)
    return z, density / density.sum(0)


def _kernels(nodes: int) -> dict[str, Callable[..., Slopes]]:
    return {
        "affine": lambda x, slope, offset: _linear(x, slope, slope * slope, offset),
        "gain": _linear,
        "dropout": _dropout,
        "maximum": _maximum,
        "compose": _compose(nodes),
        "two_slopes": two_slopes_by_variance,
        "clamp": clamp_with_slopes,
        "hardsigmoid": _hardsigmoid,
        "add": _add,
        "skip": relu_of_sum_and_derivatives,
        "mul": _mul,
        "slope": learned_slope,
        **{name: _quadrature(curve, nodes) for name, curve in CURVES.items()},
    }


KERNELS = {nodes: _kernels(nodes) for nodes in (SINGLE, DOUBLE)}
FORMULAS |= {name: KERNELS[DOUBLE][name] for name in CURVES}
