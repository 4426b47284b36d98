"""Recurrent layers with fixed variances: means step by step as a plain layer computes them, variances to first order.

Gates are smoothed by E S(x) ≈ S(m / √(1 + π v / 8)) and E tanh(x) ≈ tanh(m / √(1 + π v / 2)), right to 0.02. The rules
(`rules/recurrent.py`) integrate every gate instead, and cost a hundred times as much with their derivatives.

Fresh noise enters the memory at every step: what the lines leave of products, v₁ v₂ + c², and of curves, to second
order ½ (E f'' v)². Units are taken as independent, so that under strong noise only an eighth of what the lines miss is
found: enough to tell where they miss much. What an LSTM's output gate adds, half as much, is left out: it would take as
many derivatives again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..moments import Moments
from ..rules.recurrent import GRU, LSTM, RELU, TANH, Params, RecurrentCell, by_layer, joined
from ..rules.registry import Rule
from .attention import mean_of, var_of
from .curves import left_by_slopes, line, rectified

State = tuple[Moments, ...]
Step = Callable[..., tuple[State, Tensor]]  # the new state, and the variance of the noise that enters it
Enter = Callable[[Tensor, Tensor], None]  # a value to which noise is added, and its variance


class Gates:
    """The linear map to the gates of a layer, and what maps variances to the covariances of its pairs of gates."""

    def __init__(self, weight: Tensor, bias: Tensor | None, cell: RecurrentCell) -> None:
        count = 1 + max(max(pair) for pair in cell.pairs)
        rows = weight.chunk(count)
        self.weight, self.bias = weight, bias
        self.products = torch.cat([rows[a] * rows[b] for a, b in cell.pairs])

    def covariances(self, var: Tensor) -> Tensor:
        """Covariances of the gates of all pairs, side by side."""
        return F.linear(var, self.products)


def _sigmoid(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance and slope of the logistic function, and E f'' v."""
    narrow = (1 + math.pi / 8 * var).rsqrt()
    s = torch.sigmoid(mean * narrow)
    value = s.detach()
    slope = narrow * value * (1 - value)
    return s, slope.square() * var, slope, narrow * slope * (1 - 2 * value) * var


def _tanh(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance and slope of tanh, and E f'' v."""
    narrow = (1 + math.pi / 2 * var).rsqrt()
    t = torch.tanh(mean * narrow)
    value = t.detach()
    slope = narrow * (1 - value.square())
    return t, slope.square() * var, slope, narrow * slope * value * var * -2


def _product_var(m1: Tensor, v1: Tensor, m2: Tensor, v2: Tensor, c: Tensor | None = None) -> Tensor:
    """Variance of the product of a Gaussian pair of covariance c."""
    var = torch.addcmul(v1, m1, m1).mul_(v2).addcmul_(m2.square(), v1)
    return var if c is None else var.addcmul_(c, torch.addcmul(c, m1, m2, value=2))


class _LSTMStep(torch.autograd.Function):
    """The means of an LSTM's new state, with their derivatives by the gates, the memory before and its noise."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, memory: Tensor, noise: Tensor, out: Tensor, cell: Tensor, slopes: Sequence[Tensor]
    ) -> Any:
        """The means as they are: `out`, `cell`; slopes of the cell by i, f, g and memory, of out by o and the cell."""
        ctx.slopes = slopes
        return out.view_as(out), cell.view_as(cell)

    @staticmethod
    def backward(ctx: Any, by_out: Tensor, by_cell: Tensor) -> tuple[Tensor | None, ...]:
        """Derivatives by gates, memory and noise."""
        i, f, g, memory, o, cell = ctx.slopes
        by_cell = by_cell + by_out * cell
        by_gates = torch.cat([by_cell * i, by_cell * f, by_cell * g, by_out * o], -1)
        return by_gates, by_cell * memory, by_cell, None, None, None


