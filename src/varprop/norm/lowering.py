"""From the captured graph to functions of single channels: by which moments of what enters a layer follow.

Between normalized layers most networks only apply functions to every channel, add channels, and move them. Channels are
numbered (`Numbering`). Moving is followed by letting the operations move the numbers instead of values, as means and
variances of a `Moments` (`Lowering`); all else becomes a `Function` of one or two channels, with a kernel that the rule
of the operation names or a trial finds (`recognized`). A parameter between layers (of a PReLU, a learned factor) is a
channel of variance 0 whose mean is read at every call. Whatever does not fit (attention, layer norm) is left to the
engine's evaluation.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.evaluation import Evaluation, apply
from ..engine.plan import Plan
from ..gaussian.normal import Pair, safe_sqrt
from ..gaussian.rectifier import FALL, SKEW, SPLIT, relu_of_sum, two_slopes
from ..graph.node import Node, TensorInfo, resolve
from ..moments import Moments, trusted
from .backends.torch import with_slopes
from .fold.layout import Function, Step

LITERALS = 2**20  # elements of a tensor of constants beyond which it is left to the engine
NUMBER = 2**40  # channels are numbered from here while they are moved, so that no constant looks like one


class NotLowered(Exception):
    """A value that does not consist of numbered channels."""


class Fixed(NamedTuple):
    """A value that is not random among channels: a parameter, or what follows from parameters alone."""

    node: str  # the name of its node
    shape: tuple[int, ...]  # the shape in which it stands beside a random value
    channels: tuple[int, ...]  # the shape of its channels, to which it is expanded

    def expanded(self, value: Tensor) -> Tensor:
        """The value of every channel."""
        return value.reshape(self.shape).expand(self.channels).flatten()


@dataclass
class Numbering:
    """Channels by number: all that there are, the functions that compute them, and the order of a fold."""

    level: list[int] = field(default_factory=list)  # for every channel, how many steps come before it
    # every function applied: with the channels it reads, and the first channel it computes
    raw: list[tuple[Function, tuple[Tensor, ...], int]] = field(default_factory=list)
    # values that are not random, with the numbers of their channels
    fixed: list[tuple[Fixed, Tensor]] = field(default_factory=list)
    # mean and variance of channels that never change, in the order of their numbers
    constants: list[Pair] = field(default_factory=list)
    values: dict[float, int] = field(default_factory=dict)  # the channels of numbers that never change
    # the channels computed so far, by function and arguments: those of an equal call are the same
    applied: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of channels."""
        return len(self.level)

    def new(self, count: int, level: int = 0) -> Tensor:
        """Fresh channels."""
        first = len(self.level)
        self.level += [level] * count
        return torch.arange(first, first + count)

    def constant(self, mean: Tensor, var: Tensor) -> Tensor:
        """Fresh channels whose mean and variance (vectors, float64) never change."""
        self.constants.append((mean, var))
        return self.new(len(mean))

    def literal(self, values: Tensor) -> Moments:
        """Channels for numbers that never change: one for all that are equal."""
        distinct, inverse = torch.unique(values.double(), return_inverse=True)
        fresh = [value for value in distinct.tolist() if value not in self.values]
        if fresh:
            mean = torch.tensor(fresh, dtype=torch.float64)
            self.values |= dict(zip(fresh, self.constant(mean, torch.zeros_like(mean)).tolist(), strict=True))
        numbers = torch.tensor([self.values[value] for value in distinct.tolist()])
        return moving_channels(numbers[inverse].view(values.shape), values.shape)

    def fix(self, value: Fixed) -> Moments:
        """Channels for a value that is not random."""
        numbers = self.new(math.prod(value.channels))
        self.fixed.append((value, numbers))
        return moving_channels(numbers.view(value.channels), value.channels)

    def apply(self, function: Function, moving: list[Moments], full: Any) -> Moments:
        """The channels that a function computes from others, each combination of arguments once."""
        spread = torch.broadcast_tensors(*(m.mean for m in moving))
        combinations = channel_numbers(torch.stack(spread)).flatten(1)
        distinct, inverse = torch.unique(combinations, dim=1, return_inverse=True)
        key = (function.name, *distinct.flatten().tolist())
        if key not in self.applied:
            level = 1 + max(self.level[channel] for channel in distinct.flatten().tolist())
            computed = self.new(distinct.shape[1], level)
            self.raw.append((function, tuple(distinct), int(computed[0])))
            self.applied[key] = computed
        return moving_channels(self.applied[key][inverse].view(spread[0].shape), full)

    def steps(self, entering: list[Tensor]) -> tuple[list[Step], Tensor]:
        """The functions that lead to channels that enter a layer, in order, and the new number of every channel.

        Equal functions of one level are together.
        """
        needed, computed = (torch.zeros(self.count, dtype=torch.bool) for _ in range(2))
        needed[torch.cat(entering)] = True
        groups: dict[tuple[int, str], list[int]] = {}
        for position, (function, inputs, first) in reversed(list(enumerate(self.raw))):
            outputs = slice(first, first + len(inputs[0]))
            computed[outputs] = True
            if bool(needed[outputs].any()):
                needed[torch.cat(inputs)] = True
                groups.setdefault((self.level[first], function.name), []).insert(0, position)
        fixed = torch.zeros_like(computed)
        for _, channels in self.fixed:
            fixed[channels] = True
        # channels that no function computes come first, in their order, those of parameters at their end
        number = torch.cumsum(~computed & ~fixed, 0) - 1
        number[fixed] = int((~computed & ~fixed).sum()) + torch.arange(int(fixed.sum()))
        start, steps = int((~computed).sum()), []
        for key in sorted(groups):
            members = [self.raw[position] for position in groups[key]]
            for _, inputs, first in members:
                count = len(inputs[0])
                number[first : first + count] = torch.arange(start, start + count)
                start += count
            function, arity = members[0][0], len(members[0][1])
            arguments = tuple(torch.cat([inputs[k] for _, inputs, _ in members]) for k in range(arity))
            steps.append((function, arguments, start - len(arguments[0]), len(arguments[0])))
        return [Step(f, tuple(number[a] for a in arguments), first, n) for f, arguments, first, n in steps], number


