"""Weight normalization: torch's own, exact both ways, nothing left behind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.convert.networks import close, network, same_state
from varprop import reparametrize
from varprop.convert.reparametrize import from_weight_norm_, has_weight_norm, to_weight_norm_


def test_it_is_torchs_own() -> None:
    ours = to_weight_norm_(network("mlp")[0])
    theirs = network("mlp")[0]
    for i in (0, 2, 4):
        nn.utils.parametrizations.weight_norm(theirs[i])
    assert same_state(ours, theirs)
    assert type(ours[0]).__name__ == type(theirs[0]).__name__


@pytest.mark.parametrize("name", ["mlp", "grouped", "tied"])
def test_nothing_is_left_behind(name: str) -> None:
    model, x = network(name)
    back = from_weight_norm_(to_weight_norm_(network(name)[0]))
    assert same_state(back, model)
    assert close(pickle.loads(pickle.dumps(back))(x), model(x))
    assert [n for n, _ in back.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_a_transposed_convolution_is_normalized_over_its_outputs() -> None:
    model = to_weight_norm_(nn.ConvTranspose2d(4, 6, 3))
    assert model.parametrizations.weight.original0.shape == (1, 6, 1, 1)


def test_an_embedding_s_weight_stays_shared() -> None:
    model, _ = network("language")
    to_weight_norm_(model)
    assert has_weight_norm(model.mix) and not has_weight_norm(model.head)
    assert model.head.weight is model.tokens.weight


def test_users_own_weight_norm_is_kept_and_removed() -> None:
    model, x = network("mlp")
    nn.utils.parametrizations.weight_norm(model[0])
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(3)
    scaled = model(x)
    direction = model[0].parametrizations.weight.original1
    to_weight_norm_(model)
    assert model[0].parametrizations.weight.original1 is direction
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
    assert not has_weight_norm(layer)
