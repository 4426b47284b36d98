"""Layers that normalize themselves: X' = (X - mu) / sigma * scale + shift, with mu and sigma from parameters alone.

The normalization is folded into the weights, so that a layer stays one operation (mathematics.md, equation 10.1):
W' = W scale / sigma, b' = shift - mu scale / sigma.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..gaussian.normal import safe_sqrt
from ..graph.node import TensorInfo
from ..moments import Moments, full_precision, trusted
from .fold.layout import EPS
from .fold.reference import rate_of
from .layer_layout import Use
from .linear_layers import (
    OUTPUT_AXIS,
    LinearLayer,
    along_outputs,
    fan_in,
    is_linear_layer,
    output_axis,
    output_size,
    remove_parametrizations_,
    row_sizes,
    with_centred_rows,
)
from .network import Network
from .scope import called_module, folded_alone, folded_layer
from .statistics import Statistics, refuse_sharded

SETTINGS = ("center", "centred_rows", "uses", "statistics", "networks")  # attributes of all normalized layers

ANOTHER_FUNCTION = (
    "The checkpoint belongs to a model that was normalized with other input moments, in another form or for inputs of "
    "another size: call vp.normalize with those, then load. The default form once was the paper's also behind a global "
    'average, for which such a checkpoint needs form="paper".'
)


class Normalized(nn.Module):
    """A linear layer with analytic normalization; `weight` is the layer's own, scale-invariant now.

    Attributes:
        weight: The layer's weight; its scale does not matter.
        scale: Standard deviation of every output channel (s of the paper).
        shift: Mean of every output channel (b of the paper).
        centred_rows: True if the mean of the weights of every output channel does not matter either: it is subtracted
            first. False where an output channel has one weight only, whatever the form.
    """

    weight: Tensor
    scale: nn.Parameter
    shift: nn.Parameter
    plain_class: type[nn.Module]
    plain_bias: nn.Parameter | None
    center: bool
    centred_rows: bool = False
    networks: dict[bool, tuple[Network, int]]  # by mode: the network with the layer, and its index there
    uses: dict[bool, list[Use]]  # by mode, where it is in no network: how it is called
    statistics: dict[bool, Statistics]  # and the moments of its inputs

    @property
    def had_bias(self) -> bool:
        """True if the plain layer had a bias."""
        return self.plain_bias is not None

    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the plain layer that does the same, as they follow from the present parameters."""
        if self.training in self.networks:
            return folded_layer(*self.networks[self.training])
        return folded_alone(cast(nn.Module, self), self._folded_alone)

    def _folded_alone(self) -> tuple[Tensor, Tensor]:
        unit, _, mean, var = self._unit_statistics()
        rate = rate_of(_at_least_float32(self.scale), var)
        weight = unit * along_outputs(rate, unit, self)
        return weight.to(self.weight.dtype), (self.shift - rate * mean).to(self.weight.dtype)

    def output_statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every output channel before normalization and without bias."""
        if self.training in self.networks:
            network, index = self.networks[self.training]
            return network.output_statistics(index)
        _, size, mean, var = self._unit_statistics()
        return mean * size, safe_sqrt(var) * size

    def _unit_statistics(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rows divided by their sizes (and centred), the sizes, and mean and variance of outputs of those rows.

        They are those of the mixture of all calls.
        """
        with full_precision(self.weight.device), trusted():
            weight = _at_least_float32(self.weight)
            size = row_sizes(weight.detach(), self)
            unit = weight / along_outputs(size, weight, self)
            unit = with_centred_rows(unit, self) if self.centred_rows else unit
            self._require_calls()
            statistics, pooled = self.statistics[self.training], []
            outputs: dict[int, tuple[Tensor, Tensor]] = {}
            for use, number, x in zip(self.uses[self.training], statistics.numbers, statistics(), strict=True):
                if number not in outputs:  # equal numbers: the same use of inputs with the same moments
                    outputs[number] = self._per_channel(use.outputs(self._entering(x, unit), unit))
                pooled.append(outputs[number])
            means, variances = (torch.stack([t.flatten() for t in tensors]) for tensors in zip(*pooled, strict=True))
            mean = means.mean(0)
            return unit, size, mean, (variances + (means - mean).square()).mean(0)

    def _require_calls(self) -> None:
        """Refuse a call in a mode in which the model did not call the layer when it was normalized."""
        if not self.uses[self.training]:
            mode = "training" if self.training else "evaluation"
            raise RuntimeError(
                f"The model did not call this layer in {mode} mode when it was normalized, so that nothing is known of "
                "what enters it: call vp.normalize on a model that calls all of its layers."
            )
        self.statistics[self.training].require_intact(self, called_module())

    def _entering(self, x: Moments, weight: Tensor) -> Moments:
        """Moments of the input per channel; epsilon is added to the variance."""
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

    def _for_call(self, input: Any) -> tuple[Tensor, Tensor]:
        """The folded parameters for a call; whoever would write them down as constants is refused."""
        if isinstance(input, torch.fx.Proxy) or torch._C._get_tracing_state() is not None:
            raise RuntimeError(
                "torch.fx.symbolic_trace, torch.jit.trace and ONNX export with dynamo=False would record the folded "
                "weights of a normalized model as constants; trace vp.fold(model), or use torch.export."
            )
        return self.folded()

    def __prepare_scriptable__(self) -> None:
        """Called by torch.jit.script first, which is refused."""
        raise RuntimeError("torch.jit.script cannot compile a normalized model: script vp.fold(model).")

    def entering_moments(self, x: Moments) -> tuple[Tensor, Tensor]:
        """Mean and variance of every channel of what enters, as vectors."""
        with full_precision(self.weight.device), trusted():
            axis = self._channel_axis(x.ndim)
            mean, var = self._per_channel(x)
            size = [x.full[a] if a == axis else 1 for a in range(x.ndim)]
            return mean.expand(size).flatten(), var.expand(size).flatten()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; a bias is refused, which would be a parameter that does nothing."""
        if name.startswith("bias") and param is not None:
            raise ValueError(f"A normalized layer has no {name}: set its shift, or put the bias into vp.fold(model).")
        super().register_parameter(name, param)

    def register_forward_hook(self, hook: Any, **settings: Any) -> Any:
        """Register a hook; those of Opacus are refused: gradients layer by layer miss paths through other layers."""
        if type(getattr(hook, "__self__", None)).__module__.split(".")[0] == "opacus":
            raise RuntimeError(
                "Opacus takes the gradients of single samples layer by layer, which is wrong for a normalized layer: "
                "its scale and shift count in the layers behind it too. Use varprop.opacus.PrivacyEngine instead."
            )
        return super().register_forward_hook(hook, **settings)

    @property
    def qconfig(self) -> Any:
        """How torch.ao.quantization is to treat the layer, which it does not know and would leave out."""
        raise AttributeError("A normalized layer has no qconfig.")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        raise RuntimeError(
            "torch.ao.quantization does not know normalized layers and would leave them as they are: quantize "
            "vp.fold(model)."
        )

    def _replicate_for_data_parallel(self) -> Normalized:
        raise RuntimeError(
            "nn.DataParallel copies the layers of a normalized model without their network: "
            "use nn.parallel.DistributedDataParallel, or vp.fold(model) for evaluation."
        )

    def output_moments(self, info: TensorInfo, vectors: tuple[Tensor, Tensor] | None = None) -> Moments:
        """Moments of the output: mean `shift` and variance `scale`^2 in every channel, or `vectors` in their place."""
        shape = [1] * len(info.shape)
        shape[self._channel_axis(len(shape))] = -1
        shift, scale = vectors or (self.shift, self.scale)
        refuse_sharded([shift, scale])
        mean, var = (_at_least_float32(t).view(shape) for t in (shift, scale.square()))
        return Moments(mean, var, info.shape)

    def _channel_axis(self, ndim: int) -> int:
        return ndim - self.weight.ndim + 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copies and pickles of layers of subclasses, whose normalized class is made when it is needed."""
        if type(self) in CLASSES.values() or not is_linear_layer(self):
            return super().__reduce_ex__(protocol)
        arguments = self.plain_class, hasattr(self, OUTPUT_AXIS)
        if type(self) is not _normalized_class(*arguments):  # torch has put a class of its own around it
            return super().__reduce_ex__(protocol)
        return _restored, arguments, cast(Any, self).__getstate__()

    def extra_repr(self) -> str:
        """The plain layer's own description, and that it is normalized."""
        return f"{super().extra_repr()}, normalized"

    # --- checkpoints: one of another function is refused before anything of it is loaded ---

    def get_extra_state(self) -> Tensor:
        """The numbers besides parameters that define the function of the layer's network, or of the layer by itself."""
        if False in self.networks:
            network, index = self.networks[False]
            return network.facts(index)
        statistics = self.statistics[False]
        return statistics.alone_facts(self.centred_rows, statistics.targets)

    def call_count(self) -> int:
        """How often the model called the layer in evaluation when it was normalized."""
        if False in self.networks:
            network, index = self.networks[False]
            return network.specs[index].times
        return len(self.uses[False])

    def set_extra_state(self, state: Tensor) -> None:
        """Raise a ValueError if a checkpoint was made for another model: its parameters would mean another function."""
        if not isinstance(state, Tensor):
            raise ValueError("The checkpoint was not saved from a normalized model: its extra state is no tensor.")
        facts = self.get_extra_state().to(state.device)
        if facts.shape != state.shape or not torch.allclose(facts, state.to(facts.dtype), rtol=1e-4, atol=1e-6):
            raise ValueError(ANOTHER_FUNCTION)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not len(destination[f"{prefix}_extra_state"]):
            del destination[f"{prefix}_extra_state"]

    def check_state(self, state_dict: Any, prefix: str) -> None:
        """Raise a ValueError if what is to be loaded was made for another model."""
        facts, scales = f"{prefix}_extra_state", [name for name in self._parameters if name.startswith("scale")]
        if facts in state_dict:
            self.set_extra_state(state_dict[facts])
        from_normalized = any(f"{prefix}{name}" in state_dict for name in scales)
        alone = False not in self.networks or self.call_count() > 1  # so that the extra state begins with its form
        if alone and from_normalized and facts not in state_dict and bool(self.get_extra_state()[:1].any()):
            raise ValueError(ANOTHER_FUNCTION)  # saved by a layer in the paper's form, else the state would say so

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *lists: Any
    ) -> None:
        self.check_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *lists)
        if not len(self.get_extra_state()) and f"{prefix}_extra_state" in missing:
            missing.remove(f"{prefix}_extra_state")