def moving_channels(numbers: Tensor, full: Any) -> Moments:
    """Numbers of channels as a value that operations can move."""
    values = numbers.double() + NUMBER
    return Moments(values, values, full)


def channel_numbers(values: Tensor) -> Tensor:
    """The numbers in the means of a value that operations have moved."""
    return (values - NUMBER).long()


Kernel = tuple[str | float, ...]


def recognized(name: str, moments: Callable[..., Pair], kernel: Kernel | None, arity: int = 1) -> Function:
    """A function, with its kernel if that computes the same moments: a wrong kernel costs nothing but speed."""
    function = Function(name, moments, kernel, arity)
    return function if kernel is None or _agrees(function) else Function(name, moments, None, arity)


def _agrees(function: Function) -> bool:
    """True if the kernel of a function computes its moments at some points."""
    grid = torch.cartesian_prod(torch.linspace(-4, 4, 9), torch.tensor([0.01, 0.3, 1.0, 4.0])).double()
    pairs = [(grid[:, 0], grid[:, 1].square()), (grid[:, 0].flip(0), grid[:, 1].flip(0))][: function.arity]
    (mean, var), _ = with_slopes(function)(*pairs)
    expected_mean, expected_var = function.moments(*pairs)
    return _close(mean, expected_mean) and _close(var, expected_var)


def composed(first: Function, second: Function) -> Kernel | None:
    """The kernel of a function of a maximum; None if there is none."""
    if first.kernel is None or second.kernel is None or first.kernel[0] != "maximum":
        return None
    return ("compose", *first.kernel, *second.kernel)


