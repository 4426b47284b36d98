"""The analytic normalization out of a model again, and as an initialization."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..training.restore import preserved_modes
from .absorb import assign_weight_, find_seats, note_of
from .depth import warn_of_depth
from .layers import Normalized, become_plain_
from .normalize import normalized_
from .recurrent import NormalizedRecurrent
from .sites import replace
from .united import remove_hooks_


def fold(model: nn.Module, *, inplace: bool = False, keep_batchnorm: bool = True) -> nn.Module:
    """Take the analytic normalization out: plain layers that compute the same, with nothing of varprop in them.

    The bias goes where the original class has a place for it: into the layer's own, or into the batch norm that stood
    after it, which then does nothing else in evaluation mode. A layer with neither gains a bias, which is warned of.

    Args:
        model: A normalized model, as it is in evaluation mode.
        inplace: Change the model itself instead of a copy.
        keep_batchnorm: Put absorbed batch norms back, so that the state_dict fits the original class; without, they
            stay away and the layer takes the bias.

    Returns:
        The plain model.

    Raises:
        ValueError: If the model is not normalized.
    """
    model = model if inplace else copy.deepcopy(model)
    sites = {path: m for path, m in model.named_modules() if isinstance(m, Normalized)}
    if not sites:
        raise ValueError("The model is not normalized: there is nothing to fold.")
    with preserved_modes(model), torch.no_grad():
        model.eval()
        folded: dict[str, Any] = {path: site.folded() for path, site in sites.items()}
    seats = find_seats(model, sites) if keep_batchnorm else {}  # type: ignore[arg-type]
    gained, untied = [], []
    for path, site in sites.items():
        if isinstance(site, NormalizedRecurrent):
            gained += [] if site.plain_biases else [path]
            site.become_plain_(folded[path])
            continue
        weight, bias = folded[path]
        with torch.no_grad():
            untied += [path] if assign_weight_(model, site, weight) else []  # type: ignore[arg-type]
        if path in seats and not note_of(seats[path])["bias"]:
            model = _return_batch_norm(model, seats[path], bias)
            become_plain_(site, None)
            continue
        gains = site.plain_bias is None and bool(bias.any())
        gained += [path] if gains else []
        if path in seats:
            model = _return_batch_norm(model, seats[path], torch.zeros_like(bias))
        become_plain_(site, bias if gains or site.plain_bias is not None else None)
    remove_hooks_(model)
    if gained:
        warnings.warn(f"These layers had no bias and have one now: {', '.join(gained)}.", stacklevel=2)
    if untied:
        warnings.warn(f"The weights of these layers are no longer tied to others: {', '.join(untied)}.", stacklevel=2)
    return model


@torch.no_grad()
def _return_batch_norm(model: nn.Module, seat: nn.Identity, bias: Tensor) -> nn.Module:
    """Put a batch norm back that adds a bias in evaluation mode and does nothing else."""
    norm = note_of(seat)["norm"].to(device=bias.device, dtype=bias.dtype)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.zero_() if norm.affine else norm.running_mean.copy_(-bias)
    norm.running_var.fill_(1 - norm.eps)
    if norm.affine:
        norm.weight.fill_(1)
        norm.bias.copy_(bias)
    return replace(model, seat, norm)


def init_(model: nn.Module, input: Any, *, example: Any = None, center: bool = True) -> nn.Module:
    """Initialize a plain model without data, so that every unit starts with mean 0 and variance 1.

    The normalization is projected onto the present weights (random, orthogonal, ...) and folded into them.

    Args:
        model: The model; its weights and biases are changed.
        input: Moments of the data, as for `propagate`.
        example: An input that gives the real shape where `input` has uniform axes.
        center: Whether to centre every unit by its bias. Without, weights are scaled by the second moment alone and
            biases are zero: He's rule for any activation and graph, safer in deep chains without skips.

    Returns:
        The model.
    """
    trial = normalized_(copy.deepcopy(model), input, example, "project", None, center)
    if center:
        warn_of_depth(trial)
    return fold(normalized_(model, input, example, "project", None, center), inplace=True)
