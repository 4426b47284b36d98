"""The scales and shifts that normalized layers start with.

Layers before activations start with a shift: statistics fixed in advance do not bring back a sample whose scale is off.
A rectifier behind units of mean zero does not either, but behind units of a positive mean it does
(gaussian/stability.py).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..engine.evaluation import Evaluation
from ..engine.plan import Plan, make_plan
from ..engine.slopes import slopes
from ..gaussian.normal import Pair
from ..gaussian.stability import stable_shift, start_for
from ..graph.node import Node, TensorInfo
from ..moments import Moments, autocast_off
from .checks import listed_paths
from .layers import Normalized
from .linear_layers import group_count, is_linear_layer, output_axis
from .recurrent import NormalizedRecurrent
from .statistics import CapturedMode, Statistics

FirstOutputs = tuple[float, float]  # mean and standard deviation of a layer's outputs


@torch.no_grad()
def first_outputs(graph: CapturedMode, shallow: float = math.inf) -> dict[str, FirstOutputs]:
    """Mean and standard deviation to start with for every layer whose outputs an activation reads, by path.

    They are the stable shift and 1. Where the shortest way through a layer, from an input to an output, has more than
    `shallow` layers, they are such that gradients keep their size along it. (Skips make it short: they need smaller
    branches instead, see `branch_factors`.)

    Of two layers whose sum is read, the one on the shorter path gets the shift: the convolution on a shortcut, and not
    the last one of the branch. A layer that is added to a residual stream gets none: the stream has a mean of its own.
    A layer that several activations read gets the larger shift and the smaller deviation.
    """
    plan = make_plan(graph.program, graph.random_inputs)
    lengths = _shortest_ways(graph, plan)
    shifts: dict[str, float] = {}  # by what the activation computes, as are `deep_starts`
    deep_starts: dict[tuple[str, int], FirstOutputs] = {}
    starts: dict[str, FirstOutputs] = {}
    for call, activation in layers_before_activations(graph, plan):
        shift, std = 0.0, 1.0
        if activation is not None:
            key, length = activation.key(), lengths[call]
            if key not in shifts:
                shifts[key] = stable_shift(functools.partial(_activated, activation))
            shift = shifts[key]
            if length > shallow:
                if (key, length) not in deep_starts:
                    moments = functools.partial(activated_with_slope, activation)
                    deep_starts[key, length] = start_for(moments, shift, length)
                shift, std = deep_starts[key, length]
        before = starts.get(graph.calls[call], (0.0, 1.0))
        starts[graph.calls[call]] = max(shift, before[0], key=abs), min(std, before[1])
    return starts


def layers_before_activations(graph: CapturedMode, plan: Plan) -> Iterator[tuple[Node, Statistics | None]]:
    """Calls of layers whose outputs an activation reads, with the activation as a function of moments.

    None stands for one that differs from sample to sample.
    """
    depths = _depths(graph)
    for root, end in _activations(plan):
        call = _layer_before(root, plan, graph, depths)
        if call is not None:
            yield call, _function_between(graph, root, end)


def _shortest_ways(graph: CapturedMode, plan: Plan) -> dict[Node, int]:
    """For every call of a layer the fewest layers on a path from an input to an output that goes through it."""
    before: dict[Node, int] = {}
    behind: dict[Node, int] = {}
    for node in graph.program.nodes:
        operands = [before[operand] for operand in plan.random_operands(node) if operand in before]
        before[node] = min(operands, default=0) + (node in graph.calls)
    for node in reversed(graph.program.nodes):
        users = [behind[user] + (user in graph.calls) for user in node.users if user in behind]
        behind[node] = min(users, default=0)
    return {call: before[call] + behind[call] for call in graph.calls}


def layers_in_a_row(graph: CapturedMode) -> int:
    """The most layers on a path from an input to an output."""
    return max(_depths(graph).values(), default=0)


def _activations(plan: Plan) -> Iterator[tuple[Node, Node]]:
    """Every elementwise function of a value that something else reads: the value and the function's last operation.

    A line is none: no shift before it damps anything, and to try them all with a constant for every token takes GiB.
    """
    lines: set[Node] = set()
    for node in plan.program.nodes:
        if not plan.inside_cluster(node):
            continue
        read = [operand for operand in node.reads if plan.random(operand)]
        if plan.rules[node].affine is not None and len(read) == 1 and (read[0] is plan.root[node] or read[0] in lines):
            lines.add(node)
        elif any(plan.root.get(user) is not plan.root[node] for user in node.users):
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


def _function_between(graph: CapturedMode, root: Node, end: Node) -> Statistics | None:
    """The operations from a value to an activation of it; None if they differ from sample to sample."""
    # An activation reads no data, but perhaps a constant that has its form from them, such as zeros_like(x).
    fixed = {
        node: value if isinstance(value, Tensor) else torch.zeros(node.info.shape, dtype=node.info.dtype)
        for node, value in graph.inputs.items()
    }
    statistics = Statistics(CapturedMode(graph.program, {root: ""}, fixed), [end])
    for node in statistics.graph.program.nodes:
        constant = not statistics.plan.random(node) and isinstance(node.info, TensorInfo)
        if constant and node.ndim == root.ndim and node.info.shape[0] > 1:
            return None
    return statistics


def _activated(statistics: Statistics, mean: Tensor, std: Tensor) -> Pair:
    """Mean and variance of an activation, for arguments with some means and standard deviations."""
    result = _evaluated(statistics, mean, std).value(statistics.targets[0])
    return result.mean, result.var


def activated_with_slope(statistics: Statistics, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of an activation, and the mean square of its slope."""
    evaluation = _evaluated(statistics, mean, std)
    (root,), (end,) = statistics.graph.calls, statistics.targets
    result, x = evaluation.value(end), evaluation.value(root)
    wide = Moments(x.mean.expand(result.shape), x.var.expand(result.shape))
    slope = slopes(evaluation.clusters, end, root, root, wide, {})
    square = torch.ones_like(result.mean) if slope is None else slope[1]
    return result.mean, result.var, square


