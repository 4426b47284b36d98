"""Symmetries that tie the functions to one another, at random points."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from varprop.gaussian import activations, maximum, rectifier, softmax

settings.register_profile("gaussian", max_examples=40, deadline=None)
settings.load_profile("gaussian")

MEAN = st.floats(-40.0, 40.0)
STD = st.floats(1e-6, 30.0)


def _t(*values: float) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(v, dtype=torch.float64) for v in values)


def _same(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12 * scale)


@given(MEAN, STD)
def test_rectifiers(mean: float, std: float) -> None:
    """relu(x) - relu(-x) = x; x^2 = relu(x)^2 + relu(-x)^2; |x| = relu(x) + relu(-x)."""
    scale = abs(mean) + std
    m, s = _t(mean, std)
    (up, v_up), (down, v_down) = activations.relu(m, s), activations.relu(-m, s)
    _same(up - down, m, scale)
    _same(v_up + v_down + up**2 + down**2, m**2 + s**2, scale**2)
    absolute, v = activations.abs(m, s)
    _same(absolute, up + down, scale)
    _same(v, v_up + v_down - 2 * up * down, scale**2)


@given(MEAN, STD)
def test_odd_and_reflected(mean: float, std: float) -> None:
    m, s = _t(mean, std)
    for f in (activations.tanh, activations.erf, activations.softsign, activations.atan, rectifier.sign):
        (a, v), (b, w) = f(m, s), f(-m, s)
        _same(a, -b)
        _same(v, w)
    for f in (activations.sigmoid, activations.hardsigmoid, rectifier.step):
        (a, v), (b, w) = f(m, s), f(-m, s)
        _same(a, 1 - b)
        _same(v, w)
    for f in (activations.silu, activations.gelu, activations.softplus):
        _same(f(m, s)[0] - f(-m, s)[0], m, 1 + abs(mean) + std)


@given(MEAN, STD)
def test_scalings(mean: float, std: float) -> None:
    """CELU and softplus are scaled copies of themselves; tanh x = 2 S(2x) - 1."""
    m, s = _t(mean, std)
    one, v = activations.celu(m / 0.5, s / 0.5)
    half, w = activations.celu(m, s, 0.5)
    _same(0.5 * one, half, abs(mean) + std)
    _same(0.25 * v, w, (abs(mean) + std) ** 2)
    th, v = activations.tanh(m, s)
    sig, w = activations.sigmoid(2 * m, 2 * s)
    _same(th, 2 * sig - 1)
    torch.testing.assert_close(v, 4 * w, rtol=1e-8, atol=1e-24)


@given(MEAN, st.floats(0.0, 30.0))
def test_closed_forms(mean: float, std: float) -> None:
    """sin^2 + cos^2 = 1, and x^3 from the moments of x, x^2 by its definition."""
    m, s = _t(mean, std)
    (a, v), (b, w) = activations.sin(m, s), activations.cos(m, s)
    _same(a**2 + v + b**2 + w, torch.ones_like(m))
    cube, v3 = activations.power(m, s, 3)
    _same(cube, m**3 + 3 * m * s**2)
    _same(v3, 9 * m**4 * s**2 + 36 * m**2 * s**4 + 15 * s**6)


@given(MEAN, STD, MEAN, STD)
def test_maximum_of_two(mean1: float, std1: float, mean2: float, std2: float) -> None:
    """max + min = sum, max of equals is exact, and the pair agrees with the k-fold integral."""
    m1, s1, m2, s2 = _t(mean1, std1, mean2, std2)
    scale = abs(mean1) + abs(mean2) + std1 + std2
    largest, v = maximum.pair(m1, s1**2, m2, s2**2)
    smallest, w = maximum.pair(-m1, s1**2, -m2, s2**2)
    _same(largest - smallest, m1 + m2, scale)
    _same(v + w + largest**2 + smallest**2, m1**2 + m2**2 + s1**2 + s2**2, scale**2)
    k, u = maximum.independent(torch.stack([m1, m2]), torch.stack([s1, s2]), 0)
    assert abs(k - largest) <= 1e-7 * v.sqrt() + 1e-12 * scale
    assert abs(u - v) <= 1e-6 * v + 1e-15 * scale**2


@settings(max_examples=15)
@given(st.floats(-8.0, 8.0), st.floats(0.0, 4.0), st.floats(0.0, 4.0))
def test_softmax_of_two(gap: float, std1: float, std2: float) -> None:
    """Two probabilities are the sigmoid of the difference, log-softmax minus its softplus."""
    logits, var = _t(gap, 0.0), _t(std1**2, std2**2)
    m, v = softmax.softmax(torch.stack(logits), torch.stack(var), 0)
    lm, lv = softmax.log_softmax(torch.stack(logits), torch.stack(var), 0)
    (d, s) = _t(gap, math.hypot(std1, std2))
    sig, sig_v = activations.sigmoid(d, s)
    sp, sp_v = activations.softplus(-d, s)
    torch.testing.assert_close(m, torch.stack([sig, 1 - sig]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(v, torch.stack([sig_v, sig_v]), rtol=1e-4, atol=3e-9)
    torch.testing.assert_close(lm[0], -sp, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(lv[0], sp_v, rtol=1e-4, atol=1e-7)