def _lstm_step(
    entering: Tensor, covariances: Tensor, state: State, recurrent: Gates, project: Tensor | None, noise: Tensor
) -> tuple[State, Tensor]:
    """c' = f c + i g, h' = o tanh(c'); of the third gate twice its argument enters: tanh x = 2 S(2x) - 1."""
    h, c = state
    gates = entering + F.linear(h.mean, recurrent.weight)
    with torch.no_grad():
        covariances = covariances + recurrent.covariances(h.var)
        width = gates.shape[-1]
        var, (ig, fi, fg, oi, of, og) = covariances[..., :width], covariances[..., width:].chunk(6, -1)
        narrow = (var * (math.pi / 8)).add_(1).rsqrt_()
        smoothed = torch.sigmoid(gates * narrow)
        tangents = torch.addcmul(smoothed, smoothed, smoothed, value=-1).mul_(narrow)
        (i, f, g, o), (di, df, dg, do) = smoothed.chunk(4, -1), tangents.chunk(4, -1)
        g.mul_(2).sub_(1)
        dg.mul_(2)
        vi, vf, vg, vo = tangents.square().mul_(var).chunk(4, -1)
        by_i, by_f, by_g, memory = g * di, c.mean * df, i * dg, c.mean
        both = (di * dg).mul_(ig)
        cell_var = _product_var(i, vi, g, vg, both).add_(_product_var(f, vf, memory, c.var))
        cell_var.addcmul_(by_f, (by_i * fi).addcmul_(by_g, fg), value=2).clamp_min_(0)
        cell = (f * memory).addcmul_(i, g).add_(both)
        t, vt, dt, _ = _tanh(cell, cell_var)
        common = (by_i * oi).addcmul_(by_g, og).addcmul_(by_f, of).mul_(do).mul_(dt)
        out_var = _product_var(o, vo, t, vt, common).clamp_min_(0)
        out = torch.addcmul(common, o, t)
        bent = narrow.mul_(var).mul_(tangents)  # times 1 - 2 S, for g the same - 2 S(2x) + 1, it is E f'' v
        bent_i, bent_f, bent_g, _ = bent.chunk(4, -1)
        by_curves = (g * bent_i * (1 - 2 * i)).square_() + (memory * bent_f * (1 - 2 * f)).square_()
        by_curves += (i * bent_g * g).square_()
        fresh = by_curves.mul_(0.5).addcmul_(vi, vg).addcmul_(both, both).addcmul_(vf, c.var)
    slopes = by_i, by_f, by_g, f, t * do, o * dt
    out, cell = _LSTMStep.apply(gates, memory, noise, out, cell, slopes)  # type: ignore[no-untyped-call]
    if project is not None:
        out, out_var = F.linear(out, project), F.linear(out_var, project.square())
    return (Moments(out, out_var), Moments(cell, cell_var)), fresh


def _gru_step(
    entering: Tensor, covariances: Tensor, state: State, recurrent: Gates, project: None, noise: Tensor
) -> tuple[State, Tensor]:
    """n = tanh(a + r u), h' = n + z (h - n); the rule's formula with slopes in place of integrals."""
    (h,) = state
    (xr, xz, a), (hr, hz, u) = entering.chunk(3, -1), F.linear(h.mean, recurrent.weight, recurrent.bias).chunk(3, -1)
    by_x, by_h = covariances.chunk(6, -1), recurrent.covariances(h.var).chunk(6, -1)
    rr, zz, rz = (by_x[pair] + by_h[pair] for pair in (0, 1, 4))
    (r, vr, dr, bent_r), (z, vz, dz, bent_z) = _sigmoid(xr + hr, rr), _sigmoid(xz + hz, zz)
    reset, update, inner = r.detach(), z.detach(), u.detach()
    with_reset = dr * by_h[5]
    gated_var = _product_var(reset, vr, inner, by_h[2], with_reset)
    n, vn, dn, bent_n = _tanh(a + r * u + with_reset, (by_x[2] + gated_var + 2 * inner * dr * by_x[5]).clamp_min(0))
    own_r, own_z, own_n = (rows.diagonal() for rows in recurrent.weight.chunk(3))
    zn = dz * dn * (by_x[3] + reset * by_h[3] + inner * dr * rz)
    zh, nh = dz * own_z * h.var, dn * (reset * own_n + inner * dr * own_r) * h.var
    d = (h.mean - n).detach()
    var = ((1 - update).square() + vz) * vn + (update.square() + vz) * h.var + vz * d.square()
    var = var + 2 * d * ((1 - update) * zn + update * zh) + 2 * update * (1 - update) * nh
    fresh_n = 0.5 * bent_n.detach().square()
    fresh_n += dn.square() * (0.5 * (inner * bent_r.detach()).square() + vr * by_h[2] + with_reset.square())
    fresh = (1 - update).square() * fresh_n + 0.5 * (d * bent_z.detach()).square() + vz * (h.var + vn)
    return (Moments(n + z * (h.mean - n) + zh - zn + noise, var.clamp_min(0)),), fresh


