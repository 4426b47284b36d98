"""Who computes the two passes: plain torch anywhere, Triton kernels on CUDA. One interface, chosen by what there is.

Small networks in eager mode on the CPU have compiled code instead (`native`), which takes the parameters one by one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from . import passes
from .layout import Layout, Pair

Result = tuple[Tensor, Tensor, list[Tensor]]  # folded weights and biases, flat, and what the backward needs
# by weights (flat), by shifts and scales (two rows), by given means and by given variances
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


class Backend(Protocol):
    """Folds all layers of a layout on one device; `shift_scale` are the shifts and scales of all rows, as two rows."""

    def forward(self, weights: Sequence[Tensor], shift_scale: Tensor, given: Pair | None, dtype: torch.dtype) -> Result:
        """Folded weights and biases."""
        ...

    def backward(
        self,
        weights: Sequence[Tensor],
        shift_scale: Tensor,
        kept: Sequence[Tensor],
        grad_weight: Tensor,
        grad_bias: Tensor,
    ) -> Gradients:
        """Derivatives by everything that `forward` was given."""
        ...


class TorchBackend:
    """Plain torch: any device, any function."""

    def __init__(self, layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tables = passes.make_tables(layout, weights, dtype)
        self.lanes_kept = sum(len(run.inputs) for run in self.tables.runs)

    def forward(self, weights: Sequence[Tensor], shift_scale: Tensor, given: Pair | None, dtype: torch.dtype) -> Result:
        """As `Backend.forward`."""
        entering, lanes_kept = passes.moments_forward(self.tables, shift_scale, given)
        folded, bias, rows_kept = passes.rows_forward(self.tables, self._working(weights), shift_scale, entering, dtype)
        return folded, bias, [entering, *lanes_kept, *rows_kept]

    def backward(
        self,
        weights: Sequence[Tensor],
        shift_scale: Tensor,
        kept: Sequence[Tensor],
        grad_weight: Tensor,
        grad_bias: Tensor,
    ) -> Gradients:
        """As `Backend.backward`."""
        tables, by_bias, entering = self.tables, grad_bias.to(self.dtype), kept[0].view(2, -1)
        lanes_kept = [part.view(2, 2, -1) for part in kept[1 : 1 + self.lanes_kept]]
        rows, rate, *more = kept[1 + self.lanes_kept :]
        rows_kept = [rows.view(2, -1), rate, *more]
        by_rows = passes.rows_backward(tables, self._working(weights), rows_kept, entering, grad_weight, by_bias)
        d_weight, d_scale, by_entering = by_rows
        by_source, given = passes.moments_backward(tables, lanes_kept, shift_scale[1], by_entering)
        by_source[0] += by_bias
        by_source[1] += d_scale
        return d_weight.to(weights[0].dtype), by_source, *given

    def _working(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return weights if weights[0].dtype == self.dtype else [weight.to(self.dtype) for weight in weights]


def _torch_kept(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
    lanes, blocks = layout.lanes, [layout.rows[sites] for sites in passes.alike(layout.rows, weights)]
    steps = [(4 * step.count, torch.float64) for step in lanes.steps for _ in range(step.function.arity)]
    squares = [(sum(rows.weights for rows in block), dtype) for block in blocks]
    spread = [(sum(r.outputs for r in block), block[0].taps.shape[1]) for block in blocks]
    forms = [(2 * len(lanes.entering), dtype), *steps, (2 * layout.row_count, dtype), (layout.row_count, dtype)]
    return forms + squares + [(rows * columns, dtype) for rows, columns in spread if columns > 1]


@functools.cache
def triton_works() -> bool:
    """Whether Triton is there and not switched off by ``VARPROP_KERNELS=0``."""
    return os.environ.get("VARPROP_KERNELS", "1") != "0" and importlib.util.find_spec("triton") is not None


def _takes_kernels(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> bool:
    if weights[0].device.type != "cuda" or dtype != torch.float32 or not triton_works():
        return False
    from . import kernels

    with unset_fake_temporarily():  # the layout is real also where only the form of results is asked for
        known = kernels.supported(layout)
    return known and kernels.fits(layout, weights)


def make_backend(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> Backend:
    """The fastest backend that can do the layout; `dtype` is that of the statistics."""
    if not _takes_kernels(layout, weights, dtype):
        return TorchBackend(layout, weights, dtype)
    from . import kernels

    return kernels.TritonBackend(layout, weights)


def kept_forms(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
    """Length and dtype of what `forward` keeps, known without running it."""
    if _takes_kernels(layout, weights, dtype):
        from . import kernels

        return kernels.kept_forms(layout)
    return _torch_kept(layout, weights, dtype)