@autocast_off()
def _evaluated(statistics: Statistics, mean: Tensor, std: Tensor) -> Evaluation:
    """The operations up to an activation, run on arguments with some means and standard deviations."""
    (root,) = statistics.graph.calls
    shape = (-1, *[1] * (root.ndim - 1))
    argument = Moments(mean.view(shape), std.square().view(shape), root.info.shape)
    evaluation = Evaluation(statistics.plan, statistics.input_values() | {root: argument}, annotate=False)
    evaluation.run()
    return evaluation


SWEEPS = 300
PATIENCE = 16  # sweeps within which changes have to halve: what is slower does not end within all of them
SETTLED = 1e-4  # of a relative change, below which only rounding may hold it up


@torch.no_grad()
def set_first_outputs_(
    layers: dict[str, Any], silent: dict[str, Tensor], starts: dict[str, FirstOutputs], factors: dict[str, float]
) -> None:
    """Set what layers start with, which were made with scale 1 and shift 0.

    `silent` are the channels that a batch norm had silenced, `starts` mean and standard deviation before activations,
    and `factors` make the last layers of residual branches smaller. Recurrent layers stay: gates bound what they add.
    """
    for path, layer in layers.items():
        if path in silent:
            layer.scale[silent[path]] = 0
        if not isinstance(layer, NormalizedRecurrent):
            shift, std = starts.get(path, (0.0, 1.0))
            factor = factors.get(path, 1.0)
            layer.shift.copy_(shift * layer.scale).mul_(factor)
            layer.scale.mul_(std).mul_(factor)


