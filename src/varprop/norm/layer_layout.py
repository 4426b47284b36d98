"""The layout of a model's normalized layers, from its captured graph.

It says of every layer which channels its rows of weights read (`make_layout`), and how the taps of its kernel meet the
borders of the image (`tap_matrix`), read off the operation itself and checked against the engine's rule.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.plan import Plan
from ..gaussian.normal import Pair
from ..graph import ops
from ..graph.node import Node, TensorInfo
from ..moments import Moments, trusted
from ..rules.registry import lookup
from .fold.layout import Channels, Layout, Rows, consecutive
from .lowering import Fixed, Lowering, NotLowered
from .statistics import Statistics

_TRIALS = 8
_NONE: Pair = (torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))


@functools.lru_cache(maxsize=256)
def tap_matrix(use: Any, kernel: tuple[int, ...], spatial: tuple[int, ...], transposed: bool) -> Tensor | None:
    """The matrix E of `layout.Rows`, float64, for a use without groups; None where statistics are not of that form.

    An image of ones shows at which positions a tap lies inside. Column 0 is the share of these positions; the other
    columns are a root of the covariance of taps over positions, by which the means of outputs differ from position to
    position. That the rule for the layer says the same is tried with random taps.
    """
    inside = _inside(use, kernel, spatial, transposed)
    share = inside.mean(1)
    centred = inside - share[:, None]
    values, vectors = torch.linalg.eigh(centred @ centred.mT / inside.shape[1])
    positive = values > 1e-13 * max(1.0, float(values.max()))
    taps = torch.cat([share[:, None], vectors[:, positive] * values[positive].sqrt()], 1)
    trials = torch.randn(_TRIALS, len(share), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, spread = _try(use, trials, kernel, spatial, transposed, 1.0, 0.0)
    _, noise = _try(use, trials, kernel, spatial, transposed, 0.0, 1.0)
    levers = trials @ taps
    agrees = torch.allclose(mean, levers[:, 0]) and torch.allclose(noise, trials.square() @ share)
    return taps if agrees and torch.allclose(spread, levers[:, 1:].square().sum(1), atol=1e-8) else None


def _inside(use: Any, kernel: tuple[int, ...], spatial: tuple[int, ...], transposed: bool) -> Tensor:
    """For every tap and position 1 where the tap lies inside the image, 0 where outside."""
    count = int(torch.Size(kernel).numel())
    image = torch.ones(1, 1, *spatial, dtype=torch.float64)
    with torch.no_grad():
        taps = _as_weight(torch.eye(count, dtype=torch.float64), kernel, transposed)
        outputs: Tensor = use.operation()(image, taps, None, *use.settings)
    return outputs.reshape(count, -1)


def _as_weight(taps: Tensor, kernel: tuple[int, ...], transposed: bool) -> Tensor:
    return taps.view(-1, *kernel).unsqueeze(0 if transposed else 1)


def _try(use: Any, trials: Tensor, kernel: Any, spatial: Any, transposed: bool, mean: float, var: float) -> Any:
    """Mean and variance of outputs for trial weights and inputs of one mean and variance, by the layer's rule."""
    value = torch.ones([1] * (2 + len(kernel)), dtype=torch.float64)
    with trusted(), torch.no_grad():
        moments = Moments(mean * value, var * value, (1, 1, *spatial))
        outputs = use.outputs(moments, _as_weight(trials, kernel, transposed))
    centre = outputs.mean.reshape(len(trials), -1).mean(1)  # positions that stayed apart are pooled as the layer does
    spread = (outputs.mean.reshape(len(trials), -1) - centre[:, None]).square()
    return centre, (outputs.var.reshape(len(trials), -1) + spread).mean(1)


@dataclass(frozen=True)
class Use:
    """How a layer is called in the captured graph: the operation, and its arguments after input, weight and bias."""

    target: str
    settings: tuple[Any, ...]

    @classmethod
    def of(cls, node: Node) -> Use:
        """The use a graph node makes of a layer."""
        settings = [tuple(value) if isinstance(value, list) else value for value in node.args[3:]]
        target = f"ops.{node.target.__name__}" if node.packet is None else str(node.packet)
        return cls(target, tuple(settings))

    def ungrouped(self) -> Use:
        """This use with one group."""
        if not self.settings:
            return self
        operation = self.operation()
        names = [argument.name for argument in getattr(operation, operation.overloads()[0])._schema.arguments]
        position = names.index("groups") - 3 if "groups" in names else len(self.settings)
        if len(self.settings) <= position:
            return self
        return Use(self.target, (*self.settings[:position], 1, *self.settings[position + 1 :]))

    def operation(self) -> Any:
        """The operation itself."""
        namespace, name = self.target.split(".")
        return getattr(ops if namespace == "ops" else getattr(torch.ops, namespace), name)

    def outputs(self, x: Moments, weight: Tensor) -> Moments:
        """Moments of the layer's output without bias."""
        rule = lookup(self.operation())
        assert rule is not None and rule.function is not None
        result: Moments = rule.function(x, weight, None, *self.settings)
        return result


