"""Mean squared slopes of elementwise functions of a Gaussian variable."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...engine.clusters import Clusters
from ...engine.plan import operation_of
from ...gaussian.chebyshev import at_many
from ...gaussian.normal import cdf, ratio, working_dtype
from ...gaussian.quadrature import expectation
from ...gaussian.rectifier import positive_sum
from ...graph.node import Node
from ...moments import Moments

SlopeMoments = tuple[Tensor, Tensor]
KnownSlopes = dict[tuple[Node, Node], SlopeMoments]


def chance_on(clusters: Clusters, node: Node) -> Tensor:
    """How often a rectifier behind a skip connection is on (`Plan.skips`)."""
    rectified, other = (clusters.env[term] for term in clusters.plan.skips[node])
    return positive_sum(rectified.mean, rectified.var, other.mean, other.var)


def behind_skips(clusters: Clusters) -> KnownSlopes:
    """The slopes of all such rectifiers of a finished walk."""
    found = {(node, clusters.plan.root[node]): chance_on(clusters, node).double() for node in clusters.plan.skips}
    return {key: (on, on) for key, on in found.items()}


def slopes(
    clusters: Clusters, end: Node, start: Node, root: Node, x: Moments, known: KnownSlopes
) -> SlopeMoments | None:
    """E[f'] and E[f'^2] of f' = d end / d start for the cluster's root distributed as `x`.

    `start` is the root or lies between it and `end`, and `x` has the extents of `end`; `known` are slopes worked out
    before for the same root and moments. None where the root must be positive.
    """
    if (stops := _stopping(clusters)) and not stops.isdisjoint(clusters.path(end, root)):
        return _known(clusters, end, start, root, x, known)  # lines know nothing of what is detached
    base, line = clusters.line(end)
    if clusters.line(start)[0] is base and start is not base:  # both are lines of the same node
        return _known(clusters, end, start, root, x, known)
    slope = torch.as_tensor(line.slope, dtype=working_dtype(x.device), device=x.device)
    one = torch.ones(x.shape, dtype=slope.dtype, device=x.device)
    curved = (one, one) if base is start else _known(clusters, base, start, root, x, known)
    return None if curved is None else (slope * curved[0], slope.square() * curved[1])


def _known(
    clusters: Clusters, end: Node, start: Node, root: Node, x: Moments, known: KnownSlopes
) -> SlopeMoments | None:
    found = known.get((end, start))
    if found is not None and found[0].shape == x.shape:
        return found
    found = _integrated(clusters, end, start, root, x)
    if found is not None:
        known[end, start] = found
    return found


def _integrated(clusters: Clusters, end: Node, start: Node, root: Node, x: Moments) -> SlopeMoments | None:
    mean, std = (t.to(working_dtype(t.device)) for t in (x.mean, x.std))
    if start is end:
        return (one := torch.ones_like(mean)), one
    if start is root and operation_of(end) == "relu" and end.args[0] is root:
        return (on := cdf(ratio(mean, std))), on
    path = clusters.path(end, root)
    if clusters.needs_positive(path, root):
        return None
    slope = _slope(clusters, path, root, start)

    def integrated(m: Tensor, s: Tensor) -> SlopeMoments:
        settings = clusters.panels(path, root, m, s)
        settings["breaks"] += settings.pop("jumps")  # at a kink of the function its slope jumps
        first, spread = expectation(slope, m, s, **settings)
        return first, first.square() + spread

    found = at_many(integrated, mean, std) if clusters.may_interpolate(path, mean, std) else None
    return integrated(mean, std) if found is None else found


def _stopping(clusters: Clusters) -> set[Node]:
    """The nodes of a program that no gradient passes, such as `detach`."""
    program, rules = clusters.plan.program, clusters.plan.rules
    return program.once(
        "stops gradients", lambda: {n for n in program.nodes if n in rules and rules[n].stops_gradients}
    )


def _slope(clusters: Clusters, path: list[Node], root: Node, start: Node) -> Callable[[Tensor], Tensor]:
    stops = _stopping(clusters)

    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            local = clusters.values(path, root, x.detach().requires_grad_(), stops)
            end = local[path[-1]]
            if not end.requires_grad or not local[start].requires_grad:
                return torch.zeros_like(x)
            (found,) = torch.autograd.grad(end.sum(), local[start], allow_unused=True)
        return torch.zeros_like(x) if found is None else found.to(x.dtype)

    return slope
