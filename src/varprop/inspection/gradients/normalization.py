"""Gradients back through a normalization: of its argument (layer norm and its kin), or of a batch.

For y = w u, u = (x - m) / s with m and s of n values of x, g_x = (h - avg h - u avg(h u)) / s with h = w g: what is
taken off are two of n components. So E[g_x^2] is E[g_y^2] w^2 / s^2 but for a share of 2 / n, and w^2 / s^2 is what the
variance is multiplied by forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...moments import Moments
from .flow import Flow

FIXED = "statistics of a normalization are taken as fixed on the way back (off by 2 / n for n values)"


def through_normalization(x: Moments, y: Moments, flow: Flow) -> Flow:
    """The flow to what is normalized; units that do not vary get what the others of their layer do."""
    before, after = torch.broadcast_tensors(x.var.double(), y.var.double())
    average = after.sum() / before.sum().clamp_min(1e-300)
    factor: Tensor = torch.where(before > 0, after / before.clamp_min(1e-300), average)
    return flow.scaled(factor, factor).summed(x.shape)
