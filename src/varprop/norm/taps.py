"""How the taps of a layer's kernel meet the image, learned from the engine's own rule for the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..moments import Moments, trusted


def tap_matrix(use: Any, kernel: tuple[int, ...], spatial: tuple[int, ...], transposed: bool) -> Tensor | None:
    """The matrix E of `layout.Rows`, float64; None where the layer's statistics are not of that form.

    The mean of an output is linear in the taps (column 0), the spread of the means over positions a quadratic form of
    them (the other columns are its root), and the variance is linear in the squares with the same column 0. All three
    are read off the rule by trying unit taps, and sums of two.
    """
    count = int(torch.Size(kernel).numel())
    units = torch.eye(count, dtype=torch.float64)
    first, second = torch.triu_indices(count, count, 1)
    trials = torch.cat([units, units[first] + units[second]])
    mean, spread = _try(use, trials, kernel, spatial, transposed, 1.0, 0.0)
    _, noise = _try(use, trials, kernel, spatial, transposed, 0.0, 1.0)
    share, form = mean[:count], spread[:count].diag()
    cross = 0.5 * (spread[count:] - spread[first] - spread[second])
    form[first, second] = form[second, first] = cross
    if not torch.allclose(noise, trials.square() @ share) or not torch.allclose(mean, trials @ share):
        return None
    return torch.cat([share[:, None], _root(form)], 1)


def _try(use: Any, trials: Tensor, kernel: Any, spatial: Any, transposed: bool, mean: float, var: float) -> Any:
    weight = trials.view(-1, *kernel).unsqueeze(0 if transposed else 1) if kernel else trials
    ndim = len(kernel) + 2 if kernel else 2
    full = (1, 1, *spatial) if kernel else (1, 1)
    value = torch.ones([1] * ndim, dtype=torch.float64)
    with trusted(), torch.no_grad():
        found = use.ungrouped().outputs(Moments(mean * value, var * value, full), weight)
    centre = found.mean.reshape(len(trials), -1).mean(1)  # positions that stayed apart are pooled as the layer does
    spread = (found.mean.reshape(len(trials), -1) - centre[:, None]).square()
    return centre, (found.var.reshape(len(trials), -1) + spread).mean(1)


def _root(form: Tensor) -> Tensor:
    """Columns whose squares sum to the quadratic form; none for the zero form."""
    values, vectors = torch.linalg.eigh(form)
    kept = values > 1e-13 * max(1.0, float(values.max()))
    root: Tensor = vectors[:, kept] * values[kept].sqrt()
    return root
