"""Where the rows of a report stand in the graph, which axis holds their channels, and how much they compute."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..engine.evaluation import Evaluation
from ..engine.plan import operation_of, rule_of
from ..graph.node import Node, TensorInfo
from ..moments import Moments
from ..rules.matrices import indices
from ..rules.registry import Bend


@dataclass(frozen=True)
class Region:
    """One module call or operation in the graph: its result and its nodes."""

    path: str
    kind: Literal["module", "operation"]
    name: str
    call: int
    depth: int
    leaf: bool
    output: Node
    nodes: tuple[Node, ...]

    @property
    def label(self) -> str:
        """How messages name it."""
        return label(self.path, self.call, "" if self.kind == "module" else self.name)


def label(path: str, call: int, operation: str = "") -> str:
    """A module's path with the number of its call from the second on, and the operation in it in brackets."""
    name = (path or "(model)") + (f" #{call + 1}" if call else "")
    return f"{name} [{operation}]" if operation else name


def regions_of(evaluation: Evaluation) -> list[Region]:
    """Module calls and operations with random results in the order of execution, containers first."""
    nodes = evaluation.plan.program.nodes
    counted: dict[Node, None] = {}
    for node in nodes:
        moments = first_moments(evaluation, node) if evaluation.plan.random(node) else None
        if node.target is not operator.getitem and moments is not None and moments.mean.numel() > 0:
            counted[node] = None
    inside: dict[str, list[Node]] = {}
    for node in nodes:
        for call in node.stack:
            inside.setdefault(call.key, []).append(node)
    single = {key for key, within in inside.items() if sum(node in counted for node in within) == 1}
    numbering = _calls(evaluation)
    result: list[Region] = []
    seen: set[str] = set()
    for node in counted:
        for depth, call in enumerate(node.stack):
            if call.key not in seen and call.key in numbering:
                seen.add(call.key)
                index, output = numbering[call.key]
                name = call.class_name.rpartition(".")[2]
                leaf = call is node.stack[-1] and call.key in single
                result.append(Region(call.path, "module", name, index, depth, leaf, output, tuple(inside[call.key])))
        if not node.stack or node.stack[-1].key not in single:
            index = numbering.get(node.stack[-1].key, (0, node))[0] if node.stack else 0
            result.append(Region(node.module, "operation", op_name(node), index, len(node.stack), True, node, (node,)))
    return result


def _calls(evaluation: Evaluation) -> dict[str, tuple[int, Node]]:
    """For every module call with a random output: which call of its module it is, and the output."""
    outputs = evaluation.plan.program.module_outputs(evaluation.plan.random)
    path_of = {call.key: call.path for node in evaluation.plan.program.nodes for call in node.stack}
    seen: Counter[str] = Counter()
    calls: dict[str, tuple[int, Node]] = {}
    for key, path in path_of.items():
        index, output = seen[path], outputs[path].outputs[seen[path]]
        seen[path] += 1
        if evaluation.plan.random(output) and first_moments(evaluation, output) is not None:
            calls[key] = index, output
    return calls


def op_name(node: Node) -> str:
    """The operation without its namespace and overload."""
    packet = node.packet
    return str(packet).split(".")[-1] if packet else getattr(node.target, "__name__", str(node.target))


def first_moments(evaluation: Evaluation, node: Node) -> Moments | None:
    """The moments of a node's first result; None where it has none."""
    value = first_result(evaluation.value(node))
    return value if isinstance(value, Moments) else None


def first_result(value: Any) -> Any:
    """The first of several results of an operation; a single one itself."""
    return value[0] if isinstance(value, (list, tuple)) and value else value


def moments_of(evaluation: Evaluation, node: Node) -> Moments:
    """The moments of a node's first result, which has to have some."""
    moments = first_moments(evaluation, node)
    assert moments is not None
    return moments


def bend_at(evaluation: Evaluation, region: Region) -> tuple[Bend, Node] | None:
    """The flat ranges of the activation that makes a region's result, and its argument; None if it is none."""
    rule, node = evaluation.plan.rules.get(region.output), region.output
    bend = rule.bend(*node.args[1:], **node.kwargs) if rule is not None and region.leaf else None
    if bend is None:
        return None
    argument = node.args[0]
    return (bend, argument) if isinstance(argument, Node) and evaluation.plan.random(argument) else None


