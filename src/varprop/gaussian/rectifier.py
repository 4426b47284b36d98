"""Piecewise linear functions of a Gaussian variable: two slopes, clamp, step and sign; the rectifier of a sum.

The last is max(0, X + Y) with a rectified X, as at the end of a residual block. X is far from Gaussian: it is never
negative, so that the sum is negative less often than a Gaussian of its moments. X is therefore matched by two Gaussians
of one variance, which together have its mean, its variance, and the skewness of a rectified Gaussian with the same
ratio of mean and std (mathematics.md, 2.9).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .normal import (
    LEAST_STD,
    ROOT_HALF,
    Pair,
    Scalar,
    Slopes,
    applied,
    as_tensor,
    cdf,
    in_float64,
    mills,
    pdf,
    promote,
    ratio,
    readable,
    safe_sqrt,
    unit_legendre,
)

Four: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
_LEGENDRE = unit_legendre(16)
_STEEPEST = 1e-3  # below this std the derivatives of step and sign, which grow like 1/std, are held
# The two Gaussians for a rectified variable with r = mean / std: skewness = SKEW exp(-FALL r²) / r, and the share of
# the variance between them 1 / (1 + SPLIT r⁴).
SKEW, FALL, SPLIT = 1.4, 0.42, 0.1
LEAST_RATIO, MOST_RATIO = 1e-3, 50.0


def _tail(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E(Z-x)_+, E(Z-x)_+^2 and Var(Z-x)_+ for x >= 0, to full relative accuracy (mathematics.md, 2.1)."""
    p = pdf(x)
    _, h1, h2 = mills(x)
    return p * h1, p * h2, p * (h2 - p * h1 * h1)


def _half_lines(mean: Tensor, std: Tensor) -> Four:
    """Mean of X_+ and of X_-, and their variances over std^2 (mathematics.md, 2.4)."""
    # One branch on either side, zero with the upper one, so that derivatives of every order are right at mean zero:
    # those of abs and relu, which torch takes as zero there, are not.
    a, up = ratio(mean, std), mean >= 0.0
    g, _, r = _tail(torch.where(up, a, -a))
    lift, none = torch.erf(ROOT_HALF * a), torch.zeros_like(a)
    above, below = torch.where(up, mean, none), torch.where(up, none, -mean)
    lifted, lowered = torch.where(up, lift, none), torch.where(up, none, -lift)
    return above + std * g, below + std * g, r + lifted, r + lowered


def _of_half_lines(lines: Four, std: Tensor, s: Scalar, t: Scalar) -> Pair:
    """(2.6) of mathematics.md: slope s on the half line above zero, t on the one below."""
    above, below, var_above, var_below = lines
    spread = s * s * var_above + t * t * var_below
    return s * above - t * below, (std.square() * spread + 2.0 * s * t * above * below).clamp(min=0.0)


def _steep(mean: Tensor, std: Tensor) -> Tensor:
    """The ratio as the first derivatives see it: theirs, which grow like 1/std, are left out below a std of 1e-12."""
    a = ratio(mean, std)
    return torch.where(std < LEAST_STD, a.detach(), a)


def _along(tangents: tuple[Tensor | None, ...], slopes: tuple[Tensor, ...]) -> Tensor:
    """The derivative along the tangents of the inputs, absent ones being zero."""
    total = torch.zeros_like(slopes[0])
    for tangent, slope in zip(tangents, slopes, strict=True):
        total = total if tangent is None else total + tangent * slope
    return total


def two_slopes_and_derivatives(mean: Tensor, std: Tensor, s: Scalar, t: Scalar) -> tuple[Pair, Four]:
    """Mean m and variance v after two slopes; dm/dmean, dm/dstd, dv/dmean, dv/dstd (mathematics.md, 2.6 and 2.7)."""
    lines = above, below, _, _ = _half_lines(mean, std)
    m, v = _of_half_lines(lines, std, s, t)
    a = _steep(mean, std)
    p, up, down, d = pdf(a), cdf(a), cdf(-a), s - t
    v_mean = 2.0 * d * (s * above * down + t * below * up)
    v_std = 2.0 * std * (s * s * up + t * t * down) - 2.0 * m * d * p
    return (m, v), (s * up + t * down, d * p, v_mean, v_std)


