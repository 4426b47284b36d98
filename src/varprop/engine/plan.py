"""What can be known of a captured graph before any number is propagated."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import MissingRule
from ..graph.capture import Program
from ..graph.leaf import Leaf
from ..graph.node import Form, Node, nodes_in, resolve
from ..rules.registry import RANDOM, Rule, lookup

aten = torch.ops.aten


@dataclass
class Plan:
    """Which nodes are random, on what they depend, and which rule handles each.

    Attributes:
        program: The captured model.
        sources: For every random node, the inputs and random numbers it depends on.
        root: For every random node, the node of which it is a function element by element; itself for most. A maximal
            cluster of elementwise operations with one random source is thus one function of one variable.
        rules: The rule of every random node that is computed.
        missing: Random nodes without a rule.
        skips: For a rectifier of a sum with one rectified term, as at the end of a residual block: that term and the
            other.
    """

    program: Program
    sources: dict[Node, frozenset[Node]] = field(default_factory=dict)
    root: dict[Node, Node] = field(default_factory=dict)
    rules: dict[Node, Rule] = field(default_factory=dict)
    missing: list[Node] = field(default_factory=list)
    skips: dict[Node, tuple[Node, Node]] = field(default_factory=dict)

    @functools.cached_property
    def entangled(self) -> set[Node]:
        """Random nodes some of whose elements are copies or functions of one another, as after an ``expand``."""
        found: set[Node] = set()
        for node in self.program.nodes:
            if self.random(node) and _entangles(self, node, found):
                found.add(node)
        return found

    def random(self, node: Any) -> bool:
        """Whether a node's value is random."""
        return node in self.sources

    def shares_ancestor(self, node: Node) -> bool:
        """Whether two random operands of a node depend on a common source."""
        seen: set[Node] = set()
        for operand in self.random_operands(node):
            if seen & self.sources[operand]:
                return True
            seen |= self.sources[operand]
        return False

    def reads_one_twice(self, node: Node) -> bool:
        """Whether a random operand is read at two places, as in ``x @ x``."""
        return sum(map(self.random, node.reads)) > len(self.random_operands(node))

    def random_operands(self, node: Node) -> list[Node]:
        """The distinct random nodes a node reads."""
        return [operand for operand in node.operands if operand in self.sources]

    def swings(self, node: Node) -> bool:
        """Whether a node is a function of an earlier random node that rises and falls for ever."""
        if not self.inside_cluster(node):
            return False
        return self.rules[node].swings or any(self.swings(operand) for operand in self.random_operands(node))

    def inside_cluster(self, node: Node) -> bool:
        """Whether a node is an elementwise function of an earlier random node."""
        return self.root.get(node, node) is not node


def make_plan(program: Program, random_inputs: Iterable[Node]) -> Plan:
    """Follow randomness from the inputs through the graph."""
    plan = Plan(program)
    for node in random_inputs:
        plan.sources[node], plan.root[node] = frozenset([node]), node
    for node in program.nodes:
        _visit(plan, node)
    return plan


def rule_of(node: Node) -> Rule | None:
    """The rule for a node, by its operation or by the class of the module it stands for."""
    return lookup(type(node.target.module) if isinstance(node.target, Leaf) else node.target)


def _visit(plan: Plan, node: Node) -> None:
    operands, rule = plan.random_operands(node), rule_of(node)
    if rule and rule.kind == "source":
        plan.sources[node], plan.root[node], plan.rules[node] = frozenset([node]), node, rule
        return
    if rule is None and not operands and _draws(node):
        plan.sources[node], plan.root[node] = frozenset([node]), node
        plan.missing.append(node)
        return
    if rule and not operands and _drops(node, rule):
        plan.sources[node], plan.root[node], plan.rules[node] = frozenset([node]), node, rule
        return
    if not operands or (rule and rule.kind == "constant"):
        return
    plan.sources[node] = frozenset().union(*(plan.sources[operand] for operand in operands))
    roots = {plan.root[operand] for operand in operands}
    clustered = rule is not None and rule.kind == "elementwise" and len(roots) == 1
    plan.root[node] = roots.pop() if clustered else node
    if node.target is operator.getitem:
        return
    several = rule is not None and rule.kind == "elementwise" and not clustered
    if rule is None or (several and not _combines(node, rule)) or not _handles(plan, node, rule):
        plan.missing.append(node)
    else:
        plan.rules[node] = rule
        if clustered and (terms := _skip(plan, node)) is not None:
            plan.skips[node] = terms


def _combines(node: Node, rule: Rule) -> bool:
    """Whether a rule can combine independent values; two truth values add up to one, which is no sum."""
    truth = isinstance(node.form, Form) and node.form.dtype is torch.bool
    return rule.independent is not None and not (truth and rule.signs is not None)


def _draws(node: Node) -> bool:
    """Whether an operation draws random numbers, which must not count as constants; places to read from may."""
    return _is_floating(node) and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _drops(node: Node, rule: Rule) -> bool:
    """Whether an operation drops elements at random, as dropout does in training."""
    if isinstance(node.target, Leaf):
        return "Dropout" in type(node.target.module).__name__ and node.target.module.training
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    return rule.kind == "rule" and "dropout" in str(node.packet) and train is not False


