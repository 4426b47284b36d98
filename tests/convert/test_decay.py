"""Which parameters decay, and unit norms that change no output."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from tests.convert.networks import NETWORKS, close, has_weight_norm, linear_layers, network
from varprop import param_groups, reparametrize, unit_norm_


def decaying(model: nn.Module, **arguments: object) -> set[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = param_groups(model, 0.1, **arguments)
    assert len({p for group in groups for p in group["params"]}) == sum(len(group["params"]) for group in groups)
    assert {p for g in groups for p in g["params"]} == {p for p in model.parameters() if p.requires_grad}
    return {names[p] for group in groups if group["weight_decay"] for p in group["params"]}


def test_plain_weights_decay_and_nothing_else() -> None:
    assert decaying(network("conv")[0]) == {"0.weight", "2.weight", "6.weight"}
    assert decaying(network("positions")[0]) == {"0.weight", "3.weight"}
    assert decaying(network("language")[0]) == {"tokens.weight", "mix.weight"}
    assert decaying(nn.Sequential(nn.Linear(2, 4), nn.Unflatten(1, (2, 2)), nn.LayerNorm((2, 2)))) == {"0.weight"}


@pytest.mark.parametrize("form", ["weight", "batch"])
@pytest.mark.parametrize("name", ["conv", "grouped", "tied", "reused"])
def test_no_normalized_weight_decays(name: str, form: str) -> None:
    model, x = network(name)
    assert decaying(reparametrize(model, form, batch=x)) == set()


def test_weights_under_the_model_s_own_batch_norms_are_spared() -> None:
    model, x = network("resnet")
    assert decaying(model, example=x) == {"fc.weight"}
    with pytest.warns(UserWarning, match="'bn1' follows is not known without `example`"):
        assert "conv1.weight" in decaying(model)
    neighbours, _ = network("own batch norm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decaying(neighbours) == {"8.weight"}


def test_a_tied_weight_is_spared_only_if_it_is_normalized_everywhere() -> None:
    model, x = network("language")
    assert decaying(reparametrize(model, "batch", batch=x)) == {"tokens.weight"}


def test_frozen_parameters_are_left_out() -> None:
    model, _ = network("mlp")
    model[0].requires_grad_(False)
    assert decaying(model) == {"2.weight", "4.weight"}
    assert param_groups(model.requires_grad_(False), 0.1) == []


def test_optimizers_take_the_groups() -> None:
    model, _ = network("mlp")
    optimizer = torch.optim.SGD(param_groups(model, 0.1), lr=1.0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    with pytest.raises(ValueError, match="at least 0"):
        param_groups(model, -1.0)


@pytest.mark.parametrize("name", NETWORKS)
def test_unit_norm_changes_no_output(name: str) -> None:
    model, x = network(name)
    weight = reparametrize(model, "weight", example=x)
    before = weight(x)
    assert unit_norm_(weight) is weight
    assert close(weight(x), before)
    for layer in [m for m in weight.modules() if has_weight_norm(m)]:
        parts = layer.parametrizations.weight
        norms = torch.norm_except_dim(parts.original1, 2, parts[0].dim)
        assert close(norms, torch.ones_like(norms))


def test_unit_norm_leaves_the_rest_alone() -> None:
    for form in ("standard", "batch"):
        model, x = network("residual")
        model = reparametrize(model, form, batch=x)
        state = copy.deepcopy(model)
        unit_norm_(model)
        assert all(
            torch.equal(a.weight, b.weight)
            for a, b in zip(*(linear_layers(m).values() for m in (model, state)), strict=True)
        )


def test_unit_norm_leaves_frozen_weights_alone() -> None:
    model = reparametrize(network("mlp")[0].requires_grad_(False), "weight")
    before = model[0].parametrizations.weight.original1.clone()
    unit_norm_(model)
    assert torch.equal(model[0].parametrizations.weight.original1, before)
