"""The layers at the ends of residual branches, and how small they start.

A stream that B branches of its own variance are added to grows to B + 1 times its variance, most of it at the first
blocks, and gradients grow on the way back as it does. With branches of variance 1 / B every block adds alike and the
stream ends at twice its variance.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import Tensor

from ..engine.plan import Plan, make_plan
from ..graph.node import Node
from .statistics import CapturedMode


def branch_factors(graph: CapturedMode) -> dict[str, float]:
    """B^-1/2 for the last layers of residual branches, by path, where B > 1.

    B is the number of branches on the longest way along the stream through the sum, over projections and stages.
    A layer that something else than the sum reads is left out, and so is a branch that ends in a normalization.
    """
    ancestry = _Ancestry(graph)
    sums = [found for node in graph.program.nodes if (found := ancestry.residual_sum(node)) is not None]
    before: dict[Node, int] = {}
    for found in sums:
        numbers = [before[other.node] for other in sums if ancestry.leads(other.node, found.shortcut)]
        before[found.node] = 1 + max(numbers, default=0)
    behind: dict[Node, int] = {}
    for found in reversed(sums):
        numbers = [behind[other.node] for other in sums if ancestry.leads(found.node, other.shortcut)]
        behind[found.node] = 1 + max(numbers, default=0)
    factors = dict.fromkeys(graph.calls, 1.0)
    for found in sums:
        for call in found.layers:
            factors[call] *= (before[found.node] + behind[found.node] - 1) ** -0.5
    largest: dict[str, float] = {}
    for call, path in graph.calls.items():
        largest[path] = max(largest.get(path, 0.0), factors[call])  # a layer that is called elsewhere too stays large
    return {path: factor for path, factor in largest.items() if factor < 1}


@dataclass(frozen=True)
class _ResidualSum:
    """A sum of a value and of what more layers make of it.

    Attributes:
        node: The sum.
        shortcut: Its operand with fewer layers since the value that both follow from.
        layers: The calls of the last layers before the other one, if they are what sets its size and serve it alone.
    """

    node: Node
    shortcut: Node
    layers: list[Node]


class _Ancestry:
    """Which random values follow from which."""

    def __init__(self, graph: CapturedMode) -> None:
        random = [node for node, value in graph.inputs.items() if not isinstance(value, Tensor)]
        self.calls, self.plan = graph.calls, make_plan(graph.program, random)
        self.nodes = [node for node in (*random, *graph.program.nodes) if self.plan.random(node)]
        self.number = {node: number for number, node in enumerate(self.nodes)}
        self.returned = {value for value in graph.program.outputs if isinstance(value, Node)}
        self.sources: dict[Node, int] = {}  # the numbers of all that a value follows from, itself included, as bits
        for number, node in enumerate(self.nodes):
            self.sources[node] = 1 << number
            for operand in self.plan.random_operands(node):
                self.sources[node] |= self.sources[operand]

    def leads(self, node: Node, to: Node) -> bool:
        return bool(self.sources[to] >> self.number[node] & 1)

    def residual_sum(self, node: Node) -> _ResidualSum | None:
        rule = self.plan.rules.get(node)
        terms = self.plan.random_operands(node) if rule is not None and rule.signs is not None else []
        if len(terms) != 2:
            return None
        common = self.sources[terms[0]] & self.sources[terms[1]]
        if not common:
            return None
        start = common.bit_length() - 1
        shortcut, branch = sorted(terms, key=lambda term: self._layers_since(start, term))
        if self._layers_since(start, shortcut) == self._layers_since(start, branch):
            return None
        layers = _last_layers(branch, self.plan, self.calls)
        belong = all(not self.leads(x, shortcut) and self._ends_in(x, node) for x in layers)
        return _ResidualSum(node, shortcut, layers if belong else [])

    def _layers_since(self, start: int, node: Node) -> int:
        """The fewest layers on a way to a node from the value of a number."""
        fewest = {self.nodes[start]: 0}
        for other in self.nodes[start + 1 : self.number[node] + 1]:
            operands = [fewest[operand] for operand in self.plan.random_operands(other) if operand in fewest]
            if operands:
                fewest[other] = min(operands) + (other in self.calls)
        return fewest[node]

    def _ends_in(self, node: Node, end: Node) -> bool:
        """True if nothing follows from a node but through another one, and the model does not return it."""
        waiting, seen = [node], {node, end}
        while waiting:
            current = waiting.pop()
            if current in self.returned or not self.leads(current, end):
                return False
            new = [user for user in current.users if user in self.number and user not in seen]
            seen.update(new)
            waiting += new
        return True


def _last_layers(node: Node, plan: Plan, calls: dict[Node, str], curves: bool = True) -> list[Node]:
    """The calls of the layers that set the size of a value, with or without curves behind them; none if others do."""
    if node in calls:
        return [node]
    rule, operands = plan.rules.get(node), plan.random_operands(node)
    gates = rule is not None and rule.product and len(operands) > 1
    before = [_last_layers(operand, plan, calls, curves and not gates) for operand in operands]
    if rule is None:
        return before[0] if node.target is operator.getitem else []
    if rule.product:
        return next((layers for layers in before if layers), [])  # of two factors one is enough, and no gate is one
    if rule.signs is not None or rule.kind == "structural":
        return [layer for layers in before for layer in layers] if all(before) else []
    passes = rule.noise or rule.copies or rule.resizes or rule.averages or rule.order_statistic
    return before[0] if len(before) == 1 and (passes or (curves and rule.kind == "elementwise")) else []
