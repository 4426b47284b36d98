"""Covariances from derivatives at correlated draws: true of Gaussian inputs, however strongly a network bends.

For standard normal n and n', and n_ρ = ρ n + √(1 - ρ²) n', which is distributed as n is,

    Cov[f, g] = ∫₀¹ E[∇f(n) · ∇g(n_ρ)] dρ

(Houdré and Pérez-Abreu, 1995). The product sums over all elements of the input, and of a linear network it is the
covariance itself without any chance. A few draws of many pixels therefore tell more than many outputs do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..graph.node import Node, resolve
from ..graph.program import Program
from .adjoint import precise
from .noise import ElementNoise, Source

DRAWN = ("dropout", "dropout of what varies", "draw")


def only_input(sources: Sequence[Source]) -> ElementNoise | None:
    """The noise of the input, if nothing else is random by itself."""
    elements = [source for source in sources if isinstance(source, ElementNoise)]
    if len(elements) < len(sources) or any(source.kind in DRAWN for source in elements):
        return None
    return elements[0]


def covariance_along_chain(
    program: Program, x: Tensor, var: Tensor, directions: Tensor, draws: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """By draws each of which is correlated with the next, by amounts spread evenly over (0, 1).

    Returns:
        The covariance of a sample's outputs, (batch, outputs, outputs); the outputs, (draws, batch, outputs); and the
        noise of every draw.
    """
    pairs = draws - 1
    std, normal = var.sqrt(), torch.randn_like(x)
    output, before = _derivatives(program, x + std * normal, std, directions)
    outputs, noises, covariance = [output], [std * normal], x.new_zeros(())
    for rho in ((torch.randperm(pairs) + 0.5) / pairs).tolist():
        normal = rho * normal + math.sqrt(1 - rho**2) * torch.randn_like(x)
        output, after = _derivatives(program, x + std * normal, std, directions)
        product = before @ after.mT / (2 * pairs)
        covariance = covariance + product + product.mT
        outputs.append(output)
        noises.append(std * normal)
        before = after
    values, vectors = torch.linalg.eigh(covariance)  # a few draws may leave it without a definite sign
    return vectors @ (values.clamp_min(0).unsqueeze(-1) * vectors.mT), torch.stack(outputs), noises


def _derivatives(program: Program, x: Tensor, std: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (batch, outputs), and their derivatives by standard normal noise, (batch, outputs, elements)."""
    tensors = program.tensors().items()
    env: dict[Node, Any] = {n: precise(v.detach()) if isinstance(v, Tensor) else v for n, v in tensors}
    with torch.enable_grad():
        env[program.inputs[0]] = entry = x.detach().requires_grad_()
        for node in program.nodes:
            args, kwargs = resolve((node.args, node.kwargs), env.__getitem__)
            env[node] = precise(node.target(*args, **kwargs))
        output = env[program.outputs[0]]
        along = directions.view(-1, 1, *output.shape[1:]).expand(-1, *output.shape)
        (gradient,) = torch.autograd.grad(output, entry, along, is_grads_batched=True, materialize_grads=True)
    return output.detach().reshape(len(x), -1) @ directions.T, (gradient * std).flatten(2).movedim(0, 1)
