"""Clusters of elementwise operations with one random source, as one function of one Gaussian variable."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..gaussian import quadrature
from ..gaussian.activations import INTEGRATED
from ..gaussian.normal import Pair, differentiated, readable, working_dtype
from ..gaussian.quadrature import PANELS, Pointwise, crossings, expectation
from ..gaussian.rectifier import relu_of_sum
from ..graph.node import Node, resolve
from ..moments import Moments
from ..rules.axes import lift, mixture
from ..rules.registry import Rule
from .plan import Plan


@dataclass(frozen=True)
class Line:
    """``slope * base + offset``: a value that is affine in another node of its cluster."""

    slope: Any
    offset: Any

    def __add__(self, other: Any) -> Line:
        if isinstance(other, Line):
            return Line(self.slope + other.slope, self.offset + other.offset)
        return Line(self.slope, self.offset + other)

    def __neg__(self) -> Line:
        return Line(-self.slope, -self.offset)

    def __sub__(self, other: Any) -> Line:
        return self.__add__(-other)

    def __rsub__(self, other: Any) -> Line:
        return (-self).__add__(other)

    def __mul__(self, factor: Any) -> Line | None:
        return None if isinstance(factor, Line) else Line(self.slope * factor, self.offset * factor)

    def __truediv__(self, divisor: Any) -> Line | None:
        return None if isinstance(divisor, Line) else Line(self.slope / divisor, self.offset / divisor)

    __radd__ = __add__
    __rmul__ = __mul__


IDENTITY = Line(1.0, 0.0)


def through_line(x: Moments, line: Line) -> Moments:
    """Exact moments of an affine function."""
    slope, offset = (_as_tensor(v, x.mean) for v in (line.slope, line.offset))
    mean = x.mean * slope + offset
    return Moments(mean, (x.var * slope.square()).expand(mean.shape))


def solve(line: Line, t: Any, mean: Tensor) -> Any:
    """Where the line takes the value t; the mean itself (a harmless break) if it never does."""
    slope, offset = (_as_tensor(v, mean) for v in (line.slope, line.offset))
    flat = slope == 0
    return torch.where(flat, mean, (t - offset) / torch.where(flat, torch.ones_like(slope), slope))


def _as_tensor(value: Any, like: Tensor) -> Tensor:
    return value.to(like.dtype) if isinstance(value, Tensor) else torch.full_like(like, float(value))


NARROW = 1e-3  # std above which differences by its square keep ten digits
CROSSINGS = 4  # of a kink by what is bent, at most: as many as a quartic has
# of a function that swings: panels for each element, for all of them together, and crossings of a kink
LEAST_PANELS, MOST_PANELS, PANELS_OF_ALL, SWINGS = 32, 512, 1 << 20, 32
PEAK_PANELS = 128  # for each element, of a quotient by something that may have a smooth minimum
# Quotients and roots approach their asymptotes slowly; these edges keep the panels short where such a function bends.
LONG_TAILS = (0.0, -2.5, 2.5, -12.0, 12.0, -60.0, 60.0)


class Clusters:
    """The elementwise part of an evaluation: values of `env` are Moments for roots and plain tensors for constants."""

    def __init__(self, plan: Plan, env: dict[Node, Any]) -> None:
        self.plan = plan
        self.env = env
        # node -> (base, line): the node equals the line of its base; a curved node is its own base
        self.lines: dict[Node, tuple[Node, Line]] = {}

    def line(self, node: Node) -> tuple[Node, Line]:
        """The node's base and its affine relation to it; memoised."""
        if node not in self.lines:
            self.lines[node] = self._line(node)
        return self.lines[node]

    def _line(self, node: Node) -> tuple[Node, Line]:
        rule = self.plan.rules.get(node)
        if not self.plan.inside_cluster(node) or rule is None:
            return node, IDENTITY
        bases = {self.line(operand)[0] for operand in self.plan.random_operands(node)}
        if rule.affine is not None and len(bases) == 1:
            args, kwargs = self.arguments(node, lambda operand: self.line(operand)[1])
            result = rule.affine(*args, **kwargs)
            if isinstance(result, Line):
                return bases.pop(), result
        root = self.plan.root[node]
        return (root, self._line_of_truth(node, root)) if root.info.dtype is torch.bool else (node, IDENTITY)

    def _line_of_truth(self, node: Node, root: Node) -> Line:
        """The line through the two values of a function of a truth value."""
        path, shape = self.path(node, root), [1] * len(root.info.shape)
        no, yes = (
            self.evaluate(path, root, torch.full(shape, truth, device=root.info.device)).double()
            for truth in (False, True)
        )
        return Line(yes - no, no)

    def before_rising(self, node: Node, maximum: bool) -> Node:
        """Where the last non-decreasing functions without tensor arguments begin; the node itself if there are none.

        Before a maximum, functions that dip before they rise count too.
        """
        while self.plan.inside_cluster(node) and node.operands == (node.args[0],) and self._rises(node, maximum):
            node = node.args[0]
        return node

    def _rises(self, node: Node, maximum: bool) -> bool:
        """True if a function never decreases: by its rule, or as a line with a number for its slope."""
        rule = self.plan.rules[node]
        further, named = self._further(node)
        if rule.monotone(*further, **named) or (maximum and rule.dips):
            return True
        if rule.affine is None:
            return False
        args, kwargs = self.arguments(node, lambda operand: IDENTITY)
        line = rule.affine(*args, **kwargs)
        return isinstance(line, Line) and isinstance(line.slope, (int, float)) and line.slope > 0

    def moments(self, node: Node, value: Callable[[Node], Moments]) -> Moments:
        """Moments of a clustered node; `value` gives those of any other node."""
        base, line = self.line(node)
        if base is not node:
            return through_line(value(base), line)
        if node in self.plan.skips:
            rectified, other = (value(term) for term in self.plan.skips[node])
            return Moments(*relu_of_sum(rectified.mean, rectified.var, other.mean, other.var))
        rule, root, argument = self.plan.rules[node], self.plan.root[node], self._only_argument(node)
        source = self.plan.rules.get(root)
        if source is not None and source.drawn is not None:
            return self._integrate_draws(node, root, value(root), source.drawn)
        if (mixed := self.plan.mixture(root)) is not None:
            return self._mix(node, root, value(mixed[0]), mixed[1])
        if source is not None and source.outcomes is not None:
            return self._sum_outcomes(node, root, value(root), source.outcomes)
        if rule.function is not None and argument is not None and self.line(argument)[0] is root:
            return self._closed_form(node, value(argument))
        return self._integrate(node, root, value(root))

    def moments_from(self, node: Node, start: Node, moments: Moments) -> Moments:
        """Moments of a node as if an earlier node of its cluster were Gaussian with the given moments."""
        line = self._line_from(node, start)
        if line is not None:
            return through_line(moments, line)
        result = self.of_gaussian(node, start, moments)
        extra = result.ndim - moments.ndim  # axes that the node has and a maximum over them has not
        mean, var = (values.reshape(values.shape[extra:]) for values in (result.mean, result.var))
        return Moments(mean, var)

    def _line_from(self, node: Node, start: Node, known: dict[Node, Line | None] | None = None) -> Line | None:
        """A node's affine relation to an earlier node of its cluster, reading nothing before that; None if curved.

        `known` holds those of nodes visited before.
        """
        if node is start:
            return IDENTITY
        lines = {} if known is None else known
        if node not in lines:
            lines[node] = None
            operands = self.plan.random_operands(node)
            affine = self.plan.rules[node].affine if self.plan.inside_cluster(node) else None
            if affine is not None and all(self._line_from(operand, start, lines) is not None for operand in operands):
                args, kwargs = self.arguments(node, lambda operand: self._line_from(operand, start, lines))
                result = affine(*args, **kwargs)
                lines[node] = result if isinstance(result, Line) else None
        return lines[node]

    def of_gaussian(self, node: Node, start: Node, moments: Moments) -> Moments:
        """Moments of a node that is a curved function of an earlier node, which is Gaussian with the given moments."""
        if self.plan.rules[node].function is not None and self._only_argument(node) is start:
            return self._closed_form(node, moments)
        return self._integrate(node, start, moments)

    def _mix(self, node: Node, root: Node, x: Moments | Tensor, outcomes: list[tuple[float, float, float]]) -> Moments:
        """Moments of `node` as a function of what is one of several lines of x, each with its chance; by `mixture`."""
        x = lift(x)
        branches = [
            (chance, self.of_gaussian(node, root, Moments(slope * x.mean + offset, slope**2 * x.var)))
            for chance, slope, offset in outcomes
        ]
        return mixture(branches)

    def _only_argument(self, node: Node) -> Node | None:
        operands = self.plan.random_operands(node)
        return operands[0] if len(operands) == 1 and node.args[0] is operands[0] else None

    def _closed_form(self, node: Node, x: Moments) -> Moments:
        rule, (args, kwargs) = self.plan.rules[node], self.arguments(node, lambda _: x)
        closed = rule.function
        assert closed is not None
        if closed in INTEGRATED:

            def function(x: Tensor) -> Tensor:
                return self.evaluate([node], node.args[0], x).to(x.dtype)

            def moments(mean: Tensor, std: Tensor) -> Pair:
                result: Pair = closed(mean, std, *args[1:], **kwargs)
                return result

            interpolated = self._interpolated([node], function, moments, x.mean, x.std)
            if interpolated is not None:
                return interpolated
        return Moments(*closed(x.mean, x.std, *args[1:], **kwargs))

    def _interpolated(
        self,
        path: list[Node],
        function: Pointwise,
        moments: Callable[[Tensor, Tensor], Pair],
        mean: Tensor,
        std: Tensor,
    ) -> Moments | None:
        """Moments of a smooth function at many places, from those at a few; None where there are few or it is not."""
        if not self.may_interpolate(path, mean, std) or float(std.amin()) <= NARROW:
            return None
        dtype = working_dtype(mean.device)

        def curved(m: Tensor, s: Tensor) -> Pair:
            """The mean less the function at the mean of x, and the variance, both divided by that of x."""
            first, var = moments(m, s)
            return (first - function(m.unsqueeze(0)).squeeze(0)) / s.square(), var / s.square()

        interpolated = quadrature.at_many(curved, mean.to(dtype), std.to(dtype))
        if interpolated is None:
            return None
        added, share = (values * std.to(dtype).square() for values in interpolated)
        return Moments(function(mean.to(dtype).unsqueeze(0)).squeeze(0) + added, share)

    def _integrate(self, node: Node, root: Node, moments: Moments) -> Moments:
        """Moments of `node` as a function of `root` alone, which has the given moments."""
        path = self.path(node, root)
        ndim = max([moments.ndim, *(p.ndim for p in path)])
        mean, std = (_lead(t, ndim).to(working_dtype(t.device)) for t in (moments.mean, moments.std))

        def function(x: Tensor) -> Tensor:
            return self.evaluate(path, root, x).to(x.dtype)

        def integrals(m: Tensor, s: Tensor) -> Pair:
            return expectation(function, m, s, **self.panels(path, root, m, s))

        if self.needs_positive(path, root):
            return _over_lognormal(function, mean, std)
        interpolated = self._interpolated(path, function, integrals, mean, std)
        return Moments(*integrals(mean, std)) if interpolated is None else interpolated

    def _integrate_draws(self, node: Node, root: Node, moments: Moments, law: Callable[..., Tensor]) -> Moments:
        """Moments of `node` as a function of random numbers that are not Gaussian, drawn by a `law`."""
        path = self.path(node, root)
        args, kwargs = self.arguments(root, lambda _: None)  # extents of a random argument do not matter here
        ndim = max([moments.ndim, *(p.ndim for p in path)])
        mean = torch.zeros_like(_lead(moments.mean, ndim), dtype=working_dtype(moments.device))
        std = torch.ones_like(mean)

        def drawn(z: Tensor) -> Tensor:
            return law(z, *args, **kwargs)

        def function(z: Tensor) -> Tensor:
            return self.evaluate(path, root, drawn(z)).to(z.dtype)

        return Moments(*expectation(function, mean, std, **self.panels(path, root, mean, std, drawn)))

    def _sum_outcomes(self, node: Node, root: Node, moments: Moments, outcomes: Callable[..., Any]) -> Moments:
        """Moments of `node` as a function of whole numbers drawn at random."""
        path = self.path(node, root)
        ndim = max([moments.ndim, *(p.ndim for p in path)])
        values, chances = outcomes(moments, *resolve(root.args, lambda _: None))
        chances = chances.view(len(values), *[1] * (ndim - moments.ndim), *moments.shape)
        results = self.evaluate(path, root, values.view(-1, *[1] * ndim)).to(chances.dtype)
        mean = (chances * results).sum(0)
        return Moments(mean, (chances * (results - mean).square()).sum(0))

    def may_interpolate(self, path: list[Node], mean: Tensor, std: Tensor) -> bool:
        """True if there are many elements, and the path is the same smooth function for all, without derivatives."""
        if mean.numel() < quadrature.MANY or mean.shape != std.shape or differentiated(mean, std):
            return False
        if not readable(mean):
            return False
        constants = [self.env[o] for node in path for o in node.operands if not self.plan.random(o)]
        if any(isinstance(c, Tensor) and (c.numel() > 1 or c.requires_grad) for c in constants):
            return False
        rules = [(self.plan.rules[node], *self._further(node)) for node in path]
        return not any([*rule.kinks(*args, **named), *rule.jumps(*args, **named)] for rule, args, named in rules)

    def path(self, node: Node, root: Node) -> list[Node]:
        """The nodes from a root (left out) to a node that is a function of it, in the order of execution."""
        needed = {node}
        for candidate in reversed(self.plan.program.nodes):
            if candidate in needed and candidate is not root:
                needed.update(operand for operand in self.plan.random_operands(candidate) if operand is not root)
        return [candidate for candidate in self.plan.program.nodes if candidate in needed]

    def values(self, path: list[Node], root: Node, x: Tensor, detached: Collection[Node] = ()) -> dict[Node, Any]:
        """The value of every node of a path where the root has the value x; some detached from their operands."""
        local = {root: x}
        for node in path:
            args, kwargs = self.arguments(node, local.__getitem__)
            value = (self.plan.rules[node].evaluate or node.target)(*args, **kwargs)
            local[node] = value.detach() if node in detached else value
        return local

    def evaluate(self, path: list[Node], root: Node, x: Tensor) -> Tensor:
        """The value of the last node of a path where the root has the value x."""
        result: Tensor = self.values(path, root, x)[path[-1]]
        return result

    def arguments(self, node: Node, random: Callable[[Node], Any]) -> tuple[Any, Any]:
        """Arguments of a node, random ones as `random` has them."""

        def value(operand: Node) -> Any:
            return random(operand) if self.plan.random(operand) else self.env[operand]

        return resolve(node.args, value), resolve(node.kwargs, value)

    def needs_positive(self, path: list[Node], root: Node) -> bool:
        """True if a function on the path makes sense only where the root is of one sign."""
        arguments = map(self._positive_argument, path)
        return any(self._line_from(argument, root) is not None for argument in arguments if argument is not None)

    def _positive_argument(self, node: Node) -> Node | None:
        """The random argument that must be positive for the node's operation to make sense, if there is one."""
        position = self.plan.rules[node].positive
        position = position(*map(self._constant, node.args)) if callable(position) else position
        argument = node.args[position] if position is not None else None
        return argument if self.plan.random(argument) else None

    def panels(
        self, path: list[Node], root: Node, mean: Tensor, std: Tensor, drawn: Pointwise | None = None
    ) -> dict[str, Any]:
        """On how many panels to integrate, and where to cut them: on more if the function swings or has a peak."""
        affordable = max(LEAST_PANELS, PANELS_OF_ALL // max(1, mean.numel()))
        count = PANELS
        if any(self.plan.rules[node].swings for node in path):
            count = min(MOST_PANELS, affordable)
        elif any(self._peaks(node, root) for node in path):
            count = min(PEAK_PANELS, affordable)
        return {**self.points(path, root, mean, std, drawn), "panels": count}

    def _peaks(self, node: Node, root: Node) -> bool:
        """True if a node is a quotient, root or logarithm of something that may have a smooth minimum."""
        argument = self._positive_argument(node)
        if argument is None or self._line_from(argument, root) is not None:
            return False
        steps = [(self.plan.rules[step], step.args) for step in self.path(argument, root)]
        # products of random values, squares and other powers
        return any(rule.operation == "power" or (rule.product and all(map(self.plan.random, a))) for rule, a in steps)

    def points(
        self, path: list[Node], root: Node, mean: Tensor, std: Tensor, drawn: Pointwise | None = None
    ) -> dict[str, list[Any]]:
        """Where the composed function bends or jumps, in the root's coordinate, or in that from which it is drawn."""
        points: dict[str, list[Any]] = {"breaks": [], "jumps": [], "knots": []}
        for node in path:
            rule = self.plan.rules[node]
            further, named = self._further(node)
            for t in rule.kinks(*further, **named):
                points["breaks"] += self._positions(node, root, t, mean, std, drawn)
            for t in rule.jumps(*further, **named):
                for at in self._positions(node, root, t, mean, std, drawn):
                    points["jumps"].append(_unless_listed(at, points["jumps"], mean, std))
            for t in rule.knots(*further, **named):
                points["knots"] += self._positions(node, root, t, mean, std, drawn, precise=False)
        if any(self._positive_argument(node) is not None for node in path):
            points["knots"] += LONG_TAILS
        return points

    def _further(self, node: Node) -> tuple[list[Any], dict[str, Any]]:
        """An operation's arguments after the first, and those by name."""
        named = {name: self._constant(argument) for name, argument in node.kwargs.items()}
        return [self._constant(argument) for argument in node.args[1:]], named

    def _constant(self, argument: Any) -> Any:
        return self.env.get(argument) if isinstance(argument, Node) else argument

    def _positions(
        self, node: Node, root: Node, t: Any, mean: Tensor, std: Tensor, drawn: Pointwise | None, precise: bool = True
    ) -> list[Any]:
        """Where the node's argument takes the value t; roughly, if it need not be `precise`."""
        rule = self.plan.rules[node]
        line = self._argument_line(node, rule, root)
        if line is not None and drawn is None:
            return [solve(line, t, mean)]

        def argument(x: Tensor) -> Tensor:
            x = x if drawn is None else drawn(x)
            args, _ = self.arguments(node, lambda p: x if p is root else self.evaluate(self.path(p, root), root, x))
            difference: Tensor = (args[0] - args[1] if rule.compares else args[0]) - t
            return difference

        many = self.plan.swings(node) and mean.numel() * MOST_PANELS <= PANELS_OF_ALL
        return crossings(argument, mean, std, SWINGS if many else CROSSINGS, precise)

    def _argument_line(self, node: Node, rule: Rule, root: Node) -> Line | None:
        lines: list[Any] = [
            self._line_from(a, root) if self.plan.random(a) else self._constant(a)
            for a in node.args[: 1 + rule.compares]
        ]
        if any(line is None for line in lines):
            return None
        result = lines[0] - lines[1] if rule.compares else lines[0]
        return result if isinstance(result, Line) else None


def steps_between(start: Node, end: Node) -> tuple[str, ...]:
    """The functions of one argument that lead from one node to another, the last one first, with their settings."""
    node, steps = end, []
    while node is not start:
        steps.append(f"{node.target}{node.args[1:]}{node.kwargs}")
        node = node.args[0]
    return tuple(steps)


def _unless_listed(at: Tensor, listed: list[Tensor], mean: Tensor, std: Tensor) -> Tensor:
    """The jump, or a place without weight if it is listed already: two comparisons may jump at one point."""
    for earlier in listed:
        at = torch.where((at - earlier).abs() <= 1e-9 * (1 + at.abs()), mean + 50 * std, at)
    return at


def _lead(t: Tensor, ndim: int) -> Tensor:
    return t.view(*[1] * (ndim - t.ndim), *t.shape)


def _over_lognormal(f: Callable[[Tensor], Tensor], mean: Tensor, std: Tensor) -> Moments:
    """The variable is matched by a log-normal one (of the mean's sign) where only one sign makes sense."""
    log_var = (std / mean).square().log1p()
    log_mean = mean.abs().log() - log_var / 2
    return Moments(*expectation(lambda z: f(mean.sign() * z.exp()), log_mean, log_var.sqrt()))
