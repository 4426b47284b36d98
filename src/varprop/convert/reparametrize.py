"""One function in four forms: plain, weight-normalized, batch-normalized, analytically normalized; init=BN."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.utils import _pytree as pytree

from ..engine.inputs import example_for
from ..moments import Moments, Tokens
from ..norm.api import captured_for, fold, normalized_
from ..norm.checks import check_copyable
from ..norm.layers import normalized_layers
from ..norm.linear_layers import (
    LinearLayer,
    find_linear_layers,
    is_linear_layer,
    output_axis,
    owners,
    remove_parametrizations_,
    replace,
)
from ..norm.scope import ModuleT
from .batchnorm import Batched, calibrate_, from_batch_norm_, layers_as_torch, own_batch_norms, to_batch_norm_

Parametrization = Literal["standard", "weight", "batch", "analytic"]


def reparametrize(
    model: ModuleT,
    to: Parametrization,
    *,
    moments: Any = None,
    example: Any = None,
    batch: Any = None,
    inplace: bool = False,
) -> ModuleT:
    """Write a model in another parametrization that computes the same, after every linear layer.

    Whatever form the model is in, in part or in whole, it becomes the plain one first:

    - ``"standard"``: plain layers. Batch norms directly after a layer are absorbed into it; the model's own leave an
      `nn.Identity` behind, to which ``"batch"`` returns, and those whose class does more (an activation, say) do that
      alone from then on. Batch norms elsewhere stay.
    - ``"weight"``: torch's `weight_norm`, ``w = g v / |v|``, on every layer.
    - ``"batch"``: torch's batch norm after every layer, in a `Batched` at the layer's path (``fc.layer.weight``,
      ``fc.norm.weight``), with the statistics of `batch`: the same function in evaluation mode on every input, and in
      training mode on that batch, unless a layer is called several times, which is warned of. So are layers of a class
      with a forward of its own, which stay as they are.
    - ``"analytic"``: the paper's normalization, by `normalize` with ``init="preserve"``, so in the form ``"paper"``
      also where the model was in the form ``"deep"``.

    A model that has batch norms means its evaluation mode by default; given a `batch` and a form other than
    ``"batch"``, it means its training mode on that batch. Layers with tied weights stay tied unless their batch norms
    scale them apart, which is warned of. Make the optimizer afterwards: parameters are added and removed.

    Args:
        model: Any model, in any mode; the mode stays.
        to: The form to write it in.
        moments: For ``"analytic"``, the moments of the data, as for `normalize`.
        example: An input tensor (or tuple, or dict), to see which layers the model's own batch norms follow; may be
            left out if there are none, or if `batch` or `moments` are given.
        batch: An input tensor (or tuple, or dict) to take the statistics of batch norms from.
        inplace: Change the model itself instead of a copy; if that fails it is as before.

    Returns:
        The model in the new form.

    Raises:
        ValueError: If statistics are missing, a layer cannot take the form, or the training mode is that of no plain
            layer, since a batch norm is called several times; the message names it.

    Example:
        >>> plain, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 4)
        >>> analytic = vp.reparametrize(plain, "analytic", moments=vp.input_moments(x))
        >>> torch.allclose(analytic(x), plain(x), atol=1e-5)
        True
    """
    if to not in get_args(Parametrization):
        raise ValueError(f"`to` must be one of {', '.join(map(repr, get_args(Parametrization)))}, not {to!r}.")
    if to == "batch" and batch is None:
        raise ValueError('to="batch" needs `batch`, an input to take the mean and variance of every layer from.')
    if to == "analytic" and moments is None:
        raise ValueError('to="analytic" needs `moments`, the mean and variance of the data (see vp.input_moments).')
    check_copyable(model)
    trial = copy.deepcopy(model)
    result = _convert(trial, to, moments, example, batch)
    if not inplace:
        return cast(ModuleT, result)
    if result is not trial:
        raise ValueError("The model is a single layer, which cannot be replaced in place: use the model returned.")
    # the trial on a copy has shown that nothing fails midway
    return cast(ModuleT, _convert(model, to, moments, example, batch))


def _convert(model: nn.Module, to: Parametrization, moments: Any, example: Any, batch: Any) -> nn.Module:
    """`reparametrize` in place and without a net: a failure midway leaves the model half done."""
    if example is None:
        example = batch
    if example is None and moments is not None:  # what the moments tell
        leaves = pytree.tree_leaves(moments, is_leaf=lambda leaf: isinstance(leaf, (Moments, Tokens)))
        if not any(isinstance(leaf, Tokens) for leaf in leaves):
            example = example_for(model, moments, None)
    if normalized_layers(model):
        model = fold(model, inplace=True, keep_batchnorm=False)
    model = from_weight_norm_(model)
    if batch is not None and to != "batch":
        wrapped = {path: m.norm for path, m in model.named_modules() if isinstance(m, Batched)}
        calibrate_(model, {**own_batch_norms(model), **wrapped}, batch)
    model = from_batch_norm_(model, example)
    if to == "weight":
        return to_weight_norm_(model)
    if to == "batch":
        return to_batch_norm_(model, batch)
    return normalized_(model, captured_for(model, moments, example), "preserve") if to == "analytic" else model


def batch_norm_start(model: ModuleT, batch: Any, generator: torch.Generator | None = None) -> ModuleT:
    """The plain model that starts where a batch-normalized one does (init=BN of Shekhovtsov & Flach 2018).

    Batch norm goes after every linear layer with s uniform on (0, 1), as PyTorch drew it in 2018, and b = 0; the mean
    and variance of one batch then turn it into plain weights and biases. The result equals that batch-normalized model
    in training mode on this batch, where no layer is called twice (one that is gets the statistics of all its calls
    together). Layers without bias gain one; dropout is off while the statistics are taken.

    Args:
        model: Any model in any parametrization; not changed.
        batch: An input tensor, a tuple of positional arguments, or a dict of keyword arguments.
        generator: Where s is drawn from; torch's global generator if left out.

    Returns:
        A plain model, ready for `reparametrize`.

    Raises:
        ValueError: If the batch gives a layer a single value, or values that are not finite.

    Example:
        >>> x = torch.randn(64, 4)
        >>> plain = vp.batch_norm_start(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), x)
        >>> bool(plain[0](x).mean(0).abs().max() < 1e-5)
        True
    """
    plain: nn.Module = reparametrize(model, "standard", example=batch)
    elsewhere, wrappers = own_batch_norms(plain), {}
    for path, layer in layers_as_torch(plain, batch).items():
        wrappers[path] = Batched(layer)
        plain = replace(plain, layer, wrappers[path])
        scale = wrappers[path].norm.weight
        device = scale.device if generator is None else generator.device
        with torch.no_grad():
            scale.copy_(torch.rand(scale.shape, generator=generator, device=device, dtype=scale.dtype))
    norms = {path: wrapper.norm for path, wrapper in wrappers.items()}
    reached = calibrate_(plain, {**elsewhere, **norms}, batch, pool=True)
    for path in wrappers.keys() - reached:
        plain = replace(plain, wrappers[path], wrappers[path].layer)
    return cast(ModuleT, from_batch_norm_(plain, example=batch))


def to_weight_norm_(model: nn.Module) -> nn.Module:
    """Give every linear layer of a model torch's weight normalization in place, by the same function: g = |w|, v = w.

    Layers with tied weights share g and v. A weight that something else than a linear layer reads as well (an
    embedding, a transposed twin) stays as it is, and so does a layer that has weight normalization already, or whose
    weight is no parameter.
    """
    named = find_linear_layers(model).items()
    layers = {path: m for path, m in named if not has_weight_norm(m) and _has_weight(m)}
    _check(layers)
    held, chosen, twins = owners(model), set(layers.values()), dict[Tensor, nn.Module]()
    for layer in layers.values():
        weight = layer.weight
        if all(owner in chosen and output_axis(owner) == output_axis(layer) for owner, _ in held[weight]):
            _give_class_of_its_own_(layer)
            parametrizations.weight_norm(layer, dim=output_axis(layer))
            layer.train(layer.training)  # torch leaves the new modules in training mode
            factors, shared = parts_of(layer), parts_of(twins.setdefault(weight, layer))
            factors.original0, factors.original1 = shared.original0, shared.original1
    return model


def _give_class_of_its_own_(layer: nn.Module) -> None:
    """Before another tensor of a parametrized layer is parametrized: torch changes the class, which copies share."""
    if parametrize.is_parametrized(layer):
        shared = type(layer)
        contents = {name: value for name, value in vars(shared).items() if name not in ("__dict__", "__weakref__")}
        layer.__class__ = type(shared.__name__, shared.__bases__, contents)


def from_weight_norm_(model: nn.Module) -> nn.Module:
    """Turn torch's weight normalization in a model back into plain weights, in place; ties stay."""
    plain: dict[Tensor, nn.Parameter] = {}
    for layer in [m for m in model.modules() if has_weight_norm(m)]:
        direction = parts_of(layer).get_parameter("original1")
        remove_parametrizations_(layer)
        layer.weight = plain.setdefault(direction, cast(nn.Parameter, layer.weight))  # twins share one
        # torch's weight_norm leaves a hook behind that reads old checkpoints and cannot be pickled
        hooks = layer._load_state_dict_pre_hooks
        for key, hook in list(hooks.items()):
            if "_weight_norm_compat_hook" in getattr(getattr(hook, "hook", hook), "__qualname__", ""):
                del hooks[key]
    return model


