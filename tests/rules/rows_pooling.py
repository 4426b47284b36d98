"""Test rows for `varprop.rules.pooling`."""

import torch

from .case import Case, normal

aten = torch.ops.aten

rows = [
    Case(aten.avg_pool1d.default, lambda: (normal(2, 2, 7), [3], [2], [1])),
    Case(aten.avg_pool1d.default, lambda: (normal(2, 6), [3], [2], [1], True, False), label="ceil"),
    Case(aten.avg_pool2d.default, lambda: (normal(2, 3, 4, 6), [2, 2])),
    Case(aten.avg_pool2d.default, lambda: (normal(1, 2, 5, 6), [3, 2], [2, 2], [1, 1], True), label="ceil"),
    Case(
        aten.avg_pool2d.default,
        lambda: (normal(1, 2, 5, 6), [3, 3], [2, 2], [1, 1], False, False),
        label="no-pad",
    ),
    Case(
        aten.avg_pool2d.default,
        lambda: (normal(1, 2, 5, 6), [3, 3], [2, 2], [1, 1], True, False, 5),
        label="divisor",
    ),
    Case(aten.avg_pool3d.default, lambda: (normal(1, 2, 3, 4, 4), [2, 2, 2], [1, 2, 2], [1, 0, 1])),
    Case(aten.adaptive_avg_pool1d.default, lambda: (normal(2, 2, 7), [3])),
    Case(aten.adaptive_avg_pool2d.default, lambda: (normal(1, 2, 5, 3), [3, 4])),
    Case(aten.adaptive_avg_pool2d.default, lambda: (normal(1, 2, 4, 4), [1, 1]), label="global"),
    Case(aten.adaptive_avg_pool3d.default, lambda: (normal(1, 2, 3, 4, 2), [2, 2, 1])),
    Case(aten._adaptive_avg_pool2d.default, lambda: (normal(1, 2, 5, 4), [3, 2])),
    Case(aten._adaptive_avg_pool3d.default, lambda: (normal(1, 2, 3, 4, 2), [2, 2, 1])),
    Case(aten.max_pool1d.default, lambda: (normal(1, 2, 7), [3], [2], [1])),
    Case(aten.max_pool2d.default, lambda: (normal(1, 2, 4, 4), [2, 2])),
    Case(aten.max_pool2d.default, lambda: (normal(1, 2, 5, 5), [3, 3], [2, 2], [1, 1]), label="resnet"),
    Case(
        aten.max_pool2d.default,
        lambda: (normal(2, 6, 5), [3, 2], [2, 2], [1, 0], [1, 2], True),
        label="ceil-dilated",
    ),
    Case(aten.max_pool3d.default, lambda: (normal(1, 1, 3, 3, 4), [2, 2, 2], [1, 2, 2], [0, 1, 0])),
    Case(aten.max_pool1d_with_indices.default, lambda: (normal(1, 2, 6), [2])),
    Case(aten.max_pool2d_with_indices.default, lambda: (normal(1, 2, 4, 5), [2, 3], [2, 1])),
    Case(aten.max_pool3d_with_indices.default, lambda: (normal(1, 1, 2, 4, 2), [2, 2, 2])),
    Case(aten.adaptive_max_pool1d.default, lambda: (normal(1, 2, 7), [3])),
    Case(aten.adaptive_max_pool2d.default, lambda: (normal(1, 2, 5, 3), [2, 2])),
    Case(aten.adaptive_max_pool3d.default, lambda: (normal(1, 1, 3, 2, 4), [2, 1, 2])),
]
