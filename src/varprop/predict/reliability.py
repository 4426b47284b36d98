"""When a prediction to first order can be believed, by quantities that it has anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .prediction import SourceShare

FIRST_ORDER = ("input", "parameter", "dropout", "dropout of what varies", "draw", "product", "shared product")
# Limits chosen on small trained networks under dropout, input noise and noise of weights, each at three strengths, for
# the best balance of marks that are wrong and marks that are missing; docs/predict.md says how they do on others.
CURVED = 0.35
RELATIVE, RELATIVE_OF_ATTENTION = 1.0, 0.2
SHARED = 0.16
DROPPED = 0.02


@dataclass(frozen=True)
class Grounds:
    """The shares of every sample's variance by which it is marked as reliable or not."""

    curved: Tensor  # what the curvature of activations adds
    explained: Tensor  # what the rules alone find, for which units are independent; at most 1
    shared: Tensor  # products of two noises that positions share
    dropped: Tensor  # what maxima over what drops out add
    relative: (
        Tensor  # no share: the variance beside the spread of the mean over the outputs; zero if there is one output
    )
    bent: Tensor  # what the curvature of recurrent layers adds
    attends: bool = False  # whether attention, or a softmax inside the network, was taken as a line

    @staticmethod
    def of(shares: Sequence[SourceShare], diagonal: Tensor, mean: Tensor, directions: Tensor, attends: bool) -> Grounds:
        """By what a prediction has.

        Args:
            shares: The variance by source.
            diagonal: The variance by the rules alone, (batch, outputs).
            mean: All outputs of the network, (batch, ...).
            directions: Those that the prediction is of, (outputs, elements).
            attends: Whether attention, or a softmax inside the network, was taken as a line.
        """
        by_source = torch.stack([share.variance for share in shares])
        by_output, of_samples = by_source.sum(0), by_source.sum(2)
        total = by_output.sum(1).clamp_min(torch.finfo(by_output.dtype).tiny)

        def part(*kinds: str) -> Tensor:
            chosen = (of_samples[index] for index, share in enumerate(shares) if share.kind in kinds)
            return sum(chosen, torch.zeros_like(total)) / total

        curved = {share.kind for share in shares}.difference(FIRST_ORDER)
        spread = mean.reshape(len(mean), -1).var(1, correction=0)
        noise = (by_output / directions.square().sum(1)).mean(1)
        return Grounds(
            part(*curved),
            (diagonal.sum(1) / total).clamp_max(1),
            part("shared product"),
            part("maximum of dropped"),
            noise / spread if mean[0].numel() > 1 else torch.zeros_like(noise),
            part("recurrent"),
            attends,
        )


def holds(grounds: Grounds) -> Tensor:
    """For every sample, whether the first-order picture holds."""
    straight = grounds.curved <= CURVED * grounds.explained ** (1 / 3)
    most = RELATIVE_OF_ATTENTION if grounds.attends else RELATIVE
    weak = grounds.relative * (1 - grounds.explained) <= most * grounds.explained ** (1 / 5)
    steady = grounds.bent <= CURVED * grounds.explained ** (3 / 2)  # far too little where units are not independent
    return straight & weak & steady & (grounds.shared <= SHARED) & (grounds.dropped <= DROPPED)
