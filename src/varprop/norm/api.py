"""The analytic normalization into a model, and out of it again."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..engine.inputs import example_for
from ..graph.capture import require_values
from ..graph.linear_maps import in_one_operation
from ..graph.program import Program, transferred
from ..graph.tracing import preserved_modes
from ..moments import autocast_off
from .batchnorm import (
    Absorbed,
    absorb_,
    absorbed_by,
    assign_weight_,
    bypassed,
    computes_as_torch_batch_norm,
    find_notes,
    has_seen_nothing,
    is_batch_norm,
    note_of,
    put_back_,
    return_batch_norm,
    take_out_,
)
from .checks import (
    check_copyable,
    check_dtypes,
    check_finite,
    check_model,
    check_weights,
    refuse_part,
    refuse_reading_by_hand,
    why_none,
)
from .custom_linear import custom_linear_layers, may_be_linear
from .initialization import (
    branch_factors,
    first_outputs,
    layers_in_a_row,
    orthogonalize_,
    preserve_,
    set_first_outputs_,
)
from .layer_layout import Use
from .layers import (
    Normalized,
    allow_fusing_,
    become_normalized_,
    become_plain_,
    check_facts,
    computes_as_torch,
    forbid_fusing_,
    normalized_layers,
    remove_parametrizations_of_,
    stop_checking_,
)
from .linear_layers import OUTPUT_AXIS, Only, find_layers, is_linear_layer
from .modes import calls_of, capture_modes, reading_computed, reading_constants, with_calls
from .network import make_network
from .recurrent import NormalizedRecurrent, recurrent_class
from .report import (
    SHALLOW,
    NormalizationForm,
    warn_of_computed,
    warn_of_constants,
    warn_of_fold,
    warn_of_frozen,
    warn_of_plain,
    warn_of_time,
    warn_of_unreached,
)
from .scope import ModuleT, close_scopes_, open_scopes_, shared_fold
from .shared_inputs import warn_of_shared_inputs
from .statistics import CapturedMode, Intact, Statistics

T = TypeVar("T")
Made = TypeVar("Made")
Init = Literal["project", "preserve"]
Shift = bool | Literal["depth", "first"]


def normalize(
    model: ModuleT,
    moments: Any,
    *,
    example: Any = None,
    init: Init = "project",
    form: NormalizationForm | None = None,
    only: Only | None = None,
    inplace: bool = False,
) -> ModuleT:
    """Put the analytic normalization after every linear layer: X' = (X - mu) / sigma * scale + shift.

    mu and sigma follow from the parameters by analytic propagation, so they are the same in training and evaluation,
    do not depend on the batch, need no buffers, and are differentiated through. Every layer keeps its weight and gains
    `scale` and `shift`; its bias, and a batch norm directly after it, are absorbed. `fold` takes all of it out again.
    One of another class than torch's (``Conv1D`` of transformers, ``Linear`` of PyTorch Geometric, your own) counts as
    linear if its forward multiplies one argument by its `weight`, (out, in) or (in, out), adds its `bias`, and does
    nothing else. A layer whose input is the same for all data (a time step given as a constant, say) stays as it is,
    with a warning.

    The statistics know the model as it is now, in training and in evaluation mode. They follow its parameters and
    buffers, but not a number that its own code keeps in an attribute, which is what it was; and a layer that trains
    behind a part in evaluation mode counts that part's dropout as at work.

    Args:
        model: Any model `torch.export` can trace.
        moments: Moments of the data, as for `propagate`.
        example: The real shape, ``(1, 3, 224, 224)`` or an input of it, where `moments` do not know it.
        init: ``"project"`` sets scale 1 (0 for a channel whose batch norm has gamma 0) and the shift of the form;
            ``"preserve"`` sets them so that the function (in evaluation mode) stays the same.
        form: ``"deep"`` first takes from the weights of every output channel their mean, which then does
            not matter and gets no gradient (an output with one weight only keeps it); shifts before rectifiers start
            where errors of scale die out (0.377 for ReLU), and a global average counts as one of its positions.
            So a layer does not see what its inputs have in common, the first layer included. ``"paper"`` normalizes
            the weights as they are, shifts start at 0, and positions count as independent: in a chain of rectified
            layers without skips errors of scale pile up, from about the 15th on, and a layer behind a global average
            is divided by too little. By default it is ``"deep"`` with more than 8 layers in a row and an activation
            that lets errors of scale grow (rectifiers, GELU), and else ``"paper"``, as with ``init="preserve"``, which
            must keep those means, but with a global average as one of its positions all the same.
        only: The layers to normalize: a path or several, or a predicate called as ``only(path, module)``.
        inplace: Change the model itself instead of a copy; if that fails it is as before. Its scales and shifts are
            new parameters, so that an optimizer is to be made afterwards.

    Returns:
        The normalized model; ``print(vp.fold_report(model))`` says what was done and how to train it.

    Raises:
        ValueError: If the model is normalized already, has no layer to normalize, or a layer cannot be normalized (a
            weight row of zeros, or of equal weights in the deep form, a weight that is not finite, one that a hook
            computes or the model reads by hand); the message names it.

    Example:
        >>> plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        >>> x = torch.rand(16, 3, 8, 8)
        >>> model = vp.normalize(plain, vp.input_moments(x))
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)  # made afterwards
        >>> [type(module).__name__ for module in model[:2]]
        ['NormalizedConv2d', 'Identity']
    """
    _check_form(init, form)
    check_copyable(model)
    captured = captured_for(model, moments, example, only)
    result = cast(ModuleT, normalized_(copy.deepcopy(model), captured, init, form, only))
    warn_of_constants(captured.constant)
    warn_of_computed(captured.computed)
    if only is None:
        unreached = warn_of_unreached(captured.programs.values())
        warn_of_plain(result, captured.constant | captured.computed | unreached)
    warn_of_fold(result)
    warn_of_frozen(model, result)
    warn_of_shared_inputs(result, captured.programs[False])
    warn_of_time(result, captured.programs[result.training])
    if inplace:  # the trial on a copy has shown that nothing fails midway
        return cast(ModuleT, normalized_(model, captured, init, form, only))
    return result


def _check_form(init: Init, form: NormalizationForm | None) -> None:
    """Raise a ValueError if there is no such start or form, or they exclude each other."""
    if init not in get_args(Init):
        raise ValueError(f'init must be "project" or "preserve", not {init!r}.')
    if form not in (None, *get_args(NormalizationForm)):
        raise ValueError(f'form must be "paper" or "deep", not {form!r}.')
    if form == "deep" and init == "preserve":
        raise ValueError('form="deep" takes the means of weights away, which init="preserve" would have to keep.')


class Captured(NamedTuple):
    """The programs of a model that is to be normalized, by mode, and the inputs it was captured with."""

    programs: dict[bool, Program]  # in training (True) and in evaluation
    moments: Any  # of the inputs
    example: Any
    # the paths of layers whose inputs are the same for all data: there is nothing to normalize by
    constant: frozenset[str]
    computed: frozenset[str]  # the paths of layers that are called with a weight or bias that is no parameter of theirs
    # the paths of the linear layers of other classes than torch's, with the axis of the weight over outputs
    custom: dict[str, int]
    by_batch: frozenset[str] = frozenset()  # the paths of batch norms that stay and count as normalizing by the batch


def captured_for(
    model: nn.Module,
    moments: Any,
    example: Any,
    only: Only | None = None,
    by_batch: Callable[[nn.Module], bool] = lambda module: False,
) -> Captured:
    """Capture a model that is to be normalized; the result serves for its copies as well.

    Batch norms that stay and for which `by_batch` is true count as normalizing by the batch.
    """
    check_model(model, moments)
    # complains of a wrong choice before anything takes time
    candidates = find_layers(model, only, lambda module: _can_be_normalized(module) or may_be_linear(module))
    example = example_for(model, moments, example)
    programs = capture_modes(model, example)
    axes = custom_linear_layers(programs, [m for m in candidates.values() if not _can_be_normalized(m)])
    programs = _with_linear_calls(programs, axes)
    layers = find_layers(model, only, lambda module: _can_be_normalized(module) or module in axes)
    computed = reading_computed(programs.values(), layers)
    chosen = {path: layer for path, layer in layers.items() if path not in computed}
    pairs = absorbed_by(chosen, programs[False], axes)
    for path, layer in chosen.items():
        norm = pairs.get(path)
        check_dtypes(path, layer, norm or "", None if norm is None else model.get_submodule(norm))
    absorbed = {model.get_submodule(norm) for norm in pairs.values()}
    staying = {path: m for path, m in model.named_modules() if by_batch(m) and m not in absorbed}
    if staying:
        programs = _with_linear_calls(capture_modes(model, example, staying.values()), axes)
    constant = reading_constants(programs.values(), layers, moments)
    custom = {path: axes[layer] for path, layer in layers.items() if layer in axes}
    return Captured(programs, moments, example, constant, computed, custom, frozenset(staying))


def _with_linear_calls(programs: dict[bool, Program], custom: Collection[nn.Module]) -> dict[bool, Program]:
    """The programs with every call of a linear layer of another class than torch's as one operation."""
    return _by_distinct(programs, lambda program: in_one_operation(program, custom)) if custom else programs