class NormalizedLinear(Normalized, nn.Linear):
    """`nn.Linear` with analytic normalization."""

    def forward(self, input: Tensor) -> Tensor:
        """The plain layer with folded weights."""
        return F.linear(input, *self._for_call(input))


class _NormalizedConv(Normalized):
    def forward(self, input: Tensor) -> Tensor:
        """The plain layer with folded weights."""
        output: Tensor = cast(Any, self)._conv_forward(input, *self._for_call(input))
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
        return function(input, *self._for_call(input), layer.stride, layer.padding, extra, layer.groups, layer.dilation)


class NormalizedConvTranspose1d(_NormalizedConvTranspose, nn.ConvTranspose1d):
    """`nn.ConvTranspose1d` with analytic normalization."""


class NormalizedConvTranspose2d(_NormalizedConvTranspose, nn.ConvTranspose2d):
    """`nn.ConvTranspose2d` with analytic normalization."""


class NormalizedConvTranspose3d(_NormalizedConvTranspose, nn.ConvTranspose3d):
    """`nn.ConvTranspose3d` with analytic normalization."""


class _StatesOfModules(nn.Module):
    """How `nn.Module` is copied, saved, loaded and shown, in place of a class that does not know scale and shift."""

    __getstate__ = object.__getstate__
    __setstate__ = nn.Module.__setstate__
    __repr__ = nn.Module.__repr__
    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A layer of this class with a deep copy of every attribute."""
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        """The sizes, as `nn.Linear` has them."""
        weight, axis = cast(Tensor, self.weight), output_axis(self)
        return f"in_features={weight.shape[1 - axis]}, out_features={weight.shape[axis]}"


class NormalizedCustomLinear(Normalized, _StatesOfModules):
    """A linear layer of a class that is none of torch's, with analytic normalization."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The plain layer with folded weights; its forward takes one argument, whatever its name."""
        (input,) = (*args, *kwargs.values())
        weight, bias = self._for_call(input)
        return F.linear(input, weight.mT if output_axis(self) else weight, bias)