def piecewise_linear(values: Callable[[Tensor], Tensor]) -> Kernel | None:
    """The kernel of two slopes that meet at zero, or of a line, however written (relu(x) + 0.03 x); None for others."""
    x = torch.logspace(-6, 6, 100, dtype=torch.float64)
    up, down, zero = (values(t).double() for t in (x, -x, x * 0))
    above, below = (up - zero) / x, (down - zero) / -x
    if not (_equal(above) and _equal(below)):
        return None
    rise, fall = float(above[-1]), float(below[-1])  # far out, where an offset costs no digits
    if abs(rise - fall) < 1e-12:
        return "affine", rise, float(zero[0])
    return ("two_slopes", rise, fall) if float(zero[0]) == 0.0 else None


def _equal(numbers: Tensor) -> bool:
    return bool(((numbers - numbers[0]).abs() <= 1e-9 * (1 + numbers[0].abs())).all())


def of_positions(moments: Callable[[Pair], Pair]) -> Kernel | None:
    """The kernel of an average or a maximum over a channel's positions; None for other functions.

    It is linear in mean, variance and standard deviation.
    """
    mean = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    var = torch.tensor([1.0, 4.0, 0.25, 2.0, 0.04], dtype=torch.float64)
    out_mean, out_var = moments((mean, var))
    gain, share = float(moments((mean * 0 + 1, var * 0))[0][0]), float(out_var[0] / var[0])
    lift = float(out_mean[0] / var[0].sqrt())
    if not _close(out_var, share * var):
        return None
    if abs(lift) < 1e-12 and _close(out_mean, gain * mean):
        return "gain", gain, share
    return ("maximum", lift, share) if _close(out_mean, mean + lift * var.sqrt()) else None


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= 1e-9 * (1 + b.abs())).all())


AFTER_SKIP = Function(
    "relu(x + y), x rectified", lambda x, y: relu_of_sum(*x, *y), ("skip", SKEW, FALL, SPLIT), arity=2
)
LEARNED_SLOPE = Function(
    "x, below 0 y x", lambda x, y: two_slopes(x[0], safe_sqrt(x[1]), 1.0, y[0]), ("slope",), arity=2
)


