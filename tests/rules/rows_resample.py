"""Test rows for `varprop.rules.pooling`."""

import torch

from .case import Case, normal

aten = torch.ops.aten


def grid(*shape: int) -> torch.Tensor:
    """Positions to sample at, some of them outside."""
    return 2.6 * torch.rand(*shape, dtype=torch.float64) - 1.3


rows = [
    Case(aten.upsample_nearest1d.vec, lambda: (normal(2, 2, 3), None, [2.0])),
    Case(aten.upsample_nearest1d.default, lambda: (normal(2, 2, 3), [5])),
    Case(aten.upsample_nearest2d.vec, lambda: (normal(1, 2, 3, 2), [4, 5], None)),
    Case(aten.upsample_nearest2d.default, lambda: (normal(1, 2, 3, 2), [6, 4], 2.0, 2.0)),
    Case(aten.upsample_nearest3d.vec, lambda: (normal(1, 1, 2, 3, 2), None, [2.0, 1.0, 1.5])),
    Case(aten._upsample_nearest_exact1d.vec, lambda: (normal(2, 2, 3), None, [2.0])),
    Case(aten._upsample_nearest_exact2d.vec, lambda: (normal(1, 2, 3, 2), [4, 5], None)),
    Case(aten._upsample_nearest_exact3d.vec, lambda: (normal(1, 1, 2, 3, 2), None, [2.0, 1.0, 1.5])),
    Case(aten.upsample_linear1d.vec, lambda: (normal(2, 2, 4), None, False, [1.7])),
    Case(aten.upsample_linear1d.default, lambda: (normal(2, 2, 4), [7], True)),
    Case(aten.upsample_bilinear2d.vec, lambda: (normal(1, 2, 4, 3), None, False, [2.0, 1.5])),
    Case(aten.upsample_bilinear2d.default, lambda: (normal(1, 2, 4, 3), [3, 6], True)),
    Case(
        aten.upsample_bilinear2d.default,
        lambda: (normal(1, 2, 4, 3), [7, 7], False, 1.9, 2.5),
        label="scales",
    ),
    Case(aten.upsample_trilinear3d.vec, lambda: (normal(1, 1, 2, 3, 2), [3, 4, 2], False, None)),
    Case(aten.upsample_bicubic2d.vec, lambda: (normal(1, 2, 4, 5), None, False, [2.0, 1.5])),
    Case(aten.upsample_bicubic2d.default, lambda: (normal(1, 2, 4, 5), [6, 3], True)),
    Case(aten._upsample_bilinear2d_aa.vec, lambda: (normal(1, 1, 6, 5), [3, 4], False, None), draws=10_000),
    Case(aten._upsample_bicubic2d_aa.vec, lambda: (normal(1, 1, 6, 5), [3, 7], False, None), draws=10_000),
    Case(aten.grid_sampler.default, lambda: (normal(2, 2, 4, 3), grid(2, 3, 2, 2), 0, 0, False)),
    Case(aten.grid_sampler.default, lambda: (normal(1, 2, 4, 3), grid(1, 3, 2, 2), 0, 1, True), label="border"),
    Case(
        aten.grid_sampler.default,
        lambda: (normal(1, 2, 4, 3), grid(1, 3, 2, 2), 1, 0, False),
        label="nearest",
    ),
    # a place with a std of 0.2 pixels
    Case(
        aten.grid_sampler.default,
        lambda: (normal(1, 2, 8, 8), normal(1, 4, 4, 2, spread=0.4, scale=0.05), 0, 0, False),
        mean_error=0.06,
        std_error=0.07,
        label="random-place",
    ),
    Case(aten.grid_sampler_2d.default, lambda: (normal(1, 2, 4, 3), grid(1, 3, 2, 2), 0, 0, True)),
    Case(aten.grid_sampler_3d.default, lambda: (normal(1, 1, 3, 4, 3), grid(1, 2, 2, 2, 3), 0, 0, False)),
    Case(aten.col2im.default, lambda: (normal(2, 8, 8), [4, 5], [2, 2], [1, 1], [0, 0], [2, 1])),
    Case(aten.col2im.default, lambda: (normal(8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), label="unbatched"),
]
