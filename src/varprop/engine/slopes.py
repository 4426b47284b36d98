"""The slope of a function of one Gaussian variable: its mean and mean square."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gaussian.normal import cdf, ratio, working_dtype
from ..gaussian.quadrature import at_many, expectation
from ..graph.node import Node
from ..moments import Moments
from .clusters import Clusters
from .plan import operation_of

SlopeMoments = tuple[Tensor, Tensor]  # E[f'] and E[f'^2] of a function
SlopeCache = dict[tuple[Node, Node], SlopeMoments]


def slopes(
    clusters: Clusters, end: Node, start: Node, root: Node, x: Moments, cache: SlopeCache
) -> SlopeMoments | None:
    """E[f'] and E[f'^2] of f' = d end / d start for the cluster's root distributed as `x`.

    `start` is the root or lies between it and `end`, and `x` has the extents of `end`; `cache` holds slopes worked out
    before for the same root and moments. None where the root must be positive.
    """
    if (stops := _stopping(clusters)) and not stops.isdisjoint(clusters.path(end, root)):
        return _known(clusters, end, start, root, x, cache)  # lines know nothing of what is detached
    base, line = clusters.line(end)
    if clusters.line(start)[0] is base and start is not base:  # both are lines of the same node
        return _known(clusters, end, start, root, x, cache)
    slope = torch.as_tensor(line.slope, dtype=working_dtype(x.device), device=x.device)
    unit = torch.ones(x.shape, dtype=slope.dtype, device=x.device)
    curved = (unit, unit) if base is start else _known(clusters, base, start, root, x, cache)
    return None if curved is None else (slope * curved[0], slope.square() * curved[1])


def _known(
    clusters: Clusters, end: Node, start: Node, root: Node, x: Moments, cache: SlopeCache
) -> SlopeMoments | None:
    result = cache.get((end, start))
    if result is not None and result[0].shape == x.shape:
        return result
    result = _integrated(clusters, end, start, root, x)
    if result is not None:
        cache[end, start] = result
    return result


def _integrated(clusters: Clusters, end: Node, start: Node, root: Node, x: Moments) -> SlopeMoments | None:
    mean, std = (t.to(working_dtype(t.device)) for t in (x.mean, x.std))
    if start is end:
        return (unit := torch.ones_like(mean)), unit
    if start is root and operation_of(end) == "relu" and end.args[0] is root:
        return (on := cdf(ratio(mean, std))), on
    path = clusters.path(end, root)
    if clusters.needs_positive(path, root):
        return None
    stops = _stopping(clusters)

    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            local = clusters.values(path, root, x.detach().requires_grad_(), stops)
            if not local[end].requires_grad or not local[start].requires_grad:
                return torch.zeros_like(x)
            (gradient,) = torch.autograd.grad(local[end].sum(), local[start], allow_unused=True)
        return torch.zeros_like(x) if gradient is None else gradient.to(x.dtype)

    def integrated(m: Tensor, s: Tensor) -> SlopeMoments:
        settings = clusters.panels(path, root, m, s)
        settings["breaks"] += settings.pop("jumps")  # at a kink of the function its slope jumps
        first, spread = expectation(slope, m, s, **settings)
        return first, first.square() + spread

    interpolated = at_many(integrated, mean, std) if clusters.may_interpolate(path, mean, std) else None
    return integrated(mean, std) if interpolated is None else interpolated


def _stopping(clusters: Clusters) -> set[Node]:
    """The nodes of a program that no gradient passes, such as `detach`."""
    program, rules = clusters.plan.program, clusters.plan.rules
    return program.once(
        "stops gradients", lambda: {n for n in program.nodes if n in rules and rules[n].stops_gradients}
    )
