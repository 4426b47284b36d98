"""What becomes of a layer's output, where that decides how it is to be judged.

A branch of a residual block may be small by design, what enters a normalization may have any scale, queries and keys
get small gradients while attention has not learned to look, and a gate computed from averages hardly varies.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Literal

import torch

from ..engine.walk import Walk
from ..graph.node import Node
from ..rules.registry import Rule
from .places import first_moments

aten = torch.ops.aten
Role = Literal["", "normalized", "branch", "stream", "query", "gate"]
SOFTMAX = {aten.softmax, aten._softmax}


def role_of(walk: Walk, node: Node) -> Role:
    """The role of a node's value; empty for most."""
    rule = walk.plan.rules.get(node)
    if rule is not None and rule.signs is not None and len(walk.plan.random_operands(node)) == 2:
        return "stream"
    if _is_gate(walk, node):
        return "gate"
    found = {_role_at(walk, before, end) for before, end in _ends(walk, node)}
    return found.pop() if len(found) == 1 else ""


def _role_at(walk: Walk, before: Node, end: Node) -> Role:
    """The role of what reaches an operation, as the value of one of its operands."""
    rule = walk.plan.rules[end]
    if rule.normalizes(*end.args, **end.kwargs):
        return "normalized"
    if rule.signs is not None:
        others = [operand for operand in walk.plan.random_operands(end) if operand is not before]
        return "branch" if others and all(_power(walk, before) < _power(walk, other) for other in others) else ""
    if end.packet is aten.scaled_dot_product_attention:
        return "query" if before in end.args[:2] else ""
    if rule.product and rule.kind == "rule":
        behind = {reader.packet for _, reader in _ends(walk, end)}
        return "query" if behind and behind <= SOFTMAX else ""
    return ""


def _ends(walk: Walk, node: Node) -> Iterator[tuple[Node, Node]]:
    """Operations that do more with a value than move or scale it, or apply a function, each with what reaches it."""
    waiting, seen = [node], {node}
    while waiting:
        before = waiting.pop()
        for user in before.users:
            if user in seen or not walk.plan.random(user):
                continue
            rule = walk.plan.rules.get(user)
            if user.target is operator.getitem or (rule is not None and _passes(walk, user, rule)):
                seen.add(user)
                waiting.append(user)
            elif rule is not None:
                yield before, user


def _passes(walk: Walk, node: Node, rule: Rule) -> bool:
    single = len(walk.plan.random_operands(node)) == 1
    return single and (rule.kind in ("structural", "elementwise") or rule.noise or rule.copies)


def _is_gate(walk: Walk, node: Node) -> bool:
    """Whether a value comes from averages over positions, by linear layers and functions, and multiplies others."""
    if not any(walk.plan.rules[end].product for _, end in _gate_ends(walk, node)):
        return False
    rule = walk.plan.rules.get(node)
    while rule is not None and not rule.averages:
        operands = walk.plan.random_operands(node)
        if len(operands) != 1 or not (rule.linear or _passes(walk, node, rule)):
            return False
        node = operands[0]
        rule = walk.plan.rules.get(node)
    return rule is not None


def _gate_ends(walk: Walk, node: Node) -> Iterator[tuple[Node, Node]]:
    """The ends behind further linear layers."""
    for before, end in _ends(walk, node):
        if walk.plan.rules[end].linear:
            yield from _gate_ends(walk, end)
        else:
            yield before, end


def _power(walk: Walk, node: Node) -> float:
    moments = first_moments(walk, node)
    return 0.0 if moments is None else float(moments.var.double().mean())
