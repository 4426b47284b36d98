"""Where activations go flat, are off, or pass everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..gaussian.normal import cdf, ratio
from ..moments import Moments

INFINITY = float("inf")
SMOOTH_STEP = (0.0, -9.0, 9.0, -40.0, 40.0)  # where the logistic function and its kin bend


@dataclass(frozen=True)
class Bend:
    """The flat parts of an activation, in its argument.

    Attributes:
        low: Flat below, if not None.
        high: Flat above, if not None.
        rectifier: The point below which a rectifier is off, if it is one.
        linear: The point above which it passes everything, where that is another one.
    """

    low: float | None = None
    high: float | None = None
    rectifier: float | None = None
    linear: float | None = None

    @property
    def saturates(self) -> bool:
        """Whether there is a flat part that is not the off side of a rectifier."""
        return self.low is not None or self.high is not None

    def probability_flat(self, x: Moments) -> Tensor:
        """P(argument in a flat part), for a Gaussian argument."""
        nothing = torch.zeros_like(x.mean)
        below = nothing if self.low is None else _above(self.low - x.mean, x.std)
        above = nothing if self.high is None else _above(x.mean - self.high, x.std)
        return below + above

    def probabilities_above(self, x: Moments) -> tuple[Tensor, Tensor]:
        """P(argument above the point where a rectifier is off, and where it is linear), for a Gaussian argument."""
        off, linear = self._points()
        return _above(x.mean - off, x.std), _above(x.mean - linear, x.std)

    def _points(self) -> tuple[float, float]:
        off = self.rectifier or 0.0
        return off, off if self.linear is None else self.linear

    def is_flat(self, x: Tensor) -> Tensor:
        """Where values lie in a flat part."""
        nowhere = torch.zeros_like(x, dtype=torch.bool)
        below = nowhere if self.low is None else x < self.low
        return below | (nowhere if self.high is None else x > self.high)

    def is_above(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Where values lie above the points of `probabilities_above`."""
        off, linear = self._points()
        return x > off, x > linear


def _above(margin: Tensor, std: Tensor) -> Tensor:
    return cdf(ratio(margin, std))


def clamp_bend(low: Any, high: Any) -> Bend | None:
    """Of a clamp; None where its ends are no numbers."""
    if not all(end is None or isinstance(end, (int, float)) for end in (low, high)):
        return None
    return Bend(high=high, rectifier=low) if low == 0 else Bend(low, high)


def clamp_bounds(low: Any, high: Any) -> tuple[float, float]:
    """What the values of a clamp cannot leave, as far as its ends are numbers."""
    number = (int, float)
    return float(low) if isinstance(low, number) else -INFINITY, float(high) if isinstance(high, number) else INFINITY
