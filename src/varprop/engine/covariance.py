"""Propagation with the covariance of all units, in place of the assumption that they are independent.

Every random value is one Gaussian vector with all others. Its covariance with another value b follows from those of its
operands: a linear operation acts on their columns, Cov(A x, b) = A Cov(x, b); a function of elements multiplies them by
its expected slope (Stein), Cov(f(x), b) = E f' Cov(x, b); its covariance with itself, and with a function of a value
that does not depend on it, is that of `gaussian.bivariate`; the product of two values follows from Isserlis' theorem.
Any other operation counts to first order: with the derivative of its mean by the means of what it reads, and with the
variance that its rule finds beyond that on the diagonal. So values that meet again, as at a skip connection, do so with
the covariance that they have.

Only blocks that are asked for are computed, and each once: in a chain of layers those of every value with itself.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import VarpropError
from ..gaussian.bivariate import Nonlinearity, covariance, hermite, rectifier
from ..gaussian.normal import working_dtype
from ..gaussian.quadrature import expectation
from ..graph.node import Node, TensorInfo, resolve
from ..graph.tracing import Leaf
from ..moments import Moments, Tokens
from ..rules.registry import Rule
from .evaluation import Evaluation, apply
from .plan import Plan
from .reasons import COPIES, INDEPENDENCE

MOST = 1 << 30  # numbers in all covariances together: 4 GiB in single precision
FIRST_ORDER = "covariances to first order: by the derivative of the mean, and the variance beyond that as independent"
SERIES = "variances exact, covariances by eight terms of a series: within 1e-3 of both std up to a correlation of .8"
SAMPLED = "estimated by sampling for want of a rule, and taken as independent of all else"
COLUMNS = 1024  # of a covariance, that go through an operation together
LINEAR = 1e-5  # of the variance: less than that beyond first order is rounding
PROBES = (0.37, 1.0, 2.9, 11.0)  # distances from a kink, in standard deviations, at which straight sides are known

Columns = Callable[[Tensor], Tensor]  # from the covariance of an operand with b to what it adds to that of the result


@dataclass
class Local:
    """How one value follows from earlier ones."""

    operands: dict[Node, Columns]  # the values it reads, each with what becomes of its covariances
    fresh: Tensor | None = None  # what its own covariance has beyond that: a matrix, or a vector for the diagonal
    # of a function of single elements: of which value, and which function
    curve: tuple[Node, Nonlinearity] | None = None


class CovarianceEvaluation(Evaluation):
    """An evaluation whose values carry the covariance of all their elements.

    Attributes:
        blocks: Covariances of two values, the later one first; None stands for zero.
        local: How every value follows from earlier ones.
    """

    def __init__(self, plan: Plan, env: dict[Node, Any]) -> None:
        super().__init__(replace(plan, skips={}), env, assumption="exact if units are jointly Gaussian")
        self.blocks: dict[tuple[Node, Node], Tensor | None] = {}
        self.local: dict[Node, Local] = {}
        program = plan.program
        self.order = {node: position for position, node in enumerate((*program.inputs, *program.nodes))}
        self.upstream: dict[Node, int] = {}  # the values that a value depends on, as bits
        for node, position in self.order.items():
            self.upstream[node] = 1 << position
            for operand in plan.random_operands(node):
                self.upstream[node] |= self.upstream[operand]
        self.reasons: dict[Node, str] = {}
        self._require_memory([node for node in self.order if plan.random(node)])
        for node in program.inputs:
            if plan.random(node):
                self.env[node] = self._input(node, env[node])

    def _input(self, node: Node, value: Any) -> Moments:
        if isinstance(value, Tokens):
            raise VarpropError('covariance="full" starts from vp.Moments; vp.Tokens have no covariance: leave it out.')
        value = value.dense()
        block = torch.diag_embed(value.var.flatten()) if value.covariance is None else value.covariance
        self.local[node] = Local({})
        self.blocks[node, node] = block
        return Moments(value.mean, covariance=block)

    def _require_memory(self, nodes: list[Node]) -> None:
        """Refuse values whose covariances do not fit, before anything is computed."""
        sizes = {node: node.info.shape.numel() for node in nodes if isinstance(node.info, TensorInfo)}
        total = sum(size**2 for size in sizes.values() if size)
        if total > MOST:
            largest = max(sizes, key=sizes.__getitem__)
            where = "the input" if largest in self.plan.program.inputs else largest.module or "(model)"
            raise VarpropError(
                f'covariance="full" would hold {total:.2g} numbers here, above the limit of {MOST:.2g}: '
                f"{where} alone has {sizes[largest]:,} units, whose covariances are their "
                f"square; leave it out, or look at a smaller input or a part of the model."
            )

    def finish(self, nodes: list[Node]) -> None:
        """Compute the given clustered nodes, check every value once, and say why they are approximate."""
        super().finish(nodes)
        for node in {**self.notes, **self.reasons}:
            # covariances do away with assumptions of independence, and add reasons of their own
            kept = [reason for reason in self.notes.get(node, ()) if reason not in (INDEPENDENCE, COPIES)]
            self.notes[node] = [*kept, self.reasons[node]] if node in self.reasons else kept

    def _as_captured(self, node: Node, value: Any) -> Any:
        value = super()._as_captured(node, value)
        if not isinstance(value, Moments):
            return value
        value = self.env[node] = value.dense()
        self.local[node], mean = self._follow(node, value)
        block = self._block(node, node)
        assert block is not None
        return Moments(mean, covariance=block)

    def _moved(self, node: Node, value: Callable[[Node], Any]) -> Any:
        """A node's own operation on other values than its operands', which has no covariance of its own."""
        args, kwargs = resolve((node.args, node.kwargs), value)
        return super()._as_captured(node, apply(self.plan.rules[node], node.target, args, kwargs))

    # Covariances of two values

    def _block(self, a: Node, b: Node) -> Tensor | None:
        """The covariance of two values, (elements of a, elements of b); None if it is zero.

        Blocks that it follows from are computed first, without recursion: values may be thousands of operations apart.
        """
        waiting = [self._pair(a, b)]
        while waiting:
            needed = [pair for pair in self._needs(*waiting[-1]) if pair not in self.blocks]
            if needed:
                waiting += needed
                continue
            pair = waiting.pop()
            if pair not in self.blocks:
                self.blocks[pair] = self._computed(*pair)
        return self._stored(a, b)

    def _pair(self, a: Node, b: Node) -> tuple[Node, Node]:
        return (a, b) if self.order[a] >= self.order[b] else (b, a)

    def _stored(self, a: Node, b: Node) -> Tensor | None:
        block = self.blocks[self._pair(a, b)]
        return block if block is None or self.order[a] >= self.order[b] else block.mT

    def _curves(self, a: Node, b: Node) -> tuple[tuple[Node, Nonlinearity], tuple[Node, Nonlinearity]] | None:
        """Two values as functions of earlier ones, neither of which depends on the other value."""
        first, second = self.local[a].curve, self.local[b].curve
        if first is None or second is None:
            return None
        return None if a is not b and self.upstream[first[0]] >> self.order[b] & 1 else (first, second)

    def _needs(self, a: Node, b: Node) -> list[tuple[Node, Node]]:
        """The blocks from which that of a value with an earlier one, or with itself, follows."""
        if (curves := self._curves(a, b)) is not None:
            (x, _), (y, _) = curves
            return [self._pair(x, y)]
        return [self._pair(operand, b) for operand in self.local[a].operands]

    def _computed(self, a: Node, b: Node) -> Tensor | None:
        local = self.local[a]
        if (curves := self._curves(a, b)) is not None:
            return self._of_curves(a, b, *curves)
        columns = [(carry, self._stored(operand, b)) for operand, carry in local.operands.items()]
        terms = [carry(block) for carry, block in columns if block is not None]
        total = functools.reduce(torch.add, terms) if terms else None
        if a is not b:
            return total
        fresh = local.fresh if local.fresh is None or local.fresh.ndim == 2 else torch.diag_embed(local.fresh)
        block = fresh if total is None else total if fresh is None else total + fresh
        if block is None:
            size = a.info.shape.numel()
            return torch.zeros(size, size, dtype=self.env[a].dtype, device=self.env[a].device)
        block = 0.5 * (block + block.mT)
        return torch.diagonal_scatter(block, block.diagonal().clamp_min(0))

    def _of_curves(
        self, a: Node, b: Node, first: tuple[Node, Nonlinearity], second: tuple[Node, Nonlinearity]
    ) -> Tensor | None:
        """The covariance of functions of elements."""
        (x, f), (y, g) = first, second
        block = self._stored(x, y)
        if block is None:
            return torch.diag_embed(self.env[a].var.flatten()) if a is b else None
        block = _spread(_spread(block, x, a).mT, y, b).mT
        if a is b:
            within = covariance(f, f, torch.diagonal_scatter(block, torch.zeros_like(f.std)))
            return torch.diagonal_scatter(0.5 * (within + within.mT), self.env[a].var.flatten())
        between = covariance(f, g, block)
        if self.plan.root[a] is self.plan.root[b] and a.info.shape == b.info.shape:
            between = torch.diagonal_scatter(between, self._of_one_variable(a, b))
        return between

    def _of_one_variable(self, a: Node, b: Node) -> Tensor:
        """Cov(f(X_i), g(X_i)) for two functions of one value, by quadrature."""
        root = self.plan.root[a]
        paths = [self.clusters.path(node, root) for node in (a, b)]
        total, means = torch.zeros_like(self.env[a].mean), [self.env[a].mean, self.env[b].mean]
        source, outcomes = self._outcomes(root)
        x = self.value(source)
        for chance, slope, offset in outcomes:
            mean, std = slope * x.mean + offset, abs(slope) * x.std

            def product(values: Tensor) -> Tensor:
                f, g = (self.clusters.evaluate(path, root, values) - m for path, m in zip(paths, means, strict=True))
                return torch.mul(f, g)

            panels = [self.clusters.panels(path, root, mean, std) for path in paths]
            points = {name: [p for panel in panels for p in panel[name]] for name in ("breaks", "jumps", "knots")}
            count = max(panel["panels"] for panel in panels)
            total = total + chance * expectation(product, mean, std, **points, panels=count)[0]
        return total.flatten()

    def _outcomes(self, root: Node) -> tuple[Node, list[tuple[float, float, float]]]:
        """The Gaussian value that a root is a line of, and chance, slope and offset: several behind a dropout."""
        return self.plan.mixture(root) or (root, [(1.0, 1.0, 0.0)])

    # How a value follows from those it reads

    def _follow(self, node: Node, value: Moments) -> tuple[Local, Tensor]:
        """How a value follows from earlier ones, and its mean, which covariances change where values are multiplied."""
        if self.plan.inside_cluster(node):
            return self._follow_elements(node, value), value.mean
        parent = node.args[0] if node.target is operator.getitem else node
        rule, operands = self.plan.rules.get(parent), self.plan.random_operands(parent)
        if rule is None:
            self.reasons[node] = SAMPLED
            return Local({}, value.var.flatten()), value.mean
        if not operands or rule.kind == "source":
            return Local({}, value.var.flatten()), value.mean
        if rule.multilinear and rule.normalizes(*parent.args):  # a batch norm in training, by a large batch
            return self._follow_batch_norm(node, parent, value), value.mean
        if self._is_linear(parent, rule, operands):
            return Local({o: functools.partial(self._through, node, parent, o) for o in operands}), value.mean
        if rule.kind == "elementwise" and rule.product and len(operands) == 2:
            return self._follow_product(node, value, *operands)
        return self._follow_first_order(node, parent, rule, value), value.mean

    def _is_linear(self, node: Node, rule: Rule, operands: list[Node]) -> bool:
        """True if an operation is linear in all that is random together."""
        if isinstance(node.target, Leaf):
            return False
        if rule.kind == "structural" or rule.signs is not None:
            return True
        once = len(operands) == 1 and not self.plan.reads_one_twice(node)
        layer = rule.linear or rule.averages or rule.resizes or rule.batch_norm is not None
        return once and ((layer and operands[0] is node.args[0]) or (rule.product and rule.kind == "rule"))

    def _through(self, node: Node, parent: Node, operand: Node, block: Tensor) -> Tensor:
        """Columns of covariances through a linear operation: its derivative by one operand, applied to each."""
        rule, mean = self.plan.rules[parent], self.env[operand].mean.contiguous()
        columns = block.mT.reshape(-1, *mean.shape)
        if rule.linear and rule.convolution is None and parent is node:
            weight = self.env[parent.args[1]].to(mean.dtype)
            return F.linear(columns, weight).reshape(len(columns), -1).mT
        run = rule.evaluate if rule.kind == "structural" and rule.evaluate else parent.target

        def operation(x: Tensor) -> Tensor:
            def constant(other: Node) -> Any:
                if other is operand:
                    return x
                value = self.env[other]
                if isinstance(value, Moments):
                    return value.mean
                coarse = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4
                return value.to(mean.dtype) if coarse else value

            args, kwargs = resolve((parent.args, parent.kwargs), constant)
            result = run(*args, **kwargs)
            value: Tensor = result if node is parent else result[node.args[1]]
            return value

        def along(direction: Tensor) -> Any:
            return torch.func.jvp(operation, (mean,), (direction,))[1]

        results: Tensor = torch.func.vmap(along, chunk_size=COLUMNS)(columns)
        return results.reshape(len(columns), -1).mT

    def _follow_elements(self, node: Node, value: Moments) -> Local:
        """A function of single elements of one earlier value."""
        base, line = self.clusters.line(node)
        if base is not node:
            self.value(base)
            return Local({base: _scaling(_flat(line.slope, value), base, node)})
        root = self.plan.root[node]
        x, outcomes = self._outcomes(root)
        if not self.plan.random(x) or not any(slope for _, slope, _ in outcomes):
            return Local({}, value.var.flatten())
        curve = self._curve(node, root, x, outcomes, value)
        return Local({x: _scaling(curve.slope, x, node)}, curve=(x, curve))

    def _curve(self, node: Node, root: Node, x: Node, outcomes: list[Any], value: Moments) -> Nonlinearity:
        path, moments = self.clusters.path(node, root), self.value(x)
        std = moments.std.expand(value.shape).flatten()
        if self.clusters.needs_positive(path, root):
            self.reasons[node] = FIRST_ORDER
            (slope,), _ = self._slopes([x], lambda: self.clusters.moments(node, self.value), value.shape)
            return Nonlinearity(std, slope.flatten())
        if len(outcomes) == 1 and (curve := self._straight_sides(path, root, moments, value)) is not None:
            return curve
        self.reasons[node] = SERIES

        def function(values: Tensor) -> Tensor:
            return self.clusters.evaluate(path, root, values).to(values.dtype)

        work, total = working_dtype(value.device), None
        for chance, slope, offset in outcomes:
            if slope:
                gaussian = slope * moments.mean + offset, abs(slope) * moments.std
                mean, width = (t.to(work).expand(value.shape) for t in gaussian)
                series = hermite(function, mean, width, **self.clusters.panels(path, root, mean, width))
                sign = -1.0 if slope < 0 else 1.0
                terms = [chance * sign**n * c for n, c in enumerate(series, 1)]
                total = terms if total is None else [a + b for a, b in zip(total, terms, strict=True)]
        assert total is not None
        first, *further = (c.flatten().to(value.dtype) for c in total)
        least = 1e-6 * (1.0 + moments.mean.detach().abs().expand(value.shape).flatten())
        return Nonlinearity(std, first / std.clamp_min(least), further)

    def _straight_sides(self, path: list[Node], root: Node, x: Moments, value: Moments) -> Nonlinearity | None:
        """The curve of a function that is straight on either side of a single kink; None for other functions."""
        mean, std = (t.expand(value.shape) for t in (x.mean, x.std))
        points = self.clusters.points(path, root, mean, std)
        if len(points["breaks"]) != 1 or points["jumps"]:
            return None
        at = torch.as_tensor(points["breaks"][0], dtype=mean.dtype, device=mean.device).expand(value.shape)
        unit = (std + (mean - at).abs()).detach().clamp_min(1e-3)
        steps = torch.tensor([*(-p for p in reversed(PROBES)), 0.0, *PROBES], dtype=mean.dtype, device=mean.device)
        steps = steps.view(-1, *[1] * mean.ndim) * unit
        results = self.clusters.evaluate(path, root, at + steps).to(mean.dtype).expand(steps.shape)
        kink, middle = results[len(PROBES)], len(PROBES)
        below, above = (kink - results[middle - 2]) / unit, (results[middle + 2] - kink) / unit
        with torch.no_grad():
            straight = kink + torch.where(steps < 0, below, above) * steps
            scale = results.abs() + kink.abs() + (torch.maximum(below.abs(), above.abs()) * steps.abs())
            if bool(((results - straight).abs() > 64 * torch.finfo(mean.dtype).eps * (scale + at.abs())).any()):
                return None
        return rectifier(*(t.flatten() for t in (mean, std, at, below, above)))

    def _follow_product(self, node: Node, value: Moments, x: Node, y: Node) -> tuple[Local, Tensor]:
        """The product of two values: exact, by Isserlis' theorem."""
        first, second = (self.env[operand].mean.expand(value.shape) for operand in (x, y))
        within_x, within_y, between = (
            None if block is None else _spread(_spread(block, a, node).mT, b, node).mT
            for a, b, block in ((x, x, self._block(x, x)), (y, y, self._block(y, y)), (x, y, self._block(x, y)))
        )
        assert within_x is not None and within_y is not None
        fresh, mean = within_x * within_y, value.mean
        if between is not None:
            fresh = fresh + between * between.mT
            mean = mean + between.diagonal().view(value.shape)
        carries = {x: _scaling(second.flatten(), x, node), y: _scaling(first.flatten(), y, node)}
        return Local(carries, fresh), mean

    def _follow_batch_norm(self, node: Node, parent: Node, value: Moments) -> Local:
        """Division by a std that is that of a large batch, and as such a constant."""
        x, weight = parent.args[0], self.env.get(parent.args[1])
        scale = value.std / self.env[x].std.clamp_min(torch.finfo(value.dtype).tiny ** 0.5)
        if weight is not None:
            scale = scale * weight.sign().view(-1, *[1] * (value.ndim - 2))
        return Local({x: _scaling(scale.flatten(), x, node)})

    def _follow_first_order(self, node: Node, parent: Node, rule: Rule, value: Moments) -> Local:
        """Any operation by the derivative of its mean, and the variance beyond that as fresh and independent."""
        operands = [o for o in self.plan.random_operands(parent) if isinstance(self.env.get(o), Moments)]
        if rule.order_statistic:  # which is taken before functions that only rise
            unapplied = self.without_functions(parent.args[0], rule.maximum, self.value, self._moved)
            operands += [unapplied.before] if unapplied else []

        def moments() -> Moments:
            result = Evaluation._apply(self, parent, *self._arguments(parent))
            result = Evaluation._as_captured(self, parent, result)
            value: Moments = result if node is parent else result[node.args[1]]
            return value

        elementwise = rule.kind == "elementwise" or rule.noise
        slopes, result = self._slopes(operands, moments, value.shape if elementwise else None)
        fresh, carries = result.dense().var.flatten(), {}
        for operand, slope in zip(operands, slopes, strict=True):
            if slope is None:
                continue
            var = self.env[operand].var
            if elementwise:
                fresh = fresh - (slope.square() * var).flatten()
                carries[operand] = _scaling(slope.flatten(), operand, node)
            else:
                fresh = fresh - slope.square() @ var.flatten()
                carries[operand] = functools.partial(torch.matmul, slope)
        linear = bool((fresh <= LINEAR * value.var.flatten()).all())
        if not linear and not rule.noise:
            self.reasons[node] = FIRST_ORDER
        return Local(carries, None if linear else fresh.clamp_min(0))

    def _slopes(
        self, operands: list[Node], moments: Callable[[], Moments], shape: torch.Size | None
    ) -> tuple[list[Any], Moments]:
        """Derivatives of a mean by the means of the operands, and the moments.

        For a function of single elements of extents `shape` the derivatives have that shape; otherwise they are
        matrices.
        """
        recorded, values = torch.is_grad_enabled(), {operand: self.env[operand] for operand in operands}
        with torch.enable_grad():
            for operand, value in values.items():
                x = value if shape is None else value.expand(*shape)
                traced = recorded and x.mean.requires_grad
                leaf = x.mean + 0.0 if traced else x.mean.detach().clone().requires_grad_()
                self.env[operand] = Moments(leaf, x.var)
            leaves = [self.env[operand].mean for operand in operands]
            try:
                result = moments().dense()
            finally:
                self.env.update(values)
            if not result.mean.requires_grad:
                return [None] * len(operands), result
            if shape is not None:
                total = result.mean.sum()
                return list(torch.autograd.grad(total, leaves, create_graph=recorded, allow_unused=True)), result
            rows = torch.eye(result.mean.numel(), dtype=result.dtype, device=result.device)
            rows = rows.view(-1, *result.shape)
            jacobians = torch.autograd.grad(
                result.mean, leaves, rows, create_graph=recorded, allow_unused=True, is_grads_batched=True
            )
        return [None if j is None else j.flatten(1) for j in jacobians], result


def _flat(values: Any, like: Moments) -> Tensor:
    """A number, or a tensor that broadcasts, for every element."""
    return torch.as_tensor(values, dtype=like.dtype, device=like.device).expand(like.shape).flatten()


def _spread(block: Tensor, operand: Node, node: Node) -> Tensor:
    """Rows for the elements of an operand as rows for those of a value that it is broadcast to."""
    before, after = operand.info.shape, node.info.shape
    if before == after:
        return block
    shape = (*[1] * (len(after) - len(before)), *before, -1)
    return block.reshape(shape).expand(*after, -1).reshape(after.numel(), -1)


def _scaling(slope: Tensor, operand: Node, node: Node) -> Columns:
    """Multiplies every row by a number."""
    return lambda block: slope[:, None] * _spread(block, operand, node)