def _entangles(plan: Plan, node: Node, entangled: set[Node]) -> bool:
    """Whether a node copies elements, joins functions of one value, or has operands in which this was done."""
    if node.target is operator.getitem:
        return node.operands[0] in entangled
    rule = plan.rules.get(node)
    if rule is None or not keeps_elements(rule):
        return rule is not None and (rule.entangles or _spreads_bias(plan, node, rule))
    if any(operand in entangled for operand in node.operands):
        return True
    random = [operand for operand in node.reads if plan.random(operand)]
    if rule.kind == "structural" and len({plan.root[operand] for operand in random}) < len(random):
        return True
    if rule.repeats_elements is not None and plan.random(node.args[rule.repeats_elements]):
        return _repeats_elements(plan.program, node, node.args[rule.repeats_elements])
    copies = rule.selects and _count(node) > sum(map(_count, node.reads))
    broadcasts = rule.kind != "structural" or rule.overwrites
    broadcast = broadcasts and any(_count(node) > _count(operand) for operand in random)
    return copies or (broadcast and not plan.shares_ancestor(node))  # which is marked at once


def keeps_elements(rule: Rule) -> bool:
    """Whether every element of a result comes from one of each argument, or from its neighbours by interpolation."""
    moves = rule.kind != "rule" and not rule.adds
    return moves or rule.noise or rule.resizes or rule.batch_norm is not None


def _spreads_bias(plan: Plan, node: Node, rule: Rule) -> bool:
    """Whether a random bias is added to more than one element."""
    bias = node.args[rule.bias] if rule.bias is not None and len(node.args) > rule.bias else None
    return isinstance(bias, Node) and plan.random(bias) and _count(bias) < _count(node)


def _repeats_elements(program: Program, node: Node, x: Node) -> bool:
    """Whether an operation gives an element of an argument twice; taken to, unless constants decide where they go."""
    known = dict(program.constants)
    numbers = torch.arange(1, _count(x) + 1, dtype=torch.float64, device=x.form.device).view(x.form.shape)

    def result(given: Tensor) -> Tensor:
        def value(operand: Node) -> Any:
            if operand is x:
                return given
            return given.new_zeros(operand.form.shape) if _is_floating(operand) else _constant(operand, known)

        found: Tensor = _run(node, value)
        return found.flatten()

    try:
        first, second = result(numbers), result(-numbers)
    except KeyError:
        return True
    times = first[first != second].long().bincount()  # what comes from elsewhere stays the same
    return bool((times > 1).any())


def _run(node: Node, value: Callable[[Node], Any]) -> Any:
    args, kwargs = resolve((node.args, node.kwargs), value)
    return node.target(*args, **kwargs)


def _constant(node: Node, known: dict[Node, Any]) -> Any:
    """The value of a node that the known constants decide; a KeyError where inputs, parameters or buffers do."""
    if node not in known and node.target is not None:
        known[node] = _run(node, lambda operand: _constant(operand, known))
    return known[node]


def _count(node: Node) -> int:
    return math.prod(node.form.shape) if isinstance(node.form, Form) else 0


def _skip(plan: Plan, node: Node) -> tuple[Node, Node] | None:
    """The rectified term and the other, if a node is the rectifier of a sum of two that has exactly one."""
    total = node.args[0]
    if not (_is(node, aten.relu) and _is(total, aten.add)) or plan.inside_cluster(total) or total.kwargs:
        return None
    terms = list(total.args[:2])
    if len(plan.random_operands(total)) != 2 or _is(terms[0], aten.relu) == _is(terms[1], aten.relu):
        return None
    return (terms[0], terms[1]) if _is(terms[0], aten.relu) else (terms[1], terms[0])


def _is(node: Any, packet: Any) -> bool:
    return isinstance(node, Node) and node.packet is packet


def _handles(plan: Plan, node: Node, rule: Rule) -> bool:
    """Whether a rule knows what to do with a node's arguments; a random index or mask moves nothing predictably."""
    if rule.kind == "structural":
        return all(not plan.random(index) or _is_floating(index) for index in nodes_in(node.args[1:]))
    if rule.handles is None:
        return True
    args, kwargs = resolve((node.args, node.kwargs), lambda operand: RANDOM if plan.random(operand) else None)
    return rule.handles(*args, **kwargs)


def _is_floating(node: Node) -> bool:
    return isinstance(node.form, Form) and node.form.is_floating


BY_SAMPLING = 'pass on_missing="sample" to estimate them by sampling'


def require_complete(plan: Plan, otherwise: str = BY_SAMPLING) -> None:
    """Raise `MissingRule`, once, for everything on the random path that has no rule.

    Args:
        plan: What is to be run.
        otherwise: What can be done in place of writing the rules.
    """
    if plan.missing:
        raise MissingRule(f"{describe_missing(plan.missing)}\n\nWrite these rules, or {otherwise}.")


def describe_missing(missing: list[Node]) -> str:
    """Every operation without a rule: count, module, source line, and the stub of the rule to write."""
    counts = Counter(str(node.target) for node in missing)
    first = {str(node.target): node for node in reversed(missing)}
    parts = [f"{len(counts)} operation(s) on the random path have no rule:"]
    for target, count in counts.most_common():
        node = first[target]
        parts.append(f"\n{target}, {count} time(s), first in module '{node.module}'")
        parts.append(f"  at {node.line or 'unknown line'}")
        parts.append("  " + _stub(node).replace("\n", "\n  "))
    return "\n".join(parts)


def _stub(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return f"@vp.rule({type(getattr(node.target, 'module', node.target)).__name__})\ndef rule(module, x): ..."
    names = [argument.name for argument in schema.arguments]
    given = ", ".join(
        f"{name}: vp.Moments" if isinstance(value, Node) and value in node.operands[:1] else name
        for name, value in zip(names, node.args, strict=False)
    )
    packet = str(node.target.overloadpacket)
    function = packet.split(".")[-1].strip("_") + "_rule"  # some operations are called like keywords
    return f"@vp.rule(torch.ops.{packet})\ndef {function}({given}) -> vp.Moments: ..."
