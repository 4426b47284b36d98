"""Layers that normalize themselves: X' = (X - mu) / sigma * scale + shift, with mu and sigma from parameters alone.

The normalization is folded into the weights, so that a layer stays one operation (mathematics.md, equation 10.1):
W' = W scale / sigma, b' = shift - mu scale / sigma.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..gaussian.normal import safe_sqrt
from ..graph.node import Form, Node
from ..moments import Moments, trusted
from ..rules.registry import lookup
from .sites import Site, along_outputs
from .statistics import Statistics
from .together import Together

EPS = 1e-6


@dataclass(frozen=True)
class Use:
    """How a layer is called in the captured graph: the operation, and its arguments after input, weight and bias."""

    target: str
    settings: tuple[Any, ...]

    @classmethod
    def of(cls, node: Node) -> Use:
        """The use a graph node makes of a layer."""
        return cls(str(node.target.overloadpacket), tuple(node.args[3:]))

    def ungrouped(self) -> Use:
        """The same use without groups."""
        place = 5 if self.target == "aten.convolution" else 3
        if len(self.settings) <= place:
            return self
        return Use(self.target, (*self.settings[:place], 1, *self.settings[place + 1 :]))

    def outputs(self, x: Moments, weight: Tensor) -> Moments:
        """Moments of the layer's output without bias."""
        rule = lookup(getattr(torch.ops.aten, self.target.removeprefix("aten.")))
        assert rule is not None and rule.function is not None
        result: Moments = rule.function(x, weight, None, *self.settings)
        return result


class Normalized(nn.Module):
    """A linear layer with analytic normalization; `weight` is the layer's own, scale-invariant now.

    Attributes:
        weight: The layer's weight; its scale does not matter.
        scale: Standard deviation of every output channel (s of the paper).
        shift: Mean of every output channel (b of the paper).
    """

    weight: Tensor
    scale: nn.Parameter
    shift: nn.Parameter
    plain_class: type[nn.Module]
    plain_bias: nn.Parameter | None
    center: bool
    uses: dict[bool, list[Use]]
    statistics: dict[bool, Statistics]
    place: dict[bool, tuple[Together, int]] = {}  # noqa: RUF012  replaced, never changed

    def output_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of every output channel before normalization and without bias.

        A layer that is called several times is one site: its statistics are those of the mixture of its calls.
        """
        with full_precision(self.weight.device), trusted():
            weight = _at_least_float32(self.weight)
            calls = zip(self.uses[self.training], self.statistics[self.training](), strict=True)
            found = [use.outputs(self._entering(x, weight), weight) for use, x in calls]
            pooled = [self._per_channel(moments) for moments in found]
            means, variances = (torch.stack([part.flatten() for part in parts]) for parts in zip(*pooled, strict=True))
            mean = means.mean(0)
            return mean, (variances + (means - mean).square()).mean(0)

    def _entering(self, x: Moments, weight: Tensor) -> Moments:
        """What enters, per channel; epsilon goes with its variance."""
        mean, var = self._per_channel(x)
        if not self.center:
            mean, var = torch.zeros_like(mean), var + mean.square()
        return Moments(mean.to(weight.dtype), var.to(weight.dtype) + EPS, x.full)

    def _per_channel(self, x: Moments) -> tuple[Tensor, Tensor]:
        """Mean and variance pooled over all axes but that of the channels."""
        axes = [axis for axis in range(x.ndim) if axis != self._channel_axis(x.ndim)]
        if not axes:  # which torch would take for all of them
            return x.mean, x.var
        mean = x.mean.mean(axes, keepdim=True)
        return mean, (x.var + (x.mean - mean).square()).mean(axes, keepdim=True)

    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the plain layer that does the same."""
        mean, var = self.output_statistics()
        rate = self.scale / safe_sqrt(var)
        weight = self.weight * along_outputs(rate, self.weight, self)
        return weight.to(self.weight.dtype), (self.shift - rate * mean).to(self.weight.dtype)

    def effective(self) -> tuple[Tensor, Tensor]:
        """As `folded`, computed with all other layers together where that is possible."""
        found = self.place.get(self.training)
        folded = None if found is None else found[0].of(found[1])
        return self.folded() if folded is None else folded

    def entering_moments(self, x: Moments) -> tuple[Tensor, Tensor]:
        """Mean and variance of every channel of what enters, as vectors."""
        with full_precision(self.weight.device), trusted():
            axis = self._channel_axis(x.ndim)
            mean, var = self._per_channel(x)
            size = [x.full[a] if a == axis else 1 for a in range(x.ndim)]
            return mean.expand(size).flatten(), var.expand(size).flatten()

    def train(self, mode: bool = True) -> Normalized:
        """As usual; what was kept for evaluation is computed anew after training, however that went."""
        if mode != self.training:
            for together, _ in self.place.values():
                together.forget()
        return super().train(mode)

    def output_moments(self, form: Form) -> Moments:
        """What the next layers see: mean `shift` and variance `scale`^2 in every channel."""
        shape = [1] * len(form.shape)
        shape[self._channel_axis(len(shape))] = -1
        mean, var = (_at_least_float32(t).view(shape) for t in (self.shift, self.scale.square()))
        return Moments(mean, var, form.shape)

    def _channel_axis(self, ndim: int) -> int:
        return ndim - 1 if self.weight.ndim == 2 else ndim - self.weight.ndim + 1

    def extra_repr(self) -> str:
        """The plain layer's own description, and that it is normalized."""
        return f"{super().extra_repr()}, normalized"


