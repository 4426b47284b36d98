"""Batch renormalization and weight standardization against their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from varprop_lab.deep.normalizations import BatchRenorm2d, StandardizedConv2d, renorm_limits


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
