"""Real draws of a network's outputs, and the analytic result as their control variate.

The same drawn noise goes through the network itself and through its linear part, whose variance is known exactly. Every
output y is regressed on its linear part l over the draws, y = a + b l + residual, and

    Var[y] = b² Var[l] + Var[residual],   E[y] = mean of y - b (mean of l),

so that draws only have to find what is not linear. Where nothing but the input is random, derivatives at the draws give
the covariance instead (`chain`), which needs fewer of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..graph.node import Node, resolve
from .adjoint import MeanEvaluation, precise
from .attention import mean_of
from .chain import covariance_along_chain, only_input
from .noise import ElementNoise, ParameterNoise, ParameterUse, SharedProducts, Source, gram
from .prediction import Prediction

RUNS = 4  # by which correlations of what shared weights read are known: they leave 1 to 2 % of the std to chance


def combine_with_draws(
    prediction: Prediction,
    evaluation: MeanEvaluation,
    sources: Sequence[Source],
    x: Tensor,
    directions: Tensor,
    gradients: Sequence[Sequence[Tensor]],
    draws: int,
    count: int,
) -> Prediction:
    """A prediction whose mean and covariance rest on real draws with the analytic one as their control variate."""
    x = precise(x)
    factors = [_drawn_factors(source, gradient) for source, gradient in zip(sources, gradients, strict=True)]
    covariance = None
    if entry := only_input(sources):
        covariance, real, noises = covariance_along_chain(evaluation.plan.program, x, entry.var, directions, draws)
        linear = torch.stack([entry.along(gradients[0], noise) for noise in noises])  # the input comes first
    else:
        pairs = [_draw(evaluation, sources, factors, gradients, x) for _ in range(draws)]
        real = torch.stack([output.reshape(len(x), -1) @ directions.T for output, _ in pairs])
        linear = torch.stack([response for _, response in pairs])
    y, known = real - real.mean(0), linear - linear.mean(0)
    products = torch.einsum("rbi,rbj->bij", known, known)
    squares = products.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(x.dtype).tiny)
    slope = (y * known).sum(0) / squares
    mean = real.mean(0) - slope * linear.mean(0)
    if covariance is None:
        linear_covariance = sum((gram(f) for f in factors if f is not None), torch.zeros_like(products))
        residual = y - slope * known
        left = torch.einsum("rbi,rbj->bij", residual, residual) / (draws - 2)
        # products of estimated slopes are too large on average by the covariance of their errors
        error = products / squares.unsqueeze(-1) / squares.unsqueeze(-2)
        excess = (error * linear_covariance).clamp(-1, 1) * left
        covariance = left - excess + slope.unsqueeze(-1) * linear_covariance * slope.unsqueeze(-2)
    return replace(prediction, mean=mean[:count], covariance=covariance[:count], draws=real[:, :count])


def _drawn_factors(source: Source, gradients: Sequence[Tensor]) -> Tensor | None:
    """`Source.factors` for the share of the noise that a draw shows; None if there is none."""
    if isinstance(source, ParameterNoise):
        return source.by_weight(gradients)
    if isinstance(source, SharedProducts) or source.drawn_var is None:
        return None
    if source.by_channel:
        return source.factors(gradients)
    return source.samples.rows(gradients[0] * source.drawn_var.sqrt())


def _draw(
    evaluation: MeanEvaluation,
    sources: Sequence[Source],
    factors: Sequence[Tensor | None],
    gradients: Sequence[Sequence[Tensor]],
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """One run of the network with drawn noise: its output, and what the same noise does to its linear part."""
    env, noises = run(evaluation, sources, x)
    response = x.new_zeros(len(x), len(gradients[0][0]))
    for source, factor, gradient, noise in zip(sources, factors, gradients, noises, strict=True):
        if noise is None:
            continue
        if isinstance(source, ParameterNoise):
            assert factor is not None
            response = response + (factor @ noise.flatten()).T
        elif isinstance(source, ElementNoise):
            response = response + source.along(gradient, noise)
    return env[evaluation.plan.program.outputs[0]], response


def run(
    evaluation: MeanEvaluation, sources: Sequence[Source], x: Tensor
) -> tuple[dict[Node, Any], list[Tensor | None]]:
    """One run of the network with drawn noise: all values, and for each source what was drawn.

    Of a parameter that is in units of its standard deviation, elsewhere what the noise adds to the mean. What is in
    half precision, by which noise is rounded away, runs in single precision.
    """
    program = evaluation.plan.program
    env: dict[Node, Any] = {node: precise(value) for node, value in program.tensors().items()}
    env[program.inputs[0]] = x
    names = {name: node for node, name in program.state.items()}
    noises: list[Tensor | None] = [None] * len(sources)
    drawn: dict[Node, int] = {}
    for index, source in enumerate(sources):
        if isinstance(source, ParameterNoise):
            node, draw = names[source.name], torch.randn_like(source.var)
            env[node] = env[node] + source.var.sqrt() * draw
            noises[index] = draw
        elif isinstance(source, SharedProducts):
            continue
        elif source.kind == "input":
            noise = source.var.sqrt() * torch.randn_like(x)
            env[source.node] = x + noise
            noises[index] = noise
        elif source.drawn_var is not None:
            drawn.setdefault(source.node, index)
    for node in program.nodes:
        args, kwargs = resolve((node.args, node.kwargs), env.__getitem__)
        if node not in drawn:
            env[node] = precise(node.target(*args, **kwargs))
            continue
        index = drawn[node]
        source, mixture = sources[index], evaluation.plan.mixture(node)
        if mixture is None or not isinstance(source, ElementNoise) or source.jump is None:
            env[node] = precise(node.target(*args, **kwargs))
            noises[index] = env[node] - evaluation.env[node].dense().mean
            continue
        x, chance = env[mixture[0]], source.chance  # dropout
        (_, lower, shift), (_, slope, offset) = mixture[1]
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if source.by_channel else x.shape
        stays = torch.bernoulli(x.new_full(shape, chance))
        value = x * (lower + (slope - lower) * stays) + (shift + (offset - shift) * stays)
        env[node] = [value, stays > 0][: len(node.info)] if isinstance(node.info, (list, tuple)) else value
        noises[index] = source.jump * (stays - chance)
    return env, noises


@torch.no_grad()
def shared_products(evaluation: MeanEvaluation, sources: Sequence[Source], x: Tensor) -> list[SharedProducts]:
    """Products of two noises that positions share, by some runs of the network that are the same in every call.

    Linear layers that read vectors, such as averages over positions, get the variances of what they read from the same
    runs: the rules, for which positions are independent, have far too little. So do curved functions get what their
    lines leave, which the positions of a channel have in common.
    """
    shared = [s for s in sources if isinstance(s, ParameterNoise) and any(use.reading is not None for use in s.uses)]
    if not shared:
        return []
    if (x.is_cuda and torch.cuda.is_current_stream_capturing()) or get_proxy_mode() is not None:
        raise RuntimeError("noise of a fixed seed for weights that positions share cannot be recorded.")
    products = [SharedProducts(s.uses[0].node.module or "(model)", s, []) for s in shared]
    curves = [s.curve for s in sources if isinstance(s, ElementNoise) and s.curve is not None]
    left: list[list[Tensor]] = [[] for _ in curves]
    heads = [s for s in sources if isinstance(s, ElementNoise) and evaluation.reads_random_weight(s.node)]
    squares = [torch.zeros(()) for _ in heads]
    generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        generator.manual_seed(0)
        for _ in range(RUNS):
            env, _ = run(evaluation, sources, x)
            for product in products:
                product.noises.append([_noise_read(use, env) for use in product.parameter.uses])
            for curve, residuals in zip(curves, left, strict=True):
                lines = (slope * (env[read] - mean) for read, mean, slope in curve.reads)
                residuals.append(sum(lines, curve.value).sub_(env[curve.node]).neg_())
            for index, head in enumerate(heads):
                noise = env[head.node.args[0]] - mean_of(evaluation.env[head.node.args[0]])
                squares[index] = noise.square() / RUNS + squares[index].to(noise)
    for curve, residuals in zip(curves, left, strict=True):
        together = torch.stack(residuals)
        curve.left = (together - together.mean(0)) * math.sqrt(RUNS / (RUNS - 1))
    for head, square in zip(heads, squares, strict=True):
        head.var = F.linear(square, evaluation.parameters[head.node.args[1]].var)
    return products


def _noise_read(use: ParameterUse, env: dict[Node, Any]) -> Tensor | None:
    """The noise of what a random parameter is multiplied with in a run."""
    return None if use.reading is None else precise(use.reading(resolve(use.node.args, env.__getitem__))) - use.read