CLASSES: dict[type[nn.Module], type[Normalized]] = {
    nn.Linear: NormalizedLinear,
    nn.Conv1d: NormalizedConv1d,
    nn.Conv2d: NormalizedConv2d,
    nn.Conv3d: NormalizedConv3d,
    nn.ConvTranspose1d: NormalizedConvTranspose1d,
    nn.ConvTranspose2d: NormalizedConvTranspose2d,
    nn.ConvTranspose3d: NormalizedConvTranspose3d,
}


def normalized_layers(model: nn.Module) -> dict[str, Normalized]:
    """The normalized layers of a model by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Normalized)}


def computes_as_torch(layer: nn.Module) -> bool:
    """True for a layer of `CLASSES`, or of a subclass whose attributes leave the computation as it is."""
    plain = next((stock for stock in CLASSES if isinstance(layer, stock)), None)
    names = ("forward", "__call__", "_conv_forward", "_output_padding")
    inherited = all(getattr(type(layer), name, None) is getattr(plain, name, None) for name in names)
    return plain is not None and inherited and layer.__dict__.keys().isdisjoint(names)


@functools.cache
def _normalized_class(plain: Any, custom: bool) -> Any:
    """The normalized class of a plain class, with what that adds to torch's; `custom` ones are no subclass of those."""
    if plain in CLASSES:
        return CLASSES[plain]
    torch_classes = (normalized for stock, normalized in CLASSES.items() if issubclass(plain, stock))
    normalized = NormalizedCustomLinear if custom else next(torch_classes)
    return type(f"Normalized{plain.__name__}", (normalized, plain), {"__module__": plain.__module__})


