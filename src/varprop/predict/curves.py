"""Activations with their smoothed slope E f', so that no derivative goes through an integral or a closed form.

Every result is a line in the means that enter, mean + slope (m - m₀): the backward passes of a prediction are then as
cheap as those of the plain network. Values are those of the rules to the precision of the dtype they are in; error bars
do not need the rules' full relative accuracy far out in the tails, which costs ten times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.clusters import IDENTITY, Clusters
from ..engine.plan import Plan
from ..gaussian.normal import LEAST_STD, gauss_legendre
from ..gaussian.rectifier import FALL, LEAST_RATIO, MOST_RATIO, SKEW, SPLIT
from ..graph.node import Node
from ..moments import Moments

NODES = 33  # of the trapezoidal rule: variances of SiLU, tanh within 1e-6 up to std 1, 1 % up to std 3
STEPS = 6  # of a Gauss-Legendre rule for GELU: its variance within 1e-9 of v
ROOT_HALF = math.sqrt(0.5)
DENSITY = 1 / math.sqrt(2 * math.pi)
FAR = {torch.float64: 9.0}  # std from a kink to where it is not felt, and its density counts as zero: numbers so small
NEAR = 6.0  # that their squares are subnormal cost forty times as much; of less precise dtypes


class SlopedClusters(Clusters):
    """Functions of one variable, with the slope by every value they read.

    Attributes:
        slopes: For the node evaluated last, the moments it reads and E f' by each, unless it reads a mixture.
    """

    def __init__(self, plan: Plan, env: dict[Node, Any]) -> None:
        super().__init__(plan, env)
        self.slopes: dict[Node, list[tuple[Moments, Tensor]]] = {}

    def moments(self, node: Node, value: Callable[[Node], Moments]) -> Moments:
        """Moments of a clustered node; the mean is the line of its smoothed slopes."""
        base, line = self.line(node)
        if base is not node and line is IDENTITY:
            return value(base)  # such as a dropout that is not at work
        if node in self.plan.skips and self.line(node)[0] is node:
            positive, shortcut = (value(term).dense() for term in self.plan.skips[node])
            return self._line_through(node, [positive, shortcut], *rectified_sum(positive, shortcut))
        result = super().moments(node, value)
        if self.plan.mixture(self.plan.root[node]) is not None:
            self.slopes.pop(node, None)
        return result

    def _closed_form(self, node: Node, x: Moments) -> Moments:
        x = x.dense()
        if (negative := self._slope_below(node)) is not None:
            return self._line_through(node, [x], *rectified(x, negative))
        if self.plan.rules[node].operation == "gelu" and node.kwargs.get("approximate", "none") == "none":
            return self._line_through(node, [x], *gelu(x))
        if self._is_smooth(node, node.args[0]):
            return self._line_through(node, [x], *self._smoothed(node, node.args[0], x))
        return super()._closed_form(node, x)

    def _integrate(self, node: Node, root: Node, moments: Moments) -> Moments:
        if self._is_smooth(node, root):
            x = moments.dense()
            return self._line_through(node, [x], *self._smoothed(node, root, x))
        return super()._integrate(node, root, moments)

    def _line_through(self, node: Node, read: list[Moments], mean: Tensor, var: Tensor, *slopes: Tensor) -> Moments:
        self.slopes[node] = list(zip(read, slopes, strict=True))
        return Moments(line(mean, self.slopes[node]), var)

    def _slope_below(self, node: Node) -> float | None:
        """The slope of a rectifier below zero; None for other functions."""
        rule = self.plan.rules.get(node)
        if rule is not None and rule.operation == "relu":
            return 0.0
        if rule is None or rule.operation != "leaky relu" or node.kwargs:
            return None
        slope = node.args[1] if len(node.args) > 1 else 0.01
        return float(slope) if isinstance(slope, (int, float)) else None

    def _is_smooth(self, node: Node, root: Node) -> bool:
        path = self.path(node, root)
        if self.needs_positive(path, root) or not all(step.info.is_floating for step in path):  # truth values step
            return False
        rules = [(self.plan.rules[step], *self._further(step)) for step in path]
        return not any([*r.kinks(*args, **named), *r.jumps(*args, **named)] or r.swings for r, args, named in rules)

    def _smoothed(self, node: Node, root: Node, x: Moments) -> tuple[Tensor, Tensor, Tensor]:
        """By the trapezoidal rule, with the slope by Stein's identity E f' = E[f (x - m)] / v."""
        path = self.path(node, root)
        with torch.no_grad():
            z = torch.linspace(-6, 6, NODES, dtype=x.dtype, device=x.device).view(-1, *[1] * x.ndim)
            weight = torch.softmax(-0.5 * z.square(), 0)
            std = x.var.sqrt()
            f = self.evaluate(path, root, x.mean + std * z)
            mean = (weight * f).sum(0)
            var = (weight * (f - mean).square()).sum(0)
            slope = (weight * z * f).sum(0) / std
            at_mean = std <= torch.finfo(std.dtype).eps ** 0.5 * x.mean.abs().clamp_min(1)  # too narrow for differences
        with torch.enable_grad():  # also where no slope is taken from it: to ask would wait for a GPU
            at = x.mean.detach().requires_grad_()
            (tangent,) = torch.autograd.grad(self.evaluate(path, root, at.unsqueeze(0)).sum(), at)
        return mean, var, torch.where(at_mean, tangent, slope)


class _Attached(torch.autograd.Function):
    """A value that was computed without autograd, with its derivatives by what it was computed from."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, pulls: Sequence[Callable[[Tensor], Tensor]], *read: Tensor) -> Tensor:
        """The value itself; a pull for each that was read carries derivatives by the value to derivatives by that."""
        ctx.pulls = pulls
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Derivatives by what was read."""
        return None, None, *(pull(gradient) for pull in ctx.pulls)


def attached(value: Tensor, *read: tuple[Tensor, Callable[[Tensor], Tensor]]) -> Tensor:
    """A value with derivatives: for each tensor that it was computed from, what carries them back to that one."""
    following = [(tensor, pull) for tensor, pull in read if tensor.requires_grad]
    if not following:
        return value
    tensors, pulls = zip(*following, strict=True)
    result: Tensor = _Attached.apply(value.detach(), pulls, *tensors)  # type: ignore[no-untyped-call]
    return result


def line(mean: Tensor, slopes: Sequence[tuple[Moments, Tensor]]) -> Tensor:
    """A mean that follows those it was computed from by its slopes."""
    return attached(mean, *((read.mean, slope.mul) for read, slope in slopes))


def left_by_slopes(var: Tensor, slopes: Sequence[tuple[Moments, Tensor]]) -> Tensor:
    """The variance of a function that the lines of its slopes do not explain."""
    for read, slope in slopes:
        var = var.addcmul(slope.square(), read.var, value=-1)
    return var.clamp_min(0)


@torch.no_grad()
def rectified(x: Moments, negative: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and slope of a function with slope 1 above zero and another below.

    f = x₊ (1 - t) + t x has Var f = (1 - t)² Var x₊ + 2 t (1 - t) Φ s² + t² s².
    """
    mean, var, above, _ = _half_line(x.mean, x.var.sqrt(), x.var)
    if not negative:
        return mean, var, above
    rest = 1 - negative
    var = (rest**2 * var).addcmul_(above, x.var, value=2 * negative * rest).add_(x.var, alpha=negative**2)
    return mean.mul_(rest).add_(x.mean, alpha=negative), var.clamp_min_(0), above.mul_(rest).add_(negative)


