"""Every form computes the same, and the way back leads to the start."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tests.convert.networks import (
    NETWORKS,
    PLAIN,
    Tied,
    close,
    has_batch_norm,
    has_weight_norm,
    identical,
    linear_layers,
    network,
    same_state,
)
from varprop import reparametrize


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("to", ["standard", "weight", "batch"])
def test_each_form_computes_the_same(name: str, to: str) -> None:
    model, x = network(name)
    before, state = model(x), copy.deepcopy(model)
    converted = reparametrize(model, to, **({"batch": x} if to == "batch" else {"example": x}))
    assert close(converted(x), before)
    other = torch.roll(x, 1, 1) if x.is_floating_point() else 10 - x
    assert close(converted(other), model(other))
    assert identical(model, state), "the model given is changed"
    assert not any(module.training for module in converted.modules())


@pytest.mark.parametrize("name", PLAIN)
def test_the_chain_returns_to_the_start(name: str) -> None:
    model, x = network(name)
    weight = reparametrize(model, "weight")
    batch = reparametrize(weight, "batch", batch=x)
    back = reparametrize(batch, "standard")
    assert same_state(back, model)
    assert str(back) == str(model)
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("name", ["own batch norm", "transposed with batch norm", "resnet"])
def test_own_batch_norms_come_back_to_their_places(name: str) -> None:
    model, x = network(name)
    plain = reparametrize(model, "standard", example=x)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in plain.modules())
    weight = reparametrize(plain, "weight")
    again = reparametrize(weight, "batch", batch=x)
    own = {path for path, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    assert all(type(again.get_submodule(path)) is type(model.get_submodule(path)) for path in own)
    assert own <= again.state_dict().keys() | {key.rpartition(".")[0] for key in again.state_dict()}
    assert close(again(x), model(x))
    assert close(reparametrize(again, "standard", example=x)(x), model(x))


def test_the_plain_model_needs_nothing_of_varprop() -> None:
    model, x = network("resnet")
    plain = reparametrize(model, "standard", example=x)
    assert b"varprop" not in pickle.dumps(plain)
    assert close(pickle.loads(pickle.dumps(plain))(x), model(x))


@pytest.mark.parametrize("name", ["mlp", "grouped"])
def test_the_wrong_sign_of_the_bias_is_caught(name: str) -> None:
    """bias - mean in place of bias + mean shows wherever the mean is not zero."""
    model, x = network(name)
    converted = reparametrize(model, "batch", batch=x)
    norms = [module.norm for module in converted.modules() if has_batch_norm(module)]
    assert all((norm.running_mean.abs() > 1e-3).any() for norm in norms)
    with torch.no_grad():
        for norm in norms:
            norm.bias.sub_(2 * norm.running_mean)
    assert not close(converted(x), model(x), 1e-3)


@pytest.mark.parametrize("form", ["weight", "batch"])
def test_every_layer_takes_the_form(form: str) -> None:
    model, x = network("conv")
    converted = reparametrize(model, form, batch=x)
    assert set(linear_layers(model)) == {
        path for path, m in converted.named_modules() if has_batch_norm(m) or has_weight_norm(m)
    }


def test_in_place_changes_the_model_itself() -> None:
    model, x = network("residual")
    before = model(x)
    assert reparametrize(model, "batch", batch=x, inplace=True) is model
    assert has_batch_norm(model.projection)
    assert close(model(x), before)
    assert reparametrize(model, "weight", inplace=True) is model
    assert close(model(x), before)


def test_a_single_layer_is_a_model_too() -> None:
    model, x = nn.Linear(5, 3).double().eval(), network("mlp")[1]
    converted = reparametrize(model, "batch", batch=x)
    assert has_batch_norm(converted)
    assert close(converted(x), model(x))
    assert same_state(reparametrize(converted, "standard"), model)
    with pytest.raises(ValueError, match="single layer"):
        reparametrize(model, "batch", batch=x, inplace=True)


def test_mixed_forms_are_undone_together() -> None:
    model, x = network("conv")
    mixed = reparametrize(model, "batch", batch=x)
    parametrizations.weight_norm(mixed[6].layer)
    back = reparametrize(mixed, "standard")
    assert same_state(back, model)


def test_a_foreign_parametrization_is_left_alone_or_named() -> None:
    model, x = network("mlp")
    parametrizations.orthogonal(model[2])
    batch = reparametrize(model, "batch", batch=x)
    assert close(batch(x), model(x))
    with pytest.raises(ValueError, match="'2' is parametrized"):
        reparametrize(model, "weight")
    assert parametrize.is_parametrized(model[2], "weight")


def test_tied_weights_stay_tied_as_long_as_they_can() -> None:
    model, x = network("tied")
    weight = reparametrize(model, "weight")
    assert weight.a.parametrizations.weight.original1 is weight.b.parametrizations.weight.original1
    plain = reparametrize(weight, "standard")
    assert plain.a.weight is plain.b.weight
    batch = reparametrize(model, "batch", batch=x)
    assert batch.a.layer.weight is batch.b.layer.weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(reparametrize(batch, "standard"), Tied)
    with torch.no_grad():
        batch.a.norm.weight.mul_(2)
    with pytest.warns(UserWarning, match="'a' is no longer tied"):
        untied = reparametrize(batch, "standard")
    assert untied.a.weight is not untied.b.weight
    assert close(untied(x), batch(x))


def test_a_trained_batch_norm_needs_a_bias() -> None:
    model, x = network("mlp")
    batch = reparametrize(model, "batch", batch=x)
    with torch.no_grad():
        batch[2].norm.bias.add_(1)
        batch[2].norm.weight.neg_()
    plain = reparametrize(batch, "standard")
    assert plain[2].bias is not None
    assert close(plain(x), batch(x))


def test_frozen_parameters_stay_frozen() -> None:
    model, x = network("conv")
    model[0].requires_grad_(False)
    for to in ("weight", "batch"):
        converted = reparametrize(model, to, batch=x)
        assert not any(p.requires_grad for p in converted[0].parameters())
        assert all(p.requires_grad for p in converted[2].parameters())
        back = reparametrize(converted, "standard")
        assert [(n, p.requires_grad) for n, p in back.named_parameters()] == [
            (n, p.requires_grad) for n, p in model.named_parameters()
        ]


ERRORS = {
    "unknown form": ({"to": "layer"}, "must be one of"),
    "no batch": ({"to": "batch"}, "needs `batch`"),
    "no moments": ({"to": "analytic"}, "needs `moments`"),
    "own batch norm": ({"to": "weight"}, "'1' is the model's own: give `example`"),
    "no variance": ({"to": "batch", "batch": NETWORKS["own batch norm"][1][:1]}, "'8' one value per channel"),
    "not finite": (
        {"to": "batch", "batch": NETWORKS["own batch norm"][1] * torch.nan},
        "'0' on the batch is not finite",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("inplace", [False, True])
def test_bad_use_is_named_and_changes_nothing(case: str, inplace: bool) -> None:
    arguments, message = ERRORS[case]
    model, _ = network("own batch norm")
    state = copy.deepcopy(model)
    with pytest.raises(ValueError, match=message):
        reparametrize(model, **arguments, inplace=inplace)
    assert identical(model, state)
    assert str(model) == str(state)


@pytest.mark.parametrize(
    ("value", "message"), [(0.0, "Row 1 of the weight of '2' is zero"), (torch.inf, "'2' is not fin")]
)
def test_a_weight_without_direction_is_named(value: float, message: str) -> None:
    model, _ = network("mlp")
    with torch.no_grad():
        model[2].weight[1] = value
    with pytest.raises(ValueError, match=message):
        reparametrize(model, "weight", inplace=True)
    assert not has_weight_norm(model[0])


@pytest.mark.parametrize("to", ("weight", "batch"))
def test_a_complex_weight_is_named(to: Any) -> None:
    model, x = nn.Sequential(nn.Linear(3, 2, dtype=torch.complex64)), torch.randn(8, 3, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"^The weight of '0' is complex, which torch's .* norm\w* does not take\.$"):
        reparametrize(model, to, batch=x if to == "batch" else None)
