"""Activations with their smoothed slope E f', so that no derivative goes through an integral or a closed form.

Every result is a line in the means that enter, mean + slope (m - m₀): the backward passes of a prediction are then as
cheap as those of the plain network. Values are those of the rules to the precision of the dtype they are in; error bars
do not need the rules' full relative accuracy far out in the tails, which costs ten times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.clusters import Clusters
from ..engine.plan import Plan
from ..gaussian.rectifier import mixture
from ..graph.node import Node
from ..moments import Moments

NODES = 33  # of the trapezoidal rule: variances of GELU, SiLU, tanh within 1e-6 up to std 1, 1 % up to std 3
ROOT_HALF = math.sqrt(0.5)
DENSITY = 1 / math.sqrt(2 * math.pi)
FAR = 9.0  # std from a kink to where it is not felt: beyond, numbers so small arise that they cost forty times as much


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
        if self.needs_positive(path, root):
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


def line(mean: Tensor, slopes: Sequence[tuple[Moments, Tensor]]) -> Tensor:
    """A mean that follows those it was computed from by its slopes."""
    for read, slope in slopes:
        if read.mean.requires_grad:
            mean = mean + slope * (read.mean - read.mean.detach())
    return mean


def left_by_slopes(var: Tensor, slopes: Sequence[tuple[Moments, Tensor]]) -> Tensor:
    """The variance of a function that the lines of its slopes do not explain."""
    for read, slope in slopes:
        var = var.addcmul(slope.square(), read.var, value=-1)
    return var.clamp_min(0)


@torch.no_grad()
def rectified(x: Moments, negative: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and slope of a function with slope 1 above zero and another below.

    With a = m / s: Var x₊ / s² = Φ + a (a Φ (1 - Φ) + φ (1 - 2 Φ)) - φ², without differences of large numbers, and
    f = x₊ (1 - t) + t x has Var f = (1 - t)² Var x₊ + 2 t (1 - t) Φ s² + t² s².
    """
    std = x.var.sqrt().clamp_min_(torch.finfo(x.dtype).tiny)
    a = (x.mean / std).clamp_(-FAR, FAR)
    error = torch.erf(a * ROOT_HALF)
    density = (a.square() * -0.5).exp_().mul_(DENSITY)
    above = (error * 0.5).add_(0.5)
    outside = (1 - error.square()).mul_(0.25)  # Φ (1 - Φ)
    share = (outside * a).addcmul_(density, error, value=-1).mul_(a).add_(above).addcmul_(density, density, value=-1)
    mean = (x.mean * above).addcmul_(std, density).clamp_min_(0)
    var = share.mul_(x.var).clamp_min_(0)
    if not negative:
        return mean, var, above
    rest = 1 - negative
    var = (rest**2 * var).addcmul_(above, x.var, value=2 * negative * rest).add_(x.var, alpha=negative**2)
    return mean.mul_(rest).add_(x.mean, alpha=negative), var.clamp_min_(0), above.mul_(rest).add_(negative)


def rectified_sum(x: Moments, y: Moments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance and both slopes of max(0, X + Y) with a rectified X, as a mixture of two Gaussians."""
    with torch.enable_grad():
        first = x.mean.detach().requires_grad_()
        low, high, within, share = mixture(first, x.var, y.mean.detach(), y.var)
        below, lower_var, lower_slope = rectified(Moments(low.detach(), within.detach().square()))
        above, upper_var, upper_slope = rectified(Moments(high.detach(), within.detach().square()))
        # the derivative of E max(0, N(m, s²)) by s is φ(m / s)
        by_within = [_density(centre.detach() / within.detach()) for centre in (low, high)]
        lower = lower_slope * low + by_within[0] * within
        upper = upper_slope * high + by_within[1] * within
        weight = share.detach()
        total = ((1 - weight) * lower + weight * upper + share * (above - below)).sum()
        (by_first,) = torch.autograd.grad(total, first)
    with torch.no_grad():
        gap = above - below
        mean = below + weight * gap
        var = lower_var + weight * (upper_var - lower_var) + weight * (1 - weight) * gap.square()
        return mean, var, by_first, lower_slope + weight * (upper_slope - lower_slope)


def _density(a: Tensor) -> Tensor:
    return (a.clamp(-FAR, FAR).square() * -0.5).exp_().mul_(DENSITY)
