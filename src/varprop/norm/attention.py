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

from ..engine.plan import operation_of, rule_of
from ..graph import ops
from ..graph.node import Form, Node
from ..graph.program import Program, transferred


def with_attention_of_like_tokens(program: Program) -> Program:
    """The same program with every attention replaced by `token_average` of its values."""
    values = {node: found for node in program.nodes if (found := attended_values(node)) is not None}
    if not values:
        return program
    replaced = {node: (ops.token_average, (value, tuple(node.form.shape))) for node, value in values.items()}
    return transferred(program, program.model, replaced=replaced)


def attended_values(node: Node) -> Node | None:
    """The values of an attention, written as one operation or as a product with the result of a softmax."""
    if operation_of(node) == "attention":
        return _node(node.args[2])
    if operation_of(node) == "matmul" and _are_weights(node.args[0]):
        value = _node(node.args[1])
        return value if value is not None and value.ndim > 1 and node.ndim == value.ndim else None
    return None


def _node(value: Any) -> Node | None:
    return value if isinstance(value, Node) and isinstance(value.form, Form) else None


def _are_weights(value: Any) -> bool:
    """Whether a value sums to one along its last axis."""
    node = _node(value)
    while node is not None and _keeps_weights(node):
        before = _node(node.args[0])
        if before is None or before.ndim == 0 or before.form.shape[-1] != node.form.shape[-1]:
            return False
        node = before
    return node is not None and operation_of(node) == "softmax" and node.args[1] in (-1, node.ndim - 1)


def _keeps_weights(node: Node) -> bool:
    """Tells whether weights that sum to one along the last axis still do, if that axis stays the same."""
    rule = rule_of(node)
    return rule is not None and (rule.copies or rule.operation in ("dropout", "view"))
