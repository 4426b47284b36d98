"""Test rows for `varprop.rules.losses`."""

from __future__ import annotations

import torch

from .case import Case, normal, weight

aten = torch.ops.aten

rows = [
    Case(aten.cdist.default, lambda: (normal(2, 3, 8), normal(2, 4, 8)), mean_error=0.02, std_error=0.04),
    Case(aten.cdist.default, lambda: (normal(3, 8), weight(4, 8)), mean_error=0.02, std_error=0.04, label="constant"),
    Case(aten.pairwise_distance.default, lambda: (normal(3, 8), normal(3, 8)), mean_error=0.02, std_error=0.04),
    Case(
        aten.cosine_similarity.default,
        lambda: (normal(3, 16, spread=0.0), normal(3, 16, spread=0.0)),
        mean_error=0.02,
        std_error=0.03,
        label="initialization",
    ),
    Case(aten.cosine_similarity.default, lambda: (normal(3, 64), weight(3, 64)), mean_error=0.03, std_error=0.04),
    Case(
        aten.cosine_similarity.default,
        lambda: (normal(3, 4, 2, spread=0.0), normal(3, 4, 2, spread=0.0)),
        mean_error=0.02,
        std_error=0.07,
        label="short",
    ),
    Case(aten.linalg_vecdot.default, lambda: (normal(3, 4), weight(3, 4))),
    Case(aten.linalg_vecdot.default, lambda: (normal(3, 1), weight(3, 8)), label="broadcast"),
    Case(aten.linalg_vecdot.default, lambda: (normal(3, 4, 2), normal(3, 4, 2)), {"dim": 1}, label="both"),
]
