"""The vision transformer learns with every normalization, and its analytic form is folded the fast way."""

from __future__ import annotations

import pytest
import torch
from train_vit import ViTRun, make_model, parse

import varprop as vp

SMALL = ["--width", "16", "--depth", "1", "--heads", "2", "--held-out", "4", "--batch", "4", "--epochs", "2"]


def run(data: str, *arguments: str) -> ViTRun:
    return ViTRun(parse(["--data", data, *SMALL, *arguments]), make_model)


@pytest.mark.parametrize("norm", ["layer", "rms", "dyt", "derf", "analytic", "none"])
def test_every_normalization(data: str, norm: str) -> None:
    result = run(data, "--norm", norm, "--qk-norm").train()
    assert torch.tensor(result["history"][0]["loss"]).isfinite() and 0 <= result["held out"] <= 1


def test_all_layers_are_folded_together_and_scales_have_a_rate_of_their_own(data: str) -> None:
    made = run(data, "--norm", "analytic", "--scale-rate", "10")
    layers = vp.fold_report(made.model).layers
    assert len(layers) == 6 and all(layer.how == "together" for layer in layers)
    assert made.optimizer.defaults["lr"] * 10 == made.rate.base_lrs[1] * 25  # one-cycle begins at 1/25 of its peak


def test_first_values_of_bounded_norms_and_of_the_patches(data: str) -> None:
    small, asked = (
        run(data, "--norm", "dyt").model,
        run(data, "--norm", "dyt", "--alpha", "2", "--patches", "torch").model,
    )
    assert [float(model.get_parameter("blocks.0.norm1.alpha").detach()) for model in (small, asked)] == [0.5, 2.0]
    deviations = [float(model.get_parameter("patches.weight").detach().std()) for model in (small, asked)]
    assert deviations == pytest.approx([0.02, (3 * 48) ** -0.5], rel=0.1)


def test_scales_of_layer_norm_may_have_a_rate_of_their_own(data: str) -> None:
    made = run(data, "--norm", "layer", "--scale-rate", "10")
    assert made.rate.base_lrs[1] == pytest.approx(10 * made.rate.base_lrs[0])
