"""Real draws of a network's outputs, and the analytic result as their control variate.

The same drawn noise goes through the network itself and through its linear part, whose variance is known exactly. Every
output y is regressed on its linear part l over the draws, y = a + b l + residual, and

    Var[y] = b² Var[l] + Var[residual],   E[y] = mean of y - b (mean of l),

so that draws only have to find what is not linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..graph.node import Node, resolve
from ..graph.program import Program
from .adjoint import MeanEvaluation, ParameterNoise, Source, aten, gram
from .prediction import Prediction


def combine_with_draws(
    prediction: Prediction,
    program: Program,
    evaluation: MeanEvaluation,
    sources: Sequence[Source],
    x: Tensor,
    directions: Tensor,
    gradients: Sequence[Sequence[Tensor]],
    draws: int,
    count: int,
) -> Prediction:
    """A prediction whose mean and covariance rest on real draws with the analytic one as their control variate."""
    if draws < 4:
        raise ValueError(f"draws={draws} are too few to regress on: at least 4.")
    factors = [_drawn_factors(source, gradient) for source, gradient in zip(sources, gradients, strict=True)]
    linear_covariance = sum((gram(f) for f in factors if f is not None), torch.zeros_like(prediction.covariance[:1]))
    assert isinstance(linear_covariance, Tensor)
    pairs = [_draw(program, evaluation, sources, factors, gradients, x) for _ in range(draws)]
    real = torch.stack([output.flatten(1) @ directions.T for output, _ in pairs])[:, :count]
    linear = torch.stack([response for _, response in pairs])[:, :count]
    y, known = real - real.mean(0), linear - linear.mean(0)
    products = torch.einsum("rbi,rbj->bij", known, known)
    squares = products.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(x.dtype).tiny)
    slope = (y * known).sum(0) / squares
    residual = y - slope * known
    left = torch.einsum("rbi,rbj->bij", residual, residual) / (draws - 2)
    # products of estimated slopes are too large on average by the covariance of their errors
    error = products / (squares.unsqueeze(-1) * squares.unsqueeze(-2))
    excess = (error * linear_covariance[:count]).clamp(-1, 1) * left
    covariance = left - excess + slope.unsqueeze(-1) * linear_covariance[:count] * slope.unsqueeze(-2)
    mean = real.mean(0) - slope * linear.mean(0)
    return replace(prediction, mean=mean, covariance=covariance, draws=real)


def _drawn_factors(source: Source, gradients: Sequence[Tensor]) -> Tensor | None:
    """`Source.factors` for the share of the noise that a draw shows; None if there is none."""
    if isinstance(source, ParameterNoise):
        return source.by_weight(gradients)
    if source.drawn_var is None or source.by_channel:
        return source.factors(gradients) if source.by_channel else None
    return (gradients[0] * source.drawn_var.sqrt()).flatten(2)


def _draw(
    program: Program,
    evaluation: MeanEvaluation,
    sources: Sequence[Source],
    factors: Sequence[Tensor | None],
    gradients: Sequence[Sequence[Tensor]],
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """One run of the network with drawn noise: its output, and what the same noise does to its linear part."""
    env: dict[Node, Any] = {**program.tensors(), program.inputs[0]: x}
    names = {name: node for node, name in program.state.items()}
    response = x.new_zeros(gradients[0][0].shape[1], gradients[0][0].shape[0])
    drawn: dict[Node, tuple[int, Tensor | None]] = {}
    for index, source in enumerate(sources):
        if isinstance(source, ParameterNoise):
            factor = factors[index]
            assert factor is not None
            node, draw = names[source.name], torch.randn_like(source.var)
            env[node] = env[node] + source.var.sqrt() * draw
            response = response + (factor @ draw.flatten()).T
        elif source.kind == "input":
            noise = source.var.sqrt() * torch.randn_like(x)
            env[source.node] = x + noise
            response = response + _along(gradients[index][0], noise)
        elif source.drawn_var is not None:
            drawn[source.node] = index, source.before
    for node in program.nodes:
        args, kwargs = resolve((node.args, node.kwargs), env.__getitem__)
        if node not in drawn:
            env[node] = node.target(*args, **kwargs)
            continue
        index, before = drawn[node]
        if before is not None:  # dropout
            keep = 1 - float(args[1])
            whole = node.packet is aten.feature_dropout
            shape = (*args[0].shape[:2], *[1] * (args[0].ndim - 2)) if whole else args[0].shape
            factor = torch.bernoulli(args[0].new_full(shape, keep)) / keep
            env[node] = [args[0] * factor, factor > 0] if node.packet is aten.native_dropout else args[0] * factor
            noise = before * (factor - 1)
        else:
            env[node] = node.target(*args, **kwargs)
            noise = env[node] - evaluation.env[node].dense().mean
        response = response + _along(gradients[index][0], noise)
    return env[program.outputs[0]], response


def _along(gradient: Tensor, noise: Tensor) -> Tensor:
    """Derivatives (outputs, batch, ...) times noise (batch, ...), as (batch, outputs)."""
    return (gradient * noise).flatten(2).sum(2).T
