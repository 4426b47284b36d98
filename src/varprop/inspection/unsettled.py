"""Batch norms that have seen no data, and what follows them."""

from __future__ import annotations

import torch

from ..engine.walk import Walk
from ..graph.node import Node
from .channels import maker
from .places import op_name

aten = torch.ops.aten
BATCH_NORMS = {aten._native_batch_norm_legit_no_training, aten.batch_norm}


def is_unsettled(walk: Walk, node: Node) -> bool:
    """Whether a node is a batch norm that has seen no data: statistics and shift as they were made."""
    if node.packet not in BATCH_NORMS:
        return False
    _, bias, mean, var = (walk.env.get(a) if isinstance(a, Node) else None for a in node.args[1:5])
    same = mean is not None and var is not None and bool((mean == 0).all() & (var == 1).all())
    return same and (bias is None or bool((bias == 0).all()))


def follows_unsettled(walk: Walk, node: Node) -> bool:
    """Whether such a batch norm made the node, or it belongs to a gate computed from averages behind one.

    An average over many positions hardly varies, so that the rectifier of a gate is on or off by its mean alone: by
    just that of which batch norm will take care.
    """
    node = maker(node)
    if is_unsettled(walk, node):
        return True
    while op_name(node).startswith(("conv", "linear")):
        node = maker(node.args[0])
    averaged = node.target is not None and any(word in op_name(node) for word in ("mean", "avg_pool"))
    return averaged and unsettled(walk) > 0


def unsettled(walk: Walk) -> int:
    """How many batch norms have seen no data."""
    return sum(is_unsettled(walk, node) for node in walk.plan.program.nodes)
