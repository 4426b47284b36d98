"""Functions of a Gaussian (or log-normal) variable whose moments have closed forms."""

import math

import torch
from torch import Tensor

from .normal import Pair, Scalar, as_tensor, in_float64


def _exp(x: Tensor) -> Tensor:
    """exp that stops at the largest float instead of inf, so that 0 * exp(x) is 0."""
    return torch.exp(x.clamp(max=math.log(torch.finfo(x.dtype).max) - 1e-4))


@in_float64
def power(mean: Tensor, std: Tensor, n: int) -> Pair:
    """f(x) = x^n for an integer n >= 0; exact for Gaussian x.

    Raw moments M_j = mean M_{j-1} + (j-1) std^2 M_{j-2}; v = sum_{k>=1} C(n,k)^2 k! std^{2k} M_{n-k}^2, the
    squared Hermite coefficients of f (Mehler; mathematics.md, section 9): every term is positive.
    """
    var = std.square()
    raw = [mean.pow(0), mean]
    for j in range(2, n + 1):
        raw.append(mean * raw[-1] + (j - 1) * var * raw[-2])
    v = 0.0 * std
    for k in range(n, 0, -1):
        weight = math.comb(n, k) ** 2 * math.factorial(k)
        factor = float(weight) if weight.bit_length() <= 1023 else math.inf
        v = v + factor * (std**k * raw[n - k]).square()
    return raw[n], v


@in_float64
def exp(mean: Tensor, std: Tensor) -> Pair:
    """f(x) = e^x: m = exp(mean + var/2), v = exp(2 mean + 2 var) (1 - exp(-var)); exact for Gaussian x."""
    var = std.square()
    return _exp(mean + 0.5 * var), _exp(2.0 * (mean + var)) * -torch.expm1(-var)


@in_float64
def expm1(mean: Tensor, std: Tensor) -> Pair:
    """f(x) = e^x - 1: m = expm1(mean + var/2), v as for exp; exact for Gaussian x."""
    var = std.square()
    limit = math.log(torch.finfo(mean.dtype).max) - 1e-4
    return torch.expm1((mean + 0.5 * var).clamp(max=limit)), _exp(2.0 * (mean + var)) * -torch.expm1(-var)


def _wave(value: Tensor, slope: Tensor, var: Tensor) -> Pair:
    """Moments of a sine wave from its value and slope at the mean."""
    q, e = torch.exp(-var), -torch.expm1(-var)
    return torch.exp(-0.5 * var) * value, 0.5 * e * (e + 2.0 * q * slope.square())


@in_float64
def sin(mean: Tensor, std: Tensor) -> Pair:
    """m = e^{-var/2} sin mean, v = E (E + 2 q cos^2 mean) / 2, q = e^{-var}, E = 1 - q; exact."""
    return _wave(torch.sin(mean), torch.cos(mean), std.square())


@in_float64
def cos(mean: Tensor, std: Tensor) -> Pair:
    """m = e^{-var/2} cos mean, v = E (E + 2 q sin^2 mean) / 2, q = e^{-var}, E = 1 - q; exact."""
    return _wave(torch.cos(mean), torch.sin(mean), std.square())


def _log_scale(mean: Tensor, std: Tensor) -> Pair:
    """log |mean| and tau^2 = log(1 + var / mean^2) of the matching log-normal."""
    size = mean.abs().clamp(min=torch.finfo(mean.dtype).tiny ** 0.25)
    return torch.log(size), torch.log1p((std / size).square())


@in_float64
def lognormal_power(mean: Tensor, std: Tensor, p: Scalar) -> Pair:
    """f(x) = x^p of a positive x, taken as the log-normal of the same mean and variance (an assumption).

    With tau^2 = log(1 + var/mean^2): m = mean^p exp(p(p-1) tau^2 / 2), v = m^2 expm1(p^2 tau^2). A variable
    of negative mean is taken as minus a log-normal: odd integer powers change sign, other powers see |x|.
    """
    p = as_tensor(p, mean)
    log, tau2 = _log_scale(mean, std)
    flip = (mean < 0.0) & (torch.remainder(p, 2.0) == 1.0)
    m = _exp(p * log + 0.5 * p * (p - 1.0) * tau2)
    v = _exp(2.0 * p * log + p * (2.0 * p - 1.0) * tau2) * -torch.expm1(-p * p * tau2)
    return torch.where(flip, -m, m), v


@in_float64
def lognormal_log(mean: Tensor, std: Tensor) -> Pair:
    """f(x) = log x of a positive x, taken as log-normal: m = log mean - tau^2/2, v = tau^2."""
    log, tau2 = _log_scale(mean, std)
    return log - 0.5 * tau2, tau2
