"""Means as a differentiable function of the noise that enters a network, and the variance of that noise.

Every operation on random values adds *fresh* variance that its linear part does not explain: dropout
p (m² + v) / (1 - p), an activation v_out - (E f')² v_in, a random weight V (m² + v) for every product, the input its
own variance. With all variances held fixed, the derivative of a mean by an earlier mean is the smoothed slope E f', so
that autograd through the means carries an output direction back to every operation where variance entered. Then

    Cov[output] = sum over sources of J diag(fresh) Jᵀ,

which is exact in all first-order correlations, through skips and shared weights; only fresh parts count as independent.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.evaluation import Evaluation, apply
from ..engine.plan import Plan
from ..errors import VarpropError
from ..graph.node import Node, TensorInfo, resolve
from ..graph.program import tensor_at
from ..moments import Moments
from ..rules.norm import layer_norm
from ..rules.registry import Rule
from .attention import FIRST_ORDER, dropped_weights, mean_of, var_of
from .curves import SlopedClusters, attached, left_by_slopes, line
from .noise import ONLY, AttentionDropout, ChannelCurve, ElementNoise, Outcomes, ParameterNoise, ParameterUse
from .ranks import axis_of_ranks, is_running, ranked, reduced_axes, running_maxima
from .recurrent import unroll_of
from .weights import by_convolution_weight, by_embedding, by_linear_weight, summed_to
from .windows import Windows

aten = torch.ops.aten


class MeanEvaluation(Evaluation):
    """The rules' means with all variances held fixed, as a function of the noise that enters.

    Attributes:
        sources: The noise that enters, in the order of execution.
        linearized: Operations whose own fresh variance is not counted, by name of their module.
        attends: Whether one of them is attention, or a softmax inside the network.
    """

    def __init__(self, plan: Plan, env: dict[Node, Any], parameters: dict[Node, ParameterNoise]) -> None:
        super().__init__(plan, env, annotate=False)
        self.clusters: SlopedClusters = SlopedClusters(plan, env)
        self.parameters = parameters
        self.by_weight: dict[Node, Tensor] = {}  # of linear layers with random weights: Var W (E x)²
        self.fresh: dict[Node, Tensor] = {}  # the variance that an operation adds, where it is known beforehand
        self.together: dict[Node, Outcomes] = {}  # of functions of what drops out by channels
        self.curves: dict[Node, ChannelCurve] = {}  # where parameters are random
        self.of_dropped: set[Node] = set()  # maxima over windows of what drops out
        self.sources: list[ElementNoise] = []
        self.linearized: dict[str, str] = {}
        self.attends = False
        self.dtype = torch.promote_types(plan.program.outputs[0].info.dtype, torch.float32)

    def _as_captured(self, node: Node, value: Any) -> Any:
        value = super()._as_captured(node, value)
        if isinstance(value, list):  # of several results the first carries the noise: the others are indices and masks
            return [self._entered(node, v) if not i else _with_fixed_variance(v) for i, v in enumerate(value)]
        return self._entered(node, value)

    def _visit(self, node: Node) -> None:
        root = self.plan.root.get(node, node)
        if root is not node and root in self.parameters:
            raise self._not_followed(node, root)
        rule = self.plan.rules.get(node) if self.plan.random(node) else None
        ranks = rule is not None and rule.order_statistic
        windows = Windows.of(node) if ranks else None
        if rule is None or not ranks or (windows is None and not reduced_axes(node) and axis_of_ranks(node) is None):
            super()._visit(node)
        else:  # by what its arguments were before functions that come after it: the arguments are not needed
            self.env[node] = self._as_captured(node, self._largest(node, rule, windows))

    def _execute(self, node: Node) -> Any:
        return precise(super()._execute(node))

    def _apply(self, node: Node, args: Any, kwargs: Any) -> Any:
        try:
            return self._applied(node, args, kwargs)
        except (AttributeError, TypeError) as error:  # of a rule that takes no random parameter there
            parameters = [operand for operand in node.operands if operand in self.parameters]
            if not parameters:
                raise
            model, names = self.plan.program.model, {p: self.parameters[p].name for p in parameters}
            buffers = [p for p in parameters if not isinstance(tensor_at(model, names[p]), torch.nn.Parameter)]
            raise self._not_followed(node, [*buffers, *parameters][0]) from error

    def _applied(self, node: Node, args: Any, kwargs: Any) -> Any:
        if (first_order := FIRST_ORDER.get(node.packet)) is not None:
            self.attends |= node is not self.plan.program.outputs[0]
            return first_order(node, *args, **kwargs)
        if (unroll := unroll_of(self.plan.rules.get(node))) is not None:
            count = itertools.count(1)

            def enter(entry: Tensor, fresh: Tensor) -> None:
                name, inside = node.module or "(model)", ONLY - next(count)
                self.sources.append(ElementNoise(name, "recurrent", entry, fresh, node, inside=inside))

            result = unroll(lambda x, p: self._dropped_inside(node, next(count), x, p), enter, *args, **kwargs)
            if result is not None:
                return result
        rule = self.plan.rules[node]
        if rule.batch_norm is not None or rule.normalizes(*node.args):  # also of a constant, with a random scale
            args = _lifted(rule, args)
        if node.packet is aten.linear and isinstance(args[1], Moments):
            return self._with_random_weight(node, *args)
        if rule.linear and rule.convolution is not None and not kwargs and isinstance(args[0], Moments):
            return _convolved(node, rule, args)
        if rule.batch_norm is not None and not rule.normalizes(*node.args) and not kwargs:
            result = _by_stored_statistics(node, rule, args)
            if result is not None:
                return result
        if node.packet is aten.layer_norm and not any(isinstance(argument, Moments) for argument in args[1:]):
            return _layer_normed(*args, **kwargs)
        if node.packet in (aten.dropout, aten.native_dropout) and rule.noise and not kwargs:
            return self._dropped(node, *args)
        return super()._apply(node, args, kwargs)

    @torch.no_grad()
    def _dropped(self, node: Node, x: Moments, p: float, train: bool | None = True) -> Any:
        """Moments behind a dropout; the variance that it adds is needed again, as a source."""
        if train is False or not 0 < p < 1:
            return super()._apply(node, (x, p, train), {})
        fresh = self.fresh[node] = torch.addcmul(x.var, x.mean, x.mean).mul_(p / (1 - p)).expand(x.full)
        result = Moments(x.mean, x.var + fresh, x.full)
        return [result, None] if node.packet is aten.native_dropout else result

    def _dropped_inside(self, node: Node, draw: int, x: Moments, p: float) -> Moments:
        """Moments behind a dropout that stands inside an operation, and its noise."""
        if p >= 1:
            x, p = Moments(torch.zeros_like(x.mean), torch.zeros_like(x.var)), 0.0
        mean = x.mean.view_as(x.mean) if x.mean.requires_grad else x.mean.detach().requires_grad_()
        fresh = torch.addcmul(x.var, mean, mean).detach() * (p / (1 - p))
        self.sources.append(ElementNoise(node.module or "(model)", "dropout", mean, fresh, node, inside=draw))
        return Moments(mean, x.var.detach() + fresh)

    def _largest(self, node: Node, rule: Rule, windows: Windows | None) -> Any:
        """Maxima over windows, or ranks along whole axes; non-decreasing functions before them come after them."""
        unapplied = self.without_functions(node.args[0], rule.maximum, self.value, self._moved)
        several = isinstance(node.info, (list, tuple))
        info = node.info[0] if several else node.info
        before: Moments = (unapplied.value if unapplied else self.value(node.args[0])).dense()
        dropout = self._dropout_of_rectified(node.args[0]) if rule.maximum else None
        over = windows or Windows.whole(before.shape, reduced_axes(node))
        if dropout is not None and over is not None:
            read = self.value(dropout.args[0])
            kept = Moments(mean_of(read), var_of(read))
            axes = reduced_axes(node)
            shape = info.shape if windows else [1 if axis in axes else n for axis, n in enumerate(kept.shape)]
            found, left = over.largest_of_dropped(kept, before.mean, float(dropout.args[1]), shape)
            mean, var, self.fresh[node] = (values.view(info.shape) for values in (found.mean, found.var, left))
            if windows is None:  # of many the largest vary, which counts here as if their means decided it
                self.of_dropped.add(node)
            return [Moments(mean, var), None] if several else Moments(mean, var)
        if self._drops(unapplied.before if unapplied else node.args[0]):
            self.of_dropped.add(node)
        pooled, left = self._ranked(node, rule, before) if windows is None else windows.largest(before, info.shape)
        result = pooled
        if unapplied:
            result = self.clusters.moments_from(unapplied.after, unapplied.before, pooled)
            slopes = self.clusters.slopes.pop(unapplied.after, None)
            slope = _gradient(result.mean, pooled.mean) if slopes is None else slopes[0][1]
            by_line = 0.0 if slope is None else slope.square() * (pooled.var - left)
            left = (result.var - by_line).detach().clamp_min(0)
        self.fresh[node] = left
        return [result, None] if several else result

    def _ranked(self, node: Node, rule: Rule, x: Moments) -> tuple[Moments, Tensor]:
        """Ranks along whole axes, and the variance that enters with their results."""
        axis = axis_of_ranks(node)
        if axis is None or not is_running(node):
            others, kwargs = resolve((node.args[1:], node.kwargs), self.value)
            return ranked(node, x, lambda read: _first_result(rule, node, (read, *others), kwargs))
        found, entry, fresh = running_maxima(x, axis, 1.0 if rule.maximum else -1.0)
        kind = "maximum of dropped" if node in self.of_dropped else kind_of(node, rule)
        self.sources.append(ElementNoise(node.module or "(model)", kind, entry, fresh, node, inside=ONLY))
        return found, torch.zeros_like(fresh)

    def _drops(self, node: Node) -> bool:
        """True if a value is that of a dropout: zero or not, for which no Gaussian stands where the largest counts."""
        return self.plan.mixture(self.plan.root.get(node, node)) is not None

    def _dropout_of_rectified(self, node: Node) -> Node | None:
        """The dropout, at work, that a value comes from, if it reads a rectifier; None for other values."""
        node = node.args[0] if node.target is operator.getitem else node
        if node.packet not in (aten.dropout, aten.native_dropout) or not 0 < float(node.args[1]) < 1:
            return None
        return node if node.args[0].packet in (aten.relu, aten.relu_) and self._drops(node) else None

    def _with_random_weight(self, node: Node, x: Any, weight: Moments, bias: Any = None) -> Moments:
        """The rule of a linear layer; what its weight adds is needed again, as a source of variance."""
        mean, weight, fixed = mean_of(x), weight.dense(), None if bias is None else mean_of(bias)
        with torch.no_grad():
            var = self.by_weight[node] = F.linear(mean.square(), weight.var)
            if isinstance(x, Moments):
                var = var + F.linear(x.dense().var, weight.mean.square() + weight.var)
            if isinstance(bias, Moments):
                var = var + bias.var
        return Moments(F.linear(mean, weight.mean, fixed), var)

    def _entered(self, node: Node, value: Any) -> Any:
        """A value with its variance held fixed, and the noise that this operation adds to its mean."""
        if not isinstance(value, Moments):
            return value
        if isinstance(node.info, TensorInfo) and not node.info.is_floating:  # truth values, in the dtype of the others
            value = value.to(self.dtype)
        value = value.dense()
        var, rule = value.var.detach(), self.plan.rules.get(node)
        if rule is None or node.target is operator.getitem:
            return Moments(value.mean, var)
        fresh, mean = self._fresh(node, rule, Moments(value.mean, var))
        together = self.together.pop(node, None)
        parameters = [operand for operand in node.operands if operand in self.parameters]
        if fresh is None and not parameters:
            return Moments(mean, var)
        # a node of autograd of its own: dropout hands on the mean that it reads, into which it puts no noise
        mean = mean.view_as(mean) if mean.requires_grad else mean.detach().requires_grad_()
        for parameter in parameters:
            use = self._use(node, rule, parameter, mean)
            use.images = rule.channels == 1 and mean.ndim > 2
            self.parameters[parameter].uses.append(use)
        if fresh is not None:
            self._add_source(node, rule, mean, fresh.expand(mean.shape), together)
        return Moments(mean, var)

    def _add_source(self, node: Node, rule: Rule, mean: Tensor, fresh: Tensor, together: Outcomes | None) -> None:
        name = node.module or "(model)"
        if rule.operation == "attention":
            args, kwargs = self._arguments(node)
            std, values, _ = dropped_weights(*args, **kwargs)
            drop = AttentionDropout(name, "dropout", mean, fresh, node, inside=ONLY, std=std, values=values)
            self.sources += [drop, ElementNoise(name, "dropout of what varies", mean, fresh, node, inside=ONLY)]
            return
        kind = "maximum of dropped" if node in self.of_dropped else kind_of(node, rule)
        source = ElementNoise(name, kind, mean, fresh, node, curve=self.curves.pop(node, None))
        if together is not None:
            source.jump, source.chance = together
            source.kind, source.inside = "dropout", ONLY
        elif (mixture := self.plan.mixture(node)) is not None and kind == "dropout":
            outcomes = mixture[1]
            if len(outcomes) == 2:
                (_, lower, shift), (source.chance, slope, offset) = outcomes
                source.jump = (slope - lower) * mean_of(self.value(mixture[0])).detach() + (offset - shift)
            else:
                source.inside = ONLY
        self.sources.append(source)
        if source.jump is not None and not rule.noise:  # all positions of a channel by one draw, and what each varies
            spread = source.chance * (1 - source.chance) * source.jump.square()
            source.by_channel = True
            left = (source.var - spread).clamp_min(0).to(mean.dtype)  # means that were integrated are in double
            left_kind = "dropout of what varies" if together is None else kind_of(node, rule)
            self.sources.append(ElementNoise(name, left_kind, mean, left, node, inside=source.inside))

    def _fresh(self, node: Node, rule: Rule, value: Moments) -> tuple[Tensor | None, Tensor]:
        """The variance that an operation adds (None if it is linear in its random arguments), and its mean.

        The mean of a curved function comes back as the line of its smoothed slope: the backward passes, one for every
        output, are then as cheap as those of the plain network.
        """
        operands = [operand for operand in self.plan.random_operands(node) if operand not in self.parameters]
        if rule.operation == "attention":
            self.linearized[node.module or "(model)"] = str(node.packet or node.target)
            args, kwargs = self._arguments(node)
            return (dropped_weights(*args, **kwargs)[2] if rule.draws(*args, **kwargs) else None), value.mean
        if rule.operation == "recurrent" and unroll_of(rule) is not None:
            return None, value.mean
        if rule.kind == "source" or not operands:
            reads_parameter = any(operand in self.parameters for operand in node.operands)
            return None if reads_parameter else value.var, value.mean
        if self.plan.inside_cluster(node):
            if self.clusters.line(node)[0] is not node:
                return None, value.mean
            if (slopes := self.clusters.slopes.pop(node, None)) is not None:
                if self.parameters and (curve := self._channel_curve(node, value, slopes)) is not None:
                    self.curves[node] = curve
                return left_by_slopes(value.var, slopes), value.mean
            self._note_outcomes(node, value)
            return self._of_elements(value, self.plan.skips.get(node, (self.plan.root[node],)))
        if node in self.fresh:
            return self.fresh.pop(node), value.mean
        if rule.noise or rule.draws(*node.args, **node.kwargs) or self.plan.mixture(node) is not None:
            return self._of_elements(value, operands)
        if rule.transposable or rule.kind == "elementwise":
            random = self.plan.random_operands(node)
            combines = rule.signs is None and rule.kind != "structural" and len(random) > 1
            combines = combines and not self._shared(node, rule)
            return self._left_of_product(node, rule, value, random) if combines else None, value.mean
        if operands == [node.args[0]] and (axes := reduced_axes(node)):  # as a norm: it reads every element once
            x = self.value(node.args[0]).dense()
            slope = _gradient(value.mean, x.mean)
            by_line = 0.0 if slope is None else (slope.square() * x.var).sum(axes).view(value.shape)
            return (value.var - by_line).clamp_min(0), value.mean
        self.linearized[node.module or "(model)"] = str(node.packet or node.target)
        return None, value.mean

    def _channel_curve(
        self, node: Node, value: Moments, slopes: Sequence[tuple[Moments, Tensor]]
    ) -> ChannelCurve | None:
        """How a curved function reads values of which channels have positions; None where that is not known."""
        reads = []
        for (moments, slope), read in zip(slopes, self.plan.skips.get(node, (self.plan.root[node],)), strict=False):
            known = self.env.get(read)
            if not isinstance(known, Moments) or known.mean is not moments.mean or known.ndim < 3:
                return None
            reads.append((read, moments.mean.detach(), slope))
        before: Node | None = reads[0][0] if reads and len(reads) == len(slopes) else None
        while before is not None:  # back to what has channels
            rule = self.plan.rules.get(before)
            if rule is not None and rule.channels in (1, -1):
                return ChannelCurve(node, value.mean.detach(), reads, rule.channels)
            before = next(iter(self.plan.random_operands(before)), None) if self.plan.random(before) else None
        return None

    @torch.no_grad()
    def _note_outcomes(self, node: Node, value: Moments) -> None:
        """Keep how far the two means of a function of what drops out by channels lie apart, all positions at once."""
        root = self.plan.root[node]
        mixture, rule = self.plan.mixture(root), self.plan.rules.get(root)
        if mixture is None or rule is None or rule.noise or len(mixture[1]) != 2:
            return
        before = self.value(mixture[0])
        m, v = mean_of(before), var_of(before)
        (_, *first), (chance, *second) = mixture[1]
        means = [
            self.clusters.of_gaussian(node, root, Moments(slope * m + offset, slope**2 * v)).dense().mean
            for slope, offset in (first, second)
        ]
        self.clusters.slopes.pop(node, None)
        if means[0].shape == value.mean.shape:
            self.together[node] = means[1] - means[0], chance

    def _of_elements(self, value: Moments, inputs: Sequence[Node]) -> tuple[Tensor, Tensor]:
        """For a function of elements at the same position: v - sum of (dE/dm)² v over its inputs, and its mean."""
        slopes = []
        for source in inputs:
            for before in (source, *source.operands[:1]):  # a mixture over dropout reads what was before it
                moments = self.env.get(before)
                if not isinstance(moments, Moments):
                    continue
                slope = _gradient(value.mean, moments.mean)
                if slope is not None:
                    slopes.append((moments, slope))
                    break
        return left_by_slopes(value.var, slopes), line(value.mean.detach(), slopes)

    def _left_of_product(self, node: Node, rule: Rule, value: Moments, random: list[Node]) -> Tensor:
        """The variance that lines by several random arguments leave."""
        if rule.kind == "elementwise" and not rule.multilinear:
            return self._left_of_elements(node, rule, value, random)
        with torch.no_grad():
            if rule.linear and rule.weighted and {*node.args[:2]} <= {*random} and not node.kwargs:
                x, weight = (self.value(operand).dense().var for operand in node.args[:2])
                left: Tensor = node.target(x, weight, None, *node.args[3:])  # a bias leaves nothing
                return left
            left = value.var
            for chosen in random:

                def fixed(operand: Node, chosen: Node = chosen) -> Any:
                    known = self.value(operand)
                    if operand is chosen or not isinstance(known, Moments):
                        return known
                    mean = known.dense().mean
                    return mean if operand.info.is_floating else Moments(mean, torch.zeros_like(mean))  # a condition

                args, kwargs = resolve((node.args, node.kwargs), fixed)
                left = left - _first_result(rule, node, args, kwargs).var
            return left.clamp_min(0)

    def _left_of_elements(self, node: Node, rule: Rule, value: Moments, random: list[Node]) -> Tensor:
        """The variance that lines leave of a curved function of several values, such as a quotient."""
        read = {}
        for operand in random:
            x = self.value(operand).dense()
            mean, var = (t.detach().expand(value.shape) for t in (x.mean, x.var))
            read[operand] = Moments(mean.requires_grad_(), var)
        args, kwargs = resolve((node.args, node.kwargs), lambda operand: read.get(operand, self.env.get(operand)))
        with torch.enable_grad():
            mean = _first_result(rule, node, args, kwargs).mean
        slopes = [(x, _gradient(mean, x.mean)) for x in read.values()]
        return left_by_slopes(value.var, [(x, slope) for x, slope in slopes if slope is not None])

    def _shared(self, node: Node, rule: Rule) -> bool:
        """True if positions share a random parameter by which something random is multiplied: see `SharedProducts`."""
        factors = [argument for argument in node.args[:2] if isinstance(argument, Node)]
        parameters = [factor for factor in factors if factor in self.parameters]
        others = [factor for factor in factors if factor not in self.parameters and self.plan.random(factor)]
        if not (len(parameters) == len(others) == 1):
            return False
        shape: torch.Size = others[0].info.shape
        samples: int = self.plan.program.inputs[0].info.shape[0]
        if rule.linear:
            return rule.convolution is not None or len(shape) > 2 or shape[0] > samples
        weights: torch.Size = parameters[0].info.shape
        return shape.numel() > samples * weights.numel()

    def reads_random_weight(self, node: Node) -> bool:
        """True if an operation is a linear layer with a random weight that reads something random."""
        return node.packet is aten.linear and node.args[1] in self.parameters and self.plan.random(node.args[0])

    def _use(self, node: Node, rule: Rule, parameter: Node, entry: Tensor) -> ParameterUse:
        """How an operation reads a random parameter."""
        positions = [i for i, argument in enumerate(node.args) if argument is parameter]
        if len(positions) != 1:  # in a list, or twice
            raise self._not_followed(node, parameter)
        (position,) = positions
        shape, channels = parameter.info.shape, rule.channels or -1
        normalizes = rule.batch_norm is not None or rule.normalizes(*node.args)
        reading: Callable[[Sequence[Any]], Tensor] | None
        weight = 2 if node.packet in (aten.layer_norm, aten.group_norm, aten.rms_norm) else 1
        adds = rule.signs is not None and not node.kwargs
        if position == rule.bias or adds or (normalizes and position == weight + 1):
            sign = rule.signs[position] if adds and rule.signs else 1.0
            return ParameterUse(entry, node, lambda gradient, _: sign * summed_to(gradient, shape, channels))
        if normalizes and position == weight:

            def normalized(args: Sequence[Any]) -> Tensor:
                plain = node.target(*args[:weight], None, None, *args[weight + 2 :])
                first: Tensor = plain if isinstance(plain, Tensor) else plain[0]
                return first

            plain = self._without_scale_and_shift(node, rule, weight)
            by_scale = lambda gradient, plain: summed_to(gradient * plain, shape, channels)  # noqa: E731
            counted = rule.batch_norm is not None and not self._shared(node, rule)  # by its rule
            reading = None if counted or not self.plan.random(node.args[0]) else normalized
            return ParameterUse(entry, node, by_scale, plain, reading)
        if rule.kind == "elementwise" and rule.product and len(node.operands) == 2:
            other = 1 - position
            by_factor = lambda gradient, factor: summed_to(gradient * factor, shape)  # noqa: E731
            reading = operator.itemgetter(other) if self._shared(node, rule) else None
            factor = mean_of(self.value(node.args[other])).detach().expand(entry.shape)
            return ParameterUse(entry, node, by_factor, factor, reading)
        if rule.linear and position == 1:
            x = mean_of(self.value(node.args[0])).detach()
            reading = operator.itemgetter(0) if self._shared(node, rule) else None
            if rule.convolution is None:
                once = x.ndim == 2 and len(x) == self.plan.program.inputs[0].info.shape[0]
                spread = self.by_weight.get(node) if once else None
                return ParameterUse(entry, node, by_linear_weight, x, reading, spread)
            settings = rule.convolution(*resolve(node.args, self.value))
            if x.ndim == len(shape) or self.plan.program.inputs[0].info.shape[0] == 1:
                by_kernel = lambda gradient, x: by_convolution_weight(gradient, x, shape, settings)  # noqa: E731
                return ParameterUse(entry, node, by_kernel, x, reading)
        if node.packet is aten.embedding and position == 0:
            by_table = lambda gradient, tokens: by_embedding(gradient, tokens, shape)  # noqa: E731
            return ParameterUse(entry, node, by_table, self.value(node.args[1]))
        raise self._not_followed(node, parameter)

    def _not_followed(self, node: Node, parameter: Node) -> VarpropError:
        return VarpropError(
            f"parameter_var names '{self.parameters[parameter].name}', which {node.packet or node.target} in "
            f"'{node.module or '(model)'}' reads, and whose noise cannot be followed there: leave this one out. "
            "Parameters may be random in linear layers, convolutions, embeddings and normalization layers, and as "
            "factors or terms of plain products and sums."
        )

    def _without_scale_and_shift(self, node: Node, rule: Rule, weight: int) -> Tensor:
        """The mean of a normalization's result with scale 1 and shift 0."""
        args = [self.value(a) if isinstance(a, Node) else a for a in node.args]
        args[weight : weight + 2] = [None, None]
        return _first_result(rule, node, args, {}).mean.detach()


