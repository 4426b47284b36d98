"""Test rows for `varprop.rules.reduction`."""

import torch

from varprop.graph import ops

from .case import Case, normal

aten = torch.ops.aten

rows = [
    Case(aten.sum.default, lambda: (normal(3, 4),)),
    Case(aten.sum.dim_IntList, lambda: (normal(2, 3, 4), [-1, 0])),
    Case(aten.sum.dim_IntList, lambda: (normal(2, 3), [], True), label="all"),
    Case(ops.position_average, lambda: (normal(2, 3, 1, 1), [2, 3], True)),
    Case(ops.position_average, lambda: (normal(2, 1, 3), [1], False), label="tokens"),
    Case(aten.mean.default, lambda: (normal(3, 4),)),
    Case(aten.mean.dim, lambda: (normal(2, 3, 4), [1], True)),
    Case(aten.mean.dim, lambda: (normal(2, 3), None), label="all"),
    Case(aten.nansum.default, lambda: (normal(2, 3, 4), [1])),
    Case(aten.nanmean.default, lambda: (normal(2, 3, 4), [0, -1], True)),
    Case(aten.cumsum.default, lambda: (normal(2, 5), -1)),
    Case(aten.amax.default, lambda: (normal(2, 3, 4), [-1, 0])),
    Case(aten.amax.default, lambda: (normal(3, 4), [1], True), label="keepdim"),
    Case(aten.amin.default, lambda: (normal(2, 3, 4), [1, 2], True)),
    Case(aten.max.default, lambda: (normal(2, 3),)),
    Case(aten.min.default, lambda: (normal(2, 3),)),
    Case(aten.max.dim, lambda: (normal(2, 3, 4), 1, True)),
    Case(aten.min.dim, lambda: (normal(2, 3, 4), -1)),
    Case(aten.aminmax.default, lambda: (normal(2, 3),), {"dim": 1}),
    Case(aten.prod.default, lambda: (normal(2, 2, shift=1.0, scale=0.3),)),
    Case(aten.prod.dim_int, lambda: (normal(2, 4, shift=1.0, scale=0.3), -1, True)),
    Case(aten.var.default, lambda: (normal(2, 3),)),
    Case(aten.var.dim, lambda: (normal(2, 3, 4), [1, 2], False, True)),
    Case(aten.var.correction, lambda: (normal(2, 5), [1]), {"correction": 1.5}),
    Case(aten.std.default, lambda: (normal(3, 4),), mean_error=0.03, std_error=0.04),
    Case(aten.std.dim, lambda: (normal(4, 3), [-1]), mean_error=0.03, std_error=0.04),
    Case(aten.std.correction, lambda: (normal(3, 16), [1]), {"correction": 0}, mean_error=0.03, std_error=0.04),
    Case(aten.var_mean.default, lambda: (normal(2, 3),)),
    Case(aten.var_mean.dim, lambda: (normal(2, 4), [1])),
    Case(aten.var_mean.correction, lambda: (normal(2, 4), [1]), {"correction": 0, "keepdim": True}),
    Case(aten.std_mean.default, lambda: (normal(3, 4),), mean_error=0.03, std_error=0.04),
    Case(aten.std_mean.dim, lambda: (normal(3, 4), [1]), mean_error=0.03, std_error=0.04),
    Case(
        aten.std_mean.correction,
        lambda: (normal(3, 4), [1]),
        {"keepdim": True},
        mean_error=0.03,
        std_error=0.04,
    ),
]
