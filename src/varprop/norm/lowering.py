"""From the captured graph to lanes: what enters every layer, as functions of single channels.

Between normalized layers most networks only apply functions to every channel, add channels, and move them. Moving is
followed by letting the operations move the lanes' numbers instead of their values; all else becomes a `Function` of one
or two lanes. A parameter between layers (of a PReLU, a learned factor) is a lane of variance 0 that is given at every
call. Whatever does not fit (attention, layer norm) is left to the walk.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..engine.evaluation import Evaluation as Walk
from ..engine.evaluation import apply
from ..engine.plan import Plan
from ..gaussian.normal import Pair, safe_sqrt
from ..gaussian.rectifier import FALL, SKEW, SPLIT, relu_of_sum, two_slopes
from ..graph.node import Form, Node, resolve
from ..moments import Moments, trusted
from .fold.layout import Function
from .numbering import NUMBER, Fixed, NotLanes, Numbering, lane_numbers, moving_lanes
from .recognize import Kernel, composed, of_positions, piecewise_linear, recognized

AFTER_SKIP = Function(
    "relu(x + y), x rectified", lambda x, y: relu_of_sum(*x, *y), ("skip", SKEW, FALL, SPLIT), arity=2
)
LEARNED_SLOPE = Function(
    "x, below 0 y x", lambda x, y: two_slopes(x[0], safe_sqrt(x[1]), 1.0, y[0]), ("slope",), arity=2
)


@dataclass
class Lowering:
    """The lanes of a graph's nodes while they are found.

    Attributes:
        plan: Of the graph between the layers.
        numbering: All lanes that there are, and the functions that make them.
        lanes: For every node visited the numbers of its lanes, as the means (and variances) of a `Moments`; lists for
            several results. Nodes that are no lanes are missing.
    """

    plan: Plan
    numbering: Numbering = field(default_factory=Numbering)
    lanes: dict[Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.walk = Walk(self.plan, {}, annotate=False)

    def give(self, node: Node, numbers: Tensor, full: Any) -> None:
        """Say of which lanes a node consists."""
        self.lanes[node] = moving_lanes(numbers, full)

    def run(self) -> None:
        """Visit every node; those that cannot be lowered, and what follows from them, stay out."""
        with trusted(), torch.no_grad():
            for node in self.plan.program.nodes:
                if self.plan.random(node) and not self.plan.inside_cluster(node):
                    try:
                        self.lanes[node] = self._visit(node)
                    except NotLanes:
                        continue

    def numbers(self, node: Node) -> Tensor:
        """The lanes of a node in the shape it has (uniform axes of extent 1)."""
        with trusted(), torch.no_grad():
            moving: Moments = self._value(node)
        return lane_numbers(moving)

    def blocker(self, target: Node) -> str:
        """The first operation before a node that does not consist of lanes though all that it reads does."""
        waiting, seen = [target], {target}
        while waiting:
            node = waiting.pop()
            missing = [n for n in self.plan.random_operands(node) if n not in self.lanes and n not in seen]
            if not missing and node not in self.lanes and node.target is not None:
                return f"{node.target} in '{node.module}'"
            seen.update(missing)
            waiting += missing
        return f"positions of {target.name} that differ"

    def _value(self, node: Any) -> Any:
        if node not in self.lanes:
            if not isinstance(node, Node) or not self.plan.inside_cluster(node):
                raise NotLanes
            self.lanes[node] = self._clustered(node)
        return self.lanes[node]

    def _visit(self, node: Node) -> Any:
        rule = self.plan.rules.get(node)
        if node.target is operator.getitem:
            return self._value(node.args[0])[node.args[1]]
        if rule is None:
            raise NotLanes
        if rule.kind == "structural":
            return self._moved(node)
        self._require_only_random(node)
        if rule.kind == "elementwise" and rule.independent is not None:
            return self._combined(node, self.plan.random_operands(node))
        return self._channelwise(node)

    def _moved(self, node: Node, value: Callable[[Node], Any] | None = None) -> Any:
        self._require_only_random(node)
        args, kwargs = resolve((node.args, node.kwargs), value or self._value)
        return _stamped(apply(self.plan.rules[node], node.target, args, kwargs), node, self.numbering.count)

    def _require_only_random(self, node: Node) -> None:
        """Tensors that are not random are parameters or tables, which differ from channel to channel."""
        if any(not self.plan.random(operand) for operand in node.operands):
            raise NotLanes

    def _clustered(self, node: Node) -> Moments:
        if node in self.plan.skips:
            return self._applied(AFTER_SKIP, node, *self.plan.skips[node])
        root = self.plan.root[node]
        if self.plan.mixture(root) is not None and not self._is_affine(node):
            raise NotLanes  # a function of what is kept is mixed with one of what is dropped
        if any(not self.plan.random(operand) for operand in node.operands):
            return self._with_parameter(node)
        if self._reads_parameters(node, root):  # a function of what is Gaussian like the root
            argument = self._behind_parameters(node, root)
            return self._applied(self._function_from(node, argument), node, argument)
        moments = _of_lanes(functools.partial(self._cluster_moments, node, root))
        function = recognized(self._expression(node, root), moments, self._pointwise_kernel(node, root))
        return self._applied(function, node, root)

    def _named_kernel(self, node: Node, *random: Any) -> Kernel | None:
        """The kernel that an operation's rule names, if its first arguments are these and the others are numbers."""
        if list(node.args[: len(random)]) != list(random) or node.reads != list(random):
            return None
        kernel = self.plan.rules[node].kernel(*node.args[len(random) :], **node.kwargs)
        return None if kernel is None else (kernel[0], *map(float, kernel[1:]))

    def _pointwise_kernel(self, node: Node, start: Node) -> Kernel | None:
        of_two = self.plan.rules[node].affine is not None  # sums and products with a number are lines
        named = None if of_two else self._named_kernel(node, start)
        return named or piecewise_linear(self._values(node, start))

    def _reads_parameters(self, node: Node, root: Node) -> bool:
        path = self.walk.clusters.path(node, root)
        return any(not self.plan.random(operand) for other in path for operand in other.operands)

    def _behind_parameters(self, node: Node, root: Node) -> Node:
        """The last node that is Gaussian like the root and of which alone, without parameters, a node is a function."""
        for start in reversed(self.walk.clusters.path(node, root)[:-1]):
            path = self.walk.clusters.path(node, start)
            read = {operand for other in path for operand in other.operands}
            if root not in read and read <= {start, *path} and self._is_affine(start):
                return start
        raise NotLanes

    def _with_parameter(self, node: Node) -> Moments:
        """A function of a random value and a parameter, which is a random value of variance 0."""
        (argument, *more), rule = self.plan.random_operands(node), self.plan.rules[node]
        if more or len(node.operands) != 2 or any(operand not in node.args[:2] for operand in node.operands):
            raise NotLanes
        if rule.affine is not None and rule.independent is not None:
            return self._combined(node, list(node.args[:2]))
        if rule.operation not in ("prelu", "prelu of broadcast slopes"):
            raise NotLanes
        if not self._is_affine(argument):
            raise NotLanes
        weight = node.args[1]
        shape = list(weight.form.shape)
        if rule.operation == "prelu" and weight.form.shape.numel() > 1:  # along the channels
            shape += [1] * (node.ndim - 2)
        return self.numbering.apply(
            LEARNED_SLOPE, [self._value(argument), self._fixed(weight, argument, shape)], node.form.shape
        )

    def _is_affine(self, node: Node) -> bool:
        """Whether a node follows from its root by factors and sums with constants, and so is Gaussian as well."""
        root = self.plan.root[node]
        path = self.walk.clusters.path(node, root) if node is not root else []
        return all(
            self.plan.rules[other].affine is not None and sum(map(self.plan.random, other.reads)) == 1 for other in path
        )

    def _fixed(self, node: Node, like: Node, shape: Sequence[int]) -> Moments:
        """Lanes for a node that is not random, seen in some shape: one for every lane of the node it is combined with.

        So channels that share a parameter share no lane, and are computed apart.
        """
        lanes = self._value(like).shape
        if not node.form.is_floating or math.prod(shape) > math.prod(lanes):
            raise NotLanes
        try:
            together = torch.broadcast_shapes(lanes, shape)
        except RuntimeError:
            raise NotLanes from None
        return self.numbering.fix(Fixed(node.name, tuple(shape), tuple(together)))

    def _expression(self, node: Any, root: Node) -> str:
        """The cluster as text, by which equal functions are known."""
        if node is root:
            return "x"
        self._require_only_random(node)
        args = ", ".join(self._expression(a, root) if isinstance(a, Node) else repr(a) for a in node.args)
        more = "".join(f", {key}={value!r}" for key, value in node.kwargs.items())
        return f"{node.target}({args}{more})"

    def _cluster_moments(self, node: Node, root: Node, x: Moments) -> Moments:
        def value(other: Node) -> Moments:
            return x if other is root else self.walk.clusters.moments(other, value)

        return value(node)

    def _values(self, node: Node, root: Node) -> Callable[[Tensor], Tensor]:
        clusters = self.walk.clusters
        return lambda x: clusters.evaluate(clusters.path(node, root), root, x)

    def _applied(self, function: Function, node: Node, *arguments: Node) -> Moments:
        moving = [self._value(argument) for argument in arguments]
        return self.numbering.apply(function, moving, node.form.shape)

    def _combined(self, node: Node, operands: list[Node]) -> Moments:
        if len(operands) != 2 or list(node.args[:2]) != operands:
            raise NotLanes
        independent, rest, kwargs = self.plan.rules[node].independent, node.args[2:], node.kwargs
        assert independent is not None
        moments = _of_lanes(lambda x, y: independent(x, y, *rest, **kwargs))
        kernel = self._named_kernel(node, *operands)
        function = recognized(f"{node.target}(x, y, {rest!r}, {kwargs!r})", moments, kernel, arity=2)
        random = self.plan.random_operands(node)
        if len(random) == 1 and function.kernel is None:
            raise NotLanes
        moving = [self._value(o) if o in random else self._fixed(o, random[0], o.form.shape) for o in operands]
        return self.numbering.apply(function, moving, node.form.shape)

    def _channelwise(self, node: Node) -> Any:
        rule, (argument, *settings) = self.plan.rules[node], node.args
        several = isinstance(node.form, (list, tuple))
        if rule.function is None or self.plan.random_operands(node) != [argument]:
            raise NotLanes
        ranks, maximum = rule.order_statistic, rule.maximum
        found = self.walk.without_functions(argument, maximum, self._value, self._moved) if ranks else None
        moving, before, after = found or (self._value(argument), argument, argument)
        self._require_uniform(node, moving)
        form, full, axis = (node.form[0] if several else node.form), list(moving.full), _channel_axis(moving.full)

        def pooled(x: Moments) -> Moments:
            shape, seen = [1] * len(full), list(full)
            shape[axis], seen[axis] = -1, len(x.mean)
            found = rule.function(Moments(x.mean.view(shape), x.var.view(shape), seen), *settings, **node.kwargs)  # type: ignore[misc]
            found = found[0] if several else found
            if found.mean.numel() != len(x.mean):
                raise NotLanes  # positions come out different: windows of several sizes
            return found  # type: ignore[no-any-return]

        name = f"{node.target}(x{full[axis + 1 :]}, {settings!r}, {node.kwargs!r})"
        moments = _of_lanes(pooled)
        function = recognized(name, moments, self._named_kernel(node, argument) or of_positions(moments))
        if before is not after:
            last = self._function_from(after, before)
            function = recognized(f"{last.name} after {name}", _chained(function, last), composed(function, last))
        made = self.numbering.apply(function, [moving], form.shape)
        made = moving_lanes(lane_numbers(made).view(_kept_axes(made.mean, form)), form.shape)
        return [made] + [None] * (len(node.form) - 1) if several else made

    def _function_from(self, node: Node, start: Node) -> Function:
        """The function of an earlier node of its cluster, as if that were Gaussian."""
        moments = _of_lanes(functools.partial(self.walk.clusters.moments_from, node, start))
        return recognized(self._expression(node, start), moments, self._pointwise_kernel(node, start))

    def _require_uniform(self, node: Node, moving: Moments) -> None:
        """The rule mixes positions; lanes stay apart only where all positions of a channel are the same lane."""
        axis = _channel_axis(moving.full)
        if self.plan.rules[node].per_channel and all(size == 1 for size in moving.shape[axis + 1 :]):
            return
        axes = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else None
        alone = moving.mean.numel() == moving.shape[axis] and axis not in [a % moving.ndim for a in axes or [axis]]
        if not self.plan.rules[node].reduces or not alone:
            raise NotLanes