def _by_slopes(lines: Four, std: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    """dm/ds, dm/dt, dv/ds, dv/dt."""
    above, below, var_above, var_below = lines
    product, var = 2.0 * above * below, 2.0 * std.square()
    return above, -below, s * var * var_above + t * product, t * var * var_below + s * product


def learned_slope(x: Pair, slope: Pair) -> Slopes:
    """f(x) = x for x > 0, t x for x < 0, with a number t given as a mean; derivatives by mean and variance of both."""
    mean, var = x
    std, t = var.sqrt(), slope[0]
    moments, derivatives = two_slopes_with_slopes(x, 1.0, t)
    _, m_t, _, v_t = _by_slopes(_half_lines(mean, std), std, torch.ones_like(t), t)
    none = torch.zeros_like(t)
    return moments, [*derivatives, torch.stack([m_t, none, v_t, none])]


class _TwoSlopes(torch.autograd.Function):
    """(2.6), with the derivatives (2.7) of the mathematics.md."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, std: Tensor, positive: Tensor, negative: Tensor) -> Pair:
        return _of_half_lines(_half_lines(mean, std), std, positive, negative)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Pair) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_m: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        mean, std, s, t = ctx.saved_tensors
        _, (m_mean, m_std, v_mean, v_std) = two_slopes_and_derivatives(mean, std, s, t)
        grads: list[Tensor | None] = [grad_m * m_mean + grad_v * v_mean, grad_m * m_std + grad_v * v_std, None, None]
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            m_s, m_t, v_s, v_t = _by_slopes(_half_lines(mean, std), std, s, t)
            grads[2], grads[3] = grad_m * m_s + grad_v * v_s, grad_m * m_t + grad_v * v_t
        return tuple(grads)


class _TwoSlopesForward(_TwoSlopes):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Pair:
        mean, std, s, t = ctx.saved_tensors
        _, (m_mean, m_std, v_mean, v_std) = two_slopes_and_derivatives(mean, std, s, t)
        m_s, m_t, v_s, v_t = _by_slopes(_half_lines(mean, std), std, s, t)
        return _along(tangents, (m_mean, m_std, m_s, m_t)), _along(tangents, (v_mean, v_std, v_s, v_t))


@in_float64
def two_slopes(mean: Tensor, std: Tensor, positive: Scalar, negative: Scalar) -> Pair:
    """f(x) = positive x for x > 0, negative x for x < 0; exact for Gaussian x.

    m = s G+ - t G-, v = std^2 (s^2 R(a) + t^2 R(-a)) + 2 s t G+ G-, with a = mean/std, G+- the means of the
    two half lines, R the variance of the unit rectifier (Shekhovtsov & Flach, CVWW 2018; mathematics.md, 2.6).
    """
    inputs = torch.broadcast_tensors(mean, std, as_tensor(positive, mean), as_tensor(negative, mean))
    result: Pair = applied(_TwoSlopes, _TwoSlopesForward, *inputs)
    return result


def _clamp_narrow(std: Tensor, to_low: Tensor, to_high: Tensor) -> Pair:
    """Moments of clamp(X) - clamp(E X) if std is at most half the width: differences of rectifiers.

    Nothing is taken from a bound but distances: one of 1e30, as good as none, leaves the mean its digits.
    """
    a1, a2 = ratio(to_low, std), ratio(to_high, std)
    above, none = to_low >= 0.0, torch.zeros_like(a1)
    g1, _, r1 = _tail(torch.where(above, a1, -a1))
    g2, h2, r2 = _tail(-a2)  # never above the upper end
    over_low, over_high = std * g1, std * g2
    spread = r1 + torch.where(above, torch.erf(ROOT_HALF * a1), none) + r2 - 2.0 * h2
    room = torch.where(above, none, to_low) - to_high - over_low
    return over_low - over_high, std.square() * spread - 2.0 * over_high * room


def _clamp_wide(std: Tensor, to_low: Tensor, to_high: Tensor) -> Pair:
    """Moments of clamp(X) - low if std is larger, where those differences cancel: integrals of P(X > t)."""
    a, width = ratio(to_low, std), to_low - to_high
    w = ratio(width, std).clamp(max=2.0)
    first, second = torch.zeros_like(a), torch.zeros_like(a)
    for t, weight in _LEGENDRE:
        above = weight * cdf(a - t * w)
        first, second = first + above, second + (2.0 * t) * above
    return width * first, width.square() * (second - first.square())


def _clamp_slopes(
    mean: Tensor, std: Tensor, low: Tensor, high: Tensor, m: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The derivatives of the mean and of the variance by mean, std, low and high.

    For bounds, dm/dlow = P(X < low) and dv/dlow = 2 (low - m) P(X < low).
    """
    a, b = _steep(low - mean, std), _steep(high - mean, std)
    pa, pb, under, over = pdf(a), pdf(b), cdf(a), cdf(-b)
    inside = torch.where(a + b > 0.0, cdf(-a) - over, cdf(b) - under)  # no difference of numbers near 1
    d, off = pa - pb, mean - m
    v_mean = 2.0 * (off * inside + std * d)
    v_std = 2.0 * (off * d + std * (inside + a * pa - b * pb))
    return (inside, d, under, over), (v_mean, v_std, 2.0 * (low - m) * under, 2.0 * (high - m) * over)


class _Clamp(torch.autograd.Function):
    """(2.8) of the mathematics.md."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, std: Tensor, low: Tensor, high: Tensor) -> Pair:
        mirror = 2.0 * mean > low + high  # f(low + high - x) = low + high - f(x)
        to_low = torch.where(mirror, high - mean, mean - low)
        to_high = torch.where(mirror, low - mean, mean - high)
        narrow = high - low >= 2.0 * std
        m1, v1 = _clamp_narrow(std, to_low, to_high)
        m2, v2 = _clamp_wide(std, to_low, to_high)
        end = torch.where(mirror, high, low)
        start = torch.where(narrow & (to_low >= 0.0), mean, end)
        m, v = torch.where(narrow, m1, m2), torch.where(narrow, v1, v2)
        return torch.where(mirror, start - m, start + m), v.clamp(min=0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Pair) -> None:
        ctx.save_for_backward(*inputs, output[0])
        ctx.save_for_forward(*inputs, output[0])

    @staticmethod
    def backward(ctx: Any, grad_m: Tensor, grad_v: Tensor) -> tuple[Tensor, ...]:
        by_m, by_v = _clamp_slopes(*ctx.saved_tensors)
        return tuple(grad_m * m + grad_v * v for m, v in zip(by_m, by_v, strict=True))


class _ClampForward(_Clamp):
    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Pair:
        by_m, by_v = _clamp_slopes(*ctx.saved_tensors)
        return _along(tangents, by_m), _along(tangents, by_v)


def clamp_and_derivatives(mean: Tensor, std: Tensor, low: float, high: float) -> tuple[Pair, Four]:
    """Mean m and variance v after clamping to finite bounds; dm/dmean, dm/dstd, dv/dmean, dv/dstd."""
    bounds = as_tensor(min(low, high), mean), as_tensor(high, mean)
    m, v = _Clamp.forward(mean, std, *bounds)
    (m_mean, m_std, *_), (v_mean, v_std, *_) = _clamp_slopes(mean, std, *bounds, m)
    return (m, v), (m_mean, m_std, v_mean, v_std)


def by_variance(rule: Callable[..., Any]) -> Callable[..., Slopes]:
    """A rule of mean and std with derivatives by these, as one of mean and variance with derivatives by those."""

    def with_slopes(x: Pair, *numbers: Scalar) -> Slopes:
        mean, var = x
        std = var.sqrt()
        moments, (m_mean, m_std, v_mean, v_std) = rule(mean, std, *numbers)
        per_std = 0.5 / std.clamp(min=LEAST_STD)
        slopes = torch.stack([m_mean, per_std * m_std, v_mean, per_std * v_std])
        return torch.stack(moments), [slopes]

    return with_slopes


two_slopes_with_slopes = by_variance(two_slopes_and_derivatives)
clamp_with_slopes = by_variance(clamp_and_derivatives)


NEAR = 3.0  # standard deviations from the bend, within which differences keep twelve digits


def two_slopes_by_variance(x: Pair, s: float, t: float) -> Slopes:
    """Mean and variance after two slopes, and their derivatives by mean and variance.

    Where all means are near the bend, in units of their std, `two_slopes_and_derivatives` is written out, in a fifth of
    its operations: those of a small network take as long as they are many.
    """
    mean, var = x
    if not readable(mean) or not mean.numel():
        return two_slopes_with_slopes(x, s, t)
    std = var.sqrt()
    a = mean / std
    least, most = a.aminmax()
    if not (float(least) > -NEAR and float(most) < NEAR and float(std.min()) > LEAST_STD):  # nor where they are NaN
        return two_slopes_with_slopes(x, s, t)
    p, up, down = pdf(a), cdf(a), cdf(-a)
    above = torch.addcmul(p, a, up)  # mean of X_+ in units of std
    m, v = s * above, s * s * torch.addcmul(up, above, a - above)
    m_mean, v_mean = s * up, s * above * down
    v_var = s * s * up
    if t:
        below = torch.addcmul(p, a, down, value=-1.0)
        m = m - t * below
        v = v + t * t * torch.addcmul(down, below, a + below, value=-1.0) + 2.0 * s * t * above * below
        m_mean, v_mean, v_var = m_mean + t * down, v_mean + t * below * up, v_var + t * t * down
    d = s - t
    v_var = torch.addcmul(v_var, m, p, value=-d)
    derivatives = torch.stack([m_mean, (0.5 * d) * p / std, (2.0 * d) * std * v_mean, v_var])
    return torch.stack([std * m, var * v]), [derivatives]


def _bound(value: Scalar | None, like: Tensor) -> Tensor | None:
    infinite = isinstance(value, float) and math.isinf(value)
    return None if value is None or infinite else as_tensor(value, like)


@in_float64
def clamp(mean: Tensor, std: Tensor, low: Scalar | None, high: Scalar | None) -> Pair:
    """f(x) = min(max(x, low), high), either bound may be None; exact for Gaussian x (mathematics.md, 2.8).

    A difference of two rectifiers while the interval is at least two std wide, else 16-point Gauss-Legendre
    integrals of P(X > t) over it.
    """
    bottom, top = _bound(low, mean), _bound(high, mean)
    if bottom is not None and top is not None:
        inputs = torch.broadcast_tensors(mean, std, torch.minimum(bottom, top), top)
        result: Pair = applied(_Clamp, _ClampForward, *inputs)
        return result
    if bottom is not None:
        gap = mean - bottom
        m, v = two_slopes(gap, std, 1.0, 0.0)
        return torch.where(gap > 0.0, mean + (m - gap), m + bottom), v  # a bound of -1e30 takes no digits
    if top is not None:
        gap = mean - top
        m, v = two_slopes(gap, std, 0.0, 1.0)
        return torch.where(gap < 0.0, mean + (m - gap), m + top), v
    return mean, std.square()


def _step(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E sign(X), P(X > 0) and Var[X > 0]; derivatives with std held at 1e-3 or more."""
    short = std < _STEEPEST
    a = ratio(mean, torch.where(short, _STEEPEST + (std - std.detach()), std))
    held = torch.erf(ROOT_HALF * a), cdf(a), cdf(a) * cdf(-a)
    a, random = ratio(mean, std).detach(), std > 0.0
    up, down = cdf(a), cdf(-a)
    sign = torch.where(random, torch.erf(ROOT_HALF * a), mean.sign().detach())
    step = torch.where(random, up, (mean > 0.0).to(mean.dtype))
    exact = sign, step, torch.where(random, up * down, torch.zeros_like(up))
    signs, steps, spreads = (torch.where(short, x + (h - h.detach()), h) for x, h in zip(exact, held, strict=True))
    return signs, steps, spreads


@in_float64
def step(mean: Tensor, std: Tensor) -> Pair:
    """f(x) = [x > 0]: m = Phi(a), v = Phi(a) Phi(-a), a = mean/std; exact for Gaussian x.

    The derivatives grow like 1/std; they are taken with std held at 1e-3 or more.
    """
    _, m, v = _step(mean, std)
    return m, v


@in_float64
def sign(mean: Tensor, std: Tensor) -> Pair:
    """f(x) = sign x: m = erf(a / sqrt 2), v = 4 Phi(a) Phi(-a); exact, derivatives as for step."""
    m, _, v = _step(mean, std)
    return m, 4.0 * v


def mixture(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of a rectified variable (the first) and an independent Gaussian one as a mixture of two Gaussians.

    Returns the lower and the upper mean, the std of both, and the weight of the upper one.
    """
    std = safe_sqrt(var)
    r = (mean / std.clamp(min=LEAST_STD)).clamp(LEAST_RATIO, MOST_RATIO)
    rise = 1.0 + SPLIT * r.square().square()
    half_skew = 0.5 * SKEW * torch.exp(-FALL * r.square()) / r * rise * rise.sqrt()
    e = half_skew + (1.0 + half_skew.square()).sqrt()
    apart, centre = std / rise.sqrt(), mean + other_mean
    within = safe_sqrt(other_var + var * (1.0 - 1.0 / rise))
    return centre - apart / e, centre + apart * e, within, 1.0 / (1.0 + e.square())


def positive_sum(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor) -> Tensor:
    """P(X + Y > 0), X a rectified variable (the first), Y Gaussian and independent; approximate."""
    dtype, moments = promote(mean, var, other_mean, other_var)
    low, high, within, share = mixture(*moments)
    below, above = (cdf(ratio(centre, within)) for centre in (low, high))
    return (below + share * (above - below)).to(dtype)


def relu_of_sum(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor) -> Pair:
    """Moments of max(0, X + Y), X a rectified variable (the first), Y Gaussian and independent; approximate."""
    dtype, moments = promote(mean, var, other_mean, other_var)
    low, high, within, share = mixture(*moments)
    (m1, v1), (m2, v2) = two_slopes(low, within, 1.0, 0.0), two_slopes(high, within, 1.0, 0.0)
    gap = m2 - m1
    v = v1 + share * (v2 - v1) + share * (1.0 - share) * gap.square()
    return (m1 + share * gap).to(dtype), v.to(dtype)


@dataclass(frozen=True)
class MixtureShape:
    """The two Gaussians that stand for a rectified variable, by r = mean / std; names in _r are derivatives by r."""

    between: Tensor  # the share of the variance that lies between them
    between_r: Tensor
    down: Tensor  # from the mean to the lower one, in units of std
    down_r: Tensor
    up: Tensor  # from the mean to the upper one
    up_r: Tensor
    share: Tensor  # weight of the upper one
    share_r: Tensor


def mixture_shape(r: Tensor, skew: float = SKEW, fall: float = FALL, split: float = SPLIT) -> MixtureShape:
    """The two Gaussians for a rectified variable with r = mean / std."""
    square = r * r
    cube = square * r
    between = 1.0 / (1.0 + split * square * square)
    between_r = -4.0 * split * cube * between.square()
    root = between.sqrt()
    root_r = 0.5 * between_r / root
    fallen = torch.exp((-fall * square).clamp(min=-80.0))  # no subnormal numbers, which are slow
    d = 0.5 * skew * fallen / (r * between * root)
    d_r = d * (6.0 * split * cube * between - 2.0 * fall * r - 1.0 / r)
    hypotenuse = (1.0 + d * d).sqrt()
    e = d + hypotenuse
    e_r = d_r * e / hypotenuse
    share = 1.0 / (1.0 + e * e)
    down, up = root / e, root * e
    down_r, up_r = (root_r - down * e_r) / e, root_r * e + root * e_r
    return MixtureShape(between, between_r, down, down_r, up, up_r, share, -2.0 * e * e_r * share.square())


def relu_of_sum_and_derivatives(x: Pair, y: Pair, skew: float, fall: float, split: float) -> Slopes:
    """`relu_of_sum` with the derivatives by mean and variance of either argument (mathematics.md, 2.9)."""
    (m1, v1), (m2, v2) = x, y
    std = v1.sqrt()
    held = std.clamp(min=LEAST_STD)
    r = (m1 / held).clamp(LEAST_RATIO, MOST_RATIO)
    free = ((r > LEAST_RATIO) & (r < MOST_RATIO)).to(std.dtype)  # whether r follows its arguments
    s = mixture_shape(r, skew, fall, split)
    within, centre = v2 + (1.0 - s.between) * v1, m1 + m2
    low, by_low = _rectified(centre - s.down * std, within)
    high, by_high = _rectified(centre + s.up * std, within)
    (gap, wider), lower_share = high - low, 1.0 - s.share
    moments = torch.stack([low[0] + s.share * gap, low[1] + s.share * wider + s.share * lower_share * gap * gap])
    by_share = torch.stack([gap, wider + (lower_share - s.share) * gap * gap])
    by_low, by_high = by_low * lower_share, by_high * s.share
    by_low[1] -= 2.0 * s.share * gap * by_low[0]
    by_high[1] += 2.0 * lower_share * gap * by_high[0]
    (by_lower, low_within), (by_upper, high_within) = by_low.unbind(1), by_high.unbind(1)
    by_within = low_within + high_within
    # the derivatives of the sum of all terms by r, and by std at a constant r
    by_r = (by_upper * s.up_r - by_lower * s.down_r - by_within * s.between_r * std) * std + by_share * s.share_r
    by_r = by_r * free / held
    by_std = by_upper * s.up - by_lower * s.down + by_within * (2.0 * (1.0 - s.between) * std) - by_r * r
    by_mean = by_lower + by_upper
    by_x, by_y = torch.stack([by_mean + by_r, by_std * (0.5 / held)], 1), torch.stack([by_mean, by_within], 1)
    return moments, [by_x.flatten(0, 1), by_y.flatten(0, 1)]


def _rectified(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of the rectifier as two rows, and their derivatives: [of mean or var, by mean or var, element]."""
    moments, [derivatives] = two_slopes_with_slopes((mean, var), 1.0, 0.0)
    return moments, derivatives.view(2, 2, -1)
