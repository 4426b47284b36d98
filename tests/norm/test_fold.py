"""What fold leaves behind, and what it says about it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import varprop as vp
from tests.models import ResNet
from tests.norm.networks import apart, case, kept, sites, train_a_little


def test_a_layer_that_gains_a_bias_is_named() -> None:
    _, normalized = kept("mlp", "project")
    with pytest.warns(UserWarning, match=r"had no bias and have one now: 2\."):
        folded = vp.fold(normalized)
    assert folded[2].bias is not None


def test_a_bias_of_zero_is_not_gained() -> None:
    given, normalized = kept("mlp")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folded = vp.fold(normalized)
    assert folded.state_dict().keys() == given.model.state_dict().keys()


def test_no_warning_where_the_original_has_a_place_for_every_bias() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vp.fold(kept("resnet")[1])


def test_batch_norms_come_back_as_what_they_were() -> None:
    given, normalized = kept("resnet")
    folded = vp.fold(normalized)
    assert [type(m) for m in folded.modules()] == [type(m) for m in given.model.modules()]
    assert folded.state_dict().keys() == given.model.state_dict().keys()
    assert isinstance(folded, ResNet)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norms_come_back_for_scales_of_any_sign(bias: bool, affine: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4, affine=affine), nn.Flatten(), nn.Linear(64, 2)
    model = vp.normalize(nn.Sequential(*layers).double(), vp.Moments(0.5, 2.0), example=(1, 3, 6, 6)).eval()
    with torch.no_grad():
        model[0].scale.copy_(torch.tensor([2.0, -0.5, 0.0, 1e-9]))
        model[0].shift.copy_(torch.tensor([1.0, 0.0, 2.0, -1.0]))
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    assert apart(vp.fold(model)(x), model(x)) <= 1e-12


def test_leaner_without_batch_norms() -> None:
    given, normalized = kept("resnet")
    lean = vp.fold(normalized, keep_batchnorm=False)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in lean.modules())
    assert all(m.bias is not None for m in lean.modules() if isinstance(m, nn.Conv2d))
    assert apart(given.run(lean), given.run(given.model)) <= 1e-12
    count = sum(p.numel() for p in lean.parameters())
    assert count < sum(p.numel() for p in given.model.parameters())


def test_the_folded_model_shows_no_trace_of_varprop() -> None:
    for name in ("conv", "resnet"):
        given, normalized = kept(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folded = vp.fold(normalized)
        plain = {name for m in given.model.modules() for name in vars(m)}
        assert {name for m in folded.modules() for name in vars(m)} <= plain


def test_the_same_object_when_asked_for() -> None:
    given = case("conv", torch.float32)
    model = given.model
    weights = [m.weight for m in model.modules() if hasattr(m, "weight")]
    assert given.normalized(inplace=True) is model
    with pytest.warns(UserWarning, match="had no bias"):
        assert vp.fold(model, inplace=True) is model
    assert all(
        a is b for a, b in zip(weights, (m.weight for m in model.modules() if hasattr(m, "weight")), strict=True)
    )


def test_the_original_is_not_touched() -> None:
    given = case("own batch norm")
    before, classes = copy.deepcopy(given.model.state_dict()), [type(m) for m in given.model.modules()]
    vp.fold(train_a_little(given.normalized()))
    assert [type(m) for m in given.model.modules()] == classes
    assert all(torch.equal(before[key], value) for key, value in given.model.state_dict().items())


def test_tied_weights_come_apart_with_a_word() -> None:
    given, normalized = kept("tied", "project")
    with pytest.warns(UserWarning, match="no longer tied to others: a"):
        folded = vp.fold(normalized)
    assert apart(given.run(folded), given.run(normalized)) <= 1e-12


def test_tied_weights_stay_tied_as_long_as_they_can() -> None:
    given, normalized = kept("tied")
    assert normalized.a.weight is normalized.b.weight
    folded = vp.fold(normalized)
    assert folded.a.weight is folded.b.weight
    assert torch.equal(folded.a.weight, given.model.a.weight)


def test_an_embedding_keeps_its_weight_when_the_tied_head_is_scaled() -> None:
    given, normalized = kept("language", "project")
    with pytest.warns(UserWarning, match="no longer tied .*: head"):
        folded = vp.fold(normalized)
    assert torch.equal(folded.tokens.weight, given.model.tokens.weight)


def test_initialization_tells_of_weights_that_come_apart() -> None:
    given = case("language")
    with pytest.warns(UserWarning, match="no longer tied"):
        vp.init_(given.model, given.moments, example=given.inputs)


def test_frozen_layers_stay_frozen() -> None:
    given, normalized = kept("frozen")
    trainable = {name for name, p in normalized.named_parameters() if p.requires_grad}
    assert trainable == {f"{layer}.{name}" for layer in (2, 4) for name in ("weight", "scale", "shift")}
    folded = vp.fold(normalized)
    assert [p.requires_grad for p in folded.parameters()] == [p.requires_grad for p in given.model.parameters()]


def test_only_some_layers() -> None:
    given = case("named parts")
    before = given.run(given.model)
    for only, expected in (
        ("features", ["features.0", "features.2"]),
        (["features.2", "classifier"], ["features.2", "classifier"]),
        (lambda path, module: isinstance(module, nn.Linear), ["classifier"]),
    ):
        normalized = given.normalized(init="preserve", only=only)
        assert list(sites(normalized)) == expected
        assert apart(given.run(normalized), before) <= 1e-12
        trained = train_a_little(normalized)
        assert apart(given.run(vp.fold(trained)), given.run(trained)) <= 1e-12


def test_existing_norms_are_respected() -> None:
    given, normalized = kept("own norms")
    kinds = (nn.GroupNorm, nn.LayerNorm)
    theirs = [m for m in given.model.modules() if isinstance(m, kinds)]
    ours = [m for m in normalized.modules() if isinstance(m, kinds)]
    assert len(ours) == len(theirs) == 2
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(ours, theirs, strict=True))


def test_the_wrong_sign_of_the_bias_would_be_noticed() -> None:
    given, kept_model = kept("mlp")
    normalized = copy.deepcopy(kept_model)
    before = given.run(given.model)
    for path, site in sites(normalized).items():
        mean, _ = site.output_statistics()
        bias = given.model.get_submodule(path).bias
        bias = torch.zeros_like(mean) if bias is None else bias
        assert apart(site.shift, bias + mean) <= 1e-12
        assert mean.abs().max() > 0.1
        with torch.no_grad():
            site.shift.copy_(bias - mean)
        assert apart(given.run(normalized), before) > 0.01
        with torch.no_grad():
            site.shift.copy_(bias + mean)
    assert apart(given.run(normalized), before) <= 1e-12


def test_folding_a_part_of_a_larger_model() -> None:
    given, normalized = kept("own batch norm")
    whole = nn.Sequential(copy.deepcopy(normalized), nn.Softmax(1))
    before = whole(*given.inputs)
    folded = vp.fold(whole)
    assert apart(folded(*given.inputs), before) <= 1e-12
    assert folded[0].state_dict().keys() == given.model.state_dict().keys()
