"""The scales and shifts that normalized layers start with.

Layers before activations start with a shift: statistics fixed in advance do not bring back a sample whose scale is off.
A rectifier behind units of mean zero does not either, but behind units of a positive mean it does
(gaussian/stability.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..engine.evaluation import Evaluation
from ..engine.plan import Plan, make_plan
from ..gaussian.normal import Pair
from ..gaussian.stability import stable_shift
from ..graph.node import Form, Node
from ..moments import Moments
from .layers import Normalized
from .recurrent import NormalizedRecurrent
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
    shifts: dict[str, float] = {}
    cache: dict[str, float] = {}
    for root, end in _activations(plan):
        call = _layer_before(root, plan, graph, depths)
        if call is not None:
            shift = _shift_before(graph, root, end, cache)
            shifts[graph.calls[call]] = max(shift, shifts.get(graph.calls[call], 0.0), key=abs)
    return shifts


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


def _shift_before(graph: CapturedMode, root: Node, end: Node, cache: dict[str, float]) -> float:
    """The shift of a value before an activation, computed once for all layers with the same operations behind them."""
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
    if key not in cache:
        cache[key] = stable_shift(functools.partial(_activated, statistics))
    return cache[key]


def _activated(statistics: Statistics, mean: Tensor, std: Tensor) -> Pair:
    """Mean and variance of an activation, for arguments with some means and standard deviations."""
    (root,), (end,) = statistics.graph.calls, statistics.targets
    shape = (-1, *[1] * (root.ndim - 1))
    argument = Moments(mean.view(shape), std.square().view(shape), root.form.shape)
    evaluation = Evaluation(statistics.plan, statistics.input_values() | {root: argument}, annotate=False)
    evaluation.run()
    result = evaluation.value(end)
    return result.mean, result.var


SWEEPS = 300


@torch.no_grad()
def set_first_scales_(layers: dict[str, Any], silent: dict[str, Tensor]) -> None:
    """Layers are made with scale 1 and shift 0; what a batch norm silenced stays silent."""
    for path, mask in silent.items():
        layers[path].scale[mask] = 0


@torch.no_grad()
def set_first_shifts_(layers: dict[str, Any], shifts: dict[str, float]) -> None:
    """Let the layers before activations start where errors of scale die out."""
    for path, shift in shifts.items():
        if not isinstance(layers[path], NormalizedRecurrent):
            layers[path].shift.copy_(shift * layers[path].scale)


def preserve_(layers: dict[str, tuple[Normalized, Tensor | None]], silent: dict[str, Tensor]) -> None:
    """Set scales and shifts so that every layer computes the same as without normalization.

    One sweep does it where every layer is called once. A layer that is called again may feed itself, so that its
    statistics depend on its own scale and shift: the sweeps approach the point where both agree.

    Args:
        layers: The normalized layers with the biases of the plain ones, by path, in the order of their first calls.
        silent: By path, the channels that a batch norm had silenced.
    """
    one_sweep = all(layer.call_count() == 1 for layer, _ in layers.values())
    for sweep in range(SWEEPS):
        moved = [path for path, (layer, bias) in layers.items() if _set_to_present(path, layer, bias, silent.get(path))]
        if sweep == 0:
            _refuse_not_finite(layers)
        if not moved or one_sweep:
            return
    raise ValueError(
        f"Layer '{moved[0]}' is called on its own output, and no scale and shift agree with the statistics that follow "
        f'from them: use init="project", or leave it out with `only`.'
    )


def _refuse_not_finite(layers: dict[str, tuple[Normalized, Tensor | None]]) -> None:
    for path, (layer, _) in layers.items():
        if not all(bool(parameter.isfinite().all()) for parameter in layer.parameters()):
            raise ValueError(
                f"Outputs of '{path}' have no finite mean and variance: look for NaN, infinity and values too large in "
                f"its weights and biases, and in those before it."
            )


@torch.no_grad()
def _set_to_present(path: str, layer: Normalized, bias: Tensor | None, silent: Tensor | None) -> bool:
    """Set scale and shift of a layer so that it does what it did; True if that changed them beyond rounding."""
    if isinstance(layer, NormalizedRecurrent):
        return layer.set_to_present(path)
    mean, std = layer.output_statistics()
    if silent is not None:
        mean, std = mean.masked_fill(silent, 0), std.masked_fill(silent, 0)
    scale, shift = (t.to(layer.scale.dtype) for t in (std, mean if bias is None else mean + bias))
    change = torch.maximum((scale - layer.scale).abs().max(), (shift - layer.shift).abs().max())
    size = torch.maximum(scale.max(), shift.abs().max())
    layer.scale.copy_(scale)
    layer.shift.copy_(shift)
    return not bool(size.isfinite() & (change <= 4 * torch.finfo(scale.dtype).eps * size))