class LayerCall(NamedTuple):
    """A call of a layer, or several of them whose inputs have the same moments."""

    use: Use  # how the layer is called
    target: str  # the name of the node that it reads
    info: TensorInfo  # of that node
    share: float = 1.0  # how many of the layer's calls are such, as a fraction


@dataclass(frozen=True)
class LayerSpec:
    """How a layer is called, and the shape of its weight."""

    path: str  # of the layer
    calls: tuple[LayerCall, ...]  # its calls, those that read equal moments together
    times: int  # how often it is called
    shape: tuple[int, ...]
    groups: int
    transposed: bool
    centred: bool = False

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        return self.shape[1] * self.groups if self.transposed else self.shape[0]

    @property
    def channels(self) -> int:
        """Entering channels of one group."""
        return self.shape[0] // self.groups if self.transposed else self.shape[1]

    def channel_axis(self, info: TensorInfo) -> int:
        """The axis of channels in its input or output: before as many axes as its kernel has."""
        return len(info.shape) - len(self.shape) + 1

    def taps(self) -> Tensor | None:
        """The matrix `Rows.taps` of the layer; None where a layout cannot describe its statistics."""
        matrices = []
        for call in self.calls:
            spatial = tuple(call.info.shape[self.channel_axis(call.info) + 1 :])
            matrix = tap_matrix(call.use.ungrouped(), tuple(self.shape[2:]), spatial, self.transposed)
            if matrix is None:
                return None
            matrices.append(matrix)
        return mixed_taps(matrices, [call.share for call in self.calls])


def mixed_taps(matrices: list[Tensor], shares: list[float]) -> Tensor:
    """The matrix of a layer from those of its calls, of which each has a share in the mixture of all outputs.

    The mean is that of the calls. To the spread count that of the means of calls around it, a column for each call, and
    that within each of them.
    """
    if len(matrices) == 1:
        return matrices[0]
    weights = torch.tensor(shares, dtype=torch.float64)
    spread = torch.diag(weights.sqrt()) - weights[:, None] * weights.sqrt()
    of_calls = torch.cat([weights[:, None], spread], 1)
    means = torch.cat([matrix[:, :1] * row for matrix, row in zip(matrices, of_calls, strict=True)])
    within = [matrix[:, 1:] * share**0.5 for matrix, share in zip(matrices, shares, strict=True)]
    return torch.cat([means, torch.block_diag(*within)], 1)


class LoweredLayers(NamedTuple):
    """The layout of layers, and its external channels: inputs of some layers, then values that are not random."""

    layout: Layout  # of the layers
    evaluated: dict[int, str]  # the layers whose inputs only the engine can evaluate, by their indices, with the reason
    fixed: list[Fixed]  # parameters, and what follows from them alone, that functions of channels read
    # mean and variance of the data that layers which are called once follow from, and of what they read of it
    data: Pair