def _restored(plain: Any, custom: bool = False) -> Any:
    normalized = _normalized_class(plain, custom)
    return normalized.__new__(normalized)


def become_normalized_(layer: LinearLayer, center: bool = True, centred_rows: bool = False) -> Normalized:
    """Turn a plain layer into a normalized one where it stands, so that all references and hooks stay good."""
    plain_class: Any = type(layer)
    bias = layer.bias
    cast(Any, layer).__class__ = _normalized_class(plain_class, hasattr(layer, OUTPUT_AXIS))
    normalized = cast(Normalized, layer)
    normalized.plain_class, normalized.center, normalized.networks = plain_class, center, {}
    normalized.centred_rows = centred_rows and fan_in(layer.weight, layer) > 1
    normalized.__dict__["plain_bias"] = bias  # kept for `become_plain_`, but no parameter of the normalized model
    normalized.register_parameter("bias", None)
    trains = layer.weight.requires_grad
    shift_trains = trains or (bias is not None and bias.requires_grad)  # it stands in the bias's place
    for name, value, needs in (("scale", 1.0, trains), ("shift", 0.0, shift_trains)):
        first = torch.full((output_size(layer),), value, device=layer.weight.device, dtype=layer.weight.dtype)
        normalized.register_parameter(name, nn.Parameter(first, requires_grad=needs))
    return normalized


def remove_parametrizations_of_(layer: Normalized) -> None:
    """Take parametrizations away, whether the layer had them before it was normalized or got them after."""
    plain: Any = layer.plain_class
    if isinstance(getattr(plain, "weight", None), property):
        plain = layer.plain_class = plain.__bases__[0]
    remove_parametrizations_(layer)
    if is_linear_layer(layer):
        cast(Any, layer).__class__ = _normalized_class(plain, hasattr(layer, OUTPUT_AXIS))


@torch.no_grad()
def become_plain_(layer: Normalized, bias: Tensor | None) -> None:
    """Turn a normalized layer back into a plain one with the weight it has and a bias."""
    plain_bias, plain_class = layer.__dict__["plain_bias"], layer.plain_class
    for name in ("scale", "shift", "plain_class", "plain_bias", *SETTINGS):
        delattr(layer, name)
    cast(Any, layer).__class__ = plain_class
    layer.__dict__.pop(OUTPUT_AXIS, None)
    if bias is not None:
        parameter = plain_bias
        if parameter is None:
            parameter = nn.Parameter(torch.empty_like(bias), layer.weight.requires_grad)
        parameter.data = bias.detach().clone()
        layer.register_parameter("bias", parameter)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


# --- loading of checkpoints into a model ---


def check_facts(model: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    """Let every layer compare what the checkpoint was made for: torch asks them one by one, while it loads."""
    for path, layer in model.named_modules():
        if isinstance(layer, Normalized):
            layer.check_state(state_dict, f"{prefix}{path}." if path else prefix)


def stop_checking_(model: nn.Module) -> None:
    """Remove `check_facts` from the hooks of a model and its modules."""
    for module in model.modules():
        hooks = module._load_state_dict_pre_hooks
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) is check_facts:
                del hooks[key]


# --- encoder layers of torch ---

# In evaluation mode one fused operation reads the weights of their linear layers by hand: it would take those of
# normalized layers as they are. So such a module does one operation after the other while it is normalized; `fold` lets
# it fuse them again. By class: the attribute that decides, and the value that forbids it.
SWITCHES = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
_BEFORE = "_switch_before_normalize"


def forbid_fusing_(model: nn.Module) -> None:
    """Let encoder layers that hold normalized ones call these."""
    for module in model.modules():
        for owner, (switch, off) in SWITCHES.items():
            if isinstance(module, owner) and hasattr(module, switch) and normalized_layers(module):
                setattr(module, _BEFORE, getattr(module, switch))
                setattr(module, switch, off)


def allow_fusing_(model: nn.Module) -> None:
    """Let all encoder layers be as they were."""
    for module in model.modules():
        for owner, (switch, _) in SWITCHES.items():
            if isinstance(module, owner) and hasattr(module, _BEFORE):
                setattr(module, switch, getattr(module, _BEFORE))
                delattr(module, _BEFORE)
