"""One row a module call or operation: everything that is known of its result."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..engine.plan import rule_of
from ..engine.walk import Walk
from ..graph.node import Node
from ..moments import Moments
from .backward import Gradients
from .channels import channel_axis, over_channels, ranges
from .places import Place, bend_at, first_moments, label, op_name
from .slopes import chance_on, squared_slope
from .summary import Spread, Statistics, numbers, spread_of
from .unsettled import follows_unsettled


@dataclass(frozen=True)
class Row:
    """Statistics of the result of one module call or operation.

    Attributes:
        path: Dotted path of the module (of the innermost one for an operation); empty for the model itself.
        kind: ``module`` or ``operation``.
        name: Class of the module, or the operation.
        op: The operation that makes the result.
        moves: Whether that only moves elements.
        call: Which call of the module it is, from 0.
        depth: Depth in the tree of modules.
        leaf: Whether no other row lies inside it.
        line: The user's source line.
        extents: Extents of the result; `uniform` tells along which axes one unit stands for all.
        uniform: For every axis whether it is uniform.
        mean: Means over the units.
        std: Standard deviations over the units.
        numbers: The layer's numbers: ``mean``, ``std`` (root mean square), ``shift`` (share of the mean square that is
            constant), ``flat``, ``saturated``, ``dead``, ``always_on`` (where they apply), ``gradient``.
        growth: std over that of the model's input.
        gradient_total: Root mean square over channels of the gradient summed over positions, E[sum g^2]^(1/2), which
            can be compared between layers of different resolution; ``numbers["gradient"]`` is that of a single element.
        gain: E[f'^2]^(1/2) of an activation, std out / std in otherwise.
        status: ``exact``, ``approximate`` or ``sampled``.
        reasons: Why not exact, forward.
        gradient_status: ``exact`` or ``approximate``; empty without gradient.
        gradient_reason: Why the step back through the row's own operation is approximate.
        ranges: Low and high end of every channel, mean -+ k std.
        measured: The same numbers from data, each with its standard error.
        node: Name of the graph node.
        constant: Share of the channels that do not vary at any position.
        unsettled: Whether it follows a batch norm that has seen no data (mean 0, variance 1, shift 0), or belongs to a
            gate behind such ones.
        weighted: Whether it is a single linear layer or convolution.
    """

    path: str
    kind: Literal["module", "operation"]
    name: str
    op: str
    moves: bool
    call: int
    depth: int
    leaf: bool
    line: str
    extents: tuple[int, ...]
    uniform: tuple[bool, ...]
    mean: Spread
    std: Spread
    numbers: dict[str, float]
    growth: float | None
    gradient_total: float | None
    gain: float | None
    status: str
    reasons: tuple[str, ...]
    gradient_status: str
    gradient_reason: str
    ranges: dict[str, Any] = field(repr=False)
    node: str
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    constant: float = 0.0
    unsettled: bool = False
    weighted: bool = False

    @property
    def label(self) -> str:
        """How a person would call it."""
        return label(self.path, self.call, "" if self.kind == "module" else self.name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        lists = {name: list(plain[name]) for name in ("extents", "uniform", "reasons")}
        return plain | lists | {"label": self.label, "mean": self.mean.to_dict(), "std": self.std.to_dict()}


def statistics(walk: Walk, gradients: Gradients, place: Place) -> Statistics:
    """What propagation says of a place's units."""
    moments = first_moments(walk, place.output)
    assert moments is not None
    gradient = gradients.square(place.output, 0, moments)
    flat = on = linear = None
    if bent := bend_at(walk, place):
        bend, argument = bent[0], first_moments(walk, bent[1])
        assert argument is not None
        flat = bend.probability_flat(argument) if bend.saturates else None
        on, linear = bend.probabilities_above(argument) if bend.rectifier is not None else (None, None)
    if place.output in walk.plan.skips:
        on = linear = chance_on(walk.clusters, place.output)
    return Statistics(moments.mean, moments.var, flat, on, linear, gradient)


def make_row(walk: Walk, gradients: Gradients, place: Place, k: float, measured: dict[str, dict[str, float]]) -> Row:
    """Everything about one place."""
    found, moments = statistics(walk, gradients, place), first_moments(walk, place.output)
    assert moments is not None
    layer, before = numbers(found), _rms(_inputs(walk, walk.plan.program.inputs))
    notes = [note for node in place.nodes for note in walk.notes.get(node, ())]
    sampled = any(node in walk.sampled for node in place.nodes)
    tainted = (place.output, 0) in gradients.tainted
    return Row(
        path=place.path,
        kind=place.kind,
        name=place.name,
        op=op_name(_maker(place.output)),
        moves=_only_moves(_maker(place.output)),
        call=place.call,
        depth=place.depth,
        leaf=place.leaf,
        line=place.output.line,
        extents=tuple(moments.full),
        uniform=tuple(full != own for full, own in zip(moments.full, moments.shape, strict=True)),
        mean=spread_of(moments.mean),
        std=spread_of(moments.std),
        numbers=layer,
        growth=layer["std"] / before if before else None,
        gradient_total=layer["gradient"] * _positions(walk, moments, place) ** 0.5 if "gradient" in layer else None,
        gain=_gain(walk, gradients, place, layer["std"]),
        status="sampled" if sampled else "approximate" if notes else "exact",
        reasons=tuple(dict.fromkeys(notes)),
        gradient_status="" if found.gradient is None else "approximate" if tainted else "exact",
        gradient_reason="; ".join(dict.fromkeys(gradients.notes[n] for n in place.nodes if n in gradients.notes)),
        ranges=ranges(moments, place.output, k),
        measured=measured,
        node=place.output.name,
        constant=_constant_share(moments, place.output),
        unsettled=follows_unsettled(walk, place.output),
        weighted=place.leaf and _has_weights(walk, _maker(place.output)),
    )


def _has_weights(walk: Walk, node: Node) -> bool:
    rule = walk.plan.rules.get(node)
    return rule is not None and rule.weighted and len(walk.plan.random_operands(node)) == 1


def _constant_share(moments: Moments, node: Node) -> float:
    most = over_channels(moments.var, channel_axis(moments, node), torch.amax)
    return float((most == 0).double().mean())


def _maker(node: Node) -> Node:
    """The operation whose result, or one of whose results, a node is."""
    return _maker(node.args[0]) if node.target is operator.getitem else node


def _only_moves(node: Node) -> bool:
    rule = rule_of(node) if node.target is not None else None
    return rule is not None and (rule.kind == "structural" or rule.copies)


def _gain(walk: Walk, gradients: Gradients, place: Place, after: float) -> float | None:
    own = set(place.nodes)
    read = dict.fromkeys(o for node in place.nodes for o in node.operands if o not in own and walk.plan.random(o))
    if len(read) == 1 and (slope := _function_slope(walk, gradients, next(iter(read)), place.output)) is not None:
        return float(slope.mean().sqrt())
    before = _rms(_inputs(walk, list(read)))
    return after / before if before else None


def _function_slope(walk: Walk, gradients: Gradients, start: Node, end: Node) -> Tensor | None:
    """E[(d end / d start)^2] where one is a function of the other, element by element."""
    root = walk.plan.root.get(end)
    if root is None or root is end or walk.plan.root.get(start) is not root:
        return None
    x, shape = first_moments(walk, root), walk.value(end).shape
    if x is None:
        return None
    wide = Moments(x.mean.expand(shape), x.var.expand(shape))
    return squared_slope(walk.clusters, end, start, root, wide, gradients.slopes)


def _inputs(walk: Walk, nodes: list[Node]) -> list[Moments]:
    values = (first_moments(walk, node) for node in nodes if walk.plan.random(node))
    return [value for value in values if value is not None]


def _rms(values: list[Moments]) -> float:
    variances = [float(value.var.double().mean()) for value in values]
    return (sum(variances) / len(variances)) ** 0.5 if variances else 0.0


def _positions(walk: Walk, moments: Moments, place: Place) -> float:
    """Elements of one channel in one sample; the batch need not be the first axis inside a model."""
    inputs = [node.form.shape for node in walk.plan.program.inputs if len(node.form.shape)]
    batch = inputs[0][0] if inputs else 1
    return max(1.0, math.prod(moments.full) / (moments.full[channel_axis(moments, place.output)] * batch))