class NormalizedLinear(Normalized, nn.Linear):
    """`nn.Linear` with analytic normalization."""

    def forward(self, input: Tensor) -> Tensor:
        """The plain layer with folded weights."""
        return F.linear(input, *self.effective())


class _NormalizedConv(Normalized):
    def forward(self, input: Tensor) -> Tensor:
        """The plain layer with folded weights."""
        output: Tensor = cast(Any, self)._conv_forward(input, *self.effective())
        return output


class NormalizedConv1d(_NormalizedConv, nn.Conv1d):
    """`nn.Conv1d` with analytic normalization."""


class NormalizedConv2d(_NormalizedConv, nn.Conv2d):
    """`nn.Conv2d` with analytic normalization."""


class NormalizedConv3d(_NormalizedConv, nn.Conv3d):
    """`nn.Conv3d` with analytic normalization."""


class _NormalizedConvTranspose(Normalized):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The plain layer with folded weights."""
        layer, count = cast(Any, self), self.weight.ndim - 2
        extra = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, count, layer.dilation
        )
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[count - 1]
        return function(input, *self.effective(), layer.stride, layer.padding, extra, layer.groups, layer.dilation)


class NormalizedConvTranspose1d(_NormalizedConvTranspose, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d` with analytic normalization."""


class NormalizedConvTranspose2d(_NormalizedConvTranspose, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` with analytic normalization."""


class NormalizedConvTranspose3d(_NormalizedConvTranspose, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d` with analytic normalization."""


CLASSES: dict[type[nn.Module], type[Normalized]] = {
    nn.Linear: NormalizedLinear,
    nn.Conv1d: NormalizedConv1d,
    nn.Conv2d: NormalizedConv2d,
    nn.Conv3d: NormalizedConv3d,
    nn.ConvTranspose1d: NormalizedConvTranspose1d,
    nn.ConvTranspose2d: NormalizedConvTranspose2d,
    nn.ConvTranspose3d: NormalizedConvTranspose3d,
}


def normalized_class(layer: nn.Module) -> type[Normalized] | None:
    """The normalized class for a layer; None where it computes its output in a way of its own."""
    for plain, normalized in CLASSES.items():
        if isinstance(layer, plain) and type(layer).forward is plain.forward:
            return normalized
    return None


def become_normalized_(layer: Site, center: bool = True) -> Normalized:
    """Turn a plain layer into a normalized one where it stands, so that all references and hooks stay good."""
    kind = normalized_class(layer)
    assert kind is not None
    plain_class, bias = type(layer), layer.bias
    cast(Any, layer).__class__ = kind
    normalized = cast(Normalized, layer)
    normalized.plain_class, normalized.plain_bias, normalized.center = plain_class, None, center
    normalized.place = {}
    normalized.__dict__["plain_bias"] = bias  # kept for `become_plain_`, but no parameter of the normalized model
    normalized.register_parameter("bias", None)
    size = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    like: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    trainable = layer.weight.requires_grad
    normalized.scale = nn.Parameter(torch.ones(size, **like), requires_grad=trainable)
    normalized.shift = nn.Parameter(torch.zeros(size, **like), requires_grad=trainable)
    return normalized


@torch.no_grad()
def become_plain_(layer: Normalized, bias: Tensor | None) -> None:
    """Turn a normalized layer back into a plain one with the weight it has and the given bias."""
    kept, plain_class = layer.__dict__["plain_bias"], layer.plain_class
    for name in ("scale", "shift", "plain_class", "plain_bias", "center", "uses", "statistics", "place"):
        delattr(layer, name)
    if bias is not None:
        parameter = kept if kept is not None else nn.Parameter(torch.empty_like(bias), layer.weight.requires_grad)
        parameter.data = bias.detach().clone()
        layer.register_parameter("bias", parameter)
    cast(Any, layer).__class__ = plain_class


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast switched off, where the device has it."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
