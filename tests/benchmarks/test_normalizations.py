"""Normalizations, starts and bounds of gradients against the formulas of their papers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from normalizations import (
    RELU_GAMMA,
    BatchRenorm2d,
    EvoNormS0,
    FilterResponseNorm2d,
    FixupBlock,
    NormalizerFreeBlock,
    Scalar,
    ScaledStandardizedConv2d,
    StandardizedConv2d,
    ThresholdedUnit,
    clip_adaptively_,
    fixup,
    normalizer_free,
    renorm_limits,
    start_weight_norm_,
)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


@pytest.mark.parametrize("limits", [(1.0, 0.0), (1.2, 0.1), (3.0, 5.0)])
def test_batch_renorm_is_its_definition(limits: tuple[float, float]) -> None:
    torch.manual_seed(0)
    layer = BatchRenorm2d(3).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, 1.0, 2.0])), layer.bias.copy_(torch.tensor([0.1, 0.0, -0.2]))
        layer.running_mean.copy_(torch.tensor([0.3, 0.0, -1.0])), layer.running_std.copy_(torch.tensor([0.5, 1.0, 2.0]))
        layer.limits.copy_(torch.tensor(limits))
    x, by = torch.randn(2, 3, 4, 4, dtype=torch.double), torch.randn(2, 3, 4, 4, dtype=torch.double)
    mean0, std0 = layer.running_mean.clone(), layer.running_std.clone()

    def wanted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mean, std = x.mean((0, 2, 3)), (x.var((0, 2, 3), unbiased=False) + layer.eps).sqrt()
        r = (std.detach() / std0).clamp(1 / limits[0], limits[0])
        d = ((mean.detach() - mean0) / std0).clamp(-limits[1], limits[1])
        vectors = [vector[:, None, None] for vector in (mean, std, r, d, weight, bias)]
        mean, std, r, d, weight, bias = vectors
        return ((x - mean) / std * r + d) * weight + bias

    inputs = [x.clone().requires_grad_(), layer.weight, layer.bias]
    expected = wanted(*inputs)
    result = layer(inputs[0])
    torch.testing.assert_close(result, expected)
    grads = [torch.autograd.grad((out * by).sum(), inputs) for out in (result, expected)]
    for here, there in zip(*grads, strict=True):
        torch.testing.assert_close(here, there)
    torch.testing.assert_close(layer.running_mean, mean0 + 0.01 * (x.mean((0, 2, 3)) - mean0))
    std = (x.var((0, 2, 3), unbiased=False) + layer.eps).sqrt()
    torch.testing.assert_close(layer.running_std, std0 + 0.01 * (std - std0))
    layer.eval()
    moved = (x - layer.running_mean[:, None, None]) / layer.running_std[:, None, None]
    torch.testing.assert_close(layer(x), moved * layer.weight[:, None, None] + layer.bias[:, None, None])


def test_the_published_schedule() -> None:
    assert renorm_limits(0.0) == renorm_limits(5000 / 200_000) == (1.0, 0.0)
    assert renorm_limits(15_000 / 200_000) == pytest.approx((1 + 2 * 10 / 35, 2.5))
    assert renorm_limits(25_000 / 200_000)[1] == 5.0 and renorm_limits(40_000 / 200_000) == renorm_limits(1.0) == (
        3.0,
        5.0,
    )


def test_standardized_filters() -> None:
    torch.manual_seed(0)
    layer, x = StandardizedConv2d(3, 4, 3, padding=1, bias=False).double(), torch.randn(2, 3, 5, 5, dtype=torch.double)
    rows = layer.weight.flatten(1)
    weight = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-5)
    torch.testing.assert_close(layer(x), F.conv2d(x, weight.view_as(layer.weight), padding=1))


def compared(layer: nn.Module, formula: Callable[..., Tensor], x: Tensor) -> None:
    """Values, and gradients by the input and all parameters, which the formula takes by name."""
    torch.manual_seed(1)
    layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    x.requires_grad_()
    named = {name.replace(".", "_"): parameter for name, parameter in layer.named_parameters()}
    result, wanted = layer(x), formula(x, **named)
    torch.testing.assert_close(result, wanted)
    by, inputs = torch.randn_like(wanted), [x, *named.values()]
    for here, there in zip(*(torch.autograd.grad(out, inputs, by) for out in (result, wanted)), strict=True):
        torch.testing.assert_close(here, there)


def images(channels: int = 4) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, channels, 5, 5, dtype=torch.double) + 0.5


def test_filter_response_norm() -> None:
    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        squares = (x**2).sum((2, 3), keepdim=True) / 25
        return weight.view(4, 1, 1) * x / (squares + 1e-6) ** 0.5 + bias.view(4, 1, 1)

    compared(FilterResponseNorm2d(4), formula, images())
    compared(
        ThresholdedUnit(4),
        lambda x, threshold: torch.where(x > threshold.view(4, 1, 1), x, threshold.view(4, 1, 1)),
        images(),
    )


def test_evonorm() -> None:
    def formula(x: Tensor, weight: Tensor, bias: Tensor, v: Tensor) -> Tensor:
        pairs = [x[:, :2], x[:, 2:]]  # two groups
        std = [
            (((g - g.mean((1, 2, 3), keepdim=True)) ** 2).mean((1, 2, 3), keepdim=True) + 1e-5) ** 0.5 for g in pairs
        ]
        normal = torch.cat([g / s for g, s in zip(pairs, std, strict=True)], 1)
        return weight.view(4, 1, 1) * normal / (1 + (-v.view(4, 1, 1) * x).exp()) + bias.view(4, 1, 1)

    compared(EvoNormS0(4, groups=2), formula, images())


def test_scaled_weight_standardization() -> None:
    def formula(x: Tensor, weight: Tensor, bias: Tensor, gain: Tensor) -> Tensor:
        rows = weight.flatten(1)
        rows = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True, unbiased=False) * rows.shape[1] ** 0.5)
        return F.conv2d(x, (1.5 * gain[:, None] * rows).view_as(weight), bias, 2, 1)

    compared(ScaledStandardizedConv2d(4, 6, 3, 2, gamma=1.5), formula, images())


def test_a_normalizer_free_network_keeps_the_variance_it_expects() -> None:
    torch.manual_seed(0)
    half_normal_var = 0.5 - 1 / (2 * torch.pi)
    assert pytest.approx(half_normal_var**-0.5) == RELU_GAMMA
    model = normalizer_free((2, 2), 64, 10)
    blocks = [layer for layer in model if isinstance(layer, NormalizerFreeBlock)]
    assert [block.beta**2 for block in blocks] == pytest.approx([1.0, 1.04, 1.08, 1.04])
    x = torch.randn(32, 3, 16, 16)
    with torch.no_grad():
        first = model[0](x)
        torch.testing.assert_close(blocks[0](first), first)  # SkipInit: the branch starts at zero
        for block in blocks:
            block.skip.fill_(1.0)
        for number, wanted in ((1, 1.0), (2, 1.04), (3, 1.08), (4, 1.04), (5, 1.08)):
            var = model[:number](x)[..., 1:-1, 1:-1].var((0, 2, 3)).mean()  # borders see zeros
            assert float(var) == pytest.approx(wanted, rel=0.12), number


def test_fixup_starts_as_published() -> None:
    torch.manual_seed(0)
    model = fixup((2, 2, 2, 2), 64, 10)
    blocks = [layer for layer in model if isinstance(layer, FixupBlock)]
    for block in blocks:
        first, second = (layer for layer in block.branch if isinstance(layer, nn.Conv2d))
        assert float(first.weight.detach().std()) == pytest.approx(
            (2 / (9 * first.out_channels)) ** 0.5 * 8**-0.5, rel=0.02
        )
        assert not second.weight.any()
        assert [layer.multiplies for layer in block.branch if isinstance(layer, Scalar)] == [False, False, True, False]
    assert not model[-1].weight.any() and not model[-1].bias.any()
    x = torch.relu(torch.randn(2, 64, 8, 8))
    torch.testing.assert_close(blocks[0](x), x)


def test_scalars_of_fixup_learn_a_tenth_as_fast() -> None:
    x, plain = images(), torch.ones((), dtype=torch.double, requires_grad=True)
    scalar = Scalar(multiplies=True).double()
    (x * plain).square().sum().backward()
    scalar(x).square().sum().backward()
    assert plain.grad is not None and scalar.value.grad is not None
    before = float(scalar.value.detach()) * Scalar.SLOWER
    after = (float(scalar.value.detach()) - 0.5 * float(scalar.value.grad)) * Scalar.SLOWER
    assert before == pytest.approx(1.0) and after - before == pytest.approx(-0.05 * float(plain.grad))


def test_the_start_of_weight_norm_normalizes_its_batch() -> None:
    torch.manual_seed(0)
    convs = [weight_norm(nn.Conv2d(3, 8, 3)), weight_norm(nn.Conv2d(8, 4, 3, stride=2))]
    model = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.Flatten(), nn.Linear(36, 2)).double()
    last = model[-1].weight.clone()
    x = torch.randn(16, 3, 9, 9, dtype=torch.double) + 1.0
    start_weight_norm_(model, x)
    direction = convs[0].parametrizations.weight.original1
    plain = F.conv2d(x, direction / direction.flatten(1).norm(dim=1)[:, None, None, None])
    std, mean = torch.std_mean(plain, (0, 2, 3), unbiased=False)
    torch.testing.assert_close(convs[0].parametrizations.weight.original0.flatten(), 1 / std)
    torch.testing.assert_close(convs[0].bias, -mean / std)
    for number in (1, 3):
        std, mean = torch.std_mean(model[:number](x), (0, 2, 3), unbiased=False)
        torch.testing.assert_close(std, torch.ones_like(std)), torch.testing.assert_close(mean, torch.zeros_like(mean))
    torch.testing.assert_close(model[-1].weight, last)


def test_adaptive_clipping_by_units() -> None:
    weight, bias = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([0.6, 0.8])
    gradients = [torch.tensor([[0.3, 0.4], [3.0, 4.0]]), torch.tensor([0.03, 0.04])]
    clip_adaptively_([weight, bias], gradients, 0.01)
    torch.testing.assert_close(gradients[0][0], torch.tensor([0.03, 0.04]))  # a hundredth of 5
    torch.testing.assert_close(gradients[0][1], torch.tensor([0.6e-5, 0.8e-5]))  # of at least 1e-3
    torch.testing.assert_close(gradients[1], torch.tensor([0.006, 0.008]))  # a vector is one unit
    kept = torch.tensor([[0.3, 0.4]])
    clip_adaptively_([torch.tensor([[3.0, 4.0]])], [kept], float("inf"))
    torch.testing.assert_close(kept, torch.tensor([[0.3, 0.4]]))
