"""Sums of layers that read the same value, whose terms the statistics count as independent.

Layers behind `a(x) + b(x)` are divided by the standard deviation of a sum of independent terms. With w_a and w_b the
rows of the two, the terms have the covariance of w_a and w_b: none worth a word as long as the weights are drawn at
random, much where branches start as copies, as identities, or were trained before.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.evaluation import fitted_kernel, identity_kernel
from ..engine.plan import rule_of
from ..graph.node import Node, resolve
from ..graph.program import Program
from ..rules.linear import Convolution
from .layers import Normalized, normalized_layers
from .linear_layers import output_axis
from .modes import calls_of
from .scope import shared_fold

WORTH_A_WORD = 0.1  # of the standard deviation of a sum; of small layers, weights drawn at random make 0.05


class SharedSum(NamedTuple):
    """A sum of layers that read one value."""

    layers: tuple[str, ...]  # the paths of its layers
    skip: bool  # whether that value is added as well
    ratio: float  # the standard deviation of the sum by that of a sum of independent terms, as the weights are


def warn_of_shared_inputs(model: nn.Module, program: Program) -> None:
    """Warn of sums in a normalized model that vary by clearly more or less than its statistics say."""
    sums = [found for found in shared_sums(model, program) if abs(found.ratio - 1) > WORTH_A_WORD]
    if sums:
        named = [f"{' + '.join(s.layers)}{' + their input' * s.skip} (std {s.ratio:.2f} times)" for s in sums[:5]]
        more = f" and {len(sums) - 5} more" * (len(sums) > 5)
        warnings.warn(
            f"These sums add up layers that read the same value, and count as sums of independent terms, though the "
            f"weights as they are make them vary by other amounts: {', '.join(named)}{more}. What reads them is "
            f"divided by too little where that is above 1. Start branches from different random weights, or add up "
            f"their weights into one layer.",
            stacklevel=3,
        )


@torch.no_grad()
def shared_sums(model: nn.Module, program: Program) -> list[SharedSum]:
    """The sums of layers that read one value, of a normalized model by its program from before that."""
    layers = normalized_layers(model)
    calls = calls_of(program, {path: program.model.get_submodule(path) for path in layers})
    found = []
    with shared_fold():
        for node in program.nodes:
            if _signs(node) is None or any(_signs(user) is not None for user in node.users):
                continue
            groups: dict[Node, list[tuple[float, Node]]] = {}
            terms = list(_terms(node, 1.0))
            for sign, term in terms:
                if term in calls and isinstance(term.args[0], Node):
                    groups.setdefault(term.args[0], []).append((sign, term))
            for source, group in groups.items():
                group += [(sign, term) for sign, term in terms if term is source]
                if len(group) > 1 and (ratio := _ratio(group, calls, layers)) is not None:
                    paths = tuple(calls[term] for _, term in group if term in calls)
                    found.append(SharedSum(paths, len(paths) < len(group), ratio))
    return found


def _signs(node: Node) -> tuple[float, float] | None:
    """The signs of the two terms if a node is a sum of two tensors."""
    rule = rule_of(node)
    two = rule is not None and len(node.args) > 1 and isinstance(node.args[1], Node) and not node.kwargs
    return rule.signs if rule is not None and two else None


def _terms(node: Any, sign: float) -> Iterator[tuple[float, Node]]:
    """The terms of nested sums with their signs, those behind a batch norm being what enters it."""
    signs = _signs(node) if isinstance(node, Node) else None
    if signs is not None:
        for operand, factor in zip(node.args[:2], signs, strict=True):
            yield from _terms(operand, sign * factor)
    elif isinstance(node, Node):
        yield sign, _before_batch_norm(node)


def _before_batch_norm(node: Node) -> Node:
    norm = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    rule = rule_of(norm) if isinstance(norm, Node) else None
    return norm.args[0] if rule is not None and rule.batch_norm is not None else node


def _ratio(group: list[tuple[float, Node]], calls: dict[Node, str], layers: dict[str, Normalized]) -> float | None:
    """The root mean square of a sum of kernels by that of their sizes; None if the kernels do not fit each other."""
    kernels = [_kernel(term, layers[calls[term]]) if term in calls else None for _, term in group]
    present = [kernel for kernel in kernels if kernel is not None]
    largest = max(present, key=lambda k: k.weight[0, 0].numel(), default=None)
    if largest is None or len(present) < sum(term in calls for _, term in group):
        return None
    weights = []
    for (sign, _), kernel in zip(group, kernels, strict=True):
        kernel = kernel or identity_kernel(largest)
        weight = None if kernel is None else fitted_kernel(kernel, largest)
        if weight is None:
            return None
        weights.append(sign * weight.double())
    apart = sum(float(weight.square().sum()) for weight in weights)
    together = float(torch.stack(weights).sum(0).square().sum())
    return math.sqrt(together / apart) if apart else None


def _kernel(node: Node, layer: Normalized) -> Convolution | None:
    """A layer's folded weight as a convolution, of no axes for a linear layer; None for transposed convolutions."""
    rule, weight = rule_of(node), layer.folded()[0]
    assert rule is not None
    if weight.ndim == 2:
        weight = weight.mT if output_axis(layer) else weight
        return Convolution(weight, _zero_bias(weight), [], [], [])
    if rule.convolution is None or output_axis(layer):
        return None
    kernel: Convolution = rule.convolution(*resolve(node.args, lambda o: weight if o is node.args[1] else None))
    if any(before != behind for before, behind in kernel.zeros):
        return None
    return replace(kernel, bias=_zero_bias(weight))


def _zero_bias(weight: Tensor) -> Tensor:
    return weight.new_zeros(len(weight))
