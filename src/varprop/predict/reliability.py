"""When a prediction to first order can be believed, by quantities that it has anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .prediction import Prediction, SourceShare

FIRST_ORDER = ("input", "parameter", "dropout", "dropout of what varies", "draw", "product", "shared product")
CURVED = 0.2
SHARED = 0.08


@dataclass(frozen=True)
class Evidence:
    """What the mark of every sample rests on.

    Attributes:
        curved: The share of the variance that the curvature of activations adds.
        explained: The share of the variance that the rules alone find, for which units are independent; at most 1.
        shared: The share of products of two noises that positions share.
    """

    curved: Tensor
    explained: Tensor
    shared: Tensor

    @staticmethod
    def of(prediction: Prediction) -> Evidence:
        """By the shares of a prediction."""
        assert prediction.diagonal_var is not None
        return Evidence.from_shares(prediction.shares, prediction.diagonal_var)

    @staticmethod
    def from_shares(shares: Sequence[SourceShare], diagonal: Tensor) -> Evidence:
        """By shares, and by the variance of the rules alone."""
        total = torch.stack([share.variance for share in shares]).sum((0, 2))
        total = total.clamp_min(torch.finfo(total.dtype).tiny)
        curved = [share.variance for share in shares if share.kind not in FIRST_ORDER]
        shared = [share.variance for share in shares if share.kind == "shared product"]
        by_curves, by_shared = (
            torch.stack(group).sum((0, 2)) / total if group else torch.zeros_like(total) for group in (curved, shared)
        )
        return Evidence(by_curves, (diagonal.sum(1) / total).clamp_max(1), by_shared)


def holds(evidence: Evidence) -> Tensor:
    """For every sample, whether the first-order picture holds."""
    return (evidence.curved <= CURVED * evidence.explained ** (1 / 3)) & (evidence.shared <= SHARED)
