"""Expressions written by hand that are put back together: the operation that they are, and its moments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from tests.monte_carlo import gaussian

Function = Callable[[Tensor], Tensor]
STD = 8.0  # exp of a Gaussian that wide has no variance in single precision


class Calls(nn.Module):
    """A function of one tensor as a model."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def operations(result: vp.Result) -> list[str]:
    return [entry.op.removeprefix("aten.").partition(".")[0] for entry in result.entries]


def stabilised(x: Tensor) -> Tensor:
    terms = (x - x.amax(-1, keepdim=True)).exp()
    return terms / terms.sum(-1, keepdim=True)


def by_reciprocal(x: Tensor) -> Tensor:
    terms = torch.exp(x - x.max(-1, keepdim=True).values.detach())
    return terms.sum(dim=-1, keepdim=True).reciprocal() * terms


def plain(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


def once(x: Tensor) -> Tensor:
    terms = (x - 3.0).exp()
    return terms / terms.sum(-1, keepdim=True)


def by_logarithm(x: Tensor) -> Tensor:
    return (x - x.logsumexp(-1, keepdim=True)).exp()


def along_another_axis(x: Tensor) -> Tensor:
    return stabilised(x.mT).mT


SPELLINGS = (stabilised, by_reciprocal, once, by_logarithm)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_softmax_by_hand_is_a_softmax(spelling: Function) -> None:
    torch.manual_seed(0)
    moments = vp.Moments(torch.randn(1, 3, 16), torch.full((1, 3, 16), STD**2))
    result = vp.propagate(Calls(spelling), moments)
    expected = vp.propagate(Calls(lambda x: x.softmax(-1)), moments).output
    assert operations(result) == ["softmax"]
    torch.testing.assert_close(result.output.mean, expected.mean)
    torch.testing.assert_close(result.output.var, expected.var)


def shifted_along_the_axis(x: Tensor) -> Tensor:
    terms = (x - torch.linspace(0, 2, 16)).exp()
    return terms / terms.sum(-1, keepdim=True)


def with_epsilon(x: Tensor) -> Tensor:
    terms = (x - x.amax(-1, keepdim=True)).exp()
    return terms / (terms.sum(-1, keepdim=True) + 0.5)


def of_two_axes(x: Tensor) -> Tensor:
    terms = (x - x.amax((-2, -1), keepdim=True)).exp()
    return terms / terms.sum((-2, -1), keepdim=True)


def maximum_of_a_multiple(x: Tensor) -> Tensor:
    return torch.sub(x, x.amax(-1, keepdim=True), alpha=2)


def maximum_of_the_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (first - torch.maximum(first, second)).exp()


OTHERS = (shifted_along_the_axis, with_epsilon, of_two_axes, maximum_of_a_multiple, maximum_of_the_halves)


@pytest.mark.parametrize("function", [*SPELLINGS, along_another_axis, plain, *OTHERS])
def test_values_without_variance_stay_what_they_are(function: Function) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16)
    result = vp.propagate(Calls(function), vp.Moments(x, torch.zeros_like(x)))
    torch.testing.assert_close(result.output.mean, function(x))


def test_what_differs_along_the_axis_is_taken_off_before_the_softmax() -> None:
    moments = vp.Moments(torch.zeros(1, 3, 16), torch.ones(1, 3, 16))
    assert operations(vp.propagate(Calls(shifted_along_the_axis), moments)) == ["sub", "softmax"]
    assert "softmax" not in operations(vp.propagate(Calls(of_two_axes), moments))


@pytest.mark.parametrize("function", [lambda x: (x - x.amax(-1, keepdim=True)).exp(), maximum_of_the_halves])
def test_what_lies_below_a_maximum_has_an_exponential_of_at_most_one(function: Function) -> None:
    """With the maximum and the value as independent the variance was infinite."""
    torch.manual_seed(0)
    moments = vp.Moments(torch.zeros(1, 16), torch.full((1, 16), STD**2))
    output = vp.propagate(Calls(function), moments).output
    values = function(gaussian(moments, (1, 16), 20_000))
    torch.testing.assert_close(output.mean[0], values.mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(output.std[0], values.std(0), atol=0.02, rtol=0)


@pytest.mark.parametrize("function", [
    lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real,
    lambda x: torch.fft.fft2(x).imag,
    lambda x: torch.fft.fftn(x, dim=(1, 2)).real,
    lambda x: torch.fft.fft(x, dim=1).real,
])  # fmt: skip
def test_parts_of_a_fourier_transform_are_sums(function: Function) -> None:
    """FNet mixes tokens and channels by the first."""
    torch.manual_seed(0)
    moments = vp.Moments(torch.randn(1, 6, 8), torch.rand(1, 6, 8))
    result = vp.propagate(Calls(function), moments)
    assert operations(result) == ["fourier"] and result.entries[0].status == "exact"
    values = function(gaussian(moments, (1, 6, 8), 20_000))
    torch.testing.assert_close(result.output.mean[0], function(moments.mean)[0])
    torch.testing.assert_close(result.output.std[0], values.std(0), rtol=0.03, atol=1e-3)


@pytest.mark.parametrize("function", [
    lambda x: torch.fft.fft(x, n=4).real,
    lambda x: torch.fft.fft(x, norm="ortho").real,
    lambda x: torch.fft.fft(x).abs(),
    lambda x: torch.fft.fft(torch.fft.fft(x)).real,
    lambda x: torch.fft.rfft(x).real,
])  # fmt: skip
def test_other_transforms_are_refused_in_a_sentence(function: Function) -> None:
    with pytest.raises(vp.MissingRule, match="gives complex numbers"):
        vp.propagate(Calls(function), vp.Moments(0.0, 1.0), (1, 6, 8))


EDGES = torch.tensor([2, 0, 2, 1, 0, 2, 4, 4])


def over_edges(x: Tensor, tiny: float = 1e-16) -> Tensor:
    """As graph networks write it: for every edge, a softmax over those that end at the same node."""
    numbers = EDGES.view(-1, 1).expand_as(x)
    largest = x.new_zeros(5, x.shape[1]).scatter_reduce(0, numbers, x.detach(), "amax", include_self=False)
    terms = (x - largest.index_select(0, EDGES)).exp()
    return terms / (x.new_zeros(5, x.shape[1]).scatter_add(0, numbers, terms) + tiny).index_select(0, EDGES)


def test_a_softmax_over_edges_is_one() -> None:
    moments = vp.Moments(torch.randn(8, 3), torch.full((8, 3), STD**2))
    result = vp.propagate(Calls(over_edges), moments)
    assert operations(result) == ["group_softmax"]
    values = torch.stack([over_edges(x) for x in moments.mean + STD * torch.randn(4000, 8, 3)])
    torch.testing.assert_close(result.output.mean, values.mean(0), atol=0.03, rtol=0)
    torch.testing.assert_close(result.output.std, values.std(0), atol=0.02, rtol=0)


def test_a_sum_with_more_than_nothing_added_is_no_softmax() -> None:
    result = vp.propagate(Calls(lambda x: over_edges(x, 0.5)), vp.Moments(torch.zeros(8, 3), torch.ones(8, 3)))
    assert "group_softmax" not in operations(result)
