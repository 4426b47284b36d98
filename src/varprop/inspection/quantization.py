"""What a quantized network needs: ranges of activations, and corrections of the means that rounded weights shift.

A layer y = W x + b with rounded weights W_q is off by (W_q - W) x, whose mean (W_q - W) E[x] does not go away by
averaging: taken off the bias it is gone (Nagel et al., Data-Free Quantization, 2019). But rounding also changes the
spread of what enters a rectifier, hence the mean of what leaves it, to the same order. So the rounded network is
propagated too, layer by layer with the corrections so far, and what its means are off by is the next correction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engine.evaluation import Evaluation, apply
from ..errors import VarpropError
from ..graph.node import Node
from ..moments import Moments, trusted
from ..rules.linear import Convolution
from ..rules.registry import Rule
from .regions import Region, channel_axis, first_moments, over_channels, ranges

FORMAT = 1  # of the dict
BITS = range(2, 17)


def quantization(
    evaluation: Evaluation, regions: Sequence[Region], bits: int, k: float, per_channel: bool
) -> dict[str, Any]:
    """Ranges of every activation, and scale, shift and correction of every layer: see `Report.quantization`.

    Weights are rounded to ``-(2^(bits-1) - 1) ... 2^(bits-1) - 1`` times their scale.
    """
    if bits not in BITS:
        raise ValueError(f"bits must be a whole number from {BITS[0]} to {BITS[-1]}, not {bits!r}.")
    if not k > 0:
        raise ValueError(f"k must be positive, not {k!r}.")
    single = [region for region in regions if region.leaf]
    with torch.no_grad(), trusted():
        corrections = _corrections(evaluation, bits, per_channel)
        return {
            "format": FORMAT,
            "bits": bits,
            "k": k,
            "per_channel": per_channel,
            "inputs": [
                {"label": node.name} | _statistics(evaluation, node, k)
                for node in evaluation.plan.program.inputs
                if evaluation.plan.random(node)
            ],
            "activations": [
                {"label": region.label, "node": region.output.name} | _statistics(evaluation, region.output, k)
                for region in single
            ],
            "layers": [{"label": r.label} | corrections[r.output] for r in single if r.output in corrections],
        }


def _statistics(evaluation: Evaluation, node: Node, k: float) -> dict[str, Any]:
    """Ends of the range, mean and std of every channel; nothing of tokens."""
    moments = first_moments(evaluation, node)
    if moments is None:
        return {}
    axis = channel_axis(moments, node)
    mean = over_channels(moments.mean.double(), axis, torch.mean)
    square = over_channels(moments.mean.double().square() + moments.var.double(), axis, torch.mean)
    limits = ranges(moments, node, k)
    std = (square - mean.square()).clamp_min(0).sqrt()
    return {"axis": axis, "low": limits["low"], "high": limits["high"], "mean": mean.tolist(), "std": std.tolist()}


def _corrections(evaluation: Evaluation, bits: int, per_channel: bool) -> dict[Node, dict[str, Any]]:
    """Scale, shift and correction of every layer with constant weights, from an evaluation of the rounded network."""
    corrections: dict[Node, dict[str, Any]] = {}
    rules = {
        node: Rule("rule", function=_rounded_rule(evaluation, node, rule, bits, per_channel, corrections))
        for node, rule in evaluation.plan.rules.items()
        if rule.linear and evaluation.plan.random_operands(node) == [node.args[0]]
    }
    program = evaluation.plan.program
    env = {**program.tensors(), **{node: evaluation.env[node] for node in program.inputs}}
    Evaluation(replace(evaluation.plan, rules=evaluation.plan.rules | rules), env, annotate=False).run()
    return corrections


def _rounded_rule(
    evaluation: Evaluation,
    node: Node,
    rule: Rule,
    bits: int,
    per_channel: bool,
    corrections: dict[Node, dict[str, Any]],
) -> Callable[..., Moments]:
    """A layer with rounded weights whose mean output is brought back to what it was."""

    def function(x: Moments, weight: Tensor, bias: Any = None, *settings: Any, **named: Any) -> Moments:
        before, argument = evaluation.value(node), evaluation.value(node.args[0])
        _refuse_changes(node, before, apply(rule, node.target, (argument, weight, bias, *settings), named))
        kernel = None if rule.convolution is None else rule.convolution(argument, weight, bias, *settings, **named)
        rounded, scale = _rounded(weight.detach(), kernel, bits, per_channel)
        after, alone = (apply(rule, node.target, (value, rounded, bias, *settings), named) for value in (x, argument))
        axis = after.mean.ndim - (1 if kernel is None else weight.ndim - 1)
        errors = ((moments.mean - before.mean).double() for moments in (alone, after))
        shift, total = (over_channels(error, axis, torch.mean) for error in errors)
        names = evaluation.plan.program.state
        corrections[node] = {
            "weight": names.get(node.args[1], ""),
            "bias": names.get(node.args[2], "") if len(node.args) > 2 else "",
            "scale": scale.flatten().tolist(),
            "weight_error": float((rounded - weight).double().square().mean().sqrt()),
            "shift": shift.tolist(),
            "correction": (-total).tolist(),
        }
        per_channel_shape = [-1 if place == axis else 1 for place in range(after.mean.ndim)]
        return Moments(after.mean - total.view(per_channel_shape).to(after.dtype), after.var)

    return function


def _rounded(weight: Tensor, kernel: Convolution | None, bits: int, per_channel: bool) -> tuple[Tensor, Tensor]:
    """Weights as whole numbers times a scale, the largest of which is the largest weight; and that scale."""
    # a transposed convolution has (in, out / groups, ...): the outputs of a group lie along the second axis
    groups = kernel.groups if kernel is not None and kernel.transposed else None
    rows = (weight.unsqueeze(0) if groups is None else weight.unflatten(0, (groups, -1)).transpose(1, 2)).double()
    largest = rows.abs().amax(list(range(2, rows.ndim)), keepdim=True) if per_channel else rows.abs().max()
    scale = torch.where(largest > 0, largest, 1.0) / (2 ** (bits - 1) - 1)
    rounded = (rows / scale).round() * scale
    return (rounded[0] if groups is None else rounded.transpose(1, 2).flatten(0, 1)).to(weight.dtype), scale


def _refuse_changes(node: Node, before: Moments, now: Moments) -> None:
    """The means belong to the weights as they were."""
    if not torch.allclose(now.mean, before.mean, rtol=1e-4, atol=1e-6):
        raise VarpropError(
            f"The weights in {node.module or 'the model'} have changed since the report was made: inspect again."
        )
