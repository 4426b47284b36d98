"""Evaluates a captured graph: every operation by its rule.

Sums of several convolutions of one value, and of the value itself, are evaluated as one convolution (`Branches`): their
terms are not independent, but their kernels can be added. Such sums stand where networks are trained with parallel
branches, or where positions are encoded by x + conv(x).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import CaptureError, MissingRule, VarpropError
from ..graph.node import Node, TensorInfo, resolve
from ..graph.tracing import Leaf
from ..moments import Moments, Tokens, autocast_off, compact, joined, trusted
from ..rules.linear import Convolution, border, conv
from ..rules.norm import Stored
from ..rules.registry import Rule
from .clusters import Clusters, steps_between
from .plan import Plan
from .reasons import reasons_of

DRAWS = 1024


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Within, the same numbers are drawn each time; the caller's random state is left alone."""
    if torch.compiler.is_compiling():
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def sample(op: Any, args: Any, kwargs: Any, draws: int = DRAWS) -> Any:
    """Mean and variance over Gaussian draws of the random arguments; the caller's random state is left alone."""
    with seeded():
        outputs = [pytree.tree_leaves(op(*draw(args), **draw(kwargs))) for _ in range(draws)]
    if any(output.is_complex() for output in outputs[0]):
        raise MissingRule(
            f"{op} gives complex numbers, and moments are those of real ones: keep the module that holds it whole with "
            "`@vp.rule(ThatModule)`."
        )
    columns = (torch.stack(column) for column in zip(*outputs, strict=True))
    results = (column if column.is_floating_point() else column.float() for column in columns)
    values = [Moments(result.mean(0), result.var(0, correction=0)) for result in results]
    return values[0] if len(values) == 1 else values


