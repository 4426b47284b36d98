"""Why a result is approximate."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ..graph.node import Node, TensorInfo
from ..rules.registry import Rule
from .clusters import Clusters, steps_between
from .plan import Plan, is_curved, keeps_elements

INDEPENDENCE = "assumes independence of operands that share a random ancestor"
COPIES = "takes elements as independent that are copies or functions of one another, as after expand or upsampling"
OVERLAP = "takes averages or maxima of windows that overlap as independent: the std of their average is too small"
DIPPING = (
    "the maximum is taken before a function that dips, such as SiLU: mean within 0.15 std, std within 6 % while the "
    "means of what enters it are not below minus its std"
)
BENT = "compares functions of Gaussian values as if these were Gaussian: a maximum's std may be off by a factor of 5"
MAXIMUM = (
    "a function of a maximum takes it as Gaussian: std of a rectifier up to 6 % low while the means of what is "
    "compared are not below minus the std; of functions that bend more, such as those that saturate, off by factors"
)
GAUSSIAN = (
    "a function of what is no longer Gaussian (a product, a maximum or another rank, a norm, a function of Gaussian "
    "values that was moved or added to others, what a dropout leaves) is computed as if it were"
)
SKIP = (
    "the rectifier of a sum with a rectified term matches that term by two Gaussians: std within 7 %, mean within 0.08 "
    "std of the sum"
)
DROPPED = "takes what a dropout leaves as Gaussian: mean and std of a maximum may be off by the std"
PLACES = "depends on numbers that the model draws anew in every call, such as places to read: counts one draw of them"
TRUNCATION = "a cast to whole numbers cuts the fraction off, but is taken as a copy"
SWINGING = (
    "a function that swings is integrated at many points: mean and std within 2 % of the std while it swings no more "
    "than 5 times in a standard deviation of its argument, 100 times for less than 2,000 elements"
)


def reasons_of(plan: Plan, node: Node, arguments: Callable[[], tuple[Any, Any]]) -> list[str]:
    """Why the result of a node is approximate; what its rule says of itself may depend on the arguments."""
    rule = plan.rules[node]
    stated = rule.approximate
    if callable(stated):
        args, kwargs = arguments()
        stated = stated(*args, **kwargs)
    reasons = [INDEPENDENCE] if assumes_independence(plan, node, rule) else []
    reasons += [COPIES] if not keeps_elements(node, rule) and plan.entangled.intersection(node.operands) else []
    mixes = not keeps_elements(node, rule) and not rule.linear
    reasons += [OVERLAP] if mixes and plan.overlapping.intersection(node.operands) else []
    reasons += [SWINGING] if _integrates_swings(plan, node, rule) else []
    reasons += _reasons_of_order(plan, node, rule)
    reasons += [SKIP] if node in plan.skips else []
    reasons += [GAUSSIAN] if _bends_again(plan, node, rule) else []
    reasons += [DROPPED] if _reads_dropped(plan, node, rule) else []
    reasons += [PLACES] if plan.drawn.intersection(node.operands) else []
    reasons += [TRUNCATION] if _truncates(node, rule) else []
    return [*reasons, stated] if stated else reasons


def _integrates_swings(plan: Plan, node: Node, rule: Rule) -> bool:
    """True if a node is a function, and not just a line, of one that swings."""
    operands = plan.random_operands(node)
    line = rule.affine is not None and operands == [node.args[0]]
    return rule.kind == "elementwise" and not line and any(map(plan.swings, operands))


def _bends_again(plan: Plan, node: Node, rule: Rule) -> bool:
    """True if a node is a curved function of elements that are not Gaussian, and whose law is not followed."""
    if node in plan.skips:
        return not _rectifies_gaussian(plan, plan.skips[node][0]) or plan.skips[node][1] in plan.bent
    if rule.kind == "elementwise" and plan.inside_cluster(node):
        return is_curved(plan, node, rule) and _is_bent_root(plan, plan.root[node])
    squares = rule.repeats and plan.reads_one_twice(node)
    skews = rule.skews(*node.args, **node.kwargs) and not rule.multilinear
    curved = squares or skews or bool(rule.normalizes(*node.args, **node.kwargs))
    return curved and any(operand in plan.bent for operand in plan.random_operands(node))


def _rectifies_gaussian(plan: Plan, node: Node) -> bool:
    """True if a rectifier is one of a line of a Gaussian value, or has such a rectified value as a term itself."""
    if node in plan.skips:
        return True
    root = plan.root[node]
    bends = any(rule.affine is None for rule in _rules_between(Clusters(plan, {}), [root], [node.args[0]]))
    return not bends and not _is_bent_root(plan, root)


def _is_bent_root(plan: Plan, root: Node) -> bool:
    """True if functions of a value take it as Gaussian, which it is not; of draws and dropouts they know the law."""
    if root not in plan.bent:
        return False
    if (mixture := plan.mixture(root)) is not None:
        return mixture[0] in plan.bent
    rule = plan.rules.get(root)
    return rule is None or rule.kind != "source"


def _reads_dropped(plan: Plan, node: Node, rule: Rule) -> bool:
    """True if a rule for Gaussian values reads elements of which a dropout has set some to another value."""
    combines = rule.kind == "rule" or (rule.compares and not plan.inside_cluster(node))
    linear = rule.transposable or rule.batch_norm is not None or rule.mixture is not None
    return combines and not linear and any(_is_dropped(plan, operand) for operand in plan.random_operands(node))


def _is_dropped(plan: Plan, node: Node) -> bool:
    """True if a dropout has set some elements of a node to another value, before they were moved and scaled."""
    node = plan.root.get(node, node)
    if (mixture := plan.mixture(node)) is not None:
        return len(mixture[1]) > 1 or _is_dropped(plan, mixture[0])
    rule = plan.rules.get(node)
    moves = rule is not None and rule.kind != "elementwise" and keeps_elements(node, rule)
    return (moves or node.target is operator.getitem) and any(_is_dropped(plan, o) for o in plan.random_operands(node))


def _reasons_of_order(plan: Plan, node: Node, rule: Rule) -> list[str]:
    """Why a maximum, another rank or a comparison is approximate: it is one of functions that do not only rise."""
    compares = rule.compares and not plan.inside_cluster(node)
    if not (rule.order_statistic or compares):
        return []
    clusters, origins = Clusters(plan, {}), [_unmoved(plan, operand) for operand in plan.random_operands(node)]
    ends = [end for reasons, _ in origins for end in reasons]
    starts = [clusters.before_rising(end, rule.maximum) for end in ends]
    moved = rule.order_statistic and all(moved for _, moved in origins)
    if not moved or len({*map(steps_between, starts, ends)}) > 1:  # then functions stay in front
        starts = ends
    behind = _rules_between(clusters, starts, ends)
    ahead = _rules_between(clusters, [plan.root[start] for start in starts], starts)
    if any(function.affine is None for function in ahead):
        return [BENT]
    if any(plan.root[start] in plan.bent for start in starts):
        return [GAUSSIAN]
    if any(function.dips for function in behind):
        return [DIPPING]
    curved = any(function.affine is None for function in behind)
    return [MAXIMUM if rule.maximum else GAUSSIAN] if curved else []


def _rules_between(clusters: Clusters, starts: list[Node], ends: list[Node]) -> list[Rule]:
    """The rules of all functions that lead from a start to its end."""
    pairs = [(start, end) for start, end in zip(starts, ends, strict=True) if start is not end]
    return [clusters.plan.rules[function] for start, end in pairs for function in clusters.path(end, start)]


def _unmoved(plan: Plan, node: Node) -> tuple[list[Node], bool]:
    """The random nodes from which a node has its elements, and whether it only selects them.

    Behind a batch norm or a dropout what was a function of a Gaussian value is none of its own, and not Gaussian still.
    """
    rule = plan.rules.get(node)
    if node.target is not operator.getitem and (
        rule is None or rule.kind == "elementwise" or not keeps_elements(node, rule)
    ):
        return [node], True
    origins = [_unmoved(plan, operand) for operand in plan.random_operands(node)]
    ends = list(dict.fromkeys(end for nodes, _ in origins for end in nodes))
    return ends, rule is not None and rule.selects and all(moved for _, moved in origins)


def _truncates(node: Node, rule: Rule) -> bool:
    """True if a node casts random floating point numbers to whole ones; truth values are whole already."""
    if rule.casts is None:
        return False
    before, after = node.args[rule.casts].info, node.info
    if not isinstance(before, TensorInfo) or not isinstance(after, TensorInfo):
        return False
    return before.is_floating and not (after.is_floating or after.dtype.is_complex or after.dtype is torch.bool)


def assumes_independence(plan: Plan, node: Node, rule: Rule) -> bool:
    """True if a rule combines operands as independent that are not known to be."""
    adds = rule.kind == "rule" or bool(rule.adds(*node.args, **node.kwargs))
    combines = adds or (rule.kind == "elementwise" and not plan.inside_cluster(node))
    return combines and (plan.shares_ancestor(node) or (plan.reads_one_twice(node) and not rule.repeats))
