"""What a recurrent layer makes of an input that remembers: the layers above the first are given such."""

from __future__ import annotations

import torch
from torch import Tensor

from ..moments import Moments


class History:
    """How the state of a gated layer, s' = keep s + w(x), varies with an input x that remembers its last step.

    With a = Cov(x', x) / Var x for neighbouring steps, D_uj = Cov(s_u, x_j) and r_uj the slope of w_u by x_j:
    Cov(s_u, w_u(x')) = sum_j r_uj a_j D_uj, and D' = keep a D + r Var x'.

    Attributes:
        outputs: The covariances of the layer's own output at neighbouring steps.
    """

    def __init__(self, weight: Tensor, gates: int, inputs: list[Moments], lags: list[Tensor] | None) -> None:
        self.rows, self.inputs, self.lags = weight.chunk(gates), inputs, lags
        self.outputs: list[Tensor] = []
        self._steps = 0
        self._slope: Tensor | None = None  # of the output by the state, at the last step
        self._covariance: Tensor | None = None  # D

    def shared(self, keep: Tensor, *gains: Tensor | None) -> Tensor:
        """Cov(s, w(x)) at the present step, for slopes of w by the gates (None: none)."""
        if self.lags is None:
            return torch.zeros_like(keep)
        slopes = [g.unsqueeze(-1) * rows for g, rows in zip(gains, self.rows, strict=True) if g is not None]
        response = torch.stack(torch.broadcast_tensors(*slopes)).sum(0)
        arriving = response * self.inputs[self._steps].var.unsqueeze(-2)
        if self._covariance is None:
            self._covariance = arriving
            return torch.zeros_like(keep)
        ratio = self.lags[self._steps - 1] / self.inputs[self._steps - 1].var.clamp_min(1e-30)
        carried = ratio.unsqueeze(-2) * self._covariance
        self._covariance = keep.unsqueeze(-1) * carried + arriving
        return (response * carried).sum(-1)

    def end_step(self, with_last: Tensor, slope: Tensor) -> None:
        """Of the step: Cov(s', s), and the slope of the output by the state."""
        if self._slope is not None:
            self.outputs.append(slope * self._slope * with_last)
        self._slope, self._steps = slope, self._steps + 1
