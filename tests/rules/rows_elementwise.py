"""Rows for functions of one random value."""

from __future__ import annotations

from typing import Any

import torch

from varprop.graph import ops

from .case import Case, normal, weight

aten = torch.ops.aten


def plain(op: Any, *constants: Any, label: str = "", **settings: Any) -> Case:
    """A function of moderate Gaussians with fixed further arguments."""
    return Case(op, lambda: (normal(3, 4), *constants), label=label, **settings)


def positive(op: Any, *constants: Any, **settings: Any) -> Case:
    """A function of variables that are as good as surely positive."""
    return Case(op, lambda: (normal(3, 4, spread=0.3, shift=4.0, scale=0.3), *constants), **settings)


rows = [
    *(plain(op) for op in (
        aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default,
        aten.lift_fresh_copy.default, aten.positive.default,
    ) if op is not aten.detach.default),
    plain(aten.detach.default, differentiable=False),
    Case(aten._to_copy.default, lambda: (normal(3, 4),), {"dtype": torch.float64}),
    Case(aten.to.dtype, lambda: (normal(3, 4), torch.float64)),
    plain(aten.nan_to_num.default),
    plain(aten.special_expit.default),
    plain(aten.special_ndtr.default),
    plain(aten.special_log_ndtr.default),
    plain(aten.asinh.default),
    plain(aten.sinc.default),
    *(
        Case(op.default, lambda: (normal(3, 4, spread=0.02, shift=0.4, scale=0.02),))
        for op in (aten.acos, aten.asin, aten.erfinv, aten.logit)
    ),
    plain(aten.clip.default, -0.5, 2.0),
    positive(aten.log2.default, mean_error=2e-2, std_error=3e-2),
    plain(aten.relu.default),
    plain(aten.relu6.default),
    plain(aten.abs.default),
    plain(aten.hardsigmoid.default),
    plain(aten.hardswish.default),
    plain(aten.sigmoid.default),
    plain(aten.tanh.default),
    plain(aten.silu.default),
    plain(aten.mish.default),
    plain(aten.log_sigmoid.default),
    plain(aten.erf.default),
    plain(aten.erfc.default),
    Case(aten.exp.default, lambda: (normal(3, 4, scale=0.5),)),
    Case(aten.expm1.default, lambda: (normal(3, 4, scale=0.5),)),
    Case(aten.exp2.default, lambda: (normal(3, 4, scale=0.5),)),
    plain(aten.square.default),
    plain(aten.sin.default),
    plain(aten.cos.default),
    Case(aten.sinh.default, lambda: (normal(3, 4, scale=0.5),)),
    Case(aten.cosh.default, lambda: (normal(3, 4, scale=0.5),)),
    plain(aten.atan.default),
    plain(ops.softsign),
    plain(aten.sign.default),
    plain(aten.sgn.default),
    plain(aten.heaviside.default, torch.tensor(0.0, dtype=torch.float64)),
    plain(aten.leaky_relu.default, 0.2),
    Case(aten.prelu.default, lambda: (normal(2, 4, 3), weight(4))),
    Case(aten.prelu.default, lambda: (normal(2, 4), weight(1)), label="single"),
    Case(aten._prelu_kernel.default, lambda: (normal(2, 4, 3), weight(4, 1))),
    plain(aten.clamp.default, -0.5, 2.0),
    plain(aten.clamp.default, -0.5, label="one-sided"),
    plain(aten.hardtanh.default, -1.0, 1.5),
    plain(aten.clamp_min.default, 0.3),
    plain(aten.clamp_max.default, 0.3),
    plain(aten.gelu.default),
    Case(aten.gelu.default, lambda: (normal(3, 4),), {"approximate": "tanh"}, label="tanh"),
    plain(aten.elu.default, 1.3),
    plain(aten.selu.default),
    plain(aten.celu.default, 0.5),
    plain(aten.softplus.default),
    plain(aten.softplus.default, 2.5, label="beta"),
    plain(aten.hardshrink.default, 0.5),
    plain(aten.softshrink.default, 0.5),
    plain(aten.threshold.default, 0.3, -0.7),
    # log-normal matching of a Gaussian with std about 0.07 of its mean
    positive(aten.sqrt.default, mean_error=2e-2, std_error=2e-2),
    positive(aten.rsqrt.default, mean_error=2e-2, std_error=4e-2),
    positive(aten.reciprocal.default, mean_error=2e-2, std_error=5e-2),
    positive(aten.log.default, mean_error=2e-2, std_error=3e-2),
    positive(aten.log10.default, mean_error=2e-2, std_error=3e-2),
    plain(aten.float_power.Tensor_Scalar, 2),
    positive(aten.log1p.default, mean_error=2e-2, std_error=3e-2),
    plain(aten.pow.Tensor_Scalar, 3, label="cube"),
    plain(aten.pow.Tensor_Scalar, 2, label="square"),
    positive(aten.pow.Tensor_Scalar, 0.75, label="fraction", mean_error=2e-2, std_error=3e-2),
    plain(aten.pow.Tensor_Tensor, torch.tensor([0, 1, 2, 3]), label="whole tensor"),
    Case(aten.pow.Scalar, lambda: (2.0, normal(3, 4, scale=0.5)), label="exponent"),
]  # fmt: skip