def _plain_step(activation: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Callable[..., Any]:
    def step(
        entering: Tensor, covariances: Tensor, state: State, recurrent: Gates, project: None, noise: Tensor
    ) -> tuple[State, Tensor]:
        """h' = f(W x + U h + b)."""
        (h,) = state
        mean = entering + F.linear(h.mean, recurrent.weight, recurrent.bias)
        value, var, fresh = activation(mean, covariances + recurrent.covariances(h.var))
        return (Moments(value + noise, var),), fresh

    return step


def _tanh_left(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of tanh, and the variance that its line leaves."""
    value, spread, _, bent = _tanh(mean, var)
    return value, spread, 0.5 * bent.square()


def _rectified_left(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = Moments(mean, var)
    value, spread, slope = rectified(x)
    return line(value, [(x, slope)]), spread, left_by_slopes(spread, [(x, slope)])


def _third_doubled(parameter: Tensor | None) -> Tensor | None:
    if parameter is None:
        return None
    first, second, third, fourth = parameter.chunk(4)
    return torch.cat([first, second, 2 * third, fourth])


def _layer(
    cell: RecurrentCell, step: Step, enter: Enter, x: Moments, state: State, params: Params, reverse: bool
) -> tuple[Moments, State]:
    """One direction of one layer over time, the first axis."""
    *by_gate, w_hr = params
    w_ih, w_hh, b_ih, b_hh = map(_third_doubled, by_gate) if cell is LSTM else by_gate
    assert w_ih is not None and w_hh is not None
    inputs, recurrent = Gates(w_ih, b_ih, cell), Gates(w_hh, b_hh, cell)
    joint = b_hh if cell is LSTM and b_hh is not None else 0.0  # of a GRU it stands inside a product
    means = (F.linear(x.mean, inputs.weight, inputs.bias) + joint).unbind()
    covariances = inputs.covariances(x.var).unbind()
    units = len(w_hh) // {LSTM: 4, GRU: 3}.get(cell, 1)
    entry = x.mean.new_zeros(*x.shape[:-1], units).requires_grad_()
    outputs, fresh, noise = dict[int, Moments](), dict[int, Tensor](), entry.unbind()
    for t in sorted(range(len(means)), reverse=reverse):
        state, fresh[t] = step(means[t], covariances[t], state, recurrent, w_hr, noise[t])
        outputs[t] = state[0]
    enter(entry, torch.stack([fresh[t] for t in range(len(means))]).detach())
    return joined(torch.stack, [outputs[t] for t in range(len(means))], 0), state


def _unroll(
    cell: RecurrentCell,
    step: Step,
    drop: Callable[[Moments, float], Moments],
    enter: Enter,
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
    """The outputs and the last states; None where weights are random: the rule knows these."""
    if any(isinstance(parameter, Moments) for parameter in params):
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
        output, state = _layer(cell, step, enter, sequence, state, weights, reverse=index % directions == 1)
        outputs.append(output)
        last.append(state)
        if len(outputs) == directions:
            sequence, outputs = joined(torch.cat, outputs, -1), []
            if train and dropout > 0 and index + 1 < num_layers * directions:
                sequence = drop(sequence, dropout)
    finals = (joined(torch.stack, states, 0) for states in zip(*last, strict=True))
    if batch_first:
        sequence = Moments(sequence.mean.transpose(0, 1), sequence.var.transpose(0, 1))
    return sequence, *finals


Unroll = Callable[..., tuple[Moments, ...] | None]
_UNROLLED: dict[RecurrentCell, Unroll] = {
    LSTM: partial(_unroll, LSTM, _lstm_step),
    GRU: partial(_unroll, GRU, _gru_step),
    TANH: partial(_unroll, TANH, _plain_step(_tanh_left)),
    RELU: partial(_unroll, RELU, _plain_step(_rectified_left)),
}


def unroll_of(rule: Rule | None) -> Unroll | None:
    """How to evaluate a recurrent layer step by step, given what to do where values drop out and noise enters."""
    if rule is None or rule.operation != "recurrent" or not isinstance(rule.function, partial):
        return None
    return _UNROLLED.get(rule.function.args[0])