def has_weight_norm(module: nn.Module) -> TypeGuard[LinearLayer]:
    """True if a layer's weight is computed by torch's weight normalization and nothing else."""
    if not is_linear_layer(module) or not parametrize.is_parametrized(module, "weight"):
        return False
    steps = list(parts_of(module))
    return len(steps) == 1 and isinstance(steps[0], _WeightNorm)


def _has_weight(layer: nn.Module) -> bool:
    """True if a layer's weight is a parameter or parametrized, and not computed by code of the model."""
    registered = layer._parameters.get("weight")
    return parametrize.is_parametrized(layer, "weight") or (registered is not None and registered is layer.weight)


def parts_of(layer: nn.Module) -> parametrize.ParametrizationList:
    """The module that holds g as `original0` and v as `original1`."""
    return layer.parametrizations.weight  # type: ignore[union-attr, return-value]


def _check(layers: Mapping[str, LinearLayer]) -> None:
    """Raise if the weight of a layer cannot be normalized."""
    for path, layer in layers.items():
        if parametrize.is_parametrized(layer, "weight"):
            raise ValueError(f"The weight of '{path}' is parametrized otherwise: remove that first.")
        if layer.weight.is_complex():
            raise ValueError(f"The weight of '{path}' is complex, which torch's weight normalization does not take.")
        # Not per output channel: torch takes one norm over all groups of a transposed convolution.
        rows = layer.weight.detach().movedim(output_axis(layer), 0).flatten(1)
        zero = (rows == 0).all(1).nonzero().flatten().tolist()
        if zero:
            raise ValueError(f"Row {zero[0]} of the weight of '{path}' is zero and has no direction to normalize.")
        if not rows.isfinite().all():
            raise ValueError(f"The weight of '{path}' is not finite.")
