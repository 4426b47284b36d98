"""The memory formats of a fold's parameters, and what belongs to each of them in buffers that hold all.

A flat buffer has the numbers of every weight in the weight's own order in memory, so that nothing has to be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MemoryFormat = tuple[list[int], list[int] | None]  # sizes in the order of memory; how to permute them back, if at all


class Formats(NamedTuple):
    """Of all parameters of a fold: memory formats of the weights, the sizes of all, their dtype."""

    weights: list[MemoryFormat]
    sizes: list[int]
    dtype: torch.dtype


def formats_of(parameters: Any) -> Formats:
    """The formats of weights, shifts and scales."""
    count = len(parameters) // 3
    return formats_with(parameters[:count], [vector.numel() for vector in parameters[count:]])


def formats_with(weights: Any, sizes: list[int]) -> Formats:
    """The same, with shifts and scales known by their sizes."""
    formats = [memory_format(weight) for weight in weights]
    return Formats(formats, [weight.numel() for weight in weights] + sizes, weights[0].dtype)


def parted(weight: Tensor, bias: Tensor, formats: Formats) -> list[Tensor]:
    """The folded weights of all layers and then their biases, from the flat buffers."""
    count = len(formats.weights)
    return _weights(weight, formats) + list(bias.split_with_sizes(formats.sizes[count : 2 * count]))


def by_parameter(found: Sequence[Tensor], formats: Formats) -> list[Tensor]:
    """One derivative for each given moment and each parameter, in their order and of their formats."""
    flat, by_source, d_mean, d_var = found
    vectors = by_source.to(formats.dtype).view(-1).split_with_sizes(formats.sizes[len(formats.weights) :])
    return [d_mean, d_var, *_weights(flat, formats), *vectors]


def _weights(flat: Tensor, formats: Formats) -> list[Tensor]:
    pieces = flat.split_with_sizes(formats.sizes[: len(formats.weights)])
    return [in_format(piece, form) for piece, form in zip(pieces, formats.weights, strict=True)]


def joined_grads(grads: Sequence[Tensor], weights: Any) -> Tensor:
    """Derivatives by folded weights and then by biases in one buffer."""
    count = len(weights)
    return joined([*(flattened(g, w) for g, w in zip(grads[:count], weights, strict=True)), *grads[count:]])


@torch.no_grad()
def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The numbers of some vectors of one dtype, one after the other."""
    if not tensors[0].is_cuda:
        return torch.cat(list(tensors))
    sizes = [tensor.numel() for tensor in tensors]
    flat = tensors[0].new_empty(sum(sizes))
    torch._foreach_copy_(flat.split_with_sizes(sizes), list(tensors))  # `cat` is slow where sizes differ much
    return flat


def memory_format(weight: Tensor) -> MemoryFormat:
    """The memory format of a weight."""
    if weight.is_contiguous():
        return list(weight.shape), None
    order = memory_order(weight)
    return [weight.shape[axis] for axis in order], sorted(range(weight.ndim), key=order.__getitem__)


def in_format(piece: Tensor, form: MemoryFormat) -> Tensor:
    """A flat buffer seen as a weight that lies like that."""
    sizes, back = form
    return piece.view(sizes) if back is None else piece.view(sizes).permute(back)


def flattened(value: Tensor, weight: Tensor) -> Tensor:
    """A value with the shape of a weight as a flat buffer in the order of the weight in memory."""
    return value.reshape(-1) if weight.is_contiguous() else value.permute(memory_order(weight)).reshape(-1)


def memory_order(weight: Tensor) -> list[int]:
    """The axes from the slowest to the fastest in memory; the plain order where the weight has gaps."""
    strides = weight.stride()
    order = sorted(range(weight.ndim), key=lambda axis: (-strides[axis], axis))
    expected = 1
    for axis in reversed(order):
        if weight.shape[axis] > 1 and strides[axis] != expected:
            return list(range(weight.ndim))
        expected *= weight.shape[axis]
    return order
