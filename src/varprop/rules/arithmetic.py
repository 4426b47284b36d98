"""Sums, products, quotients, maxima, choices and comparisons, of constants and of several random values.

Operands that are functions of one random value never reach the functions below: the whole expression is then one
function of that value (`clusters`). Here the operands are treated as independent, and marked so if they may not be.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..gaussian import maximum as gaussian_maximum
from ..gaussian import softmax as gaussian_softmax
from ..gaussian.activations import lognormal_power, sigmoid
from ..gaussian.rectifier import step
from ..moments import Moments
from .axes import lift, negative
from .reduction import root
from .registry import SMOOTH_STEP, elementwise, rule

aten = torch.ops.aten
LENGTH = "the sum of two random squares is taken as a Gamma variable (std error up to 7 %)"
QUOTIENT = "a random divisor is matched by a log-normal variable: good while its std is below a third of its mean"


def mean_of(x: Any) -> Any:
    """The mean of a random operand, a constant itself."""
    return x.mean if isinstance(x, Moments) else x


def var_of(x: Any) -> Any:
    """The variance of a random operand, zero for a constant."""
    return x.var if isinstance(x, Moments) else 0.0


def moments(mean: Tensor, var: Any) -> Moments:
    """Moments of one shape from a mean and a variance that broadcast."""
    return Moments(*torch.broadcast_tensors(mean, torch.as_tensor(var, dtype=mean.dtype, device=mean.device)))


def add_independent(a: Any, b: Any, *, alpha: float = 1) -> Moments:
    """Means and variances add."""
    return moments(mean_of(a) + alpha * mean_of(b), var_of(a) + alpha * alpha * var_of(b))


def sub_independent(a: Any, b: Any, *, alpha: float = 1) -> Moments:
    """Means subtract, variances add."""
    return add_independent(a, b, alpha=-alpha)


def mul_independent(a: Any, b: Any) -> Moments:
    """m = m1 m2, v = v1 v2 + m1^2 v2 + m2^2 v1: exact for any laws (mathematics.md, 8)."""
    m1, m2, v1, v2 = mean_of(a), mean_of(b), var_of(a), var_of(b)
    return moments(m1 * m2, v1 * v2 + m1 * m1 * v2 + m2 * m2 * v1)


def lerp_independent(a: Any, b: Any, weight: Any) -> Moments:
    """a (1 - w) + b w: E = E[a] (1 - E[w]) + E[b] E[w]; exact for any laws.

    Var = E[(1 - w)^2] Var a + E[w^2] Var b + Var w (E[b] - E[a])^2.
    """
    share, spread = mean_of(weight), var_of(weight)
    gap = mean_of(b) - mean_of(a)
    var = ((1 - share) ** 2 + spread) * var_of(a) + (share**2 + spread) * var_of(b)
    return moments(mean_of(a) + share * gap, var + spread * gap * gap)


def maximum_independent(a: Any, b: Any) -> Moments:
    """Clark's moments of the maximum of two Gaussians (mathematics.md, 7.1)."""
    a, b = lift(a), lift(b)
    return Moments(*gaussian_maximum.pair(a.mean, a.var, b.mean, b.var))


def hypot_independent(a: Any, b: Any) -> Moments:
    """The `root` of a^2 + b^2, whose mean and variance are known exactly."""
    (m1, v1), (m2, v2) = ((mean_of(x) * mean_of(x), var_of(x)) for x in (a, b))
    return moments(*root(m1 + v1 + m2 + v2, 2 * (v1 * v1 + v2 * v2) + 4 * (m1 * v1 + m2 * v2)))


def logaddexp_independent(a: Any, b: Any) -> Moments:
    """log(exp a + exp b) by the integrals of `gaussian.softmax`; exact for Gaussians."""
    a, b = lift(a), lift(b)
    mean, var = (torch.stack(torch.broadcast_tensors(*pair), -1) for pair in ((a.mean, b.mean), (a.var, b.var)))
    return Moments(*gaussian_softmax.logsumexp(mean, var, -1))


@rule(aten.glu, skews=True)
def glu(x: Moments, dim: int = -1) -> Moments:
    """a sigmoid(b) for the two halves of an axis: a product of independent values."""
    a, b = (Moments(*pair) for pair in zip(x.dense().mean.chunk(2, dim), x.dense().var.chunk(2, dim), strict=True))
    return mul_independent(a, Moments(*sigmoid(b.mean, b.std)))


def where_independent(condition: Any, a: Any, b: Any) -> Moments:
    """A fixed choice takes either operand; a random one mixes them, with the spread between their means."""
    if isinstance(condition, Tensor):
        like = next(mean_of(x) for x in (a, b) if isinstance(x, Moments))
        a_var, b_var = (torch.as_tensor(var_of(x), dtype=like.dtype, device=like.device) for x in (a, b))
        return moments(torch.where(condition, mean_of(a), mean_of(b)), torch.where(condition, a_var, b_var))
    p = condition.mean
    mean = p * mean_of(a) + (1 - p) * mean_of(b)
    return moments(mean, p * var_of(a) + (1 - p) * var_of(b) + p * (1 - p) * (mean_of(a) - mean_of(b)) ** 2)


def greater_independent(a: Any, b: Any) -> Moments:
    """P(a > b) for Gaussians."""
    gap = sub_independent(a, b)
    return Moments(*step(gap.mean, gap.std))


