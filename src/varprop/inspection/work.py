"""How much a model computes: multiplications with additions (MACs) of every operation, from its extents alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..engine.plan import operation_of, rule_of
from ..graph.node import Form, Node
from ..rules.matrices import indices


def macs(node: Node) -> int:
    """Those of linear layers, convolutions, products of matrices, attention and recurrent layers; others have none."""
    rule, operation, args = rule_of(node), operation_of(node), node.args
    if not isinstance(node.form, Form) and operation != "recurrent":
        return 0
    if operation == "recurrent":
        steps = _numel(args[0]) // _shape(args[0])[-1]
        return steps * sum(_numel(weight) for weight in node.operands if len(_shape(weight)) == 2)
    if operation == "attention":
        return 2 * _numel(args[0]) * _shape(args[1])[-2]
    if operation == "einsum":
        return _of_einsum(*args[:2])
    if operation == "bilinear":
        return _numel(node) * _numel(args[2]) // _shape(args[2])[0]
    if rule is not None and rule.linear:
        return _of_layer(node, args[0], args[1], bool(rule.transposed(*args, **node.kwargs)))
    if rule is not None and rule.product and rule.kind == "rule" and len(args) > 1:
        return math.prod(node.form.shape) * _shape(args[0])[-1] if _shape(args[0]) else 0
    return 0


def _of_layer(node: Node, x: Any, weight: Any, transposed: bool) -> int:
    """All weights once for every position: of the output, or of the input if the layer is a transposed convolution."""
    shape = _shape(x) if transposed else node.form.shape
    spatial = len(_shape(weight)) - 2
    channels = shape[-1] if spatial == 0 else shape[len(shape) - spatial - 1]
    return math.prod(shape) // channels * _numel(weight)


def _of_einsum(equation: str, operands: Sequence[Node]) -> int:
    """Those of products of two, from left to right; what occurs in one operand alone is added up before."""
    parts, output = indices(equation, [len(_shape(operand)) for operand in operands])
    extents = {i: extent for p, o in zip(parts, operands, strict=True) for i, extent in zip(p, _shape(o), strict=True)}
    total, product = 0, set(parts[0]) & {*output, *"".join(parts[1:])}
    for place, part in enumerate(parts[1:], 1):
        later = {*output, *"".join(parts[place + 1 :])}
        together = product | (set(part) & (later | product))
        total += math.prod(extents[i] for i in together)
        product = together & later
    return total


def _shape(value: Any) -> torch.Size:
    return value.form.shape if isinstance(value, Node) and isinstance(value.form, Form) else torch.Size()


def _numel(value: Any) -> int:
    return math.prod(_shape(value))
