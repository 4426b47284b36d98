"""Rows minus their mean: exact where that is possible, in layers of all kinds, and never mistaken for free rows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import varprop as vp
from tests.norm.networks import alone_, apart, case, kept, sites
from varprop.norm.fold.reference import minus_row_mean

KINDS: dict[str, tuple[nn.Module, ...]] = {
    "linear": (nn.Linear(3, 2), nn.Linear(2, 3)),
    "conv": (nn.Conv2d(2, 2, 2, padding=1), nn.Conv2d(2, 2, (1, 2))),
    "grouped": (nn.Conv2d(4, 2, 2, padding=1, groups=2), nn.Conv2d(2, 2, 1)),
    "depthwise": (nn.Conv1d(2, 4, 3, padding=1, groups=2), nn.Conv1d(4, 4, 1, groups=4)),
    "transposed": (nn.ConvTranspose2d(2, 2, 2, stride=2), nn.ConvTranspose2d(2, 4, 2, padding=1, groups=2)),
    "three dimensions": (nn.Conv3d(1, 2, 2, padding=1), nn.ConvTranspose3d(2, 1, 2)),
}


def small(name: str) -> tuple[nn.Module, Tensor]:
    """Two layers of a kind with a function between them, with centred rows, and an input."""
    torch.manual_seed(0)
    first, second = copy.deepcopy(KINDS[name])
    axes = first.weight.ndim - 2
    channels = first.in_features if isinstance(first, nn.Linear) else first.in_channels
    x = 0.5 + torch.randn(2, channels, *[2] * axes, dtype=torch.float64)
    ones = torch.ones(1, channels, *[1] * axes).double()
    plain = nn.Sequential(first, nn.GELU(), second).double()
    return vp.normalize(plain, vp.Moments(0.5 * ones, ones), example=x, form="deep"), x


@pytest.mark.slow
@pytest.mark.parametrize("alone", (False, True), ids=("together", "alone"))
@pytest.mark.parametrize("name", KINDS)
def test_gradcheck(name: str, alone: bool) -> None:
    model, x = small(name)
    model = alone_(model) if alone else model
    names = [key for key, _ in model.named_parameters()]
    values = [p.detach() + 0.2 * torch.randn(p.shape).double() for p in model.parameters()]

    def run(*values: Tensor) -> Tensor:
        output: Tensor = functional_call(model, dict(zip(names, values, strict=True)), (x,))
        return output

    assert torch.autograd.gradcheck(run, tuple(v.requires_grad_() for v in values), fast_mode=not alone)


def test_rows_of_one_weight_stay_as_they_are() -> None:
    model, _ = small("depthwise")
    assert [site.centred_rows for site in sites(model).values()] == [True, False]
    weight = model[2].folded()[0]
    assert bool(weight.all()) and torch.equal(weight.sign(), model[2].weight.sign())


def test_equal_weights_leave_exactly_nothing() -> None:
    for dtype in (torch.float32, torch.float64):
        for count in (2, 3, 7, 1000, 4608):
            assert not bool(minus_row_mean(torch.full((2, count), 0.1, dtype=dtype), (1,)).any())


@pytest.mark.parametrize("alone", (False, True), ids=("together", "alone"))
def test_a_row_that_became_equal_gives_its_shift_and_no_nan(alone: bool) -> None:
    given, kept_model = kept("named parts", form="deep")
    model: Any = copy.deepcopy(kept_model)
    model = alone_(model) if alone else model
    with torch.no_grad():
        model.classifier.weight[1] = 0.3
        model.classifier.shift[1] = 2.5
    outputs = model(*given.inputs)
    assert (outputs[:, 1] == 2.5).all()
    outputs.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters()) and not bool(model.classifier.weight.grad[1].any())


@pytest.mark.parametrize("size", (1e-30, 1.0, 1e30))
@pytest.mark.parametrize("alone", (False, True), ids=("together", "alone"))
def test_a_mean_of_a_thousand_times_the_spread_costs_no_digits(alone: bool, size: float) -> None:
    """Against float64 from the same weights, which float32 holds to no more than 1e-4 of their spread."""
    given = case("grouped", torch.float32)
    model = given.normalized(form="deep")
    for site in sites(model).values():
        with torch.no_grad():
            site.weight.add_(1000 * site.weight.std()).mul_(size)
            site.shift.normal_()
    model = alone_(model) if alone else model
    exact = copy.deepcopy(model).double()
    for ours, theirs in zip(sites(model).values(), sites(exact).values(), strict=True):
        found, expected = ours.folded(), theirs.folded()
        direction = torch.randn_like(found[0])
        for parts in (found, expected):
            (parts[0] * direction).sum().backward()
        assert apart(ours.weight.grad.double(), theirs.weight.grad) <= 1e-5
        assert all(apart(a.double(), b) <= 1e-5 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ("named parts", "reused", "recalled"))  # all together, each alone, both
@pytest.mark.parametrize(("saved", "own"), (("deep", "paper"), ("paper", "deep")))
@pytest.mark.parametrize("strict", (True, False))
def test_a_checkpoint_of_the_other_form_is_refused(name: str, saved: str, own: str, strict: bool) -> None:
    model = copy.deepcopy(kept(name, form=own)[1])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    other = {key: value + 1 for key, value in kept(name, form=saved)[1].named_parameters()}
    facts = {key: value for key, value in kept(name, form=saved)[1].state_dict().items() if "_extra_state" in key}
    with pytest.raises(ValueError, match="in another form"):
        model.load_state_dict(other | facts, strict=strict)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_what_is_refused_leaves_copies_as_they_were_and_folding_takes_the_check_away() -> None:
    given = case("language")  # its embedding comes before the layers
    model = given.normalized(form="deep")
    other = {key: value + 1 for key, value in given.normalized(form="paper").state_dict().items()}
    for own in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="in another form"):
            own.load_state_dict(other)
        assert all(torch.equal(a, b) for a, b in zip(own.parameters(), model.parameters(), strict=True))
    assert not any(module._load_state_dict_pre_hooks for module in vp.fold(model).modules())


def test_what_preserves_has_free_rows() -> None:
    given = case("mlp")
    assert not any(site.centred_rows for site in sites(given.normalized(init="preserve")).values())
    deep = given.normalized(form="deep")
    again = vp.reparametrize(deep, "analytic", moments=given.moments, example=given.inputs)
    assert apart(given.run(again), given.run(deep)) <= 1e-12
    assert not any(site.centred_rows for site in sites(again).values())


def test_forms_are_told_apart_by_compiled_graphs() -> None:
    numbers = {kept("mlp", "project", form)[1][0].networks[False][0].executor.number for form in ("paper", "deep")}
    assert len(numbers) == 2