def _half_line(mean: Tensor, std: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and variance of max(0, N(m, s²)), and its mean's derivatives by m, which is Φ, and by s, which is φ.

    With a = m / s: Var / v = Φ + a (a Φ (1 - Φ) + φ (1 - 2 Φ)) - φ², without differences of large numbers.
    """
    a, density = scaled(mean, std)
    error = torch.erf(a * ROOT_HALF)
    above = (error * 0.5).add_(0.5)
    share = torch.addcmul(above, above, above, value=-1).mul_(a).addcmul_(density, error, value=-1).mul_(a)
    share = share.add_(above).addcmul_(density, density, value=-1).mul_(var).clamp_min_(0)
    return (mean * above).addcmul_(std, density).clamp_min_(0), share, above, density


@torch.no_grad()
def gelu(x: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and slope of X Φ(X).

    With Φ' the normal density, Φ(X) is the chance of a normal number below X, and E Φ(X)² that of two. These have the
    correlation ρ = v / (1 + v), given X no longer, and E Φ(X)² - (E Φ(X))² = ∫ exp(-h² / (1 + sin t)) dt / 2π over
    (0, arcsin ρ), h = m / √(1 + v). Stein's identity gives the rest, without differences of large numbers.
    """
    narrow, narrower = (1 + x.var).rsqrt(), (1 + 2 * x.var).rsqrt()
    h = x.mean * narrow
    k = h * narrower
    below, density = _normal(h)
    below_k, density_k = _normal(k)
    angle, square = torch.asin((x.var * narrow).mul_(narrow)), h * -h
    both = torch.zeros_like(h)
    for node, weight in zip(*gauss_legendre(STEPS), strict=True):
        both.add_((angle * (0.5 + 0.5 * node)).sin_().add_(1).reciprocal_().mul_(square).exp_(), alpha=weight)
    both.mul_(angle).mul_(0.25 / math.pi)
    mean = (x.mean * below).addcmul_(narrow * density, x.var)
    slope = torch.addcmul(below, h * density, narrow.square())
    of_v = (
        (2 * below_k)
        .sub_(below)
        .mul_(2 * x.mean)
        .addcmul_(x.var * narrow, 2 * torch.addcmul(density_k * narrower, h, below_k, value=-1) - density)
    )
    of_v = of_v.mul_(narrow).mul_(density).add_(both).addcmul_(below, below)
    return mean, of_v.mul_(x.var).addcmul_(x.mean.square(), both).clamp_min_(0), slope


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """The standard normal distribution function and its density."""
    return torch.erf(x * ROOT_HALF).mul_(0.5).add_(0.5), x.square().mul_(-0.5).exp_().mul_(DENSITY)


@torch.no_grad()
def rectified_sum(x: Moments, y: Moments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance and both slopes of max(0, X + Y) with a rectified X, as a mixture of two Gaussians."""
    std = x.var.sqrt()
    held = std.clamp_min(LEAST_STD)
    ratio = x.mean / held
    s = _two_gaussians(ratio.clamp(LEAST_RATIO, MOST_RATIO))
    centre, within = x.mean + y.mean, torch.addcmul(x.var, s.between, x.var, value=-1).add_(y.var)
    spread = within.sqrt()
    below, lower_var, lower_slope, lower_density = _half_line(
        torch.addcmul(centre, s.down, std, value=-1), spread, within
    )
    above, upper_var, upper_slope, upper_density = _half_line(centre.addcmul_(s.up, std), spread, within)
    gap, both = above.sub_(below), torch.addcmul(s.share, s.share, s.share, value=-1)
    mean, by_both = torch.addcmul(below, gap, s.share), lower_slope.lerp(upper_slope, s.share)
    var = lower_var.lerp_(upper_var, s.share).addcmul_(both, gap.square())
    # by the ratio of X: both means move, by p + q and p - q of their distances, what lies within, and their weights
    density = lower_density.lerp_(upper_density, s.share).mul_(s.between).mul_(x.var).div_(spread.clamp_min_(LEAST_STD))
    up = upper_slope.mul_(s.up).mul_(s.share).mul_(std)
    down = lower_slope.mul_(s.down).mul_(1 - s.share).mul_(std)
    by_ratio = (up - down).sub_(density).mul_(s.p)
    by_ratio.addcmul_(up.add_(down).addcmul_(gap, both, value=-2), s.q)
    follows = ((ratio > LEAST_RATIO) & (ratio < MOST_RATIO)).to(mean.dtype)
    return mean, var, by_both.addcmul(by_ratio.div_(held), follows), by_both


@dataclass(frozen=True)
class TwoGaussians:
    """`gaussian.rectifier.MixtureShape` with logarithmic derivatives by the ratio."""

    between: Tensor  # the share of the variance that lies between the two means
    down: Tensor  # distance of the lower mean, in std
    up: Tensor  # distance of the upper mean
    share: Tensor  # of the upper one
    p: Tensor  # the derivative of log √between
    q: Tensor  # the derivative of log(up / √between), which is that of log(√between / down)


def _two_gaussians(r: Tensor) -> TwoGaussians:
    """The shape of the two Gaussians for a rectified variable with r = mean / std.

    By `mixture_shape` d = skew / 2 exp(-fall r²) / (r b √b), e = d + √(1 + d²), down = √b / e, up = √b e.
    """
    square = r * r
    between = (square * SPLIT).mul_(square).add_(1).reciprocal_()
    root = between.sqrt()
    d = (square * -FALL).clamp_min_(-80.0).exp_().mul_(0.5 * SKEW).div_(r).div_(between).div_(root)
    hypotenuse = (d * d).add_(1).sqrt_()
    e = d + hypotenuse
    share = (e * e).add_(1).reciprocal_()
    q = square.mul_(-2 * FALL).add_(between, alpha=-6).add_(5).mul_(d).div_(hypotenuse).div_(r)
    return TwoGaussians(between, root / e, root * e, share, (between * 2).sub_(2).div_(r), q)


def scaled(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """How many std a mean lies from zero, and the normal density there: exactly zero from where it is not felt on."""
    far = FAR.get(mean.dtype, NEAR)
    a = (mean / std.clamp_min(torch.finfo(mean.dtype).tiny)).clamp_(-far, far)
    return a, torch.threshold_(a.square().mul_(-0.5).exp_(), 1.001 * math.exp(-0.5 * far * far), 0.0).mul_(DENSITY)
