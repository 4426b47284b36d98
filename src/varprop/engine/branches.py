"""Sums of several convolutions of one value, and of the value itself: together they are one convolution.

Such sums stand where networks are trained with parallel branches, or where positions are told by x + conv(x). Their
terms are not independent, but the kernels can be added, and the moments of the one convolution are right.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph.node import Node, resolve
from ..moments import Moments
from ..rules.convolution import Convolution
from ..rules.linear import border, conv
from ..rules.norm import Stored
from .clusters import Clusters


@dataclass(frozen=True)
class Branch:
    """scale * conv(x) + offset, or with x itself where there is no convolution; numbers, or one a channel."""

    conv: Node | None = None
    scale: Any = 1.0
    offset: Any = 0.0

    def then(self, scale: Any, offset: Any) -> Branch:
        """Behind another affine function of channels."""
        return replace(self, scale=self.scale * scale, offset=self.offset * scale + offset)


Forms = dict[Node, tuple[Branch, ...]]  # a node as a sum of branches of each of several earlier nodes


class Branches:
    """The sums of a walk that can be put together."""

    def __init__(self, clusters: Clusters) -> None:
        self.clusters, self.plan, self.env = clusters, clusters.plan, clusters.env
        self.known: dict[Node, Forms] = {}

    def moments(self, node: Node) -> tuple[Moments, str | None] | None:
        """Moments of a sum as one convolution, and why they are approximate if they are; None if it is none."""
        rule = self.plan.rules.get(node)
        if rule is None or rule.signs is None or len(self.plan.random_operands(node)) != 2:
            return None
        for source, branches in self.forms(node).items():
            if source is not node and any(branch.conv for branch in branches):
                whole = self._whole(branches)
                if whole is not None:
                    given = (self.env[source], *_arguments(whole))
                    return conv(*given), border(*given)
        return None

    def forms(self, node: Node) -> Forms:
        """All ways to write a node; memoised."""
        if node not in self.known:
            self.known[node] = {node: (Branch(),), **self._forms(node)}
        return self.known[node]

    def _forms(self, node: Node) -> Forms:
        if self.plan.inside_cluster(node):
            base, line = self.clusters.line(node)
            return {} if base is node else _behind(self.forms(base), line.slope, line.offset)
        random = self.plan.random_operands(node)
        if node.target is operator.getitem:
            return self._batch_norm(node)
        rule = self.plan.rules.get(node)
        if rule is None or node.kwargs:
            return {}
        if rule.linear and rule.convolution is not None and random == [node.args[0]]:
            return {random[0]: (Branch(node),)}
        if rule.signs is not None and len(random) == 2:
            first, second = (
                _behind(self.forms(operand), sign, 0.0) for operand, sign in zip(node.args[:2], rule.signs, strict=True)
            )
            return {x: first[x] + second[x] for x in first if x in second}
        return {}

    def _batch_norm(self, node: Node) -> Forms:
        """Of a getitem: the first result of a batch norm in evaluation is affine in every channel."""
        norm, index = node.args
        rule = self.plan.rules.get(norm)
        if index != 0 or rule is None or rule.batch_norm is None:
            return {}
        if self.plan.random_operands(norm) != [norm.args[0]]:
            return {}
        stored: Stored = rule.batch_norm(*resolve(norm.args, self.env.get))
        scale = (stored.var + stored.eps).rsqrt() * (1.0 if stored.weight is None else stored.weight)
        offset = (0.0 if stored.bias is None else stored.bias) - stored.mean * scale
        shape = (-1, *[1] * (node.ndim - 2))
        return _behind(self.forms(norm.args[0]), scale.view(shape), offset.view(shape))

    def _whole(self, branches: Sequence[Branch]) -> Convolution | None:
        """All branches as one convolution; None if their kernels do not fit each other."""
        own = [None if branch.conv is None else self._kernel(branch.conv) for branch in branches]
        known = [kernel for kernel in own if kernel is not None]
        largest = max(known, key=lambda k: k.weight[0, 0].numel(), default=None)
        if largest is None:
            return None
        weight, bias = torch.zeros_like(largest.weight), torch.zeros_like(largest.bias)
        for branch, kernel in zip(branches, own, strict=True):
            kernel = _identity(largest) if branch.conv is None else kernel
            fitted = None if kernel is None else _fitted(kernel, largest)
            scale, offset = (_per_channel(value, largest) for value in (branch.scale, branch.offset))
            if kernel is None or fitted is None or scale is None or offset is None:
                return None
            weight = weight + fitted * scale.view(-1, *[1] * (weight.ndim - 1))
            bias = bias + kernel.bias * scale + offset
        return replace(largest, weight=weight, bias=bias)

    def _kernel(self, node: Node) -> Convolution | None:
        """Of a convolution; None for one that is transposed, or has more zeros behind than before."""
        read = self.plan.rules[node].convolution
        assert read is not None
        kernel: Convolution = read(*resolve(node.args, self.env.get))
        if kernel.transposed or any(before != behind for before, behind in kernel.zeros):
            return None
        bias = kernel.weight.new_zeros(len(kernel.weight)) if kernel.bias is None else kernel.bias
        return replace(kernel, bias=bias)


def _arguments(kernel: Convolution) -> tuple[Any, ...]:
    """What a convolution is called with, after its input."""
    before = [first for first, _ in kernel.zeros]
    return kernel.weight, kernel.bias, kernel.stride, before, kernel.dilation, kernel.groups


def _identity(like: Convolution) -> Convolution | None:
    """The convolution that changes nothing, in as many groups; None if there is none."""
    outputs, inputs, *sizes = like.weight.shape
    if outputs != inputs * like.groups or any(step != 1 for step in like.stride):
        return None
    ones = torch.eye(inputs, dtype=like.weight.dtype, device=like.weight.device).repeat(like.groups, 1)
    single = ones.view(outputs, inputs, *[1] * len(sizes))
    return replace(like, weight=single, bias=torch.zeros_like(like.bias), zeros=[(0, 0)] * len(sizes))


def _fitted(kernel: Convolution, whole: Convolution) -> Tensor | None:
    """The weights at their place in a larger kernel; None if they have none there."""
    if (kernel.stride, kernel.groups, kernel.weight.shape[:2]) != (whole.stride, whole.groups, whole.weight.shape[:2]):
        return None
    margins: list[int] = []
    sizes = zip(kernel.weight.shape[2:], whole.weight.shape[2:], strict=True)
    for (size, room), (own, _), (pad, _), gap, step in zip(
        sizes, kernel.zeros, whole.zeros, kernel.dilation, whole.dilation, strict=True
    ):
        before, rest = divmod(pad - own, step)
        behind = room - size - before
        if rest or before < 0 or behind < 0 or (size > 1 and gap != step):
            return None
        margins = [before, behind, *margins]
    return F.pad(kernel.weight, margins)


def _behind(forms: Forms, scale: Any, offset: Any) -> Forms:
    """All forms behind an affine function; its offset is added once."""
    return {
        x: (first.then(scale, offset), *(branch.then(scale, 0.0) for branch in rest))
        for x, (first, *rest) in forms.items()
    }


def _per_channel(value: Any, whole: Convolution) -> Tensor | None:
    """A number, or one a channel, as a vector; None for what differs from position to position."""
    outputs, axes = whole.weight.shape[0], whole.weight.ndim - 2
    given = torch.as_tensor(value, dtype=whole.weight.dtype, device=whole.weight.device)
    if given.numel() == 1:
        return given.reshape(1).expand(outputs)
    alone = given.ndim > axes and given.shape[-axes - 1] == outputs == given.numel()
    return given.reshape(-1) if alone else None
