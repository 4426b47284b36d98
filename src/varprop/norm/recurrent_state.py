"""The state a recurrent cell settles in when its gates are Gaussian, and the gates that a state gives.

All in the terms of mathematics.md, section 8: gates, state and what is fed in count as independent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gaussian import activations
from ..gaussian.normal import Pair, safe_sqrt
from ..moments import Moments

_DAMPINGS, _STEPS, CONVERGED = (1.0, 0.5, 0.1), 300, 1e-13


def _times(a: Pair, b: Pair) -> Pair:
    """The product of independent variables."""
    (m1, v1), (m2, v2) = a, b
    return m1 * m2, v1 * v2 + m1.square() * v2 + m2.square() * v1


def _forgotten(rest: Tensor, var: Tensor) -> Tensor:
    """1 - E f^2 for a gate f with E f = 1 - rest; a sum of positive terms."""
    return rest + (rest * (1 - rest) - var)


def _gates(means: list[Tensor], stds: list[Tensor]) -> list[Pair]:
    """The logistic function of several gates; 1 - S(x) = S(-x) spares a difference from 1."""
    mean, var = activations.sigmoid(torch.cat(means, -1), torch.cat(stds, -1))
    return list(zip(mean.chunk(len(means), -1), var.chunk(len(means), -1), strict=True))


def _lstm(shift: Tensor, std: Tensor) -> list[Pair]:
    """c' = f c + i g: E c = E i E g / (1 - E f), Var c = (Var f (E c)^2 + Var(i g)) / (1 - E f^2); h = o tanh(c)."""
    (mi, mf, mg, mo), (si, sf, sg, so) = shift.chunk(4, -1), std.chunk(4, -1)
    enter, (rest, forget_var), leave = _gates([mi, -mf, mo], [si, sf, so])
    new, new_var = _times(enter, activations.tanh(mg, sg))
    mean = new / rest
    var = (forget_var * mean.square() + new_var) / _forgotten(rest, forget_var)
    return [_times(leave, activations.tanh(mean, safe_sqrt(var))), (mean, var)]


def _gru(shift: Tensor, std: Tensor) -> list[Pair]:
    """h' = (1 - z) n + z h: E h = E n, Var h = E(1-z)^2 Var n / (1 - E z^2); n = tanh(A + r B)."""
    (mr, mz, ma, mb), (sr, sz, sa, sb) = shift.chunk(4, -1), std.chunk(4, -1)
    reset, (rest, keep_var) = _gates([mr, -mz], [sr, sz])
    gated, gated_var = _times(reset, (mb, sb.square()))
    mean, var = activations.tanh(ma + gated, safe_sqrt(sa.square() + gated_var))
    return [(mean, (rest.square() + keep_var) * var / _forgotten(rest, keep_var))]


# From mean and standard deviation of the gates to the stationary moments of h, and of an LSTM's cell.
STATES: dict[str, Callable[[Tensor, Tensor], list[Pair]]] = {
    "RNN_TANH": lambda shift, std: [activations.tanh(shift, std)],
    "RNN_RELU": lambda shift, std: [activations.relu(shift, std)],
    "LSTM": _lstm,
    "GRU": _gru,
}


def joined(mode: str, x: Tensor, h: Tensor) -> Tensor:
    """What gates get from the input and from the state: the sum; for a GRU's candidate one after the other."""
    if mode != "GRU":
        return x + h
    both = 2 * h.shape[-1] // 3
    alone = h[..., both:].expand(*x.shape[:-1], -1)
    return torch.cat([x[..., :both] + h[..., :both], x[..., both:], alone], -1)


def parted(mode: str, gates: Tensor) -> Pair:
    """The entries for the rows of W_ih and of W_hh from those of the gates."""
    if mode != "GRU":
        return gates, gates
    r, z, a, b = gates.chunk(4)
    return torch.cat([r, z, a]), torch.cat([r, z, b])


def gate_statistics(mode: str, w_ih: Tensor, w_hh: Tensor, x: Moments, h: Moments) -> Pair:
    """Mean and variance of the gates, without bias, for inputs that are a mixture (one row for each)."""
    means = joined(mode, F.linear(x.mean, w_ih), F.linear(h.mean, w_hh))
    variances = joined(mode, F.linear(x.var, w_ih.square()), F.linear(h.var, w_hh.square()))
    mean = means.mean(0)
    return mean, (variances + (means - mean).square()).mean(0)


def distance(a: Tensor, b: Tensor) -> float:
    """How far apart means and standard deviations of gates are, in units of their size."""
    return float(((a - b).abs() / (a.abs() + a[1])).max())


def fixed_point(step: Callable[[Tensor], Tensor], start: Tensor) -> Tensor | None:
    """The means and standard deviations of the gates, two rows, that `step` leaves as they are.

    Plain iteration goes on until nothing moves; where it does not settle, smaller steps follow.

    Returns:
        The solution to a relative error of 1e-13; None if none was found.
    """
    for damping in _DAMPINGS:
        gates, before = start, float("inf")
        for _ in range(_STEPS):
            new = step(gates)
            change = distance(new, gates)
            if change <= CONVERGED and not 1e-15 < change < before:  # only rounding is left
                return new
            gates, before = torch.lerp(gates, new, damping), change
    return None
