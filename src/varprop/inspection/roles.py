"""What becomes of a layer's output, where that decides how it is to be judged.

==================  ===================================================================================================
data                made of the input before the first parameter
normalized          a normalization follows: it may have any scale
branch              the smaller term of a residual sum: it may be small by design
in branch           what lies inside such a branch, likewise
stream              a residual sum
rectified stream    a rectifier over the sum of a branch and of what is rectified already: it is on wherever the branch
                    is the smaller one
token               the sum of a learned constant (a class token) and of blocks that learned factors (layer scale) keep
                    small: it starts as the constant that it is, on purpose
query               queries and keys: their gradients are small while attention has not learned to look
gate                computed from averages and given back to all positions (a gate, a context): it hardly varies
head                made of averages over all positions or of class tokens, or read by no layer: it may start small
similarity          inner products of two values, sums over all channels: they hardly vary beside their mean
==================  ===================================================================================================

A class token is a learned constant that is joined to the positions and reads from them by attention. All that it holds
of the input are averages over the other positions, which hardly vary; no more does what is computed from tokens alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from ..engine.evaluation import Evaluation
from ..engine.plan import Plan, operation_of
from ..graph.node import Node
from ..graph.program import Program, tensor_at
from ..graph.tracing import Leaf
from ..moments import Moments
from ..rules.registry import Rule
from .gradients import averages_all
from .regions import first_moments

Role = Literal[
    "", "data", "normalized", "branch", "in branch", "stream", "rectified stream", "token", "query", "gate", "head",
    "similarity",
]  # fmt: skip
Passing = Callable[[Node, Rule], bool]
Span = tuple[int, range]  # an axis, and positions along it


def _in_layers(node: Node, rule: Rule) -> bool:
    """True if an operation is a linear layer, or attention."""
    return rule.linear or rule.operation == "attention"


def _in_blocks(node: Node, rule: Rule) -> bool:
    """True if an operation may lie within a branch."""
    mixes = rule.product or rule.averages or rule.order_statistic or rule.operation == "softmax"
    return mixes or _in_layers(node, rule) or _normalizes(node, rule)


def _normalizes(node: Node, rule: Rule) -> bool:
    return bool(rule.normalizes(*node.args, **node.kwargs))


def role_of(evaluation: Evaluation, node: Node) -> Role:
    """The role of a node's value; empty for most."""
    if _is_data(evaluation, node):
        return "data"
    if _token_of(evaluation, node) is not None:
        return "token"
    if _sums_averages(evaluation, node):
        return "gate"
    if _is_sum(evaluation, node):
        return "token" if _of_tokens(evaluation, node) else "in branch" if _in_branch(evaluation, node) else "stream"
    if _is_gate(evaluation, node):
        return "gate"
    if _rectifies_a_stream(evaluation, node):
        return "rectified stream"
    if role := _common_role(evaluation, _ends(evaluation, node)):
        return role
    if _in_branch(evaluation, node):
        return "in branch"
    if _is_half_of_a_layer(evaluation, node):
        return "normalized"
    if _is_head(evaluation, node):
        return "head"
    return "similarity" if _compares(evaluation, node) else ""


def _is_head(evaluation: Evaluation, node: Node) -> bool:
    """True if a value is made of averages over all positions, or a layer gives it and no other one reads it."""
    rule = evaluation.plan.rules.get(node)
    if _averages_all_behind(evaluation, node) or _of_tokens(evaluation, node):
        return True
    if rule is None or not rule.weighted:
        return False
    readers = _ends(evaluation, node, lambda node, rule: not rule.weighted and not isinstance(node.target, Leaf))
    return not any(True for _ in readers)


def _is_data(evaluation: Evaluation, node: Node) -> bool:
    """True if a value is made of the input without parameters, for linear layers to read."""
    if not _prepares_data(evaluation, node):
        return False
    return all(
        _prepares_data(evaluation, end) or evaluation.plan.rules[end].linear for _, end in _ends(evaluation, node)
    )


def _is_sum(evaluation: Evaluation, node: Node) -> bool:
    return _sums_two(evaluation, node) or _token_of(evaluation, node) is not None


def _sums_two(evaluation: Evaluation, node: Node) -> bool:
    rule = evaluation.plan.rules.get(node)
    return rule is not None and rule.signs is not None and len(evaluation.plan.random_operands(node)) == 2


def _sums_averages(evaluation: Evaluation, node: Node) -> bool:
    """True if a node is a sum of terms from averages over all positions, as of the logits of several heads."""
    return _sums_two(evaluation, node) and all(
        _averages_all_behind(evaluation, term) for term in evaluation.plan.random_operands(node)
    )


