"""What the moment kernel can compute: functions of random numbers as an operation code and eight numbers.

Every function of one argument is `gain f(rate x + shift) + offset` behind the maximum of k equal Gaussians (mean + e
std, variance times d; e = 0, d = 1 where there is none), with few base functions f: tanh x = 2 S(2x) - 1, erf x =
2 Phi(sqrt 2 x) - 1, softplus with beta, hard sigmoid and one-sided clamps are others in disguise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....gaussian.activations import KNOTS

LINEAR, TWO_SLOPES, CLAMP, ADD, MUL, SKIP, SLOPE = range(7)
SIGMOID, NORMAL_CDF, SILU, GELU, GELU_TANH, SOFTPLUS, ELU, MISH, HARDSWISH = range(7, 16)
PAIRS = (ADD, MUL, SKIP, SLOPE)  # of two arguments
FIRST_INTEGRATED = SIGMOID
OPERATIONS = 16
PANELS = 6  # at most five knots

# Where an integrated base function bends or has a kink; panels of nodes end there.
BENDS: dict[int, tuple[float, ...]] = {
    SIGMOID: KNOTS["sigmoid"],
    NORMAL_CDF: tuple(math.sqrt(2.0) * x for x in KNOTS["erf"]),
    SILU: KNOTS["sigmoid"],
    GELU: KNOTS["gelu"],
    GELU_TANH: KNOTS["gelu"],
    SOFTPLUS: KNOTS["sigmoid"],
    ELU: KNOTS["elu"],
    MISH: KNOTS["mish"],
    HARDSWISH: KNOTS["hardswish"],
}


@dataclass(frozen=True)
class Instruction:
    """One operation on lanes, the same for all components of a template."""

    code: int
    e: float = 0.0
    d: float = 1.0
    rate: float = 1.0
    shift: float = 0.0
    gain: float = 1.0
    offset: float = 0.0
    first: float = 0.0
    second: float = 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """The row of the parameter table."""
        return (self.e, self.d, self.rate, self.shift, self.gain, self.offset, self.first, self.second)

    @property
    def arity(self) -> int:
        """Number of random arguments."""
        return 2 if self.code in PAIRS else 1


def _linear(mean: float, constant: float, var: float, squared_mean: float) -> Instruction:
    """mean m + constant; var v + squared_mean m²."""
    return Instruction(LINEAR, rate=mean, shift=constant, gain=var, offset=squared_mean)


def _clamp(low: float | None = None, high: float | None = None) -> Instruction:
    bottom = -math.inf if low is None else low
    top = math.inf if high is None else high
    if math.isinf(bottom) and math.isinf(top):
        return _linear(1.0, 0.0, 1.0, 0.0)
    if math.isinf(bottom):
        return Instruction(TWO_SLOPES, shift=-top, offset=top, second=1.0)
    if math.isinf(top):
        return Instruction(TWO_SLOPES, shift=-bottom, offset=bottom, first=1.0)
    return Instruction(CLAMP, first=min(bottom, top), second=top)


def _dropout(p: float) -> Instruction:
    return _linear(1.0, 0.0, 1.0 / (1.0 - p), p / (1.0 - p))


def _softplus(beta: float = 1.0) -> Instruction:
    return Instruction(SOFTPLUS, rate=beta, gain=1.0 / beta)


def _elu(alpha: float = 1.0, scale: float = 1.0, rate: float = 1.0) -> Instruction:
    return Instruction(ELU, rate=rate, first=scale / rate, second=scale * alpha)


BUILDERS: dict[str, Callable[..., Instruction]] = {
    "two_slopes": lambda p, n: Instruction(TWO_SLOPES, first=p, second=n),
    "clamp": _clamp,
    "affine": lambda a, b: _linear(a, b, a * a, 0.0),
    "gain": lambda a, b: _linear(a, 0.0, b, 0.0),
    "maximum": lambda e, d: Instruction(LINEAR, e=e, d=d, offset=0.0),
    "dropout": _dropout,
    "sigmoid": lambda: Instruction(SIGMOID),
    "tanh": lambda: Instruction(SIGMOID, rate=2.0, gain=2.0, offset=-1.0),
    "silu": lambda: Instruction(SILU),
    "gelu": lambda: Instruction(GELU),
    "gelu_tanh": lambda: Instruction(GELU_TANH),
    "softplus": _softplus,
    "elu": _elu,
    "mish": lambda: Instruction(MISH),
    "erf": lambda: Instruction(NORMAL_CDF, rate=math.sqrt(2.0), gain=2.0, offset=-1.0),
    "hardswish": lambda: Instruction(HARDSWISH),
    "hardsigmoid": lambda: Instruction(CLAMP, shift=3.0, gain=1.0 / 6.0, first=0.0, second=6.0),
    "add": lambda alpha: Instruction(ADD, first=alpha),
    "mul": lambda: Instruction(MUL),
    "slope": lambda: Instruction(SLOPE),
    "skip": lambda skew, fall, split: Instruction(SKIP, rate=split, first=skew, second=fall),
}


def known(kernel: Sequence[str | float | None] | None) -> bool:
    """Whether `encode` can turn a `Function.kernel` into an instruction."""
    if not kernel:
        return False
    if kernel[0] == "compose":
        inner = kernel[4] if len(kernel) > 4 else None
        return kernel[1] == "maximum" and inner in BUILDERS and inner not in ("maximum", "add", "mul", "skip", "slope")
    return kernel[0] in BUILDERS


def encode(kernel: Sequence[str | float | None]) -> Instruction:
    """The instruction of a `Function.kernel`.

    Raises:
        ValueError: If no kernel computes it.
    """
    if not known(kernel):
        raise ValueError(f"No kernel computes {tuple(kernel)}.")
    if kernel[0] != "compose":
        return BUILDERS[str(kernel[0])](*kernel[1:])
    inner = BUILDERS[str(kernel[4])](*kernel[5:])
    return Instruction(inner.code, float(kernel[2] or 0.0), float(kernel[3] or 0.0), *inner.numbers[2:])
