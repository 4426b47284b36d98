"""What can be known of a captured graph before any number is propagated."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import MissingRule
from ..graph.node import Node, TensorInfo, nodes_in, resolve
from ..graph.program import Program
from ..graph.tracing import Leaf
from ..rules.registry import RANDOM, Operation, Rule, lookup


@dataclass
class Plan:
    """Which nodes are random, on what they depend, and which rule handles each."""

    program: Program  # the captured model
    # for every random node, the inputs and random numbers it depends on
    sources: dict[Node, frozenset[Node]] = field(default_factory=dict)
    # for every random node, the node of which it is a function element by element; itself for most. A maximal
    # cluster of elementwise operations with one random source is thus one function of one variable
    root: dict[Node, Node] = field(default_factory=dict)
    rules: dict[Node, Rule] = field(default_factory=dict)  # the rule of every random node that is computed
    missing: list[Node] = field(default_factory=list)  # random nodes without a rule
    # nodes that are not random but follow from one draw, such as places drawn at random to read from
    drawn: set[Node] = field(default_factory=set)
    # for a rectifier of a sum with one rectified term, as at the end of a residual block: that term and the other
    skips: dict[Node, tuple[Node, Node]] = field(default_factory=dict)

    @functools.cached_property
    def entangled(self) -> set[Node]:
        """Random nodes some of whose elements are copies or functions of one another, as after an ``expand``."""
        return self._spread(_entangles)

    @functools.cached_property
    def overlapping(self) -> set[Node]:
        """Random nodes whose elements are averages or ranks of windows that overlap."""
        return self._spread(_overlaps)

    @functools.cached_property
    def bent(self) -> set[Node]:
        """Random nodes that are not Gaussian even where what layers give is: functions, products, ranks, norms."""
        return self._spread(_is_bent)

    def _spread(self, test: Callable[[Plan, Node, set[Node]], bool]) -> set[Node]:
        """The random nodes that pass a test, which knows of those before them which did."""
        nodes: set[Node] = set()
        for node in self.program.nodes:
            if self.random(node) and test(self, node, nodes):
                nodes.add(node)
        return nodes

    def random(self, node: Any) -> bool:
        """True if a node's value is random."""
        return node in self.sources

    def shares_ancestor(self, node: Node) -> bool:
        """True if two random operands of a node depend on a common source."""
        seen: set[Node] = set()
        for operand in self.random_operands(node):
            if seen & self.sources[operand]:
                return True
            seen |= self.sources[operand]
        return False

    def reads_one_twice(self, node: Node) -> bool:
        """True if a random operand is read at two places, as in ``x @ x``."""
        return sum(map(self.random, node.reads)) > len(self.random_operands(node))

    def random_operands(self, node: Node) -> list[Node]:
        """The distinct random nodes a node reads."""
        return [operand for operand in node.operands if operand in self.sources]

    def swings(self, node: Node) -> bool:
        """True if a node is a function of an earlier random node that rises and falls for ever."""
        if not self.inside_cluster(node):
            return False
        return self.rules[node].swings or any(self.swings(operand) for operand in self.random_operands(node))

    def mixture(self, node: Node) -> tuple[Node, list[tuple[float, float, float]]] | None:
        """The argument of a dropout, and the chance, slope and offset of every outcome; None for other nodes."""
        node = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
        rule = self.rules.get(node)
        if rule is None or rule.mixture is None:
            return None
        if isinstance(node.target, Leaf):
            args, kwargs = node.target.fill(node.args)
            with node.target.as_captured() as module:
                return node.operands[0], rule.mixture(module, *args, **kwargs)
        return node.operands[0], rule.mixture(*node.args, **node.kwargs)

    def inside_cluster(self, node: Node) -> bool:
        """True if a node is an elementwise function of an earlier random node."""
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


def operation_of(node: Any) -> Operation | None:
    """The name by which the operation of a node is looked for; None if it has none, and for what is not a node."""
    rule = rule_of(node) if isinstance(node, Node) else None
    return None if rule is None else rule.operation


def _visit(plan: Plan, node: Node) -> None:
    """Find out whether a node is random, on what it depends, and which rule computes it."""
    operands, rule = plan.random_operands(node), rule_of(node)
    if _draws_places(plan, node, rule) or (not operands and plan.drawn.intersection(node.operands)):
        plan.drawn.add(node)
        return
    if rule and (rule.kind == "source" or (not operands and _drops(node, rule))):
        plan.sources[node], plan.root[node], plan.rules[node] = frozenset([node]), node, rule
        return
    # floating point numbers that are drawn must not count as constants; whole ones may
    if rule is None and not operands and _is_floating(node) and _is_seeded(node):
        plan.sources[node], plan.root[node] = frozenset([node]), node
        plan.missing.append(node)
        return
    if not operands or (rule and rule.kind == "constant"):
        return
    plan.sources[node] = frozenset().union(*(plan.sources[operand] for operand in operands))
    roots = {plan.root[operand] for operand in operands}
    clustered = rule is not None and rule.kind == "elementwise" and len(roots) == 1
    clustered = clustered and not (rule and _joins_parameter(plan, node, rule))
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


