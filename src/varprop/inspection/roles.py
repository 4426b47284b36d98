"""What becomes of a layer's output, where that decides how it is to be judged.

A branch of a residual block and what lies in it may be small by design, what enters a normalization may have any scale,
queries and keys get small gradients while attention has not learned to look, and what is computed from averages and
given back to all positions (a gate, a context) hardly varies, nor does what is made of class tokens. Heads behind such
averages or tokens, and layers that no other layer reads, may start small.
A rectifier over the sum of a branch and of what is rectified already is on wherever the branch is the smaller one.
What is made of the input before the first parameter is data, a class token starts as the constant it is, and inner
products of two values, sums over all channels, hardly vary beside their mean.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Literal

from ..engine.evaluation import Evaluation as Walk
from ..engine.plan import operation_of
from ..graph.leaf import Leaf
from ..graph.node import Node
from ..rules.registry import Rule
from .gradients.flow import averages_all
from .learned import prepares_data, token_of
from .places import first_moments
from .tokens import of_tokens

Role = Literal[
    "", "data", "normalized", "branch", "in branch", "stream", "rectified stream", "token", "query", "gate", "head",
    "similarity",
]  # fmt: skip
Passing = Callable[[Node, Rule], bool]


def _in_layers(node: Node, rule: Rule) -> bool:
    """Whether an operation is a linear layer, or attention."""
    return rule.linear or rule.operation == "attention"


def _in_blocks(node: Node, rule: Rule) -> bool:
    """Whether an operation may lie within a branch."""
    mixes = rule.product or rule.averages or rule.order_statistic or rule.operation == "softmax"
    return mixes or _in_layers(node, rule) or _normalizes(node, rule)


def _but_layers(node: Node, rule: Rule) -> bool:
    return not rule.weighted and not isinstance(node.target, Leaf)


def _nowhere(node: Node, rule: Rule) -> bool:
    return False


def _normalizes(node: Node, rule: Rule) -> bool:
    return bool(rule.normalizes(*node.args, **node.kwargs))


def role_of(walk: Walk, node: Node) -> Role:
    """The role of a node's value; empty for most."""
    if _is_data(walk, node):
        return "data"
    if token_of(walk, node) is not None:
        return "token"
    if _sums_averages(walk, node):
        return "gate"
    if _is_sum(walk, node):
        return "token" if of_tokens(walk, node) else "in branch" if _in_branch(walk, node) else "stream"
    if _is_gate(walk, node):
        return "gate"
    if _rectifies_a_stream(walk, node):
        return "rectified stream"
    role = _common_role(walk, _ends(walk, node))
    if role == "" and _in_branch(walk, node):
        return "in branch"
    if role == "" and _is_half_of_a_layer(walk, node):
        return "normalized"
    if role == "" and _is_head(walk, node):
        return "head"
    return "similarity" if role == "" and _compares(walk, node) else role


def _is_head(walk: Walk, node: Node) -> bool:
    """Whether a value is made of averages over all positions, or a layer gives it and no other one reads it."""
    rule = walk.plan.rules.get(node)
    if _averages_all_behind(walk, node) or of_tokens(walk, node):
        return True
    return rule is not None and rule.weighted and not any(True for _ in _ends(walk, node, _but_layers))


def _is_data(walk: Walk, node: Node) -> bool:
    """Whether a value is made of the input without parameters, for linear layers to read."""
    if not prepares_data(walk, node):
        return False
    return all(prepares_data(walk, end) or walk.plan.rules[end].linear for _, end in _ends(walk, node))


def _is_sum(walk: Walk, node: Node) -> bool:
    return _sums_two(walk, node) or token_of(walk, node) is not None


def _sums_two(walk: Walk, node: Node) -> bool:
    rule = walk.plan.rules.get(node)
    return rule is not None and rule.signs is not None and len(walk.plan.random_operands(node)) == 2


def _sums_averages(walk: Walk, node: Node) -> bool:
    """Whether a node is a sum of terms from averages over all positions, as of the logits of several heads."""
    return _sums_two(walk, node) and all(_averages_all_behind(walk, term) for term in walk.plan.random_operands(node))


def _in_branch(walk: Walk, node: Node) -> bool:
    """Whether all that becomes of a value ends as the smaller term of a sum, but for what heads read from it.

    On the way may lie sums of the branch's own, and normalizations: what they hand on is small again behind them.
    """
    ends = [(before, end) for before, end in _ends(walk, node, _in_blocks) if not _sums_averages(walk, end)]
    inner = {end for before, end in ends if _role_at(walk, before, end) != "branch"}
    return bool(ends) and all(_is_sum(walk, end) and _in_branch(walk, end) for end in inner)


def _rectifies_a_stream(walk: Walk, node: Node) -> bool:
    """Whether a node is a rectifier over a sum whose larger term cannot be negative."""
    operands = walk.plan.random_operands(node)
    if len(operands) != 1 or not _sums_two(walk, operands[0]) or not _never_negative(walk, node):
        return False
    return _never_negative(walk, max(walk.plan.random_operands(operands[0]), key=lambda term: _power(walk, term)))


def _never_negative(walk: Walk, node: Node) -> bool:
    """Whether a value is rectified, and since then at most moved, joined, pooled or averaged."""
    rule, operands = walk.plan.rules.get(node), walk.plan.random_operands(node)
    if rule is not None and rule.bounds(*node.args[1:], **node.kwargs)[0] >= 0:
        return True
    keeps = rule is None or rule.kind == "structural" or rule.averages or rule.order_statistic
    return keeps and bool(operands) and all(_never_negative(walk, operand) for operand in operands)


