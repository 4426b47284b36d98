"""One function in four forms: plain, weight-normalized, batch-normalized, analytically normalized; init=BN."""

from __future__ import annotations

import copy
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..engine.inputs import example_for
from ..moments import Moments, Tokens
from ..norm.api import captured_for, fold, normalized_
from ..norm.layers import normalized_layers
from ..norm.linear_layers import find_linear_layers, replace
from ..norm.scope import ModuleT
from .batchnorm import Batched, calibrate_, from_batch_norm_, own_batch_norms, to_batch_norm_
from .weightnorm import from_weight_norm_, to_weight_norm_

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
      training mode on that batch, unless a layer is called several times, which is warned of.
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
    for path, layer in find_linear_layers(plain).items():
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
