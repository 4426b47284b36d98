"""How large gradients are, layer by layer: variance propagation in reverse over the captured graph.

For an operation with Jacobian J, independent of what it meets, Var y = J^2 Var x and E[g_x^2] = (J^2)^T E[g_y^2]: the
second moment of the gradient goes back through the transpose of the map of variances. So the forward rule of a linear
operation, differentiated by the variance of its argument, is its backward rule; for a product of independent values
the same derivative is E[other factor^2], which is right too.

What is carried is the sum over all positions a stored element stands for (its *energy*), so that uniform axes, strides
and broadcasts need no further thought. The part of it that the positions of a channel share goes along (`common`).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...engine.evaluation import Evaluation as Walk
from ...engine.evaluation import apply
from ...engine.plan import operation_of
from ...graph.node import Node, resolve
from ...moments import Moments, trusted
from ..places import moments_of
from .attention import NEARLY_UNIFORM, fits, through_attention
from .flow import Flow, NodeResult, multiplicity
from .linear import through_linear
from .slopes import KnownSlopes, behind_skips, slopes

FIXED = "statistics of a normalization are taken as fixed on the way back (off by 2 / n for n values)"
ROUTED = "a maximum passes gradients to one place, taken as any place of the channel alike"
AS_LINEAR = "{op} has no backward rule: taken as linear with the same gain of variance"
SAMPLED = "{op} has no backward rule: its gradients are those of autograd at random arguments"
FEWEST, MOST, ENOUGH = 4, 32, 1 << 14  # draws of an operation's arguments, and elements of its result in all of them


@dataclass
class GradientScales:
    """Second moments of the gradient at every random value, for a gradient of variance 1 at every output."""

    # sum of E[g^2] over the positions each stored element stands for, by node and result
    energy: dict[NodeResult, Tensor] = field(default_factory=dict)
    notes: dict[Node, str] = field(default_factory=dict)  # why the step back through a node is approximate
    approximate: set[NodeResult] = field(default_factory=set)  # values whose gradient came through an approximate step
    # E[f'] and E[f'^2] of elementwise functions, by their node and their source
    slopes: KnownSlopes = field(default_factory=dict)

    def square(self, node: Node, moments: Moments) -> Tensor | None:
        """E[g^2] of every unit of the first result; None where no gradient arrives."""
        energy = self.energy.get((node, 0))
        return None if energy is None else energy / multiplicity(moments)


@torch.no_grad()
def gradients(walk: Walk) -> GradientScales:
    """Follow a gradient of variance 1 at every output back through a finished walk."""
    return Backward(walk).run()


class Backward:
    """One pass back through a finished walk: what was found so far, and the flows that have yet to go on."""

    def __init__(self, walk: Walk) -> None:
        self.walk, self.plan = walk, walk.plan
        self.found = GradientScales(slopes=behind_skips(walk.clusters))
        self.flows: dict[NodeResult, Flow] = {}

    def run(self) -> GradientScales:
        """From the outputs to the inputs."""
        for out in self.plan.program.outputs:
            if isinstance(out, Node) and isinstance(moments := self.walk.env.get(out), Moments):
                ones = torch.ones(moments.shape, dtype=torch.float64, device=moments.device)
                self._arrive((out, 0), Flow(ones * multiplicity(moments)), False)
        for node in reversed(self.plan.program.nodes):
            arrived = {result: flow for result, flow in self.flows.items() if result[0] is node}
            if self.plan.random(node) and arrived:
                self._step(node, arrived, any(result in self.found.approximate for result in arrived))
            for result in arrived:
                del self.flows[result]
        return self.found

    def _arrive(self, result: NodeResult, flow: Flow, approximate: bool) -> None:
        self.flows[result] = self.flows[result] + flow if result in self.flows else flow
        self._record(result, flow.total, approximate)

    def _record(self, result: NodeResult, energy: Tensor, approximate: bool) -> None:
        known = self.found.energy
        known[result] = known[result] + energy if result in known else energy
        if approximate:
            self.found.approximate.add(result)

    def _step(self, node: Node, arrived: dict[NodeResult, Flow], approximate: bool) -> None:
        if node.target is operator.getitem:
            self._arrive((node.args[0], node.args[1]), arrived[node, 0], approximate)
        elif self.plan.inside_cluster(node):
            self._through_function(node, arrived[node, 0], approximate)
        else:
            self._through_rule(node, arrived, approximate)

    def _through_function(self, end: Node, flow: Flow, approximate: bool) -> None:
        """Back to the source of an elementwise function, and to what lies between for the record."""
        walk, root = self.walk, self.plan.root[end]
        x = walk.env[root]
        if not isinstance(x, Moments):
            return
        shape = flow.total.shape
        wide = Moments(x.mean.expand(shape), x.var.expand(shape))
        known = slopes(walk.clusters, end, root, root, wide, self.found.slopes)
        if known is None:
            self._as_linear(end, {(end, 0): flow}, [root])
            return
        average, square = known
        self._arrive((root, 0), flow.scaled(square, average.square()).summed(x.shape), approximate)
        for node in walk.clusters.path(end, root)[:-1]:
            between = slopes(walk.clusters, end, node, root, wide, self.found.slopes)
            value = walk.value(node)
            if between is not None and isinstance(value, Moments):
                self._record((node, 0), Flow(between[1] * flow.total).summed(value.shape).total, approximate)

    def _through_rule(self, node: Node, arrived: dict[NodeResult, Flow], approximate: bool) -> None:
        walk, rule = self.walk, self.plan.rules.get(node)
        operands = [o for o in self.plan.random_operands(node) if isinstance(walk.value(o), Moments)]
        if not operands or (rule is not None and rule.kind == "source"):
            return
        if rule is not None and rule.order_statistic and rule.per_channel:
            self._through_maximum(node, arrived[node, 0], operands[0])
        elif operation_of(node) == "attention" and fits(walk, node):
            self._pass_on(node, dict(through_attention(walk, node, arrived[node, 0])), NEARLY_UNIFORM, True)
        elif rule is not None and operands == [node.args[0]] and rule.normalizes(*node.args, **node.kwargs):
            x, y = walk.value(operands[0]), moments_of(walk, node)
            self._pass_on(node, {operands[0]: _through_normalization(x, y, arrived[node, 0])}, FIXED, True)
        elif rule is None or not rule.transposable:
            self._by_sampling(node, arrived, operands)
        else:
            self._pass_on(node, *through_linear(walk, node, rule, arrived), approximate)

    def _pass_on(self, node: Node, flows: dict[Node, Flow], note: str, approximate: bool) -> None:
        if note:
            self.found.notes[node] = note
        for operand, flow in flows.items():
            self._arrive((operand, 0), flow, approximate or bool(note))

    def _through_maximum(self, node: Node, flow: Flow, operand: Node) -> None:
        """Every gradient goes on to one element of its window: the total of a channel stays, its common part thins out.

        max f(x) = f(max x) for a rectifier and the like: its slope is that at the largest, which is on more often.
        """
        self.found.notes[node] = ROUTED
        start = self.walk.clusters.before_rising(operand, self.plan.rules[node].maximum)
        if start is not operand:
            self._record((operand, 0), self._spread_evenly(flow, node, operand).total, True)
            flow = self._through_largest(node, operand, start, flow)
        self._arrive((start, 0), self._spread_evenly(flow, node, start), True)

    def _through_largest(self, node: Node, end: Node, start: Node, flow: Flow) -> Flow:
        walk = self.walk
        args, kwargs = resolve((node.args, node.kwargs), lambda other: walk.value(start) if other is end else None)
        with trusted():
            largest = apply(self.plan.rules[node], node.target, args, kwargs)
        x = largest if isinstance(largest, Moments) else largest[0]
        known = slopes(walk.clusters, end, start, start, Moments(x.mean, x.var), {})
        return flow if known is None else flow.scaled(known[1], known[0].square())

    def _spread_evenly(self, flow: Flow, node: Node, operand: Node) -> Flow:
        """Over the positions of a channel."""
        x, result = moments_of(self.walk, operand), moments_of(self.walk, node)
        kept = 2 if x.ndim > 2 else 1

        def spread(energy: Tensor) -> Tensor:
            total: Tensor = energy.sum(list(range(kept, energy.ndim)), keepdim=True) / math.prod(x.shape[kept:])
            return total.expand(x.shape)

        thinned = math.prod(result.full) / math.prod(x.full)
        return Flow(spread(flow.total), None if flow.common is None else spread(flow.common) * thinned)

    def _by_sampling(self, node: Node, arrived: dict[NodeResult, Flow], operands: list[Node]) -> None:
        """By autograd through the operation itself, at independent Gaussian arguments of the moments they have.

        The gradients that arrive are random too, of the energies that arrived, so that the mean square of what comes
        out at an argument is its energy. What was common to the positions stays so to the same share.
        """
        walk = self.walk
        inputs = {operand: walk.value(operand) for operand in operands}
        count = min(MOST, max(FEWEST, ENOUGH // max(1, math.prod(moments_of(walk, node).full))))
        device = inputs[operands[0]].device
        generator = torch.Generator(device).manual_seed(0)
        sums = {operand: torch.zeros(x.shape, dtype=torch.float64, device=device) for operand, x in inputs.items()}
        try:
            for _ in range(count):
                for operand, square in self._sampled_squares(node, arrived, inputs, generator).items():
                    sums[operand] += square.double().sum_to_size(sums[operand].shape) / count
        except (RuntimeError, TypeError):  # autograd cannot differentiate it, or it reads tokens
            return self._as_linear(node, arrived, operands)
        if not all(bool(total.isfinite().all()) for total in sums.values()):
            return self._as_linear(node, arrived, operands)
        energy = sum(float(flow.total.sum()) for flow in arrived.values())
        common = sum(float(flow.common.sum()) for flow in arrived.values() if flow.common is not None)
        flows = {
            operand: Flow(total, total * (common / energy) if common and energy else None)
            for operand, total in sums.items()
        }
        self._pass_on(node, flows, SAMPLED.format(op=_name(node)), True)

    def _sampled_squares(
        self, node: Node, arrived: dict[NodeResult, Flow], inputs: dict[Node, Moments], generator: torch.Generator
    ) -> dict[Node, Tensor]:
        """Squared gradients at the random arguments of an operation, for one draw of these and of what arrives."""
        walk = self.walk

        def noise(shape: torch.Size, like: Tensor) -> Tensor:
            return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)

        leaves = {
            operand: (x.mean + x.std * noise(x.full, x.mean)).detach().requires_grad_() for operand, x in inputs.items()
        }

        def value(operand: Node) -> Any:
            return leaves[operand] if operand in leaves else walk.env[operand]

        with torch.enable_grad():
            args, kwargs = resolve((node.args, node.kwargs), value)
            result = node.target(*args, **kwargs)
            results = list(result) if isinstance(result, (list, tuple)) else [result]
            starts = []
            for (_, index), flow in arrived.items():
                known = walk.value(node)
                moments = known[index] if isinstance(known, list) else known
                # the energy of a stored element is the sum over all elements that it stands for
                scale = (flow.total / multiplicity(moments)).sqrt().to(results[index].dtype).expand(moments.full)
                starts.append((results[index], scale * noise(results[index].shape, results[index])))
            ends, gradients = zip(*starts, strict=True)
            found = torch.autograd.grad(ends, list(leaves.values()), gradients, allow_unused=True)
        return {operand: g.square() for operand, g in zip(leaves, found, strict=True) if g is not None}

    def _as_linear(self, node: Node, arrived: dict[NodeResult, Flow], operands: list[Node]) -> None:
        """As if linear: energy grows in reverse by as much as the variance forward, and stays as common as it was."""
        first, inputs = moments_of(self.walk, node), [self.walk.value(operand) for operand in operands]
        after = _total_variance(first) / math.prod(first.full)
        before = sum(_total_variance(x) for x in inputs)
        energy = sum(float(flow.total.sum()) for flow in arrived.values())
        common = sum(float(flow.common.sum()) for flow in arrived.values() if flow.common is not None)
        square, flows = energy * after / before if before > 0 else 0.0, {}
        for operand, x in zip(operands, inputs, strict=True):
            full = torch.full(x.shape, square * multiplicity(x), dtype=torch.float64, device=x.device)
            flows[operand] = Flow(full, full * (common / energy) if common else None)
        self._pass_on(node, flows, AS_LINEAR.format(op=_name(node)), True)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", None) or str(node.target)


def _through_normalization(x: Moments, y: Moments, flow: Flow) -> Flow:
    """The flow to what is normalized, by statistics of the argument (layer norm and its kin) or of a batch.

    For y = w u, u = (x - m) / s with m and s of n values of x, g_x = (h - avg h - u avg(h u)) / s with h = w g: what is
    taken off are two of n components. So E[g_x^2] is E[g_y^2] w^2 / s^2 but for a share of 2 / n, and w^2 / s^2 is what
    the variance is multiplied by forward. Units that do not vary get what the others of their layer do.
    """
    before, after = torch.broadcast_tensors(x.var.double(), y.var.double())
    average = after.sum() / before.sum().clamp_min(1e-300)
    factor = torch.where(before > 0, after / before.clamp_min(1e-300), average)
    return flow.scaled(factor, factor).summed(x.shape)


def _total_variance(x: Moments) -> float:
    return float(x.var.double().sum()) * multiplicity(x)