def _joins_parameter(plan: Plan, node: Node, rule: Rule) -> bool:
    """True if a random parameter is a factor or a term beside another value: the result is no function of it alone."""
    joins = (rule.product or rule.signs is not None) and len(node.operands) > 1
    return joins and any(operand in plan.program.state for operand in plan.random_operands(node))


def _combines(node: Node, rule: Rule) -> bool:
    """True if a rule can combine independent values; two truth values add up to one, which is no sum."""
    truth = isinstance(node.info, TensorInfo) and node.info.dtype is torch.bool
    return rule.independent is not None and not (truth and rule.signs is not None)


def _draws_places(plan: Plan, node: Node, rule: Rule | None) -> bool:
    """True if a node holds whole numbers that depend on random draws of the model's own, and on nothing else random.

    As ``randperm`` draws them, or the order of random numbers; they say where to read, and have no mean and variance.
    """
    if not isinstance(node.info, TensorInfo) or node.info.dtype is not torch.int64:
        return False
    operands = plan.random_operands(node)
    if rule is None and not operands:
        return _is_seeded(node)
    parent = plan.rules.get(node.args[0]) if node.target is operator.getitem else None
    ranks = node.target is not operator.getitem or (parent is not None and parent.order_statistic)
    inner = all(source.target is not None for operand in operands for source in plan.sources[operand])
    return rule is None and ranks and inner


