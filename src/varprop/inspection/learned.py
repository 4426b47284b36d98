"""What in a model is learned: which values depend on parameters, and which of them are constants to begin with.

What is made of the input without any parameter, as by a fixed transform in front of the first layer, is preparation of
the data. A class token is a learned constant; blocks add to it what they read from the image, and where they scale that
down by learned factors (layer scale) the token starts as the constant it is, on purpose.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..engine.evaluation import Evaluation as Walk
from ..graph.leaf import Leaf
from ..graph.node import Node
from ..graph.program import Program, tensor_at
from ..moments import Moments
from ..rules.registry import Rule


def prepares_data(walk: Walk, node: Node) -> bool:
    """Whether no parameter has a part in a value, in a model that has parameters."""
    found = learned(walk.plan.program)
    return bool(found) and node not in found


def learned(program: Program) -> set[Node]:
    """Every node that a parameter has a part in."""
    return program.once("learned", lambda: _found(program))


def _stands_on_token(walk: Walk, node: Node) -> bool:
    """Whether a value is a learned constant, or a sum of one and of smaller values with learned factors."""
    node = _unmoved(walk, node)
    if not walk.plan.random(node):
        return node in learned(walk.plan.program)
    return token_of(walk, node) is not None


def token_of(walk: Walk, node: Node) -> Node | None:
    """The term of a sum that stands on a learned constant, where the other is scaled down beside it."""
    rule = walk.plan.rules.get(node)
    terms = node.args[:2]
    if rule is None or rule.signs is None or not all(isinstance(term, Node) for term in terms):
        return None
    for token, other in (terms, terms[::-1]):
        if _scaled(walk, other) and _stands_on_token(walk, token) and _square(walk, token) > _square(walk, other):
            return token  # type: ignore[no-any-return]
    return None


def _found(program: Program) -> set[Node]:
    found = {node for node, name in program.state.items() if isinstance(tensor_at(program.model, name), nn.Parameter)}
    for node in program.nodes:
        own = isinstance(node.target, Leaf) and any(True for _ in node.target.module.parameters())
        if own or any(operand in found for operand in node.operands):
            found.add(node)
    return found


def _scaled(walk: Walk, node: Node) -> bool:
    """Whether a random value is the product of another one and of a learned factor."""
    node = _unmoved(walk, node)
    rule, random = walk.plan.rules.get(node), walk.plan.random_operands(node)
    if rule is None or not rule.product or rule.kind != "elementwise" or len(random) != 1:
        return False
    return any(operand in learned(walk.plan.program) for operand in node.operands if operand not in random)


def _unmoved(walk: Walk, node: Node) -> Node:
    """The value that a node only moves, or drops elements of."""
    rule, random = walk.plan.rules.get(node), walk.plan.random_operands(node)
    return _unmoved(walk, random[0]) if rule is not None and len(random) == 1 and _moves(rule) else node


def _moves(rule: Rule) -> bool:
    return rule.kind == "structural" or rule.copies or rule.noise


def _square(walk: Walk, node: Node) -> float:
    """Mean square of a value."""
    value = walk.value(node)
    if isinstance(value, Moments):
        return float((value.mean.double().square() + value.var.double()).mean())
    return float(value.double().square().mean()) if isinstance(value, Tensor) else 0.0
