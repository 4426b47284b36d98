"""The kernels as a backend: everything that is folded goes in, everything that is kept for the backward is flat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....gaussian.normal import Pair
from ...fold.layout import Layout
from .bodies import order_of
from .components import LONGEST, longest
from .launch import SLOPES, STATS, moments_backward_onto, moments_forward, rows_backward, rows_forward
from .opcodes import known
from .tables import TritonTables


def supported(layout: Layout) -> bool:
    """Whether the kernels know every function of a layout, and none of its chains is too long to run in sequence."""
    steps = layout.lanes.steps
    short = sum(step.count for step in steps) <= LONGEST or longest(layout.lanes) <= LONGEST
    return short and all(known(step.function.kernel) for step in steps)


def fits(layout: Layout, weights: Sequence[Tensor]) -> bool:
    """Whether the weights lie in memory as the kernels read them: dense, with taps at one distance from each other."""
    try:
        for rows, weight in zip(layout.rows, weights, strict=True):
            order_of(rows, weight)
    except ValueError:
        return False
    return True


def kept_sizes(layout: Layout) -> list[tuple[int, torch.dtype]]:
    """Length and dtype of what `TritonBackend.forward` keeps, for weights of any dtype but float64."""
    entering = len(layout.lanes.entering)
    computed = sum(step.count for step in layout.lanes.steps)
    sums = sum(rows.outputs * rows.tap_count for rows in layout.rows if rows.taps.shape[1] > 1)
    sizes = (entering, entering, STATS * layout.row_count, sums)
    return [*((size, torch.float32) for size in sizes), (SLOPES * computed, torch.float64)]


class TritonBackend:
    """All layers of a layout, folded on the device of their weights."""

    def __init__(self, layout: Layout, weights: Sequence[Tensor]) -> None:
        self.layout = layout
        self.tables = TritonTables(layout, weights[0].device)
        self.tables.rows(list(weights))
        self._nothing = torch.empty(0, device=weights[0].device)

    def forward(
        self, weights: Sequence[Tensor], shift_scale: Tensor, given: Pair | None, dtype: torch.dtype, backward: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Folded weights and biases, flat, and what the backward needs; shifts and scales are two rows."""
        layout, tables = self.layout, self.tables
        shift, scale = shift_scale.unbind(0)
        given_mean, given_var = given or (self._nothing, self._nothing)
        mean, var, slopes = moments_forward(layout.lanes, tables, shift, scale, given_mean, given_var)
        folded, bias, kept = rows_forward(layout, tables, list(weights), scale, shift, mean, var, dtype)
        return folded, bias, [mean, var, *kept, *slopes]

    def backward(
        self,
        weights: Sequence[Tensor],
        shift_scale: Tensor,
        kept: Sequence[Tensor],
        grad_weight: Tensor,
        grad_bias: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Derivatives by weights (flat), by shifts and scales (two rows), by given means and by given variances."""
        layout, tables, scale = self.layout, self.tables, shift_scale[1]
        mean, var, stats, spread, slopes = kept
        d_weight, d_scale, d_mean, d_var = rows_backward(
            layout, tables, list(weights), [stats, spread], scale, mean, var, grad_weight, grad_bias
        )
        direct = (grad_bias, d_scale)
        by_source, *by_given = moments_backward_onto(layout.lanes, tables, [slopes], scale, d_mean, d_var, direct)
        return d_weight, by_source, by_given[0].double(), by_given[1].double()  # in the dtype of what was given
