"""Which layers start with a shift, and with how much: those whose outputs an activation reads.

Statistics fixed in advance do not bring back a sample whose scale is off. A rectifier behind units of mean zero does
not either, but behind units of a positive mean it does (gaussian/stability.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..engine.evaluation import Evaluation as Walk
from ..engine.plan import Plan, make_plan
from ..gaussian.normal import Pair
from ..gaussian.stability import stable_shift
from ..graph.node import Form, Node
from ..moments import Moments
from .statistics import CapturedMode, Statistics


@torch.no_grad()
def first_shifts(graph: CapturedMode) -> dict[str, float]:
    """The shift at scale 1 of every layer whose outputs an activation reads, by the layer's path.

    Of two layers whose sum it reads, the one on the shorter path has it: the convolution on a shortcut, and not the
    last one of the branch. Where a layer is added to a residual stream, the stream has a mean of its own, and the layer
    has no shift.
    """
    random = [node for node, value in graph.inputs.items() if not isinstance(value, Tensor)]
    plan = make_plan(graph.program, random)
    depths = _depths(graph)
    found: dict[str, float] = {}
    known: dict[str, float] = {}
    for root, end in _activations(plan):
        call = _layer_before(root, plan, graph, depths)
        if call is not None:
            shift = _known_shift(graph, root, end, known)
            found[graph.calls[call]] = max(shift, found.get(graph.calls[call], 0.0), key=abs)
    return found


def layers_in_a_row(graph: CapturedMode) -> int:
    """The most layers on a path from an input to an output."""
    return max(_depths(graph).values(), default=0)


def _activations(plan: Plan) -> Iterator[tuple[Node, Node]]:
    """Every elementwise function of a value that something else reads: the value and the function's last operation."""
    for node in plan.program.nodes:
        if plan.inside_cluster(node) and any(plan.root.get(user) is not plan.root[node] for user in node.users):
            yield plan.root[node], node


def _depths(graph: CapturedMode) -> dict[Node, int]:
    """For every node, the most layers on a path to it."""
    depths: dict[Node, int] = {}
    for node in graph.program.nodes:
        depths[node] = max((depths.get(operand, 0) for operand in node.operands), default=0) + (node in graph.calls)
    return depths


def _layer_before(node: Node, plan: Plan, graph: CapturedMode, depths: dict[Node, int]) -> Node | None:
    """The call of a layer whose outputs a node only moves, or adds to those of a deeper one; None if there is none."""
    if node in graph.calls:
        return node
    rule, operands = plan.rules.get(node), plan.random_operands(node)
    if rule is None or not (rule.kind == "structural" if len(operands) == 1 else rule.signs is not None):
        return None
    before = [_layer_before(operand, plan, graph, depths) for operand in operands]
    calls = [call for call in before if call is not None]
    return min(calls, key=lambda call: depths[call]) if calls and len(calls) == len(before) else None


def _known_shift(graph: CapturedMode, root: Node, end: Node, known: dict[str, float]) -> float:
    """The shift, computed once for all layers with the same operations behind them."""
    # An activation reads no data, but perhaps a constant that has its form from them, such as zeros_like(x).
    fixed = {
        node: value if isinstance(value, Tensor) else torch.zeros(node.form.shape, dtype=node.form.dtype)
        for node, value in graph.inputs.items()
    }
    statistics = Statistics(CapturedMode(graph.program, {root: ""}, fixed), [end])
    constants = [
        n for n in statistics.graph.program.nodes if not statistics.plan.random(n) and isinstance(n.form, Form)
    ]
    if any(node.ndim == root.ndim and node.form.shape[0] > 1 for node in constants):
        return 0.0  # they differ from sample to sample, and with them the activation
    key = statistics.key()
    if key not in known:
        known[key] = stable_shift(functools.partial(_activated, statistics))
    return known[key]


def _activated(statistics: Statistics, mean: Tensor, std: Tensor) -> Pair:
    """Mean and variance of what an activation makes of values with a mean and a standard deviation."""
    (root,), (end,) = statistics.graph.calls, statistics.targets
    shape = (-1, *[1] * (root.ndim - 1))
    given = Moments(mean.view(shape), std.square().view(shape), root.form.shape)
    walk = Walk(statistics.plan, statistics.given_values() | {root: given}, annotate=False)
    walk.run()
    found = walk.value(end)
    return found.mean, found.var
