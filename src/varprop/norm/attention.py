"""What attention counts as between normalized layers: one of its values, not an average of independent ones.

Attention averages its values with weights that sum to one, so that its mean is theirs. Its variance is that of an
average of independent tokens in `propagate`, which says so. Tokens of data are not independent, least of all behind
many layers: a normalization that counts on their averaging out scales what is left of them up, block after block, until
training diverges. Here attention therefore has the variance of its values, whatever its weights, masks and the dropout
of its weights: the most it can have, exact for tokens that are all alike. So a layer behind attention depends on its
values alone, channel by channel, and is folded with the others.
"""

from __future__ import annotations

from typing import Any

import torch

from ..graph import ops
from ..graph.node import Form, Node
from ..graph.program import Program, transferred

aten = torch.ops.aten
SOFTMAX = (aten.softmax, aten._softmax)
# what keeps weights that sum to one along the last axis, if that axis stays what it is
KEEPS_WEIGHTS = (
    aten.dropout, aten.native_dropout, aten._to_copy, aten.to, aten.clone, aten.contiguous, aten.alias, aten.detach,
    aten.view, aten._unsafe_view, aten.reshape, aten.expand, aten.unsqueeze,
)  # fmt: skip


def with_attention_of_like_tokens(program: Program) -> Program:
    """The same program with every attention replaced by `token_average` of its values."""
    values = {node: found for node in program.nodes if (found := attended_values(node)) is not None}
    if not values:
        return program
    replaced = {node: (ops.token_average, (value, tuple(node.form.shape))) for node, value in values.items()}
    return transferred(program, program.model, replaced=replaced)


def attended_values(node: Node) -> Node | None:
    """The values of an attention, written as one operation or as a product with the result of a softmax."""
    if node.packet is aten.scaled_dot_product_attention:
        return _node(node.args[2])
    if node.packet in (aten.matmul, aten.bmm) and _are_weights(node.args[0]):
        value = _node(node.args[1])
        return value if value is not None and value.ndim > 1 and node.ndim == value.ndim else None
    return None


def _node(value: Any) -> Node | None:
    return value if isinstance(value, Node) and isinstance(value.form, Form) else None


def _are_weights(value: Any) -> bool:
    """Whether a value sums to one along its last axis."""
    node = _node(value)
    while node is not None and node.packet in KEEPS_WEIGHTS:
        before = _node(node.args[0])
        if before is None or before.ndim == 0 or before.form.shape[-1] != node.form.shape[-1]:
            return False
        node = before
    return node is not None and node.packet in SOFTMAX and node.args[1] in (-1, node.ndim - 1)
