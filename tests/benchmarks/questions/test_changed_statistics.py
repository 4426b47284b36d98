"""Networks with other statistics than the propagated ones, and what is measured of distributions and biases."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.questions import of_training
from benchmarks.questions.of_statistics import (
    FACTOR,
    WithVariances,
    distance,
    followed,
    linearized,
    rejected,
    scaled,
    taken,
    with_first_moments,
    with_held_statistics,
)
from benchmarks.questions.runs import AveragingTrainer, trained
from benchmarks.ratios import normalized_layers

import varprop as vp
from tests.benchmarks.questions.test_study import MEAN, SETTINGS, VAR, data, images, normalized
from varprop_lab.protocol import Cell
from varprop_lab.training import Task


class WithMoments:
    """What the networks ask a task for."""

    def moments(self, seed):
        return vp.Moments(MEAN.double(), VAR.double())


TASK: Any = WithMoments()


def longer(model, factor=2.0):
    """The network with scales of its hidden layers that are a multiple of what they were."""
    with torch.no_grad():
        for layer in list(model.layers)[:-1]:
            layer.scale.mul_(factor)
    return model


def same(a, b):
    return torch.allclose(a, b, atol=1e-6, rtol=1e-6)


def test_statistics_that_follow_are_those_of_varprop():
    model, x = normalized(), images(5)
    network = WithVariances(model, TASK, 0, followed)
    assert same(network(x), model(x))
    with torch.no_grad():
        for layer in list(normalized_layers(model).values())[:-1]:
            layer.scale.mul_(2)
    torch.testing.assert_close(longer(network)(x), model(x), atol=1e-3, rtol=1e-3)  # two rules of quadrature


@pytest.mark.parametrize("stays", [with_first_moments, with_held_statistics])
def test_statistics_that_stay_are_those_of_the_start(stays):
    x = images(5)
    network = stays(normalized(), TASK, 0)
    assert same(network(x), normalized()(x))
    before = [(m.clone(), s.clone()) for m, s in network.held or network.statistics()]
    longer(network)
    after = network.held or network.statistics()
    assert all(same(a, b) for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))
    assert not same(network(x), longer(WithVariances(normalized(), TASK, 0, followed))(x))


def test_first_moments_follow_weights_and_held_statistics_do_not():
    x = images(5)
    for stays, follows in ((with_first_moments, True), (with_held_statistics, False)):
        network = stays(normalized(), TASK, 0)
        before = network(x)
        with torch.no_grad():
            for layer in network.layers:
                layer.weight.mul_(3)
        assert torch.allclose(network(x), before, atol=1e-3) is follows  # epsilon, beside the variance, is small


@pytest.mark.parametrize("factor", [FACTOR, 1 / FACTOR])
def test_deviations_taken_too_large_are_a_smaller_scale_or_the_same_function(factor):
    model, x = normalized(), images(5)
    assert same(taken(factor, True, copy.deepcopy(model), TASK, 0)(x), model(x))
    network = taken(factor, False, copy.deepcopy(model), TASK, 0)
    first = network.layers[0]
    mean, std = network.statistics()[0]
    right = WithVariances(model, TASK, 0, followed)
    assert same(std, factor * right.statistics()[0][1])
    expected = (right.layers[0](x.flatten(1), *right.statistics()[0]) - first.shift) / factor
    assert same(first(x.flatten(1), mean, std) - first.shift, expected)


def test_tangents_are_enough_for_small_variances_and_not_for_large_ones():
    model = normalized()
    layer = WithVariances(model, TASK, 0, followed).layers[0]
    with torch.no_grad():
        for std, apart in ((0.25, False), (4.0, True)):
            scale = torch.full_like(layer.scale, std)
            shares = linearized(layer, scale)[1] / followed(layer, scale)[1]
            assert bool((shares.log().abs() > 0.2).any()) is apart
    assert isinstance(scaled(4.0, True, copy.deepcopy(model), TASK, 0), WithVariances)
    widened = scaled(4.0, False, copy.deepcopy(model), TASK, 0)
    scales, usual = ([layer.scale for layer in normalized_layers(one).values()] for one in (widened, model))
    assert same(scales[0], 4 * usual[0]) and same(scales[-1], usual[-1])


def test_normal_variables_are_called_normal_and_uniform_ones_are_not():
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2048, 20, generator=generator, dtype=torch.float64)
    uniform = torch.rand(2048, 20, generator=generator, dtype=torch.float64)
    assert 0.01 < rejected(normal) < 0.10 and distance(normal) < 0.03
    assert rejected(uniform) > 0.9 and distance(uniform) > 0.05


@pytest.mark.parametrize("arm", of_training.SCALE_DECAY.arms, ids=lambda arm: arm.name)
def test_scale_and_shift_decay_where_they_are_to(arm):
    task = Task(SETTINGS, data(), arm.factory)
    trainer = AveragingTrainer(task, Cell("questions", arm.method, arm.start, 0, 16), _start(task, arm), arm.decayed)
    groups = trainer._parameter_groups()
    decaying = [p for group in groups if group["weight_decay"] for p in group["params"]]
    vectors = [p for p in trainer.model.parameters() if p.ndim == 1]
    assert len(groups) == 1 + bool(arm.decayed)
    assert len(decaying) == (14 if arm.decayed else 0)  # scale and shift of seven layers
    assert {id(p) for p in decaying} <= {id(p) for p in vectors}


def _start(task, arm):
    cell = Cell("questions", arm.method, arm.start, 0, 16)
    return task.start(cell)


def test_lengths_of_shifts_and_of_biases_are_kept():
    arm = replace(of_training.SCALE_DECAY.arms[1], rates=(0.01,))
    (run,) = trained(arm, 0, data(), SETTINGS)
    assert len(run["shifts"]) == len(run["effective"]) == 3
    assert run["shifts"][0] < run["shifts"][-1] and run["effective"][0] > 0
