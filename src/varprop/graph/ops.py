"""Composite operations that models write out by hand; `patterns` puts them back together, rules handle them whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def standardize(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """Layer normalization without scale and shift, over any axes."""
    centred = x - x.mean(list(dims), keepdim=True)
    return rms_normalize(centred, dims, eps)


def rms_normalize(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """Division by the root mean square over any axes."""
    return x / (x.square().mean(list(dims), keepdim=True) + eps).sqrt()


def unit_normalize(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """Division by the Euclidean length over any axes."""
    return x / x.square().sum(list(dims), keepdim=True).sqrt().clamp_min(eps)


def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return x / (1 + x.abs())


def fourier(x: Tensor, dims: Sequence[int], part: str) -> Tensor:
    """The real or imaginary part of the discrete Fourier transform of real values along some axes."""
    transformed: Tensor = torch.fft.fftn(x, dim=list(dims))
    return transformed.real if part == "real" else transformed.imag


def group_softmax(x: Tensor, index: Tensor, dim: int, groups: int) -> Tensor:
    """The softmax along an axis over the elements of equal index, as over the edges that end at one node of a graph."""
    shape = [*x.shape[:dim], groups, *x.shape[dim + 1 :]]
    numbers = index.view([-1 if axis == dim else 1 for axis in range(x.ndim)]).expand_as(x)
    largest = x.new_zeros(shape).scatter_reduce(dim, numbers, x, "amax", include_self=False)
    terms = (x - largest.gather(dim, numbers)).exp()
    return terms / x.new_zeros(shape).scatter_add(dim, numbers, terms).gather(dim, numbers)


def token_average(value: Tensor, shape: Sequence[int]) -> Tensor:
    """The average over tokens (axis -2) for as many queries as a shape has, and heads (axis -3) repeated to its number.

    It stands for attention where only what the weights cannot change matters: that they sum to one.
    """
    average = value.mean(-2, keepdim=True)
    if len(shape) > 2 and average.shape[-3] not in (1, shape[-3]):  # grouped queries
        average = average.repeat_interleave(shape[-3] // average.shape[-3], -3)
    return average.expand(shape)


def position_average(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The average over positions, where they count as all alike."""
    return x.mean(list(dims), keepdim)


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer whose weight is (in, out)."""
    return torch.nn.functional.linear(x, weight.mT, bias)
