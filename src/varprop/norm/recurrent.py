"""Recurrent layers that normalize their gates: a_t = norm(W_ih x_t + W_hh h_(t-1)).

A gate is N(shift, scale^2) by construction, so the stationary moments of the state h (and of an LSTM's cell) follow
from scale and shift alone. Both weights of a gate are folded by one factor (mathematics.md, 8 and 10):
mu = W_ih m_x + W_hh m_h, sigma^2 = W_ih^2 (v_x + eps) + W_hh^2 (v_h + eps), W' = W scale / sigma,
b' = shift - mu scale / sigma. The output does not depend on a factor common to a gate's rows of W_ih and W_hh, and if
rows are centred, not on a number added to all weights of both either.

A GRU's candidate tanh(A + r B) has two parts, A = W_in x and B = W_hn h, each normalized by itself, so that its scales
and shifts have the blocks r, z, A, B. An LSTM's projection stays as it is: it is part of the state.

Gates, state and input count as independent (mathematics.md, section 8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..gaussian import activations
from ..gaussian.normal import Pair, safe_sqrt
from ..moments import Moments, full_precision, trusted
from ..rules.dropout import dropout as drop
from .fold.reference import minus_row_mean, rate_of
from .layers import SETTINGS, Normalized

_DAMPINGS, _STEPS, CONVERGED = (1.0, 0.5, 0.1), 300, 1e-13


def _times(a: Pair, b: Pair) -> Pair:
    """The product of independent variables."""
    (m1, v1), (m2, v2) = a, b
    return m1 * m2, v1 * v2 + m1.square() * v2 + m2.square() * v1


def _forgotten(complement: Tensor, var: Tensor) -> Tensor:
    """1 - E f^2 for a gate f with E f = 1 - complement; a sum of positive terms."""
    return complement + (complement * (1 - complement) - var)


def _gates(means: list[Tensor], stds: list[Tensor]) -> list[Pair]:
    """The logistic function of several gates; 1 - S(x) = S(-x) spares a difference from 1."""
    mean, var = activations.sigmoid(torch.cat(means, -1), torch.cat(stds, -1))
    return list(zip(mean.chunk(len(means), -1), var.chunk(len(means), -1), strict=True))


def _lstm(shift: Tensor, std: Tensor) -> list[Pair]:
    """c' = f c + i g: E c = E i E g / (1 - E f), Var c = (Var f (E c)^2 + Var(i g)) / (1 - E f^2); h = o tanh(c)."""
    (mi, mf, mg, mo), (si, sf, sg, so) = shift.chunk(4, -1), std.chunk(4, -1)
    enter, (complement, forget_var), leave = _gates([mi, -mf, mo], [si, sf, so])
    new, new_var = _times(enter, activations.tanh(mg, sg))
    mean = new / complement
    var = (forget_var * mean.square() + new_var) / _forgotten(complement, forget_var)
    return [_times(leave, activations.tanh(mean, safe_sqrt(var))), (mean, var)]


def _gru(shift: Tensor, std: Tensor) -> list[Pair]:
    """h' = (1 - z) n + z h: E h = E n, Var h = E(1-z)^2 Var n / (1 - E z^2); n = tanh(A + r B)."""
    (mr, mz, ma, mb), (sr, sz, sa, sb) = shift.chunk(4, -1), std.chunk(4, -1)
    reset, (complement, keep_var) = _gates([mr, -mz], [sr, sz])
    gated, gated_var = _times(reset, (mb, sb.square()))
    mean, var = activations.tanh(ma + gated, safe_sqrt(sa.square() + gated_var))
    return [(mean, (complement.square() + keep_var) * var / _forgotten(complement, keep_var))]


# From mean and standard deviation of the gates to the stationary moments of h, and of an LSTM's cell.
STATES: dict[str, Callable[[Tensor, Tensor], list[Pair]]] = {
    "RNN_TANH": lambda shift, std: [activations.tanh(shift, std)],
    "RNN_RELU": lambda shift, std: [activations.relu(shift, std)],
    "LSTM": _lstm,
    "GRU": _gru,
}