@dataclass
class Lowering:
    """Finds the channels of a graph's nodes."""

    plan: Plan  # of the graph between the layers
    numbering: Numbering = field(default_factory=Numbering)  # all channels, and the functions that compute them
    # for every node visited the numbers of its channels, as the means (and variances) of a `Moments`; lists for
    # several results. Nodes that do not consist of channels are missing
    channels: dict[Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.evaluation = Evaluation(self.plan, {}, annotate=False)

    def assign(self, node: Node, numbers: Tensor, full: Any) -> None:
        """Set the channels of a node."""
        self.channels[node] = moving_channels(numbers, full)

    def run(self) -> None:
        """Visit every node; those that cannot be lowered, and what follows from them, stay out."""
        with trusted(), torch.no_grad():
            for node in self.plan.program.nodes:
                if self.plan.random(node) and not self.plan.inside_cluster(node):
                    try:
                        self.channels[node] = self._visit(node)
                    except NotLowered:
                        continue

    def numbers(self, node: Node) -> Tensor:
        """The numbers of a node's channels, in its shape (uniform axes of extent 1)."""
        with trusted(), torch.no_grad():
            return channel_numbers(self._value(node).mean)

    def blocker(self, target: Node) -> str:
        """The first operation before a node that does not consist of channels though all that it reads does."""
        waiting, seen = [target], {target}
        while waiting:
            node = waiting.pop()
            missing = [n for n in self.plan.random_operands(node) if n not in self.channels and n not in seen]
            if not missing and node not in self.channels and node.target is not None:
                return f"{node.name} in '{node.module or '(model)'}'"
            seen.update(missing)
            waiting += missing
        return f"{target.name} in '{target.module or '(model)'}', whose positions have moments of their own"

    def _value(self, node: Any) -> Any:
        if node not in self.channels:
            if not isinstance(node, Node) or not self.plan.inside_cluster(node):
                raise NotLowered
            self.channels[node] = self._clustered(node)
        return self.channels[node]

    def _visit(self, node: Node) -> Any:
        rule = self.plan.rules.get(node)
        if node.target is operator.getitem:
            return self._value(node.args[0])[node.args[1]]
        if rule is None:
            raise NotLowered
        if rule.kind == "structural":
            return self._moved(node)
        self._require_only_random(node)
        if rule.kind == "elementwise" and rule.independent is not None:
            return self._combined(node, self.plan.random_operands(node))
        return self._channelwise(node)

    def _moved(self, node: Node, value: Callable[[Node], Any] | None = None) -> Any:
        def moving(operand: Node) -> Any:
            if self.plan.random(operand):
                return (value or self._value)(operand)
            constant = self._constant(operand)
            return self.numbering.literal(constant) if constant.is_floating_point() else constant

        args, kwargs = resolve((node.args, node.kwargs), moving)
        return _only_moved(apply(self.plan.rules[node], node.target, args, kwargs), node.info, self.numbering.count)

    def _constant(self, node: Node) -> Tensor:
        """A value that is not random and reads no parameter or buffer; of random arguments only extents count."""
        if node in self.plan.program.constants:
            value = self.plan.program.constants[node]
        elif node.target is None or node in self.plan.drawn:
            raise NotLowered
        else:
            value = node.target(*resolve(node.args, self._stand_in), **resolve(node.kwargs, self._stand_in))
        if not isinstance(value, Tensor) or value.is_meta or (value.is_floating_point() and value.numel() > LITERALS):
            raise NotLowered
        return value.cpu()

    def _stand_in(self, operand: Node) -> Tensor:
        if self.plan.random(operand):
            return torch.zeros(operand.info.shape, dtype=operand.info.dtype)
        return self._constant(operand)

    def _require_only_random(self, node: Node) -> None:
        """Tensors that are not random are parameters or tables, which differ from channel to channel."""
        if any(not self.plan.random(operand) for operand in node.operands):
            raise NotLowered

    def _clustered(self, node: Node) -> Moments:
        if node in self.plan.skips:
            return self._applied(AFTER_SKIP, node, *self.plan.skips[node])
        root = self.plan.root[node]
        if self.plan.mixture(root) is not None and not self._is_affine(node):
            raise NotLowered  # a function of what is kept is mixed with one of what is dropped
        if any(not self.plan.random(operand) for operand in node.operands):
            return self._with_parameter(node)
        if self._reads_parameters(node, root):  # a function of what is Gaussian like the root
            argument = self._behind_parameters(node, root)
            return self._applied(self._function_from(node, argument), node, argument)
        base = self.evaluation.clusters.line(node)[0]
        if base is not node and base in self.plan.skips:  # a line of a rectifier that reads two values
            return self._applied(self._function_from(node, base), node, base)
        return self._applied(self._function_from(node, root, self._cluster_moments), node, root)

    def _named_kernel(self, node: Node, *random: Any) -> Kernel | None:
        """The kernel that an operation's rule names, if its first arguments are these and the others are numbers."""
        if list(node.args[: len(random)]) != list(random) or node.reads != list(random):
            return None
        kernel = self.plan.rules[node].kernel(*node.args[len(random) :], **node.kwargs)
        return None if kernel is None else (kernel[0], *map(float, kernel[1:]))

    def _pointwise_kernel(self, node: Node, start: Node) -> Kernel | None:
        of_two = self.plan.rules[node].affine is not None  # sums and products with a number are lines
        named = None if of_two else self._named_kernel(node, start)
        clusters = self.evaluation.clusters
        path = clusters.path(node, start)
        return named or piecewise_linear(lambda x: clusters.evaluate(path, start, x))

    def _reads_parameters(self, node: Node, root: Node) -> bool:
        path = self.evaluation.clusters.path(node, root)
        return any(not self.plan.random(operand) for step in path for operand in step.operands)

    def _behind_parameters(self, node: Node, root: Node) -> Node:
        """The last node that is Gaussian like the root and of which alone, without parameters, a node is a function."""
        for start in reversed(self.evaluation.clusters.path(node, root)[:-1]):
            path = self.evaluation.clusters.path(node, start)
            read = {operand for step in path for operand in step.operands}
            if root not in read and read <= {start, *path} and self._is_affine(start):
                return start
        raise NotLowered

    def _with_parameter(self, node: Node) -> Moments:
        """A function of a random value and a parameter, which is a random value of variance 0."""
        (argument, *more), rule = self.plan.random_operands(node), self.plan.rules[node]
        if more or len(node.operands) != 2 or any(operand not in node.args[:2] for operand in node.operands):
            raise NotLowered
        if rule.affine is not None and rule.independent is not None:
            return self._combined(node, list(node.args[:2]))
        if rule.operation not in ("prelu", "prelu of broadcast slopes") or not self._is_affine(argument):
            raise NotLowered
        weight = node.args[1]
        shape = list(weight.info.shape)
        if rule.operation == "prelu" and weight.info.shape.numel() > 1:  # along the channels
            shape += [1] * (node.ndim - 2)
        return self.numbering.apply(
            LEARNED_SLOPE, [self._value(argument), self._fixed(weight, argument, shape)], node.info.shape
        )

    def _is_affine(self, node: Node) -> bool:
        """True if a node follows from its root by factors and sums with constants, and so is Gaussian as well."""
        root = self.plan.root[node]
        path = self.evaluation.clusters.path(node, root) if node is not root else []
        return all(
            self.plan.rules[step].affine is not None and sum(map(self.plan.random, step.reads)) == 1 for step in path
        )

    def _fixed(self, node: Node, like: Node, shape: Sequence[int]) -> Moments:
        """Channels for a node that is not random, seen in some shape: one for every channel of the node beside it.

        So random channels that share a parameter have a channel each for it, and are computed apart.
        """
        try:
            return self.numbering.literal(self._constant(node).reshape(tuple(shape)))
        except NotLowered:
            pass
        beside = self._value(like).shape
        if not node.info.is_floating or math.prod(shape) > math.prod(beside):
            raise NotLowered
        try:
            together = torch.broadcast_shapes(beside, shape)
        except RuntimeError:
            raise NotLowered from None
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
        def value(inner: Node) -> Moments:
            return x if inner is root else self.evaluation.clusters.moments(inner, value)

        return value(node)

    def _applied(self, function: Function, node: Node, *arguments: Node) -> Moments:
        moving = [self._value(argument) for argument in arguments]
        return self.numbering.apply(function, moving, node.info.shape)

    def _combined(self, node: Node, operands: list[Node]) -> Moments:
        if len(operands) != 2 or list(node.args[:2]) != operands:
            raise NotLowered
        independent, settings, kwargs = self.plan.rules[node].independent, node.args[2:], node.kwargs
        assert independent is not None
        moments = _of_channels(lambda x, y: independent(x, y, *settings, **kwargs))
        kernel = self._named_kernel(node, *operands)
        function = recognized(f"{node.target}(x, y, {settings!r}, {kwargs!r})", moments, kernel, arity=2)
        random = self.plan.random_operands(node)
        if len(random) == 1 and function.kernel is None:
            raise NotLowered
        moving = [self._value(o) if o in random else self._fixed(o, random[0], o.info.shape) for o in operands]
        return self.numbering.apply(function, moving, node.info.shape)

    def _channelwise(self, node: Node) -> Any:
        rule, (argument, *settings) = self.plan.rules[node], node.args
        several = isinstance(node.info, (list, tuple))
        if rule.function is None or self.plan.random_operands(node) != [argument]:
            raise NotLowered
        ranks, maximum = rule.order_statistic, rule.maximum
        ranked = self.evaluation.without_functions(argument, maximum, self._value, self._moved) if ranks else None
        moving, before, after = ranked or (self._value(argument), argument, argument)
        self._require_uniform(node, moving)
        info, full, axis = (node.info[0] if several else node.info), list(moving.full), _channel_axis(moving.full)

        def pooled(x: Moments) -> Moments:
            shape, seen = [1] * len(full), list(full)
            shape[axis], seen[axis] = -1, len(x.mean)
            result = rule.function(Moments(x.mean.view(shape), x.var.view(shape), seen), *settings, **node.kwargs)  # type: ignore[misc]
            result = result[0] if several else result
            if result.mean.numel() != len(x.mean):
                raise NotLowered  # positions come out different: windows of several sizes
            return result  # type: ignore[no-any-return]

        name = f"{node.target}(x{full[axis + 1 :]}, {settings!r}, {node.kwargs!r})"
        moments = _of_channels(pooled)
        function = first = recognized(name, moments, self._named_kernel(node, argument) or of_positions(moments))
        if before is not after:
            last = self._function_from(after, before)
            both = f"{last.name} after {name}"
            function = recognized(both, lambda x: last.moments(first.moments(x)), composed(first, last))
        computed = self.numbering.apply(function, [moving], info.shape)
        computed = moving_channels(channel_numbers(computed.mean).view(_pooled_shape(computed.mean, info)), info.shape)
        return [computed] + [None] * (len(node.info) - 1) if several else computed

    def _function_from(
        self, node: Node, start: Node, moments_from: Callable[[Node, Node, Moments], Moments] | None = None
    ) -> Function:
        """A node as a function of an earlier one of its cluster, by default as if that were Gaussian."""
        moments = _of_channels(functools.partial(moments_from or self.evaluation.clusters.moments_from, node, start))
        function = recognized(self._expression(node, start), moments, self._pointwise_kernel(node, start))
        return replace(function, integrated=self._is_integrated(node, start))

    def _is_integrated(self, node: Node, start: Node) -> bool:
        """True if a function of an earlier node is no line of one that has a closed form."""
        path, rules = self.evaluation.clusters.path(node, start), self.plan.rules
        curved = [n for n in path if rules[n].affine is None or sum(map(self.plan.random, n.reads)) > 1]
        return len(curved) > 1 or any(rules[n].function is None for n in curved)

    def _require_uniform(self, node: Node, moving: Moments) -> None:
        """Raise if a rule that mixes positions reads a value whose positions have different moments."""
        axis = _channel_axis(moving.full)
        if self.plan.rules[node].per_channel and all(size == 1 for size in moving.shape[axis + 1 :]):
            return
        axes = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else None
        alone = moving.mean.numel() == moving.shape[axis] and axis not in [a % moving.ndim for a in axes or [axis]]
        if not self.plan.rules[node].reduces or not alone:
            raise NotLowered


def _of_channels(function: Callable[..., Moments]) -> Callable[..., Pair]:
    """A function of Moments as one of means and variances, flat."""

    def moments(*channels: Pair) -> Pair:
        with trusted():
            result = function(*(Moments(*channel) for channel in channels))
        return result.mean.reshape(-1), result.var.reshape(-1)

    return moments


def _channel_axis(full: Any) -> int:
    """The axis behind the batch axis, if there is one, as pooling and interpolation have it."""
    return min(1, len(full) - 1)


def _pooled_shape(numbers: Tensor, info: TensorInfo) -> list[int]:
    """The shape of a pooled value: axes may have gone (a mean without keepdim)."""
    if numbers.ndim == len(info.shape):
        return list(numbers.shape)
    shape = [1] * len(info.shape)
    if numbers.numel() > 1:
        shape[_channel_axis(info.shape)] = numbers.numel()
    return shape


def _only_moved(value: Any, info: Any, count: int) -> Any:
    """The result of an operation on numbers; NotLowered is raised if it did more than move them."""
    if isinstance(value, (list, tuple)):
        infos = info if isinstance(info, (list, tuple)) else [info] * len(value)
        return [_only_moved(v, i, count) for v, i in zip(value, infos, strict=True)]
    numbers = value.mean - NUMBER
    if bool(((numbers < 0) | (numbers >= count) | (value.var != value.mean)).any()):
        raise NotLowered
    return Moments(value.mean, value.var, info.shape)