@torch.no_grad()
def orthogonalize_(layers: Iterable[nn.Module]) -> None:
    """Give every linear layer weights with orthonormal rows, or columns where it has more rows.

    They follow from the present ones, without random numbers: from independent Gaussian weights all rotations are
    equally likely. Groups of channels are treated each by itself, parametrized weights not at all.
    """
    for layer in layers:
        if not is_linear_layer(layer) or parametrize.is_parametrized(layer):
            continue
        weight, groups, transposed = layer.weight, group_count(layer), output_axis(layer) == 1
        rows = weight.unflatten(0, (groups, -1)).flatten(3) if weight.ndim > 2 else weight[None, :, :, None]
        rows = rows.transpose(1, 2) if transposed else rows  # groups, outputs, inputs, taps
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        matrix = rows.flatten(2)
        wide = matrix.shape[1] < matrix.shape[2]
        q, r = torch.linalg.qr(matrix.mT if wide else matrix)
        signs = torch.where(r.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0).unsqueeze(1)
        result = ((q * signs).mT if wide else q * signs).reshape(rows.shape)
        weight.copy_((result.transpose(1, 2) if transposed else result).reshape(weight.shape))


def preserve_(layers: dict[str, tuple[Normalized, Tensor | None]], silent: dict[str, Tensor]) -> None:
    """Set scales and shifts so that every layer computes the same as without normalization.

    Layers come with the biases of the plain ones, in the order of their first calls; `silent` are the channels that a
    batch norm had silenced. One sweep does it where every layer is called once. A layer that is called again may feed
    itself, so that its statistics depend on its own scale and shift: the sweeps approach the point where both agree.
    """
    once = all(layer.call_count() == 1 for layer, _ in layers.values())
    largest: list[float] = []  # change of each sweep
    while len(largest) < SWEEPS:
        changes = {path: _set_to_present(path, *layers[path], silent.get(path)) for path in layers}
        if not largest:
            for path, (layer, _) in layers.items():
                if not all(bool(parameter.isfinite().all()) for parameter in layer.parameters()):
                    raise ValueError(
                        f"Outputs of '{path}' have no finite mean and variance: look for NaN, infinity and values too "
                        f"large in its weights and biases, and in those before it."
                    )
        largest.append(max(changes.values()))
        if largest[-1] == 0 or once:
            return
        if len(largest) > PATIENCE and not largest[-1] < max(largest[-1 - PATIENCE] / 2, SETTLED):
            break
    again = [path for path, change in changes.items() if change and layers[path][0].call_count() > 1]
    names = listed_paths(again)
    raise ValueError(
        f"No scale and shift of {names} agree with the statistics that follow from them: the layer is called on what "
        'depends on its own output. Use init="project", or leave it out with `only`.'
    )


@torch.no_grad()
def _set_to_present(path: str, layer: Normalized, bias: Tensor | None, silent: Tensor | None) -> float:
    """Set scale and shift of a layer so that it does what it did.

    Returns the largest change, relative to the largest scale or shift; 0 within rounding.
    """
    if isinstance(layer, NormalizedRecurrent):
        return layer.set_to_present(path)
    mean, std = layer.output_statistics()
    if silent is not None:
        mean, std = mean.masked_fill(silent, 0), std.masked_fill(silent, 0)
    new = torch.stack([std, mean if bias is None else mean + bias]).to(layer.scale.dtype)
    change = (new - torch.stack([layer.scale, layer.shift])).abs().max()
    size = new.abs().max()
    layer.scale.copy_(new[0])
    layer.shift.copy_(new[1])
    if size.isfinite() and change <= 4 * torch.finfo(new.dtype).eps * size:
        return 0.0
    return float((change / size).nan_to_num(torch.inf))


# --- the layers at the ends of residual branches, and how small they start ---

# A stream that B branches of its own variance are added to grows to B + 1 times its variance, most of it at the first
# blocks, and gradients grow on the way back as it does. With branches of variance 1 / B every block adds alike and the
# stream ends at twice its variance.


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
    """A sum of a value and of what more layers make of it."""

    node: Node  # the sum
    shortcut: Node  # its operand with fewer layers since the value that both follow from
    # the calls of the last layers before the other one, if they are what sets its size and serve it alone
    layers: list[Node]


class _Ancestry:
    """Which random values follow from which."""

    def __init__(self, graph: CapturedMode) -> None:
        random = graph.random_inputs
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