def _in_branch(evaluation: Evaluation, node: Node) -> bool:
    """True if all that becomes of a value ends as the smaller term of a sum, but for what heads read from it.

    On the way may lie sums of the branch's own, and normalizations: what they hand on is small again behind them.
    """
    ends = [(before, end) for before, end in _ends(evaluation, node, _in_blocks) if not _sums_averages(evaluation, end)]
    inner = {end for before, end in ends if _role_at(evaluation, before, end) != "branch"}
    return bool(ends) and all(_is_sum(evaluation, end) and _in_branch(evaluation, end) for end in inner)


def _rectifies_a_stream(evaluation: Evaluation, node: Node) -> bool:
    """True if a node is a rectifier over a sum whose larger term cannot be negative."""
    operands = evaluation.plan.random_operands(node)
    if len(operands) != 1 or not _sums_two(evaluation, operands[0]) or not _never_negative(evaluation, node):
        return False
    terms = evaluation.plan.random_operands(operands[0])
    return _never_negative(evaluation, max(terms, key=lambda term: _power(evaluation, term)))


def _never_negative(evaluation: Evaluation, node: Node) -> bool:
    """True if a value is rectified, and since then at most moved, joined, pooled or averaged."""
    rule, operands = evaluation.plan.rules.get(node), evaluation.plan.random_operands(node)
    if rule is not None and rule.bounds(*node.args[1:], **node.kwargs)[0] >= 0:
        return True
    keeps = rule is None or rule.kind == "structural" or rule.averages or rule.order_statistic
    return keeps and bool(operands) and all(_never_negative(evaluation, operand) for operand in operands)


def _is_half_of_a_layer(evaluation: Evaluation, node: Node) -> bool:
    """True if another linear layer follows at once and then a normalization, as in separable convolutions."""
    ends = list(_ends(evaluation, node))
    direct = [end for before, end in ends if before is node and evaluation.plan.rules[end].linear]
    return len(direct) == len(ends) > 0 and all(
        _common_role(evaluation, _ends(evaluation, end)) == "normalized" for end in direct
    )


def _common_role(evaluation: Evaluation, ends: Iterator[tuple[Node, Node]]) -> Role:
    """The role that a value has at all operations it reaches."""
    roles = {_role_at(evaluation, before, end) for before, end in ends}
    return roles.pop() if len(roles) == 1 else ""


def _role_at(evaluation: Evaluation, before: Node, end: Node) -> Role:
    """The role of what reaches an operation, as the value of one of its operands."""
    rule = evaluation.plan.rules[end]
    if _normalizes(end, rule):
        return "normalized"
    token = _token_of(evaluation, end)
    if token is not None:
        return "" if before is token else "branch"
    if rule.signs is not None:
        others = [_power(evaluation, term) for term in evaluation.plan.random_operands(end) if term is not before]
        return "branch" if others and all(_power(evaluation, before) < other for other in others) else ""
    if rule.operation == "attention":
        return "query" if before in end.args[:2] else ""
    if rule.product and rule.kind == "rule":
        behind = {operation_of(reader) for _, reader in _ends(evaluation, end)}
        return "query" if behind and behind <= {"softmax"} else ""
    return ""


def _ends(
    evaluation: Evaluation, node: Node, through: Passing = lambda node, rule: False
) -> Iterator[tuple[Node, Node]]:
    """Operations that do more with a value than move or scale it, or apply a function, each with what reaches it."""
    return ((before, user) for before, user, passes in _reached(evaluation, node, through) if not passes)


def _reached(evaluation: Evaluation, node: Node, through: Passing) -> Iterator[tuple[Node, Node, bool]]:
    """Operations that a value reaches, each with what reaches it and whether the way goes on behind it.

    It does behind those that move, join or scale values or apply a function, and behind those that `through` accepts.
    """
    waiting, seen = [node], {node}
    while waiting:
        before = waiting.pop()
        for user in before.users:
            rule = evaluation.plan.rules.get(user)
            if user in seen or not evaluation.plan.random(user):
                continue
            if user.target is operator.getitem:
                passes = True
            elif rule is None:
                continue
            else:
                passes = _passes(evaluation, user, rule) or through(user, rule)
            if passes:
                seen.add(user)
                waiting.append(user)
            yield before, user, passes


def _passes(evaluation: Evaluation, node: Node, rule: Rule) -> bool:
    single = len(evaluation.plan.random_operands(node)) == 1 and _token_of(evaluation, node) is None
    return rule.kind == "structural" or (
        single and (rule.kind == "elementwise" or rule.noise or rule.copies or rule.resizes)
    )


