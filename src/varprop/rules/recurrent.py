"""Recurrent layers: the step of a cell, unrolled over time, directions and layers.

The gates of a unit are linear in the same inputs, so that Cov(a, b) = sum_i Wa_i Wb_i Var x_i; nonlinearities carry
this to first order, Cov(f(a), g(b)) = E f' E g' Cov(a, b) (moments spec, sections 8 and 9), with E S' = E S (1 - E S)
- Var S and E tanh' = 1 - E tanh^2. Different units count as independent, and so do different steps of what enters the
first layer. What enters the layers above remembers: of the gated cells, which add up what they are given, the
covariance of every unit with its input is followed from step to step (`History`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gaussian import activations
from ..gaussian.normal import safe_sqrt
from ..moments import Moments
from .axes import Value, lift, write_out
from .dropout import dropout as drop
from .registry import rule

aten = torch.ops.aten


class History:
    """How the state of a gated layer, s' = keep s + w(x), varies with an input x that remembers its last step.

    Without it the std of the third layer of an LSTM or GRU is 43 % off in the median, with it 10 to 15 % (16 inputs, 32
    units, 12 steps).

    With a = Cov(x', x) / Var x for neighbouring steps, D_uj = Cov(s_u, x_j) and r_uj the slope of w_u by x_j:
    Cov(s_u, w_u(x')) = sum_j r_uj a_j D_uj, and D' = keep a D + r Var x'.

    Attributes:
        outputs: The covariances of the layer's own output at neighbouring steps.
    """

    def __init__(self, weight: Tensor, gates: int, inputs: list[Moments], lags: list[Tensor] | None) -> None:
        self.rows, self.inputs, self.lags = weight.chunk(gates), inputs, lags
        self.outputs: list[Tensor] = []
        self._steps = 0
        self._slope: Tensor | None = None  # of the output by the state, at the last step
        self._covariance: Tensor | None = None  # D

    def shared(self, keep: Tensor, *gains: Tensor | None) -> Tensor:
        """Cov(s, w(x)) at the present step, for slopes of w by the gates (None: none)."""
        if self.lags is None:
            return torch.zeros_like(keep)
        slopes = [g.unsqueeze(-1) * rows for g, rows in zip(gains, self.rows, strict=True) if g is not None]
        response = torch.stack(torch.broadcast_tensors(*slopes)).sum(0)
        arriving = response * self.inputs[self._steps].var.unsqueeze(-2)
        if self._covariance is None:
            self._covariance = arriving
            return torch.zeros_like(keep)
        ratio = self.lags[self._steps - 1] / self.inputs[self._steps - 1].var.clamp_min(1e-30)
        carried = ratio.unsqueeze(-2) * self._covariance
        self._covariance = keep.unsqueeze(-1) * carried + arriving
        return (response * carried).sum(-1)

    def end_step(self, with_last: Tensor, slope: Tensor) -> None:
        """Record Cov(s', s) of a step, and the slope of the output by the state."""
        if self._slope is not None:
            self.outputs.append(slope * self._slope * with_last)
        self._slope, self._steps = slope, self._steps + 1


State = tuple[Moments, ...]
Gates = tuple[Sequence[Tensor], Sequence[Tensor]]  # means of the gates, covariances of the pairs
Pairs = Sequence[tuple[int, int]]
Params = Sequence[Tensor | None]  # w_ih, w_hh, b_ih, b_hh, w_hr


class Projection:
    """The linear map from a value to the gates: their means, and covariances for pairs of gates of one unit."""

    def __init__(self, weight: Tensor, bias: Tensor | None, pairs: Pairs, dtype: torch.dtype) -> None:
        self.count, self.weight = 1 + max(max(pair) for pair in pairs), weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.rows, self.pairs = self.weight.chunk(self.count), len(pairs)
        self.products = torch.cat([self.rows[a] * self.rows[b] for a, b in pairs])

    def __call__(self, x: Moments) -> Gates:
        """W E[x] + b and sum_i Wa_i Wb_i Var x_i; exact for independent inputs."""
        means, covariances = F.linear(x.mean, self.weight, self.bias), F.linear(x.var, self.products)
        return means.chunk(self.count, -1), covariances.chunk(self.pairs, -1)


def _sum(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _sigmoid(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and E S' of the logistic function."""
    m, v = activations.sigmoid(mean, safe_sqrt(var))
    return m, v, m * (1 - m) - v


def _tanh(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and E tanh'."""
    m, v = activations.tanh(mean, safe_sqrt(var))
    return m, v, 1 - m * m - v


def _times(m1: Tensor, v1: Tensor, m2: Tensor, v2: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Product of a Gaussian pair of covariance c (moments spec, section 8)."""
    return m1 * m2 + c, (v1 * v2 + m1 * m1 * v2 + m2 * m2 * v1 + c * (c + 2 * m1 * m2)).clamp_min(0.0)


def _lstm_step(gates: Gates, state: State, recurrent: Projection, project: Tensor | None, past: History) -> State:
    """c' = f c + i g, h' = o tanh(c'), with the covariances of i, f, g, o through their common inputs."""
    h, c = state
    (mi, mf, mg, mo), (ii, ff, gg, oo, ig, fi, fg, oi, of, og) = map(_sum, gates, recurrent(h))
    (i, vi, di), (f, vf, df), (g, vg, dg) = _sigmoid(mi, ii), _sigmoid(mf, ff), _tanh(mg, gg)
    new, new_var = _times(i, vi, g, vg, di * dg * ig)
    carried, carried_var = _times(f, vf, c.mean, c.var, torch.zeros_like(f))
    shared = c.mean * df * (g * di * fi + i * dg * fg)
    before = past.shared(f, g * di, c.mean * df, i * dg, None)
    cell = Moments(carried + new, (carried_var + new_var + 2 * (shared + f * before)).clamp_min(0.0))
    (o, vo, do), (t, vt, dt) = _sigmoid(mo, oo), _tanh(cell.mean, cell.var)
    past.end_step(f * c.var + before, o * dt)
    out = Moments(*_times(o, vo, t, vt, do * dt * (g * di * oi + i * dg * og + c.mean * df * of)))
    if project is not None:
        out = Moments(F.linear(out.mean, project), F.linear(out.var, project.square()))
    return out, cell


def _gru_step(gates: Gates, state: State, recurrent: Projection, project: None, past: History) -> State:
    """n = tanh(a + r u), h' = n + z d, d = h - n, with the covariances of r, z, n by their inputs, and with h.

    Var h' = E(1-z)^2 Var n + E z^2 Var h + Var z d^2 + 2 d [(1-z) Cov(z,n) + z Cov(z,h)] + 2 z (1-z) Cov(n,h).
    """
    (h,), (x_mean, x_cov) = state, gates
    h_mean, h_cov = recurrent(h)
    (mr, mz, _), (rr, zz, _, _, rz, _), u, vu = _sum(x_mean, h_mean), _sum(x_cov, h_cov), h_mean[2], h_cov[2]
    (r, vr, dr), (z, vz, dz) = _sigmoid(mr, rr), _sigmoid(mz, zz)
    gated, gated_var = _times(r, vr, u, vu, dr * h_cov[5])
    n, vn, dn = _tanh(x_mean[2] + gated, (x_cov[2] + gated_var + 2 * u * dr * x_cov[5]).clamp_min(0.0))
    own_r, own_z, own_n = (rows.diagonal() for rows in recurrent.rows)
    zn = dz * dn * (x_cov[3] + r * h_cov[3] + u * dr * rz)
    zh, nh = dz * own_z * h.var, dn * (r * own_n + u * dr * own_r) * h.var
    d = h.mean - n
    var = ((1 - z).square() + vz) * vn + (z.square() + vz) * h.var + vz * d.square()
    var = var + 2 * d * ((1 - z) * zn + z * zh) + 2 * z * (1 - z) * nh
    before = past.shared(z, (1 - z) * dn * u * dr, d * dz, (1 - z) * dn)
    past.end_step(z * h.var + (1 - z) * nh + d * zh + before, torch.ones_like(z))
    var = var + 2 * z * before
    return (Moments(n + z * d + zh - zn, var.clamp_min(0.0)),)


def _plain(activation: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., State]:
    def step(gates: Gates, state: State, recurrent: Projection, project: None, past: History) -> State:
        """h' = f(W x + U h + b)."""
        (mean,), (var,) = map(_sum, gates, recurrent(state[0]))
        return (Moments(*activation(mean, safe_sqrt(var))),)

    return step


@dataclass(frozen=True)
class RecurrentCell:
    """A recurrent cell: its step, and the pairs of gates whose covariances the step needs."""

    step: Callable[..., State]
    pairs: Pairs


LSTM = RecurrentCell(_lstm_step, ((0, 0), (1, 1), (2, 2), (3, 3), (0, 2), (1, 0), (1, 2), (3, 0), (3, 1), (3, 2)))
GRU = RecurrentCell(_gru_step, ((0, 0), (1, 1), (2, 2), (1, 2), (0, 1), (0, 2)))
TANH, RELU = RecurrentCell(_plain(activations.tanh), ((0, 0),)), RecurrentCell(_plain(activations.relu), ((0, 0),))


class Error(NamedTuple):
    """Relative error of the std of single units: the median, and what 99 of 100 units stay within.

    Measured with the weights of `torch.nn`, 5 inputs, 6 or 64 units, 3 steps (tests/rules/test_recurrent.py): few
    inputs make units dependent, so that layers of many inputs fare better.
    """

    median: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.0%} in the median, up to {self.most:.0%} in 99 of 100 units"


# What goes through a second layer, or a projection, is a sum over dependent units.
ERRORS = {
    "lstm": Error(0.05, 0.35),
    "gru": Error(0.04, 0.25),
    "tanh": Error(0.03, 0.3),
    "relu": Error(0.03, 0.7),
    "stack": Error(0.3, 2.0),
}


def _reason(cell: str, stacks: bool = True) -> str:
    behind = f"; behind a further layer or a projection {ERRORS['stack']}" if stacks else ""
    return f"units count as independent, products as Gaussian (mean within 0.2 std; std off by {ERRORS[cell]}{behind})"


Line = tuple[Moments, list[Tensor] | None]  # a sequence, and the covariances of neighbouring steps where it has any


def _layer(cell: RecurrentCell, line: Line, state: State, params: Params, reverse: bool) -> tuple[Line, State]:
    """One direction of one layer over time, the first axis; a uniform time axis is read at its only entry."""
    w_ih, w_hh, b_ih, b_hh, w_hr = params
    assert w_ih is not None and w_hh is not None
    x, lags = line
    means, covariances = (inputs := Projection(w_ih, b_ih, cell.pairs, x.dtype))(x)
    recurrent = Projection(w_hh, b_hh, cell.pairs, x.dtype)
    steps = sorted(range(x.full[0]), reverse=reverse)
    positions = [min(t, x.shape[0] - 1) for t in steps]
    in_order = lags[::-1] if reverse and lags is not None else lags
    past = History(inputs.weight, inputs.count, [Moments(x.mean[at], x.var[at]) for at in positions], in_order)
    outputs: dict[int, Moments] = {}
    for t, at in zip(steps, positions, strict=True):
        state = cell.step(([m[at] for m in means], [c[at] for c in covariances]), state, recurrent, w_hr, past)
        outputs[t] = state[0]
    lags_out = past.outputs if w_hr is None else [F.linear(lag, w_hr.square()) for lag in past.outputs]
    sequence = joined(torch.stack, [outputs[t] for t in range(x.full[0])], 0)
    return (sequence, lags_out[::-1] if reverse else lags_out), state


def joined(join: Callable[..., Tensor], values: Sequence[Moments], axis: int) -> Moments:
    """Several moments as one: means and variances are each joined along an axis."""
    return Moments(join([p.mean for p in values], axis), join([p.var for p in values], axis))


def by_layer(params: Sequence[Tensor], has_biases: bool, count: int) -> list[Params]:
    """The flat list of parameters by layer and direction, None for those that are missing."""
    size, last = len(params) // count, 4 if has_biases else 2
    groups = [params[i * size : (i + 1) * size] for i in range(count)]
    return [[*p[:2], *(p[2:last] or (None, None)), *(p[last:] or (None,))] for p in groups]


def _unroll(
    cell: RecurrentCell,
    x: Value,
    hx: Value | Sequence[Value],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Moments, ...]:
    """All layers and directions, with dropout between layers in training: the outputs and the last states."""
    line = _swapped(write_out(lift(x), -1)) if batch_first else write_out(lift(x), -1)
    starts = [write_out(_first_state(state), 0, -1) for state in _parts(hx)]
    directions = 2 if bidirectional else 1
    last: list[State] = []
    lags: list[Tensor] | None = None
    for k, weights in enumerate(by_layer(params, has_biases, num_layers * directions)):
        if k % directions == 0:
            source, remembered, outputs = (drop(line, dropout, train) if k else line), lags, list[Line]()
        state = tuple(Moments(s.mean[k], s.var[k]) for s in starts)
        output, state = _layer(cell, (source, remembered), state, weights, reverse=k % directions == 1)
        outputs.append(output)
        last.append(state)
        line = joined(torch.cat, [moments for moments, _ in outputs], -1)
        lags = _lags([lag for _, lag in outputs])
    finals = (joined(torch.stack, states, 0) for states in zip(*last, strict=True))
    return (_swapped(line) if batch_first else line, *finals)


def _lags(by_direction: list[list[Tensor] | None]) -> list[Tensor] | None:
    """The covariances of all units at neighbouring steps; None for cells that do not compute them."""
    present = [lags for lags in by_direction if lags]
    if len(present) < len(by_direction):
        return None
    return [torch.cat(directions, -1) for directions in zip(*present, strict=True)]


def _swapped(x: Moments) -> Moments:
    return Moments(x.mean.transpose(0, 1), x.var.transpose(0, 1), (x.full[1], x.full[0], x.full[2]))


def _one_step(cell: RecurrentCell, x: Value, hx: Value | Sequence[Value], *weights: Tensor | None) -> State | Moments:
    x = write_out(lift(x), -1)
    step = Moments(x.mean.unsqueeze(0), x.var.unsqueeze(0))
    state = tuple(write_out(_first_state(s), -1) for s in _parts(hx))
    _, state = _layer(cell, (step, None), state, [*weights, None, None, None][:5], reverse=False)
    return state if len(state) > 1 else state[0]


def _first_state(state: Value) -> Moments:
    """Moments of a state; a constant that is the same in memory for all samples is uniform over them."""
    if isinstance(state, Tensor) and state.ndim > 1 and state.stride(-2) == 0:
        first = state.narrow(-2, 0, 1)
        return Moments(first, torch.zeros_like(first), state.shape)
    return lift(state)


def _parts(hx: Value | Sequence[Value]) -> Sequence[Value]:
    """The tensors of a state: an LSTM has two, the other cells one."""
    return [hx] if isinstance(hx, (Tensor, Moments)) else hx


def _drops(*arguments: Any) -> bool:
    """True if values drop out between layers."""
    _x, _hx, _params, _has_biases, num_layers, dropout, train, *_ = arguments
    return bool(train and dropout > 0 and num_layers > 1)


_SEQUENCE: dict[str, Any] = {"operation": "recurrent", "skews": True, "draws": _drops}
rule(aten.lstm.input, **_SEQUENCE, approximate=_reason("lstm"))(partial(_unroll, LSTM))
rule(aten.gru.input, **_SEQUENCE, approximate=_reason("gru"))(partial(_unroll, GRU))
rule(aten.rnn_tanh.input, **_SEQUENCE, approximate=_reason("tanh"))(partial(_unroll, TANH))
rule(aten.rnn_relu.input, **_SEQUENCE, approximate=_reason("relu") + "; more for units almost never active")(
    partial(_unroll, RELU)
)
rule(aten.lstm_cell, skews=True, work=10, approximate=_reason("lstm", stacks=False))(partial(_one_step, LSTM))
rule(aten.gru_cell, skews=True, work=8, approximate=_reason("gru", stacks=False))(partial(_one_step, GRU))
# exact for independent Gaussian inputs
rule(aten.rnn_tanh_cell, skews=True, work=7)(partial(_one_step, TANH))
rule(aten.rnn_relu_cell, skews=True, work=7)(partial(_one_step, RELU))
