"""The analytic normalization into a model."""

from __future__ import annotations

import copy
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from ..engine.api import capture, example_for, fitted_inputs
from ..graph.capture import Program
from ..graph.node import Node
from ..moments import Moments
from ..training.restore import preserved_modes
from .absorb import Absorbed, absorb_, noted
from .depth import warn_of_depth
from .following import batch_norms_after
from .layers import Normalized, Use, become_normalized_, normalized_class
from .recurrent import CALLS, NormalizedRecurrent, check_gates, recurrent_class
from .sites import Only, Site, find_layers, is_site, replace
from .statistics import Statistics
from .united import Captured, fold_together_

Init = Literal["project", "preserve"]
SWEEPS = 300


def normalize(
    model: nn.Module,
    input: Any,
    *,
    example: Any = None,
    init: Init = "project",
    only: Only | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Put the paper's normalization after every linear layer: X' = (X - mu) / sigma * scale + shift.

    mu and sigma follow from the parameters by analytic propagation, so they are the same in training and evaluation,
    do not depend on the batch, need no buffers, and are differentiated through. Every layer keeps its weight and gains
    `scale` and `shift`; its bias, and a batch norm directly after it, are absorbed. `fold` takes all of it out again.

    Args:
        model: Any model `torch.export` can trace.
        input: Moments of the data, as for `propagate`.
        example: An input that gives the real shape where `input` has uniform axes.
        init: ``"project"`` sets scale 1 and shift 0; ``"preserve"`` sets them so that the function (in evaluation
            mode) stays the same.
        only: The layers to normalize: a path or several, or a predicate called as ``only(path, module)``.
        inplace: Change the model itself instead of a copy; if that fails it is as before.

    Returns:
        The normalized model.

    Raises:
        ValueError: If the model is normalized already, has no layer to normalize, or a layer cannot be normalized (a
            weight row of zeros, a weight that is not finite); the message names it.
    """
    if init not in get_args(Init):
        raise ValueError(f'init must be "project" or "preserve", not {init!r}.')
    result = normalized_(copy.deepcopy(model), input, example, init, only)
    if init == "project":
        warn_of_depth(result)
    # the trial on a copy has shown that nothing fails midway
    return normalized_(model, input, example, init, only) if inplace else result


def normalized_(
    model: nn.Module, given: Any, example: Any, init: Init, only: Only | None, center: bool = True
) -> nn.Module:
    """`normalize` in place and without a net: a failure midway leaves the model half done."""
    _check_model(model, given)
    example = example_for(model, given, example)
    chosen: dict[str, Any] = find_layers(model, only, _can_be_normalized)
    model = _absorb_batch_norms(model, example, chosen)
    programs = _programs(model, example)
    reached = [path for path in _calls(programs[False], chosen).values()]
    sites = {path: chosen[path] for path in dict.fromkeys(reached)}
    if not sites:
        raise ValueError("The model has no linear layer to normalize.")
    _check_weights(sites)
    by_program = {id(program): _captured(program, sites, given) for program in programs.values()}
    graphs = {mode: by_program[id(program)] for mode, program in programs.items()}
    plans = {mode: _statistics(model, graph, sites) for mode, graph in graphs.items()}
    with preserved_modes(model):
        model.eval()
        biases = {path: layer.bias for path, layer in sites.items()}
        for path, layer in sites.items():
            recurrent = recurrent_class(layer)
            site = recurrent.from_plain_(layer, center) if recurrent else become_normalized_(layer, center)
            site.uses = {mode: uses for mode, (uses, _) in ((m, plans[m][path]) for m in plans)}
            site.statistics = {mode: found for mode, (_, found) in ((m, plans[m][path]) for m in plans)}
        fold_together_(model, graphs, cast(Any, sites))
        if init == "preserve":
            _preserve({path: (cast(Normalized, layer), biases[path]) for path, layer in sites.items()})
    return model


def _can_be_normalized(module: nn.Module) -> bool:
    return (is_site(module) and normalized_class(module) is not None) or recurrent_class(module) is not None


def _preserve(sites: dict[str, tuple[Normalized, Tensor | None]]) -> None:
    """Set every scale and shift to what the layer does now.

    One sweep does it, and a second one finds nothing left to do, unless a layer feeds itself through a later call: its
    statistics depend on its own scale and shift, and the sweeps approach the point where both agree.
    """
    for _ in range(SWEEPS):
        moved = [path for path, (site, bias) in sites.items() if _set_to_present(path, site, bias)]
        if not moved:
            return
    raise ValueError(
        f"Layer '{moved[0]}' is called on its own output, and no scale and shift agree with the statistics that follow "
        f'from them: use init="project", or leave it out with `only`.'
    )


@torch.no_grad()
def _set_to_present(path: str, site: Normalized, bias: Tensor | None) -> bool:
    """Set scale and shift of a layer so that it does what it did; whether that changed them beyond rounding."""
    if isinstance(site, NormalizedRecurrent):
        return site.set_to_present(path)
    mean, var = site.output_statistics()
    scale, shift = (t.to(site.scale.dtype) for t in (var.sqrt(), mean if bias is None else mean + bias))
    change = torch.maximum((scale - site.scale).abs().max(), (shift - site.shift).abs().max())
    size = torch.maximum(scale.max(), shift.abs().max())
    site.scale.copy_(scale)
    site.shift.copy_(shift)
    return not bool(size.isfinite() & (change <= 4 * torch.finfo(scale.dtype).eps * size))


def _absorb_batch_norms(model: nn.Module, example: Any, sites: dict[str, Site]) -> nn.Module:
    """Let the layers do the work of the batch norms directly after them."""
    for path, norm_path in batch_norms_after(model, example).items():
        if path in sites:
            layer, norm = sites[path], model.get_submodule(norm_path)
            note = Absorbed(layer=layer, bias=layer.bias is not None, norm=norm)  # type: ignore[typeddict-item]
            absorb_(model, path, layer, norm, keep_bias=True)  # type: ignore[arg-type]
            model = replace(model, norm, noted(note))
    return model


def _programs(model: nn.Module, example: Any) -> dict[bool, Program]:
    """The model as it runs in training (key True) and in evaluation: dropout is in one and not in the other."""
    with preserved_modes(model):
        evaluation = capture(model.eval(), example)
        if all(_ignores_mode(module) for module in model.modules()):
            return {False: evaluation, True: evaluation}
        model.train()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        training = capture(model, example)
    same = _steps(training) == _steps(evaluation)
    return {False: evaluation, True: evaluation if same else training}


def _ignores_mode(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that do the same in both modes, so that one capture serves."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    package, _, family = type(module).__module__.rpartition(".")
    return package == "torch.nn.modules" and family in _WITHOUT_MODE and not isinstance(module, _WITH_MODE)


_WITHOUT_MODE = {
    "activation",
    "container",
    "conv",
    "flatten",
    "linear",
    "normalization",
    "padding",
    "pooling",
    "upsampling",
}
_WITH_MODE = (nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def _steps(program: Program) -> list[str]:
    return [str((node.target, node.args, node.kwargs)) for node in program.nodes]


def _calls(program: Program, sites: dict[str, Site]) -> dict[Node, str]:
    """Every call of a layer, with the layer's path; a layer under several paths is known by its first."""
    path_of = {layer: path for path, layer in sites.items()}
    found: dict[Node, str] = {}
    for node in program.nodes:
        if node.stack and (_is_linear(node) or str(node.target) in CALLS):
            layer = _submodule(program.model, node.module)
            if layer in path_of:
                found[node] = path_of[layer]
    return found


def _is_linear(node: Node) -> bool:
    name = str(getattr(node.target, "overloadpacket", ""))
    return name == "aten.linear" or name.startswith("aten.conv")


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _captured(program: Program, sites: dict[str, Site], given: Any) -> Captured:
    inputs = dict(zip(program.inputs, fitted_inputs(program, given), strict=True))
    return Captured(program, _calls(program, sites), inputs)


def _statistics(model: nn.Module, graph: Captured, sites: dict[str, Site]) -> dict[str, tuple[list[Use], Statistics]]:
    found = {}
    for path in sites:
        own = [node for node, owner in graph.calls.items() if owner == path]
        targets = [node.args[0] for node in own]
        statistics = Statistics(model, graph.program, graph.calls, targets, graph.inputs)
        found[path] = [Use.of(node) for node in own], statistics
    return found


def _check_model(model: nn.Module, given: Any) -> None:
    done = next((path for path, m in model.named_modules() if isinstance(m, Normalized)), None)
    if done is not None:
        raise ValueError(f"The model is normalized already (layer '{done}'); fold it first.")
    values = given if isinstance(given, (tuple, list)) else given.values() if isinstance(given, dict) else [given]
    moments = [value for value in values if isinstance(value, Moments)]
    if moments and len(moments) == len(list(values)) and all(not bool(value.var.any()) for value in moments):
        raise ValueError("The input's variance is zero everywhere: there is nothing to normalize by.")


def _check_weights(sites: dict[str, Any]) -> None:
    from .sites import weight_norms

    for path, layer in sites.items():
        if isinstance(layer, nn.RNNBase):
            check_gates(path, layer)
            continue
        if not bool(layer.weight.isfinite().all()):
            raise ValueError(f"The weight of '{path}' has a value that is not finite.")
        empty = (weight_norms(layer.weight.detach(), layer) == 0).nonzero().flatten()
        if len(empty):
            raise ValueError(f"Output {int(empty[0])} of '{path}' has only zero weights: it cannot be normalized.")