def gate_terms(mode: str, x: Tensor, h: Tensor) -> Tensor:
    """Terms of the gates from those of input and state: their sum; for a GRU's candidate one after the other."""
    if mode != "GRU":
        return x + h
    summed = 2 * h.shape[-1] // 3
    alone = h[..., summed:].expand(*x.shape[:-1], -1)
    return torch.cat([x[..., :summed] + h[..., :summed], x[..., summed:], alone], -1)


def row_terms(mode: str, gates: Tensor) -> Pair:
    """The entries for the rows of W_ih and of W_hh from those of the gates."""
    if mode != "GRU":
        return gates, gates
    r, z, a, b = gates.chunk(4)
    return torch.cat([r, z, a]), torch.cat([r, z, b])


def gate_statistics(mode: str, w_ih: Tensor, w_hh: Tensor, x: Moments, h: Moments) -> Pair:
    """Mean and variance of the gates, without bias, for inputs that are a mixture (one row for each)."""
    means = gate_terms(mode, F.linear(x.mean, w_ih), F.linear(h.mean, w_hh))
    variances = gate_terms(mode, F.linear(x.var, w_ih.square()), F.linear(h.var, w_hh.square()))
    mean = means.mean(0)
    return mean, (variances + (means - mean).square()).mean(0)


def distance(a: Tensor, b: Tensor) -> float:
    """How far apart means and standard deviations of gates are, in units of their size."""
    return float(((a - b).abs() / (a.abs() + a[1])).max())


def fixed_point(step: Callable[[Tensor], Tensor], start: Tensor) -> Tensor | None:
    """The means and standard deviations of the gates, two rows, that `step` leaves as they are; None if none is found.

    Plain iteration goes on until nothing moves, to a relative 1e-13; where it does not settle, smaller steps follow.
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


def suffixes(layer: nn.RNNBase, index: int | None = None) -> list[str]:
    """How the parameters of all layers, or of one, end: l0, l0_reverse, l1, ..."""
    indices = range(layer.num_layers) if index is None else [index]
    return [f"l{k}{direction}" for k in indices for direction in ("", "_reverse")[: 1 + layer.bidirectional]]


def list_weights(layer: nn.RNNBase, bias: bool) -> None:
    """Set the lists of parameter names that torch's recurrent layers hold."""
    names = ["weight_ih", "weight_hh"] + ["bias_ih", "bias_hh"] * bias + ["weight_hr"] * bool(layer.proj_size)
    layer.bias = bias
    layer._all_weights = [[f"{name}_{suffix}" for name in names] for suffix in suffixes(layer)]
    layer._flat_weights_names = [name for names in layer._all_weights for name in names]
    layer._init_flat_weights()


def gate_norms(mode: str, w_ih: Tensor, w_hh: Tensor) -> Tensor:
    """The Euclidean norm of all weights of every gate, those of W_ih and W_hh together."""
    return gate_terms(mode, w_ih.square().sum(1), w_hh.square().sum(1)).sqrt()


def with_centred_gates(mode: str, w_ih: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor]:
    """Both weights minus the mean of every gate, over its weights in both.

    Of a GRU's candidate, the parts that read input and state are rows by themselves, and stay as they are where they
    have one weight.
    """
    count = 2 * len(w_hh) // 3 if mode == "GRU" else len(w_hh)
    shared = minus_row_mean(torch.cat([w_ih[:count], w_hh[:count]], 1), (1,)).split([w_ih.shape[1], w_hh.shape[1]], 1)
    alone = [minus_row_mean(w[count:], (1,)) if w.shape[1] > 1 else w[count:] for w in (w_ih, w_hh)]
    return torch.cat([shared[0], alone[0]]), torch.cat([shared[1], alone[1]])


def check_gates(path: str, layer: nn.RNNBase, centred: bool) -> None:
    """Raise if a gate cannot be normalized."""
    for name, weight in layer.named_parameters(recurse=False):
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name} of '{path}' has a value that is not finite.")
    for suffix in suffixes(layer):
        w_ih, w_hh = (getattr(layer, f"{name}_{suffix}").detach() for name in ("weight_ih", "weight_hh"))
        w_ih, w_hh = with_centred_gates(layer.mode, w_ih, w_hh) if centred else (w_ih, w_hh)
        empty = (gate_norms(layer.mode, w_ih, w_hh) == 0).nonzero().flatten()
        if len(empty):
            raise ValueError(
                f"Gate {int(empty[0])} ({suffix}) of '{path}' has only {'equal' if centred else 'zero'} weights: it "
                f"cannot be normalized."
            )


