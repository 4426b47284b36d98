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
from ..graph.node import Form, Node
from ..moments import Moments, trusted
from ..rules.registry import lookup
from .fold.layout import Channels, Layout, Rows, consecutive
from .lowering import Fixed, Lowering, NotLanes
from .statistics import Statistics

_TRIALS = 8


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
    found = torch.cat([share[:, None], _root(centred @ centred.mT / inside.shape[1])], 1)
    trials = torch.randn(_TRIALS, len(share), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, spread = _try(use, trials, kernel, spatial, transposed, 1.0, 0.0)
    _, noise = _try(use, trials, kernel, spatial, transposed, 0.0, 1.0)
    levers = trials @ found
    agrees = torch.allclose(mean, levers[:, 0]) and torch.allclose(noise, trials.square() @ share)
    return found if agrees and torch.allclose(spread, levers[:, 1:].square().sum(1), atol=1e-8) else None


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
    value = torch.ones([1] * (2 + len(kernel)), dtype=torch.float64)
    with trusted(), torch.no_grad():
        moments = Moments(mean * value, var * value, (1, 1, *spatial))
        found = use.outputs(moments, _as_weight(trials, kernel, transposed))
    centre = found.mean.reshape(len(trials), -1).mean(1)  # positions that stayed apart are pooled as the layer does
    spread = (found.mean.reshape(len(trials), -1) - centre[:, None]).square()
    return centre, (found.var.reshape(len(trials), -1) + spread).mean(1)


def _root(form: Tensor) -> Tensor:
    """Columns whose squares sum to the quadratic form; none for the zero form."""
    values, vectors = torch.linalg.eigh(form)
    kept = values > 1e-13 * max(1.0, float(values.max()))
    root: Tensor = vectors[:, kept] * values[kept].sqrt()
    return root


@dataclass(frozen=True)
class Use:
    """How a layer is called in the captured graph: the operation, and its arguments after input, weight and bias."""

    target: str
    settings: tuple[Any, ...]

    @classmethod
    def of(cls, node: Node) -> Use:
        """The use a graph node makes of a layer."""
        settings = [tuple(value) if isinstance(value, list) else value for value in node.args[3:]]
        return cls(str(node.target.overloadpacket), tuple(settings))

    def ungrouped(self) -> Use:
        """The same use without groups."""
        place = 5 if self.target == "aten.convolution" else 3
        if len(self.settings) <= place:
            return self
        return Use(self.target, (*self.settings[:place], 1, *self.settings[place + 1 :]))

    def operation(self) -> Any:
        """The operation itself."""
        return getattr(torch.ops.aten, self.target.removeprefix("aten."))

    def outputs(self, x: Moments, weight: Tensor) -> Moments:
        """Moments of the layer's output without bias."""
        rule = lookup(self.operation())
        assert rule is not None and rule.function is not None
        result: Moments = rule.function(x, weight, None, *self.settings)
        return result


@dataclass(frozen=True)
class Site:
    """What a layout has to know of a layer: how it is called, on what, and the form of its weight."""

    path: str
    use: Use
    target: str  # the name of the node that it reads
    form: Form  # of that
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

    def channel_axis(self, form: Form) -> int:
        """Where the channels are in what it reads or makes: before as many axes as its kernel has."""
        return len(form.shape) - len(self.shape) + 1

    def taps(self) -> Tensor | None:
        """How its taps meet the image; None where its statistics do not have the form that a layout describes."""
        spatial = tuple(self.form.shape[self.channel_axis(self.form) + 1 :])
        return tap_matrix(self.use.ungrouped(), tuple(self.shape[2:]), spatial, self.transposed)


class Found(NamedTuple):
    """A layout, and what its given lanes stand for: what enters some sites, and then values that are not random.

    Attributes:
        layout: Of the sites.
        walked: The sites that read what only a walk can compute, with the reason.
        fixed: Parameters, and what follows from them alone, that functions of lanes read.
    """

    layout: Layout
    walked: dict[int, str]
    fixed: list[Fixed]


def make_layout(joint: Statistics, sites: list[Site]) -> Found:
    """The layout of the sites."""
    lowering = Lowering(_without_model(joint.plan))
    numbering = lowering.numbering
    for site in sites:
        lanes = numbering.new(site.outputs)
        for node in (node for node, path in joint.graph.calls.items() if path == site.path):
            shape = [1] * node.ndim
            shape[site.channel_axis(node.form)] = -1
            lowering.give(node, lanes.view(shape), node.form.shape)
    sources = numbering.count
    data = _data(lowering, joint)
    lowering.run()
    pooled: list[Pair] = []
    nodes = joint.nodes_by_name()
    entering = [_entering(lowering, site, nodes[site.target], data, sources, pooled) for site in sites]
    walked = [place for place, lanes in enumerate(entering) if lanes is None]
    given = {place: lowering.blocker(nodes[sites[place].target]) for place in walked}
    for place in given:
        entering[place] = numbering.new(sites[place].groups * sites[place].channels)
    steps, number = numbering.steps([lanes for lanes in entering if lanes is not None])
    mean, var = (torch.cat([pair[k] for pair in (data, *pooled)]) for k in (0, 1))
    found = [number[lanes] for lanes in entering if lanes is not None]
    count = sum(len(found[place]) for place in given) + sum(len(lanes) for _, lanes in numbering.fixed)
    layout = Layout(Channels(sources, mean, var, count, tuple(steps), torch.cat(found)), _rows(sites))
    return Found(layout, given, [fixed for fixed, _ in numbering.fixed])


def _without_model(plan: Plan) -> Plan:
    """The same for functions of lanes, which read no parameters: those who keep them must not keep the model."""
    return replace(plan, program=replace(plan.program, model=nn.Module(), facts={}))


def _data(lowering: Lowering, joint: Statistics) -> Pair:
    """Lanes for the data, which enters with moments that never change."""
    found = [torch.zeros(0, 2, dtype=torch.float64)]
    for node, value in joint.graph.inputs.items():
        if isinstance(value, Moments):
            lowering.give(node, lowering.numbering.new(value.mean.numel()).view(value.shape), value.full)
            parts = [part.detach().cpu().double().flatten() for part in (value.mean, value.var)]
            found.append(torch.stack(parts, 1))
    mean, var = torch.cat(found).unbind(1)
    return mean, var


def _entering(
    lowering: Lowering, site: Site, target: Node, data: Pair, first: int, pooled: list[Pair]
) -> Tensor | None:
    """The lane of every channel a site reads; None if it reads something else."""
    try:
        numbers = lowering.numbers(target)
    except NotLanes:
        return None
    axis, count = site.channel_axis(site.form), site.groups * site.channels
    if numbers.shape[axis] == 1:
        numbers = numbers.expand([count if a == axis else -1 for a in range(numbers.ndim)])
    by_channel = numbers.movedim(axis, 0).reshape(count, -1)
    if bool((by_channel == by_channel[:, :1]).all()):
        return by_channel[:, 0]
    if bool(((by_channel < first) | (by_channel >= first + len(data[0]))).any()):
        return None
    pooled.append(_at_random_position(by_channel - first, *data))
    return lowering.numbering.new(len(by_channel))


def _at_random_position(places: Tensor, mean: Tensor, var: Tensor) -> Pair:
    """Moments of data that differ from position to position, for every channel."""
    centre = mean[places].mean(1, keepdim=True)
    return centre[:, 0], (var[places] + (mean[places] - centre).square()).mean(1)


def _rows(sites: list[Site]) -> tuple[Rows, ...]:
    rows: list[Rows] = []
    known: dict[Any, Tensor] = {}
    for site in sites:
        taps: Any = site.taps()
        taps = known.setdefault((taps.shape, *taps.flatten().tolist()), taps)  # equal ones are one, to be told by `is`
        rows.append(Rows(site.outputs, site.groups, site.channels, taps, 0, 0, 0, site.transposed, site.centred))
    return consecutive(rows)


def walk_of(joint: Statistics, sites: list[Site], walked: Iterable[int], fixed: Iterable[Fixed]) -> Statistics | None:
    """The walk that computes what the given lanes stand for."""
    names = [*(sites[place].target for place in walked), *(value.node for value in fixed)]
    if not names:
        return None
    nodes = joint.nodes_by_name()
    return Statistics(joint.graph, [nodes[name] for name in names])
