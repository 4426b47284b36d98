"""The layout of a normalized network: channels, weight rows, and the buffers that hold those of all layers.

A *channel* is one random number known by mean and variance: a channel of a layer's output or of what follows from it.
Sources (the outputs of normalized layers, mean `shift`, variance `scale`²) come first, then constants (the data), then
external channels, whose moments are passed to every call, then computed ones, each computed by one element of one
`Step`. The weight of a layer is a matrix of rows (output channels), each multiplying channels times taps.

A flat buffer has the numbers of every weight in the order of the weight in memory, so that nothing has to be moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...gaussian.normal import Pair

EPS = 1e-6  # goes with the variance of what enters, so that a row of any scale has the same normalization


@dataclass(frozen=True)
class Function:
    """A function of random numbers, as it acts on means and variances element by element."""

    name: str  # equal for functions that compute the same
    moments: Callable[..., Pair]  # maps (mean, var) of every argument to (mean, var); differentiable by autograd
    # how a kernel computes it: a key of `gaussian.derivatives.KERNELS` and numbers, as ("two_slopes", 1.0, 0.0);
    # None if only `moments` can
    kernel: tuple[str | float, ...] | None = None
    arity: int = 1  # number of random arguments
    integrated: bool = False  # whether `moments` integrates it numerically, which takes long


@dataclass(frozen=True)
class Step:
    """One function of many channels: channel `start + j` follows from channels `inputs[0][j]`, `inputs[1][j]`, ..."""

    function: Function
    inputs: tuple[Tensor, ...]  # int64
    start: int
    count: int


@dataclass(frozen=True)
class Channels:
    """The moment pass: all channels and how they follow from each other."""

    sources: int  # number of output channels of all layers
    constant_mean: Tensor  # means of the constants, float64; `constant_var` likewise
    constant_var: Tensor
    external: int  # number of channels whose moments are passed to every call
    steps: tuple[Step, ...]  # the functions, in the order of computation
    entering: Tensor  # the channels that enter the layers, layer after layer, int64

    @property
    def total(self) -> int:
        """Number of channels."""
        return self.first_computed + self.computed

    @property
    def first_computed(self) -> int:
        """Number of the first channel that a step computes; all before are sources, constants or external."""
        return self.sources + len(self.constant_mean) + self.external

    @property
    def computed(self) -> int:
        """Number of channels that steps compute."""
        return sum(step.count for step in self.steps)


@dataclass(frozen=True)
class Rows:
    """The weight of one layer as rows, and the channels and taps that they multiply.

    Row o of group g multiplies channel i of its group at tap j by the weight W[o, i, j]. With m and v the mean and
    variance (epsilon included) of the channels that enter in call c, and E the matrix `taps` (calls, taps x columns):
    A[o, p] = sum_cij W[o,i,j] m_ci E[cj,p];  mu_o = A[o,0];  var_o = sum_cij W² v_ci E[cj,0] + sum_{p>0} A[o,p]².
    Column 0 of E is the share of calls and positions at which a tap lies inside the image; the others, the spread of
    the means over calls and positions, are missing where all are alike. Where rows are centred, W stands for the weight
    minus the mean of each row, over channels and taps.
    """

    outputs: int  # number of rows, all groups together
    groups: int
    channels: int  # number of entering channels of one group in one call
    taps: Tensor  # E, float64; one object for all layers that have the same
    first_row: int  # number of its first row among the sources, which are the rows of all layers of the network
    first_channel: int  # position of its first entering channel (of all groups, call after call) in `Channels.entering`
    first_weight: int  # position of its first folded weight in the flat buffer
    # true if the weight is (groups * channels, outputs / groups, taps...) instead of (outputs, channels, taps...)
    transposed: bool = False
    # true if the mean of every row is subtracted from it first. A row of one weight would leave nothing: a layer
    # with such rows is not centred in any form
    centred: bool = False
    calls: int = 1  # number of calls whose inputs have different moments; 1 for a layer that is called once

    @property
    def tap_count(self) -> int:
        """Number of taps."""
        return len(self.taps) // self.calls

    @property
    def entering(self) -> int:
        """Number of entering channels, of all groups and calls."""
        return self.calls * self.groups * self.channels

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.outputs * self.channels * self.tap_count


@dataclass(frozen=True)
class Layout:
    """A network: its channels, and the rows of all its layers."""

    channels: Channels
    rows: tuple[Rows, ...]

    @property
    def row_count(self) -> int:
        """Number of rows of all layers."""
        return sum(rows.outputs for rows in self.rows)

    @property
    def weight_count(self) -> int:
        """Number of weights of all layers."""
        return sum(rows.weights for rows in self.rows)


def consecutive(chosen: Iterable[Rows]) -> tuple[Rows, ...]:
    """Rows of some layers, renumbered so that sources, channels and weights of each follow those of the one before."""
    renumbered, row, channel, weight = [], 0, 0, 0
    for rows in chosen:
        renumbered.append(replace(rows, first_row=row, first_channel=channel, first_weight=weight))
        row, channel, weight = row + rows.outputs, channel + rows.entering, weight + rows.weights
    return tuple(renumbered)


class Sublayout(NamedTuple):
    """The layout of some of the layers, and what they read of the others."""

    # in which outputs of other layers are no sources but external channels, before those external already
    layout: Layout
    read: list[int]  # the indices of those other layers
    fixed: list[int]  # which of the values between layers that are not random are read, by their numbers


def sublayout(layout: Layout, indices: Sequence[int], fixed: Sequence[int]) -> Sublayout:
    """The layout of some of the layers by themselves.

    `fixed` says how many channels each value between layers has that is not random; they are the last external ones.
    """
    channels, chosen = layout.channels, [layout.rows[index] for index in indices]
    entering = torch.cat([channels.entering[r.first_channel : r.first_channel + r.entering] for r in chosen])
    is_read = torch.zeros(channels.total, dtype=torch.bool)
    is_read[entering] = True
    for step in reversed(channels.steps):
        used = is_read[step.start : step.start + step.count]
        for inputs in step.inputs:
            is_read[inputs[used]] = True
    outputs = [torch.arange(rows.first_row, rows.first_row + rows.outputs) for rows in layout.rows]
    read = [n for n, sources in enumerate(outputs) if n not in set(indices) and bool(is_read[sources].any())]
    sources, outside = (_joined([outputs[n] for n in group]) for group in (indices, read))
    constants, external, computed = torch.arange(channels.sources, channels.total).split(
        [len(channels.constant_mean), channels.external, channels.computed]
    )
    evaluated, *parameters = external.split([len(external) - sum(fixed), *fixed])
    read_fixed = {n: numbers for n, numbers in enumerate(parameters) if bool(is_read[numbers].any())}
    external = _joined([outside, evaluated[is_read[evaluated]], *read_fixed.values()])
    order = _joined([sources, constants, external, computed[is_read[computed]]])
    renumbered = torch.full((channels.total,), -1)  # channels that are left out have no number
    renumbered[order] = torch.arange(len(order))
    steps = []
    for step in channels.steps:
        outputs_of_step = torch.arange(step.start, step.start + step.count)
        used = is_read[outputs_of_step]
        if bool(used.any()):
            arguments = tuple(renumbered[inputs[used]] for inputs in step.inputs)
            start = int(renumbered[outputs_of_step[used][0]])
            steps.append(Step(step.function, arguments, start, len(arguments[0])))
    part = replace(
        channels, sources=len(sources), external=len(external), steps=tuple(steps), entering=renumbered[entering]
    )
    return Sublayout(Layout(part, consecutive(chosen)), read, list(read_fixed))


def _joined(channels: list[Tensor]) -> Tensor:
    return torch.cat(channels) if channels else torch.arange(0)


# --- memory layouts of weights, and the flat buffers of all layers ---


class MemoryLayout(NamedTuple):
    """The order of a weight in memory: its sizes in that order, and how to permute them back; None if contiguous."""

    sizes: list[int]
    permutation: list[int] | None


def memory_layout(weight: Tensor) -> MemoryLayout:
    """The memory layout of a weight."""
    if weight.is_contiguous():
        return MemoryLayout(list(weight.shape), None)
    order = memory_order(weight)
    return MemoryLayout([weight.shape[axis] for axis in order], sorted(range(weight.ndim), key=order.__getitem__))


def as_weight(piece: Tensor, layout: MemoryLayout) -> Tensor:
    """A piece of a flat buffer as a weight of a memory layout."""
    sizes, permutation = layout
    return piece.view(sizes) if permutation is None else piece.view(sizes).permute(permutation)


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