def draw(tree: Any) -> Any:
    """One Gaussian draw of all Moments in a nest of arguments."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Moments):
            return leaf
        dense = leaf.dense()
        return dense.mean + dense.std * torch.randn(dense.shape, dtype=dense.dtype, device=dense.device)

    return pytree.tree_map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Moments))


@dataclass(frozen=True)
class Branch:
    """scale * conv(x) + offset, or with x itself where there is no convolution; numbers, or one a channel."""

    conv: Node | None = None
    scale: Any = 1.0
    offset: Any = 0.0

    def then(self, scale: Any, offset: Any) -> Branch:
        """Behind another affine function of channels."""
        return replace(self, scale=self.scale * scale, offset=self.offset * scale + offset)


BranchSums = dict[Node, tuple[Branch, ...]]  # a node as a sum of branches of each of several earlier nodes


class Branches:
    """The sums of an evaluation that can be put together."""

    def __init__(self, clusters: Clusters) -> None:
        self.clusters, self.plan, self.env = clusters, clusters.plan, clusters.env
        self.known: dict[Node, BranchSums] = {}

    def moments(self, node: Node) -> tuple[Moments, str | None] | None:
        """Moments of a sum as one convolution, and why they are approximate if they are; None if it is none."""
        rule = self.plan.rules.get(node)
        if rule is None or rule.signs is None or len(self.plan.random_operands(node)) != 2:
            return None
        for source, branches in self.sums(node).items():
            if source is not node and any(branch.conv for branch in branches):
                combined = self._whole(branches)
                if combined is not None:
                    weight, bias, before = combined.weight, combined.bias, [first for first, _ in combined.zeros]
                    settings = combined.stride, before, combined.dilation, combined.groups
                    arguments = (self.env[source], weight, bias, *settings)
                    return conv(*arguments), border(*arguments)
        return None

    def sums(self, node: Node) -> BranchSums:
        """All ways to write a node as a sum of branches; memoised."""
        if node not in self.known:
            self.known[node] = {node: (Branch(),), **self._sums(node)}
        return self.known[node]

    def _sums(self, node: Node) -> BranchSums:
        if self.plan.inside_cluster(node):
            base, line = self.clusters.line(node)
            return {} if base is node else _behind(self.sums(base), line.slope, line.offset)
        random = self.plan.random_operands(node)
        if node.target is operator.getitem:
            return self._batch_norm(node)
        rule = self.plan.rules.get(node)
        if rule is None or node.kwargs:
            return {}
        if rule.linear and rule.convolution is not None and random == [node.args[0]]:
            return {random[0]: (Branch(node),)}
        if rule.signs is not None and len(random) == 2:
            first, second = (
                _behind(self.sums(operand), sign, 0.0) for operand, sign in zip(node.args[:2], rule.signs, strict=True)
            )
            return {x: first[x] + second[x] for x in first if x in second}
        return {}

    def _batch_norm(self, node: Node) -> BranchSums:
        """The sums for the first result of a batch norm in evaluation, which is affine in every channel."""
        norm, index = node.args
        rule = self.plan.rules.get(norm)
        if index != 0 or rule is None or rule.batch_norm is None or self.plan.random_operands(norm) != [norm.args[0]]:
            return {}
        stored: Stored = rule.batch_norm(*resolve(norm.args, self.env.get))
        scale = (stored.var + stored.eps).rsqrt() * (1.0 if stored.weight is None else stored.weight)
        offset = (0.0 if stored.bias is None else stored.bias) - stored.mean * scale
        shape = (-1, *[1] * (node.ndim - 2))
        return _behind(self.sums(norm.args[0]), scale.view(shape), offset.view(shape))

    def _whole(self, branches: Sequence[Branch]) -> Convolution | None:
        """All branches as one convolution; None if their kernels do not fit each other."""
        kernels = [None if branch.conv is None else self._kernel(branch.conv) for branch in branches]
        present = [kernel for kernel in kernels if kernel is not None]
        largest = max(present, key=lambda k: k.weight[0, 0].numel(), default=None)
        if largest is None:
            return None
        weight, bias = torch.zeros_like(largest.weight), torch.zeros_like(largest.bias)
        for branch, kernel in zip(branches, kernels, strict=True):
            kernel = identity_kernel(largest) if branch.conv is None else kernel
            fitted = None if kernel is None else fitted_kernel(kernel, largest)
            scale, offset = (_per_channel(value, largest) for value in (branch.scale, branch.offset))
            if kernel is None or fitted is None or scale is None or offset is None:
                return None
            weight = weight + fitted * scale.view(-1, *[1] * (weight.ndim - 1))
            bias = bias + kernel.bias * scale + offset
        return replace(largest, weight=weight, bias=bias)

    def _kernel(self, node: Node) -> Convolution | None:
        """The kernel of a convolution; None if it is transposed, or padded with more zeros behind than before."""
        read = self.plan.rules[node].convolution
        assert read is not None
        kernel: Convolution = read(*resolve(node.args, self.env.get))
        if kernel.transposed or any(before != behind for before, behind in kernel.zeros):
            return None
        bias = kernel.weight.new_zeros(len(kernel.weight)) if kernel.bias is None else kernel.bias
        return replace(kernel, bias=bias)


def identity_kernel(like: Convolution) -> Convolution | None:
    """The convolution that changes nothing, in as many groups; None if there is none."""
    outputs, inputs, *sizes = like.weight.shape
    if outputs != inputs * like.groups or any(step != 1 for step in like.stride):
        return None
    identity = torch.eye(inputs, dtype=like.weight.dtype, device=like.weight.device).repeat(like.groups, 1)
    single = identity.view(outputs, inputs, *[1] * len(sizes))
    return replace(like, weight=single, bias=torch.zeros_like(like.bias), zeros=[(0, 0)] * len(sizes))


def fitted_kernel(kernel: Convolution, larger: Convolution) -> Tensor | None:
    """The weights at their place in a larger kernel; None if they have none there."""
    first, second = ((k.stride, k.groups, k.weight.shape[:2]) for k in (kernel, larger))
    if first != second:
        return None
    margins: list[int] = []
    sizes = zip(kernel.weight.shape[2:], larger.weight.shape[2:], strict=True)
    for (size, room), (padding, _), (pad, _), gap, step in zip(
        sizes, kernel.zeros, larger.zeros, kernel.dilation, larger.dilation, strict=True
    ):
        before, remainder = divmod(pad - padding, step)
        behind = room - size - before
        if remainder or before < 0 or behind < 0 or (size > 1 and gap != step):
            return None
        margins = [before, behind, *margins]
    return F.pad(kernel.weight, margins)


def _behind(sums: BranchSums, scale: Any, offset: Any) -> BranchSums:
    """All sums behind an affine function; its offset is added once."""
    return {
        x: (first.then(scale, offset), *(branch.then(scale, 0.0) for branch in further))
        for x, (first, *further) in sums.items()
    }


def _per_channel(value: Any, kernel: Convolution) -> Tensor | None:
    """A number, or one a channel, as a vector; None for what differs from position to position."""
    outputs, axes = kernel.weight.shape[0], kernel.weight.ndim - 2
    tensor = torch.as_tensor(value, dtype=kernel.weight.dtype, device=kernel.weight.device)
    if tensor.numel() == 1:
        return tensor.reshape(1).expand(outputs)
    alone = tensor.ndim > axes and tensor.shape[-axes - 1] == outputs == tensor.numel()
    return tensor.reshape(-1) if alone else None


SMALL = 2**16  # elements of values that are checked together


class Unapplied(NamedTuple):
    """A value before functions were applied to it, and these: they lead from one node of a cluster to another."""

    value: Moments
    before: Node
    after: Node


@dataclass
class Evaluation:
    """Values of every node for one input; those inside clusters are computed when asked for."""

    plan: Plan  # the static facts
    env: dict[Node, Any]  # value of every node visited: Moments, Tokens, plain tensors, or lists of them
    annotate: bool = True  # whether to work out the notes
    report: Callable[[int], None] | None = None  # called before every operation with the number of those done
    notes: dict[Node, list[str]] = field(default_factory=dict)  # why a node's moments are approximate
    assumption: str = "exact if units are independent"  # of operations without notes
    sampled: set[Node] = field(default_factory=set)  # nodes estimated by sampling for want of a rule
    # of all moments and of all floating point numbers that are no moments; by default those of the captured model
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.clusters = Clusters(self.plan, self.env)
        self.branches = Branches(self.clusters)

    def value(self, node: Node) -> Any:
        """The value of a node, computing it first if it lies inside a cluster."""
        if node not in self.env:
            self.env[node] = self._as_captured(node, self.clusters.moments(node, self.value))
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
        """Within, an error of an operation that takes tokens for numbers names it: only an embedding can read them."""
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
            self.env[node] = self._as_captured(node, self.value(node.args[0])[node.args[1]])
        elif node in self.plan.missing:
            self.sampled.add(node)
            self.env[node] = self._as_captured(node, sample(node.target, *self._arguments(node)))
        elif self.plan.inside_cluster(node):
            self._note(node, lambda: self._with_roots(node))
        elif (joined := self.branches.moments(node)) is not None:
            moments, reason = joined
            self.env[node] = self._as_captured(node, moments)
            if reason is not None and self.annotate:
                self.notes[node] = [reason]
        else:
            arguments = self._arguments(node)
            rule = self.plan.rules[node]
            lifts = rule.operation in ("attention", "recurrent")  # by themselves, and not the weights
            if rule.kind == "rule" and not lifts and not self.plan.random_operands(node):  # dropout of a constant
                arguments = pytree.tree_map_only(Tensor, lambda x: Moments(x, torch.zeros_like(x)), arguments)
            self._note(node, lambda: arguments)
            result = self._apply(node, *arguments)
            _require_moments(node, result)
            self.env[node] = self._as_captured(node, result)

    def _apply(self, node: Node, args: Any, kwargs: Any) -> Any:
        rule = self.plan.rules[node]
        ranks = rule.order_statistic
        unapplied = self.without_functions(node.args[0], rule.maximum, self.value, self._moved) if ranks else None
        if unapplied is None:
            return apply(rule, node.target, args, kwargs)
        # max f(X_i) = f(max X_i) for non-decreasing f (mathematics.md, 7): far more accurate in this order
        ranked = apply(rule, node.target, (unapplied.value, *args[1:]), kwargs)
        first, *further = [ranked] if isinstance(ranked, Moments) else ranked
        result = self.clusters.moments_from(unapplied.after, unapplied.before, first)
        return result if isinstance(ranked, Moments) else (result, *further)

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
            operands = {operand: self.without_functions(operand, maximum, value, moved) for operand in node.operands}
            inner = {operand: found for operand, found in operands.items() if found is not None}
            functions = {steps_between(found.before, found.after) for found in inner.values()}
            if len(inner) < len(operands) or len(functions) > 1:
                return None
            first = inner[node.operands[0]]
            return first._replace(value=moved(node, lambda o: inner[o].value)) if rule.selects else first
        before = self.clusters.before_rising(node, maximum)
        return Unapplied(value(before), before, node) if before is not node else None

    def _moved(self, node: Node, value: Callable[[Node], Any]) -> Any:
        args, kwargs = resolve((node.args, node.kwargs), value)
        return self._as_captured(node, apply(self.plan.rules[node], node.target, args, kwargs))

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

    def _with_roots(self, node: Node) -> tuple[Any, Any]:
        """Arguments of a clustered node, each random one replaced by the root it is a function of."""

        def kind(operand: Node) -> Any:
            return self.env[self.plan.root.get(operand, operand)]

        return resolve(node.args, kind), resolve(node.kwargs, kind)

    def _execute(self, node: Node) -> Any:
        """An operation on constants; of a random argument only extents and dtype count."""

        def fixed(operand: Node) -> Any:
            return _stand_in(self.value(operand)) if self.plan.random(operand) else self.env[operand]

        result = node.target(*resolve(node.args, fixed), **resolve(node.kwargs, fixed))
        if isinstance(result, Tensor) and result.numel() and any(map(self.plan.random, node.operands)):
            return result[(0,) * result.ndim].expand(result.shape)  # one number everywhere, which rules can tell
        return result if self.dtype is None else in_dtype(result, self.dtype)

    def _draw_places(self, node: Node) -> Any:
        """One draw of what is no constant but has no moments either; the same in every evaluation."""

        def drawn(operand: Node) -> Any:
            return draw(self.value(operand)) if self.plan.random(operand) else self.env[operand]

        ranking = node.args[0] if node.target is operator.getitem and self.plan.random(node.args[0]) else node
        with seeded():
            result = ranking.target(*resolve(ranking.args, drawn), **resolve(ranking.kwargs, drawn))
        return result if ranking is node else result[node.args[1]]

    def _note(self, node: Node, arguments: Callable[[], tuple[Any, Any]]) -> None:
        if self.annotate and (reasons := reasons_of(self.plan, node, arguments)):
            self.notes[node] = reasons

    def _as_captured(self, node: Node, value: Any) -> Any:
        """A value with the extents and the dtype that it has in the captured model."""
        if isinstance(value, (list, tuple)):
            infos = node.info or [None] * len(value)
            return [_fit(v, f, self.dtype) for v, f in zip(value, infos, strict=False)]
        return _fit(value, node.info, self.dtype)


@autocast_off()
def evaluate(
    plan: Plan,
    inputs: Sequence[dict[Node, Any]],
    shares: Sequence[float],
    evaluation_class: type[Evaluation],
    wanted: list[Node],
    report: Callable[[int], None] | None = None,
) -> Evaluation:
    """A program run on its inputs, and the wanted values; for several inputs of a mixture all of them joined.

    `shares` say how likely each of the inputs is; `report` is called before every operation with the number of those
    done, for every input.
    """
    total: Evaluation | None = None
    share = 0.0
    for values, more in zip(inputs, shares, strict=True):
        evaluation = evaluation_class(plan, {**plan.program.tensors(), **values})
        evaluation.report = report
        evaluation.run()
        evaluation.finish(wanted)
        if total is not None:
            for node, value in total.env.items():
                evaluation.env[node] = _joined_values(value, share, evaluation.env[node], more)
            evaluation.assumption += " in every component"
            evaluation.sampled |= total.sampled
            for node, reasons in total.notes.items():
                evaluation.notes[node] = list(dict.fromkeys([*evaluation.notes.get(node, ()), *reasons]))
        total, share = evaluation, share + more
    assert total is not None
    return total


def _joined_values(first: Any, share: float, second: Any, other_share: float) -> Any:
    if isinstance(first, Moments) and isinstance(second, Moments):
        return joined(first.dense(), share, second.dense(), other_share)
    if isinstance(first, list) and isinstance(second, list):
        return [_joined_values(a, share, b, other_share) for a, b in zip(first, second, strict=True)]
    return second


def _require_moments(node: Node, result: Any) -> None:
    """Refuse what a rule must not return; None stands for a result without moments, such as indices."""
    several, leaf = isinstance(result, (list, tuple)), isinstance(node.target, Leaf)
    infos = node.info or [None] * len(result) if several else [node.info]
    for value, info in zip(result if several else [result], infos, strict=False):
        constant = isinstance(value, Tensor) and several and not leaf  # such as statistics kept beside the result
        if not constant and (isinstance(value, Tensor) or (isinstance(value, Moments) and not _fits(value, info))):
            returned = f"moments of shape {tuple(value.shape)}" if isinstance(value, Moments) else "a tensor"
            name = type(node.target.module).__name__ if leaf else node.target
            wanted = f" of shape {tuple(info.shape)}" if isinstance(info, TensorInfo) else ""
            raise VarpropError(
                f"The rule of {name} returned {returned}, but must return vp.Moments{wanted}, with extent 1 where the "
                f"statistics do not change along an axis."
            )


def _fits(value: Moments, info: Any) -> bool:
    if not isinstance(info, TensorInfo):
        return True
    return value.ndim == len(info.shape) and all(o in (1, f) for o, f in zip(value.shape, info.shape, strict=True))


def _fit(value: Any, info: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Moments) or not isinstance(info, TensorInfo):
        return value
    if dtype is None:
        # a comparison gives probabilities, not truth values, and half precision is too coarse for variances
        dtype = info.dtype if info.dtype in (torch.float32, torch.float64) else value.dtype
    return Moments(value.mean.to(dtype), value.var.to(dtype), info.shape)


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Moments and floating point tensors, by themselves or in lists, in another dtype; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [in_dtype(each, dtype) for each in value]
    if isinstance(value, Moments):
        return Moments(value.mean.to(dtype), value.var.to(dtype), value.full)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def apply(rule: Rule, target: Any, args: Any, kwargs: Any) -> Any:
    """One operation on Moments, whatever its kind."""
    if rule.kind == "structural" and rule.function is None:
        return _move(rule.evaluate or target, args, kwargs)
    function = rule.independent if rule.kind == "elementwise" else rule.function
    assert function is not None
    if isinstance(target, Leaf):
        args, kwargs = target.fill(args)
        with target.as_captured() as module:
            result = function(module, *args, **kwargs)
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


def _check(evaluation: Evaluation) -> None:
    """One look at all results; if it shows an impossible value, name the first operation that led to one.

    An infinite variance does, in the end; an infinite mean need not, as that of masked scores.
    """

    def only_moves(node: Node) -> bool:  # all elements are elements of another value
        rule = evaluation.plan.rules.get(node)
        return rule is not None and rule.kind == "structural" and len(node.operands) == 1

    results = [(node, v) for node, v in evaluation.env.items() if isinstance(v, Moments) and not only_moves(node)]
    if not _any_impossible([v for _, v in results]):
        return
    node, value = next((node, v) for node, v in results if _any_impossible([v]) or bool(v.var.isinf().any()))
    line = f" ({node.line})" if node.line else ""
    state = evaluation.plan.program.state
    bad = [
        state[operand] for operand in node.operands if operand in state and not evaluation.env[operand].isfinite().all()
    ]
    reason = "check the parameters and the input for NaN, infinity or values outside the operation's domain."
    if bad:
        reason = f"{' and '.join(bad)} of the model {'have' if len(bad) > 1 else 'has'} values that are not finite."
    trouble = "an infinite variance" if bool(value.var.isinf().any()) else "a negative variance"
    if bool(value.mean.isnan().any() | value.var.isnan().any()):
        trouble = "NaN"
    raise VarpropError(f"{trouble} came out of {node.target} in module '{node.module}'{line}; {reason}")


def _any_impossible(values: list[Moments]) -> bool:
    """Small values are looked at together: a test of each would cost more than its computation did."""
    small = [v for v in values if v.mean.numel() <= SMALL]
    groups = [[v for v in small if (v.dtype, v.device) == kind] for kind in {(v.dtype, v.device) for v in small}]
    pairs = [(v.mean, v.var) for v in values if v.mean.numel() > SMALL]
    for group in groups:
        columns = ([v.mean for v in group], [v.var for v in group])
        mean, var = (torch.cat([tensor.detach().flatten() for tensor in column]) for column in columns)
        pairs.append((mean, var))
    return any(_impossible(mean, var) for mean, var in pairs)


def _impossible(mean: Tensor, var: Tensor) -> bool:
    """The least variance is NaN if any is; so is a sum of means, which is only then looked at one by one."""
    if not bool(var.detach().amin() >= 0):
        return True
    return bool(mean.detach().sum().isnan()) and bool(mean.isnan().any())
