"""Batch norms that a linear layer does the work of: which they are, their arithmetic, and the note they leave."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any, TypedDict, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.utils import parametrize

from ..engine.plan import operation_of
from ..graph.capture import capture
from ..graph.node import Node
from ..graph.program import Program
from ..graph.tracing import preserved_modes
from ..rules.registry import module_classes
from .linear_layers import (
    LinearLayer,
    along_outputs,
    computes_with_its_own,
    holds,
    is_call_of_linear_layer,
    is_linear_layer,
    owners,
    replace,
)

_TENSORS = ("weight", "bias", "running_mean", "running_var")  # of a batch norm, in the order of the operation


def has_seen_nothing(module: nn.Module) -> bool:
    """True for a batch norm with the statistics of a new one: mean 0 and variance 1."""
    if not is_batch_norm(module) or module.running_mean is None or module.running_var is None:
        return False
    return bool((module.running_mean == 0).all() & (module.running_var == 1).all())


def batch_norms_after(model: nn.Module, example: Any) -> dict[str, str]:
    """The batch norm directly after each linear layer, by path: nothing else reads the layer's output.

    A layer called several times counts if every call goes to the same batch norm, and that reads from nothing else. The
    model is captured in evaluation mode and not changed.
    """
    if not any(is_batch_norm(module) for module in model.modules()):
        return {}
    with preserved_modes(model):
        return batch_norms_in(capture(model.eval(), example, module_classes()))


def batch_norms_in(program: Program, custom: Collection[nn.Module] = ()) -> dict[str, str]:
    """`batch_norms_after` for a model captured in evaluation mode; `custom` modules count as linear layers too."""
    paths = {module: path for path, module in program.model.named_modules()}
    calls = list(_calls(program, custom))
    pairs = {layer: norm for layer, norm in calls if layer is not None and norm is not None}
    only = [
        (layer, norm)
        for layer, norm in pairs.items()
        if all(call == (layer, norm) for call in calls if call[0] is layer or call[1] is norm)
    ]
    return {paths[layer]: paths[norm] for layer, norm in only}


def absorbed_by(layers: Mapping[str, nn.Module], program: Program, custom: Collection[nn.Module]) -> dict[str, str]:
    """`batch_norms_in` for some layers that can do their work: a parametrized weight takes no factor."""
    pairs = batch_norms_in(program, custom).items()
    return {p: norm for p, norm in pairs if p in layers and not parametrize.is_parametrized(layers[p], "weight")}


def bypassed(program: Program, norms: Container[nn.Module]) -> dict[Node, Node]:
    """The calls of some batch norms and what is taken out of their results, each with what the batch norm reads."""
    calls = [node for node in program.nodes if operation_of(node) == "batch norm" and program.module_of(node) in norms]
    return {node: call.args[0] for call in calls for node in (call, *call.users)}


def _calls(program: Program, custom: Collection[nn.Module]) -> Iterator[tuple[nn.Module | None, nn.Module | None]]:
    """Every call of a linear layer with the batch norm directly after it, and the other calls of batch norms."""
    paired = set()
    for node in program.nodes:
        if is_call_of_linear_layer(node):
            reader = _direct_reader(program, node, custom)
            paired.add(reader)
            yield program.module_of(node), None if reader is None else program.module_of(reader)
        elif operation_of(node) == "batch norm" and node not in paired:
            yield None, program.module_of(node)


def _direct_reader(program: Program, call: Node, custom: Collection[nn.Module]) -> Node | None:
    """The batch norm that reads a layer's call, if it alone does and could be done by the layer."""
    if len(call.users) != 1 or call in program.outputs:
        return None
    (reader,) = call.users
    layer, norm = program.module_of(call), program.module_of(reader)
    if operation_of(reader) != "batch norm" or not isinstance(norm, _BatchNorm):
        return None
    if not _is_its_own(program, reader, norm) or layer is None or not (is_linear_layer(layer) or layer in custom):
        return None
    if not computes_with_its_own(program, call, layer):
        return None  # it would not take a factor as another weight, nor a bias
    if call.ndim != layer.weight.ndim:  # batch norm takes axis 1 for the channels, and a layer's may be elsewhere
        return None
    return reader if _read_by_layers_alone(program, call.args[1], custom) else None


