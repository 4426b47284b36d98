"""Where activations go flat: saturated units, dead and always-on rectifiers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..gaussian.normal import cdf, ratio
from ..graph.node import Node
from ..moments import Moments

aten = torch.ops.aten
DEAD, ALWAYS_ON = 1e-3, 1 - 1e-3
# Smooth functions count as flat where their slope is below a twentieth of the steepest, and as linear where it is
# within a twentieth of 1.
_LOGISTIC = math.acosh(math.sqrt(20.0)) * 2
_ERROR = math.sqrt(math.log(20.0))
_GELU, _SILU = 2.35, 4.1


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


def _clamp(low: Any = None, high: Any = None) -> Bend | None:
    if isinstance(low, Node) or isinstance(high, Node):
        return None
    return Bend(high=high, rectifier=low) if low == 0 else Bend(low, high)


_BENDS: dict[Any, Callable[..., Bend | None]] = {
    aten.sigmoid: lambda: Bend(-_LOGISTIC, _LOGISTIC),
    aten.special_expit: lambda: Bend(-_LOGISTIC, _LOGISTIC),
    aten.tanh: lambda: Bend(-_LOGISTIC / 2, _LOGISTIC / 2),
    aten.erf: lambda: Bend(-_ERROR, _ERROR),
    aten.hardsigmoid: lambda: Bend(-3.0, 3.0),
    aten.hardtanh: lambda low=-1.0, high=1.0: _clamp(low, high),
    aten.clamp: _clamp,
    aten.clip: _clamp,
    aten.clamp_min: lambda low: _clamp(low),
    aten.clamp_max: lambda high: _clamp(None, high),
    aten.relu: lambda: Bend(rectifier=0.0),
    aten.relu6: lambda: Bend(high=6.0, rectifier=0.0),
    aten.threshold: lambda threshold, value: Bend(rectifier=threshold),
    aten.gelu: lambda approximate="none": Bend(rectifier=-_GELU, linear=_GELU),
    aten.silu: lambda: Bend(rectifier=-_SILU, linear=_SILU),
    aten.hardswish: lambda: Bend(rectifier=-3.0, linear=3.0),
}
# What the results of an activation cannot leave.
_LIMITS: dict[Any, tuple[float, float]] = {
    aten.sigmoid: (0.0, 1.0), aten.special_expit: (0.0, 1.0), aten.hardsigmoid: (0.0, 1.0), aten.tanh: (-1.0, 1.0),
    aten.erf: (-1.0, 1.0), aten.relu: (0.0, math.inf), aten.relu6: (0.0, 6.0), aten.softmax: (0.0, 1.0),
    aten._softmax: (0.0, 1.0), aten.softplus: (0.0, math.inf), aten.exp: (0.0, math.inf),
}  # fmt: skip

_CLAMPS: dict[Any, Callable[..., tuple[Any, Any]]] = {
    aten.hardtanh: lambda low=-1.0, high=1.0: (low, high),
    aten.clamp: lambda min=None, max=None: (min, max),
    aten.clip: lambda min=None, max=None: (min, max),
    aten.clamp_min: lambda low: (low, None),
    aten.clamp_max: lambda high: (None, high),
}


def bend_of(node: Node) -> Bend | None:
    """The flat parts of a node's operation, if it is an activation that has any."""
    made = _BENDS.get(node.packet)
    return made(*node.args[1:], **node.kwargs) if made else None


def limits_of(node: Node) -> tuple[float, float]:
    """Bounds of the values a node can take, as far as its operation tells."""
    packet = node.packet
    if packet in _CLAMPS:
        return _clamped(*_CLAMPS[packet](*node.args[1:], **node.kwargs))
    return _LIMITS.get(packet, (-math.inf, math.inf))


def _clamped(low: Any = None, high: Any = None) -> tuple[float, float]:
    least, most = (bound if isinstance(bound, (int, float)) else None for bound in (low, high))
    return -math.inf if least is None else float(least), math.inf if most is None else float(most)
