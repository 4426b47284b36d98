"""Convolutions and windows of averages, their settings written out whatever the order of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..moments import Moments
from .axes import Ints, Value, dense, per_axis


@dataclass(frozen=True)
class Convolution:
    """The weights of a convolution and how they move; one number an axis.

    Attributes:
        weight: (out, in / groups, taps...), or (in, out / groups, taps...) of a transposed convolution.
        bias: What is added to every output, if anything.
        stride: Steps from one output position to the next (from one input position if transposed).
        zeros: How many stand before and behind each axis.
        dilation: Steps from one tap to the next.
        groups: Into how many groups channels are divided.
        transposed: Whether it is the transpose of a convolution.
        extra: Of a transposed one: positions added behind each axis of the output.
    """

    weight: Any
    bias: Any
    stride: list[int]
    zeros: list[tuple[int, int]]
    dilation: list[int]
    groups: int = 1
    transposed: bool = False
    extra: Sequence[int] = ()


def zeros_around(weight: Value, padding: Ints | str, dilation: Ints) -> list[tuple[int, int]]:
    """Zeros before and behind each axis."""
    count = weight.ndim - 2
    if padding == "same":  # the odd one behind
        totals = [gap * (size - 1) for gap, size in zip(per_axis(dilation, count), weight.shape[2:], strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(pad, pad) for pad in per_axis(0 if isinstance(padding, str) else padding, count)]


def of_conv(
    x: Any,
    weight: Value,
    bias: Any = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Convolution:
    """Of ``conv1d`` and its kin."""
    count, weight, bias = weight.ndim - 2, dense(weight), None if bias is None else dense(bias)
    zeros = zeros_around(weight, padding, dilation)
    return Convolution(weight, bias, per_axis(stride, count), zeros, per_axis(dilation, count), groups)


def of_transposed(
    x: Any,
    weight: Value,
    bias: Any = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Convolution:
    """Of ``conv_transpose1d`` and its kin."""
    plain = of_conv(x, weight, bias, stride, padding, dilation, groups)
    return replace(plain, transposed=True, extra=per_axis(output_padding, weight.ndim - 2))


def either(plain: Callable[..., Any], transposed: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the arguments of ``aten.convolution``, from those for ``conv2d`` and for ``conv_transpose2d``."""

    def chosen(
        x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, turned: bool, extra: Any, groups: int
    ) -> Any:
        if turned:
            return transposed(x, weight, bias, stride, padding, extra, groups, dilation)
        return plain(x, weight, bias, stride, padding, dilation, groups)

    return chosen


def of_average(x: Moments, kernel_size: Sequence[int], stride: Ints = (), padding: Ints = 0, *_: Any) -> Convolution:
    """A window of an average: every channel by itself, with equal taps."""
    sizes, channels = list(kernel_size), x.full[-len(kernel_size) - 1]
    shape = (channels, 1, *sizes)
    weight = torch.full(shape, 1 / math.prod(sizes), dtype=torch.float64, device=x.device)
    steps = per_axis(stride or sizes, len(sizes))
    return Convolution(weight, None, steps, zeros_around(weight, padding, 1), [1] * len(sizes), channels)
