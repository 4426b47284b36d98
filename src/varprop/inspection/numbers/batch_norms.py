"""Batch norms that have seen no data, and what follows them."""

from __future__ import annotations

from ...engine.walk import Walk
from ...graph.node import Node, resolve
from ..channels import maker


def is_unsettled(walk: Walk, node: Node) -> bool:
    """Whether a node is a batch norm that has seen no data: statistics and shift as they were made."""
    rule = walk.plan.rules.get(node)
    if rule is None or rule.batch_norm is None:
        return False
    stored = rule.batch_norm(*resolve(node.args, walk.env.get))
    if stored.mean is None or stored.var is None or not bool((stored.mean == 0).all() & (stored.var == 1).all()):
        return False
    return stored.bias is None or bool((stored.bias == 0).all())


def follows_unsettled(walk: Walk, node: Node) -> bool:
    """Whether such a batch norm made the node, or it belongs to a gate computed from averages behind one.

    An average over many positions hardly varies, so that the rectifier of a gate is on or off by its mean alone: by
    just that of which batch norm will take care.
    """
    node = maker(node)
    if is_unsettled(walk, node):
        return True
    while (rule := walk.plan.rules.get(node)) is not None and rule.linear:
        node = maker(node.args[0])
    return rule is not None and rule.averages and unsettled(walk) > 0


def unsettled(walk: Walk) -> int:
    """How many batch norms have seen no data."""
    return sum(is_unsettled(walk, node) for node in walk.plan.program.nodes)
