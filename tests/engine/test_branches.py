"""Sums of convolutions of one value against the one convolution they are, and against samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import varprop as vp


class Sum(nn.Module):
    """Branches of one input, added up."""

    def __init__(self, *branches: nn.Module, front: nn.Module | None = None) -> None:
        super().__init__()
        self.front, self.branches = front or nn.Identity(), nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        total = self.branches[0](x)
        for branch in self.branches[1:]:
            total = total + branch(x)
        return total


class Difference(nn.Module):
    """x + gamma (mixed - normed), as some mixers write it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mixed, self.normed = nn.Conv2d(channels, channels, 3, padding=1, groups=channels), norm(channels)
        self.gamma = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * (self.mixed(x) - self.normed(x))


def norm(channels: int) -> nn.Module:
    made = nn.BatchNorm2d(channels)
    for tensor in (made.weight, made.running_var):
        nn.init.uniform_(tensor, 0.5, 2.0)
    for tensor in (made.bias, made.running_mean):
        nn.init.normal_(tensor)
    return made


def conv(size: int = 3, channels: int = 6, **form: object) -> nn.Module:
    return nn.Conv2d(channels, channels, size, padding=size // 2, **form)  # type: ignore[arg-type]


def depthwise(size: int = 3, **form: object) -> nn.Module:
    return conv(size, groups=6, **form)


JOINED: dict[str, Callable[[], nn.Module]] = {
    "positions": lambda: Sum(nn.Identity(), depthwise()),
    "identity in a dense convolution": lambda: Sum(nn.Identity(), conv()),
    "identity in groups": lambda: Sum(nn.Identity(), conv(groups=2)),
    "two sizes": lambda: Sum(conv(3), conv(1)),
    "strided": lambda: Sum(conv(3, stride=2), conv(1, stride=2)),
    "without bias": lambda: Sum(conv(5, bias=False), conv(3)),
    "training-time branches": lambda: Sum(
        nn.Sequential(conv(3, bias=False), norm(6)), nn.Sequential(conv(1, bias=False), norm(6)), norm(6)
    ),
    "behind a function": lambda: Sum(nn.Identity(), depthwise(5), front=nn.Sequential(conv(1), nn.GELU())),
    "behind a convolution": lambda: Sum(nn.Identity(), depthwise(), front=conv(1)),
    "difference": lambda: Difference(6),
    "dilated": lambda: Sum(nn.Conv2d(6, 6, 3, padding=2, dilation=2), conv(1)),
}
APART: dict[str, Callable[[], nn.Module]] = {
    "other groups": lambda: Sum(conv(3), depthwise(1)),
    "dilated and not": lambda: Sum(nn.Conv2d(6, 6, 3, padding=2, dilation=2), conv(3)),
    "curved": lambda: Sum(nn.Identity(), nn.Sequential(depthwise(), nn.ReLU())),
}


def given(extent: int = 7) -> vp.Moments:
    torch.manual_seed(1)
    return vp.Moments(torch.randn(1, 6, extent, extent).double(), torch.rand(1, 6, extent, extent).double() + 0.1)


def built(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return factory().double().eval()


@pytest.mark.parametrize("name", JOINED)
@torch.no_grad()
def test_sums_are_exact_for_independent_inputs(name: str) -> None:
    """The variance of a linear function is J² Var x, J its Jacobian; what stands in front is taken as independent."""
    model, x = built(JOINED[name]), given()
    result = vp.propagate(model, x)
    front = getattr(model, "front", nn.Identity())
    start = x if isinstance(front, nn.Identity) else vp.propagate(front, x).output
    model.front = nn.Identity()
    jacobian = torch.autograd.functional.jacobian(model, start.mean)
    torch.testing.assert_close(result.output.mean, model(start.mean))
    torch.testing.assert_close(result.output.var, (jacobian.flatten(4).square() @ start.var.flatten()))
    assert not any("independence" in reason for entry in result.approximations for reason in entry.reasons)


@pytest.mark.parametrize("name", JOINED)
@torch.no_grad()
def test_uniform_axes_give_the_positions_away_from_the_border(name: str) -> None:
    model, shape = built(JOINED[name]), (1, 6, 60, 60)
    moments = vp.Moments(torch.zeros(1, 6, 1, 1).double(), torch.ones(1, 6, 1, 1).double())
    result = vp.propagate(model, moments, torch.zeros(shape).double())
    alike = result.output
    assert "pooled" in result.entries[-1].reasons[0]  # of the sum, as of its convolutions
    apart = vp.propagate(model, vp.Moments(torch.zeros(shape).double(), torch.ones(shape).double())).output
    middle = apart.var[..., apart.shape[2] // 2, apart.shape[3] // 2]
    torch.testing.assert_close(alike.var[..., 0, 0], middle, rtol=0.1, atol=0.0)  # the border is pooled with it


@pytest.mark.parametrize("name", APART)
def test_other_sums_are_said_to_assume_independence(name: str) -> None:
    with torch.no_grad():
        result = vp.propagate(built(APART[name]), given())
    assert any("independence" in reason for entry in result.approximations for reason in entry.reasons)


def test_parameters_get_gradients() -> None:
    model = built(JOINED["training-time branches"])
    vp.propagate(model, given(), gradients=True).output.var.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if not name.endswith("bias"))