def _convolved(node: Node, rule: Rule, args: Sequence[Any]) -> Moments:
    """Moments of a convolution whose derivatives are convolutions, too.

    Those take all output directions as one large batch, for which autograd's own operation runs once for every
    direction. With stride 1 the derivative is a plain convolution, for which processors have the faster code.
    """
    assert rule.convolution is not None
    x = args[0].dense()
    settings, count = rule.convolution(*args), args[1].ndim - 2
    pads = [before for before, _ in settings.zeros]
    if not x.mean.requires_grad or x.ndim != count + 2 or any(before != behind for before, behind in settings.zeros):
        return _first_result(rule, node, args, {})
    with torch.no_grad():
        found = apply(rule, node.target, (x.detach(), *args[1:]), {}).dense()
        weight = mean_of(settings.weight).detach()
        taps = [gap * (size - 1) for gap, size in zip(settings.dilation, weight.shape[2:], strict=True)]
        turned = [reach - pad for reach, pad in zip(taps, pads, strict=True)]
        if settings.transposed:
            moves: list[Any] = [settings.stride, pads, settings.dilation, False, [0], settings.groups]
        elif settings.stride == [1] * count and settings.groups == 1 and min(turned) >= 0:
            weight = weight.transpose(0, 1).flip(list(range(2, count + 2)))
            moves = [settings.stride, turned, settings.dilation, False, [0], 1]
        else:
            axes = zip(x.shape[2:], found.shape[2:], settings.stride, turned, pads, strict=True)
            extra = [size - (steps - 1) * stride + pad - reach - 1 for size, steps, stride, reach, pad in axes]
            moves = [settings.stride, pads, settings.dilation, True, extra, settings.groups]
    return Moments(attached(found.mean, (x.mean, lambda g: torch.convolution(g, weight, None, *moves))), found.var)


