"""The analytic form among the others: the same function, no decay on its weights, unit norms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from tests.convert.networks import close, network
from varprop.norm import Normalized

NAMES = ["mlp", "conv", "residual", "dense", "grouped", "own batch norm", "resnet"]


def moments(x: Tensor) -> vp.Moments:
    axes = [axis for axis in range(x.ndim) if axis != 1]
    return vp.Moments(x.mean(axes, keepdim=True), x.var(axes, keepdim=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_to_and_from_every_form(name: str) -> None:
    model, x = network(name)
    analytic = vp.reparametrize(model, "analytic", moments=moments(x), example=x)
    assert any(isinstance(m, Normalized) for m in analytic.modules())
    assert close(analytic(x), model(x))
    for form in ("standard", "weight", "batch"):
        other = vp.reparametrize(analytic, form, batch=x)
        assert not any(isinstance(m, Normalized) for m in other.modules())
        assert close(other(x), model(x))
        assert close(vp.reparametrize(other, "analytic", moments=moments(x), example=x)(x), model(x))


def test_its_weights_are_spared_and_scaled() -> None:
    model, x = network("grouped")
    analytic = vp.reparametrize(model, "analytic", moments=moments(x), example=x)
    assert all(not group["weight_decay"] for group in vp.param_groups(analytic, 0.1))
    before = analytic(x)
    assert close(vp.unit_norm_(analytic)(x), before)
    for site in [m for m in analytic.modules() if isinstance(m, Normalized)]:
        weight = site.weight
        if getattr(site, "transposed", False):
            weight = torch.cat([of_group.transpose(0, 1) for of_group in weight.chunk(site.groups)])
        norms = weight.flatten(1).norm(dim=1)
        assert close(norms, torch.ones_like(norms))


def test_an_unnormalized_layer_beside_it_decays() -> None:
    model, x = network("mlp")
    analytic = vp.normalize(model, moments(x), example=x, init="preserve", only="0")
    decaying = [p for group in vp.param_groups(analytic, 0.1) if group["weight_decay"] for p in group["params"]]
    assert {p.shape for p in decaying} == {m.weight.shape for m in analytic.modules() if type(m) is nn.Linear}
