"""Variances of parameters for `vp.predict(..., parameter_var=...)` from the mean-field posteriors of other libraries.

None of them is imported here: each function reads what the library's objects hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# names of means and of what softplus turns into standard deviations: bayesian-torch (two), torch-uncertainty
WEIGHTS = (("mu_weight", "rho_weight"), ("mu_kernel", "rho_kernel"), ("weight_mu", "weight_sigma"))
BIASES = (("mu_bias", "rho_bias"), ("bias_mu", "bias_sigma"))


def from_laplace(laplace: Any) -> dict[str, Tensor]:
    """Variances by name from a fitted diagonal approximation of laplace-torch, of all weights or of the last layer.

    Args:
        laplace: ``Laplace(model, ..., hessian_structure="diag")`` after ``fit``.

    Raises:
        ValueError: If the approximation is not diagonal.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> model = torch.nn.Linear(2, 1)
        >>> fitted = SimpleNamespace(model=model, posterior_variance=torch.tensor([0.1, 0.2, 0.3]))
        >>> from_laplace(fitted)["bias"]
        tensor([0.3000])
    """
    if not isinstance(variance := getattr(laplace, "posterior_variance", None), Tensor) or variance.ndim != 1:
        raise ValueError(
            f"{type(laplace).__name__} has no variance for every weight: fit it with hessian_structure='diag'."
        )
    model, layer = laplace.model, getattr(laplace.model, "last_layer", None)
    if isinstance(layer, nn.Module):
        named = [(f"{model._last_layer_name}.{name}", p) for name, p in layer.named_parameters()]
    else:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return _split(variance.detach(), named)


def from_ivon(optimizer: Any, model: nn.Module) -> dict[str, Tensor]:
    """Variances by name from the state of an IVON optimizer: 1 / (ess (hessian + weight decay)).

    Args:
        optimizer: ``ivon.IVON`` after some steps, outside of ``sampled_params``, so that parameters are means.
        model: The model that it trains.

    Raises:
        ValueError: If the optimizer holds no Hessian, or a parameter that the model does not have.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> group = dict(params=[model.weight], ess=10.0, hess=torch.ones(2), weight_decay=1.0)
        >>> from_ivon(SimpleNamespace(param_groups=[group]), model)["weight"]
        tensor([[0.0500, 0.0500]])
    """
    names, found = {id(p): name for name, p in model.named_parameters()}, dict[str, Tensor]()
    for group in optimizer.param_groups:
        if "hess" not in group or "ess" not in group:
            raise ValueError(f"{type(optimizer).__name__} holds no Hessian and sample size: from_ivon reads ivon.IVON.")
        parameters = [p for p in group["params"] if p is not None and p.requires_grad]
        if any(id(p) not in names for p in parameters):
            raise ValueError("The optimizer trains a parameter that the model does not have: pass the model it trains.")
        variance = 1 / (group["ess"] * (group["hess"].detach() + group["weight_decay"]))
        found |= _split(variance, [(names[id(p)], p) for p in parameters])
    return found


def from_snapshots(states: Iterable[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Means and variances over snapshots of weights along a run of SGD: SWAG-diagonal (Maddox et al., 2019).

    Args:
        states: State dicts, at least two; only floating point entries count.

    Returns:
        The means, to load by ``model.load_state_dict(means, strict=False)``, and the variances. Running statistics of
        batch norms are not those of the mean weights: compute them anew by ``torch.optim.swa_utils.update_bn``, and
        leave buffers out of ``parameter_var``.

    Raises:
        ValueError: If there are less than two snapshots, or they share their memory or differ in their names.

    Example:
        >>> import torch
        >>> means, variances = from_snapshots([{"weight": torch.zeros(2)}, {"weight": torch.ones(2)}])
        >>> means["weight"], variances["weight"]
        (tensor([0.5000, 0.5000]), tensor([0.2500, 0.2500]))
    """
    count, means, squares = 0, dict[str, Tensor](), dict[str, Tensor]()
    at = (
        [value.data_ptr() for state in states for value in [*state.values()][:1]]
        if isinstance(states, Sequence)
        else []
    )
    if len({*at}) < len(at):
        raise ValueError("Snapshots share their memory, as state dicts of one model do: clone the values of each.")
    for count, state in enumerate(states, 1):
        if count > 1 and means.keys() != {name for name, value in state.items() if value.is_floating_point()}:
            raise ValueError(f"Snapshot {count} has other names than those before it.")
        for name, value in state.items():
            if value.is_floating_point():
                off = value.detach() - means.setdefault(name, torch.zeros_like(value))
                means[name] = means[name] + off / count
                squares[name] = squares.get(name, torch.zeros_like(value)) + off * (value.detach() - means[name])
    if count < 2:
        raise ValueError(f"Variances need at least two snapshots, not {count}.")
    return means, {name: value / count for name, value in squares.items()}


