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

More logits, on a processor, need no integrals where none of them has much of the weight (`softmax_series`): E softmax
within 1e-6, sd within 0.2 %. In the other rows they share a few integrals (`shared_integrals`): E softmax within 1e-7,
sd within 0.2 %. Where their means and std differ so much that this does not converge, each has integrals of its own.

The series of many logits, of which none has much of the weight, is one in the spread of their sum. With S = sum_k
e^{X_k}, E s_y = E e^{X_y} / S = mu_y E_y[1 / S], where mu_y = E e^{X_y} and E_y has the mean of X_y raised by its
variance; E s_y^2 = E e^{2 X_y} E_yy[1 / S^2] with twice the rise. S is a sum of independent log-normal numbers, whose
cumulants are known, and varies little around its mean M, so that with eps = Var S / M^2 and kappa = k_3(S) / M^3

    M E[1/S]   = 1 +   eps -   kappa +  3 eps^2 + ...
    M^2 E[1/S^2] = 1 + 3 eps - 4 kappa + 15 eps^2 + ...

The terms of third order, k_4 - 10 eps kappa + 15 eps^3, say how far the series can be trusted, row by row. Where those
of second order are as small as that, they are left out too, which takes a quarter of the operations.
"""

import functools
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .normal import (
    ROOT_TWO_PI,
    Pair,
    batches,
    differentiated,
    gauss_legendre,
    promote,
    ratio,
    readable,
    rowwise,
    safe_sqrt,
)
from .quadrature import Range, transform

CLOSE_IN_SERIES = 2e-7  # what terms of third order may add to a probability
SHARE = 1e-5  # and what they may be of the whole: of the variance, a difference, they are then up to some 0.2 %
WIDEST = 2.0  # variance of a logit above which higher terms may be larger than those looked at
CACHED = 1 << 16  # logits whose temporaries stay in the cache of a processor


class SoftmaxSeries(NamedTuple):
    """Mean and variance of softmax along the last axis, and the rows in which the series can be trusted."""

    mean: Tensor
    var: Tensor
    close: Tensor


class Exponentials(NamedTuple):
    """Shares mu_y / M of the logits, exp(var) - 1 of each, their product, Var S / M^2, and the largest of a row."""

    share: Tensor
    spread: Tensor
    product: Tensor
    eps: Tensor
    most: Tensor  # share
    widest: Tensor  # spread


def _exponentials(mean: Tensor, var: Tensor) -> Exponentials:
    p, d = torch.softmax(torch.add(mean, var, alpha=0.5), -1), torch.expm1(var)
    pd = p * d
    eps, most = (p * pd).sum(-1, keepdim=True), p.detach().amax(-1, keepdim=True)
    return Exponentials(p, d, pd, eps, most, torch.expm1(var.detach().amax(-1, keepdim=True)))


def _left_out(x: Exponentials, kappa: Tensor) -> Tensor:
    """The size of the terms of third order; k_4 = mu^4 (w - 1)^2 (w^4 + 2 w^3 + 3 w^2 - 6) from its ratio to k_3."""
    w, eps = x.widest + 1.0, x.eps.detach()
    fourth = x.most * (w * w * (w * (w + 2.0) + 3.0) - 6.0) / (w + 2.0)
    return kappa * (fourth + 10.0 * eps + 9.0 * x.most * x.widest) + 15.0 * eps * eps * eps


def _second_order(x: Exponentials, kappa: Tensor) -> Pair:
    """E s and Var s; written without differences of nearly equal numbers.

    E s^2 / (E s)^2 - 1 = A + B + A B, A without the terms of the series and B with them alone. The rise of one logit
    counts in M and eps; in kappa it is of third order.
    """
    p, d, pd = x.share, x.spread, x.product
    square, above = pd * p, d + 2.0
    rise = square * d * above  # of eps, with w^2 - 1 = d (d + 2)
    once, twice = 1.0 / (pd + 1.0), 1.0 / torch.addcmul(pd.new_ones(()), pd, above)
    eps1 = (rise + x.eps) * once * once
    eps2 = torch.addcmul(x.eps, rise, torch.addcmul(above, d, above)) * twice * twice  # w^4 - 1 = (w^2 - 1) (w^2 + 1)
    g1 = torch.addcmul(-kappa, eps1, 1.0 + 3.0 * eps1)
    g2 = torch.addcmul(-4.0 * kappa, eps2, 3.0 + 15.0 * eps2)
    a = d * (1.0 - 2.0 * p - square * (3.0 + d * (d + 3.0))) * twice * twice
    b = (g2 - g1 * (2.0 + g1)) / torch.square(1.0 + g1)
    m = p * once * (1.0 + g1)
    return m, m * m * torch.addcmul(a + b, a, b).clamp_min(0.0)


def _is_small(x: Exponentials) -> bool:
    """True if terms of second order are as small everywhere as those of third order have to be.

    In E s / p - 1 = eps - pd they are 3 eps^2 + (d + 3) (pd)^2 - kappa - 3 eps pd, and kappa <= (d + 3) pd eps.
    """
    eps, product, factor = x.eps, x.most * x.widest, x.widest + 3.0
    above, below = 3.0 * eps * eps + factor * product * product, (factor + 3.0) * product * eps
    return bool(_is_close(1.25 * torch.maximum(above, below), x).all())


def _first_order(x: Exponentials) -> Pair:
    """`_second_order` to first order in eps and pd."""
    p, d, pd, eps = x.share, x.spread, x.product, x.eps
    m = torch.addcmul(p, p, eps - pd)
    a = torch.addcmul(d, d, torch.addcmul(p, pd, d + 2.0), value=-2.0)
    return m, torch.addcmul(eps, a, eps + 1.0).mul_(m).mul_(m)


def _is_close(left_out: Tensor, x: Exponentials) -> Tensor:
    """Rows that are narrow enough, in which what was left out is small, or one logit has all of the weight."""
    small = (left_out * x.most <= CLOSE_IN_SERIES) & (left_out <= SHARE)
    return (x.widest <= math.expm1(WIDEST)) & (small | (x.most == 1.0))


def _block(mean: Tensor, var: Tensor) -> SoftmaxSeries:
    x = _exponentials(mean, var)
    if not differentiated(mean, var) and _is_small(x):
        return SoftmaxSeries(*_first_order(x), torch.ones_like(x.most, dtype=torch.bool))
    # cumulants of exp(X), with w = exp(var), are mu^2 (w - 1), mu^3 (w - 1)^2 (w + 2) and so on
    kappa = (x.product * x.product * x.share * (x.spread + 3.0)).sum(-1, keepdim=True)
    alone = x.most == 1.0  # as in the first row under a causal mask
    first, second = _second_order(x, kappa)
    first, second = torch.where(alone, x.share, first), second.masked_fill(alone, 0.0)
    return SoftmaxSeries(first, second, _is_close(_left_out(x, kappa.detach()), x))


def softmax_series(mean: Tensor, var: Tensor) -> SoftmaxSeries:
    """Softmax along the last axis; E softmax within 1e-6 and sd within 0.2 % in the rows that are `close`."""
    shape = mean.shape
    mean, var = mean.reshape(-1, shape[-1]), var.reshape(-1, shape[-1])
    rows = max(1, CACHED // shape[-1])
    pairs = zip(mean.split(rows), var.split(rows), strict=True)
    blocks = [_block(m, v.clamp_max(WIDEST + 1.0)) for m, v in pairs]
    first, second, close = (torch.cat(x) for x in zip(*blocks, strict=True)) if len(blocks) > 1 else blocks[0]
    return SoftmaxSeries(first.view(shape), second.view(shape), close.view(shape[:-1]))


FEW = 1 << 12  # logits up to which each has integrals of its own
LIMIT = 1 << 15  # logits up to which the fine setting is the choice for them
_MASKED = -1e3  # relative to the largest mean: no weight at all
_HIDDEN = -1e30  # the same without looking for the largest
EULER = 0.57721566490153286
_FLAT, _BEND, _END = -18.0, -3.0, 3.7  # where exp(-e^y) is one, begins to fall, is zero
_WIDE = 0.8
# For integrals that many logits share
_SHARED_LINEAR = 0.01  # std below which variances are linearised
STEP = 0.4  # of t: the density of T is no narrower than Gumbel's, for which the trapezoidal rule is then exact to 1e-9
LEFT, RIGHT, SPREAD = 3.7, 14.0, 5.5  # ends of t beyond the logits, and their range in std
LOST = 30.0  # a logit so far below the largest, and eight of its std, has no weight
CLOSE = 4e-7  # how small the last coefficients must be: of the sum of log F
NEVER = -30.0  # log of a probability that is neglected
SIZES = ((6, 5), (10, 6), (16, 8), (24, 10), (36, 14), (54, 18), (80, 24))  # nodes in mean and std to be tried in turn
HOPELESS = (16, 0.1)  # with so many nodes in mean, what never converges is larger than this, what does is smaller
SHORT = 8  # logits that count in a row which is not worth sharing
MOST = 400  # nodes of t
TRIED = 32  # rows on which a size is tried first
BLOCK = 1 << 18  # values of polynomials held at a time
LEAST = 2e-3  # the least width of an interval


class Setting(NamedTuple):
    """How the integrals of single logits are taken: over z, a logit in units of its std, and over t."""

    window: float  # of z, on either side
    panels: tuple[tuple[tuple[float, float], ...], ...]  # Gauss-Legendre nodes and weights of three panels of z
    nodes: int  # of t
    left: float  # ends of t below and above the logits
    right: float
    spread: float  # the range of a logit, in std
    linear: float  # std below which variances are linearised


def _gauss_legendre(*counts: int) -> tuple[tuple[tuple[float, float], ...], ...]:
    return tuple(tuple(zip(*gauss_legendre(n), strict=True)) for n in counts)


_FINE = Setting(7.5, _gauss_legendre(16, 16, 24), 96, 3.7, 14.0, 6.5, 5e-3)
_COARSE = Setting(4.5, _gauss_legendre(6, 6, 12), 32, 2.8, 8.0, 4.5, 5e-2)


def _panels(mean: Tensor, std: Tensor, t: Tensor, window: float) -> list[tuple[Tensor, Tensor]]:
    """Centres and half widths in z of three panels on which exp(-e^{mean + std z - t}) is not zero.

    Two below the bend and one above it; three equal ones if the bend is not in the window or so wide that it
    needs no panel of its own.
    """
    shift = t - mean
    end = ratio(shift + _END, std).clamp(-window, window)
    bend = ratio(shift + _BEND, std)
    split = (bend > -window) & (bend < end) & (std > _WIDE)
    bend = torch.where(split, bend, (2.0 * end - window) / 3.0)
    middle = 0.5 * (bend - window)
    middle = torch.where(split, torch.maximum(middle, ratio(shift + _FLAT, std)), middle)
    edges = (torch.full_like(end, -window), middle, bend, end)
    return [(0.5 * (u + v), 0.5 * (v - u)) for u, v in pairwise(edges)]


def _values(
    mean: Tensor, std: Tensor, t: Tensor, centre: Tensor, half: Tensor, node: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A node z, a = e^{mean + std z - t}, and e^{-a - z^2/2}."""
    z = torch.add(centre, half, alpha=node)
    a = torch.exp(torch.addcmul(mean - t, std, z))
    return z, a, torch.exp(-torch.addcmul(a, z, z, value=0.5))