def make_layout(joint: Statistics, specs: list[LayerSpec]) -> LoweredLayers:
    """The layout of some layers, from the graph between them and how each is called."""
    lowering = Lowering(_without_model(joint.plan))
    numbering = lowering.numbering
    for spec in specs:
        outputs = numbering.new(spec.outputs)
        for node in (node for node, path in joint.graph.calls.items() if path == spec.path):
            shape = [1] * node.ndim
            shape[spec.channel_axis(node.info)] = -1
            lowering.assign(node, outputs.view(shape), node.info.shape)
    sources = numbering.count
    data = _data(lowering, joint)
    of_data = _joined(data.values())
    lowering.run()
    nodes = joint.nodes_by_name()
    entering: dict[int, Tensor] = {}
    evaluated: dict[int, str] = {}
    called_once = joint.inputs_of([nodes[spec.calls[0].target] for spec in specs if spec.times == 1])
    facts = [moments for node, moments in data.items() if node in called_once]
    for index, spec in enumerate(specs):
        constants = len(numbering.constants)
        by_call = [_entering(lowering, spec, call, nodes[call.target], of_data, sources) for call in spec.calls]
        facts += numbering.constants[constants:] if spec.times == 1 else []
        blocked = [nodes[call.target] for call, numbers in zip(spec.calls, by_call, strict=True) if numbers is None]
        if blocked:
            evaluated[index] = lowering.blocker(blocked[0])
        else:
            entering[index] = torch.cat([numbers for numbers in by_call if numbers is not None])
    for index in evaluated:
        entering[index] = numbering.new(len(specs[index].calls) * specs[index].groups * specs[index].channels)
    in_order = [entering[index] for index in range(len(specs))]
    steps, renumbered = numbering.steps(in_order)
    mean, var = _joined(numbering.constants)
    channels = [renumbered[numbers] for numbers in in_order]
    external = sum(len(channels[index]) for index in evaluated) + sum(len(n) for _, n in numbering.fixed)
    layout = Layout(Channels(sources, mean, var, external, tuple(steps), torch.cat(channels)), _rows(specs))
    return LoweredLayers(layout, evaluated, [fixed for fixed, _ in numbering.fixed], _joined(facts))


def _joined(pairs: Iterable[Pair]) -> Pair:
    means, variances = zip(_NONE, *pairs, strict=True)
    return torch.cat(means), torch.cat(variances)


def _without_model(plan: Plan) -> Plan:
    """A plan for functions of channels, which read no parameters: whoever keeps them must not keep the model."""
    return replace(plan, program=replace(plan.program, model=nn.Module(), facts={}))


def _data(lowering: Lowering, joint: Statistics) -> dict[Node, Pair]:
    """Mean and variance of the model's inputs, whose channels are numbered; they never change."""
    data: dict[Node, Pair] = {}
    for node, value in joint.graph.inputs.items():
        if isinstance(value, Moments):
            mean, var = (tensor.detach().cpu().double().flatten() for tensor in (value.mean, value.var))
            data[node] = mean, var
            lowering.assign(node, lowering.numbering.constant(mean, var).view(value.shape), value.full)
    return data


def _entering(
    lowering: Lowering, spec: LayerSpec, call: LayerCall, target: Node, data: Pair, first: int
) -> Tensor | None:
    """The number of every channel that a layer reads in a call; None if its input was not lowered.

    Data whose moments differ from position to position become channels with the moments at a random position; `first`
    is the number of the first channel of `data`.
    """
    try:
        numbers = lowering.numbers(target)
    except NotLowered:
        return None
    axis, count = spec.channel_axis(call.info), spec.groups * spec.channels
    if numbers.shape[axis] == 1:
        numbers = numbers.expand([count if a == axis else -1 for a in range(numbers.ndim)])
    by_channel = numbers.movedim(axis, 0).reshape(count, -1)
    if bool((by_channel == by_channel[:, :1]).all()):
        return by_channel[:, 0]
    if bool(((by_channel < first) | (by_channel >= first + len(data[0]))).any()):
        return None
    mean, var = (moments[by_channel - first] for moments in data)
    centre = mean.mean(1, keepdim=True)
    return lowering.numbering.constant(centre[:, 0], (var + (mean - centre).square()).mean(1))


def _rows(specs: list[LayerSpec]) -> tuple[Rows, ...]:
    rows: list[Rows] = []
    distinct: dict[Any, Tensor] = {}
    for spec in specs:
        taps: Any = spec.taps()
        taps = distinct.setdefault((taps.shape, *taps.flatten().tolist()), taps)  # equal matrices are one object
        form = (spec.transposed, spec.centred, len(spec.calls))
        rows.append(Rows(spec.outputs, spec.groups, spec.channels, taps, 0, 0, 0, *form))
    return consecutive(rows)


def evaluation_of(
    joint: Statistics, specs: list[LayerSpec], evaluated: Iterable[int], fixed: Iterable[Fixed]
) -> Statistics | None:
    """The evaluation of external channels: inputs of some layers, then values that are not random; None if none."""
    names = [*(call.target for index in evaluated for call in specs[index].calls), *(value.node for value in fixed)]
    if not names:
        return None
    nodes = joint.nodes_by_name()
    return Statistics(joint.graph, [nodes[name] for name in names])
