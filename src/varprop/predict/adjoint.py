"""Means as a differentiable function of the noise that enters a network, and the variance of that noise.

Every operation on random values adds *fresh* variance that its linear part does not explain: dropout
p (m² + v) / (1 - p), an activation v_out - (E f')² v_in, a random weight V (m² + v) for every product, the input its
own variance. With all variances held fixed, the derivative of a mean by an earlier mean is the smoothed slope E f', so
that autograd through the means carries an output direction back to every operation where variance entered. Then

    Cov[output] = sum over sources of J diag(fresh) Jᵀ,

which is exact in all first-order correlations, through skips and shared weights; only fresh parts count as independent.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.clusters import Clusters
from ..engine.evaluation import Evaluation, apply
from ..engine.plan import Plan
from ..errors import VarpropError
from ..graph.node import Node, resolve
from ..moments import Moments
from ..rules.axes import per_axis
from ..rules.registry import Rule
from .attention import FIRST_ORDER, dropped_variance

aten = torch.ops.aten
NODES = 33  # of the trapezoidal rule: variances of GELU, SiLU, tanh within 1e-6 up to std 1, 1 % up to std 3
DROPOUTS = (aten.dropout, aten.native_dropout, aten.feature_dropout)


@dataclass
class ElementNoise:
    """Independent noise on every element of a value.

    Attributes:
        name: Path of the module in which it enters, or the name of the input.
        kind: ``input``, ``dropout``, ``draw`` or the name of a non-linear operation.
        leaf: The zero tensor that was added to the mean.
        var: Its variance, element by element.
        node: The operation or input.
        odds: Of dropout, p / (1 - p).
        before: Of dropout, the mean of what is dropped.
        by_channel: Whether all positions of a channel drop together; `var` is then not used.
    """

    name: str
    kind: str
    leaf: Tensor
    var: Tensor
    node: Node
    odds: float | None = None
    before: Tensor | None = None
    by_channel: bool = False

    @property
    def drawn_var(self) -> Tensor | None:
        """The variance of what a real draw of this noise adds to first order; None if nothing is drawn here."""
        if self.before is not None and self.odds is not None:
            return self.odds * self.before.square()
        return self.var if self.kind in ("input", "dropout", "draw") else None

    @property
    def leaves(self) -> list[Tensor]:
        """Zero tensors that were added to means, by which the outputs are differentiated."""
        return [self.leaf]

    def factors(self, gradients: Sequence[Tensor]) -> Tensor:
        """A = J √var, (batch, outputs, elements): this noise adds A Aᵀ to the covariance of the outputs.

        Args:
            gradients: For each leaf, the derivatives of all outputs by it, (outputs, batch, ...).
        """
        (gradient,) = gradients
        if self.by_channel:
            assert self.before is not None and self.odds is not None
            by_channel: Tensor = (gradient * self.before).flatten(3).sum(3).movedim(0, 1)
            return by_channel * math.sqrt(self.odds)
        return (gradient * self.var.sqrt()).flatten(2).movedim(0, 1)


@dataclass
class ParameterNoise:
    """A random parameter, whose noise all its uses and positions share, sample by sample.

    Attributes:
        name: The parameter's name.
        var: Its variance.
        uses: For every use, the zero tensor added to the result and a function from derivatives by that tensor,
            (outputs, batch, ...), to derivatives by the parameter, (outputs, batch, *parameter).
    """

    name: str
    var: Tensor
    kind: str = "parameter"
    uses: list[tuple[Tensor, Any]] = field(default_factory=list)

    @property
    def leaves(self) -> list[Tensor]:
        """One leaf for every use."""
        return [leaf for leaf, _ in self.uses]

    def factors(self, gradients: Sequence[Tensor]) -> Tensor:
        """As for `ElementNoise`: per-sample derivatives by the parameter, times its standard deviation."""
        total = sum(pull(gradient) for (_, pull), gradient in zip(self.uses, gradients, strict=True))
        assert isinstance(total, Tensor)
        return (total * self.var.sqrt()).flatten(2).movedim(0, 1)


class SmoothClusters(Clusters):
    """Smooth functions by the trapezoidal rule, with their slope by Stein's identity E f' = E[f (x - m)] / v.

    So no derivative goes through the integrals.
    """

    def moments(self, node: Node, value: Callable[[Node], Moments]) -> Moments:
        """Moments of a clustered node; the mean is the line of its smoothed slope."""
        root = self.plan.root[node]
        if self.line(node)[0] is not node or node in self.plan.skips or not self._is_smooth(node, root):
            return super().moments(node, value)
        x, path = value(root).dense(), self.path(node, root)
        with torch.no_grad():
            z = torch.linspace(-6, 6, NODES, dtype=x.dtype, device=x.device).view(-1, *[1] * x.ndim)
            weight = torch.softmax(-0.5 * z.square(), 0)
            std = x.var.sqrt()
            f = self.evaluate(path, root, x.mean + std * z)
            mean = (weight * f).sum(0)
            var = (weight * (f - mean).square()).sum(0)
            slope = (weight * z * f).sum(0) / std
            at_mean = std <= torch.finfo(std.dtype).eps ** 0.5 * x.mean.abs().clamp_min(1)  # too narrow for differences
        if bool(at_mean.any()):
            plain = self.evaluate(path, root, x.mean.unsqueeze(0)).squeeze(0)
            tangent = _gradient(plain, x.mean)
            slope = slope if tangent is None else torch.where(at_mean, tangent, slope)
        return Moments(mean + slope * (x.mean - x.mean.detach()), var)

    def _is_smooth(self, node: Node, root: Node) -> bool:
        source, path = self.plan.rules.get(root), self.path(node, root)
        if (source is not None and (source.drawn or source.outcomes)) or self.needs_positive(path, root):
            return False
        rules = [(self.plan.rules[step], *self._further(step)) for step in path]
        return not any([*r.kinks(*args, **named), *r.jumps(*args, **named)] or r.swings for r, args, named in rules)


class MeanEvaluation(Evaluation):
    """The rules' means with all variances held fixed, as a function of the noise that enters.

    Attributes:
        sources: The noise that enters, in the order of execution.
        linearized: Operations whose own fresh variance is not counted, by name of their module.
    """

    def __init__(self, plan: Plan, env: dict[Node, Any], parameters: dict[Node, ParameterNoise]) -> None:
        super().__init__(plan, env, annotate=False)
        self.clusters = SmoothClusters(plan, env)
        self.parameters = parameters
        self.sources: list[ElementNoise] = []
        self.linearized: dict[str, str] = {}

    def _stamp(self, node: Node, value: Any) -> Any:
        value = super()._stamp(node, value)
        if isinstance(value, list):  # of several results the first carries the noise: the others are indices and masks
            return [self._entered(node, v) if not i else _with_fixed_variance(v) for i, v in enumerate(value)]
        return self._entered(node, value)

    def _apply(self, node: Node, args: Any, kwargs: Any) -> Any:
        first_order = FIRST_ORDER.get(node.packet)
        return first_order(node, *args, **kwargs) if first_order else super()._apply(node, args, kwargs)

    def _entered(self, node: Node, value: Any) -> Any:
        """A value with its variance held fixed, and the noise that this operation adds to its mean."""
        if not isinstance(value, Moments):
            return value
        value = value.dense()
        mean, var = value.mean, value.var.detach()
        name, rule = node.module or "(model)", self.plan.rules.get(node)
        if rule is None or node.target is operator.getitem:
            return Moments(mean, var)
        for parameter, pull in self._parameter_uses(node, rule):
            leaf = torch.zeros_like(mean, requires_grad=True)
            mean = mean + leaf
            self.parameters[parameter].uses.append((leaf, pull))
        fresh, mean = self._fresh(node, rule, Moments(mean, var))
        if fresh is None:
            return Moments(mean, var)
        leaf = torch.zeros_like(mean, requires_grad=True)
        source = ElementNoise(name, _kind(node, rule), leaf, fresh.expand(mean.shape), node)
        if source.kind == "dropout" and node.packet in DROPOUTS:
            source.before, source.odds = self._mean(node.args[0]).detach(), _odds(node)
        self.sources.append(source)
        if node.packet is aten.feature_dropout:  # all positions of a channel by one factor, and each by what it varies
            assert source.before is not None and source.odds is not None
            source.by_channel, own = True, torch.zeros_like(mean, requires_grad=True)
            left = (source.var - source.odds * source.before.square()).clamp_min(0)
            self.sources.append(ElementNoise(name, "dropout of what varies", own, left, node))
            mean = mean + own
        return Moments(mean + leaf, var)

    def _mean(self, node: Node) -> Tensor:
        value = self.value(node)
        return value.dense().mean if isinstance(value, Moments) else value

    def _fresh(self, node: Node, rule: Rule, value: Moments) -> tuple[Tensor | None, Tensor]:
        """The variance that an operation adds (None if it is linear in its random arguments), and its mean.

        The mean of a curved function comes back as the line of its smoothed slope: the backward passes, one for every
        output, are then as cheap as those of the plain network.
        """
        operands = [operand for operand in self.plan.random_operands(node) if operand not in self.parameters]
        if rule.kind == "source" or not operands:
            reads_parameter = any(operand in self.parameters for operand in node.operands)
            return None if reads_parameter else value.var, value.mean
        if self.plan.inside_cluster(node):
            if self.clusters.line(node)[0] is not node:
                return None, value.mean
            return self._of_elements(value, self.plan.skips.get(node, (self.plan.root[node],)))
        if rule.noise or node.packet is aten.feature_dropout:
            return self._of_elements(value, operands)
        if rule.order_statistic and (windows := _windows(node)):
            return self._of_windows(node, rule, value, windows)
        if rule.transposable or rule.kind == "elementwise":
            random = self.plan.random_operands(node)
            combines = rule.signs is None and rule.kind != "structural" and len(random) > 1
            return self._left_of_product(node, rule, value, random) if combines else None, value.mean
        self.linearized[node.module or "(model)"] = str(node.packet or node.target)
        if node.packet is aten.scaled_dot_product_attention:
            args, kwargs = self._arguments(node)
            return dropped_variance(node, *args, **kwargs), value.mean
        return None, value.mean

    def _of_elements(self, value: Moments, inputs: Sequence[Node]) -> tuple[Tensor, Tensor]:
        """For a function of elements at the same position: v - sum of (dE/dm)² v over its inputs, and its mean."""
        fresh, mean = value.var, value.mean.detach()
        for source in inputs:
            for before in (source, *source.operands[:1]):  # a mixture over dropout reads what was before it
                moments = self.env.get(before)
                if not isinstance(moments, Moments):
                    continue
                slope = _gradient(value.mean, moments.mean)
                if slope is not None:
                    fresh = fresh - slope.square() * moments.var
                    mean = mean + slope * (moments.mean - moments.mean.detach())
                    break
        return fresh.clamp_min(0), mean

    def _of_windows(self, node: Node, rule: Rule, value: Moments, windows: _Windows) -> tuple[Tensor, Tensor]:
        """For a maximum over windows: v - sum over a window of (dE/dm)² v, and its mean.

        Windows that overlap are looked at in several turns, in each of which no two of them do.
        """
        unapplied = self.without_functions(node.args[0], rule.maximum, self.value, self._moved)
        before: Moments = (unapplied.value if unapplied else self.value(node.args[0])).dense()
        fresh, mean = value.var, value.mean.detach()
        for turn in windows.turns(value.mean):
            slope = _gradient(value.mean, before.mean, turn)
            if slope is not None:
                fresh = fresh - turn * windows.sums(slope.square() * before.var)
                mean = mean + turn * windows.sums(slope * (before.mean - before.mean.detach()))
        return fresh.clamp_min(0), mean

    def _left_of_product(self, node: Node, rule: Rule, value: Moments, random: list[Node]) -> Tensor:
        """Of a function linear in each argument: the variance left when each is taken as the only random one."""
        left = value.var
        for chosen in random:

            def fixed(operand: Node, chosen: Node = chosen) -> Any:
                known = self.value(operand)
                return known.dense().mean if isinstance(known, Moments) and operand is not chosen else known

            args, kwargs = resolve((node.args, node.kwargs), fixed)
            left = left - _first_result(rule, node, args, kwargs).var.detach()
        return left.clamp_min(0)

    def _parameter_uses(self, node: Node, rule: Rule) -> list[tuple[Node, Any]]:
        """The random parameters an operation reads, each with the way back from its result to the parameter."""
        used = [operand for operand in node.operands if operand in self.parameters]
        return [(parameter, self._pull(node, rule, parameter)) for parameter in used]

    def _pull(self, node: Node, rule: Rule, parameter: Node) -> Any:
        """From derivatives by the result, (outputs, batch, ...), to per-sample derivatives by a parameter."""
        position = next(i for i, argument in enumerate(node.args) if argument is parameter)
        shape, channels = parameter.form.shape, rule.channels or -1
        normalizes = rule.batch_norm is not None or rule.normalizes(*node.args)
        weight = 2 if node.packet in (aten.layer_norm, aten.group_norm, aten.rms_norm) else 1
        adds = rule.signs is not None and rule.signs[position] == 1.0 and not node.kwargs
        if position == rule.bias or adds or (normalizes and position == weight + 1):
            return lambda gradient: _summed_to(gradient, shape, channels)
        if normalizes and position == weight:
            plain = self._without_scale_and_shift(node, rule, weight)
            return lambda gradient: _summed_to(gradient * plain, shape, channels)
        if rule.kind == "elementwise" and rule.product and len(node.operands) == 2:
            factor = self._mean(node.args[1 - position]).detach()
            return lambda gradient: _summed_to(gradient * factor, shape)
        if rule.linear and position == 1:
            x = self._mean(node.args[0]).detach()
            if rule.convolution is None:
                return lambda gradient: _linear_weight_gradient(gradient, x)
            settings = rule.convolution(*resolve(node.args, self.value))
            if not settings.transposed and len(shape) == 4:
                return lambda gradient: _convolution_weight_gradient(gradient, x, shape, settings)
        if node.packet is aten.embedding and position == 0:
            tokens = self.value(node.args[1])
            return lambda gradient: _embedding_gradient(gradient, tokens, shape)
        raise VarpropError(
            f"parameter_var names '{self.parameters[parameter].name}', which {node.packet or node.target} in "
            f"'{node.module or '(model)'}' reads: random parameters of linear layers, convolutions, embeddings and "
            f"normalization layers are followed, and factors and terms of plain products and sums; leave this one out."
        )

    def _without_scale_and_shift(self, node: Node, rule: Rule, weight: int) -> Tensor:
        """The mean of a normalization's result with scale 1 and shift 0."""
        args = [self.value(a) if isinstance(a, Node) else a for a in node.args]
        args[weight : weight + 2] = [None, None]
        return _first_result(rule, node, args, {}).mean.detach()


