"""How the taps of a layer's kernel meet the image: read off the operation itself, checked against the engine's rule."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..moments import Moments, trusted

_TRIALS = 8


@functools.lru_cache(maxsize=256)
def tap_matrix(use: Any, kernel: tuple[int, ...], spatial: tuple[int, ...], transposed: bool) -> Tensor | None:
    """The matrix E of `layout.Rows`, float64, for a use without groups; None where statistics are not of that form.

    An image of ones shows at which positions a tap lies inside. Column 0 is the share of these positions; the other
    columns are a root of the covariance of taps over positions, by which the means of outputs differ from position to
    position. That the rule for the layer says the same is tried with random taps.
    """
    inside = _inside(use, kernel, spatial, transposed)
    share = inside.mean(1)
    centred = inside - share[:, None]
    found = torch.cat([share[:, None], _root(centred @ centred.mT / inside.shape[1])], 1)
    trials = torch.randn(_TRIALS, len(share), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, spread = _try(use, trials, kernel, spatial, transposed, 1.0, 0.0)
    _, noise = _try(use, trials, kernel, spatial, transposed, 0.0, 1.0)
    levers = trials @ found
    agrees = torch.allclose(mean, levers[:, 0]) and torch.allclose(noise, trials.square() @ share)
    return found if agrees and torch.allclose(spread, levers[:, 1:].square().sum(1), atol=1e-8) else None


def _inside(use: Any, kernel: tuple[int, ...], spatial: tuple[int, ...], transposed: bool) -> Tensor:
    """For every tap and position 1 where the tap lies inside the image, 0 where outside."""
    count = int(torch.Size(kernel).numel())
    image = torch.ones(1, 1, *spatial, dtype=torch.float64)
    with torch.no_grad():
        taps = _as_weight(torch.eye(count, dtype=torch.float64), kernel, transposed)
        outputs: Tensor = use.operation()(image, taps, None, *use.settings)
    return outputs.reshape(count, -1)


def _as_weight(taps: Tensor, kernel: tuple[int, ...], transposed: bool) -> Tensor:
    return taps.view(-1, *kernel).unsqueeze(0 if transposed else 1)


def _try(use: Any, trials: Tensor, kernel: Any, spatial: Any, transposed: bool, mean: float, var: float) -> Any:
    value = torch.ones([1] * (2 + len(kernel)), dtype=torch.float64)
    with trusted(), torch.no_grad():
        moments = Moments(mean * value, var * value, (1, 1, *spatial))
        found = use.outputs(moments, _as_weight(trials, kernel, transposed))
    centre = found.mean.reshape(len(trials), -1).mean(1)  # positions that stayed apart are pooled as the layer does
    spread = (found.mean.reshape(len(trials), -1) - centre[:, None]).square()
    return centre, (found.var.reshape(len(trials), -1) + spread).mean(1)


def _root(form: Tensor) -> Tensor:
    """Columns whose squares sum to the quadratic form; none for the zero form."""
    values, vectors = torch.linalg.eigh(form)
    kept = values > 1e-13 * max(1.0, float(values.max()))
    root: Tensor = vectors[:, kept] * values[kept].sqrt()
    return root