def from_mean_field(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """A plain copy of a model of mean-field layers, and the variances of its weights.

    Linear layers and convolutions over two axes of bayesian-torch (Reparameterization and Flipout, as ``dnn_to_bnn``
    makes them) and torch-uncertainty (``BayesLinear``, ``BayesConv2d``) become `torch.nn` layers with the mean weights.

    Args:
        model: Left as it is.

    Raises:
        ValueError: If there is no such layer, or a mean-field layer of another kind.

    Example:
        >>> import torch
        >>> layer = torch.nn.Module()
        >>> layer.mu_weight, layer.rho_weight = torch.ones(1, 2), torch.zeros(1, 2)
        >>> plain, variances = from_mean_field(torch.nn.Sequential(layer))
        >>> plain, round(variances["0.weight"][0, 0].item(), 3)  # (log 2)²
        (Sequential(
          (0): Linear(in_features=2, out_features=1, bias=False)
        ), 0.48)
    """
    plain, variances = deepcopy(model), dict[str, Tensor]()
    layers = [(path, layer) for path, layer in plain.named_modules() if _moments(layer, WEIGHTS) is not None]
    if not layers:
        raise ValueError("The model has no mean-field layer of bayesian-torch or torch-uncertainty.")
    for path, layer in layers:
        weight, bias = _moments(layer, WEIGHTS), _moments(layer, BIASES)
        assert weight is not None
        layer_means = _plain_layer(path, layer, weight[0], None if bias is None else bias[0])
        prefix = f"{path}." if path else ""
        variances |= {f"{prefix}{key}": m[1] for key, m in (("weight", weight), ("bias", bias)) if m is not None}
        if not path:
            return layer_means, variances
        plain.set_submodule(path, layer_means)
    return plain, variances


def _moments(layer: nn.Module, names: tuple[tuple[str, str], ...]) -> tuple[Tensor, Tensor] | None:
    for mean, spread in names:
        if isinstance(rho := getattr(layer, spread, None), Tensor):
            return getattr(layer, mean).detach().clone(), F.softplus(rho.detach()).square()
    return None


def _plain_layer(path: str, layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    if weight.ndim == 2:
        plain: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    elif weight.ndim == 4 and "transpose" not in type(layer).__name__.lower():
        settings = {key: getattr(layer, key) for key in ("stride", "padding", "dilation", "groups")}
        inputs = weight.shape[1] * settings["groups"]
        plain = nn.Conv2d(inputs, len(weight), tuple(weight.shape[2:]), bias=bias is not None, **settings)  # type: ignore[arg-type]
    else:
        raise ValueError(
            f"'{path}' is a {type(layer).__name__}: linear layers and convolutions over two axes are taken; give its "
            f"variances by hand."
        )
    plain.load_state_dict({"weight": weight, **({} if bias is None else {"bias": bias})})
    return plain.to(weight).train(layer.training)


def _split(values: Tensor, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """A vector of all parameters by name."""
    named = list(named)
    pieces = values.split([p.numel() for _, p in named])
    return {name: piece.view_as(p) for (name, p), piece in zip(named, pieces, strict=True)}