def _first_result(rule: Rule, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Moments:
    """The first result of an operation whose first argument may be a constant, with every axis written out."""
    first, *others = args
    if isinstance(first, Tensor) and first.is_floating_point() and rule.kind == "rule":
        first = Moments(first, torch.zeros_like(first))
    result = apply(rule, node.target, (first, *others), kwargs)
    moments: Moments = result[0] if isinstance(result, (list, tuple)) else result
    return moments.dense()


def _gradient(mean: Tensor, by: Tensor, weights: Tensor | None = None) -> Tensor | None:
    """The derivative of a sum of means by earlier means; None if they do not depend on them."""
    if not mean.requires_grad or not by.requires_grad:
        return None
    total = mean.sum() if weights is None else (mean * weights).sum()
    (found,) = torch.autograd.grad(total, by, retain_graph=True, allow_unused=True)
    return found


def _with_fixed_variance(value: Any) -> Any:
    return Moments(value.mean, value.var.detach(), value.full) if isinstance(value, Moments) else value


def _odds(node: Node) -> float:
    """p / (1 - p) of a dropout."""
    p = float(node.args[1])
    return p / (1 - p)


def _kind(node: Node, rule: Rule) -> str:
    if (
        rule.noise
        or node.packet in DROPOUTS
        or (rule.kind == "source" and node.stack and "Drop" in node.stack[-1].class_name)
    ):
        return "dropout"
    if rule.kind == "source":
        return "draw"
    return "product" if rule.transposable else str(node.packet).rpartition(".")[2]


def _summed_to(gradient: Tensor, shape: Sequence[int], channels: int = -1) -> Tensor:
    """Derivatives, (outputs, batch, ...), summed over what a parameter of a shape is broadcast along, sample by sample.

    A vector of channels may belong to axis 1 of the result; every other parameter is aligned at the end, as usual.
    """
    outputs, batch = gradient.shape[:2]
    if len(shape) == 1 and channels == 1 and gradient.ndim > 3:
        return gradient.flatten(3).sum(3)
    aligned = shape[1:] if len(shape) == gradient.ndim - 1 else shape  # behind a batch axis of extent 1
    gradient = (
        gradient.sum(list(range(2, gradient.ndim - len(aligned)))) if gradient.ndim - 2 > len(aligned) else gradient
    )
    axes = [axis + 2 for axis, extent in enumerate(aligned) if extent == 1]
    return (gradient.sum(axes, keepdim=True) if axes else gradient).reshape(outputs, batch, *shape)


def _linear_weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Per-sample derivatives by a linear layer's weight, summed over positions."""
    by_result = gradient.flatten(2, -2) if gradient.ndim > 3 else gradient.unsqueeze(2)
    entering = x.flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1)
    return torch.einsum("kbto,bti->kboi", by_result, entering)


