"""Random small graphs of operations: against Monte Carlo wherever the engine's assumptions hold, else marked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import varprop as vp

DRAWS = 60_000
WIDTH = 4


@dataclass(frozen=True)
class Branch:
    """An expression over inputs nobody else reads, and what is known of its law."""

    function: Callable[[list[Tensor]], Tensor]
    inputs: int
    gaussian: bool = True
    independent: bool = True


LEAF = Branch(lambda xs: xs[0], 1)
CURVED: list[Callable[[Tensor], Tensor]] = [
    F.relu, torch.sigmoid, torch.tanh, F.gelu, F.softplus, torch.abs, torch.sin,
    lambda x: F.relu(x) + 0.03 * x, lambda x: x * torch.sigmoid(x), lambda x: x.clamp(-1, 1), lambda x: x.square(),
]  # fmt: skip
MOVED: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.flip(-1), lambda x: 0.5 * x - 1, lambda x: x.view(-1, 2, 2).transpose(1, 2).reshape(-1, WIDTH),
    lambda x: torch.cat([x[:, 2:], x[:, :2]], 1), lambda x: F.pad(x[:, 1:], (0, 1)) + 0.1,
]  # fmt: skip


def then(branch: Branch, step: Callable[[Tensor], Tensor], **law: bool) -> Branch:
    known = {"gaussian": branch.gaussian, "independent": branch.independent} | law
    return Branch(lambda xs: step(branch.function(xs)), branch.inputs, **known)


def join(a: Branch, b: Branch, step: Callable[[Tensor, Tensor], Tensor], gaussian: bool) -> Branch:
    def function(xs: list[Tensor]) -> Tensor:
        return step(a.function(xs[: a.inputs]), b.function(xs[a.inputs :]))

    return Branch(function, a.inputs + b.inputs, gaussian, a.independent and b.independent)


@st.composite
def branches(draw: st.DrawFn, depth: int = 4) -> Branch:
    if depth == 0:
        return LEAF
    a = draw(branches(depth - 1))
    kinds = ["move", "stop"] + ["curve"] * a.gaussian + ["mix", "reduce"] * a.independent + ["join"] * (depth > 2)
    kind = draw(st.sampled_from(kinds))
    if kind == "move":
        return then(a, MOVED[draw(st.integers(0, len(MOVED) - 1))])
    if kind == "curve":
        return then(a, CURVED[draw(st.integers(0, len(CURVED) - 1))], gaussian=False)
    if kind == "mix":
        weight = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(depth))
        return then(a, lambda x: F.linear(x, weight), independent=False)
    if kind == "reduce":
        return then(a, lambda x: x.mean(1, keepdim=True) * torch.ones(WIDTH, dtype=x.dtype), independent=False)
    if kind == "join":
        b = draw(branches(depth - 2))
        both = a.gaussian and b.gaussian
        steps = [(torch.add, both), (torch.sub, both), (torch.mul, False)] + [(torch.maximum, False)] * both
        return join(a, b, *draw(st.sampled_from(steps)))
    return a


class Graph(nn.Module):
    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.branch.function(list(inputs))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(branches())
def test_graphs_agree_with_monte_carlo(branch: Branch) -> None:
    torch.manual_seed(0)
    means = [torch.randn(1, WIDTH, dtype=torch.float64) for _ in range(branch.inputs)]
    stds = [0.3 + torch.rand(1, WIDTH, dtype=torch.float64) for _ in range(branch.inputs)]
    given_moments = tuple(vp.Moments(m, s.square()) for m, s in zip(means, stds, strict=True))
    result = vp.propagate(Graph(branch), given_moments)
    assert not result.approximations
    shape = (DRAWS, WIDTH)
    drawn = branch.function([m + s * torch.randn(shape, dtype=m.dtype) for m, s in zip(means, stds, strict=True)])
    mean, centred = drawn.mean(0), drawn - drawn.mean(0)
    var, fourth = centred.square().mean(0), centred.pow(4).mean(0)
    output = result.output.dense()
    assert ((output.mean[0] - mean).abs() <= 5 * (torch.maximum(var, output.var[0]) / DRAWS).sqrt() + 1e-9).all()
    # the floor is for units that fire less often than once in all draws
    error = ((fourth - var.square()).clamp_min(0) / DRAWS).sqrt()
    assert ((output.var[0] - var).abs() <= 5 * error + 1e-6).all()


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x, lambda x: x.flip(-1), lambda x: x.roll(1, -1), lambda x: x[:, ::2], lambda x: x[:, 1::2],
    lambda x: x[:, :2], lambda x: x[:, 2:], lambda x: x.view(-1, 2, 2).transpose(1, 2).flatten(1)[:, 1:3],
    lambda x: x.gather(1, torch.tensor([[3, 0]]).expand(len(x), -1)), lambda x: x.split([1, 2, 1], 1)[1],
]  # fmt: skip
JOINS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: torch.cat([a, b], 1), lambda a, b: torch.stack([a[:, :2], b[:, :2]], 1).flatten(1),
    lambda a, b: a.slice_scatter(b[:, :1], 1, 1, 2), lambda a, b: a.select_scatter(b[:, -1], 1, 0),
    lambda a, b: a.index_copy(1, torch.tensor([1]), b[:, :1]),
    lambda a, b: a.scatter(1, torch.zeros(len(a), 1, dtype=torch.long), b[:, 1:2]),
]  # fmt: skip
SUMS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sum(1, keepdim=True), lambda x: F.linear(x, torch.arange(1.0, 1 + 2 * x.shape[1]).double().view(2, -1)),
    lambda x: F.avg_pool1d(x[:, None], 2, 1)[:, 0],
]  # fmt: skip


@st.composite
def joins(draw: st.DrawFn) -> Callable[[Tensor], Tensor]:
    """Views of one value, joined to one another, perhaps twice, and added up."""
    views = [draw(st.sampled_from(VIEWS)) for _ in range(3)]
    first, second = draw(st.sampled_from(JOINS)), draw(st.sampled_from([None, *JOINS]))
    total = draw(st.sampled_from(SUMS))

    def function(x: Tensor) -> Tensor:
        joined = first(views[0](x), views[1](x))
        return total(joined if second is None else second(joined, views[2](x)))

    return function


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(joins())
def test_joins_of_views_are_right_or_marked(function: Callable[[Tensor], Tensor]) -> None:
    var = torch.tensor([[1.0, 2.0, 0.5, 3.0]], dtype=torch.float64)
    result = vp.propagate(Graph(Branch(lambda xs: function(xs[0]), 1)), vp.Moments(torch.zeros_like(var), var))
    jacobian = torch.autograd.functional.jacobian(function, torch.zeros_like(var))[0, :, 0]
    right = torch.allclose(result.output.var[0], jacobian.square() @ var[0])
    assert right or result.approximations
