"""The scales and shifts that normalized layers start with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layers import Normalized
from .recurrent import NormalizedRecurrent

SWEEPS = 300


@torch.no_grad()
def set_first_scales_(layers: dict[str, Any], silent: dict[str, Tensor]) -> None:
    """Layers are made with scale 1 and shift 0; what a batch norm silenced stays silent."""
    for path, mask in silent.items():
        layers[path].scale[mask] = 0


@torch.no_grad()
def set_first_shifts_(layers: dict[str, Any], shifts: dict[str, float]) -> None:
    """Let the layers before activations start where errors of scale die out."""
    for path, shift in shifts.items():
        if not isinstance(layers[path], NormalizedRecurrent):
            layers[path].shift.copy_(shift * layers[path].scale)


def preserve_(sites: dict[str, tuple[Normalized, Tensor | None]], silent: dict[str, Tensor]) -> None:
    """Set every scale and shift to what the layer does now.

    One sweep does it, and a second one finds nothing left to do, unless a layer feeds itself through a later call: its
    statistics depend on its own scale and shift, and the sweeps approach the point where both agree.
    """
    for sweep in range(SWEEPS):
        moved = [path for path, (site, bias) in sites.items() if _set_to_present(path, site, bias, silent.get(path))]
        if not moved:
            return
        if sweep == 0:
            _refuse_not_finite(sites)
    raise ValueError(
        f"Layer '{moved[0]}' is called on its own output, and no scale and shift agree with the statistics that follow "
        f'from them: use init="project", or leave it out with `only`.'
    )


def _refuse_not_finite(sites: dict[str, tuple[Normalized, Tensor | None]]) -> None:
    for path, (site, _) in sites.items():
        if not all(bool(parameter.isfinite().all()) for parameter in site.parameters()):
            raise ValueError(
                f"Outputs of '{path}' have no finite mean and variance: look for NaN, infinity and values too large in "
                f"its weights and biases, and in those before it."
            )


@torch.no_grad()
def _set_to_present(path: str, site: Normalized, bias: Tensor | None, silent: Tensor | None) -> bool:
    """Set scale and shift of a layer so that it does what it did; whether that changed them beyond rounding."""
    if isinstance(site, NormalizedRecurrent):
        return site.set_to_present(path)
    mean, std = site.output_statistics()
    if silent is not None:
        mean, std = mean.masked_fill(silent, 0), std.masked_fill(silent, 0)
    scale, shift = (t.to(site.scale.dtype) for t in (std, mean if bias is None else mean + bias))
    change = torch.maximum((scale - site.scale).abs().max(), (shift - site.shift).abs().max())
    size = torch.maximum(scale.max(), shift.abs().max())
    site.scale.copy_(scale)
    site.shift.copy_(shift)
    return not bool(size.isfinite() & (change <= 4 * torch.finfo(scale.dtype).eps * size))
