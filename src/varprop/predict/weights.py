"""Derivatives by random parameters, sample by sample, from those by the results of the operations that read them.

Derivatives by results come as (outputs, samples, *entry), where a sample may have several images or rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import VarpropError
from ..rules.linear import Convolution


def summed_to(gradient: Tensor, shape: Sequence[int], channels: int = -1) -> Tensor:
    """Derivatives by a result, summed over what a parameter of a shape is broadcast along.

    A vector of channels may belong to axis 1 of the result; every other parameter is aligned at the end, as usual.

    Example:
        >>> summed_to(torch.ones(2, 3, 1, 4, 5), (4,), channels=1).shape  # channels before positions
        torch.Size([2, 3, 4])
    """
    outputs, batch, *extents = gradient.shape
    if len(shape) == 1 and channels == 1 and len(extents) > 2:
        return gradient.flatten(4).sum(4).sum(2)
    aligned = [1] * (len(extents) - len(shape)) + [*shape]
    if any(own not in (1, extent) for own, extent in zip(aligned, extents, strict=True)):
        raise VarpropError(f"A random parameter of shape {tuple(shape)} differs from sample to sample: leave it out.")
    axes = [axis for axis, extent in enumerate(aligned, 2) if extent == 1]
    return gradient.sum(axes).reshape(outputs, batch, *shape)


def by_linear_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """Derivatives by a linear layer's weight, summed over positions."""
    return torch.einsum("kbto,bti->kboi", gradient.flatten(2, -2), x.flatten(1, -2))


def by_convolution_weight(gradient: Tensor, x: Tensor, shape: torch.Size, settings: Convolution) -> Tensor:
    """Derivatives by a convolution's weight, summed over positions and over the images of a sample.

    A plain one reads windows of x. A transposed one lays what it reads over windows of its result, and so reads windows
    of the derivatives.
    """
    if x.ndim == len(shape):  # an image without an axis of samples
        gradient, x = gradient.unsqueeze(2), x.unsqueeze(1)
    if not settings.transposed:
        windows = _windows(x, gradient.shape[4:], shape[2:], settings)
        by_result = gradient.unflatten(3, (settings.groups, -1)).flatten(5)
        return torch.einsum("kbngop,bngip->kbgoi", by_result, windows).reshape(*gradient.shape[:2], *shape)
    read = x.unflatten(2, (settings.groups, -1)).flatten(4)
    products = [  # the windows of one output at a time: they are as many times as large as the result as taps are
        torch.einsum("bngip,bngop->bgio", read, _windows(one, x.shape[3:], shape[2:], settings)) for one in gradient
    ]
    return torch.stack(products).reshape(*gradient.shape[:2], *shape)


def _windows(values: Tensor, count: Sequence[int], taps: Sequence[int], settings: Convolution) -> Tensor:
    """The values inside each window of a convolution, (samples, images, groups, channels and taps, windows).

    Args:
        values: (samples, images, channels, *positions).
        count: How many windows there are along each axis.
        taps: The extent of a window along each axis.
        settings: Of the convolution.
    """
    values = F.pad(values, [side for zeros in reversed(settings.zeros) for side in zeros])
    axes = zip(count, taps, settings.stride, settings.dilation, strict=True)
    for axis, (number, size, stride, gap) in enumerate(axes, 3):
        values = values.unfold(axis, gap * (size - 1) + 1, stride).narrow(axis, 0, number)[..., ::gap]
    places = range(3, 3 + len(taps))
    laid_out = values.permute(0, 1, 2, *range(3 + len(taps), values.ndim), *places).contiguous()
    shape = *values.shape[:2], settings.groups, -1, math.prod(count)
    return laid_out.view(shape)


def by_embedding(gradient: Tensor, tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """Derivatives by an embedding's table: those of equal tokens add up."""
    outputs, batch = gradient.shape[:2]
    table = gradient.new_zeros(outputs, batch, *shape)
    index = tokens.reshape(1, batch, -1, 1).expand(outputs, -1, -1, shape[1])
    return table.scatter_add(2, index, gradient.reshape(outputs, batch, -1, shape[1]))
