"""How large gradients are, layer by layer: variance propagation in reverse over the captured graph.

For an operation with Jacobian J, independent of what it meets, Var y = J^2 Var x and E[g_x^2] = (J^2)^T E[g_y^2]: the
second moment of the gradient goes back through the transpose of the map of variances. So the forward rule of a linear
operation, differentiated by the variance of its argument, is its backward rule; for a product of independent values
the same derivative is E[other factor^2], which is right too.

What is carried is the sum over all positions a stored element stands for (its *energy*), so that uniform axes, strides
and broadcasts need no further thought. Beside it goes the part that the positions of a channel share (`common`). The
mean over n positions hands each of them the same gradient, and what lies before it sums equal numbers, not independent
ones: a convolution with taps w turns a common gradient u into u sum w, of square u^2 (sum w)^2, where independent
gradients would give u^2 sum w^2. The common energy is the number of positions times E[(average over positions)^2].
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..engine.clusters import Clusters
from ..engine.evaluation import Evaluation, apply
from ..engine.plan import operation_of
from ..engine.slopes import SlopeCache, slopes
from ..gaussian.rectifier import positive_sum
from ..graph.node import Node, resolve
from ..moments import Moments, autocast_off, trusted
from ..rules.linear import Convolution
from ..rules.registry import Rule
from .regions import channel_axis, first_result, moments_of

FIXED = "gradients through the statistics of a normalization are left out (off by 2 / n for n values)"
ROUTED = "a maximum passes each gradient to one position, here spread evenly over those of the channel"
AS_LINEAR = "{op} has no backward rule: taken as linear, with gradients that grow as the variance does forward"
SAMPLED = "{op} has no backward rule: its gradients are measured by autograd at random arguments"
FEWEST, MOST, ENOUGH = 4, 32, 1 << 14  # draws of an operation's arguments, and elements of its result in all of them
EQUAL = "an average gives its positions one gradient, which layers before it take as independent within a window"
NEARLY_UNIFORM = "attention is taken as having weights that do not depend on the values"
NodeResult = tuple[Node, int]  # a node, and which of its results


@dataclass(frozen=True)
class Flow:
    """Energy of a gradient: all of it, and the part that the positions of a channel share (None: nothing)."""

    total: Tensor
    common: Tensor | None = None

    def __add__(self, flow: Flow) -> Flow:
        if self.common is None or flow.common is None:
            return Flow(self.total + flow.total, flow.common if self.common is None else self.common)
        return Flow(self.total + flow.total, self.common + flow.common)

    def scaled(self, total: Tensor, common: Tensor) -> Flow:
        """Each part times its own factor."""
        return Flow(self.total * total, None if self.common is None else self.common * common)

    def summed(self, shape: torch.Size) -> Flow:
        """Summed to a shape it was broadcast from."""
        return Flow(self.total.sum_to_size(shape), None if self.common is None else self.common.sum_to_size(shape))

    def independent(self) -> Tensor:
        """The energy that is independent from position to position."""
        return self.total if self.common is None else (self.total - self.common).clamp_min(0)


def multiplicity(moments: Moments) -> float:
    """How many elements of the model each stored one stands for."""
    return math.prod(moments.full) / max(1, moments.mean.numel())


def positions(moments: Moments, node: Node) -> int:
    """Elements of a channel in one sample."""
    batch_and_channels = {0, channel_axis(moments, node)}
    return math.prod(extent for axis, extent in enumerate(moments.full) if axis not in batch_and_channels)


def averages_all(x: Moments, node: Node, result: Moments) -> bool:
    """True if a sum or mean leaves one number of all positions of a channel."""
    batch = x.full[0] if x.ndim > 1 else 1
    return math.prod(result.full) == batch * x.full[channel_axis(x, node)]


def shares_positions(operand: Any, result: Moments, node: Node) -> bool:
    """True if an operand is one number for all positions of a channel, of which there are several."""
    if not isinstance(operand, Moments) or operand.ndim != result.ndim:
        return False
    axis = channel_axis(result, node)
    spread = {a for a in range(result.ndim) if operand.full[a] == 1 and result.full[a] > 1}
    return bool(spread) and axis not in spread and 0 not in spread


def chance_on(clusters: Clusters, node: Node) -> Tensor:
    """How often a rectifier behind a skip connection is on (`Plan.skips`)."""
    rectified, added = (clusters.env[term] for term in clusters.plan.skips[node])
    return positive_sum(rectified.mean, rectified.var, added.mean, added.var)


@dataclass
class GradientScales:
    """Second moments of the gradient at every random value, for a gradient of variance 1 at every output."""

    # E[f'] and E[f'^2] of elementwise functions, by their node and their source
    slopes: SlopeCache
    # sum of E[g^2] over the positions each stored element stands for, by node and result
    energy: dict[NodeResult, Tensor] = field(default_factory=dict)
    notes: dict[Node, str] = field(default_factory=dict)  # why the step back through a node is approximate
    approximate: set[NodeResult] = field(default_factory=set)  # values whose gradient came through an approximate step

    def square(self, node: Node, moments: Moments) -> Tensor | None:
        """E[g^2] of every unit of the first result; None where no gradient arrives."""
        energy = self.energy.get((node, 0))
        return None if energy is None else energy / multiplicity(moments)


@torch.no_grad()
@autocast_off()
def gradients(evaluation: Evaluation) -> GradientScales:
    """Follow a gradient of variance 1 at every output back through a finished evaluation."""
    return Backward(evaluation).run()


class Backward:
    """One pass back through a finished evaluation: what was found so far, and the flows that have yet to go on."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation, self.plan, clusters = evaluation, evaluation.plan, evaluation.clusters
        # of rectifiers behind skip connections both moments of the slope are the chance to be on
        on = {(node, self.plan.root[node]): chance_on(clusters, node).double() for node in self.plan.skips}
        self.found = GradientScales({key: (chance, chance) for key, chance in on.items()})
        self.flows: dict[NodeResult, Flow] = {}

    def run(self) -> GradientScales:
        """From the outputs to the inputs."""
        for out in self.plan.program.outputs:
            if isinstance(out, Node) and isinstance(moments := self.evaluation.env.get(out), Moments):
                units = torch.ones(moments.shape, dtype=torch.float64, device=moments.device)
                self._arrive((out, 0), Flow(units * multiplicity(moments)), False)
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
        energies = self.found.energy
        energies[result] = energies[result] + energy if result in energies else energy
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
        evaluation, root = self.evaluation, self.plan.root[end]
        x = evaluation.env[root]
        if not isinstance(x, Moments):
            return
        shape = flow.total.shape
        wide = Moments(x.mean.expand(shape), x.var.expand(shape))
        slope = slopes(evaluation.clusters, end, root, root, wide, self.found.slopes)
        if slope is None:
            self._as_linear(end, {(end, 0): flow}, [root])
            return
        average, square = slope
        self._arrive((root, 0), flow.scaled(square, average.square()).summed(x.shape), approximate)
        for node in evaluation.clusters.path(end, root)[:-1]:
            between = slopes(evaluation.clusters, end, node, root, wide, self.found.slopes)
            value = evaluation.value(node)
            if between is not None and isinstance(value, Moments):
                self._record((node, 0), Flow(between[1] * flow.total).summed(value.shape).total, approximate)

    def _through_rule(self, node: Node, arrived: dict[NodeResult, Flow], approximate: bool) -> None:
        evaluation, rule = self.evaluation, self.plan.rules.get(node)
        operands = [o for o in self.plan.random_operands(node) if isinstance(evaluation.value(o), Moments)]
        if not operands or (rule is not None and rule.kind == "source"):
            return
        if rule is not None and rule.order_statistic and rule.per_channel:
            self._through_maximum(node, arrived[node, 0], operands[0])
        elif operation_of(node) == "attention" and _same_heads(evaluation, node):
            self._pass_on(node, _through_attention(evaluation, node, arrived[node, 0]), NEARLY_UNIFORM)
        elif rule is not None and operands == [node.args[0]] and rule.normalizes(*node.args, **node.kwargs):
            x, y = evaluation.value(operands[0]), moments_of(evaluation, node)
            self._pass_on(node, {operands[0]: _through_normalization(x, y, arrived[node, 0])}, FIXED)
        elif rule is None or not rule.transposable:
            self._by_sampling(node, arrived, operands)
        elif rule.averages:
            self._pass_on(node, *_through_average(evaluation, node, rule, next(iter(arrived.values()))), approximate)
        else:
            self._pass_on(node, _through_linear(evaluation, node, rule, arrived), "", approximate)

    def _pass_on(self, node: Node, flows: dict[Node, Flow], note: str, approximate: bool = False) -> None:
        """Let flows arrive at the operands; a note says why this step is approximate."""
        if note:
            self.found.notes[node] = note
        for operand, flow in flows.items():
            self._arrive((operand, 0), flow, approximate or bool(note))

    def _through_maximum(self, node: Node, flow: Flow, operand: Node) -> None:
        """Every gradient goes on to one element of its window: the total of a channel stays, its common part thins out.

        max f(x) = f(max x) for a rectifier and the like: its slope is that at the largest, which is on more often.
        """
        self.found.notes[node] = ROUTED
        start = self.evaluation.clusters.before_rising(operand, self.plan.rules[node].maximum)
        if start is not operand:
            self._record((operand, 0), self._spread_evenly(flow, node, operand).total, True)
            flow = self._through_largest(node, operand, start, flow)
        self._arrive((start, 0), self._spread_evenly(flow, node, start), True)

    def _through_largest(self, node: Node, end: Node, start: Node, flow: Flow) -> Flow:
        """Back through the functions before a maximum, as if they came behind it."""
        x = self.evaluation.value(start)
        args, kwargs = resolve((node.args, node.kwargs), lambda operand: x if operand is end else None)
        with trusted():
            largest = first_result(apply(self.plan.rules[node], node.target, args, kwargs))
        slope = slopes(self.evaluation.clusters, end, start, start, Moments(largest.mean, largest.var), {})
        return flow if slope is None else flow.scaled(slope[1], slope[0].square())

    def _spread_evenly(self, flow: Flow, node: Node, operand: Node) -> Flow:
        """Over the positions of a channel."""
        x, result = moments_of(self.evaluation, operand), moments_of(self.evaluation, node)
        first = 2 if x.ndim > 2 else 1

        def spread(energy: Tensor) -> Tensor:
            total: Tensor = energy.sum(list(range(first, energy.ndim)), keepdim=True) / math.prod(x.shape[first:])
            return total.expand(x.shape)

        thinned = math.prod(result.full) / math.prod(x.full)
        return Flow(spread(flow.total), None if flow.common is None else spread(flow.common) * thinned)

    def _by_sampling(self, node: Node, arrived: dict[NodeResult, Flow], operands: list[Node]) -> None:
        """By autograd through the operation itself, at independent Gaussian arguments of the moments they have.

        The gradients that arrive are random too, of the energies that arrived, so that the mean square of what comes
        out at an argument is its energy. What was common to the positions stays so to the same share.
        """
        evaluation = self.evaluation
        inputs = {operand: evaluation.value(operand) for operand in operands}
        count = min(MOST, max(FEWEST, ENOUGH // max(1, math.prod(moments_of(evaluation, node).full))))
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
        energy, common = _sums(arrived)
        flows = {
            operand: Flow(total, total * (common / energy) if common and energy else None)
            for operand, total in sums.items()
        }
        self._pass_on(node, flows, SAMPLED.format(op=_name(node)))

    def _sampled_squares(
        self, node: Node, arrived: dict[NodeResult, Flow], inputs: dict[Node, Moments], generator: torch.Generator
    ) -> dict[Node, Tensor]:
        """Squared gradients at the random arguments of an operation, for one draw of these and of what arrives."""
        evaluation = self.evaluation

        def noise(shape: torch.Size, like: Tensor) -> Tensor:
            return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)

        leaves = {
            operand: (x.mean + x.std * noise(x.full, x.mean)).detach().requires_grad_() for operand, x in inputs.items()
        }

        def value(operand: Node) -> Any:
            return leaves[operand] if operand in leaves else evaluation.env[operand]

        with torch.enable_grad():
            args, kwargs = resolve((node.args, node.kwargs), value)
            result = node.target(*args, **kwargs)
            results = list(result) if isinstance(result, (list, tuple)) else [result]
            starts = []
            for (_, index), flow in arrived.items():
                values = evaluation.value(node)
                moments = values[index] if isinstance(values, list) else values
                # the energy of a stored element is the sum over all elements that it stands for
                scale = (flow.total / multiplicity(moments)).sqrt().to(results[index].dtype).expand(moments.full)
                starts.append((results[index], scale * noise(results[index].shape, results[index])))
            ends, gradients = zip(*starts, strict=True)
            derivatives = torch.autograd.grad(ends, list(leaves.values()), gradients, allow_unused=True)
        return {operand: g.square() for operand, g in zip(leaves, derivatives, strict=True) if g is not None}

    def _as_linear(self, node: Node, arrived: dict[NodeResult, Flow], operands: list[Node]) -> None:
        """Pass on energies as if linear: they grow in reverse as the variance does forward, and stay as common."""
        first, inputs = moments_of(self.evaluation, node), [self.evaluation.value(operand) for operand in operands]
        after = _total_variance(first) / math.prod(first.full)
        before = sum(_total_variance(x) for x in inputs)
        energy, common = _sums(arrived)
        square, flows = energy * after / before if before > 0 else 0.0, {}
        for operand, x in zip(operands, inputs, strict=True):
            full = torch.full(x.shape, square * multiplicity(x), dtype=torch.float64, device=x.device)
            flows[operand] = Flow(full, full * (common / energy) if common else None)
        self._pass_on(node, flows, AS_LINEAR.format(op=_name(node)))


def _sums(flows: dict[NodeResult, Flow]) -> tuple[float, float]:
    """The energy of all flows together, and the common part of it."""
    common = [float(flow.common.sum()) for flow in flows.values() if flow.common is not None]
    return sum(float(flow.total.sum()) for flow in flows.values()), sum(common)


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


def _through_linear(
    evaluation: Evaluation, node: Node, rule: Rule, arrived: dict[NodeResult, Flow]
) -> dict[Node, Flow]:
    """Back through a linear operation: by the transpose of its map of variances, the common part as its kind has it."""
    first = next(iter(arrived.values()))
    shared = {result: flow.common for result, flow in arrived.items() if flow.common is not None}
    if shared and rule.convolution is not None:
        return _through_convolution(evaluation, node, rule, first)
    if shared and rule.resizes:
        return _through_resizing(evaluation, node, rule, first)
    passed = _transposed(evaluation, node, rule, {result: flow.total for result, flow in arrived.items()})
    if shared and rule.product and rule.kind == "elementwise":
        return {operand: _through_factor(evaluation, node, operand, first, total) for operand, total in passed.items()}
    if not shared or rule.mixes_positions or (rule.product and len(passed) > 1):
        return {operand: Flow(total) for operand, total in passed.items()}
    if rule.noise:
        return {
            operand: _through_noise(evaluation, node, rule, operand, first, total) for operand, total in passed.items()
        }
    common = _transposed(evaluation, node, rule, shared)
    flows = {operand: Flow(total, common.get(operand)) for operand, total in passed.items()}
    if rule.signs is not None:
        return {operand: _through_term(evaluation, node, operand, flow) for operand, flow in flows.items()}
    return flows


def _through_average(evaluation: Evaluation, node: Node, rule: Rule, flow: Flow) -> tuple[dict[Node, Flow], str]:
    """All positions that went into one number get one gradient."""
    result = evaluation.value(node)
    if rule.convolution is not None and flow.common is not None and positions(result, node) > 1:
        return _through_convolution(evaluation, node, rule, flow), EQUAL
    passed = _transposed(evaluation, node, rule, {(node, 0): flow.total})
    if all(averages_all(evaluation.value(operand), operand, result) for operand in passed):
        return {operand: Flow(total, total) for operand, total in passed.items()}, ""
    shared = {} if flow.common is None else _transposed(evaluation, node, rule, {(node, 0): flow.common})
    return {operand: Flow(total, shared.get(operand)) for operand, total in passed.items()}, EQUAL


def _through_convolution(evaluation: Evaluation, node: Node, rule: Rule, flow: Flow) -> dict[Node, Flow]:
    assert flow.common is not None and rule.convolution is not None
    passed = _transposed(evaluation, node, rule, {(node, 0): flow.independent()})
    args, kwargs = evaluation.clusters.arguments(node, evaluation.value)
    together = _through_taps(rule.convolution(*args, **kwargs), args[0], evaluation.value(node), flow.common)
    if together is None or len(passed) > 1:
        passed = _transposed(evaluation, node, rule, {(node, 0): flow.total})
        return {operand: Flow(total) for operand, total in passed.items()}
    return {operand: Flow(total) + together for operand, total in passed.items()}


def _through_noise(evaluation: Evaluation, node: Node, rule: Rule, operand: Node, flow: Flow, total: Tensor) -> Flow:
    """The flow back through noise: what positions share meets its average, by which the mean is multiplied too."""
    x = evaluation.value(operand)
    mean = x.mean.detach().clone().requires_grad_()
    shifted = Moments(mean, x.var.detach(), x.full)
    args, kwargs = evaluation.clusters.arguments(
        node, lambda argument: shifted if argument is operand else evaluation.value(argument)
    )
    with torch.enable_grad(), trusted():
        result = first_result(apply(rule, node.target, args, kwargs))
        (slope,) = torch.autograd.grad(result.mean.sum(), mean)
    return Flow(total, None if flow.common is None else flow.common * slope.double().square())


def _through_resizing(evaluation: Evaluation, node: Node, rule: Rule, flow: Flow) -> dict[Node, Flow]:
    """In a picture made larger every place adds to the common part of where it came from."""
    ((operand, independent),) = _transposed(evaluation, node, rule, {(node, 0): flow.independent()}).items()
    x, result, common = evaluation.value(operand), evaluation.value(node), flow.common
    assert common is not None
    growth = math.prod(result.full) / math.prod(x.full)
    channels = common.sum(list(range(2, common.ndim)), keepdim=True)
    spread = (channels * growth / math.prod(x.shape[2:])).expand(x.shape)
    return {operand: Flow(independent + spread, spread)}


def _through_term(evaluation: Evaluation, node: Node, operand: Node, flow: Flow) -> Flow:
    """Back to a term of a sum; to one that all positions share their common gradients add up, not their squares."""
    term, result = evaluation.value(operand), evaluation.value(node)
    if flow.common is None or not shares_positions(term, result, node):
        return flow
    return Flow(flow.total + (math.prod(result.full) / math.prod(term.full) - 1) * flow.common)


def _through_factor(evaluation: Evaluation, node: Node, operand: Node, flow: Flow, total: Tensor) -> Flow:
    """Back to one of two factors, `total` as for independent gradients.

    With the other factor x of mean m and variance v, and a common gradient u at n positions: to a factor that all
    positions share goes sum u x_p, of mean square u^2 (n^2 m^2 + n v). To one with a value for every position goes
    u x_p, common as far as the mean of x, or all of it where the positions share x.
    """
    assert flow.common is not None
    factor, result = evaluation.value(operand), evaluation.value(node)
    x = next((argument for argument in node.args[:2] if argument is not operand), operand)
    if isinstance(x, Node):
        x = evaluation.value(x) if evaluation.plan.random(x) else evaluation.env[x]
    mean = x.mean if isinstance(x, Moments) else x
    square = torch.as_tensor(mean, dtype=torch.float64, device=flow.common.device).square()
    if not shares_positions(factor, result, node):
        common_square = square + x.var.double() if shares_positions(x, result, node) else square
        return Flow(total, (flow.common * common_square).sum_to_size(factor.shape))
    count = math.prod(result.full) / math.prod(factor.full)
    return Flow(total + (flow.common * (count - 1) * square).sum_to_size(factor.shape))


def _transposed(
    evaluation: Evaluation, node: Node, rule: Rule, arrived: dict[NodeResult, Tensor]
) -> dict[Node, Tensor]:
    """The transpose of the map of variances, applied to the energies."""
    leaves: dict[Node, Tensor] = {}

    def leaf(operand: Node) -> Any:
        moments = evaluation.value(operand)
        if not isinstance(moments, Moments):
            return moments
        leaves.setdefault(operand, moments.var.detach().clone().requires_grad_())
        return Moments(moments.mean.detach(), leaves[operand], moments.full)

    with torch.enable_grad(), trusted():
        args, kwargs = evaluation.clusters.arguments(node, leaf)
        result = apply(rule, node.target, args, kwargs)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        pairs = [(results[index].var, energy) for (_, index), energy in arrived.items()]
        largest = max((float(energy.max()) for _, energy in pairs if energy.numel()), default=0.0) or 1.0
        # in units of the largest, since single precision would overflow where gradients explode
        weighed = [(var * (energy / largest).to(var.dtype)).sum() for var, energy in pairs]
        total = torch.stack(weighed).sum()
        derivatives = (
            torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if total.requires_grad else ()
        )
    return {
        operand: slope.double() * largest
        for operand, slope in zip(leaves, derivatives or [None] * len(leaves), strict=True)
        if slope is not None
    }


def _through_taps(kernel: Convolution, x: Moments, result: Moments, common: Tensor) -> Flow | None:
    """The common energy back through a convolution or a window of an average; None if its weights are random."""
    weight = kernel.weight
    if not isinstance(weight, Tensor) or x.ndim != weight.ndim:
        return None
    extents = zip(x.full[2:], result.full[2:], weight.shape[2:], strict=True)
    before = [first for first, _ in kernel.zeros]
    axes = zip(extents, kernel.stride, before, kernel.dilation, strict=True)
    reach = [_reach(kernel.transposed, *sizes, *settings) for sizes, *settings in axes]
    squares, sums = _meeting(weight.detach().double().flatten(2), reach)
    if kernel.transposed:  # (in, out / groups): to (out / groups, in) group by group, as the others have it
        pairs = (pair.unflatten(0, (kernel.groups, -1)) for pair in (squares, sums))
        squares, sums = (pair.transpose(1, 2).flatten(0, 1) for pair in pairs)
    channels = result.full[1]
    wide = common.expand(-1, channels, *common.shape[2:]) * (common.shape[1] / channels)
    return _spread(x, result, wide, squares, sums, kernel.groups)


def _reach(transposed: bool, size: int, out: int, taps: int, stride: int, before: int, dilation: int) -> Tensor:
    """Which places of the argument (columns) get a gradient through which tap (rows), along one axis."""
    position, tap = torch.arange(size)[None], torch.arange(taps)[:, None] * dilation
    if transposed:
        target = position * stride + tap - before
        return ((target >= 0) & (target < out)).double()
    target = position + before - tap
    return ((target % stride == 0) & (target >= 0) & (target < out * stride)).double()


def _meeting(taps: Tensor, reach: list[Tensor]) -> tuple[Tensor, Tensor]:
    """For every pair of channels: sum over places of (sum of the taps that meet there)^2, and of that sum itself."""
    pairs = reduce(torch.kron, [reached @ reached.T for reached in reach]).to(taps.device)
    counts = reduce(torch.kron, [reached.sum(1) for reached in reach]).to(taps.device)
    return ((taps @ pairs) * taps).sum(-1), taps @ counts


def _spread(x: Moments, result: Moments, common: Tensor, squares: Tensor, sums: Tensor, groups: int) -> Flow:
    """The energies by channel through the pairs (out, in / groups), spread evenly over the argument's positions."""
    positions_after, before = math.prod(result.full[2:]), math.prod(x.full[2:])
    arrived = common.flatten(2).sum(2).unflatten(1, (groups, -1)).unsqueeze(2) / positions_after

    def spread(factors: Tensor) -> Tensor:
        energy: Tensor = (arrived @ factors.unflatten(0, (groups, -1))).flatten(1)
        energy = energy if x.shape[1] > 1 else energy.sum(1, keepdim=True)
        energy = energy.view(*energy.shape, *[1] * (x.ndim - 2)) / math.prod(x.shape[2:])
        return energy.expand(len(energy), *x.shape[1:])

    return Flow(spread(squares), spread(sums.square() / before))


def _same_heads(evaluation: Evaluation, node: Node) -> bool:
    """True if queries, keys and values are random tensors with the same heads."""
    operands = node.args[:3]
    if len(operands) < 3 or not all(isinstance(o, Node) and evaluation.plan.random(o) for o in operands):
        return False
    q, k, v = (evaluation.value(operand) for operand in operands)
    return isinstance(q, Moments) and q.full[:-2] == k.full[:-2] == v.full[:-2]


def _through_attention(evaluation: Evaluation, node: Node, flow: Flow) -> dict[Node, Flow]:
    """The flows to queries, keys and values, and to a random mask."""
    q, k, v = (evaluation.value(operand) for operand in node.args[:3])
    concentration = min(1.0, average(evaluation.value(node).var) / max(average(v.var), 1e-300))
    ratio = q.full[-2] / k.full[-2]
    to_scores = average(v.var) * (1 - concentration)
    setting = node.kwargs.get("scale")
    scale = (1 / math.sqrt(q.full[-1]) if setting is None else setting) ** 2 * v.full[-1] * to_scores
    means, spread = average(q.mean.square()), average(q.var)
    common = torch.zeros_like(flow.total) if flow.common is None else flow.common
    independent = flow.independent()
    to_v = Flow(_over_tokens(concentration * independent + ratio * common, v), _over_tokens(ratio * common, v))
    to_q = scale * concentration * average(k.var)
    to_k = scale * (concentration * (means + spread) * independent + (ratio * means + concentration * spread) * common)
    flows = [Flow(_even(to_q * flow.total, q), _even(to_q * common, q)), Flow(_even(to_k, k)), to_v]
    if flow.common is None:
        flows = [Flow(flow_to.total) for flow_to in flows]
    arriving: dict[Node, Flow] = {}
    for operand, flow_to in zip(node.args[:3], flows, strict=True):  # one value may be several of them
        arriving[operand] = arriving[operand] + flow_to if operand in arriving else flow_to
    mask: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if evaluation.plan.random(mask):
        arriving[mask] = Flow(_even(to_scores * concentration * flow.total, evaluation.value(mask)))
    return arriving


def average(values: Tensor) -> float:
    """The mean in double precision."""
    return float(values.double().mean())


def _over_tokens(energy: Tensor, x: Moments) -> Tensor:
    """The energies of a channel, spread evenly over the tokens.

    As stored elements: an axis stored once holds the sum, one that the energy has once an equal share.
    """
    energy = energy.sum(-2, keepdim=True) / x.shape[-2]
    for axis, extent in enumerate(x.shape):
        if extent == 1:
            energy = energy.sum(axis, keepdim=True)
        elif energy.shape[axis] == 1 and axis != x.ndim - 2:
            energy = energy / extent
    return energy.expand(x.shape)


def _even(energy: Tensor, x: Moments) -> Tensor:
    """All energy, spread evenly over the elements."""
    return (energy.sum() / x.mean.numel()).expand(x.shape)
