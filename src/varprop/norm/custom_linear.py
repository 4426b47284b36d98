"""Linear layers of classes that are none of torch's, known by what the captured graph says that they compute."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.linear_maps import LinearCall, calls_of_modules, linear_call
from ..graph.node import Node
from ..graph.program import Program
from .layers import SETTINGS, computes_as_torch
from .linear_layers import OUTPUT_AXIS, holds

TAKEN = ("scale", "shift", "plain_class", "plain_bias", OUTPUT_AXIS, *SETTINGS)  # attributes of a normalized layer


def may_be_linear(module: nn.Module) -> bool:
    """True for a module that has a linear layer's parameters and takes one input, whatever it computes.

    A bias may be missing, but has to have its place: `fold` puts one there.
    """
    if isinstance(module, torch.jit.ScriptModule) or module._parameters.keys() != {"weight", "bias"}:
        return False
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    if weight is None or weight.ndim != 2 or (bias is not None and bias.ndim != 1) or computes_as_torch(module):
        return False
    if module._modules or module._buffers or any(hasattr(module, name) for name in TAKEN):
        return False
    own_call = "forward" in module.__dict__ or type(module).__call__ is not nn.Module.__call__
    return not own_call and len(inspect.signature(type(module).forward).parameters) == 2  # the second is the input


def custom_linear_layers(programs: dict[bool, Program], modules: Collection[nn.Module]) -> dict[nn.Module, int]:
    """The modules that compute x W' + b in all of their calls, or x W + b, each with the axis of W over outputs.

    Programs are by mode; a module counts if it is called in evaluation (False).
    """
    if not modules:
        return {}
    calls = {mode: calls_of_modules(program) for mode, program in programs.items()}
    axes: dict[nn.Module, int] = {}
    for module in modules:
        found = [_own_linear_call(programs[mode], module, c) for mode in calls for c in calls[mode].get(module, ())]
        maps = [call for call in found if call is not None]
        alike = len(maps) == len(found) and len({call.transposed for call in maps}) == 1
        if alike and module in calls[False] and (maps[0].bias is not None or _adds_a_bias(module, maps[0])):
            axes[module] = int(maps[0].transposed)
    return axes


def _own_linear_call(program: Program, module: nn.Module, nodes: Sequence[Node]) -> LinearCall | None:
    """The linear map of a call, if it multiplies by the module's weight and adds its bias, if it has one; else None."""
    call, weight, bias = linear_call(program, nodes), module._parameters["weight"], module._parameters["bias"]
    if call is None or not holds(program, call.weight, weight):
        return None
    return call if (call.bias is None and bias is None) or holds(program, call.bias, bias) else None


@torch.no_grad()
def _adds_a_bias(module: nn.Module, call: LinearCall) -> bool:
    """True if a module without a bias would add one that it is given, which is tried on a copy of it."""
    weight, random = module._parameters["weight"], torch.Generator().manual_seed(0)
    assert weight is not None
    x = torch.randn(call.x.info.shape, generator=random).to(weight)
    output: Tensor = _forward_of(module, {"bias": None})(x)
    bias = torch.randn(output.shape[-1], generator=random).to(weight) * (1 + output.abs().max())
    try:
        added = _forward_of(module, {"bias": nn.Parameter(bias)})(x) - output
    except Exception:  # whatever it does with a bias, it does not add it
        return False
    return bool(((added - bias).abs() <= torch.finfo(bias.dtype).eps ** 0.5 * bias.abs().max()).all())


def _forward_of(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> Any:
    """The forward of a shallow copy of a module that has some other parameters."""
    copied = copy.copy(module)
    copied.__dict__["_parameters"] = {**module._parameters, **parameters}
    return copied.forward