def normalized_(
    model: nn.Module,
    captured: Captured,
    init: Init,
    form: NormalizationForm | None = "paper",
    only: Only | None = None,
    center: bool = True,
    shift: Shift = False,
    orthogonal: bool = False,
) -> nn.Module:
    """`normalize` in place; a failure leaves the model half done. `center`, `shift`, `orthogonal` are as in `init_`."""
    custom = {model.get_submodule(path): axis for path, axis in captured.custom.items()}
    candidates: dict[str, Any] = find_layers(model, only, lambda m: _can_be_normalized(m) or m in custom)
    chosen = {path: layer for path, layer in candidates.items() if path not in captured.constant | captured.computed}
    for layer in chosen.values():
        if layer in custom:
            setattr(layer, OUTPUT_AXIS, custom[layer])
    model, programs, silent = _without_batch_norms(model, captured, chosen)
    layers = {path: chosen[path] for path in dict.fromkeys(calls_of(programs[False], chosen).values())}
    if not layers:
        reason = why_none(model, chosen, captured.computed, captured.constant)
        raise ValueError(f"The model has no linear layer to normalize{reason}.")
    graph = with_calls(programs[False], layers, captured.moments)
    long = form is None and init != "preserve" and layers_in_a_row(graph) > SHALLOW
    first = form == "deep" or long or shift in (True, "first")
    starts = first_outputs(graph, math.inf if first else SHALLOW) if first or shift else {}
    factors = branch_factors(graph) if shift == "depth" else {}
    deep = form == "deep" or (long and any(start[0] for start in starts.values()))
    check_weights(layers, deep)
    if orthogonal:
        orthogonalize_(layer for path, layer in layers.items() if path not in silent or not silent[path].all())
    refuse_reading_by_hand(programs[False], layers)
    like_positions = form != "paper"  # where the paper's form was not asked for, no layer is divided by too little
    graphs = _by_distinct(programs, lambda program: with_calls(program, layers, captured.moments, like_positions))
    with preserved_modes(model):
        model.eval()
        biases = {path: layer.bias for path, layer in layers.items()}
        for layer in layers.values():
            recurrent = recurrent_class(layer)
            become = recurrent.from_plain_ if recurrent else become_normalized_
            become(layer, center, deep)
        for path, module in find_notes(model, layers).items():
            norm = note_of(module)["norm"]
            if path in silent and norm.affine:  # scale and shift stand in the place of its parameters as well
                for mine, its in ((layers[path].scale, norm.weight), (layers[path].shift, norm.bias)):
                    mine.requires_grad_(mine.requires_grad or its.requires_grad)
        _join_(model, graphs, layers)
        set_first_outputs_(layers, silent, starts, factors)
        if init == "preserve":
            preserve_({path: (cast(Normalized, layer), biases[path]) for path, layer in layers.items()}, silent)
        else:
            check_finite(layers)
    return model