def _of_lanes(function: Callable[..., Moments]) -> Callable[..., Pair]:
    """How means and variances of lanes go through a function of Moments."""

    def moments(*lanes: Pair) -> Pair:
        with trusted():
            found = function(*(Moments(*lane) for lane in lanes))
        return found.mean.reshape(-1), found.var.reshape(-1)

    return moments


def _chained(first: Function, second: Function) -> Callable[[Pair], Pair]:
    return lambda x: second.moments(first.moments(x))


def _channel_axis(full: Any) -> int:
    """Behind the batch axis where there is one; pooling and interpolation treat it so."""
    return min(1, len(full) - 1)


def _kept_axes(numbers: Tensor, form: Form) -> list[int]:
    """The shape of a pooled value: axes may have gone (a mean without keepdim)."""
    if numbers.ndim == len(form.shape):
        return list(numbers.shape)
    shape = [1] * len(form.shape)
    if numbers.numel() > 1:
        shape[_channel_axis(form.shape)] = numbers.numel()
    return shape


def _stamped(value: Any, node: Node, count: int) -> Any:
    """What an operation made of the numbers, if it only moved them."""
    if isinstance(value, (list, tuple)):
        forms = node.form if isinstance(node.form, (list, tuple)) else [node.form] * len(value)
        return [_checked(v, form.shape, count) for v, form in zip(value, forms, strict=True)]
    return _checked(value, node.form.shape, count)


def _checked(value: Moments, full: Any, count: int) -> Moments:
    numbers = value.mean - NUMBER
    if bool(((numbers < 0) | (numbers >= count) | (value.var != value.mean)).any()):
        raise NotLanes
    return Moments(value.mean, value.var, full)