def in_one_chunk(weights: list[Tensor]) -> list[Tensor]:
    """Weights as views of one tensor in cuDNN's order, matrices first; cuDNN would copy others, and warn."""
    order = sorted(range(len(weights)), key=lambda i: weights[i].ndim == 1)
    chunk = torch.cat([weights[i].flatten() for i in order])
    views = dict(zip(order, chunk.split([weights[i].numel() for i in order]), strict=True))
    return [views[i].view_as(weight) for i, weight in enumerate(weights)]


class WithWeights:
    """A recurrent layer as torch's own forward sees it, with other weights than its own, and with biases."""

    check_input = nn.RNNBase.check_input

    def __init__(self, layer: nn.RNNBase, weights: list[Tensor]) -> None:
        self._layer, self.bias = layer, True
        self._flat_weights = in_one_chunk(weights) if weights[0].is_cuda else weights

    def check_forward_args(self, *args: Any) -> None:
        """Check arguments as torch does, against these weights."""
        type(self._layer).check_forward_args(cast(Any, self), *args)

    def _update_flat_weights(self) -> None:
        """Nothing: they are up to date."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


States = dict[str, list[Pair]]  # of every direction: h, and an LSTM's cell


class NormalizedRecurrent(Normalized, nn.RNNBase):
    """A recurrent layer with analytic normalization of its gates.

    Attributes:
        weight_ih_l0: As in the plain layer, and so on for all layers and directions; so is weight_hh_l0.
        scale_l0: Standard deviation of every gate.
        shift_l0: Mean of every gate.
    """

    stock: type[nn.RNNBase]
    plain_biases: dict[str, nn.Parameter]

    @property
    def had_bias(self) -> bool:
        """True if the plain layer had biases."""
        return bool(self.plain_biases)

    @classmethod
    def from_plain_(cls, layer: nn.RNNBase, center: bool = True, centred_rows: bool = False) -> NormalizedRecurrent:
        """Turn a plain layer into a normalized one where it stands."""
        plain_class = type(layer)
        cast(Any, layer).__class__ = cls
        normalized = cast(NormalizedRecurrent, layer)
        normalized.plain_class, normalized.center, normalized.centred_rows = plain_class, center, centred_rows
        normalized.networks = {}
        biases = {name: p for name, p in normalized._parameters.items() if name.startswith("bias_") and p is not None}
        normalized.plain_biases = biases  # kept for `become_plain_`, but no parameters of the normalized model
        for name in biases:
            delattr(normalized, name)
        list_weights(normalized, bias=False)
        for suffix in suffixes(normalized):
            like = normalized.parameter("weight_ih", suffix)
            size = (4 if normalized.mode in ("LSTM", "GRU") else 1) * normalized.hidden_size
            for name, value in (("scale", 1.0), ("shift", 0.0)):
                parameter = nn.Parameter(like.new_full((size,), value), requires_grad=like.requires_grad)
                normalized.register_parameter(f"{name}_{suffix}", parameter)
        return normalized

    @torch.no_grad()
    def become_plain_(self, folded: dict[str, Tensor]) -> None:
        """Turn it back into a plain layer with the given parameters, with biases in any case."""
        parameters, plain_class = {**self._parameters, **self.plain_biases}, self.plain_class
        trainable = self._first.requires_grad
        gates = [f"{name}_{suffix}" for suffix in suffixes(self) for name in ("scale", "shift")]
        for name in (*gates, "plain_class", "plain_biases", *SETTINGS):
            delattr(self, name)
        cast(Any, self).__class__ = plain_class
        for name, value in folded.items():
            parameter = parameters.get(name)
            if parameter is None:
                parameter = nn.Parameter(value, requires_grad=trainable)
            parameter.data = value.detach().clone()
            self._parameters.pop(name, None)  # and to the end, so that all come in torch's order
            self.register_parameter(name, parameter)
        list_weights(self, bias=True)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """The plain layer with folded weights, on torch's own kernels."""
        plain = WithWeights(self, list(cast(Any, self._for_call(input)).values()))
        return cast(Any, self.stock).forward(plain, input, hx)

    def folded(self) -> dict[str, Tensor]:  # type: ignore[override]
        """All parameters of the plain layer that does the same, by name, in torch's order."""
        parameters: dict[str, Tensor] = {}
        with full_precision(self._first.device), trusted():
            states = self.states()
            for index in range(self.num_layers):
                x = self._reads(index, states)
                for suffix in suffixes(self, index):
                    parameters.update(self._folded_direction(suffix, x, self._recurring(*states[suffix][0])))
        return parameters

    def _folded_direction(self, suffix: str, x: Moments, h: Moments) -> Iterator[tuple[str, Tensor]]:
        """Folded parameters of one layer and direction, for moments of its input and of its state."""
        names = ("weight_ih", "weight_hh", "scale", "shift")
        w_ih, w_hh, scale, shift = (self.parameter(name, suffix, self._dtype) for name in names)
        if self.centred_rows:
            w_ih, w_hh = with_centred_gates(self.mode, w_ih, w_hh)
        mean, var = gate_statistics(self.mode, w_ih, w_hh, x, h)
        rate = rate_of(scale, var)
        rate_ih, rate_hh = row_terms(self.mode, rate)
        bias_ih, bias_hh = row_terms(self.mode, shift - rate * mean)
        shared = 2 * self.hidden_size if self.mode == "GRU" else len(bias_hh)  # there bias_ih has it all
        bias_hh = torch.cat([torch.zeros_like(bias_hh[:shared]), bias_hh[shared:]])
        weights = {"weight_ih": w_ih * rate_ih[:, None], "weight_hh": w_hh * rate_hh[:, None]}
        for name, value in {**weights, "bias_ih": bias_ih, "bias_hh": bias_hh}.items():
            yield f"{name}_{suffix}", value.to(self._first.dtype)
        if self.proj_size:
            yield f"weight_hr_{suffix}", self.parameter("weight_hr", suffix)

    def states(self, dtype: torch.dtype | None = None) -> States:
        """The stationary moments of h, and of an LSTM's cell, in every layer and direction."""
        names = suffixes(self)
        shift, scale = (
            torch.stack([self.parameter(p, s, dtype or self._dtype) for s in names]) for p in ("shift", "scale")
        )
        stationary = STATES[self.mode](shift, scale.abs())  # all at once: many small tensors would take longer
        each = {name: [(mean[i], var[i]) for mean, var in stationary] for i, name in enumerate(names)}
        return {name: self._projected(name, states) for name, states in each.items()}

    def _projected(self, suffix: str, states: list[Pair]) -> list[Pair]:
        (mean, var), *cell = states
        if self.proj_size:
            project = self.parameter("weight_hr", suffix, mean.dtype)
            mean, var = F.linear(mean, project), F.linear(var, project.square())
        return [(mean, var), *cell]

    def _reads(self, index: int, states: States) -> Moments:
        """Moments of a layer's input: of the data, a row for each call, or of the layer before it, after dropout."""
        like = states["l0"][0][0]
        if index:
            before = [states[suffix][0] for suffix in suffixes(self, index - 1)]
            mean, var = (torch.cat(tensors)[None] for tensors in zip(*before, strict=True))
            return self._entering(drop(Moments(mean, var), self.dropout, self.training), like)
        self._require_calls()
        calls = [self._entering(x, like) for x in self.statistics[self.training]()]
        pairs = ([t.flatten().expand(self.input_size) for t in (x.mean, x.var)] for x in calls)
        means, variances = zip(*pairs, strict=True)  # one number may stand for all inputs
        return Moments(torch.stack(means), torch.stack(variances))

    def _recurring(self, mean: Tensor, var: Tensor) -> Moments:
        return self._entering(Moments(mean[None], var[None]), mean)

    def output_moments(self, info: Any, _vectors: Any = None) -> list[Moments]:  # type: ignore[override]
        """Stationary moments of the layer's results: output, last states, and for an LSTM last cells."""
        states, last = self.states(), suffixes(self, self.num_layers - 1)
        mean, var = (torch.cat(tensors)[None, None] for tensors in zip(*(states[s][0] for s in last), strict=True))
        results = [Moments(mean, var, info[0].shape)]
        for pairs, each in zip(zip(*states.values(), strict=True), info[1:], strict=True):
            mean, var = (torch.stack(tensors)[:, None] for tensors in zip(*pairs, strict=True))
            results.append(Moments(mean, var, each.shape))
        return results

    @torch.no_grad()
    def set_to_present(self, path: str) -> float:
        """Set scale and shift so that the layer does what it did; returns how far they were from it, by `distance`.

        The statistics of a gate depend on its own scale and shift: solved in float64. Raises a ValueError if the
        recurrence settles nowhere, as an unstable one does.
        """
        farthest = 0.0
        for suffix in suffixes(self):
            with trusted():
                step, present = self._preserving(suffix)
                change = distance(step(present), present)
                if change <= max(CONVERGED, 2 * torch.finfo(self._first.dtype).eps):
                    continue
                gates, farthest = fixed_point(step, present), max(farthest, change)
            if gates is None:
                raise ValueError(
                    f"The recurrence of '{path}' ({suffix}) has no stationary state that its weights agree with: "
                    f'use init="project", or leave it out with `only`.'
                )
            self.parameter("shift", suffix).copy_(gates[0])
            self.parameter("scale", suffix).copy_(gates[1])
        return farthest

    def _preserving(self, suffix: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The statistics that follow from those of the gates, to be the same; and the present ones."""
        names = ("weight_ih", "weight_hh", "shift", "scale")
        w_ih, w_hh, *present = (self.parameter(name, suffix, torch.float64) for name in names)
        biases = [self.plain_biases.get(f"{name}_{suffix}") for name in ("bias_ih", "bias_hh")]
        bias = gate_terms(self.mode, *(w_ih.new_zeros(len(w_ih)) if b is None else b.double() for b in biases))
        x = self._reads(int(suffix[1:].removesuffix("_reverse")), self.states(torch.float64))

        def step(gates: Tensor) -> Tensor:
            state = self._recurring(*self._projected(suffix, STATES[self.mode](*gates))[0])
            mean, var = gate_statistics(self.mode, w_ih, w_hh, x, state)
            return torch.stack([mean + bias, var.sqrt()])

        return step, torch.stack(present)

    def parameter(self, name: str, suffix: str, dtype: torch.dtype | None = None) -> Tensor:
        """One of the parameters of a layer and direction."""
        tensor: Tensor = getattr(self, f"{name}_{suffix}")
        return tensor if dtype is None else tensor.to(dtype)

    @property
    def _first(self) -> Tensor:
        return self.parameter("weight_ih", "l0")

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self._first.dtype, torch.float32)

    def _channel_axis(self, ndim: int) -> int:
        return ndim - 1

    def flatten_parameters(self) -> None:
        """Nothing: the kernels read the folded weights."""


class NormalizedRNN(NormalizedRecurrent, nn.RNN):
    """`nn.RNN` with analytic normalization."""

    stock = nn.RNN


class NormalizedLSTM(NormalizedRecurrent, nn.LSTM):
    """`nn.LSTM` with analytic normalization."""

    stock = nn.LSTM


class NormalizedGRU(NormalizedRecurrent, nn.GRU):
    """`nn.GRU` with analytic normalization."""

    stock = nn.GRU


def recurrent_class(layer: nn.Module) -> type[NormalizedRecurrent] | None:
    """The normalized class for a recurrent layer; None for others, and for one with a forward of its own."""
    kinds: tuple[type[NormalizedRecurrent], ...] = (NormalizedRNN, NormalizedLSTM, NormalizedGRU)
    return next((k for k in kinds if isinstance(layer, k.stock) and type(layer).forward is k.stock.forward), None)


@torch.no_grad()
def unit_gates_(layer: NormalizedRecurrent, suffix: str) -> None:
    """Scale the weights of every gate to norm 1, those of W_ih and W_hh together; the output stays the same.

    Of centred rows, the mean goes as well.
    """
    parameters = [layer.parameter(name, suffix) for name in ("weight_ih", "weight_hh")]
    weights = with_centred_gates(layer.mode, parameters[0], parameters[1]) if layer.centred_rows else parameters
    norms = gate_norms(layer.mode, *weights)
    rows = row_terms(layer.mode, torch.where(norms > 0, norms, torch.ones_like(norms)))
    for parameter, weight, row in zip(parameters, weights, rows, strict=True):
        parameter.copy_(weight / row[:, None])
