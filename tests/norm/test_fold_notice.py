"""What folding adds is said when a model is normalized, in one sentence, and only where it does."""

import warnings

import pytest
from torch import nn

import varprop as vp

MOMENTS = vp.Moments(0.0, 1.0)


def normalized(model):
    return vp.normalize(model, MOMENTS, example=(1, 4), form="paper")


def tied():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(4, 2, bias=False))


def test_biases_and_untied_weights_are_told_at_once():
    with pytest.warns(UserWarning) as told:
        normalized(tied())
    (message,) = [str(one.message) for one in told if "vp.fold" in str(one.message)]
    assert message == (
        "vp.fold will in general give a bias to '4' and untie the weights of '0', '2': load_state_dict of what it "
        "returns into the plain class does not take these biases if it is strict and ties these weights again, so that "
        "all have the values of one, without a word."
    )


@pytest.mark.filterwarnings("ignore:vp.fold will", "ignore:The weights of", "ignore:These layers had")
def test_untied_weights_are_tied_again_by_a_plain_class_that_loads_them():
    plain = tied()
    folded = vp.fold(normalized(plain))
    missing, unexpected = plain.load_state_dict(folded.state_dict(), strict=False)
    assert not missing and unexpected == ["4.bias"] and plain[0].weight is plain[2].weight
    assert not plain[0].weight.equal(folded[0].weight) and plain[2].weight.equal(folded[2].weight)


def test_and_it_is_what_fold_does():
    with pytest.warns(UserWarning, match=r"vp\.fold will in general"):
        model = normalized(tied())
    with pytest.warns(UserWarning, match="have one now: 4") as told:
        vp.fold(model)
    assert any("no longer tied to others: 0" in str(one.message) for one in told)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)),
    ],
)
def test_nothing_is_said_where_everything_has_its_place(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folded = vp.fold(normalized(model))
    model.load_state_dict(folded.state_dict())