def _by_stored_statistics(node: Node, rule: Rule, args: Sequence[Any]) -> Any:
    """A batch norm in evaluation, as one scale and one shift for every channel; None if it has none that are fixed."""
    assert rule.batch_norm is not None
    x, stored = args[0], rule.batch_norm(*args)
    weight, bias = stored.weight, stored.bias
    random = isinstance(weight, Moments) or isinstance(bias, Moments)
    if random or not isinstance(x, Moments) or stored.mean is None or stored.var is None:
        return None
    x, shape = x.dense(), (-1, *[1] * (x.ndim - 2))
    with torch.no_grad():
        scale = (stored.var.to(x.dtype) + stored.eps).rsqrt()
        scale = scale if weight is None else scale * weight.to(x.dtype)
        shift = -stored.mean.to(x.dtype) * scale
        shift = shift if bias is None else shift + bias.to(x.dtype)
        scale = scale.view(shape)
        result = torch.addcmul(shift.view(shape), x.mean, scale), x.var * scale.square()
    moments = Moments(attached(result[0], (x.mean, scale.mul)), result[1])
    return [moments, *[None] * (len(node.info) - 1)] if isinstance(node.info, (list, tuple)) else moments


def _layer_normed(
    x: Moments, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, *settings: Any
) -> Moments:
    """Moments behind a layer norm, with derivatives by the spread as it is expected to be."""
    x, axes = x.dense(), list(range(-len(shape), 0))
    with torch.no_grad():
        found = layer_norm(x, shape, weight, bias, *settings)
        eps, fraction = settings[0] if settings else 1e-5, 1 - 1 / math.prod(shape)
        shifted = x.mean - x.mean.mean(axes, keepdim=True)
        rate = (shifted.square().mean(axes, keepdim=True) + fraction * x.var.mean(axes, keepdim=True) + eps).rsqrt_()
        y, scale = shifted.mul_(rate), 1.0 if weight is None else weight.to(x.dtype)

    def pulled(gradient: Tensor) -> Tensor:
        gradient = gradient * scale
        along = (gradient * y).mean(axes, keepdim=True)
        return (gradient - gradient.mean(axes, keepdim=True)).sub_(y * along).mul_(rate)

    return Moments(attached(found.mean, (x.mean, pulled)), found.var)


