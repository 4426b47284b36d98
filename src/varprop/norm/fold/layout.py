"""Where everything of a normalized network lies, so that all of it can be computed together.

A *lane* is one random number known by mean and variance: a channel of a layer's output or of what follows from it.
Sources (the outputs of normalized layers, mean `shift`, variance `scale`²) come first, then constants (the data), then
lanes given from outside, then computed ones, each computed by one element of one `Step`. A *site* is a normalized
layer: its weight is a matrix of rows (output channels), each meeting channels times taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...gaussian.normal import Pair

EPS = 1e-6  # goes with the variance of what enters, so that a row of any scale has the same normalization


@dataclass(frozen=True)
class Function:
    """A function of random numbers, as it acts on means and variances element by element.

    Attributes:
        name: Equal for functions that compute the same.
        moments: Maps (mean, var) of every argument to (mean, var); differentiable by autograd.
        kernel: How a kernel computes it: a name known to `gaussian.derivatives` and numbers, as ("two_slopes", 1.0,
            0.0); None if only `moments` can.
        arity: Number of random arguments.
    """

    name: str
    moments: Callable[..., Pair]
    kernel: tuple[str | float, ...] | None = None
    arity: int = 1


@dataclass(frozen=True)
class Step:
    """One function on many lanes: lane `start + j` is the function of lanes `inputs[0][j]`, `inputs[1][j]`, ..."""

    function: Function
    inputs: tuple[Tensor, ...]  # int64
    start: int
    count: int


@dataclass(frozen=True)
class Lanes:
    """The moment pass: which lanes there are and how they follow from each other; steps in order of computation."""

    sources: int
    constant_mean: Tensor  # float64
    constant_var: Tensor
    given: int
    steps: tuple[Step, ...]
    entering: Tensor  # int64: the lanes that enter the sites, site after site, channel after channel

    @property
    def total(self) -> int:
        """Number of lanes."""
        return self.sources + len(self.constant_mean) + self.given + sum(step.count for step in self.steps)


@dataclass(frozen=True)
class Rows:
    """The weight of one site as rows, and what they meet.

    Row o of group g meets channel i of its group at tap j with weight W[o, i, j]. With m and v the mean and variance
    (epsilon included) of the entering channels and E the `taps` matrix (taps x columns):
    A[o, p] = sum_ij W[o,i,j] m_i E[j,p];  mu_o = A[o,0];  var_o = sum_ij W² v_i E[j,0] + sum_{p>0} A[o,p]².
    Column 0 of E is the share of positions at which a tap lies inside the image; the others, the spread of the means
    over positions, are missing where all positions are alike. Where rows are centred, W stands for the weight minus the
    mean of each row, over channels and taps.

    Attributes:
        outputs: Number of rows, all groups together.
        groups: Number of groups.
        channels: Entering channels of one group.
        taps: E, float64; one object for all sites that have the same.
        first_row: Place of its rows among the sources, which are the rows of all sites of the network.
        first_channel: Place of its entering channels (all groups) in `Lanes.entering`.
        first_weight: Place of its folded weight in the flat buffer, which has the weight's own order in memory.
        transposed: The weight is (groups * channels, outputs / groups, taps...) instead of
            (outputs, channels, taps...).
        centred: The mean of every row is subtracted from it first. A row of one weight would leave nothing: a layer
            with such rows is not centred in any form.
    """

    outputs: int
    groups: int
    channels: int
    taps: Tensor
    first_row: int
    first_channel: int
    first_weight: int
    transposed: bool = False
    centred: bool = False

    @property
    def tap_count(self) -> int:
        """Number of taps."""
        return len(self.taps)

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.outputs * self.channels * self.tap_count


@dataclass(frozen=True)
class Layout:
    """A whole network."""

    lanes: Lanes
    rows: tuple[Rows, ...]

    @property
    def row_count(self) -> int:
        """Rows of all sites."""
        return sum(rows.outputs for rows in self.rows)

    @property
    def weight_count(self) -> int:
        """Weights of all sites."""
        return sum(rows.weights for rows in self.rows)


def restricted(layout: Layout, places: Sequence[int]) -> Layout:
    """The layout of some of the sites: what leads to the others is left out, the sources are the same."""
    lanes, needed = layout.lanes, torch.zeros(layout.lanes.total, dtype=torch.bool)
    chosen = [layout.rows[place] for place in places]
    spans = [slice(r.first_channel, r.first_channel + r.groups * r.channels) for r in chosen]
    entering = torch.cat([lanes.entering[span] for span in spans])
    needed[entering] = True
    for step in reversed(lanes.steps):
        used = needed[step.start : step.start + step.count]
        for inputs in step.inputs:
            needed[inputs[used]] = True
    first = lanes.total - sum(step.count for step in lanes.steps)  # those that no step makes all stay
    needed[:first] = True
    number = torch.cumsum(needed, 0) - 1
    steps = [_restricted_step(step, needed, number) for step in lanes.steps]
    kept = replace(lanes, steps=tuple(step for step in steps if step.count), entering=number[entering])
    return Layout(kept, in_turn(chosen, sources_stay=True))


def _restricted_step(step: Step, needed: Tensor, number: Tensor) -> Step:
    used = needed[step.start : step.start + step.count]
    inputs = tuple(number[lane[used]] for lane in step.inputs)
    return Step(
        step.function, inputs, int(number[step.start : step.start + step.count][used][:1].sum()), len(inputs[0])
    )


def in_turn(chosen: Iterable[Rows], sources_stay: bool = False) -> tuple[Rows, ...]:
    """Rows with their channels, weights and, unless these stay as they are, sources right after those of the last."""
    made, row, channel, weight = [], 0, 0, 0
    for rows in chosen:
        first_row = rows.first_row if sources_stay else row
        made.append(replace(rows, first_row=first_row, first_channel=channel, first_weight=weight))
        row, channel, weight = row + rows.outputs, channel + rows.groups * rows.channels, weight + rows.weights
    return tuple(made)
