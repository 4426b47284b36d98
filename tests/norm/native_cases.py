"""Layouts for the compiled passes, run by them and by autograd in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.reference import Shape, fold, make_layout, run_lanes
from varprop.norm.layout import Lanes, Layout
from varprop.norm.native import NativeBackend, compiled, make_native

needs_compiler = pytest.mark.skipif(compiled().library is None, reason=f"no compiled code: {compiled().status}")


def with_sources(layout: Layout) -> Layout:
    """The same layout, its rows being sources, as in a model."""
    count = layout.row_count
    lanes = dataclasses.replace(layout.lanes, sources=count, entering=layout.lanes.entering + count)
    return Layout(lanes, layout.rows)


def rows_of(shapes: list[Shape], seed: int) -> tuple[Layout, list[Tensor]]:
    layout, weights = make_layout(shapes, seed)
    return with_sources(layout), weights


def around(lanes: Lanes, dtype: torch.dtype) -> tuple[Layout, list[Tensor]]:
    """Lanes as the inside of a model: one linear layer has the sources as outputs and all that enters as inputs."""
    shapes = [Shape(lanes.sources, len(lanes.entering), dtype=dtype)]
    layout, weights = make_layout(shapes)
    return Layout(lanes, layout.rows), weights


def backend_of(layout: Layout, weights: list[Tensor]) -> NativeBackend:
    vectors, _ = vectors_of(layout, weights[0].dtype)
    found = make_native(layout, [*weights, *vectors], weights[0].dtype)
    assert found is not None
    return found


def vectors_of(layout: Layout, dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Shifts and then scales, layer by layer; given means and variances."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [rows.outputs for rows in layout.rows]
    shifts = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    scales = [(0.5 + torch.rand(size, generator=generator)).to(dtype) for size in sizes]
    given = layout.lanes.given
    mean, var = torch.randn(given, generator=generator), 0.1 + torch.rand(given, generator=generator)
    return [*shifts, *scales], (mean.double(), var.double())


def grads_of(layout: Layout, weights: list[Tensor], seed: int = 1) -> list[Tensor]:
    """For every folded weight and then every bias."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [w.shape for w in weights] + [(rows.outputs,) for rows in layout.rows]
    return [torch.randn(shape, generator=generator).to(weights[0].dtype) for shape in shapes]


def by_native(layout: Layout, weights: list[Tensor], seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Folded weights and biases; derivatives by given moments, weights, shifts and scales."""
    backend = backend_of(layout, weights)
    vectors, given = vectors_of(layout, weights[0].dtype, seed)
    parameters = [*weights, *vectors]
    parts, kept = backend.fold(parameters, given, weights[0].dtype)
    return parts, backend.unfold(parameters, kept, grads_of(layout, weights))


def by_autograd(layout: Layout, weights: list[Tensor], seed: int = 0) -> tuple[list[Tensor], list[Any]]:
    vectors, given = vectors_of(layout, weights[0].dtype, seed)
    leaves = [t.double().clone().requires_grad_() for t in (*given, *weights, *vectors)]
    count = len(weights)
    own, shifts, scales = (leaves[2 + k * count : 2 + (k + 1) * count] for k in range(3))
    shift, scale = torch.cat(shifts), torch.cat(scales)
    mean, var = run_lanes(layout.lanes, shift, scale, *leaves[:2])
    folded, bias = fold(layout, own, scale, shift, mean, var)
    parts = [*folded, *bias.split([rows.outputs for rows in layout.rows])]
    grads = [grad.double() for grad in grads_of(layout, weights)]
    found = torch.autograd.grad(parts, leaves, grads, allow_unused=True)
    derivatives = [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found, strict=True)]
    return [part.detach() for part in parts], derivatives


def distance(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Relative to the size of what is expected, or to `least` where that is larger."""
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm().clamp(min=least))


def check(layout: Layout, weights: list[Tensor], tolerance: float, seed: int = 0) -> None:
    """Compares all results; a row of one weight has the derivative zero, which is measured against its parts."""
    parts, derivatives = by_native(layout, weights, seed)
    expected_parts, expected = by_autograd(layout, weights, seed)
    for found, right in zip(parts, expected_parts, strict=True):
        assert distance(found, right) < tolerance
    sizes = [0.0] * len(derivatives)
    for place, (grad, folded, weight) in enumerate(zip(grads_of(layout, weights), parts, weights, strict=False)):
        sizes[2 + place] = float((grad * folded / weight).double().norm())
        sizes[2 + 2 * len(weights) + place] = float((grad * folded).double().norm())
    for found, right, size in zip(derivatives, expected, sizes, strict=True):
        assert distance(found, right, max(size, 1e-30)) < tolerance
