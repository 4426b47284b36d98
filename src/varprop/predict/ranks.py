"""Maxima and other ranks along whole axes, with their slopes by what they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph.node import Node, TensorInfo
from ..moments import Moments
from ..rules.registry import lookup
from .curves import attached
from .windows import larger

MOST = 32  # ranks along an axis: each takes a backward pass through the rule


def reduced_axes(node: Node) -> list[int]:
    """The axes of its first argument over which an operation reduces; none if it does not reduce whole axes."""
    info = _first_info(node)
    if not isinstance(info, TensorInfo):
        return []
    extents, left = list(node.args[0].info.shape), list(info.shape)
    if len(extents) == len(left):
        axes = [axis for axis, (before, after) in enumerate(zip(extents, left, strict=True)) if before != after]
        return axes if all(left[axis] == 1 for axis in axes) else []
    dim = _dim(node)
    axes = [axis % len(extents) for axis in ([dim] if isinstance(dim, int) else dim or range(len(extents)))]
    return axes if left == [n for axis, n in enumerate(extents) if axis not in axes] else []


def axis_of_ranks(node: Node) -> int | None:
    """The axis along which an operation gives several ranks, and not more than are followed; None for others."""
    info, dim = _first_info(node), _dim(node)
    if not isinstance(dim, int) or not isinstance(info, TensorInfo) or len(info.shape) != len(node.args[0].info.shape):
        return None
    axis: int = dim % max(1, len(info.shape))
    return axis if is_running(node) or (info.shape and 1 < info.shape[axis] <= MOST) else None


def is_running(node: Node) -> bool:
    """True for the largest or the least of every beginning of an axis."""
    rule = lookup(node.target)
    return rule is not None and rule.running


def _first_info(node: Node) -> Any:
    return node.info[0] if isinstance(node.info, (list, tuple)) else node.info


def _dim(node: Node) -> Any:
    """The argument of an operation that names axes; None if it has none."""
    schema = getattr(node.target, "_schema", None)
    arguments = {argument.name: argument.default_value for argument in schema.arguments} if schema else {}
    return (arguments | dict(zip(arguments, node.args, strict=False)) | dict(node.kwargs)).get("dim")


def ranked(node: Node, x: Moments, rule: Callable[[Moments], Moments]) -> tuple[Moments, Tensor]:
    """Ranks, whose means are lines in those of x, and the variances that these lines leave.

    Of several ranks along an axis, what is left counts as independent. Of Gaussian values that are, the std of random
    directions of 3 to 16 ranks then comes out right in the median, and by 0.9 to 1.2 for 80 % of them. `rule` gives the
    moments of the result from those of x.
    """
    mean = x.mean.detach().requires_grad_()
    found = rule(Moments(mean, x.var)).dense()
    axes, along = reduced_axes(node), axis_of_ranks(node)
    ranks = (found.mean,) if along is None else found.mean.unbind(along)
    slopes = torch.stack([torch.autograd.grad(rank.sum(), mean, retain_graph=True)[0] for rank in ranks])
    by_line = slopes.square() * x.var

    def pulled(gradient: Tensor) -> Tensor:
        if along is not None:
            return (slopes * gradient.movedim(along, 0).unsqueeze(along + 1)).sum(0)
        return slopes[0] * (gradient if gradient.ndim == x.ndim else _with_axes(gradient, axes))

    explained = by_line[0].sum(axes).view(found.shape) if along is None else by_line.sum(along + 1).movedim(0, along)
    var = found.var.detach()
    return Moments(attached(found.mean.detach(), (x.mean, pulled)), var), (var - explained).clamp_min(0)


def _with_axes(gradient: Tensor, axes: Sequence[int]) -> Tensor:
    """With the reduced axes back in their places, of extent 1."""
    for axis in sorted(axes):
        gradient = gradient.unsqueeze(axis)
    return gradient


def running_maxima(x: Moments, axis: int, sign: float) -> tuple[Moments, Tensor, Tensor]:
    """The largest (sign -1: least) of every beginning of an axis, each the larger of the one before it and an entry.

    What a line does not explain at one step stays in those that follow it, by their slopes.

    Returns:
        The moments; a tensor of zeros, to which the noise that enters at every step is added; and its variance.

    Example:
        >>> x = Moments(torch.zeros(1, 2), torch.ones(1, 2))
        >>> found, _, fresh = running_maxima(x, 1, 1.0)  # E max = 1 / √π, Var = 1 - 1 / π
        >>> found.mean.detach(), found.var, fresh
        (tensor([[0.0000, 0.5642]]), tensor([[1.0000, 0.6817]]), tensor([[0.0000, 0.1817]]))
    """
    entry = torch.zeros_like(x.mean).requires_grad_()
    steps = zip(x.mean.unbind(axis), x.var.unbind(axis), entry.unbind(axis), strict=True)
    means, variances, fresh = list[Tensor](), list[Tensor](), list[Tensor]()
    for mean, var, noise in steps:
        if not means:
            means.append(mean + noise)
            variances.append(var)
            fresh.append(torch.zeros_like(var))
            continue
        before, spread = means[-1], variances[-1]
        with torch.no_grad():
            largest, total, first, second = larger(sign * before, spread, sign * mean, var)
            fresh.append((total - first.square() * spread - second.square() * var).clamp_min(0))
        means.append(attached(sign * largest, (before, first.mul), (mean, second.mul), (noise, torch.clone)))
        variances.append(total)
    return Moments(torch.stack(means, axis), torch.stack(variances, axis)), entry, torch.stack(fresh, axis)