def _can_be_normalized(module: nn.Module) -> bool:
    return (is_linear_layer(module) and computes_as_torch(module)) or recurrent_class(module) is not None


def _without_batch_norms(
    model: nn.Module, captured: Captured, layers: dict[str, Any]
) -> tuple[nn.Module, dict[bool, Program], dict[str, Tensor]]:
    """The model, its graphs, both without batch norms directly after layers, and which channels those had silenced."""
    plain = captured.programs[False].model
    custom = [plain.get_submodule(path) for path in captured.custom]
    pairs = absorbed_by(layers, captured.programs[False], custom)
    weights = {path: layers[path].weight for path in pairs}
    norms = {plain.get_submodule(path) for path in pairs.values()}
    programs = _by_distinct(captured.programs, lambda program: transferred(program, model, bypassed(program, norms)))
    silent = {}
    for path, norm_path in pairs.items():
        layer, norm = layers[path], cast(Any, model.get_submodule(norm_path))
        note = Absorbed(layer=layer, bias=layer.bias is not None, norm=norm)
        silent[path] = absorb_(model, path, layer, norm, keep_silent=True)
        model = take_out_(model, note)
    untied = any(layers[path].weight is not weight for path, weight in weights.items())
    # A batch norm that does more, such as dropout, was captured in evaluation mode alone.
    if untied or not all(computes_as_torch_batch_norm(norm) for norm in norms):
        by_batch = [model.get_submodule(path) for path in captured.by_batch]
        programs = capture_modes(model, captured.example, by_batch)
        return model, _with_linear_calls(programs, [model.get_submodule(path) for path in captured.custom]), silent
    return model, programs, silent


