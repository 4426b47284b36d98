"""Test rows for `varprop.rules.matrices`."""

from __future__ import annotations

import torch

from varprop.graph import ops

from .case import Case, normal, weight

aten = torch.ops.aten

rows = [
    Case(aten.inner.default, lambda: (normal(3, 4), normal(2, 4))),
    Case(aten.inner.default, lambda: (normal(4), weight(4)), label="vectors"),
    Case(aten.inner.default, lambda: (normal(3, 4), weight(3, 3, 4)), label="more-axes"),
    Case(aten.inner.default, lambda: (normal(3, 4), weight(4)), label="vector-behind"),
    Case(aten.kron.default, lambda: (normal(2, 3), normal(3, 2))),
    Case(aten.addr.default, lambda: (normal(3, 2), normal(3), weight(2)), {"beta": 0.5, "alpha": -2}),
    Case(aten.addbmm.default, lambda: (normal(3, 2), normal(2, 3, 4), normal(2, 4, 2)), {"beta": 0.5, "alpha": -2}),
    Case(aten.linalg_multi_dot.default, lambda: ([normal(3, 4), normal(4, 2)],)),
    Case(
        aten.chain_matmul.default,
        lambda: ([weight(3, 4), weight(4, 2), normal(2, 5)],),
        label="constants",
        draws=10_000,
    ),
    Case(aten.linalg_cross.default, lambda: (normal(2, 3), normal(2, 3))),
    Case(aten.linalg_cross.default, lambda: (normal(3, 2), weight(3, 2)), {"dim": 0}, label="constant"),
    Case(aten.cumprod.default, lambda: (normal(2, 4, shift=1.0, scale=0.3), 1)),
    Case(aten.diff.default, lambda: (normal(2, 4, 3), 1, 1)),
    Case(aten.diff.default, lambda: (normal(2, 4), 1, -1, normal(2, 1), weight(2, 2)), label="longer"),
    Case(ops.fourier, lambda: (normal(2, 4, 5), [1, 2], "real")),
    Case(ops.fourier, lambda: (normal(2, 4, 5), [2], "imag"), label="imaginary"),
]