class _Gumbel(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, std: Tensor, t: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
        total = [torch.zeros_like(t - mean) for _ in range(3)]
        for panel, (centre, half) in zip(setting.panels, _panels(mean, std, t, setting.window), strict=True):
            f0, f1, f2 = (torch.zeros_like(half) for _ in range(3))
            for node, weight in panel:
                _, a, e = _values(mean, std, t, centre, half, node)
                ea = e * a
                f0, f1 = torch.add(f0, e, alpha=weight), torch.add(f1, ea, alpha=weight)
                f2 = torch.addcmul(f2, ea, a, value=weight)
            total = [s + half * f for s, f in zip(total, (f0, f1, f2), strict=True)]
        return total[0] / ROOT_TWO_PI, total[1] / ROOT_TWO_PI, total[2] / ROOT_TWO_PI

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.setting = inputs[3]

    @staticmethod
    def backward(ctx: Any, g0: Tensor, g1: Tensor, g2: Tensor) -> tuple[Tensor, Tensor, None, None]:
        mean, std, t = ctx.saved_tensors
        by_mean, by_std = torch.zeros_like(g0), torch.zeros_like(g0)
        panels = _panels(mean, std, t, ctx.setting.window)
        for panel, (centre, half) in zip(ctx.setting.panels, panels, strict=True):
            for node, weight in panel:
                z, a, e = _values(mean, std, t, centre, half, node)
                slope = (weight / ROOT_TWO_PI) * half * e * a * (g1 - g0 + a * (2.0 * g2 - g1 - a * g2))
                by_mean, by_std = by_mean + slope, torch.addcmul(by_std, z, slope)
        return by_mean.sum_to_size(mean.shape), by_std.sum_to_size(std.shape), None, None


def gumbel(mean: Tensor, std: Tensor, t: Tensor, setting: Setting = _FINE) -> tuple[Tensor, Tensor, Tensor]:
    """E[a^n e^{-a}] for n = 0, 1, 2 with a = e^{X - t}, X ~ N(mean, std^2); no derivative by t."""
    result: tuple[Tensor, Tensor, Tensor] = _Gumbel.apply(mean, std, t, setting)  # type: ignore[no-untyped-call]
    return result


class Integrals(NamedTuple):
    """E softmax and E softmax^2 (along the last axis), mean and variance of log-sum-exp."""

    first: Tensor
    second: Tensor
    log_mean: Tensor
    log_var: Tensor


Solver: TypeAlias = Callable[[Tensor, Tensor], Integrals | None]


def _integrals(mean: Tensor, std: Tensor, setting: Setting) -> Integrals:
    """Trapezoidal rule in t for f1_y / f0_y prod f0 (softmax) and f2_y / f0_y prod f0 (its square)."""
    mu, sd = mean.detach(), std.detach()
    low = (mu - setting.spread * sd).amax(-1, keepdim=True) - setting.left
    high = (mu + setting.spread * sd).amax(-1, keepdim=True) + math.log(mean.shape[-1]) + setting.right
    h = (high - low) / (setting.nodes - 1)
    ref = torch.logsumexp(mu, -1, keepdim=True)
    first, second = torch.zeros_like(mean), torch.zeros_like(mean)
    log_first, log_second = torch.zeros_like(low), torch.zeros_like(low)
    last1, last2 = first, second
    for q in batches(setting.nodes, mean):
        t = low + q.reshape(-1, *[1] * mean.dim()) * h
        f0, f1, f2 = gumbel(mean, std, t, setting)
        f0 = f0.clamp(min=1e-150)
        besides = h * torch.exp(torch.log(f0).sum(-1, keepdim=True)) / f0
        d1, d2 = f1 * besides, f2 * besides
        density, y = d1.sum(-1, keepdim=True), t - ref
        first, second = first + d1.sum(0), second + d2.sum(0)
        log_first, log_second = log_first + (y * density).sum(0), log_second + (y * y * density).sum(0)
        last1, last2 = d1[-1], d2[-1]
    # Above the last node the integrands fall like e^{-t} and e^{-2t}: geometric series.
    r, end, density = torch.exp(-h), high - ref, last1.sum(-1, keepdim=True)
    s0, s1, s2 = _geometric(r)
    first, second = first + last1 * s0, second + last2 * r * r / (1.0 - r * r)
    log_first = log_first + density * (end * s0 + h * s1)
    log_second = log_second + density * (end.square() * s0 + 2.0 * end * h * s1 + h * h * s2)
    total = first.sum(-1, keepdim=True)
    first, second, log_first, log_second = first / total, second / total, log_first / total, log_second / total
    return Integrals(first, second, ref + log_first - EULER, log_second - log_first.square() - math.pi**2 / 6.0)


def _geometric(r: Any) -> tuple[Any, Any, Any]:
    """The sums of r^n, n r^n and n^2 r^n from n = 1 on."""
    return r / (1.0 - r), r / (1.0 - r) ** 2, r * (1.0 + r) / (1.0 - r) ** 3


def _one_by_one(mean: Tensor, std: Tensor, setting: Setting = _FINE) -> Integrals:
    return Integrals(*rowwise(functools.partial(_integrals, setting=setting), mean, std))


class Coefficients(NamedTuple):
    """Coefficients (mean x std x t) of log F and of E[a e^-a] / F and E[a^2 e^-a] / F, scaled by e^-m/2 and e^-m."""

    log_f: Tensor
    first: Tensor
    second: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """Nodes in mean and std."""
        return self.log_f.shape[0], self.log_f.shape[1]


def _nodes(multiples: range, like: Tensor) -> Tensor:
    """The nodes of t: multiples of STEP, so that calls of like logits have the same."""
    return STEP * torch.arange(multiples.start, multiples.stop, dtype=like.dtype)


@torch.inference_mode(False)
@torch.no_grad()
def _computed_table(multiples: range, means: Range, stds: Range, size: tuple[int, int]) -> Coefficients:
    """The coefficients for intervals of means and stds, with so many nodes in each."""
    t = _nodes(multiples, torch.empty(0, dtype=torch.float64))
    m, s = means.nodes(size[0], t)[:, None, None], stds.nodes(size[1], t)[:, None]
    f0, f1, f2 = gumbel(m, s.abs(), t)
    f0 = f0.clamp(min=1e-150)
    values = torch.log(f0), f1 / f0 * torch.exp(-0.5 * m), f2 / f0 * torch.exp(-m)
    by_mean, by_std = transform(size[0], t), transform(size[1], t)
    return Coefficients(*(torch.einsum("am,bs,mst->abt", by_mean, by_std, v) for v in values))


# Small ones are cached: the layers of a model have logits that are alike.
_cached_table = functools.lru_cache(maxsize=64)(_computed_table)


def _tail(coefficients: Tensor) -> Tensor:
    """The size of the last coefficients, those of the two highest degrees in either variable."""
    return torch.maximum(coefficients[-2:].abs().amax((0, 1)), coefficients[:, -2:].abs().amax((0, 1)))


def _rounded(size: float, up: bool) -> float:
    """The next sixteenth of an octave: equal intervals for calls that are alike, none much wider than it must be."""
    if size < LEAST:
        return LEAST if up else 0.0
    power = 16.0 * math.log2(size)
    return math.exp2((math.ceil(power) if up else math.floor(power)) / 16.0)


class LogitRows(NamedTuple):
    """The logits of a call as rows, which of them are lost, which `_nodes` t has, and intervals of means and std."""

    mean: Tensor
    std: Tensor
    lost: Tensor
    multiples: range
    means: Range
    stds: Range

    @property
    def t(self) -> Tensor:
        """The nodes of t."""
        return _nodes(self.multiples, self.mean)

    def select(self, rows: slice) -> "LogitRows":
        """Some of the rows."""
        return self._replace(mean=self.mean[rows], std=self.std[rows], lost=self.lost[rows])


def _call(mean: Tensor, std: Tensor) -> LogitRows | None:
    mu, sd = mean.detach(), std.detach()
    lost = mu + 8.0 * sd < -LOST
    live_mean, live_std = mu[~lost], sd[~lost]
    if not len(live_mean) or not bool(torch.isfinite(live_mean).all() & torch.isfinite(live_std).all()):
        return None
    low = (mu - SPREAD * sd).masked_fill(lost, -math.inf).amax(-1).clamp(min=-1e3).amin() - LEFT
    high = (live_mean + SPREAD * live_std).amax() + math.log(mu.shape[-1]) + RIGHT
    first = 5 * math.floor(float(low) / (5 * STEP))
    count = 10 * math.ceil((float(high) / STEP + 1 - first) / 10)
    if count > MOST:
        return None
    means = Range.between(-_rounded(-float(live_mean.amin()), up=True), 0.0, LEAST)
    stds = Range.between(_rounded(float(live_std.amin()), up=False), _rounded(float(live_std.amax()), up=True), LEAST)
    # What is lost has no weight, whatever it is: it must only lie on the intervals.
    mean, std = torch.where(lost, means.middle, mean), torch.where(lost, stds.middle, std)
    return LogitRows(mean, std, lost, range(first, first + count), means, stds)


class Sums(NamedTuple):
    """Polynomials of every logit's mean (zero for lost ones) and std, and log P(T < t) of every row."""

    by_mean: Tensor
    by_std: Tensor
    log_below: Tensor


def _sums(x: LogitRows, table: Coefficients) -> Sums:
    by_mean = x.means.polynomials(x.mean, table.size[0]).masked_fill(x.lost.unsqueeze(-1), 0.0)
    by_std = x.stds.polynomials(x.std, table.size[1])
    log_below = (by_mean.mT @ by_std).flatten(-2) @ table.log_f.flatten(0, 1)
    # It rises with t: below the first t without a probability, where polynomials may go astray, there is none.
    least = log_below.detach().flip(-1).cummin(-1).values.flip(-1)
    return Sums(by_mean, by_std, log_below.masked_fill(least < NEVER, -math.inf))


def _left(table: Coefficients, log_below: Tensor) -> float:
    """The error of log F: the size of its last coefficients, wherever some row has a probability."""
    counts = (log_below.detach() > NEVER).any(0)
    return float(torch.where(counts, _tail(table.log_f), 0.0).amax())


def _by_polynomials(x: LogitRows, table: Coefficients, sums: Sums) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The integrals before division by their total, by the trapezoidal rule in t.

    What lies above the last node, where integrands fall like e^-t and e^-2t, is added.
    """
    r = math.exp(-STEP)
    weight = STEP * torch.exp(sums.log_below)
    end = torch.zeros_like(x.t)
    end[-1] = 1.0
    weights = weight * (1.0 + end * r / (1.0 - r)), weight * (1.0 + end * r * r / (1.0 - r * r))
    first, second = (
        ((sums.by_mean @ (w @ c.flatten(0, 1).mT).view(-1, *table.size)) * sums.by_std).sum(-1)
        for w, c in zip(weights, (table.first, table.second), strict=True)
    )
    root = torch.exp(0.5 * x.mean)
    lift = (sums.by_mean * root.unsqueeze(-1)).mT @ sums.by_std
    density = weight * (lift.flatten(-2) @ table.first.flatten(0, 1))
    # first and second moment of T relative to the log-sum-exp of the means, times the total density
    y = x.t - _reference(x)
    s0, s1, s2 = _geometric(r)
    last, high = density[:, -1:], y[:, -1:]
    log_first = (y * density).sum(-1, keepdim=True) + last * (high * s0 + STEP * s1)
    log_second = (y.square() * density).sum(-1, keepdim=True)
    log_second = log_second + last * (high.square() * s0 + 2.0 * high * STEP * s1 + STEP * STEP * s2)
    return first * root, second * x.mean.exp(), log_first, log_second


def _reference(x: LogitRows) -> Tensor:
    return torch.logsumexp(x.mean.detach().masked_fill(x.lost, -math.inf), -1, keepdim=True).clamp(min=-1e3)


def shared_integrals(mean: Tensor, std: Tensor, direct: Solver | None = None) -> Integrals | None:
    """`Integrals` along the last axis from polynomials in mean and std; None where these do not converge.

    F(t) = E exp(-e^{X - t}) and the moments of softmax are smooth functions of a logit's mean and std, so that those of
    all logits of a call follow from their values on a small grid of Chebyshev nodes: the sum of log F over a row needs
    the row's sums of products of Chebyshev polynomials, and the moments of each logit are a polynomial whose
    coefficients are the row's. E softmax within 1e-7, sd within 0.2 %; the means must be relative to the largest of
    each row. Rows in which few logits count, as the first under a causal mask, are a call of their own, and where that
    does not converge are left to `direct`, the integrals one by one.
    """
    shape = mean.shape
    mean, std = mean.reshape(-1, shape[-1]), std.reshape(-1, shape[-1])
    counted = (mean.detach() + 8.0 * std.detach() >= -LOST).sum(-1)
    short = counted <= SHORT
    if direct is None or shape[-1] <= 2 * SHORT or not bool(short.any()) or bool(short.all()):
        result = _narrowed(mean, std, counted, _together)
    else:
        groups = (~short).nonzero().squeeze(-1), short.nonzero().squeeze(-1)
        solvers: tuple[Solver, Solver] = _together, lambda m, s: _together(m, s) or direct(m, s)
        long_rows, short_rows = (
            _narrowed(mean[g], std[g], counted[g], solve) for g, solve in zip(groups, solvers, strict=True)
        )
        if long_rows is None or short_rows is None:
            return None
        order = torch.cat(groups).argsort()
        result = Integrals(*(torch.cat(pair)[order] for pair in zip(long_rows, short_rows, strict=True)))
    return None if result is None else Integrals(*(x.reshape(*shape[:-1], -1) for x in result))


def _narrowed(mean: Tensor, std: Tensor, counted: Tensor, solve: Solver) -> Integrals | None:
    """Solve for the largest logits of every row alone, as many as count in any."""
    width = max(1, int(counted.amax()))
    if 2 * width > mean.shape[-1]:
        return solve(mean, std)
    indices = (mean.detach() + 8.0 * std.detach()).topk(width, -1).indices
    result = solve(mean.gather(-1, indices), std.gather(-1, indices))
    if result is None:
        return None
    first, second, log_mean, log_var = result
    empty = torch.zeros_like(mean)
    return Integrals(empty.scatter(-1, indices, first), empty.scatter(-1, indices, second), log_mean, log_var)


def _together(mean: Tensor, std: Tensor) -> Integrals | None:
    """The integrals by the smallest table that is close, tried on some of the rows first; None if none is."""
    call = _call(mean, std)
    if call is None:
        return None
    some = call.select(slice(None, None, max(1, len(call.mean) // TRIED)))
    for size in SIZES:
        table = (_cached_table if size[0] <= 24 else _computed_table)(call.multiples, call.means, call.stds, size)
        with torch.no_grad():
            left = _left(table, _sums(some, table).log_below)
        if left < CLOSE and (result := _all_rows(call, table)) is not None:
            return result
        if size[0] >= HOPELESS[0] and left > HOPELESS[1]:
            return None
    return None


def _all_rows(call: LogitRows, table: Coefficients) -> Integrals | None:
    """The integrals of all rows by one table, in blocks; None if it is not close for one of them."""
    rows = max(1, BLOCK // (call.mean.shape[-1] * sum(table.size)))
    blocks = []
    for start in range(0, len(call.mean), rows):
        x = call.select(slice(start, start + rows))
        sums = _sums(x, table)
        if _left(table, sums.log_below) > CLOSE:
            return None
        first, second, log_first, log_second = _by_polynomials(x, table, sums)
        total = first.sum(-1, keepdim=True).clamp(min=1e-300)
        log_first = log_first / total
        log_var = log_second / total - log_first.square() - math.pi**2 / 6.0
        blocks.append(Integrals(first / total, second / total, _reference(x) + log_first - EULER, log_var))
    return Integrals(*(torch.cat(block) for block in zip(*blocks, strict=True)))


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


def _solve(x: Logits) -> tuple[Integrals, Tensor, Tensor, Tensor]:
    """The integrals; softmax(mean), sum softmax^2 var and the rows whose variances that linearises well."""
    s, std = torch.softmax(x.mean, -1), safe_sqrt(x.var)
    shared = shared_integrals(x.mean, std, _one_by_one) if x.together else None
    integrals = shared or _one_by_one(x.mean, std, x.setting)
    linear = (x.var < (_SHARED_LINEAR if shared else x.setting.linear) ** 2).all(-1, keepdim=True)
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
    m, v, close = softmax_series(mean.clamp_min(_HIDDEN) if masked else mean, var)
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