def _is_its_own(program: Program, call: Node, norm: _BatchNorm) -> bool:
    """True if a batch norm operation reads the tensors of a module, which may do more, and nothing else reads them."""
    tensors = [getattr(norm, name, None) for name in _TENSORS]  # code that sets one may have deleted it before
    if (tensors[0] is None) != (tensors[1] is None) or call.args[6] != norm.eps:
        return False
    for operand, tensor in zip(call.args[1:5], tensors, strict=True):
        if operand is None and tensor is None:
            continue
        if not holds(program, operand, tensor) or any(operation_of(reader) != "batch norm" for reader in operand.users):
            return False
    return True


def _read_by_layers_alone(program: Program, weight: Node, custom: Collection[nn.Module]) -> bool:
    """False where the model also reads a layer's weight by hand, which a change of the layer would alter."""
    modules = [program.module_of(reader) for reader in weight.users]
    return all(module is not None and (is_linear_layer(module) or module in custom) for module in modules)


class Absorbed(TypedDict):
    """A note where a batch norm was taken out, by which it can be put back."""

    layer: LinearLayer  # itself, wherever it and the batch norm's module may be put together
    bias: bool  # True if the layer had one
    norm: _BatchNorm  # no submodule here: not in the state_dict, and not called


# A plain attribute of a plain nn.Identity: it survives copying and pickling, and the model needs nothing of varprop.
_NOTE = "absorbed_batch_norm"


class AbsorbedTensor:
    """In the place of a batch norm's weight, bias or statistics: torch's batch norm then returns its input.

    So the forward of a class of its own (one that activates too, such as timm's BatchNormAct2d) runs as it is written,
    but for the batch norm in it. It may ask for dtype and device, which are those of the layer that does the work.
    """

    def __init__(self, layer: LinearLayer, features: int) -> None:
        self.layer, self.shape = layer, torch.Size([features])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the tensor would have."""
        return self.layer.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device that the tensor would be on."""
        return self.layer.weight.device

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each of its functions that is given one."""
        if function is F.batch_norm or function is torch.batch_norm:
            return args[0] if args else kwargs["input"]
        raise RuntimeError(
            "The normalized layer before this batch norm does its work; its tensors hold no values to compute with: "
            "use vp.fold(model)."
        )


def computes_as_torch_batch_norm(module: nn.Module) -> bool:
    """True for a batch norm that does nothing else, by the forward of torch's own classes."""
    kind: Any = type(module)
    inherited = kind.forward in (_BatchNorm.forward, SyncBatchNorm.forward) and kind.__call__ is nn.Module.__call__
    return isinstance(module, _BatchNorm) and inherited and "forward" not in module.__dict__


