"""Expectations of exp(-e^{X - t}) and its derivatives: the one-dimensional integrals behind softmax."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .normal import ROOT_TWO_PI, gauss_legendre, ratio

_FLAT, _BEND, _END = -18.0, -3.0, 3.7  # where exp(-e^y) is one, begins to fall, is zero
_WIDE = 0.8


class Panels(NamedTuple):
    """Gauss-Legendre nodes on three panels of a window of so many standard deviations."""

    window: float
    panels: tuple[tuple[tuple[float, float], ...], ...]


def _rule(window: float, *counts: int) -> Panels:
    return Panels(window, tuple(tuple(zip(*gauss_legendre(n), strict=True)) for n in counts))


FINE = _rule(7.5, 16, 16, 24)
COARSE = _rule(4.5, 6, 6, 12)


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
    def forward(mean: Tensor, std: Tensor, t: Tensor, rule: Panels) -> tuple[Tensor, Tensor, Tensor]:
        total = [torch.zeros_like(t - mean) for _ in range(3)]
        for panel, (centre, half) in zip(rule.panels, _panels(mean, std, t, rule.window), strict=True):
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
        ctx.rule = inputs[3]

    @staticmethod
    def backward(ctx: Any, g0: Tensor, g1: Tensor, g2: Tensor) -> tuple[Tensor, Tensor, None, None]:
        mean, std, t = ctx.saved_tensors
        by_mean, by_std = torch.zeros_like(g0), torch.zeros_like(g0)
        for panel, (centre, half) in zip(ctx.rule.panels, _panels(mean, std, t, ctx.rule.window), strict=True):
            for node, weight in panel:
                z, a, e = _values(mean, std, t, centre, half, node)
                slope = (weight / ROOT_TWO_PI) * half * e * a * (g1 - g0 + a * (2.0 * g2 - g1 - a * g2))
                by_mean, by_std = by_mean + slope, torch.addcmul(by_std, z, slope)
        return by_mean.sum_to_size(mean.shape), by_std.sum_to_size(std.shape), None, None


def gumbel(mean: Tensor, std: Tensor, t: Tensor, rule: Panels = FINE) -> tuple[Tensor, Tensor, Tensor]:
    """E[a^n e^{-a}] for n = 0, 1, 2 with a = e^{X - t}, X ~ N(mean, std^2); no derivative by t."""
    result: tuple[Tensor, Tensor, Tensor] = _Gumbel.apply(mean, std, t, rule)  # type: ignore[no-untyped-call]
    return result
