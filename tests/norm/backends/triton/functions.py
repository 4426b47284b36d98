"""Every function the kernels know, with varprop's own float64 rule for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from varprop.gaussian import activations as act
from varprop.gaussian.normal import safe_sqrt
from varprop.gaussian.rectifier import clamp, two_slopes
from varprop.norm.fold.layout import Function
from varprop.norm.lowering import AFTER_SKIP, LEARNED_SLOPE


def of_std(rule: Callable, *numbers) -> Callable:
    """A rule of mean and standard deviation as one of mean and variance."""
    return lambda x: rule(x[0], safe_sqrt(x[1]), *numbers)


def maximum(e: float, d: float) -> Callable:
    return lambda x: (x[0] + e * safe_sqrt(x[1]), d * x[1])


def after_maximum(e: float, d: float, rule: Callable) -> Callable:
    return lambda x: rule(maximum(e, d)(x))


def coupled(x, y):
    """Some differentiable function of the moments of two arguments."""
    return torch.sin(x[0]) * y[0] + 0.2 * x[1] * y[0], x[1] + 0.5 * y[1] * x[0].square()


RULES: dict[tuple, Callable] = {
    ("two_slopes", 1.0, 0.0): of_std(two_slopes, 1.0, 0.0),
    ("two_slopes", 1.03, 0.03): of_std(two_slopes, 1.03, 0.03),
    ("two_slopes", 1.0, -1.0): of_std(two_slopes, 1.0, -1.0),
    ("clamp", 0.0, 6.0): of_std(clamp, 0.0, 6.0),
    ("clamp", -1.0, 1.0): of_std(clamp, -1.0, 1.0),
    ("clamp", -0.5, float("inf")): of_std(clamp, -0.5, None),
    ("clamp", -float("inf"), 2.0): of_std(clamp, None, 2.0),
    ("affine", -2.0, 3.0): lambda x: (-2.0 * x[0] + 3.0, 4.0 * x[1]),
    ("gain", 1.0, 0.25): lambda x: (x[0], 0.25 * x[1]),
    ("maximum", 1.03, 0.49): maximum(1.03, 0.49),
    ("dropout", 0.3): lambda x: (x[0], (x[1] + 0.3 * x[0] ** 2) / 0.7),
    ("sigmoid",): of_std(act.sigmoid),
    ("tanh",): of_std(act.tanh),
    ("silu",): of_std(act.silu),
    ("gelu",): of_std(act.gelu),
    ("gelu_tanh",): of_std(act.gelu_tanh),
    ("softplus", 1.0): of_std(act.softplus),
    ("softplus", 2.5): of_std(act.softplus, 2.5),
    ("elu", 1.0, 1.0, 1.0): of_std(act.elu),
    ("elu", act.SELU_ALPHA, act.SELU_SCALE, 1.0): of_std(act.selu),
    ("elu", 2.0, 1.0, 0.5): of_std(act.celu, 2.0),
    ("mish",): of_std(act.mish),
    ("erf",): of_std(act.erf),
    ("hardswish",): of_std(act.hardswish),
    ("hardsigmoid",): of_std(act.hardsigmoid),
    ("compose", "maximum", 1.03, 0.49, "two_slopes", 1.0, 0.0): after_maximum(1.03, 0.49, of_std(two_slopes, 1.0, 0.0)),
    ("compose", "maximum", 1.03, 0.49, "sigmoid"): after_maximum(1.03, 0.49, of_std(act.sigmoid)),
    ("compose", "maximum", 1.03, 0.49, "silu"): after_maximum(1.03, 0.49, of_std(act.silu)),
    ("compose", "maximum", 1.03, 0.49, "gelu"): after_maximum(1.03, 0.49, of_std(act.gelu)),
    ("compose", "maximum", 1.03, 0.49, "hardswish"): after_maximum(1.03, 0.49, of_std(act.hardswish)),
}


def function(*kernel) -> Function:
    """The function of a kernel."""
    return Function(str(kernel), RULES[kernel], kernel)


RELU = function("two_slopes", 1.0, 0.0)
MAX_RELU = function("compose", "maximum", 1.03, 0.49, "two_slopes", 1.0, 0.0)
SIGMOID = function("sigmoid")
DROPOUT = function("dropout", 0.3)
ADD = Function("add", lambda x, y: (x[0] + y[0], x[1] + y[1]), ("add", 1.0), 2)
SUBTRACT = Function("sub", lambda x, y: (x[0] - 0.5 * y[0], x[1] + 0.25 * y[1]), ("add", -0.5), 2)
MUL = Function(
    "mul",
    lambda x, y: (x[0] * y[0], x[1] * y[1] + x[0] ** 2 * y[1] + y[0] ** 2 * x[1]),
    ("mul",),
    2,
)
# These have no kernel.
SOFTSIGN = Function("softsign", of_std(act.softsign))
COUPLED = Function("coupled", coupled, None, 2)
SKIP = AFTER_SKIP
SLOPE = LEARNED_SLOPE
