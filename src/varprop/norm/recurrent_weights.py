"""What torch's recurrent layers hold and under which names, and their own forward with other weights."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from .fold.reference import minus_row_mean
from .recurrent_state import joined


def suffixes(layer: nn.RNNBase, index: int | None = None) -> list[str]:
    """How the parameters of all layers, or of one, end: l0, l0_reverse, l1, ..."""
    indices = range(layer.num_layers) if index is None else [index]
    return [f"l{k}{direction}" for k in indices for direction in ("", "_reverse")[: 1 + layer.bidirectional]]


def list_weights(layer: nn.RNNBase, bias: bool) -> None:
    """Tell torch's bookkeeping which parameters there are."""
    names = ["weight_ih", "weight_hh"] + ["bias_ih", "bias_hh"] * bias + ["weight_hr"] * bool(layer.proj_size)
    layer.bias = bias
    layer._all_weights = [[f"{name}_{suffix}" for name in names] for suffix in suffixes(layer)]
    layer._flat_weights_names = [name for part in layer._all_weights for name in part]
    layer._init_flat_weights()


def gate_norms(mode: str, w_ih: Tensor, w_hh: Tensor) -> Tensor:
    """The Euclidean norm of all weights of every gate, those of W_ih and W_hh together."""
    return joined(mode, w_ih.square().sum(1), w_hh.square().sum(1)).sqrt()


def with_centred_gates(mode: str, w_ih: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor]:
    """Both weights minus the mean of every gate, over its weights in both.

    Of a GRU's candidate, the parts that read input and state are rows by themselves, and stay as they are where they
    have one weight.
    """
    both = 2 * len(w_hh) // 3 if mode == "GRU" else len(w_hh)
    shared = minus_row_mean(torch.cat([w_ih[:both], w_hh[:both]], 1), (1,)).split([w_ih.shape[1], w_hh.shape[1]], 1)
    alone = [minus_row_mean(w[both:], (1,)) if w.shape[1] > 1 else w[both:] for w in (w_ih, w_hh)]
    return torch.cat([shared[0], alone[0]]), torch.cat([shared[1], alone[1]])


def check_gates(path: str, layer: nn.RNNBase, centred: bool = False) -> None:
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
    """The same weights as views of one tensor in cuDNN's order, matrices first; it would copy others, and warn."""
    order = sorted(range(len(weights)), key=lambda i: weights[i].ndim == 1)
    chunk = torch.cat([weights[i].flatten() for i in order])
    parts = dict(zip(order, chunk.split([weights[i].numel() for i in order]), strict=True))
    return [parts[i].view_as(weight) for i, weight in enumerate(weights)]


class WithWeights:
    """A recurrent layer as torch's own forward sees it, with other weights than its own, and with biases."""

    check_input = nn.RNNBase.check_input

    def __init__(self, layer: nn.RNNBase, weights: list[Tensor]) -> None:
        self._layer, self.bias = layer, True
        self._flat_weights = in_one_chunk(weights) if weights[0].is_cuda else weights

    def check_forward_args(self, *args: Any) -> None:
        """As in torch, against these weights."""
        type(self._layer).check_forward_args(cast(Any, self), *args)

    def _update_flat_weights(self) -> None:
        """Nothing: they are up to date."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
