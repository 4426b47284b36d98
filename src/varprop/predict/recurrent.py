"""Recurrent layers with fixed variances: means step by step as a plain layer computes them, variances to first order.

Gates are smoothed by E S(x) ≈ S(m / √(1 + π v / 8)) and E tanh(x) ≈ tanh(m / √(1 + π v / 2)), right to 0.02; the
(`rules/recurrent.py`) integrate every gate instead, and cost a hundred times as much with their derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..graph.node import Node
from ..moments import Moments
from ..rules.recurrent import GRU, LSTM, Params, RecurrentCell, by_layer, joined
from ..rules.registry import Rule
from .attention import mean_of, var_of

State = tuple[Moments, ...]


class Gates:
    """Linear maps to the gates of a layer: their means with derivatives, covariances of pairs without."""

    def __init__(self, weight: Tensor, bias: Tensor | None, cell: RecurrentCell) -> None:
        count = 1 + max(max(pair) for pair in cell.pairs)
        rows = weight.chunk(count)
        self.weight, self.bias = weight, bias
        self.products = torch.cat([rows[a] * rows[b] for a, b in cell.pairs])

    def covariances(self, var: Tensor) -> Tensor:
        """Covariances of the gates of all pairs, side by side."""
        return F.linear(var, self.products)


def _sigmoid(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and slope of the logistic function."""
    narrow = (1 + math.pi / 8 * var).rsqrt()
    s = torch.sigmoid(mean * narrow)
    slope = narrow * s.detach() * (1 - s.detach())
    return s, slope.square() * var, slope


