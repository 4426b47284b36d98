"""The four passes as functions of tensors: what they allocate and launch."""

from __future__ import annotations

import contextlib
from functools import reduce

import torch
import triton.language as tl
from torch import Tensor

from ...fold.layout import Lanes, Layout
from . import fold, moments, unfold
from .blocks import COLUMNS, Launch
from .tables import RowTables, TritonTables

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}
SLOPES = 8  # derivatives kept of every computed lane
STATS = 3  # numbers kept of every row: its mean, its variance, and how far the mean of its weights is from the first
_ENTRIES = 1024  # entering lanes a program hands out at a time
_PARTIALS = 64  # rows of partial sums added at a time


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _flat(x: Tensor) -> Tensor:
    return x.detach().contiguous()


def moments_forward(
    lanes: Lanes, tables: TritonTables, shift: Tensor, scale: Tensor, given_mean: Tensor, given_var: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Mean and variance (1e-6 added) of all entering lanes.

    Args:
        lanes: The moment pass.
        tables: Its tables.
        shift: Means of the sources.
        scale: Their standard deviations.
        given_mean: Means of the lanes given from outside.
        given_var: Their variances.

    Returns:
        Entering means and variances, float32, in the order of `lanes.entering`, and what the backward needs.
    """
    t, device = tables.lanes, tables.device
    work = torch.empty(2, t.computed, dtype=torch.float64, device=device)
    slopes = torch.empty(SLOPES * t.computed, dtype=torch.float64, device=device)
    mean = torch.empty(len(lanes.entering), dtype=torch.float32, device=device)
    var = torch.empty_like(mean)
    with _on(device):
        moments.forward[(len(t.programs),)](
            t.programs, t.operations, t.numbers, t.first, t.second, t.output, t.entry, t.entry_lane, t.nodes, t.knots,
            _flat(shift), _flat(scale), t.constant_mean, t.constant_var, _flat(given_mean), _flat(given_var),
            work[0], work[1], slopes, mean, var,
            lanes.sources, len(t.constant_mean), lanes.given, t.computed,
            OPS=t.codes, BLOCK=t.block, ENTRIES=_ENTRIES, num_warps=4,
        )  # fmt: skip
    return mean, var, [slopes]


def moments_backward(
    lanes: Lanes, tables: TritonTables, saved: list[Tensor], scale: Tensor, d_mean: Tensor, d_var: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of shift, scale, given means and given variances, from those of the entering lanes."""
    by_source, *d_given = moments_backward_onto(lanes, tables, saved, scale, d_mean, d_var, None)
    return by_source[0], by_source[1], d_given[0], d_given[1]


def moments_backward_onto(
    lanes: Lanes,
    tables: TritonTables,
    saved: list[Tensor],
    scale: Tensor,
    d_mean: Tensor,
    d_var: Tensor,
    direct: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `moments_backward`, shift and scale as two rows, with other gradients of both added to them."""
    t, device = tables.lanes, tables.device
    grads = torch.empty(2, lanes.total, dtype=torch.float64, device=device)
    by_source = torch.empty(2, lanes.sources, dtype=torch.float32, device=device)
    d_given = [torch.empty(lanes.given, dtype=torch.float32, device=device) for _ in range(2)]
    onto = [_flat(x) for x in direct or (by_source[0], by_source[1])]
    with _on(device):
        moments.backward[(len(t.programs),)](
            t.programs, t.operations, t.first, t.second, t.output, t.entry, t.owned, t.owned_span,
            saved[0], _flat(scale), _flat(d_mean), _flat(d_var), *onto, grads[0], grads[1],
            by_source[0], by_source[1], d_given[0], d_given[1],
            lanes.sources, len(t.constant_mean), lanes.given, t.computed,
            OPS=t.codes, BLOCK=t.block, LANES=t.gathered[0], ENTRIES=t.gathered[1], ONTO=direct is not None,
            num_warps=4,
        )  # fmt: skip
    return by_source, d_given[0], d_given[1]


def row_constants(launch: Launch) -> dict[str, object]:
    """What a launch for rows compiles into the kernel."""
    work = tl.float64 if launch.dtype == torch.float64 else tl.float32
    constants = {"WEIGHT": _TYPES[launch.dtype], "ACC": work, "BODIES": launch.shapes, "num_warps": launch.warps}
    return constants if launch.registers is None else {**constants, "maxnreg": launch.registers}


def rows_forward(
    layout: Layout,
    tables: TritonTables,
    weights: list[Tensor],
    scale: Tensor,
    shift: Tensor,
    mean: Tensor,
    var: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Folded weights and biases of all sites.

    Args:
        layout: The network.
        tables: Its tables.
        weights: The weight of each site, contiguous or channels_last.
        scale: Of all rows, float32.
        shift: Of all rows, float32.
        mean: Of the entering lanes, as from `moments_forward`.
        var: Of the entering lanes, epsilon included.
        dtype: Of the results.

    Returns:
        All folded weights, each in its weight's own order in memory, all biases, and what the backward needs.
    """
    t, device = tables.rows(weights), tables.device
    folded = torch.empty(layout.weight_count, dtype=dtype, device=device)
    bias = torch.empty(layout.row_count, dtype=dtype, device=device)
    stats = torch.empty(STATS, layout.row_count, dtype=t.work, device=device)
    sums = torch.empty(tables.sums, dtype=t.work, device=device)
    spread = torch.empty_like(sums)
    inputs = [_flat(x) for x in (scale, shift, mean, var)]
    with _on(device):
        for launch in t.forward:
            fold.forward[(len(launch.records),)](
                launch.records, tables.share, tables.covariance, *inputs, folded, bias,
                *stats, sums, spread, **row_constants(launch),
            )  # fmt: skip
    return folded, bias, [stats.view(-1), spread]


def rows_backward(
    layout: Layout,
    tables: TritonTables,
    weights: list[Tensor],
    saved: list[Tensor],
    scale: Tensor,
    mean: Tensor,
    var: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of weights (flat, in their dtype and order in memory), scale, entering mean and variance."""
    t, device = tables.rows(weights), tables.device
    d_weight = torch.empty(layout.weight_count, dtype=_common(weights), device=device)
    d_scale = torch.empty(layout.row_count, dtype=torch.float32, device=device)
    of_entering = torch.empty(2, len(layout.lanes.entering), dtype=torch.float32, device=device)
    partial = torch.empty(2, t.partials, dtype=t.work, device=device)
    grad_bias = _flat(grad_bias)
    arguments = (
        tables.share, _flat(scale), _flat(mean), _flat(var),
        *saved[0].view(STATS, -1), saved[1], _flat(grad_weight), grad_bias, d_weight, d_scale,
        partial[0], partial[1],
    )  # fmt: skip
    with _on(device):
        for launch in t.backward:
            unfold.backward[(len(launch.records),)](launch.records, *arguments, **row_constants(launch))
        _add_partials(t, partial, of_entering)
    return d_weight, d_scale, of_entering[0], of_entering[1]


def _add_partials(t: RowTables, partial: Tensor, result: Tensor) -> None:
    if len(t.columns):
        unfold.add_partials[(len(t.columns),)](
            t.columns, partial[0], partial[1], result[0], result[1], ROWS=_PARTIALS, COLUMNS=COLUMNS, num_warps=4
        )


def _common(weights: list[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (weight.dtype for weight in weights))
