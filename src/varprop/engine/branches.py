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

from ..graph.node import Node
from ..moments import Moments
from ..rules.axes import per_axis
from ..rules.linear import border, conv
from .clusters import Clusters

aten = torch.ops.aten
CONVOLUTIONS = (aten.conv1d, aten.conv2d, aten.conv3d)
SIGNS = {aten.add: 1.0, aten.sub: -1.0}
DEFAULTS: list[Any] = [None, 1, 0, 1, 1]  # bias, stride, padding, dilation, groups


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
        if node.packet not in SIGNS or len(self.plan.random_operands(node)) != 2:
            return None
        for source, branches in self.forms(node).items():
            if source is not node and any(branch.conv for branch in branches):
                whole = _whole(branches, self.env)
                if whole is not None:
                    given = (self.env[source], *whole.arguments)
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
        if node not in self.plan.rules or not random:
            return {}
        if node.packet in CONVOLUTIONS and random == [node.args[0]] and not node.kwargs:
            return {random[0]: (Branch(node),)}
        if node.packet in SIGNS and len(random) == 2 and not node.kwargs:
            first, second = (self.forms(operand) for operand in node.args[:2])
            sign = SIGNS[node.packet]
            return {x: first[x] + _behind({x: second[x]}, sign, 0.0)[x] for x in first if x in second}
        return {}

    def _batch_norm(self, node: Node) -> Forms:
        """Of a getitem: the first result of a batch norm in evaluation is affine in every channel."""
        norm, index = node.args
        if index != 0 or norm.packet is not aten._native_batch_norm_legit_no_training or norm not in self.plan.rules:
            return {}
        if self.plan.random_operands(norm) != [norm.args[0]]:
            return {}
        weight, bias, mean, var = (None if a is None else self.env[a] for a in norm.args[1:5])
        scale = (var + norm.args[6]).rsqrt() * (1.0 if weight is None else weight)
        shape = (-1, *[1] * (node.ndim - 2))
        return _behind(
            self.forms(norm.args[0]), scale.view(shape), ((0.0 if bias is None else bias) - mean * scale).view(shape)
        )


def _whole(branches: Sequence[Branch], env: dict[Node, Any]) -> _Kernel | None:
    """All branches as one convolution; None if their kernels do not fit each other."""
    own = [None if branch.conv is None else _Kernel.of(branch.conv, env) for branch in branches]
    largest = max((kernel for kernel in own if kernel is not None), key=lambda k: k.weight[0, 0].numel(), default=None)
    if largest is None:
        return None
    weight, bias = torch.zeros_like(largest.weight), torch.zeros_like(largest.bias)
    for branch, kernel in zip(branches, own, strict=True):
        kernel = largest.identity() if branch.conv is None else kernel
        fitted = None if kernel is None else kernel.fitted(largest)
        scale, offset = (_per_channel(value, largest) for value in (branch.scale, branch.offset))
        if kernel is None or fitted is None or scale is None or offset is None:
            return None
        weight = weight + fitted * scale.view(-1, *[1] * (weight.ndim - 1))
        bias = bias + kernel.bias * scale + offset
    return replace(largest, weight=weight, bias=bias)


@dataclass(frozen=True)
class _Kernel:
    """The weights of a convolution, with everything written out."""

    weight: Tensor
    bias: Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @classmethod
    def of(cls, node: Node, env: dict[Node, Any]) -> _Kernel | None:
        """Of a convolution; None for what cannot be written so, as padding="same"."""
        _, weight, *rest = node.args
        bias, stride, padding, dilation, groups = [*rest, *DEFAULTS[len(rest) :]]
        values = env[weight]
        if isinstance(padding, str) or not isinstance(values, Tensor):
            return None
        added = values.new_zeros(len(values)) if bias is None else env[bias]
        steps, zeros, gaps = (per_axis(setting, values.ndim - 2) for setting in (stride, padding, dilation))
        return cls(values, added, steps, zeros, gaps, groups)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a convolution is called with, after its input."""
        return self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups

    def identity(self) -> _Kernel | None:
        """The convolution that changes nothing, in as many groups; None if there is none."""
        outputs, inputs, *sizes = self.weight.shape
        if outputs != inputs * self.groups or any(step != 1 for step in self.stride):
            return None
        ones = torch.eye(inputs, dtype=self.weight.dtype, device=self.weight.device).repeat(self.groups, 1)
        single = ones.view(outputs, inputs, *[1] * len(sizes))
        return replace(self, weight=single, bias=torch.zeros_like(self.bias), padding=[0] * len(sizes))

    def fitted(self, whole: _Kernel) -> Tensor | None:
        """The weights at their place in a larger kernel; None if they have none there."""
        if (self.stride, self.groups, self.weight.shape[:2]) != (whole.stride, whole.groups, whole.weight.shape[:2]):
            return None
        margins: list[int] = []
        sizes = zip(self.weight.shape[2:], whole.weight.shape[2:], strict=True)
        for (size, room), own, pad, gap, step in zip(
            sizes, self.padding, whole.padding, self.dilation, whole.dilation, strict=True
        ):
            before, rest = divmod(pad - own, step)
            behind = room - size - before
            if rest or before < 0 or behind < 0 or (size > 1 and gap != step):
                return None
            margins = [before, behind, *margins]
        return F.pad(self.weight, margins)


def _behind(forms: Forms, scale: Any, offset: Any) -> Forms:
    """All forms behind an affine function; its offset is added once."""
    return {
        x: (first.then(scale, offset), *(branch.then(scale, 0.0) for branch in rest))
        for x, (first, *rest) in forms.items()
    }


def _per_channel(value: Any, whole: _Kernel) -> Tensor | None:
    """A number, or one a channel, as a vector; None for what differs from position to position."""
    outputs, axes = whole.weight.shape[0], whole.weight.ndim - 2
    given = torch.as_tensor(value, dtype=whole.weight.dtype, device=whole.weight.device)
    if given.numel() == 1:
        return given.reshape(1).expand(outputs)
    alone = given.ndim > axes and given.shape[-axes - 1] == outputs == given.numel()
    return given.reshape(-1) if alone else None