def _is_seeded(node: Node) -> bool:
    """True if an operation of torch draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _drops(node: Node, rule: Rule) -> bool:
    """True if an operation draws random numbers beside what it computes, as dropout does in training."""
    if rule.draws(*node.args, **node.kwargs):
        return True
    if isinstance(node.target, Leaf):
        return "Dropout" in type(node.target.module).__name__ and node.target.modes[0]
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    return rule.kind == "rule" and "dropout" in str(node.packet) and train is not False


def _entangles(plan: Plan, node: Node, entangled: set[Node]) -> bool:
    """True if a node copies elements, joins functions of one value, or has an operand in which this was done."""
    if node.target is operator.getitem:
        return node.operands[0] in entangled
    rule = plan.rules.get(node)
    if rule is None or not keeps_elements(node, rule):
        shared = rule is not None and rule.linear and plan.random(node.args[1])  # all positions meet the same weights
        return shared or (rule is not None and (rule.entangles or _spreads_bias(plan, node, rule)))
    if any(operand in entangled for operand in node.operands) or _drops_together(plan, node, rule):
        return True
    random = [operand for operand in node.reads if plan.random(operand)]
    if rule.kind == "structural" and len(random) > 1 and _joins_copies(plan, node, random):
        return True
    if rule.repeats_elements is not None and plan.random(node.args[rule.repeats_elements]):
        return _repeats_elements(plan, node, node.args[rule.repeats_elements])
    selects = rule.selects or not isinstance(node.info, TensorInfo)  # a list of views can only select
    # beside its result a dropout gives its mask, which is no copy
    size = _count(node) if rule.kind == "structural" else _count_of(_first_info(node))
    copies = selects and size > sum(map(_count, node.reads))
    broadcasts = rule.kind != "structural" or rule.overwrites
    broadcast = broadcasts and any(size > _count(operand) for operand in random)
    return copies or (broadcast and not plan.shares_ancestor(node))  # which is marked at once


def _overlaps(plan: Plan, node: Node, overlapping: set[Node]) -> bool:
    """True if a node has windows that overlap, or the elements of an operand that has."""
    rule = plan.rules.get(node)
    if node.target is operator.getitem or (rule is not None and keeps_elements(node, rule)):
        return any(operand in overlapping for operand in node.operands)
    return rule is not None and bool(rule.overlaps(*node.args, **node.kwargs))


def _is_bent(plan: Plan, node: Node, bent: set[Node]) -> bool:
    """True if a node is curved, a sum of few products, or one of few elements of an operand that is no Gaussian."""
    operands, rule = plan.random_operands(node), plan.rules.get(node)
    if node.target is operator.getitem or rule is None:
        return node.target is operator.getitem and operands[0] in bent
    mixture = plan.mixture(node)
    if rule.skews(*node.args, **node.kwargs) or rule.order_statistic or (mixture is not None and len(mixture[1]) > 1):
        return True
    if rule.kind == "source":
        return rule.drawn is not None or rule.outcomes is not None
    if rule.kind == "elementwise" and is_curved(plan, node, rule):
        return True
    few = _adds_few(plan, node, rule)
    products = few and (rule.operation in ("matmul", "einsum") and sum(map(plan.random, node.reads)) > 1)
    passes = keeps_elements(node, rule) or (few and (rule.averages or rule.entangles))
    return products or (passes and any(operand in bent for operand in operands))


FEW = 16  # terms whose sum is not Gaussian if they are not: the std of a rectified sum of 16 products is 1 % off


def _adds_few(plan: Plan, node: Node, rule: Rule) -> bool:
    """True if elements of a result are sums of few: of so many of an operand, or of products as in an inner product."""
    first = plan.random_operands(node)[0]
    inner = rule.operation == "matmul" and isinstance(node.args[0], Node) and isinstance(node.args[0].info, TensorInfo)
    terms = node.args[0].info.shape[-1] if inner else _count(first) / max(1, _count(node))
    return bool(terms < FEW)


def is_curved(plan: Plan, node: Node, rule: Rule) -> bool:
    """True if an elementwise operation is neither a line nor a sum: a product or a quotient of random values, too."""
    combines = rule.signs is None and sum(map(plan.random, node.reads)) > 1
    return combines or rule.affine is None


def _drops_together(plan: Plan, node: Node, rule: Rule) -> bool:
    """True if a dropout decides by one draw over several elements, those of a feature map."""
    mixture = None if rule.noise else plan.mixture(node)
    shape = _first_info(node).shape
    return mixture is not None and len(mixture[1]) > 1 and math.prod(shape) > math.prod(shape[:2])


def keeps_elements(node: Node, rule: Rule) -> bool:
    """True if every element of a result comes from one of each argument, or from its neighbours by interpolation."""
    moves = rule.kind != "rule" and not rule.adds(*node.args, **node.kwargs)
    return moves or rule.noise or rule.resizes or rule.mixture is not None or rule.batch_norm is not None


def _spreads_bias(plan: Plan, node: Node, rule: Rule) -> bool:
    """True if a random bias is added to more than one element."""
    bias = node.args[rule.bias] if rule.bias is not None and len(node.args) > rule.bias else None
    return isinstance(bias, Node) and plan.random(bias) and _count(bias) < _count(node)


def _joins_copies(plan: Plan, node: Node, operands: list[Node]) -> bool:
    """True if an element of an earlier value comes into a node by two of its operands, as itself or in functions of it.

    Elements count as distinct behind weights, as everywhere. Up to these the ways of all operands are followed back;
    where two meet, the elements of the value there are numbered, and the numbers are followed forward again.
    """
    upstream = [_upstream(plan, operand, set()) for operand in operands]
    times = Counter(node for reached in upstream for node in reached)
    shared = {node for node, count in times.items() if count > 1}
    # behind the first value that two operands share, they share all that it was made of
    meetings = set().union(*(_upstream(plan, operand, shared) for operand in operands)) & shared
    try:
        return any(_arrives_twice(plan, node, operands, source) for source in meetings)
    except KeyError:  # inputs, parameters or buffers decide where elements go
        return True


def _upstream(plan: Plan, node: Node, stop: set[Node]) -> set[Node]:
    """A node and the values of which its elements are elements or functions, followed back to weights or to `stop`."""
    reached, waiting = {node}, [node]
    while waiting:
        latest = waiting.pop()
        if latest not in stop:
            fresh = [operand for operand in _without_weights(plan, latest) if operand not in reached]
            reached.update(fresh)
            waiting += fresh
    return reached


def _without_weights(plan: Plan, node: Node) -> list[Node]:
    """The random operands of a node that weights do not mix; none for those of a layer, and for those of a module."""
    rule = plan.rules.get(node)
    if node.target is operator.getitem:
        return plan.random_operands(node)
    if rule is None or rule.kind == "source" or isinstance(node.target, Leaf):
        return []
    constants = any(not plan.random(operand) and _is_floating(operand) for operand in node.operands)
    if keeps_elements(node, rule) or not constants or rule.normalizes(*node.args, **node.kwargs):
        return plan.random_operands(node)
    return []


def _arrives_twice(plan: Plan, node: Node, operands: list[Node], source: Node) -> bool:
    """True if an element of `source` comes into a node by two of its operands."""
    path = set().union(*(_upstream(plan, operand, {source}) for operand in operands))
    numbers = _Numbers(plan, source)
    for step in plan.program.nodes:
        if step in path and step is not source:
            numbers.follow(step)
    seen = numbers.none()
    for position, operand in enumerate(operand for operand in node.reads if plan.random(operand)):
        arrived = numbers.arrived(node, position, operand)
        if bool((seen & arrived).any()):
            return True
        seen |= arrived
    return False


class _Numbers:
    """Where the elements of one value go: numbered from 1, each node has tensors of the numbers at its elements.

    An element that is a function of several of them has as many tensors. Where an operation mixes elements, as pooling
    does, all numbers that enter it count as present anywhere in its result.
    """

    def __init__(self, plan: Plan, source: Node) -> None:
        self.plan, self.size, self.device = plan, _count(source), _first_info(source).device
        start = torch.arange(1, self.size + 1, dtype=torch.float64, device=self.device)
        infos = source.info if isinstance(source.info, (list, tuple)) else [source.info]
        pieces = start.split([_count_of(info) for info in infos])
        views = [
            piece.view(info.shape) if isinstance(info, TensorInfo) else None
            for piece, info in zip(pieces, infos, strict=True)
        ]
        self.at: dict[Node, list[Any]] = {source: [views if infos is source.info else views[0]]}
        self.mixed: dict[Node, Tensor] = {}  # which numbers are anywhere in a node
        self.known = dict(plan.program.constants)

    def none(self) -> Tensor:
        """No number."""
        return torch.zeros(self.size + 1, dtype=torch.bool, device=self.device)

    def follow(self, node: Node) -> None:
        """Work out the numbers of a node from those of its operands."""
        operands = [operand for operand in node.operands if operand in self.at or operand in self.mixed]
        rule = self.plan.rules.get(node)
        if node.target is operator.getitem:
            if node.args[0] in self.mixed:
                self.mixed[node] = self.mixed[node.args[0]]
            else:
                several = isinstance(self.at[node.args[0]][0], (list, tuple))
                self.at[node] = [n[node.args[1]] if several else n for n in self.at[node.args[0]]]
        elif not operands:
            return
        elif rule is None or not keeps_elements(node, rule) or any(operand in self.mixed for operand in operands):
            present = [self.mixed[o] if o in self.mixed else self._present(self.at[o]) for o in operands]
            self.mixed[node] = torch.stack(present).any(0)
        elif rule.kind == "structural":
            random = [operand for operand in node.reads if self.plan.random(operand)]
            self.at[node] = [
                self.moved(node, position, numbers)
                for position, operand in enumerate(random)
                for numbers in self.at.get(operand, ())
            ]
        else:
            shape, distinct = _first_info(node).shape, list[Tensor]()
            for numbers in (numbers.expand(shape) for operand in operands for numbers in self.at[operand]):
                if not any(torch.equal(numbers, earlier) for earlier in distinct):
                    distinct.append(numbers)
            self.at[node] = distinct

    def arrived(self, node: Node, position: int, operand: Node) -> Tensor:
        """Which numbers a node has from one of its random operands, told by its position among them."""
        if operand in self.mixed:
            return self.mixed[operand]
        return self._present([self.moved(node, position, numbers) for numbers in self.at.get(operand, ())])

    def _present(self, numbers: list[Any]) -> Tensor:
        present = self.none()
        for tensor in pytree.tree_leaves(numbers):
            present[tensor.flatten().long()] = True
        present[0] = False
        return present

    def moved(self, node: Node, position: int, numbers: Tensor) -> Any:
        """The numbers of one random operand after an operation that moves elements; 0 for elements of others."""
        rule = self.plan.rules[node]

        def result(numbers: Tensor) -> Any:
            turn = itertools.count()

            def value(operand: Node) -> Any:
                if self.plan.random(operand) and next(turn) == position:
                    return numbers
                if _is_floating(operand):
                    return torch.zeros(operand.info.shape, dtype=torch.float64, device=operand.info.device)
                return _constant(operand, self.known)

            args, kwargs = resolve((node.args, node.kwargs), value)
            return (rule.evaluate or node.target)(*args, **kwargs)

        # of numbers that the operation brings itself, as padding does, nothing is left
        first, second = result(numbers.contiguous()), result(-numbers.contiguous())
        return pytree.tree_map(lambda a, b: ((a - b) / 2).nan_to_num(0.0), first, second)


def _repeats_elements(plan: Plan, node: Node, x: Node) -> bool:
    """True if an operation returns an element of an argument twice, or if that depends on more than constants."""
    numbers, random = _Numbers(plan, x), [operand for operand in node.reads if plan.random(operand)]
    try:
        moved = numbers.moved(node, random.index(x), numbers.at[x][0])
    except KeyError:
        return True
    return bool((moved.flatten().long().bincount()[1:] > 1).any())


def _constant(node: Node, constants: dict[Node, Any]) -> Any:
    """The value of a node that the known constants decide; a KeyError where inputs, parameters, buffers or draws do."""
    if _is_seeded(node):
        raise KeyError(node)
    if node not in constants and node.target is not None:
        args, kwargs = resolve((node.args, node.kwargs), lambda operand: _constant(operand, constants))
        constants[node] = node.target(*args, **kwargs)
    return constants[node]


def _first_info(node: Node) -> TensorInfo:
    """Extents, dtype and device of the result of a node; of the first result if there are several."""
    info: TensorInfo = node.info if isinstance(node.info, TensorInfo) else node.info[0]
    return info


def _count(node: Node) -> int:
    """The number of elements of all results of a node."""
    return sum(map(_count_of, node.info)) if isinstance(node.info, (list, tuple)) else _count_of(node.info)


def _count_of(info: Any) -> int:
    return math.prod(info.shape) if isinstance(info, TensorInfo) else 0


def _skip(plan: Plan, node: Node) -> tuple[Node, Node] | None:
    """The rectified term and the other, if a node is the rectifier of a sum of two that has exactly one."""
    total = node.args[0]
    rule = rule_of(total) if isinstance(total, Node) else None
    adds = rule is not None and rule.signs == (1.0, 1.0) and not plan.inside_cluster(total) and not total.kwargs
    if operation_of(node) != "relu" or not adds:
        return None
    terms = list(total.args[:2])
    rectified = [operation_of(term) == "relu" for term in terms]
    if len(plan.random_operands(total)) != 2 or rectified[0] == rectified[1]:
        return None
    return (terms[0], terms[1]) if rectified[0] else (terms[1], terms[0])


def _handles(plan: Plan, node: Node, rule: Rule) -> bool:
    """True if a rule can deal with a node's arguments; a random index or mask moves nothing predictably."""
    if rule.kind == "structural":
        return all(not plan.random(index) or _is_floating(index) for index in nodes_in(node.args[1:]))
    if rule.handles is None:
        return True
    args, kwargs = resolve((node.args, node.kwargs), lambda operand: RANDOM if plan.random(operand) else None)
    return rule.handles(*args, **kwargs)