def _is_gate(evaluation: Evaluation, node: Node) -> bool:
    """True if a value comes from averages over positions, by linear layers and functions, and meets others again.

    It multiplies them, or it is joined to them as what all positions have in common: an average of all positions.
    """
    reached = [user for _, user, _ in _reached(evaluation, node, _in_layers) if user in evaluation.plan.rules]
    product = any(evaluation.plan.rules[user].product for user in reached)
    if not product and not any(len(evaluation.plan.random_operands(user)) > 1 for user in reached):
        return False
    return _averages_all_behind(evaluation, node) or (product and _average_behind(evaluation, node) is not None)


def _averages_all_behind(evaluation: Evaluation, node: Node) -> bool:
    """True if the average that a value comes from is one of all positions."""
    average = _average_behind(evaluation, node)
    if average is None or _pools_by_attention(evaluation, average):
        return average is not None
    x, result = (first_moments(evaluation, value) for value in (average.operands[0], average))
    return x is not None and result is not None and averages_all(x, average.operands[0], result)


def _average_behind(evaluation: Evaluation, node: Node) -> Node | None:
    """The average that a value comes from by linear layers and functions."""
    rule = evaluation.plan.rules.get(node)
    while rule is not None and not rule.averages and not _pools_by_attention(evaluation, node):
        operands = evaluation.plan.random_operands(node)
        if len(operands) != 1 or not (rule.linear or _passes(evaluation, node, rule)):
            return None
        node = operands[0]
        rule = evaluation.plan.rules.get(node)
    return node if rule is not None else None


def _pools_by_attention(evaluation: Evaluation, node: Node) -> bool:
    """True if a node is attention by constant queries: averages over all positions, the same way for every input."""
    return operation_of(node) == "attention" and not evaluation.plan.random(node.args[0])


def _compares(evaluation: Evaluation, node: Node) -> bool:
    """True if a value comes from inner products of random vectors alone, each step by operations on one value."""
    operands, rule = evaluation.plan.random_operands(node), evaluation.plan.rules.get(node)
    if rule is None:
        return False
    if len(operands) == 1 and not _normalizes(node, rule):
        return _compares(evaluation, operands[0])
    if rule.product and rule.kind == "rule":
        return len(operands) == 2 and not any(_is_softmax(evaluation, operand) for operand in operands)
    return rule.kind == "structural" and all(_compares(evaluation, operand) for operand in operands)


def _is_softmax(evaluation: Evaluation, node: Node) -> bool:
    """True if a value is one of softmax, moved or scaled at most: weights of an average."""
    operands, rule = evaluation.plan.random_operands(node), evaluation.plan.rules.get(node)
    if rule is None or rule.operation == "softmax":
        return rule is not None
    return _passes(evaluation, node, rule) and len(operands) == 1 and _is_softmax(evaluation, operands[0])


def _power(evaluation: Evaluation, node: Node) -> float:
    """The variance of a value, averaged over its elements."""
    moments = first_moments(evaluation, node)
    return 0.0 if moments is None else float(moments.var.double().mean())


def _prepares_data(evaluation: Evaluation, node: Node) -> bool:
    """True if no parameter has a part in a value, in a model that has parameters."""
    with_parameters = _learned(evaluation.plan.program)
    return bool(with_parameters) and node not in with_parameters


def _learned(program: Program) -> set[Node]:
    """Every node that depends on a parameter."""

    def collect() -> set[Node]:
        state = program.state.items()
        nodes = {node for node, name in state if isinstance(tensor_at(program.model, name), nn.Parameter)}
        for node in program.nodes:
            has_parameters = isinstance(node.target, Leaf) and any(True for _ in node.target.module.parameters())
            if has_parameters or any(operand in nodes for operand in node.operands):
                nodes.add(node)
        return nodes

    return program.once("learned", collect)


def _stands_on_token(evaluation: Evaluation, node: Node) -> bool:
    """True if a value is a learned constant, or a sum of one and of smaller values with learned factors."""
    node = _unmoved(evaluation, node)
    if not evaluation.plan.random(node):
        return node in _learned(evaluation.plan.program)
    return _token_of(evaluation, node) is not None


def _token_of(evaluation: Evaluation, node: Node) -> Node | None:
    """The term of a sum that stands on a learned constant, where the other is scaled down beside it."""
    rule = evaluation.plan.rules.get(node)
    terms = node.args[:2]
    if rule is None or rule.signs is None or not all(isinstance(term, Node) for term in terms):
        return None
    for token, branch in (terms, terms[::-1]):
        candidate = _scaled(evaluation, branch) and _stands_on_token(evaluation, token)
        if candidate and _square(evaluation, token) > _square(evaluation, branch):
            return token  # type: ignore[no-any-return]
    return None