def _is_half_of_a_layer(walk: Walk, node: Node) -> bool:
    """Whether another linear layer follows at once and then a normalization, as in separable convolutions."""
    ends = list(_ends(walk, node))
    direct = [end for before, end in ends if before is node and walk.plan.rules[end].linear]
    return len(direct) == len(ends) > 0 and all(_common_role(walk, _ends(walk, end)) == "normalized" for end in direct)


def _common_role(walk: Walk, ends: Iterator[tuple[Node, Node]]) -> Role:
    """The role that a value has at all operations it reaches."""
    found = {_role_at(walk, before, end) for before, end in ends}
    return found.pop() if len(found) == 1 else ""


def _role_at(walk: Walk, before: Node, end: Node) -> Role:
    """The role of what reaches an operation, as the value of one of its operands."""
    rule = walk.plan.rules[end]
    if _normalizes(end, rule):
        return "normalized"
    token = token_of(walk, end)
    if token is not None:
        return "" if before is token else "branch"
    if rule.signs is not None:
        others = [operand for operand in walk.plan.random_operands(end) if operand is not before]
        return "branch" if others and all(_power(walk, before) < _power(walk, other) for other in others) else ""
    if rule.operation == "attention":
        return "query" if before in end.args[:2] else ""
    if rule.product and rule.kind == "rule":
        behind = {operation_of(reader) for _, reader in _ends(walk, end)}
        return "query" if behind and behind <= {"softmax"} else ""
    return ""


def _ends(walk: Walk, node: Node, through: Passing = _nowhere) -> Iterator[tuple[Node, Node]]:
    """Operations that do more with a value than move or scale it, or apply a function, each with what reaches it."""
    return ((before, user) for before, user, passes in _reached(walk, node, through) if not passes)


def _reached(walk: Walk, node: Node, through: Passing) -> Iterator[tuple[Node, Node, bool]]:
    """Operations that a value reaches, each with what reaches it and whether the way goes on behind it.

    It does behind those that move, join or scale values or apply a function, and behind those that `through` accepts.
    """
    waiting, seen = [node], {node}
    while waiting:
        before = waiting.pop()
        for user in before.users:
            rule = walk.plan.rules.get(user)
            if user in seen or not walk.plan.random(user):
                continue
            if user.target is operator.getitem:
                passes = True
            elif rule is None:
                continue
            else:
                passes = _passes(walk, user, rule) or through(user, rule)
            if passes:
                seen.add(user)
                waiting.append(user)
            yield before, user, passes


def _passes(walk: Walk, node: Node, rule: Rule) -> bool:
    single = len(walk.plan.random_operands(node)) == 1 and token_of(walk, node) is None
    return rule.kind == "structural" or (
        single and (rule.kind == "elementwise" or rule.noise or rule.copies or rule.resizes)
    )


def _is_gate(walk: Walk, node: Node) -> bool:
    """Whether a value comes from averages over positions, by linear layers and functions, and meets others again.

    It multiplies them, or it is joined to them as what all positions have in common: an average of all positions.
    """
    reached = [user for _, user, _ in _reached(walk, node, _in_layers) if user in walk.plan.rules]
    product = any(walk.plan.rules[user].product for user in reached)
    if not product and not any(len(walk.plan.random_operands(user)) > 1 for user in reached):
        return False
    return _averages_all_behind(walk, node) or (product and _average_behind(walk, node) is not None)


def _averages_all_behind(walk: Walk, node: Node) -> bool:
    """Whether the average that a value comes from is one of all positions."""
    average = _average_behind(walk, node)
    if average is None or _pools_by_attention(walk, average):
        return average is not None
    x, result = (first_moments(walk, one) for one in (average.operands[0], average))
    return x is not None and result is not None and averages_all(x, average.operands[0], result)


def _average_behind(walk: Walk, node: Node) -> Node | None:
    """The average that a value comes from by linear layers and functions."""
    rule = walk.plan.rules.get(node)
    while rule is not None and not rule.averages and not _pools_by_attention(walk, node):
        operands = walk.plan.random_operands(node)
        if len(operands) != 1 or not (rule.linear or _passes(walk, node, rule)):
            return None
        node = operands[0]
        rule = walk.plan.rules.get(node)
    return node if rule is not None else None


def _pools_by_attention(walk: Walk, node: Node) -> bool:
    """Whether a node is attention by constant queries: averages over all positions, the same way for every input."""
    return operation_of(node) == "attention" and not walk.plan.random(node.args[0])


def _compares(walk: Walk, node: Node) -> bool:
    """Whether a value comes from inner products of random vectors alone, each step by operations on one value."""
    operands, rule = walk.plan.random_operands(node), walk.plan.rules.get(node)
    if rule is None:
        return False
    if len(operands) == 1 and not _normalizes(node, rule):
        return _compares(walk, operands[0])
    if rule.product and rule.kind == "rule":
        return len(operands) == 2 and not any(_is_softmax(walk, operand) for operand in operands)
    return rule.kind == "structural" and all(_compares(walk, operand) for operand in operands)


def _is_softmax(walk: Walk, node: Node) -> bool:
    """Whether a value is one of softmax, moved or scaled at most: weights of an average."""
    operands, rule = walk.plan.random_operands(node), walk.plan.rules.get(node)
    if rule is None or rule.operation == "softmax":
        return rule is not None
    return _passes(walk, node, rule) and len(operands) == 1 and _is_softmax(walk, operands[0])


def _power(walk: Walk, node: Node) -> float:
    moments = first_moments(walk, node)
    return 0.0 if moments is None else float(moments.var.double().mean())
