"""Moments after a function together with their derivatives, in one go and in float64.

Everything here is elementwise on lanes (`layout`): from mean m and variance v of the arguments to mean M and variance V
of the result and the derivatives of both, which the hand-derived backward pass then only multiplies. Formulas:
mathematics.md, sections 1, 2 and 4.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...gaussian.normal import LEAST_STD, ROOT_HALF, ROOT_TWO_PI, constant, gauss_legendre, pdf
from ...gaussian.rectifier import two_slopes_and_derivatives
from ..layout import Function, Pair, Slopes
from .skip import after_skip

WINDOW = 8.5  # standard deviations; what lies beyond weighs 2e-17
SINGLE, DOUBLE = 16, 20  # nodes for each half of a panel: relative error of the variance 4e-9 and 5e-11
_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradCPU,
    torch._C.DispatchKey.AutogradCUDA,
    torch._C.DispatchKey.ADInplaceOrView,
)
_LEGENDRE = {nodes: gauss_legendre(nodes) for nodes in (SINGLE, DOUBLE)}


def with_derivatives(function: Function, arguments: Sequence[Pair], nodes: int = DOUBLE) -> Slopes:
    """Mean, variance and derivatives after a function, by its kernel where it has one, else by autograd."""
    if function.kernel is None or function.kernel[0] not in KERNELS[nodes]:
        return _by_autograd(function.moments, arguments)
    name, *numbers = function.kernel
    return KERNELS[nodes][str(name)](*arguments, *numbers)


def _by_autograd(moments: Callable[..., Pair], arguments: Sequence[Pair]) -> Slopes:
    """Derivatives by autograd, which has to be called back first: inside of an operation it is switched off."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for key in _AUTOGRAD_KEYS:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        leaves = [tuple(t.detach().clone().requires_grad_() for t in pair) for pair in arguments]
        results = moments(*leaves)
        flat = [leaf for pair in leaves for leaf in pair]
        derivatives = torch.stack([torch.stack(_derivatives(result, flat)) for result in results])
    return torch.stack([r.detach() for r in results]), list(derivatives.detach().split(2, dim=1))


