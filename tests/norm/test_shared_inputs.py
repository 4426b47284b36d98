"""Sums of layers that read the same value are not sums of independent terms."""

import math
import warnings

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import varprop as vp
from varprop.norm.shared_inputs import shared_sums


class Branches(nn.Module):
    """Layers of one value, added up, and a layer behind."""

    def __init__(self, *branches: nn.Module, skip: bool = False, sign: float = 1.0) -> None:
        super().__init__()
        self.branches, self.skip, self.sign = nn.ModuleList(branches), skip, sign
        self.last = nn.Conv2d(32, 32, 1) if isinstance(branches[0], nn.Conv2d | nn.Sequential) else nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = [branch(x) for branch in self.branches]
        for other in others:
            first = first + other if self.sign > 0 else first - other
        first = first + x if self.skip else first
        return self.last(first)


def conv(size: int = 3, **settings: int) -> nn.Conv2d:
    return nn.Conv2d(32, 32, size, padding=size // 2, padding_mode="zeros", **settings)


def alike(one: nn.Module, other: nn.Module, share: float) -> list[nn.Module]:
    """Two layers whose rows have a correlation of about so much."""
    with torch.no_grad():
        other.weight.mul_(math.sqrt(1 - share**2)).add_(share * one.weight)
    return [one, other]


def said(model: nn.Module) -> tuple[str, float]:
    """What is warned of, and the measured standard deviation of what enters the last layer by what it counts."""
    image = any(isinstance(module, nn.Conv2d) for module in model.modules())
    moments = vp.Moments(torch.zeros(1, 32, *[1] * (2 * image)), torch.ones(1, 32, *[1] * (2 * image)))
    example = (1, 32, 12, 12) if image else (1, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        normalized = vp.normalize(model, moments, example=example, form="paper")
    text = " ".join(str(w.message) for w in caught if "independent terms" in str(w.message))
    x = torch.randn(20_000 if not image else 100, *example[1:])
    with torch.no_grad():
        y = normalized.eval()(x)
    return text, float(y[..., 2:-2, 2:-2].std() if image else y.std())


def test_layers_with_weights_of_their_own_are_independent_enough() -> None:
    torch.manual_seed(0)
    for model in (
        Branches(conv(), conv()),
        Branches(nn.Linear(32, 32), nn.Linear(32, 32)),
        Branches(conv(), conv(1), skip=True),
    ):
        text, std = said(model)
        assert not text
        assert std == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("share", [0.9, -0.7])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("make", [conv, lambda: nn.Linear(32, 32), lambda: conv(groups=32)])
def test_branches_that_are_alike_are_warned_of(make: object, sign: float, share: float) -> None:
    torch.manual_seed(0)
    text, std = said(Branches(*alike(make(), make(), share), sign=sign))  # type: ignore[operator]
    expected = math.sqrt(1 + sign * share)
    warned = float(text.partition("(std ")[2].partition(" times")[0])
    assert warned == pytest.approx(expected, abs=0.12)
    assert std == pytest.approx(warned, rel=0.12)


def test_batch_norms_smaller_kernels_and_the_value_itself_are_counted() -> None:
    """As in branches that are merged after training."""
    torch.manual_seed(0)
    small, large = conv(1), conv()
    with torch.no_grad():
        small.weight.add_(2 * torch.eye(32).view(32, 32, 1, 1))
        large.weight[:, :, 1, 1] += 2 * torch.eye(32)
    model = Branches(nn.Sequential(large, nn.BatchNorm2d(32)), nn.Sequential(small, nn.BatchNorm2d(32)), skip=True)
    text, std = said(model)
    assert "branches.0.0 + branches.1.0 + their input" in text
    warned = float(text.partition("(std ")[2].partition(" times")[0])
    assert warned > 1.3
    assert std == pytest.approx(warned, rel=0.1)


def test_layers_of_different_values_are_not_mentioned() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.b = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) + self.b(torch.relu(x)))

    torch.manual_seed(0)
    model = Chain()
    alike(model.a, model.b, 0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vp.normalize(model, vp.Moments(torch.zeros(1, 32), torch.ones(1, 32)))
    assert not any("independent terms" in str(w.message) for w in caught)


class Sums(nn.Module):
    """Blocks of three branches, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 16, 3, padding=1), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(
            nn.ModuleList([*(nn.Conv2d(16, 16, s, padding=s // 2) for s in (3, 1, 3))]) for _ in "123"
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for a, b, c in self.blocks:
            x = torch.relu(a(x) + b(x) + c(x))
        y: Tensor = self.last(x.mean((2, 3)))
        return y


@pytest.mark.slow
def test_training_makes_such_sums_vary_by_more_than_they_count() -> None:
    """Which docs/exact.md says."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float().unsqueeze(1) / 8 - 1, torch.tensor(digits.target)
    plain = Sums()
    program = vp.capture(plain, images[:1])
    model = vp.normalize(plain, vp.Moments(0.0, 1.0), example=images[:1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before = [found.ratio for found in shared_sums(model, program)]
    for _ in range(300):
        batch = torch.randint(len(images), (64,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    after = [found.ratio for found in shared_sums(model, program)]
    assert max(abs(ratio - 1) for ratio in before) < 0.1
    assert min(after) > 1.05 and max(after) < 1.4


def test_coverage_marks_such_a_sum() -> None:
    model = vp.normalize(Branches(conv(), conv()), vp.Moments(0.0, 1.0), example=(1, 32, 12, 12))
    (entry, *_) = [e for e in vp.coverage(model, torch.zeros(1, 32, 12, 12)).approximate if "add" in e.op]
    assert any("share a random ancestor" in reason for reason in entry.reasons)
