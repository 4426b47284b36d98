"""Runs the rules over a captured graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import CaptureError, MissingRule, VarpropError
from ..graph.leaf import Leaf
from ..graph.node import Form, Node, resolve
from ..moments import Moments, Tokens, compact, trusted
from ..rules.registry import Rule
from .branches import Branches
from .clusters import Clusters, steps_between
from .plan import Plan
from .reasons import reasons_of
from .sampling import draw, sample, seeded

SMALL = 2**16


class Unapplied(NamedTuple):
    """A value before functions were applied to it, and these: they lead from one node of a cluster to another."""

    value: Moments
    before: Node
    after: Node


@dataclass
class Walk:
    """Values of every node for one input; those inside clusters are computed when asked for.

    Attributes:
        plan: The static facts.
        env: Value of every node visited: Moments, Tokens, plain tensors, or lists of them.
        notes: Why a node's moments are approximate.
        sampled: Nodes estimated by sampling for want of a rule.
        annotate: Whether to work out the notes.
        report: Called before every operation with the number of those done.
    """

    plan: Plan
    env: dict[Node, Any]
    annotate: bool = True
    report: Callable[[int], None] | None = None
    notes: dict[Node, list[str]] = field(default_factory=dict)
    sampled: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.clusters = Clusters(self.plan, self.env)
        self.branches = Branches(self.clusters)

    def value(self, node: Node) -> Any:
        """The value of a node, computing it first if it lies inside a cluster."""
        if node not in self.env:
            self.env[node] = self._stamp(node, self.clusters.moments(node, self.value))
        return self.env[node]

    def run(self) -> None:
        """Visit every node in order."""
        with trusted(), self._tokens_read_by_embeddings():
            for done, node in enumerate(self.plan.program.nodes):
                if self.report is not None:
                    self.report(done)
                self._visit(node)

    def finish(self, nodes: list[Node]) -> None:
        """Compute the given clustered nodes, then check every value once."""
        with trusted(), self._tokens_read_by_embeddings():
            for node in nodes:
                self.value(node)
        if not torch._C._are_functorch_transforms_active():  # under which no value can be looked at
            _check(self)

    @contextlib.contextmanager
    def _tokens_read_by_embeddings(self) -> Iterator[None]:
        """What takes tokens for numbers is named: only an embedding can read them."""
        try:
            yield
        except (AttributeError, RuntimeError, TypeError) as error:
            if "Tokens" not in str(error):
                raise
            tokens = {node for node, value in self.env.items() if isinstance(value, Tokens)}
            takes = [n for n in self.plan.program.nodes if n not in tokens and tokens.intersection(n.operands)]
            names = ", ".join(dict.fromkeys(str(node.packet or node.target) for node in takes))
            raise CaptureError(f"Only an embedding can read vp.Tokens, but the model gives them to {names}.") from error

    def _visit(self, node: Node) -> None:
        if not self.plan.random(node):
            self.env[node] = self._draw_places(node) if node in self.plan.drawn else self._execute(node)
        elif node.target is operator.getitem:
            self.env[node] = self._stamp(node, self.value(node.args[0])[node.args[1]])
        elif node in self.plan.missing:
            self.sampled.add(node)
            self.env[node] = self._stamp(node, sample(node.target, *self._arguments(node)))
        elif self.plan.inside_cluster(node):
            if self.annotate:
                self._note(node, lambda: self._kinds(node))
        elif (joined := self.branches.moments(node)) is not None:
            moments, reason = joined
            self.env[node] = self._stamp(node, moments)
            if reason is not None and self.annotate:
                self.notes[node] = [reason]
        else:
            arguments = self._arguments(node)
            if self.plan.rules[node].kind == "rule" and not self.plan.random_operands(node):  # dropout of a constant
                arguments = pytree.tree_map_only(Tensor, _certain, arguments)
            if self.annotate:
                self._note(node, lambda: arguments)
            result = self._apply(node, *arguments)
            _require_moments(node, result)
            self.env[node] = self._stamp(node, result)

    def _apply(self, node: Node, args: Any, kwargs: Any) -> Any:
        rule = self.plan.rules[node]
        if rule.order_statistic and (
            found := self.without_functions(node.args[0], rule.maximum, self.value, self._moved)
        ):
            return self._maximum_first(node, rule, found, args, kwargs)
        return apply(rule, node.target, args, kwargs)

    def without_functions(
        self,
        node: Node,
        maximum: bool,
        value: Callable[[Node], Any],
        moved: Callable[[Node, Callable[[Node], Any]], Any],
    ) -> Unapplied | None:
        """A value before the last non-decreasing functions without tensor arguments, if there are any.

        What only selects or joins elements may come before functions of them as well as after.
        """
        rule = self.plan.rules.get(node)
        if rule is not None and (rule.selects or (rule.copies and len(node.operands) == 1)):
            parts = [self.without_functions(operand, maximum, value, moved) for operand in node.operands]
            known = {operand: part for operand, part in zip(node.operands, parts, strict=True) if part is not None}
            if len(known) < len(parts) or len({steps_between(*part[1:]) for part in known.values()}) > 1:
                return None
            own = moved(node, lambda o: known[o].value) if rule.selects else known[node.operands[0]].value
            return Unapplied(own, *known[node.operands[0]][1:])
        before = self.clusters.before_rising(node, maximum)
        return Unapplied(value(before), before, node) if before is not node else None

    def _moved(self, node: Node, value: Callable[[Node], Any]) -> Any:
        args, kwargs = resolve((node.args, node.kwargs), value)
        return self._stamp(node, apply(self.plan.rules[node], node.target, args, kwargs))

    def _maximum_first(self, node: Node, rule: Rule, found: Unapplied, args: Any, kwargs: Any) -> Any:
        """max f(X_i) = f(max X_i) for non-decreasing f (mathematics.md, 7): far more accurate in this order."""
        pooled = apply(rule, node.target, (found.value, *args[1:]), kwargs)
        if isinstance(pooled, Moments):
            return self.clusters.moments_from(found.after, found.before, pooled)
        return (self.clusters.moments_from(found.after, found.before, pooled[0]), *pooled[1:])

    def _arguments(self, node: Node) -> tuple[Any, Any]:
        def known(operand: Node) -> Any:
            value = self.value(operand)
            if value is None:
                source = operand.operands[0] if operand.target is operator.getitem else operand
                raise MissingRule(
                    f"{node.packet} reads a result of {source.packet} that has no mean and variance, such as where "
                    f"the largest entries are."
                )
            return value

        return resolve(node.args, known), resolve(node.kwargs, known)

    def _kinds(self, node: Node) -> tuple[Any, Any]:
        """Arguments of a clustered node, of which only matters what is random: each is there as its root."""

        def kind(operand: Node) -> Any:
            return self.env[self.plan.root.get(operand, operand)]

        return resolve(node.args, kind), resolve(node.kwargs, kind)

    def _execute(self, node: Node) -> Any:
        """An operation on constants; of a random argument only the form counts."""

        def fixed(operand: Node) -> Any:
            return _stand_in(self.value(operand)) if self.plan.random(operand) else self.env[operand]

        return node.target(*resolve(node.args, fixed), **resolve(node.kwargs, fixed))

    def _draw_places(self, node: Node) -> Any:
        """One draw of what is no constant but has no moments either; the same in every evaluation."""

        def drawn(operand: Node) -> Any:
            return draw(self.value(operand)) if self.plan.random(operand) else self.env[operand]

        ranking = node.args[0] if node.target is operator.getitem and self.plan.random(node.args[0]) else node
        with seeded():
            result = ranking.target(*resolve(ranking.args, drawn), **resolve(ranking.kwargs, drawn))
        return result if ranking is node else result[node.args[1]]

    def _note(self, node: Node, arguments: Callable[[], tuple[Any, Any]]) -> None:
        if reasons := reasons_of(self.plan, node, arguments):
            self.notes[node] = reasons

    def _stamp(self, node: Node, value: Any) -> Any:
        """Tell the value the extents and the dtype the model sees."""
        if isinstance(value, (list, tuple)):
            return [_fit(v, f) for v, f in zip(value, node.form or [None] * len(value), strict=False)]
        return _fit(value, node.form)


def _certain(x: Tensor) -> Moments:
    """A constant as a variable that does not vary."""
    return Moments(x, torch.zeros_like(x))


def _require_moments(node: Node, result: Any) -> None:
    """Refuse what a rule must not return; None stands for a result without moments, such as indices."""
    several, leaf = isinstance(result, (list, tuple)), isinstance(node.target, Leaf)
    forms = node.form or [None] * len(result) if several else [node.form]
    for value, form in zip(result if several else [result], forms, strict=False):
        constant = isinstance(value, Tensor) and several and not leaf  # such as statistics kept beside the result
        if not constant and (isinstance(value, Tensor) or (isinstance(value, Moments) and not _fits(value, form))):
            found = f"moments of shape {tuple(value.shape)}" if isinstance(value, Moments) else "a tensor"
            name = type(node.target.module).__name__ if leaf else node.target
            wanted = f" of shape {tuple(form.shape)}" if isinstance(form, Form) else ""
            raise VarpropError(
                f"The rule of {name} returned {found}, but must return vp.Moments{wanted}, with extent 1 where the "
                f"statistics do not change along an axis."
            )


def _fits(value: Moments, form: Any) -> bool:
    if not isinstance(form, Form):
        return True
    return value.ndim == len(form.shape) and all(o in (1, f) for o, f in zip(value.shape, form.shape, strict=True))


def _fit(value: Any, form: Any) -> Any:
    if not isinstance(value, Moments) or not isinstance(form, Form):
        return value
    # a comparison gives probabilities, not truth values, and half precision is too coarse for variances
    dtype = form.dtype if form.dtype in (torch.float32, torch.float64) else value.dtype
    return Moments(value.mean.to(dtype), value.var.to(dtype), form.shape)


def apply(rule: Rule, target: Any, args: Any, kwargs: Any) -> Any:
    """One operation on Moments, whatever its kind."""
    if rule.kind == "structural" and rule.function is None:
        return _move(rule.evaluate or target, args, kwargs)
    function = rule.independent if rule.kind == "elementwise" else rule.function
    assert function is not None
    if isinstance(target, Leaf):
        args, kwargs = target.fill(args)
        result = function(target.module, *args, **kwargs)
        return list(result) if isinstance(result, (list, tuple)) else [result]
    return function(*args, **kwargs)


def _move(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """An operation that only moves elements acts on means and on variances alike; constants have variance zero."""
    mean = target(*_part(args, lambda m: m.dense().mean, lambda t: t), **kwargs)
    var = target(*_part(args, lambda m: m.dense().var, _no_variance), **kwargs)
    if isinstance(mean, Tensor):
        return compact(mean, var)
    return [compact(m, v) for m, v in zip(mean, var, strict=True)]


def _part(args: Any, random: Callable[[Moments], Tensor], fixed: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(args, Moments):
        return random(args)
    if isinstance(args, (list, tuple)):
        return type(args)(_part(a, random, fixed) for a in args)
    return fixed(args) if isinstance(args, Tensor) else args


def _no_variance(constant: Tensor) -> Tensor:
    return torch.zeros_like(constant) if constant.is_floating_point() else constant


def _stand_in(value: Any) -> Any:
    if isinstance(value, Moments):
        return value.mean.expand(value.full)
    if isinstance(value, Tokens):
        return torch.zeros(value.full or (), dtype=torch.long, device=value.probabilities.device)
    return value


def _check(walk: Walk) -> None:
    """One look at all results; if it shows an impossible value, name the first operation that led to one.

    An infinite variance does, in the end; an infinite mean need not, as that of masked scores.
    """
    found = [(node, v) for node, v in walk.env.items() if isinstance(v, Moments) and not _only_moves(walk, node)]
    if not _any_impossible([v for _, v in found]):
        return
    node, value = next((node, v) for node, v in found if _any_impossible([v]) or bool(v.var.isinf().any()))
    line = f" ({node.line})" if node.line else ""
    state = walk.plan.program.state
    bad = [state[operand] for operand in node.operands if operand in state and not walk.env[operand].isfinite().all()]
    reason = "check the parameters and the input for NaN, infinity or values outside the operation's domain."
    if bad:
        reason = f"{' and '.join(bad)} of the model {'have' if len(bad) > 1 else 'has'} values that are not finite."
    raise VarpropError(f"{_trouble(value)} came out of {node.target} in module '{node.module}'{line}; {reason}")


def _trouble(value: Moments) -> str:
    if bool(value.mean.isnan().any() | value.var.isnan().any()):
        return "NaN"
    return "an infinite variance" if bool(value.var.isinf().any()) else "a negative variance"


def _only_moves(walk: Walk, node: Node) -> bool:
    """Whether a value holds nothing that another one does not hold already."""
    rule = walk.plan.rules.get(node)
    return rule is not None and rule.kind == "structural" and len(node.operands) == 1


def _any_impossible(values: list[Moments]) -> bool:
    """Small values are looked at together: a test of each would cost more than its computation did."""
    small = [v for v in values if v.mean.numel() <= SMALL]
    groups = [[v for v in small if (v.dtype, v.device) == kind] for kind in {(v.dtype, v.device) for v in small}]
    return any(_impossible(v.mean, v.var) for v in values if v.mean.numel() > SMALL) or any(
        _impossible(*(torch.cat([getattr(v, part).detach().flatten() for v in group]) for part in ("mean", "var")))
        for group in groups
    )


def _impossible(mean: Tensor, var: Tensor) -> bool:
    """The least variance is NaN if any is; so is a sum of means, which is only then looked at one by one."""
    if not bool(var.detach().amin() >= 0):
        return True
    return bool(mean.detach().sum().isnan()) and bool(mean.isnan().any())
