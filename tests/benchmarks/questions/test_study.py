"""Runs of the questions on little data: what is changed in a network, what is kept, what is made again."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from benchmarks.questions import study
from benchmarks.questions.of_statistics import WithCovariances, itself
from benchmarks.questions.of_training import add_noise_of_batches, drop_unseen, dropping, lengthened
from benchmarks.questions.runs import Arm, Question, experiment, is_lower, trained
from benchmarks.ratios import normalized_layers, ratios
from torch import nn

import varprop as vp
from tests.lab import tiny
from varprop_lab.figures import Figure, Panel
from varprop_lab.protocol import build

MEAN, VAR = torch.full((1, 1, 28, 28), 0.4), torch.full((1, 1, 28, 28), 0.1)
SETTINGS = replace(experiment(epochs=2, images=64), batch_sizes=(16,))


@functools.cache
def made():
    model = vp.normalize(build("mnist", 0), vp.Moments(MEAN, VAR), form="paper").double()
    with torch.no_grad():
        for layer in normalized_layers(model).values():
            layer.shift.add_(torch.linspace(-1, 1, len(layer.shift)))
    return model


def normalized():
    return copy.deepcopy(made())


def images(count, seed=0):
    drawn = torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return MEAN + VAR.sqrt() * drawn


def test_ratios_are_one_where_the_hypothesis_holds():
    model = nn.Sequential(*list(normalized().children())[:2])  # one layer of independent inputs
    assert list(ratios(model, images(4000)).values()) == pytest.approx([1.0], abs=0.02)


def test_lengthened_weights_are_the_same_function():
    model, x = normalized(), images(5)
    before = model(x)
    torch.testing.assert_close(lengthened(9.0, model, None, 0)(x), before)


def test_noise_of_batches_is_that_of_their_statistics():
    model, x = normalized().train(), images(64)
    expected = copy.deepcopy(model)
    noisy = add_noise_of_batches(model, None, 0)
    first, plain = (next(iter(normalized_layers(one).values())) for one in (noisy, expected))
    inputs = x.flatten(1)
    torch.manual_seed(0)
    with torch.no_grad():
        found, usual = torch.stack([first(inputs) for _ in range(400)]), plain(inputs)
    torch.testing.assert_close(found.mean((0, 1)), usual.mean(0), atol=0.03, rtol=0)
    assert float(found.mean(1).std(0).mean()) == pytest.approx(64**-0.5, rel=0.1)
    assert float((found.std(1) / usual.std(0)).std(0).mean()) == pytest.approx(128**-0.5, rel=0.1)
    torch.testing.assert_close(noisy.eval()(x), expected.eval()(x))


def test_dropout_outside_the_statistics_leaves_evaluation_as_it_is():
    model, x = normalized(), images(5)
    dropped = drop_unseen(0.5, copy.deepcopy(model), None, 0)
    torch.testing.assert_close(dropped.eval()(x), model.eval()(x))
    assert not torch.allclose(dropped.train()(x), model.train()(x))
    assert sum(isinstance(layer, nn.Dropout) for layer in dropping(0.1)) == 6


def test_without_covariances_the_better_statistics_are_those_of_varprop(monkeypatch):
    model, x = normalized(), images(5)
    full = WithCovariances(list(normalized_layers(model).values()), MEAN.flatten(), torch.diag(VAR.flatten()))
    assert not torch.allclose(full(x), model(x), atol=1e-2)  # weights make units correlated
    own = full._logistic
    diagonal = lambda layer, correlation: own(layer, torch.eye(len(correlation), dtype=torch.float64))  # noqa: E731
    monkeypatch.setattr(full, "_logistic", diagonal)
    torch.testing.assert_close(full(x), model(x), atol=1e-6, rtol=1e-6)


def test_with_covariances_predictions_are_truer():
    model, x = normalized(), images(4000)
    full = WithCovariances(list(normalized_layers(model).values()), MEAN.flatten(), torch.diag(VAR.flatten()))
    diagonal, better = (torch.tensor(list(ratios(one, x).values())).log().abs().max() for one in (model, full))
    assert better < 0.05 < diagonal


def data():
    return replace(tiny.dataset(), train_x=torch.randint(0, 255, (90, 1, 28, 28), dtype=torch.uint8))


def test_a_run_keeps_what_its_arm_asks_for():
    arm = Arm("both", rates=(0.01, 0.02), averaged=True, watched=itself)
    first, second = trained(arm, 0, data(), SETTINGS)
    assert (first["rate"], second["rate"]) == (0.01, 0.02)
    assert len(first["valid_loss"]) == len(first["averaged_loss"]) == 2
    assert len(first["ratios"]) == 3 and all(len(epoch) == 7 for epoch in first["ratios"])
    assert first["ratios"][0] == second["ratios"][0] and first["ratios"][1] != second["ratios"][1]
    assert first["averaged_loss"] != first["valid_loss"]


def test_what_is_there_is_not_made_again(tmp_path, monkeypatch):
    arms = Arm("batch", "batch", "bn", (0.01,)), Arm("plain", "standard", "none", (0.01,))
    claim = ("one is lower", is_lower((("batch", "batch_loss"), ("plain", "valid_loss"))))
    figure = Figure("small", "small", "", (Panel("", ()),), "x", "y")
    question = Question("small", "Is it so?", arms, SETTINGS, (claim,), lambda records: figure)
    monkeypatch.setattr(study, "QUESTIONS", {"small": question})
    monkeypatch.setattr(study.datasets, "load", lambda *_: data())
    said: list[str] = []
    study.study(tmp_path, seeds=1, say=said.append)
    assert len(said) == 3 and (tmp_path / "question-small.png").exists()
    study.study(tmp_path, seeds=2, say=said.append)
    kept = study.recorded(tmp_path)["small"]
    assert len(said) == 6 and [run["seed"] for run in kept["runs"]] == [0, 0, 1, 1]
    assert kept["settings"] == {"epochs": 2, "images": 64} and kept["source"]["versions"]["torch"]
    shorter = replace(question, settings=experiment(epochs=1, images=64))
    monkeypatch.setattr(study, "QUESTIONS", {"small": shorter})
    study.study(tmp_path, seeds=1, say=said.append)
    assert [len(run["valid_loss"]) for run in study.recorded(tmp_path)["small"]["runs"]] == [1, 1]
