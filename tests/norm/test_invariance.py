"""The scale of a weight, in the deep form its mean too, and a former bias do not matter: nothing to tune or decay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from tests.norm.networks import apart, both_forms, case, kept, sites
from varprop.norm import Normalized

NAMES = ("conv", "grouped", pytest.param("identity skip", marks=pytest.mark.slow), "own norms")


def rows(values: Tensor, layer: nn.Module) -> Tensor:
    """Sum over the weights of every output channel."""
    if not getattr(layer, "transposed", False):
        return values.flatten(1).sum(1)
    grouped = values.reshape(layer.groups, -1, *values.shape[1:])
    return grouped.transpose(1, 2).flatten(2).sum(2).flatten()


@pytest.mark.parametrize("name", NAMES)
def test_no_learning_rate_is_lost_to_the_scale_of_a_weight(name: str) -> None:
    given = case(name, torch.float32)
    normalized = given.normalized()
    before, weights = given.run(normalized), {p: s.weight.clone() for p, s in sites(normalized).items()}
    for exponent in (-6, -3, 3, 6):
        for path, site in sites(normalized).items():
            with torch.no_grad():
                site.weight.copy_(weights[path] * 10.0**exponent)
            assert apart(given.run(normalized), before) <= 1e-5
        assert apart(given.run(normalized), before) <= 1e-5  # all of them together


@both_forms
@pytest.mark.parametrize("name", ("conv", "grouped", "recalled", "own norms"))
def test_homogeneity_is_exact(name: str, form: str) -> None:
    given, kept_model = kept(name, form=form)
    normalized = copy.deepcopy(kept_model)
    before = given.run(normalized)
    for site in sites(normalized).values():
        with torch.no_grad():
            site.weight.mul_(2.0**18)
    assert torch.equal(given.run(normalized), before)


@both_forms
def test_weights_whose_squares_are_too_small_for_float32_are_normalized(form: str) -> None:
    given = case("conv", torch.float32)
    before = given.run(given.normalized(form=form))
    with torch.no_grad():
        for parameter in given.model.parameters():
            parameter.mul_(2.0**-100)
    assert torch.equal(given.run(given.normalized(form=form)), before)


def to_every_row(numbers: Tensor, site: Any) -> Tensor:
    """A number for each output, in the form of the weight; a transposed one is (inputs, outputs of a group, ...)."""
    positions = [1] * (site.weight.ndim - 2)
    if not getattr(site, "transposed", False):
        return numbers.view(-1, 1, *positions)
    rows = numbers.view(site.groups, -1).repeat_interleave(len(site.weight) // site.groups, 0)
    return rows.view(*rows.shape, *positions)


@pytest.mark.parametrize("name", ("conv", "grouped", "other ranks", "unet", "recalled", "own norms"))
def test_a_number_added_to_a_centred_row_does_not_matter(name: str) -> None:
    given, kept_model = kept(name, form="deep")
    normalized = copy.deepcopy(kept_model)
    before = given.run(normalized)
    for site in sites(normalized).values():
        numbers = torch.linspace(-3, 5, len(site.scale)).double()
        with torch.no_grad():
            site.weight.add_(to_every_row(numbers, site))
    assert apart(given.run(normalized), before) <= 1e-12


def test_a_former_bias_leaves_no_trace() -> None:
    given = case("conv", torch.float32)
    before = given.run(given.normalized())
    for layer in given.model.modules():
        if getattr(layer, "bias", None) is not None:
            nn.init.normal_(layer.bias, 3, 10)
    assert apart(given.run(given.normalized()), before) <= 1e-5


def after_training(images: Tensor, form: Any) -> Tensor:
    """Outputs of a projected network after a few steps of Adam on these images."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 5))
    model = vp.normalize(plain.double(), vp.input_moments(images), form=form)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), torch.arange(32) % 5).backward()
        optimizer.step()
    return model(images).detach()


@both_forms
def test_scale_and_bias_of_the_images_do_not_matter_in_training(form: str) -> None:
    images = 1e5 * torch.rand(32, 1, 8, 8).double()  # large beside epsilon, which does not scale with them
    before = after_training(images, form)
    for scale, bias in ((3, 0), (1, 2e5), (30, -1e5)):
        assert apart(after_training(scale * images + bias, form), before) <= 1e-10
    assert apart(after_training(1e-8 * images, form), before) > 1e-3  # below epsilon it does


@both_forms
@pytest.mark.parametrize("name", ("mlp", "conv", "grouped", "identity skip", "unet", "recalled", "own norms"))
def test_steps_go_around_the_sphere(name: str, form: str) -> None:
    given, normalized = kept(name, form=form)
    outputs = given.run(normalized)
    loss = (outputs * torch.linspace(-1, 1, len(outputs), dtype=outputs.dtype)).sum() + outputs.square().mean()
    found: dict[str, Normalized] = sites(normalized)
    gradients = torch.autograd.grad(loss, [site.weight for site in found.values()])
    for (path, site), gradient in zip(found.items(), gradients, strict=True):
        along = rows(gradient * site.weight, site).abs()
        size = rows(gradient.square(), site).sqrt() * rows(site.weight.square(), site).sqrt()
        assert size.max() > 0, path
        assert (along <= 1e-12 * torch.maximum(size, size.max())).all(), path
        if form == "deep":
            assert (rows(gradient, site).abs() <= 1e-12 * rows(gradient.abs(), site).max()).all(), path


@both_forms
@pytest.mark.parametrize("name", ("grouped", "unet"))
def test_unit_norms_change_no_output(name: str, form: str) -> None:
    given, kept_model = kept(name, form=form)
    normalized = vp.unit_norm_(copy.deepcopy(kept_model))
    assert apart(given.run(normalized), given.run(kept_model)) <= 1e-12
    for site in sites(normalized).values():
        assert (rows(site.weight.square(), site) - 1).abs().max() <= 1e-12
        assert form == "paper" or rows(site.weight, site).abs().max() <= 1e-12


class Autoencoder(nn.Module):
    """The way up has the weight of the way down, where its outputs are other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 5, 2, stride=2), nn.ConvTranspose2d(5, 3, 2, stride=2)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.up(torch.relu(self.down(x)))
        return found


@both_forms
def test_unit_norms_leave_a_transposed_twin_alone(form: Any) -> None:
    torch.manual_seed(0)
    x, ones = torch.randn(2, 3, 4, 4).double(), torch.ones(1, 3, 1, 1).double()
    model = vp.normalize(Autoencoder().double(), vp.Moments(0 * ones, ones), example=x, form=form)
    before = model(x)
    assert torch.equal(vp.unit_norm_(model)(x), before)


@both_forms
def test_no_decay_on_what_has_no_scale(form: str) -> None:
    _, normalized = kept("conv", form=form)
    assert [group["weight_decay"] for group in vp.param_groups(normalized, 0.1)] == [0.0]


def test_scales_of_any_sign_have_a_gradient() -> None:
    given, kept_model = kept("conv")
    normalized = copy.deepcopy(kept_model)
    for site in sites(normalized).values():
        with torch.no_grad():
            site.scale[0], site.scale[1] = 0, -1.5
    given.run(normalized).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in normalized.parameters())
