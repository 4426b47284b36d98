"""Every function of one Gaussian variable, by its name in the golden file, and the golden values."""

import json
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from varprop.gaussian import activations, rectifier

GOLDEN = {
    "relu": activations.relu,
    "lrelu_paper": partial(rectifier.two_slopes, positive=1.03, negative=0.03),
    "leaky_relu_0.01": activations.leaky_relu,
    "leaky_relu_0.2": partial(activations.leaky_relu, slope=0.2),
    "prelu_0.25": partial(activations.leaky_relu, slope=0.25),
    "prelu_-0.5": partial(activations.leaky_relu, slope=-0.5),
    "relu6": partial(rectifier.clamp, low=0.0, high=6.0),
    "hardtanh": partial(rectifier.clamp, low=-1.0, high=1.0),
    "clamp_-0.5_2": partial(rectifier.clamp, low=-0.5, high=2.0),
    "abs": activations.abs,
    "hardsigmoid": activations.hardsigmoid,
    "hardswish": activations.hardswish,
    "elu": activations.elu,
    "selu": activations.selu,
    "celu_0.5": partial(activations.celu, alpha=0.5),
    "step": rectifier.step,
    "sign": rectifier.sign,
    "exp": activations.exp,
    "square": partial(activations.power, n=2),
    "sin": activations.sin,
    "cos": activations.cos,
    "sigmoid": activations.sigmoid,
    "tanh": activations.tanh,
    "silu": activations.silu,
    "gelu": activations.gelu,
    "gelu_tanh": activations.gelu_tanh,
    "softplus": activations.softplus,
    "logsigmoid": activations.logsigmoid,
    "mish": activations.mish,
    "erf": activations.erf,
    "softsign": activations.softsign,
}
OTHERS = {
    "identity": partial(rectifier.two_slopes, positive=1.0, negative=1.0),
    "two_negative_slopes": partial(rectifier.two_slopes, positive=-0.3, negative=-2.0),
    "clamp_below": partial(rectifier.clamp, low=-0.5, high=None),
    "clamp_above": partial(rectifier.clamp, low=None, high=0.5),
    "clamp_nowhere": partial(rectifier.clamp, low=None, high=float("inf")),
    "clamp_point": partial(rectifier.clamp, low=0.5, high=0.5),
    "expm1": activations.expm1,
    "cube": partial(activations.power, n=3),
    "fifth": partial(activations.power, n=5),
    "one": partial(activations.power, n=0),
    "elu_scaled": partial(activations.elu, alpha=1.5, scale=0.7, input_scale=2.0),
    "softplus_beta": partial(activations.softplus, beta=3.0),
    "softplus_threshold": partial(activations.softplus, threshold=2.0),
    "softshrink": activations.softshrink,
    "hardshrink": activations.hardshrink,
    "threshold": partial(activations.threshold, threshold=0.1, value=-2.0),
    "atan": activations.atan,
}
LOGNORMAL = {
    "reciprocal": partial(activations.lognormal_power, p=-1.0),
    "rsqrt": partial(activations.lognormal_power, p=-0.5),
    "sqrt": partial(activations.lognormal_power, p=0.5),
    "log": activations.lognormal_log,
}
ALL = {**GOLDEN, **OTHERS}


@cache
def golden() -> dict:
    return json.loads((Path(__file__).parents[1] / "golden" / "activations.json").read_text())


def numbers(texts: list[str]) -> Tensor:
    return torch.tensor([float(t) for t in texts], dtype=torch.float64)