def _first_result(rule: Rule, node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Moments:
    """The first result of an operation whose first argument may be a constant, with every axis written out."""
    result = apply(rule, node.target, _lifted(rule, args), kwargs)
    moments: Moments = result[0] if isinstance(result, (list, tuple)) else result
    return moments.dense()


def _lifted(rule: Rule, args: Sequence[Any]) -> Sequence[Any]:
    """Arguments of which the first has moments, also where it is a constant."""
    first, *others = args
    if not isinstance(first, Tensor) or not first.is_floating_point() or rule.kind != "rule":
        return args
    return Moments(first, torch.zeros_like(first)), *others


def _gradient(mean: Tensor, by: Tensor) -> Tensor | None:
    """The derivative of a sum of means by earlier means; None if they do not depend on them."""
    if not mean.requires_grad or not by.requires_grad:
        return None
    (found,) = torch.autograd.grad(mean.sum(), by, retain_graph=True, allow_unused=True)
    return found


def precise(value: Any) -> Any:
    """A tensor in a dtype that is fine enough for variances; anything else as it is."""
    half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def _with_fixed_variance(value: Any) -> Any:
    return Moments(value.mean, value.var.detach(), value.full) if isinstance(value, Moments) else value


def kind_of(node: Node, rule: Rule) -> str:
    """The kind of a source of noise: `SourceShare.kind`."""
    in_dropout = rule.kind == "source" and node.stack and "Drop" in node.stack[-1].class_name
    if rule.noise or rule.mixture is not None or in_dropout:
        return "dropout"
    if rule.kind == "source":
        return "draw"
    return "product" if rule.transposable else str(node.packet).rpartition(".")[2]