def _derivatives(result: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not result.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(result.sum(), leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if d is None else d for leaf, d in zip(leaves, found, strict=True)]


def _square(m_m: Tensor, m_v: Tensor, v_m: Tensor, v_v: Tensor) -> Tensor:
    return torch.stack([m_m, m_v, v_m, v_v]).view(2, 2, -1)


def _affine(x: Pair, slope: float, offset: float) -> Slopes:
    return _linear(x, slope, slope * slope, offset)


def _linear(x: Pair, gain: float, var_gain: float, offset: float = 0.0) -> Slopes:
    mean, var = x
    none = torch.zeros_like(mean)
    return torch.stack([mean * gain + offset, var * var_gain]), [_square(none + gain, none, none, none + var_gain)]


def _dropout(x: Pair, p: float) -> Slopes:
    mean, var = x
    one, none = torch.ones_like(mean), torch.zeros_like(mean)
    moments = torch.stack([mean, (var + p * mean.square()) / (1 - p)])
    return moments, [_square(one, none, 2 * p / (1 - p) * mean, one / (1 - p))]


def _maximum(x: Pair, lift: float, share: float) -> Slopes:
    """The largest of k independent equal Gaussians: m + e std, d v."""
    mean, var = x
    std = var.sqrt()
    one, none = torch.ones_like(mean), torch.zeros_like(mean)
    moments = torch.stack([mean + lift * std, share * var])
    return moments, [_square(one, 0.5 * lift / std.clamp(min=LEAST_STD), none, share * one)]


def _two_slopes(x: Pair, s: float, t: float) -> Slopes:
    mean, var = x
    std = var.sqrt()
    moments, (m_mean, m_std, v_mean, v_std) = two_slopes_and_derivatives(mean, std, s, t)
    per_std = 0.5 / std.clamp(min=LEAST_STD)
    return torch.stack(moments), [_square(m_mean, per_std * m_std, v_mean, per_std * v_std)]


def _add(x: Pair, y: Pair, alpha: float) -> Slopes:
    one, none = torch.ones_like(x[0]), torch.zeros_like(x[0])
    square = alpha * alpha
    moments = torch.stack([x[0] + alpha * y[0], x[1] + square * y[1]])
    return moments, [_square(one, none, none, one), _square(alpha * one, none, none, square * one)]


def _mul(x: Pair, y: Pair) -> Slopes:
    (m1, v1), (m2, v2) = x, y
    none = torch.zeros_like(m1)
    second1, second2 = v1 + m1 * m1, v2 + m2 * m2
    moments = torch.stack([m1 * m2, v1 * second2 + m1 * m1 * v2])
    return moments, [_square(m2, none, 2 * m1 * v2, second2), _square(m1, none, 2 * m2 * v1, second1)]


def _compose(nodes: int) -> Callable[..., Slopes]:
    """A maximum (three entries), then any function of one argument."""

    def composed(x: Pair, *kernels: Any) -> Slopes:
        (mean, var), [inner] = _maximum(x, *kernels[1:3])
        moments, [outer] = KERNELS[nodes][kernels[3]]((mean, var), *kernels[4:])
        return moments, [torch.einsum("ikn,kjn->ijn", outer, inner)]

    return composed


Curve = Callable[..., tuple[Tensor, Tensor]]  # values and derivatives of a function


def _quadrature(
    curve: Curve, knots: Callable[..., Sequence[float]], narrow: float, nodes: int
) -> Callable[..., Slopes]:
    """The trapezoidal rule where no lane is wide, else Gauss-Legendre on panels between the knots, each halved.

    The trapezoidal rule converges geometrically for an analytic function, the slower the wider the lane; how wide the
    widest is can be asked without waiting on a CPU only.
    """

    def integrate(x: Pair, *numbers: float) -> Slopes:
        mean, var = x
        std = var.sqrt().clamp_(min=LEAST_STD)
        count = _grid_size(std, narrow / max([1.0, *numbers]), nodes) if narrow else None
        if count is not None:
            return _on_grid(mean, std, lambda t: curve(t, *numbers), count)
        z, weight = _nodes(mean, std, knots(*numbers), nodes)
        f, slope = curve(torch.addcmul(mean, std, z), *numbers)
        m = (weight * f).sum(0)
        f = f - m
        leaning = weight * slope
        risen = leaning * f
        by_std = [0.5 / std * (part * z).sum(0) for part in (leaning, risen)]
        derivatives = _square(leaning.sum(0), by_std[0], 2.0 * risen.sum(0), 2.0 * by_std[1])
        return torch.stack([m, (weight * f * f).sum(0)]), [derivatives]

    return integrate


def _grid_size(std: Tensor, narrow: float, nodes: int) -> int | None:
    """Nodes of the trapezoidal rule for an error of 1e-8 (single precision) or 1e-12; None if too many were needed."""
    if std.device.type != "cpu":
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
    derivatives = torch.stack([weights @ slope, (weights @ slope.mul_(f)).mul_(2.0)])
    derivatives[:, 1] /= std
    return torch.stack([m, weights[0] @ f.square_()]), [derivatives]


def _nodes(mean: Tensor, std: Tensor, knots: Sequence[float], nodes: int) -> Pair:
    """Nodes in units of std from the mean, and weights that sum to one, on a new first axis."""
    ends = constant((-WINDOW, *(0.0 for _ in knots), WINDOW), mean)[:, None].expand(-1, len(mean)).clone()
    inner = (constant(tuple(knots), mean)[:, None] - mean) / std
    ends[1:-1] = inner.clamp(-WINDOW, WINDOW)  # in order, as the knots are
    low, quarter = ends[:-1], 0.25 * (ends[1:] - ends[:-1])
    node, weight = (constant(values, mean) for values in _LEGENDRE[nodes])
    halves = torch.stack([low + quarter, low + 3.0 * quarter]).unsqueeze(2)  # half, panel, node, lane
    z = halves + quarter[None, :, None] * node[:, None]
    density = torch.exp(-0.5 * z * z) * (quarter[None, :, None] * weight[:, None] / ROOT_TWO_PI)
    z, density = z.flatten(0, 2), density.flatten(0, 2)
    return z, density / density.sum(0)


def _sigmoid(x: Tensor) -> Pair:
    f = torch.sigmoid(x)
    return f, f * (1.0 - f)


def _tanh(x: Tensor) -> Pair:
    f = torch.tanh(x)
    return f, 1.0 - f * f


def _silu(x: Tensor) -> Pair:
    s = torch.sigmoid(x)
    return x * s, s * (1.0 + x * (1.0 - s))


def _gelu(x: Tensor) -> Pair:
    below = 0.5 * torch.erfc(-ROOT_HALF * x)
    return x * below, below + x * pdf(x)


def _gelu_tanh(x: Tensor) -> Pair:
    c = 2.0 * math.sqrt(2.0 / math.pi)
    s = torch.sigmoid(c * (x + 0.044715 * x * x * x))
    return x * s, s + x * s * (1.0 - s) * c * (1.0 + 3 * 0.044715 * x * x)


def _softplus(x: Tensor, beta: float) -> Pair:
    return F.softplus(beta * x, threshold=40.0) / beta, torch.sigmoid(beta * x)


def _elu(x: Tensor, alpha: float, scale: float, rate: float) -> Pair:
    fall = torch.exp(rate * x.clamp(max=0.0))
    value = torch.where(x > 0, x, alpha * torch.expm1(rate * x.clamp(max=0.0)))
    return scale * value, scale * torch.where(x > 0, torch.ones_like(x), alpha * rate * fall)


def _mish(x: Tensor) -> Pair:
    t, s = torch.tanh(F.softplus(x, threshold=40.0)), torch.sigmoid(x)
    return x * t, t + x * (1.0 - t * t) * s


def _erf(x: Tensor) -> Pair:
    return torch.erf(x), 2.0 / math.sqrt(math.pi) * torch.exp(-x * x)


def _hardswish(x: Tensor) -> Pair:
    inside = x.abs() < 3.0
    return x * (x + 3.0).clamp(0.0, 6.0) / 6.0, torch.where(inside, x / 3.0 + 0.5, (x > 0).to(x.dtype))


def _hardsigmoid(x: Tensor) -> Pair:
    return (x + 3.0).clamp(0.0, 6.0) / 6.0, (x.abs() < 3.0).to(x.dtype) / 6.0


def _clamp(x: Tensor, low: float, high: float) -> Pair:
    return x.clamp(low, high), ((x > low) & (x < high)).to(x.dtype)


LOGISTIC = (-45.0, -9.0, 0.0, 9.0, 45.0)
# The function, its knots, and the standard deviation up to which 64 equidistant nodes do (0: kinks, never).
CURVES: dict[str, tuple[Curve, Callable[..., Sequence[float]], float]] = {
    "sigmoid": (_sigmoid, lambda: LOGISTIC, 2.5),
    "tanh": (_tanh, lambda: (-22.0, -4.5, 0.0, 4.5, 22.0), 1.2),
    "silu": (_silu, lambda: LOGISTIC, 2.5),
    "gelu": (_gelu, lambda: (-9.0, -3.0, 0.0, 3.0, 9.0), 2.2),
    "gelu_tanh": (_gelu_tanh, lambda: (-9.0, -3.0, 0.0, 3.0, 9.0), 2.0),
    "softplus": (_softplus, lambda beta: [knot / beta for knot in LOGISTIC], 2.5),
    "elu": (_elu, lambda _alpha, _scale, rate: (-45.0 / rate, -9.0 / rate, 0.0), 0.0),
    "mish": (_mish, lambda: LOGISTIC, 1.8),
    "erf": (_erf, lambda: (-6.5, -2.2, 0.0, 2.2, 6.5), 1.5),
    "hardswish": (_hardswish, lambda: (-3.0, 3.0), 0.0),
    "hardsigmoid": (_hardsigmoid, lambda: (-3.0, 3.0), 0.0),
    "clamp": (_clamp, lambda low, high: (low, high), 0.0),
}


def _kernels(nodes: int) -> dict[str, Callable[..., Slopes]]:
    return {
        "affine": _affine,
        "gain": _linear,
        "dropout": _dropout,
        "maximum": _maximum,
        "compose": _compose(nodes),
        "two_slopes": _two_slopes,
        "add": _add,
        "skip": after_skip,
        "mul": _mul,
        **{name: _quadrature(*of, nodes) for name, of in CURVES.items()},
    }


KERNELS = {nodes: _kernels(nodes) for nodes in (SINGLE, DOUBLE)}
