"""Weight normalization: torch's own, exact both ways, nothing left behind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.convert.networks import close, has_weight_norm, network, same_state
from varprop import reparametrize


def test_it_is_torchs_own() -> None:
    ours = reparametrize(network("mlp")[0], "weight")
    theirs = network("mlp")[0]
    for i in (0, 2, 4):
        nn.utils.parametrizations.weight_norm(theirs[i])
    assert same_state(ours, theirs)
    assert type(ours[0]).__name__ == type(theirs[0]).__name__


@pytest.mark.parametrize("name", ["mlp", "grouped", "tied"])
def test_nothing_is_left_behind(name: str) -> None:
    model, x = network(name)
    back = reparametrize(reparametrize(network(name)[0], "weight"), "standard")
    assert same_state(back, model)
    assert close(pickle.loads(pickle.dumps(back))(x), model(x))
    assert [n for n, _ in back.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_a_transposed_convolution_is_normalized_over_its_outputs() -> None:
    model = reparametrize(nn.ConvTranspose2d(4, 6, 3), "weight")
    assert model.parametrizations.weight.original0.shape == (1, 6, 1, 1)


def test_an_embedding_s_weight_stays_shared() -> None:
    model, _ = network("language")
    reparametrize(model, "weight", inplace=True)
    assert has_weight_norm(model.mix) and not has_weight_norm(model.head)
    assert model.head.weight is model.tokens.weight


def test_users_own_weight_norm_is_kept_and_removed() -> None:
    model, x = network("mlp")
    nn.utils.parametrizations.weight_norm(model[0])
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(3)
    scaled = model(x).detach()
    reparametrize(model, "weight", inplace=True)
    assert all(map(has_weight_norm, (model[0], model[2], model[4])))
    assert close(model(x), scaled)
    assert close(reparametrize(model, "standard")(x), scaled)


def test_a_converted_copy_leaves_the_original_and_its_copies() -> None:
    model, x = network("mlp")
    nn.utils.parametrizations.weight_norm(model[0])
    before, twin = model(x), copy.deepcopy(model)
    reparametrize(model, "standard", inplace=False)
    assert close(model(x), before) and close(twin(x), before) and close(copy.deepcopy(model)(x), before)


def test_a_stack_of_parametrizations_is_not_weight_norm() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    model = nn.Sequential(layer)
    assert nn.utils.parametrize.is_parametrized(reparametrize(model, "standard")[0], "weight")
    with pytest.raises(ValueError, match="parametrized otherwise"):
        reparametrize(model, "weight")
