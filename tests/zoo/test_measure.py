"""Positions alike and apart, against each other."""

from __future__ import annotations

import torch
from benchmarks.zoo.inputs import Normal, Words, has_positions, moments
from benchmarks.zoo.measure import at_a_random_position, measure
from torch import nn

import varprop as vp


def test_a_random_position_has_the_spread_of_the_means() -> None:
    mean, var = torch.tensor([[[1.0, 3.0], [0.0, 0.0]]]), torch.ones(1, 2, 2)
    found = at_a_random_position(vp.Moments(mean, var), torch.Size([1, 2, 1]))
    torch.testing.assert_close(found.mean, torch.tensor([[[2.0], [0.0]]], dtype=torch.float64))
    torch.testing.assert_close(found.var, torch.tensor([[[2.0], [1.0]]], dtype=torch.float64))


def test_only_images_have_positions() -> None:
    assert has_positions((Normal((1, 3, 8, 8)), Words(10))) and not has_positions((Normal((1, 8, 3)), Words(10)))
    alike, apart = (moments((Normal((1, 3, 8, 8)),), apart)[0].shape for apart in (False, True))
    assert alike == (1, 3, 1, 1) and apart == (1, 3, 8, 8)


def test_positions_apart_are_right_at_borders() -> None:
    """Zero padding weakens the border of small maps, layer after layer, which an average over positions cannot know."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1), *(nn.Conv2d(32, 32, 3, padding=1) for _ in range(9))]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight), nn.init.zeros_(layer.bias)
    model = nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))
    with torch.no_grad():
        first, second = measure(model, (Normal((1, 3, 6, 6)),), 200)
    assert first["median_error"] > 0.12 and second["median_error"] == first["median_error"]
    assert second["apart"]["median_error"] < 0.04
