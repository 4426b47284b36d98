"""The rectifier behind a skip connection against integrals, long chains of blocks, and autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.gaussian.activations import relu
from varprop.gaussian.rectifier import FALL, SKEW, mixture, positive_sum, relu_of_sum

RATIOS = torch.linspace(-2, 3, 21, dtype=torch.float64)  # mean over std of a Gaussian before it is rectified


def rectified(z: Tensor) -> tuple[Tensor, Tensor]:
    return relu(z, torch.ones_like(z))


def test_the_mixture_has_mean_and_variance_of_the_sum() -> None:
    mean, var = rectified(RATIOS)
    low, high, within, share = mixture(mean, var, 0.3 - mean, 0.2 + var)
    centre = low + share * (high - low)
    torch.testing.assert_close(centre, torch.full_like(centre, 0.3))
    torch.testing.assert_close(within.square() + share * (1 - share) * (high - low).square(), 2 * var + 0.2)


def test_the_skewness_is_that_of_a_rectified_gaussian() -> None:
    mean, var = rectified(RATIOS)
    z = torch.linspace(-9, 9, 40_001, dtype=torch.float64)[:, None]
    weights = torch.softmax(-z * z / 2, 0)
    skew = (weights * ((RATIOS + z).relu() - mean) ** 3).sum(0) / var**1.5
    r = mean / var.sqrt()
    assert ((SKEW * torch.exp(-FALL * r * r) / r - skew).abs() <= 0.04 * skew + 0.01).all()


# By the std of the other term: errors of mean and std in units of the std of the sum, and of the chance to be positive.
ERRORS = {0.1: (0.055, 0.04, 0.17), 0.3: (0.03, 0.035, 0.04), 1.0: (0.004, 0.004, 0.006), 3.0: (0.001, 0.001, 0.001)}


@pytest.mark.parametrize("other_std", ERRORS)
@pytest.mark.parametrize("other_mean", (-1.0, 0.0, 1.0))
def test_against_the_integral(other_mean: float, other_std: float) -> None:
    of_mean, of_std, of_chance = ERRORS[other_std]
    mean, var = rectified(RATIOS)
    other = torch.full_like(mean, other_mean * other_std), torch.full_like(mean, other_std**2)
    z = torch.linspace(-9, 9, 20_001, dtype=torch.float64)[:, None]
    weights, x = torch.softmax(-z * z / 2, 0), (RATIOS + z).relu()
    inner_mean, inner_var = relu(x + other[0], other[1].sqrt())
    expected = (weights * inner_mean).sum(0)
    spread = (weights * (inner_var + inner_mean.square())).sum(0) - expected.square()
    scale = (var + other[1]).sqrt()
    found, found_var = relu_of_sum(mean, var, *other)
    assert ((found - expected).abs() <= of_mean * scale).all()
    assert ((found_var.sqrt() - spread.sqrt()).abs() <= of_std * scale).all()
    chance = (weights * (0.5 * torch.special.erfc(-(x + other[0]) / (other_std * math.sqrt(2))))).sum(0)
    assert ((positive_sum(mean, var, *other) - chance).abs() <= of_chance).all()


def walk(strength: float, rule: object, blocks: int = 24) -> float:
    """Std of max(0, x + y), repeated, by a rule and by simulation: their ratio after so many blocks.

    y has `strength` times the second moment of x, a third of it a mean of its own for every channel.
    """
    torch.manual_seed(0)
    channels, draws = 100, 4000
    z = 0.5 * torch.randn(channels, 1, dtype=torch.float64)
    x = (z + torch.randn(channels, draws, dtype=torch.float64)).relu()
    mean, var = rectified(z[:, 0])
    for _ in range(blocks):
        lean = torch.randn(channels, dtype=torch.float64)
        drawn, known = x.square().mean() * strength, (mean.square() + var).mean() * strength
        y = lean[:, None] * (drawn / 3).sqrt() + (2 * drawn / 3).sqrt() * torch.randn_like(x)
        x = (x + y).relu()
        mean, var = rule(mean, var, lean * (known / 3).sqrt(), (2 * known / 3).expand(channels))  # type: ignore[operator]
    return float((var.mean() / x.var(1).mean()).sqrt())


def as_gaussian(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor) -> tuple[Tensor, Tensor]:
    return relu(mean + other_mean, (var + other_var).sqrt())


@pytest.mark.parametrize(
    ("strength", "error", "gaussian"),
    (
        (0.5, 0.03, 0.1),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in ((2.0, 0.02, 0.06), (0.1, 0.05, 0.15), (0.02, 0.11, 0.3))
        ),
    ),
)
def test_it_stays_right_over_many_blocks(strength: float, error: float, gaussian: float) -> None:
    """The sum taken as Gaussian loses many times as much."""
    assert abs(walk(strength, relu_of_sum) - 1) <= error
    assert abs(walk(strength, as_gaussian) - 1) >= gaussian


def test_gradients() -> None:
    x, y = ([m.requires_grad_() for m in pair] for pair in (rectified(RATIOS[::4]), rectified(0.3 - RATIOS[::4])))
    assert torch.autograd.gradcheck(relu_of_sum, (*x, *y))


def test_nothing_random_stays_so() -> None:
    mean, none = torch.tensor([0.0, 1.0, 2.0]), torch.zeros(3)
    found = relu_of_sum(mean, none, torch.tensor([-1.0, -3.0, 0.5]), none)
    torch.testing.assert_close(found, (torch.tensor([0.0, 0.0, 2.5]), none))


class Block(nn.Module):
    """One unit twice: rectified where asked for, then summed and rectified."""

    def __init__(self, first: bool, second: bool) -> None:
        super().__init__()
        self.rectifies = first, second

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = (t.relu() if rectify else t for t, rectify in zip((x, y), self.rectifies, strict=True))
        return (first + second).relu()


@pytest.mark.parametrize("rectifies", ((True, False), (False, True)), ids=("first", "second"))
def test_the_engine_uses_it_behind_one_rectified_term(rectifies: tuple[bool, bool]) -> None:
    given = tuple(
        vp.Moments(torch.full((1, 4), m, dtype=torch.float64), torch.ones(1, 4).double()) for m in (0.2, -0.1)
    )
    found = vp.propagate(Block(*rectifies), given).output
    x, y = given if rectifies[0] else given[::-1]
    expected = relu_of_sum(*relu(x.mean, x.std), y.mean, y.var)
    torch.testing.assert_close((found.mean, found.var), expected)


def test_the_engine_takes_other_sums_as_gaussian() -> None:
    given = tuple(vp.Moments(torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4).double()) for _ in range(2))
    found = vp.propagate(Block(False, False), given).output
    torch.testing.assert_close(
        (found.mean, found.var), relu(torch.zeros(1, 4).double(), 2**0.5 * torch.ones(1, 4).double())
    )