def _where_line(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return None
    slopes, offsets = zip(*(_slope_offset(x) for x in (a, b)), strict=True)
    like = next(t for t in (*offsets, *slopes, condition.double()) if isinstance(t, Tensor))
    pairs = [[torch.as_tensor(v, device=like.device) for v in pair] for pair in (slopes, offsets)]
    line = next(x for x in (a, b) if hasattr(x, "slope"))
    return type(line)(*(torch.where(condition, x, y) for x, y in pairs))


def _slope_offset(x: Any) -> tuple[Any, Any]:
    return (x.slope, x.offset) if hasattr(x, "slope") else (0.0, x)


def _added(a: Any, b: Any) -> Any:
    """a + b for a line and whatever else, by the line's method: Dynamo takes a sum with a tensor for one of torch's."""
    return a.__add__(b) if hasattr(a, "slope") else b.__add__(a)


def _multiplied(a: Any, b: Any) -> Any:
    """a * b, likewise."""
    return a.__mul__(b) if hasattr(a, "slope") else b.__mul__(a)


def _addcmul_line(base: Any, a: Any, b: Any, value: float = 1) -> Any:
    """base + value a b as a line, None if both factors are lines."""
    product = _multiplied(a, b)
    return None if product is None else _added(base, _multiplied(value, product))


def _addcdiv_line(base: Any, a: Any, b: Any, value: float = 1) -> Any:
    """base + value a / b as a line, None if the divisor is one."""
    return None if hasattr(b, "slope") else _addcmul_line(base, a, 1 / b, value)


elementwise(
    aten.add,
    affine=lambda a, b, alpha=1: _added(a, b * alpha),
    independent=add_independent,
    multilinear=True,
    signs=(1.0, 1.0),
    kernel=lambda alpha=1: ("add", alpha),
)
elementwise(
    aten.sub,
    affine=lambda a, b, alpha=1: _added(a, b * -alpha),
    independent=sub_independent,
    multilinear=True,
    signs=(1.0, -1.0),
    kernel=lambda alpha=1: ("add", -alpha),
)
elementwise(
    aten.rsub,
    affine=lambda a, b, alpha=1: _added(b, a * -alpha),
    independent=lambda a, b, alpha=1: sub_independent(b, a, alpha=alpha),
    multilinear=True,
    signs=(-1.0, 1.0),
)
elementwise(aten.mul, affine=_multiplied, independent=mul_independent, multilinear=True, product=True, kernel=("mul",))
elementwise(
    aten.div,
    aten.true_divide,
    affine=lambda a, b: a.__truediv__(b) if hasattr(a, "slope") else None,
    independent=lambda a, b: mul_independent(a, Moments(*lognormal_power(b.mean, b.std, -1))),  # a times 1 / b
    positive=1,
    approximate=lambda _a, b: QUOTIENT if isinstance(b, Moments) else None,
)
elementwise(aten.neg, affine=lambda a: -a)
elementwise(aten.deg2rad, affine=lambda a: a * (math.pi / 180), monotone=True)
elementwise(aten.rad2deg, affine=lambda a: a * (180 / math.pi), monotone=True)
elementwise(
    aten.addcmul,
    affine=_addcmul_line,
    independent=lambda base, a, b, value=1: add_independent(base, mul_independent(a, b), alpha=value),
    multilinear=True,
    mixes_positions=True,
)
elementwise(
    aten.lerp,
    affine=lambda a, b, w: a + (b - a) * w if not hasattr(w, "slope") else None,
    evaluate=lambda a, b, w: a + (b - a) * w,  # torch's own wants one dtype
    independent=lerp_independent,
    multilinear=True,
    mixes_positions=True,
)
elementwise(aten.addcdiv, affine=_addcdiv_line, positive=2)
elementwise(
    aten.hypot,
    independent=hypot_independent,
    approximate=lambda a, b: LENGTH if isinstance(a, Moments) and isinstance(b, Moments) else None,
)
elementwise(aten.logaddexp, knots=SMOOTH_STEP, compares=True, independent=logaddexp_independent)
elementwise(aten.maximum, aten.fmax, aten.max.other, kinks=(0.0,), compares=True, independent=maximum_independent)
elementwise(
    aten.minimum,
    aten.fmin,
    aten.min.other,
    kinks=(0.0,),
    compares=True,
    independent=lambda a, b: negative(maximum_independent(negative(lift(a)), negative(lift(b)))),
)
elementwise(aten.where, affine=_where_line, independent=where_independent, multilinear=True)
elementwise(
    aten.masked_fill,
    affine=lambda x, mask, value: _where_line(mask, value, x),
    independent=lambda x, mask, value: where_independent(mask, value, x),
    multilinear=True,
)
elementwise(aten.gt, aten.ge, jumps=(0.0,), compares=True, independent=greater_independent)
elementwise(aten.lt, aten.le, jumps=(0.0,), compares=True, independent=lambda a, b: greater_independent(b, a))
elementwise(aten.eq, aten.ne)
elementwise(aten.logical_and, aten.bitwise_and, aten.__and__)
elementwise(aten.logical_or, aten.bitwise_or, aten.__or__)
elementwise(aten.logical_not, aten.bitwise_not)