def _by_distinct(values: dict[bool, T], make: Callable[[T], Made]) -> dict[bool, Made]:
    """The result of `make` for the value of each mode, computed once where both modes have one value."""
    results = {key: make(value) for key, value in {id(value): value for value in values.values()}.items()}
    return {mode: results[id(value)] for mode, value in values.items()}


def _join_(model: nn.Module, graphs: dict[bool, CapturedMode], layers: dict[str, Any]) -> None:
    """Let all layers that are called once be folded together, and the others know what they read by themselves."""
    intact = Intact(model, {*layers, *_modules_before(graphs.values())})
    for mode, network in _by_distinct(graphs, lambda graph: make_network(graph, layers, intact)).items():
        for index, layer in enumerate(network.layers if network else ()):
            layer.networks[mode] = (network, index)
    for path, layer in layers.items():
        alone = {mode: graph for mode, graph in graphs.items() if mode not in layer.networks}
        calls = {mode: [node for node, owner in g.calls.items() if owner == path] for mode, g in alone.items()}
        layer.uses = {mode: [Use.of(node) for node in nodes] for mode, nodes in calls.items()}
        read = {mode: [node.args[0] for node in nodes] for mode, nodes in calls.items()}
        layer.statistics = {mode: Statistics(g, read[mode], layer.uses[mode], intact) for mode, g in alone.items()}
    open_scopes_(model, list(layers.values()))
    forbid_fusing_(model)
    model.register_load_state_dict_pre_hook(check_facts)


def _modules_before(graphs: Iterable[CapturedMode]) -> set[str]:
    """The paths of the modules that compute inputs of layers."""
    inputs = (Statistics(graph, [call.args[0] for call in graph.calls]) for graph in graphs)
    return {node.module for statistics in inputs for node in statistics.graph.program.nodes}


def fold(model: ModuleT, *, inplace: bool = False, keep_batchnorm: bool = True) -> ModuleT:
    """Take the analytic normalization out: plain layers that compute the same, with nothing of varprop in them.

    A batch norm that stood after a layer comes back with the computed statistics, scale and shift; other layers take
    the bias, and one that had none gains it, which is warned of.
    Parametrizations of a layer's weight are removed, which is warned of: it could not take the factor.

    Args:
        model: A normalized model, as it is in evaluation mode.
        inplace: Change the model itself instead of a copy.
        keep_batchnorm: Put absorbed batch norms back, so that the state_dict fits the original class; without, they
            stay away and the layer takes the bias.

    Returns:
        The plain model.

    Raises:
        ValueError: If the model is not normalized, or is a part of one and to be folded in place.

    Example:
        >>> plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, 4))
        >>> folded, x = vp.fold(model), torch.randn(5, 4)
        >>> torch.allclose(folded(x), model(x), atol=1e-6), type(folded[0]).__name__
        (True, 'Linear')
    """
    if inplace:
        refuse_part(model)
    else:
        check_copyable(model)
        model = copy.deepcopy(model)
    layers = normalized_layers(model)
    if not layers:
        raise ValueError("The model is not normalized: there is nothing to fold.")
    require_values(model)
    with preserved_modes(model), torch.no_grad(), shared_fold(model), autocast_off():
        model.eval()
        folded: dict[str, Any] = {path: layer.folded() for path, layer in layers.items()}
    notes = find_notes(model, layers) if keep_batchnorm else {}  # type: ignore[arg-type]
    gained, untied, unparametrized = [], [], []
    for path, layer in layers.items():
        if parametrize.is_parametrized(layer):
            remove_parametrizations_of_(layer)
            unparametrized.append(path)
        if isinstance(layer, NormalizedRecurrent):
            gained += [] if layer.had_bias else [path]
            layer.become_plain_(folded[path])
            continue
        weight, bias = folded[path]
        if path in notes:
            weight, norm = return_batch_norm(notes[path], weight, bias, layer.scale, layer.shift)
            left, keeps_bias = torch.zeros_like(bias), note_of(notes[path])["bias"]
            model = cast(ModuleT, put_back_(model, notes[path], norm))
        else:
            left, gains = bias, not layer.had_bias and not _is_rounding(bias, layer)
            gained += [path] if gains else []
            keeps_bias = gains or layer.had_bias
        with torch.no_grad():
            untied += [path] if assign_weight_(model, layer, weight) else []  # type: ignore[arg-type]
        become_plain_(layer, left if keeps_bias else None)
    close_scopes_(model)
    allow_fusing_(model)
    stop_checking_(model)
    for change, paths in (
        ("These layers had no bias and have one now", gained),
        ("The weights of these layers are no longer tied to others", untied),
        ("The weights of these layers are no longer parametrized", unparametrized),
    ):
        if paths:
            warnings.warn(f"{change}: {', '.join(paths)}.", stacklevel=2)
    return model