def channel_axis(moments: Moments, node: Node) -> int:
    """The axis of the channels of a node's result.

    Elementwise functions keep that of the operation before them. Where no operation decides it is the second axis, and
    in sequences the last.
    """
    rule = rule_of(node)
    while node.operands and (node.target is operator.getitem or (rule is not None and rule.kind == "elementwise")):
        node = node.operands[0]
        rule = rule_of(node)
    axis = None if rule is None else rule.channels
    if axis is None:
        axis = -1 if moments.ndim == 3 else 1
    return moments.ndim - 1 if axis < 0 else min(axis, moments.ndim - 1)


def over_channels(values: Tensor, axis: int, reduced: Callable[..., Tensor]) -> Tensor:
    """One number a channel: all other axes reduced."""
    reduced_axes = [candidate for candidate in range(values.ndim) if candidate != axis]
    return (reduced(values.detach(), reduced_axes) if reduced_axes else values.detach()).flatten()


def ranges(moments: Moments, node: Node, k: float) -> dict[str, Any]:
    """Ends of mean -+ k std for every channel, within what the operation can give."""
    rule = rule_of(node)
    least, most = (-math.inf, math.inf) if rule is None else rule.bounds(*node.args[1:], **node.kwargs)
    low = (moments.mean - k * moments.std).clamp(least, most)
    high = (moments.mean + k * moments.std).clamp(least, most)
    axis = channel_axis(moments, node)
    lowest, highest = over_channels(low, axis, torch.amin), over_channels(high, axis, torch.amax)
    return {"axis": axis, "k": k, "low": lowest.tolist(), "high": highest.tolist()}


def macs(node: Node) -> int:
    """Multiplications with additions of a node: linear layers, convolutions, matrix products, attention, recurrence."""
    rule, operation, args = rule_of(node), operation_of(node), node.args
    if not isinstance(node.info, TensorInfo) and operation != "recurrent":
        return 0
    if operation == "recurrent":
        steps = _numel(args[0]) // _shape(args[0])[-1]
        return steps * sum(_numel(weight) for weight in node.operands if len(_shape(weight)) == 2)
    if operation == "attention":
        return 2 * _numel(args[0]) * _shape(args[1])[-2]
    if operation == "einsum":
        return _einsum_macs(*args[:2])
    if operation == "bilinear":
        return _numel(node) * _numel(args[2]) // _shape(args[2])[0]
    if rule is not None and rule.linear:
        return _layer_macs(node, args[0], args[1], bool(rule.transposed(*args, **node.kwargs)))
    if rule is not None and rule.product and rule.kind == "rule" and len(args) > 1:
        return math.prod(node.info.shape) * _shape(args[0])[-1] if _shape(args[0]) else 0
    return 0


def _layer_macs(node: Node, x: Any, weight: Any, transposed: bool) -> int:
    """All weights once for every position: of the output, or of the input if the layer is a transposed convolution."""
    shape = _shape(x) if transposed else node.info.shape
    spatial = len(_shape(weight)) - 2
    channels = shape[-1] if spatial == 0 else shape[len(shape) - spatial - 1]
    return math.prod(shape) // channels * _numel(weight)


def _einsum_macs(equation: str, operands: Sequence[Node]) -> int:
    """MACs of products of two, from left to right; what occurs in one operand alone is added up before."""
    operand_indices, output = indices(equation, [len(_shape(operand)) for operand in operands])
    extents = {
        i: extent
        for p, o in zip(operand_indices, operands, strict=True)
        for i, extent in zip(p, _shape(o), strict=True)
    }
    total, product = 0, set(operand_indices[0]) & {*output, *"".join(operand_indices[1:])}
    for position, names in enumerate(operand_indices[1:], 1):
        later = {*output, *"".join(operand_indices[position + 1 :])}
        together = product | (set(names) & (later | product))
        total += math.prod(extents[i] for i in together)
        product = together & later
    return total


def _shape(value: Any) -> torch.Size:
    return value.info.shape if isinstance(value, Node) and isinstance(value.info, TensorInfo) else torch.Size()


def _numel(value: Any) -> int:
    return math.prod(_shape(value))