def is_batch_norm(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """True for a batch norm of any class that has not been absorbed."""
    return isinstance(module, _BatchNorm) and _NOTE not in module.__dict__


def take_out_(model: nn.Module, note: Absorbed) -> nn.Module:
    """Take a batch norm out of a model, note there how to put it back, and return the model.

    One of torch's leaves an identity behind. A module that has a forward of its own stays, and runs it without the
    batch norm. The model returned is another only where it was itself the batch norm.
    """
    norm = note["norm"]
    if computes_as_torch_batch_norm(norm):
        identity = nn.Identity()
        setattr(identity, _NOTE, note)
        return replace(model, norm, identity)
    removed = nn.BatchNorm1d(norm.num_features, norm.eps, norm.momentum, norm.affine)
    for name in (*_TENSORS, "num_batches_tracked"):
        store: Any = norm._parameters if name in norm._parameters else norm._buffers
        to: Any = removed._parameters if name in removed._parameters else removed._buffers
        to[name], store[name] = store.get(name), None
        absorbed = None if name == "num_batches_tracked" else AbsorbedTensor(note["layer"], norm.num_features)
        norm.__dict__[name] = absorbed
    norm.__dict__[_NOTE] = Absorbed(layer=note["layer"], bias=note["bias"], norm=removed)
    return model


def put_back_(model: nn.Module, module: nn.Module, norm: _BatchNorm) -> nn.Module:
    """Put a batch norm back into a model, where `take_out_` has noted it at a module, and return the model."""
    if not isinstance(module, _BatchNorm):
        return replace(model, module, norm)
    for name in (*_TENSORS, "num_batches_tracked"):
        store: Any = module._parameters if name in module._parameters else module._buffers
        del module.__dict__[name]
        store[name] = norm._parameters[name] if name in norm._parameters else norm._buffers[name]
    del module.__dict__[_NOTE]
    return model


def note_of(module: nn.Module) -> Absorbed:
    """The note at a module that `find_notes` found."""
    note: Absorbed = getattr(module, _NOTE)
    return note


def absorbing_layers(model: nn.Module) -> Iterator[tuple[nn.Module, LinearLayer]]:
    """The modules at which batch norms were taken out, each with the layer that does the work."""
    for module in model.modules():
        if note := module.__dict__.get(_NOTE):
            yield module, note["layer"]


def find_notes(model: nn.Module, layers: Mapping[str, LinearLayer]) -> dict[str, nn.Module]:
    """The modules at which batch norms of the model's own were taken out, by the path of the layer before."""
    paths = {layer: path for path, layer in layers.items()}
    return {paths[layer]: module for module, layer in absorbing_layers(model) if layer in paths}


def batch_norm_rate(norm: _BatchNorm) -> Tensor:
    """gamma / sqrt(var + eps): what every channel is multiplied by in evaluation mode."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("A batch norm without running statistics normalizes by each batch, which no plain layer does.")
    deviation = torch.sqrt(norm.running_var + norm.eps)
    return norm.weight / deviation if norm.affine else 1 / deviation


def folded(layer: LinearLayer, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias of the plain layer that does what layer and batch norm do in evaluation mode.

    W' = W r and b' = (b - mean) r + beta, with r = gamma / sqrt(var + eps).
    """
    rate = batch_norm_rate(norm)
    assert norm.running_mean is not None
    bias = -norm.running_mean if layer.bias is None else layer.bias - norm.running_mean
    shifted = bias * rate + norm.bias if norm.affine else bias * rate
    return layer.weight * along_outputs(rate, layer.weight, layer), shifted


@torch.no_grad()
def absorb_(
    model: nn.Module, path: str, layer: LinearLayer, norm: _BatchNorm, keep_bias: bool = True, keep_silent: bool = False
) -> Tensor:
    """Give the layer the weight and bias that do what it and the batch norm do in evaluation mode.

    Returns a mask of the channels with gamma 0. With `keep_silent` they keep their weights, for a layer that will be
    normalized and has to multiply them by 0.
    """
    weight, bias = folded(layer, norm)
    silent = batch_norm_rate(norm) == 0
    if keep_silent:
        weight = torch.where(along_outputs(silent, weight, layer), layer.weight, weight)
    if assign_weight_(model, layer, weight):
        warnings.warn(f"The weight of '{path}' is no longer tied: its batch norm scales it alone.", stacklevel=2)
    if layer.bias is not None:
        layer.bias.copy_(bias)
    elif keep_bias or bias.any():
        trainable = norm.bias.requires_grad if norm.affine else layer.weight.requires_grad
        layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=trainable)
    return silent


def assign_weight_(model: nn.Module, layer: LinearLayer, weight: Tensor) -> bool:
    """Give a layer a weight, unless it is the present one but for rounding; True if that unties it from others'."""
    if torch.allclose(weight, layer.weight, rtol=8 * torch.finfo(weight.dtype).eps, atol=0.0):
        return False
    if len(owners(model)[layer.weight]) == 1:
        layer.weight.copy_(weight)
        return False
    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    return True


@torch.no_grad()
def return_batch_norm(
    module: nn.Module, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, _BatchNorm]:
    """The weight of a folded layer with outputs of variance 1, and the batch norm that was taken out at a module.

    With scale and shift in the batch norm both do the same in training mode too, but for what batches differ by from
    the statistics. Channels of scale 0 keep the weights they had. A batch norm without parameters only adds the bias.
    """
    layer, norm = note_of(module)["layer"], note_of(module)["norm"].to(device=bias.device, dtype=bias.dtype)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_var.fill_(1 - norm.eps)
    if not norm.affine:
        norm.running_mean.copy_(-bias)
        return weight, norm
    silent = scale == 0
    rate = scale.masked_fill(silent, 1)
    norm.running_mean.copy_(((shift - bias) / rate).masked_fill(silent, 0))
    norm.weight.copy_(scale)
    norm.bias.copy_(shift)
    unit = weight / along_outputs(rate, weight, layer)
    return torch.where(along_outputs(silent, weight, layer), layer.weight, unit), norm
