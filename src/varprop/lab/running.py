"""The running mean of the stochastic loss, kept on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class RunningLoss:
    """Means of several streams of losses whose weights vanish to `remain` in one epoch.

    After losses l_1 ... l_n it is sum q^(n-i) l_i / sum q^(n-i) with q = remain^(1 / steps): the objective of
    `vp.training_objective`, without waiting for the device. Once infinite or NaN it stays so.

    Args:
        count: Of the streams.
        steps: In an epoch.
        remain: The share of a weight that is left after one epoch.
        device: Where losses are.
    """

    def __init__(self, count: int, steps: int, remain: float, device: torch.device) -> None:
        self.decay = remain ** (1.0 / steps)
        self.sums = torch.zeros(count, dtype=torch.float64, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, losses: Tensor) -> None:
        """Take in one loss of each stream."""
        self.sums.mul_(self.decay).add_(losses)
        self.weight.mul_(self.decay).add_(1)

    def values(self) -> list[float]:
        """The means so far."""
        found: list[float] = (self.sums / self.weight).tolist()
        return found

    def reset_(self) -> None:
        """Forget everything."""
        self.sums.zero_()
        self.weight.zero_()

    def state(self) -> dict[str, Tensor]:
        """What changes in training."""
        return {"sums": self.sums, "weight": self.weight}
