"""What folding will have to add to a model, said when it is normalized and not after it was trained."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.utils import parametrize

from .batchnorm import find_notes
from .checks import listed
from .layers import Normalized, normalized_layers
from .linear_layers import owners
from .recurrent import NormalizedRecurrent


def warn_of_fold(model: nn.Module) -> None:
    """Say once which layers `fold` gives a bias, and which it unties: their state then does not fit the plain class."""
    sites = normalized_layers(model)
    gained = [repr(path) for path in _without_bias(model, sites)]
    untied = [repr(path) for path in _tied(model, sites)]
    parts = [f"give a bias to {listed(gained)}"] * bool(gained) + [f"untie the weights of {listed(untied)}"] * bool(
        untied
    )
    if parts:
        warnings.warn(
            f"vp.fold will in general {' and '.join(parts)}, and a strict load_state_dict into the plain class will "
            "not take what it returns.",
            stacklevel=3,
        )


def _without_bias(model: nn.Module, sites: dict[str, Normalized]) -> list[str]:
    """Layers that had no bias, and no batch norm of the model's own behind them to take it."""
    notes = find_notes(model, sites)  # type: ignore[arg-type]
    return [path for path, site in sites.items() if path not in notes and not _has_place_for_bias(site)]


def _has_place_for_bias(site: Normalized) -> bool:
    return bool(site.plain_biases) if isinstance(site, NormalizedRecurrent) else site.plain_bias is not None


def _tied(model: nn.Module, sites: dict[str, Normalized]) -> list[str]:
    """Layers whose weight others hold as well."""
    held = owners(model)
    plain = {path: s for path, s in sites.items() if not isinstance(s, NormalizedRecurrent)}
    whole = {path: site for path, site in plain.items() if not parametrize.is_parametrized(site, "weight")}
    return [path for path, site in whole.items() if len(held[site.weight]) > 1]
