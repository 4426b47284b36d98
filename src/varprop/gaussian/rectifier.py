"""Piecewise linear functions of a Gaussian variable: two slopes, clamp, step and sign."""

import math
from typing import Any

import torch
from torch import Tensor

from .normal import (
    ROOT_HALF,
    Moments,
    Scalar,
    as_tensor,
    cdf,
    differentiated,
    gauss_legendre,
    in_float64,
    mills,
    pdf,
    ratio,
)

_LEGENDRE = tuple(zip(*gauss_legendre(16), strict=True))
_STEEPEST = 1e-3  # below this std the derivatives of step and sign, which grow like 1/std, are held


def _tail(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E(Z-x)_+, E(Z-x)_+^2 and Var(Z-x)_+ for x >= 0, to full relative accuracy (mathematics.md, 2.1)."""
    p = pdf(x)
    _, h1, h2 = mills(x)
    return p * h1, p * h2, p * (h2 - p * h1 * h1)


def _half_lines(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean of X_+ and of X_-, and their variances over std^2 (mathematics.md, 2.4)."""
    a = ratio(mean, std)
    g, _, r = _tail(a.abs())
    lift = torch.erf(ROOT_HALF * a)
    return mean.relu() + std * g, (-mean).relu() + std * g, r + lift.relu(), r + (-lift).relu()


def _of_half_lines(lines: tuple[Tensor, Tensor, Tensor, Tensor], std: Tensor, s: Scalar, t: Scalar) -> Moments:
    """(2.6) of mathematics.md: slope s on the half line above zero, t on the one below."""
    above, below, var_above, var_below = lines
    spread = s * s * var_above + t * t * var_below
    return s * above - t * below, (std.square() * spread + 2.0 * s * t * above * below).clamp(min=0.0)


def two_slopes_and_derivatives(
    mean: Tensor, std: Tensor, s: Scalar, t: Scalar
) -> tuple[Moments, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Mean m and variance v after two slopes; dm/dmean, dm/dstd, dv/dmean, dv/dstd (mathematics.md, 2.6 and 2.7)."""
    lines = above, below, _, _ = _half_lines(mean, std)
    m, v = _of_half_lines(lines, std, s, t)
    a = ratio(mean, std)
    p, up, down, d = pdf(a), cdf(a), cdf(-a), s - t
    v_mean = 2.0 * d * (s * above * down + t * below * up)
    v_std = 2.0 * std * (s * s * up + t * t * down) - 2.0 * m * d * p
    return (m, v), (s * up + t * down, d * p, v_mean, v_std)


class _TwoSlopes(torch.autograd.Function):
    """(2.6), with the derivatives (2.7) of the mathematics.md."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, std: Tensor, positive: Tensor, negative: Tensor) -> Moments:
        return _of_half_lines(_half_lines(mean, std), std, positive, negative)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Moments) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_m: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        mean, std, s, t = ctx.saved_tensors
        _, (m_mean, m_std, v_mean, v_std) = two_slopes_and_derivatives(mean, std, s, t)
        grads: list[Tensor | None] = [grad_m * m_mean + grad_v * v_mean, grad_m * m_std + grad_v * v_std, None, None]
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            above, below, var_above, var_below = _half_lines(mean, std)
            both, var = 2.0 * above * below, 2.0 * std.square()
            grads[2] = grad_m * above + grad_v * (s * var * var_above + t * both)
            grads[3] = -grad_m * below + grad_v * (t * var * var_below + s * both)
        return tuple(grads)


@in_float64
def two_slopes(mean: Tensor, std: Tensor, positive: Scalar, negative: Scalar) -> Moments:
    """f(x) = positive x for x > 0, negative x for x < 0; exact for Gaussian x.

    m = s G+ - t G-, v = std^2 (s^2 R(a) + t^2 R(-a)) + 2 s t G+ G-, with a = mean/std, G+- the means of the
    two half lines, R the variance of the unit rectifier (Shekhovtsov & Flach, CVWW 2018; mathematics.md, 2.6).
    """
    inputs = torch.broadcast_tensors(mean, std, as_tensor(positive, mean), as_tensor(negative, mean))
    if not differentiated(*inputs):
        return _TwoSlopes.forward(*inputs)
    result: Moments = _TwoSlopes.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


def _clamp_narrow(std: Tensor, to_low: Tensor, to_high: Tensor) -> Moments:
    """Moments of clamp(X) - low if std is at most half the width: differences of rectifiers."""
    a1, a2 = ratio(to_low, std), ratio(to_high, std)
    g1, _, r1 = _tail(a1.abs())
    g2, h2, r2 = _tail(a2.abs())
    over_low, over_high = to_low.relu() + std * g1, std * g2
    spread = r1 + torch.erf(ROOT_HALF * a1).relu() + r2 - 2.0 * h2
    return over_low - over_high, std.square() * spread - 2.0 * over_high * (to_low - to_high - over_low)


def _clamp_wide(std: Tensor, to_low: Tensor, to_high: Tensor) -> Moments:
    """The same if std is larger, where those differences cancel: integrals of P(X > t) over the width."""
    a, width = ratio(to_low, std), to_low - to_high
    w = ratio(width, std).clamp(max=2.0)
    first, second = torch.zeros_like(a), torch.zeros_like(a)
    for node, weight in _LEGENDRE:
        t = 0.5 * (1.0 + node)
        above = (0.5 * weight) * cdf(a - t * w)
        first, second = first + above, second + (2.0 * t) * above
    return width * first, width.square() * (second - first.square())


class _Clamp(torch.autograd.Function):
    """(2.8) of the mathematics.md; for bounds, dm/dlow = P(X < low) and dv/dlow = 2 (low - m) P(X < low)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, std: Tensor, low: Tensor, high: Tensor) -> Moments:
        mirror = 2.0 * mean > low + high  # f(low + high - x) = low + high - f(x)
        to_low = torch.where(mirror, high - mean, mean - low)
        to_high = torch.where(mirror, low - mean, mean - high)
        narrow = high - low >= 2.0 * std
        m1, v1 = _clamp_narrow(std, to_low, to_high)
        m2, v2 = _clamp_wide(std, to_low, to_high)
        m, v = torch.where(narrow, m1, m2), torch.where(narrow, v1, v2)
        return torch.where(mirror, high - m, low + m), v.clamp(min=0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Moments) -> None:
        ctx.save_for_backward(*inputs, output[0])

    @staticmethod
    def backward(ctx: Any, grad_m: Tensor, grad_v: Tensor) -> tuple[Tensor, ...]:
        mean, std, low, high, m = ctx.saved_tensors
        a, b = ratio(low - mean, std), ratio(high - mean, std)
        pa, pb, under, over = pdf(a), pdf(b), cdf(a), cdf(-b)
        inside = torch.where(a + b > 0.0, cdf(-a) - over, cdf(b) - under)  # no difference of numbers near 1
        d, off = pa - pb, mean - m
        v_mean = 2.0 * (off * inside + std * d)
        v_std = 2.0 * (off * d + std * (inside + a * pa - b * pb))
        return (
            grad_m * inside + grad_v * v_mean,
            grad_m * d + grad_v * v_std,
            under * (grad_m + 2.0 * (low - m) * grad_v),
            over * (grad_m + 2.0 * (high - m) * grad_v),
        )


def _absent(bound: Scalar | None) -> bool:
    return bound is None or (not isinstance(bound, Tensor) and math.isinf(bound))


@in_float64
def clamp(mean: Tensor, std: Tensor, low: Scalar | None, high: Scalar | None) -> Moments:
    """f(x) = min(max(x, low), high), either bound may be None; exact for Gaussian x (mathematics.md, 2.8).

    A difference of two rectifiers while the interval is at least two std wide, else 16-point Gauss-Legendre
    integrals of P(X > t) over it.
    """
    if _absent(low) and _absent(high):
        return mean, std.square()
    if low is None or _absent(low):
        top = as_tensor(high, mean) if high is not None else mean
        m, v = two_slopes(mean - top, std, 0.0, 1.0)
        return m + top, v
    bottom = as_tensor(low, mean)
    if high is None or _absent(high):
        m, v = two_slopes(mean - bottom, std, 1.0, 0.0)
        return m + bottom, v
    top = as_tensor(high, mean)
    inputs = torch.broadcast_tensors(mean, std, torch.minimum(bottom, top), top)
    result: Moments = _Clamp.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


class _Step(torch.autograd.Function):
    """E sign(X), P(X > 0) and Var[X > 0]; derivatives with std held at 1e-3 or more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, random = ratio(mean, std), std > 0.0
        up, down = cdf(a), cdf(-a)
        sign = torch.where(random, torch.erf(ROOT_HALF * a), mean.sign())
        step = torch.where(random, up, (mean > 0.0).to(mean.dtype))
        return sign, step, torch.where(random, up * down, torch.zeros_like(up))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_sign: Tensor, grad_step: Tensor, grad_v: Tensor) -> Moments:
        mean, std = ctx.saved_tensors
        held = std.clamp(min=_STEEPEST)
        a = ratio(mean, held)
        grad = pdf(a) / held * (2.0 * grad_sign + grad_step - torch.erf(ROOT_HALF * a) * grad_v)
        return grad, -a * grad


@in_float64
def step(mean: Tensor, std: Tensor) -> Moments:
    """f(x) = [x > 0]: m = Phi(a), v = Phi(a) Phi(-a), a = mean/std; exact for Gaussian x.

    The derivatives grow like 1/std; they are taken with std held at 1e-3 or more.
    """
    _, m, v = _Step.apply(mean, std)  # type: ignore[no-untyped-call]
    return m, v


@in_float64
def sign(mean: Tensor, std: Tensor) -> Moments:
    """f(x) = sign x: m = erf(a / sqrt 2), v = 4 Phi(a) Phi(-a); exact, derivatives as for step."""
    m, _, v = _Step.apply(mean, std)  # type: ignore[no-untyped-call]
    return m, 4.0 * v
