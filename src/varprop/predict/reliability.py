"""When a prediction to first order can be believed, by quantities that it has anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .prediction import Prediction, SourceShare

FIRST_ORDER = ("input", "parameter", "dropout", "dropout of what varies", "draw", "product", "shared product")
CURVED = 0.2
SHARED = 0.08
DROPPED = 0.02


@dataclass(frozen=True)
class Evidence:
    """What the mark of every sample rests on.

    Attributes:
        curved: The share of the variance that the curvature of activations adds.
        explained: The share of the variance that the rules alone find, for which units are independent; at most 1.
        shared: The share of products of two noises that positions share.
        dropped: The share that maxima over what drops out add.
    """

    curved: Tensor
    explained: Tensor
    shared: Tensor
    dropped: Tensor

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

        def part(counts: Callable[[str], bool]) -> Tensor:
            chosen = [share.variance for share in shares if counts(share.kind)]
            return torch.stack(chosen).sum((0, 2)) / total if chosen else torch.zeros_like(total)

        return Evidence(
            part(lambda kind: kind not in FIRST_ORDER),
            (diagonal.sum(1) / total).clamp_max(1),
            part(lambda kind: kind == "shared product"),
            part(lambda kind: kind == "maximum of dropped"),
        )


def holds(evidence: Evidence) -> Tensor:
    """For every sample, whether the first-order picture holds."""
    straight = evidence.curved <= CURVED * evidence.explained ** (1 / 3)
    return straight & (evidence.shared <= SHARED) & (evidence.dropped <= DROPPED)