@torch.no_grad()
def _is_rounding(bias: Tensor, layer: Normalized) -> bool:
    """True if a folded bias is zero up to rounding, so that a layer without bias can stay without."""
    return bool((bias.abs() <= 8 * torch.finfo(bias.dtype).eps * (layer.shift.abs() + layer.scale.abs())).all())


def init_(
    model: ModuleT,
    moments: Any,
    *,
    example: Any = None,
    center: bool = True,
    shift: Shift = "depth",
    orthogonal: bool = True,
    only: Only | None = None,
) -> ModuleT:
    """Initialize a plain model without data, so that signals and gradients keep their size at any depth.

    Weights become orthogonal, and the normalization is projected onto them and folded into them: every unit starts with
    variance 1 and mean 0 by the moments of the data, and those before activations with a variance and a mean at which
    gradients do not grow either. Layers at the ends of B residual branches start with variance 1 / B: so each branch
    adds alike, and a stream of variance 1 ends with 2. Batch norms elsewhere than after a layer normalize by the batch,
    unless they are in evaluation mode and have seen data.

    Args:
        model: The model; its weights and biases are changed.
        moments: Moments of the data, as for `propagate`.
        example: The real shape, ``(1, 3, 224, 224)`` or an input of it, where `moments` do not know it.
        center: Whether to set the mean of every unit by its bias. Without, weights are scaled by the second moment
            alone and biases are zero: He's rule for any activation and graph.
        shift: Where the outputs of layers before activations start. ``"first"`` (or True): at the smallest mean from
            which on errors of scale die out, 0.377 for ReLU. ``"depth"``: the same, but where the shortest way from an
            input to an output has more than 8 layers, at a mean or a deviation with which gradients hardly grow: mean
            2.24 for ReLU in a chain of 100 layers, deviation 0.09 for GELU; and branches start small, which with the
            other choices they do not. False: at mean 0, as all other layers do.
        orthogonal: Whether to make rows or columns of the weights orthonormal first, groups of channels each by itself;
            it takes the present weights and no random numbers. Without, weights are only scaled.
        only: The layers to initialize, as for `normalize`: without those that are to start at zero, say.

    Returns:
        The model.

    Raises:
        ValueError: As `normalize`: if the model has no layer to initialize, or the weights of a layer cannot be scaled
            (a row of zeros, say).

    Example:
        >>> moments = vp.Moments(torch.zeros(1, 100), torch.ones(1, 100))
        >>> model = vp.init_(nn.Sequential(nn.Linear(100, 8), nn.Tanh(), nn.Linear(8, 2)), moments)
        >>> vp.propagate(model, moments)["0"].var.mean().round(decimals=4).item()
        1.0
    """
    check_copyable(model)
    captured = captured_for(model, moments, example, only, by_batch=_normalizes_by_batch)
    projected = functools.partial(
        normalized_,
        captured=captured,
        init="project",
        only=only,
        center=center,
        shift=center and shift,
        orthogonal=orthogonal,
    )
    projected(copy.deepcopy(model))  # a trial: where it fails, the model is as before
    return cast(ModuleT, fold(projected(model), inplace=True))


def _normalizes_by_batch(module: nn.Module) -> bool:
    """True for a batch norm that is in training mode, or has seen no data: its stored statistics say nothing."""
    return is_batch_norm(module) and (module.training or has_seen_nothing(module))