def _is_floating(node: Node) -> bool:
    return isinstance(node.info, TensorInfo) and node.info.is_floating


def require_complete(plan: Plan, otherwise: str = 'pass on_missing="sample" to estimate them by sampling') -> None:
    """Raise `MissingRule`, once, for all on the random path without a rule; `otherwise` says what else can be done."""
    if plan.missing:
        raise MissingRule(f"{describe_missing(plan.missing)}\n\nWrite these rules, or {otherwise}.")


def describe_missing(missing: list[Node]) -> str:
    """Every operation without a rule: count, module, source line, and the stub of the rule to write."""
    counts = Counter(str(node.target) for node in missing)
    first = {str(node.target): node for node in reversed(missing)}
    paragraphs = [f"{len(counts)} operation(s) on the random path have no rule:"]
    for target, count in counts.most_common():
        node = first[target]
        paragraphs.append(f"\n{target}, {count} time(s), first in module '{node.module}'")
        paragraphs.append(f"  at {node.line or 'unknown line'}")
        if isinstance(node.info, TensorInfo) and node.info.dtype.is_complex:
            paragraphs.append(
                "  gives complex numbers, and moments are those of real ones: keep the module that holds it whole with "
                "`@vp.rule(ThatModule)`"
            )
        else:
            paragraphs.append("  " + _stub(node).replace("\n", "\n  "))
    return "\n".join(paragraphs)


def _stub(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return f"@vp.rule({type(getattr(node.target, 'module', node.target)).__name__})\ndef rule(module, x): ..."
    names = [argument.name for argument in schema.arguments]
    signature = ", ".join(
        f"{name}: vp.Moments" if isinstance(value, Node) and value in node.operands[:1] else name
        for name, value in zip(names, node.args, strict=False)
    )
    packet = str(node.target.overloadpacket)
    function = packet.split(".")[-1].strip("_") + "_rule"  # some operations are called like keywords
    return f"@vp.rule(torch.ops.{packet})\ndef {function}({signature}) -> vp.Moments: ..."
