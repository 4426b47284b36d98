"""Class tokens: positions that are learned constants when they join the others, and read from them by attention.

All they know of the input are averages over the other positions, which hardly vary; no more does what is
made of tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engine.evaluation import Evaluation as Walk
from ..engine.plan import Plan, operation_of
from ..graph.node import Node
from ..rules.registry import Rule
from .learned import learned

Span = tuple[int, range]  # an axis, and positions along it


@dataclass
class _ClassTokens:
    """Values that are made of class tokens alone, and where tokens lie in values that hold other positions too."""

    values: set[Node] = field(default_factory=set)
    spans: dict[Node, Span] = field(default_factory=dict)


def of_tokens(walk: Walk, node: Node) -> bool:
    """Whether a random value is made of class tokens alone."""
    program = walk.plan.program
    inputs = frozenset(filter(walk.plan.random, program.inputs))
    return node in program.once(("tokens", inputs), lambda: _found(walk.plan)).values


def _found(plan: Plan) -> _ClassTokens:
    tokens = _ClassTokens()
    for node in filter(plan.random, plan.program.nodes):
        if _made_of_tokens(plan, tokens, node):
            tokens.values.add(node)
        elif span := _joined(plan, tokens, node) if operation_of(node) == "cat" else _kept(plan, tokens, node):
            tokens.spans[node] = span
    return tokens


def _made_of_tokens(plan: Plan, tokens: _ClassTokens, node: Node) -> bool:
    """Whether tokens are cut out here, or nothing else has a part; attention has the positions of its queries."""
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
    return node in tokens.values or (not plan.random(node) and node in learned(plan.program))


def _cut(node: Node) -> Span | None:
    """What a slice keeps of its argument."""
    if operation_of(node) not in ("slice", "select"):
        return None
    x, axis, *ends = (*node.args, 0)[: max(2, len(node.args))]
    extents = x.form.shape
    if operation_of(node) == "select":
        index = ends[0] % extents[axis]
        return axis % len(extents), range(index, index + 1)
    return axis % len(extents), range(extents[axis])[slice(*(*ends, None, None)[:3])]


def _joined(plan: Plan, tokens: _ClassTokens, node: Node) -> Span | None:
    """Where the first tokens lie in what is joined."""
    parts, axis = node.args[0], (*node.args, 0)[1] % len(node.form.shape)
    start = 0
    for part in parts:
        extent = part.form.shape[axis] if part.form.shape != (0,) else 0  # torch takes an empty vector for nothing
        if _is_token(plan, tokens, part):
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
    same = node.form.shape[:-1] == held[0].form.shape[:-1] and axis < len(node.form.shape) - 1
    return (axis, positions) if same else None


def _by_position(node: Node, rule: Rule) -> bool:
    """Whether an operation does the same at every position, and reads nothing of the others."""
    function = rule.kind == "elementwise" or rule.copies or rule.noise
    return function or rule.channels == -1 or rule.operation == "slice"