def _tanh(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and slope of tanh."""
    narrow = (1 + math.pi / 2 * var).rsqrt()
    t = torch.tanh(mean * narrow)
    slope = narrow * (1 - t.detach().square())
    return t, slope.square() * var, slope


def _product_var(m1: Tensor, v1: Tensor, m2: Tensor, v2: Tensor, c: Tensor | float) -> Tensor:
    """Variance of the product of a Gaussian pair of covariance c."""
    return v1 * v2 + m1 * m1 * v2 + m2 * m2 * v1 + c * (c + 2 * m1 * m2)


def _lstm_step(entering: Tensor, covariances: Tensor, state: State, recurrent: Gates, project: Tensor | None) -> State:
    """c' = f c + i g, h' = o tanh(c')."""
    h, c = state
    mi, mf, mg, mo = (entering + F.linear(h.mean, recurrent.weight)).chunk(4, -1)
    ii, ff, gg, oo, ig, fi, fg, oi, of, og = (covariances + recurrent.covariances(h.var)).chunk(10, -1)
    (i, vi, di), (f, vf, df), (o, vo, do) = _sigmoid(mi, ii), _sigmoid(mf, ff), _sigmoid(mo, oo)
    g, vg, dg = _tanh(mg, gg)
    entry, keep, new, memory = i.detach(), f.detach(), g.detach(), c.mean.detach()
    by_i, by_f, by_g = new * di, memory * df, entry * dg
    var = _product_var(entry, vi, new, vg, di * dg * ig) + _product_var(keep, vf, memory, c.var, 0.0)
    cell = Moments(f * c.mean + i * g + di * dg * ig, (var + 2 * by_f * (by_i * fi + by_g * fg)).clamp_min(0))
    t, vt, dt = _tanh(cell.mean, cell.var)
    common = do * dt * (by_i * oi + by_g * og + by_f * of)
    out = Moments(o * t + common, _product_var(o.detach(), vo, t.detach(), vt, common).clamp_min(0))
    if project is not None:
        out = Moments(F.linear(out.mean, project), F.linear(out.var, project.square()))
    return out, cell


def _gru_step(entering: Tensor, covariances: Tensor, state: State, recurrent: Gates, project: None) -> State:
    """n = tanh(a + r u), h' = n + z (h - n); the rule's formula with slopes in place of integrals."""
    (h,) = state
    (xr, xz, a), (hr, hz, u) = entering.chunk(3, -1), F.linear(h.mean, recurrent.weight, recurrent.bias).chunk(3, -1)
    by_x, by_h = covariances.chunk(6, -1), recurrent.covariances(h.var).chunk(6, -1)
    rr, zz, rz = (by_x[pair] + by_h[pair] for pair in (0, 1, 4))
    (r, vr, dr), (z, vz, dz) = _sigmoid(xr + hr, rr), _sigmoid(xz + hz, zz)
    reset, update, inner = r.detach(), z.detach(), u.detach()
    with_reset = dr * by_h[5]
    gated_var = _product_var(reset, vr, inner, by_h[2], with_reset)
    n, vn, dn = _tanh(a + r * u + with_reset, (by_x[2] + gated_var + 2 * inner * dr * by_x[5]).clamp_min(0))
    own_r, own_z, own_n = (rows.diagonal() for rows in recurrent.weight.chunk(3))
    zn = dz * dn * (by_x[3] + reset * by_h[3] + inner * dr * rz)
    zh, nh = dz * own_z * h.var, dn * (reset * own_n + inner * dr * own_r) * h.var
    d = (h.mean - n).detach()
    var = ((1 - update).square() + vz) * vn + (update.square() + vz) * h.var + vz * d.square()
    var = var + 2 * d * ((1 - update) * zn + update * zh) + 2 * update * (1 - update) * nh
    return (Moments(n + z * (h.mean - n) + zh - zn, var.clamp_min(0)),)


def _layer(
    cell: RecurrentCell, step: Callable[..., State], x: Moments, state: State, params: Params, reverse: bool
) -> tuple[Moments, State]:
    """One direction of one layer over time, the first axis."""
    w_ih, w_hh, b_ih, b_hh, w_hr = params
    assert w_ih is not None and w_hh is not None
    inputs, recurrent = Gates(w_ih, b_ih, cell), Gates(w_hh, b_hh, cell)
    joint = b_hh if cell is LSTM and b_hh is not None else 0.0  # of a GRU it stands inside a product
    means = (F.linear(x.mean, inputs.weight, inputs.bias) + joint).unbind()
    covariances = inputs.covariances(x.var).unbind()
    outputs: dict[int, Moments] = {}
    for t in sorted(range(len(means)), reverse=reverse):
        state = step(means[t], covariances[t], state, recurrent, w_hr)
        outputs[t] = state[0]
    return joined(torch.stack, [outputs[t] for t in range(len(means))], 0), state


def _unroll(
    cell: RecurrentCell,
    step: Callable[..., State],
    node: Node,
    x: Any,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Moments, ...] | None:
    """The outputs and the last states; None where weights are random or layers drop out: the rule knows these."""
    if any(isinstance(parameter, Moments) for parameter in params) or (dropout and train):
        return None
    sequence = Moments(mean_of(x), var_of(x).detach())
    if batch_first:
        sequence = Moments(sequence.mean.transpose(0, 1), sequence.var.transpose(0, 1))
    starts = [hx] if isinstance(hx, (Tensor, Moments)) else hx
    directions = 2 if bidirectional else 1
    last: list[State] = []
    outputs: list[Moments] = []
    for index, weights in enumerate(by_layer(params, has_biases, num_layers * directions)):
        state = tuple(Moments(mean_of(s)[index], var_of(s)[index]) for s in starts)
        output, state = _layer(cell, step, sequence, state, weights, reverse=index % directions == 1)
        outputs.append(output)
        last.append(state)
        if len(outputs) == directions:
            sequence, outputs = joined(torch.cat, outputs, -1), []
    finals = (joined(torch.stack, states, 0) for states in zip(*last, strict=True))
    if batch_first:
        sequence = Moments(sequence.mean.transpose(0, 1), sequence.var.transpose(0, 1))
    return sequence, *finals


Unroll = Callable[..., tuple[Moments, ...] | None]
_UNROLLED: dict[RecurrentCell, Unroll] = {
    LSTM: partial(_unroll, LSTM, _lstm_step),
    GRU: partial(_unroll, GRU, _gru_step),
}


def unroll_of(rule: Rule | None) -> Unroll | None:
    """How to evaluate a recurrent layer step by step, by the cell of its rule; None for other operations and cells."""
    if rule is None or rule.operation != "recurrent" or not isinstance(rule.function, partial):
        return None
    return _UNROLLED.get(rule.function.args[0])