def _convolution_weight_gradient(gradient: Tensor, x: Tensor, shape: torch.Size, settings: Any) -> Tensor:
    """Per-sample derivatives by a convolution's weight, through the windows it reads."""
    outputs, batch = gradient.shape[:2]
    (top, bottom), (left, right) = settings.zeros
    windows = F.unfold(F.pad(x, (left, right, top, bottom)), shape[2:], settings.dilation, 0, settings.stride)
    windows = windows.view(batch, settings.groups, -1, windows.shape[-1])
    by_result = gradient.view(outputs, batch, settings.groups, shape[0] // settings.groups, -1)
    return torch.einsum("kbgop,bgip->kbgoi", by_result, windows).reshape(outputs, batch, *shape)


def _embedding_gradient(gradient: Tensor, tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """Per-sample derivatives by an embedding's table: those of equal tokens add up."""
    outputs, batch = gradient.shape[:2]
    table = gradient.new_zeros(outputs, batch, *shape)
    index = tokens.reshape(1, batch, -1, 1).expand(outputs, -1, -1, shape[1])
    return table.scatter_add(2, index, gradient.reshape(outputs, batch, -1, shape[1]))


@dataclass(frozen=True)
class _Windows:
    """The windows of a maximum over two axes."""

    size: list[int]
    stride: list[int]
    padding: list[int]
    ceil_mode: bool

    def turns(self, pooled: Tensor) -> list[Tensor]:
        """Masks over the windows; in each no two windows overlap."""
        steps = [-(-size // stride) for size, stride in zip(self.size, self.stride, strict=True)]
        masks = []
        for row in range(steps[0]):
            for column in range(steps[1]):
                mask = torch.zeros_like(pooled)
                mask[..., row :: steps[0], column :: steps[1]] = 1
                masks.append(mask)
        return masks

    def sums(self, values: Tensor) -> Tensor:
        """The sum over every window."""
        return F.avg_pool2d(values, self.size, self.stride, self.padding, self.ceil_mode, divisor_override=1)


def _windows(node: Node) -> _Windows | None:
    """The windows of a maximum pooling over two axes without gaps; None for other maxima."""
    if node.packet not in (aten.max_pool2d, aten.max_pool2d_with_indices):
        return None
    defaults: list[Any] = [[], 0, 1, False]
    size, stride, padding, dilation, ceil_mode = [*node.args[1:], *defaults[len(node.args) - 2 :]]
    if dilation not in (1, [1, 1]):
        return None
    return _Windows(per_axis(size, 2), per_axis(stride or size, 2), per_axis(padding, 2), bool(ceil_mode))


Source = ElementNoise | ParameterNoise
