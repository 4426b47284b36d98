"""Softmax, log-softmax and log-sum-exp of independent Gaussian logits.

With T = log-sum-exp + Gumbel noise, P(T < t) = prod_k F_k(t), F_k(t) = E exp(-e^{X_k - t}), so every moment is a
one-dimensional integral over t (Gumbel trick; mathematics.md, section 8). Up to 2^12 logits, and where the values of
the logits cannot be looked at (compiled, on a GPU), each is integrated by itself, in one of two settings:

* fine: 96 x 56 values a logit; E softmax within 1e-10, Var within 1e-9, moments of log-sum-exp within 1e-8
  for std up to 8, unless a nearly constant logit stands beside one of std 8 (mean 1e-5, variance 1e-4). Up to 2^15
  logits.
* coarse: 32 x 24 values a logit; E softmax within 7e-5, Var within 4e-4 (sd: median below 2 %), E log-sum-exp
  within 0.01 (means N(0, 4), 2 to 197 logits, std 0.1 to 4). The log-normal sum of Fenton (1960), a few
  times cheaper still, is as good for std below 0.5 but wrong by a factor 2 and more from std 2 on.

More logits, on a processor, need no integrals where none of them has much of the weight (`series`): E softmax within
1e-6, sd within 0.2 %. In the other rows they share a few integrals (`alike`): E softmax within 1e-7, sd within 0.2 %;
only where their means and std differ so much that this does not converge are they integrated one by one.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import alike, series
from .gumbel import COARSE, FINE, Panels, gumbel
from .normal import Pair, batches, promote, readable, rowwise, safe_sqrt

FEW = 1 << 12  # logits up to which each has integrals of its own
LIMIT = 1 << 15  # logits up to which the fine setting is the choice for them
_ALIKE_LINEAR = 0.01
_MASKED = -1e3  # relative to the largest mean: no weight at all
_HIDDEN = -1e30  # the same without looking for the largest


class Setting(NamedTuple):
    """Nodes in t; ends of t beyond the range of the logits; range in std; std below which v is linearised."""

    rule: Panels
    nodes: int
    left: float
    right: float
    spread: float
    linear: float


_FINE = Setting(FINE, 96, 3.7, 14.0, 6.5, 5e-3)
_COARSE = Setting(COARSE, 32, 2.8, 8.0, 4.5, 5e-2)


class Integrals(NamedTuple):
    """E softmax and E softmax^2 (along the last axis), mean and variance of log-sum-exp."""

    first: Tensor
    second: Tensor
    log_mean: Tensor
    log_var: Tensor


class Logits(NamedTuple):
    """Means relative to the largest, `top`, and variances, in float64 with the axis last."""

    mean: Tensor
    var: Tensor
    top: Tensor
    masked: Tensor
    dtype: torch.dtype
    setting: Setting
    together: bool


def _logits(mean: Tensor, var: Tensor, dim: int, fine: bool | None, few: int = FEW) -> Logits:
    dtype, (mean, var) = promote(mean, var)
    mean, var = mean.movedim(dim, -1), var.movedim(dim, -1)
    masked = mean == -math.inf
    finite = torch.where(masked, -1e100, mean)
    top = finite.detach().amax(-1, keepdim=True)
    mean, var = torch.where(masked, _MASKED, finite - top), torch.where(masked, 0.0, var)
    together = fine is None and mean.numel() > few and readable(mean)
    fine = mean.numel() <= LIMIT if fine is None else fine
    return Logits(mean, var, top, masked, dtype, _FINE if fine else _COARSE, together)


def _integrals(mean: Tensor, std: Tensor, setting: Setting) -> Integrals:
    """Trapezoidal rule in t for f1_y / f0_y prod f0 (softmax) and f2_y / f0_y prod f0 (its square)."""
    mu, sd = mean.detach(), std.detach()
    low = (mu - setting.spread * sd).amax(-1, keepdim=True) - setting.left
    high = (mu + setting.spread * sd).amax(-1, keepdim=True) + math.log(mean.shape[-1]) + setting.right
    h = (high - low) / (setting.nodes - 1)
    ref = torch.logsumexp(mu, -1, keepdim=True)
    first, second = torch.zeros_like(mean), torch.zeros_like(mean)
    one, two = torch.zeros_like(low), torch.zeros_like(low)
    last1, last2 = first, second
    for q in batches(setting.nodes, mean):
        t = low + q.reshape(-1, *[1] * mean.dim()) * h
        f0, f1, f2 = gumbel(mean, std, t, setting.rule)
        f0 = f0.clamp(min=1e-150)
        others = h * torch.exp(torch.log(f0).sum(-1, keepdim=True)) / f0
        d1, d2 = f1 * others, f2 * others
        density, y = d1.sum(-1, keepdim=True), t - ref
        first, second = first + d1.sum(0), second + d2.sum(0)
        one, two = one + (y * density).sum(0), two + (y * y * density).sum(0)
        last1, last2 = d1[-1], d2[-1]
    # Above the last node the integrands fall like e^{-t} and e^{-2t}: geometric series.
    r, end, density = torch.exp(-h), high - ref, last1.sum(-1, keepdim=True)
    s0, s1, s2 = r / (1.0 - r), r / (1.0 - r).square(), r * (1.0 + r) / (1.0 - r) ** 3
    first, second = first + last1 * s0, second + last2 * r * r / (1.0 - r * r)
    one = one + density * (end * s0 + h * s1)
    two = two + density * (end.square() * s0 + 2.0 * end * h * s1 + h * h * s2)
    total = first.sum(-1, keepdim=True)
    first, second, one, two = first / total, second / total, one / total, two / total
    return Integrals(first, second, ref + one - alike.EULER, two - one.square() - math.pi**2 / 6.0)


def _one_by_one(mean: Tensor, std: Tensor, setting: Setting = _FINE) -> Integrals:
    return Integrals(*rowwise(partial(_integrals, setting=setting), mean, std))


def _solve(x: Logits) -> tuple[Integrals, Tensor, Tensor, Tensor]:
    """The integrals; softmax(mean), sum softmax^2 var and the rows whose variances that linearises well."""
    s, std = torch.softmax(x.mean, -1), safe_sqrt(x.var)
    found = alike.integrals(x.mean, std, _one_by_one) if x.together else None
    integrals = Integrals(*(found or _one_by_one(x.mean, std, x.setting)))
    linear = (x.var < (_ALIKE_LINEAR if found else x.setting.linear) ** 2).all(-1, keepdim=True)
    return integrals, s, (s.square() * x.var).sum(-1, keepdim=True), linear


def _finish(m: Tensor, v: Tensor, x: Logits, dim: int) -> Pair:
    return m.movedim(-1, dim).to(x.dtype), v.clamp(min=0.0).movedim(-1, dim).to(x.dtype)


def softmax(mean: Tensor, var: Tensor, dim: int, *, fine: bool | None = None) -> Pair:
    """Mean and variance of each probability; exact for independent Gaussian logits up to quadrature.

    E s_y = int D_y prod_{k != y} F_k dt with D_y = E[a e^{-a}], E s_y^2 the same with E[a^2 e^{-a}], a = e^{X_y-t}.
    The variance of rows whose std are all below 0.005 (coarse: 0.05) is linearised: sum_k (ds_y/dx_k)^2 var_k.
    A mean of -inf masks a logit.

    Args:
        mean: means of the logits.
        var: variances of the logits.
        dim: the axis that sums to one.
        fine: which setting of integrals one by one; None goes by the number of logits.
    """
    many = fine is None and mean.dtype in (torch.float32, torch.float64) and mean.numel() > FEW
    if many and mean.dtype == var.dtype and readable(mean):
        return _softmax_of_many(mean, var, dim)
    return _softmax_by_integrals(mean, var, dim, fine)


def _softmax_of_many(mean: Tensor, var: Tensor, dim: int) -> Pair:
    """The series, and the integrals for those rows in which it is not close."""
    mean, var = (x.movedim(dim, -1) for x in torch.broadcast_tensors(mean, var))
    shape = mean.shape
    mean, var = mean.reshape(-1, shape[-1]), var.reshape(-1, shape[-1])
    masked = bool(mean.detach().amin() == -math.inf)
    m, v, close = series.softmax(mean.clamp_min(_HIDDEN) if masked else mean, var)
    if masked:  # they have no weight, unless they are all
        hidden = mean.detach().amax(-1, keepdim=True) == -math.inf
        m, v = m.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    rows = (~close).nonzero().squeeze(-1)
    if len(rows):
        m_left, v_left = _softmax_by_integrals(mean[rows], var[rows], -1, None, few=0)
        m, v = m.index_copy(0, rows, m_left), v.index_copy(0, rows, v_left)
    return m.view(shape).movedim(-1, dim), v.view(shape).movedim(-1, dim)


def _softmax_by_integrals(mean: Tensor, var: Tensor, dim: int, fine: bool | None, few: int = FEW) -> Pair:
    x = _logits(mean, var, dim, fine, few)
    exact, s, pooled, linear = _solve(x)
    small = s.square() * ((1.0 - 2.0 * s) * x.var + pooled)
    m = torch.where(x.masked, 0.0, exact.first)
    v = torch.where(linear, small, torch.minimum(exact.second - m.square(), m * (1.0 - m)))
    return _finish(m, torch.where(x.masked, 0.0, v), x, dim)


def log_softmax(mean: Tensor, var: Tensor, dim: int, *, fine: bool | None = None) -> Pair:
    """x_y - LSE: m = mean_y - E LSE, v = var_y + Var LSE - 2 var_y E s_y (Stein); arguments as for `softmax`."""
    x = _logits(mean, var, dim, fine)
    exact, s, pooled, linear = _solve(x)
    share = torch.where(linear, s, exact.first)
    v = (1.0 - 2.0 * share) * x.var + torch.where(linear, pooled, exact.log_var)
    m = torch.where(x.masked, -math.inf, x.mean - exact.log_mean)
    return _finish(m, v, x, dim)


def logsumexp(mean: Tensor, var: Tensor, dim: int, *, fine: bool | None = None) -> Pair:
    """Mean and variance of log sum exp along `dim`, which is dropped; arguments as for `softmax`."""
    x = _logits(mean, var, dim, fine)
    exact, _, pooled, linear = _solve(x)
    m, v = x.top + exact.log_mean, torch.where(linear, pooled, exact.log_var)
    return m.squeeze(-1).to(x.dtype), v.squeeze(-1).clamp(min=0.0).to(x.dtype)
