"""Mean squared slopes of elementwise functions of a Gaussian variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..clusters import Clusters
from ..gaussian.normal import cdf, ratio, working_dtype
from ..gaussian.quadrature import expectation
from ..moments import Moments
from ..node import Node

aten = torch.ops.aten


def squared_slope(clusters: Clusters, end: Node, start: Node, root: Node, x: Moments) -> Tensor | None:
    """E[(d end / d start)^2] for the cluster's root distributed as `x`, or None where the root must be positive.

    Args:
        clusters: The elementwise part of a walk.
        end: A node of the cluster, of the shape of `x`.
        start: The root, or a node between it and `end`.
        root: The root.
        x: The root's moments, written out to the extents of `end`.
    """
    mean, std = (t.to(working_dtype(t.device)) for t in (x.mean, x.std))
    if start is root and (closed := _closed(clusters, end, root, mean, std)) is not None:
        return closed
    path = clusters._path(end, root)
    if any(clusters._needs_positive(node, root) for node in path):
        return None
    points = clusters._points(path, root, mean, std)
    slope = _slope(clusters, path, root, start)
    # at a kink of the function its slope jumps
    first, spread = expectation(slope, mean, std, breaks=[*points["breaks"], *points["jumps"]], knots=points["knots"])
    return first.square() + spread


def _closed(clusters: Clusters, end: Node, root: Node, mean: Tensor, std: Tensor) -> Tensor | None:
    base, line = clusters.line(end)
    if base is root:
        return torch.as_tensor(line.slope, dtype=mean.dtype, device=mean.device).square().expand(mean.shape)
    if getattr(end.target, "overloadpacket", None) is aten.relu and end.args[0] is root:
        return cdf(ratio(mean, std))
    return None


def _slope(clusters: Clusters, path: list[Node], root: Node, start: Node) -> Callable[[Tensor], Tensor]:
    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            local: dict[Node, Any] = {root: x.detach().requires_grad_()}
            for node in path:
                args, kwargs = clusters._arguments(node, local.__getitem__)
                local[node] = (clusters.plan.rules[node].evaluate or node.target)(*args, **kwargs)
            end = local[path[-1]]
            if not end.requires_grad or not local[start].requires_grad:
                return torch.zeros_like(x)
            (found,) = torch.autograd.grad(end.sum(), local[start], allow_unused=True)
        return torch.zeros_like(x) if found is None else found.to(x.dtype)

    return slope
