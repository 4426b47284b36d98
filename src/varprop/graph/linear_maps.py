"""Calls of modules that compute a linear map of one input by a weight and a bias, and nothing else, however written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from . import ops
from .node import Node, TensorInfo, nodes_in
from .program import Program, transferred

aten = torch.ops.aten
_VIEWS = (aten.view, aten.reshape, aten._unsafe_view)


class LinearCall(NamedTuple):
    """A call of a module that computes x W' + b, or x W + b, and nothing else."""

    nodes: Sequence[Node]  # all operations of the call, in order; the last one is its result
    x: Node
    weight: Node
    bias: Node | None
    transposed: bool  # whether W is (in, out), as in x W + b, and not (out, in)


def calls_of_modules(program: Program) -> dict[nn.Module | None, list[list[Node]]]:
    """The operations of every call of a module outside of its submodules, by the module."""
    inside: dict[str, list[Node]] = {}
    for node in program.nodes:
        if node.stack:
            inside.setdefault(node.stack[-1].key, []).append(node)
    calls: dict[nn.Module | None, list[list[Node]]] = {}
    for nodes in inside.values():
        calls.setdefault(program.module_of(nodes[0]), []).append(nodes)
    return calls


def linear_call(program: Program, nodes: Sequence[Node]) -> LinearCall | None:
    """Read the linear map x W' + b or x W + b off the operations of a call; None if the call may compute anything else.

    Every operation of the call has to be a part of the map: a product with a parameter, its transposition, an added
    parameter, and views that leave the last axis as it is.
    """
    result, matched = nodes[-1], set[Node]()

    def before_views(node: Any) -> Any:
        while node in inside and node.packet in _VIEWS and node.info.shape[-1:] == node.args[0].info.shape[-1:]:
            matched.add(node)
            node = node.args[0]
        return node

    inside = set(nodes)
    product, bias = before_views(result), None
    if product in inside and product.packet is aten.add and not product.kwargs:
        matched.add(product)
        product, bias = product.args if product.args[0] in inside else reversed(product.args)
        product = before_views(product)
    if product not in inside or product.kwargs:
        return None
    matched.add(product)
    transposed = product.packet is not aten.linear
    if product.packet in (aten.linear, aten.matmul, aten.mm) and len(product.args) == 2:
        x, weight = product.args
    elif product.packet is aten.linear and bias is None:
        x, weight, bias = product.args
    elif product.packet is aten.addmm and bias is None:
        bias, x, weight = product.args
    else:
        return None
    while weight in inside and _swaps_axes(weight):
        matched.add(weight)
        weight, transposed = weight.args[0], not transposed
    x = before_views(x)
    call = LinearCall(nodes, x, weight, bias, transposed)
    read_elsewhere = any(user not in inside for node in nodes[:-1] for user in node.users)
    returned = {*nodes_in(program.outputs), *nodes_in(program.several)} & {*nodes[:-1]}
    return call if matched == inside and _fits(program, call) and not read_elsewhere and not returned else None


def _swaps_axes(node: Node) -> bool:
    """True if a node is a matrix with its two axes exchanged."""
    if node.packet is aten.permute:
        return [axis % 2 for axis in node.args[1]] == [1, 0]
    return node.packet is aten.t or (node.packet is aten.transpose and sum(node.args[1:]) % 2 == 1)


def _fits(program: Program, call: LinearCall) -> bool:
    """True if operands and result have the extents of a linear layer, and one dtype."""
    result, operands = call.nodes[-1].info, [call.x, call.weight, *([] if call.bias is None else [call.bias])]
    if not all(isinstance(node, Node) and node not in call.nodes for node in operands):
        return False
    if not all(isinstance(node.info, TensorInfo) and node.info.dtype == result.dtype for node in operands):
        return False
    x, weight, *bias = (node.info.shape for node in operands)
    if not all(node in program.state for node in operands[1:]) or len(weight) != 2 or not x:
        return False
    inputs, outputs = weight if call.transposed else reversed(weight)
    return x[-1] == inputs and result.shape == (*x[:-1], outputs) and bias in ([], [(outputs,)])


def in_one_operation(program: Program, modules: Collection[nn.Module]) -> Program:
    """A program in which each call of some modules, all of them linear maps, is one operation.

    Its arguments are the input, the weight as it is stored, and the bias.
    """
    bypassed: dict[Node, Node] = {}
    replaced: dict[Node, tuple[Any, tuple[Any, ...]]] = {}
    for module, calls in calls_of_modules(program).items():
        for nodes in calls if module in modules else ():
            call = linear_call(program, nodes)
            assert call is not None
            operation = ops.transposed_linear if call.transposed else aten.linear.default
            bypassed |= dict.fromkeys(nodes[:-1], call.x)
            replaced[nodes[-1]] = (operation, (call.x, call.weight, call.bias))
    return transferred(program, program.model, bypassed, replaced)