def _scaled(evaluation: Evaluation, node: Node) -> bool:
    """True if a random value is the product of another one and of a learned factor."""
    node = _unmoved(evaluation, node)
    rule, random = evaluation.plan.rules.get(node), evaluation.plan.random_operands(node)
    if rule is None or not rule.product or rule.kind != "elementwise" or len(random) != 1:
        return False
    return any(operand in _learned(evaluation.plan.program) for operand in node.operands if operand not in random)


def _unmoved(evaluation: Evaluation, node: Node) -> Node:
    """The value that a node only moves, or drops elements of."""
    rule, random = evaluation.plan.rules.get(node), evaluation.plan.random_operands(node)
    moves = rule is not None and (rule.kind == "structural" or rule.copies or rule.noise)
    return _unmoved(evaluation, random[0]) if moves and len(random) == 1 else node


def _square(evaluation: Evaluation, node: Node) -> float:
    """Mean square of a value."""
    value = evaluation.value(node)
    if isinstance(value, Moments):
        return float((value.mean.double().square() + value.var.double()).mean())
    return float(value.double().square().mean()) if isinstance(value, Tensor) else 0.0


@dataclass
class _ClassTokens:
    """Values that are made of class tokens alone, and where tokens lie in values that hold other positions too."""

    values: set[Node] = field(default_factory=set)
    spans: dict[Node, Span] = field(default_factory=dict)


def _of_tokens(evaluation: Evaluation, node: Node) -> bool:
    """True if a random value is made of class tokens alone."""
    program = evaluation.plan.program
    inputs = frozenset(filter(evaluation.plan.random, program.inputs))
    return node in program.once(("tokens", inputs), lambda: _class_tokens(evaluation.plan)).values


def _class_tokens(plan: Plan) -> _ClassTokens:
    """The class tokens of a program, in the order of execution: what each node holds follows from its operands."""
    tokens = _ClassTokens()
    for node in filter(plan.random, plan.program.nodes):
        if _made_of_tokens(plan, tokens, node):
            tokens.values.add(node)
        elif span := _joined(plan, tokens, node) if operation_of(node) == "cat" else _kept(plan, tokens, node):
            tokens.spans[node] = span
    return tokens


def _made_of_tokens(plan: Plan, tokens: _ClassTokens, node: Node) -> bool:
    """True if tokens are cut out here, or nothing else has a part; attention has the positions of its queries."""
    rule, operands = plan.rules.get(node), plan.random_operands(node)
    if operation_of(node) == "attention":
        return _is_token(plan, tokens, node.args[0])
    if rule is not None and rule.product and rule.kind == "rule":
        return node.args[0] in tokens.values
    cut = _cut(node)
    if cut is not None and (span := tokens.spans.get(node.args[0])):
        return cut[0] == span[0] and set(cut[1]) <= set(span[1])
    return bool(operands) and tokens.values.issuperset(operands)


def _is_token(plan: Plan, tokens: _ClassTokens, node: Node) -> bool:
    return node in tokens.values or (not plan.random(node) and node in _learned(plan.program))


def _cut(node: Node) -> Span | None:
    """The axis that a slice cuts, and the positions that it keeps."""
    if operation_of(node) not in ("slice", "select"):
        return None
    x, axis, *ends = (*node.args, 0)[: max(2, len(node.args))]
    extents = x.info.shape
    if operation_of(node) == "select":
        index = ends[0] % extents[axis]
        return axis % len(extents), range(index, index + 1)
    return axis % len(extents), range(extents[axis])[slice(*(*ends, None, None)[:3])]


def _joined(plan: Plan, tokens: _ClassTokens, node: Node) -> Span | None:
    """Where the first tokens lie in what is joined."""
    operands, axis = node.args[0], (*node.args, 0)[1] % len(node.info.shape)
    start = 0
    for operand in operands:
        shape = operand.info.shape
        extent = 0 if shape == (0,) else shape[axis]  # torch skips empty vectors
        if _is_token(plan, tokens, operand):
            return axis, range(start, start + extent)
        start += extent
    return None


def _kept(plan: Plan, tokens: _ClassTokens, node: Node) -> Span | None:
    """Tokens stay where they are behind functions of each position, and in sums, as those of a residual stream."""
    rule = plan.rules.get(node)
    held = [operand for operand in plan.random_operands(node) if operand in tokens.spans]
    if rule is None or not held or not (rule.signs is not None or _by_position(node, rule)):
        return None
    axis, positions = tokens.spans[held[0]]
    same = node.info.shape[:-1] == held[0].info.shape[:-1] and axis < len(node.info.shape) - 1
    return (axis, positions) if same else None


def _by_position(node: Node, rule: Rule) -> bool:
    """True if an operation does the same at every position, and reads nothing of the others."""
    function = rule.kind == "elementwise" or rule.copies or rule.noise
    return function or rule.channels == -1 or rule.operation == "slice"
