import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import varprop as vp
from varprop_lab import starts
from varprop_lab.protocol import DOUBLE, METHODS, UNIT_NORM, Cell, RowByRow

from .. import tiny

ROOT = Path(__file__).parents[3]
ALL_STARTS = ("none", "bn", "ap2", "orthogonal", "wn")


@pytest.fixture(scope="module")
def data():
    task = tiny.task()
    batch = task.batches(0, 16).first_batch().double()
    return starts.StartData(task.moments(0), batch, task.validation(0)[0].double())


@pytest.fixture(scope="module")
def plain(data):
    return {start: starts.plain_network(tiny.network, start, 0, data) for start in ALL_STARTS}


@pytest.mark.parametrize("start", ALL_STARTS)
@pytest.mark.parametrize("method", METHODS)
def test_all_methods_start_from_the_same_function(plain, data, start, method):
    model = starts.parametrized(plain[start], method, data)
    assert starts.gap(model, plain[start], data.probe) < 1e-12
    trainable = {name for name, _ in model.named_parameters()}
    assert (method == "standard") == (trainable == {name for name, _ in plain[start].named_parameters()})


@pytest.mark.parametrize("start", ALL_STARTS)
def test_batch_norm_in_training_mode_does_the_same_on_the_batch_of_its_statistics(plain, data, start):
    model = starts.parametrized(plain[start], "batch", data).train()
    assert torch.allclose(model(data.batch), plain[start](data.batch), rtol=0, atol=1e-12)


def test_no_two_starts_are_the_same(plain, data):
    distances = [
        starts.gap(plain[one], plain[other], data.probe) for one in ALL_STARTS for other in ALL_STARTS if one < other
    ]
    assert min(distances) > 0.01


def test_the_start_of_batch_norm_has_scales_between_0_and_1_and_no_shift(plain, data):
    outputs = plain["bn"][:2](data.batch)
    assert torch.allclose(outputs.mean(0), torch.zeros(5, dtype=torch.float64), atol=1e-12)
    deviations = outputs.std(0, correction=0)
    assert deviations.min() > 0 and deviations.max() < 1
    assert deviations.std() > 0.05


def test_the_start_of_weight_normalization_whitens_every_unit_on_the_batch(plain, data):
    for last in (2, 4, 6, 8):  # each ends with a linear layer
        outputs = plain["wn"][:last](data.batch)
        assert torch.allclose(outputs.mean(0), torch.zeros_like(outputs[0]), atol=1e-10)
        assert torch.allclose(outputs.std(0, correction=0), torch.ones_like(outputs[0]), atol=1e-10)


def test_orthogonal_weights_stay_orthogonal_but_for_their_lengths(plain):
    weight = plain["orthogonal"][3].weight
    directions = weight / weight.norm(dim=1, keepdim=True)
    assert torch.allclose(directions @ directions.T, torch.eye(5, dtype=torch.float64), atol=1e-10)
    random = plain["ap2"][3].weight
    directions = random / random.norm(dim=1, keepdim=True)
    assert (directions @ directions.T - torch.eye(5, dtype=torch.float64)).abs().max() > 0.1


def test_doubling_leaves_the_function_and_halves_the_weights(plain, data):
    model = starts.parametrized(plain["none"], "standard", data, DOUBLE)
    assert starts.gap(model, plain["none"], data.probe) < 1e-12
    assert torch.equal(2 * model[1].parametrizations.weight.original, plain["none"][1].weight)


def test_the_projection_leaves_the_function(plain, data):
    model = starts.parametrized(plain["ap2"], "analytic", data, UNIT_NORM)
    assert starts.gap(model, plain["ap2"], data.probe) < 1e-12
    assert torch.allclose(model[3].weight.norm(dim=1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS)
def test_a_recurrent_network_has_all_forms(data, method):
    plain = starts.plain_network(lambda: RowByRow(tiny.SIDE, 2, 4, tiny.CLASSES), "ap2", 0, data)
    assert starts.gap(starts.parametrized(plain, method, data), plain, data.probe) < 1e-12


OWN = [("batch", "bn"), ("analytic", "orthogonal"), ("weight", "wn")]


@pytest.mark.parametrize(("method", "start"), OWN)
def test_own_starts_keep_the_original_weights_and_the_function(plain, data, method, start):
    cell = Cell("tiny", method, start, 0)
    original = starts.original_network(tiny.network, start, 0, data)
    weights = {
        "batch": lambda module: module.layer.weight,
        "analytic": lambda module: module.weight,
        "weight": lambda module: module.parametrizations.weight.original1,
    }
    for choice in ("original", "converted"):
        found = starts.starting_point(tiny.network, cell, data, choice)
        assert found.gap < 1e-12
        for index in (1, 3, 5):
            assert torch.equal(weights[method](found.model[index]), original[index].weight) == (choice == "original")


def test_batch_norm_on_original_weights_begins_as_the_paper_says(data):
    cell = Cell("tiny", "batch", "bn", 0)
    model = starts.starting_point(tiny.network, cell, data).model
    scales = torch.cat([module.weight for module in model.modules() if isinstance(module, nn.BatchNorm1d)])
    shifts = torch.cat([module.bias for module in model.modules() if isinstance(module, nn.BatchNorm1d)])
    assert scales.min() > 0 and scales.max() < 1 and scales.std() > 0.2  # s uniform on (0, 1), b = 0
    assert shifts.abs().max() < 1e-12


def test_another_function_is_refused(data, monkeypatch):
    def other(plain, method, data, variant):
        with torch.no_grad():
            plain[-1].bias += torch.arange(tiny.CLASSES)
        return tiny.network().double()

    monkeypatch.setattr(starts, "parametrized", other)
    with pytest.raises(RuntimeError, match="does not start from the same function"):
        starts.starting_point(tiny.network, Cell("tiny", "weight", "none", 0), data)


# --- the paper's sums of whole kernels ---


def padded_network():
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, 2, padding=1), nn.Flatten(2))


def image_data(side, borders):
    generator = torch.Generator().manual_seed(3)
    moments = vp.Moments(*(torch.rand(1, 2, 1, 1, generator=generator, dtype=torch.float64) for _ in range(2)))
    batch = torch.rand(6, 2, side, side, generator=generator, dtype=torch.float64)
    return starts.StartData(moments, batch, batch, classes=False, borders=borders)


def plain_sums(weight, mean, var):
    """Mean and standard deviation of a convolution's outputs by formula (10.1), every kernel summed whole."""
    first = (weight.sum((2, 3)) * mean).sum(1)
    return first, (weight.square().sum((2, 3)) * (var + 1e-6)).sum(1).sqrt()


def test_plain_borders_are_the_formula_of_the_paper_at_any_size_of_the_image():
    for side in (6, 10):
        data = image_data(side, "plain")
        drawn = starts.original_network(padded_network, "ap2", 0, data)
        started = starts.plain_network(padded_network, "ap2", 0, data)
        rectified = vp.propagate(nn.ReLU(), vp.Moments(*(torch.full((1, 4), x).double() for x in (0.0, 1.0)))).output
        mean, var = (x.flatten() for x in (data.moments.mean, data.moments.var))
        for index, entering in ((0, (mean, var)), (2, (rectified.mean[0], rectified.var[0]))):
            mu, sigma = plain_sums(drawn[index].weight, *entering)
            torch.testing.assert_close(started[index].weight, drawn[index].weight / sigma.view(-1, 1, 1, 1))
            torch.testing.assert_close(started[index].bias, -mu / sigma)
        pooled = starts.plain_network(padded_network, "ap2", 0, image_data(side, "pooled"))
        assert (pooled[0].weight - started[0].weight).abs().max() > 1e-3  # a border counts where it is not left out


@pytest.mark.parametrize("start", ["none", "bn", "ap2"])
def test_plain_borders_stay_the_formula_while_the_function_keeps_its_zeros(start):
    data = image_data(6, "plain")
    point = starts.starting_point(padded_network, Cell("own", "analytic", start, 0), data)
    model = copy.deepcopy(point.model)  # as a trainer does
    assert point.gap < 1e-12 and {model[index].padding_mode for index in (0, 2)} == {"zeros"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    mu, sigma = plain_sums(model[0].weight, data.moments.mean.flatten(), data.moments.var.flatten())
    rate = model[0].scale.flatten() / sigma
    folded = vp.fold(model)
    torch.testing.assert_close(folded[0].weight, model[0].weight * rate.view(-1, 1, 1, 1))
    torch.testing.assert_close(folded[0].bias, model[0].shift.flatten() - rate * mu)
    torch.testing.assert_close(model(data.batch), folded(data.batch))


def test_an_experiment_says_which_borders_its_networks_start_with():
    def network():
        return nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))

    (cell,) = tiny.experiment(methods=("analytic",)).cells()
    found = {}
    for borders in ("pooled", "plain"):
        task = tiny.task(factory=network, data=tiny.dataset(channels=3), methods=("analytic",), borders=borders)
        found[borders] = vp.fold(task.start(cell).model)[0].weight, task.moments(0)
    weight, moments = found["plain"]
    drawn = starts.build(network, starts.seed_of(starts.GENERAL, 0)).double()[0].weight
    _, sigma = plain_sums(drawn, moments.mean.flatten(), moments.var.flatten())
    torch.testing.assert_close(weight, drawn / sigma.view(-1, 1, 1, 1))
    assert not torch.allclose(weight, found["pooled"][0], rtol=1e-3)


def test_the_documentation_says_how_much_borders_change():
    rows = json.loads((ROOT / "docs/results/borders.json").read_text())["rows"]
    text = " ".join((ROOT / "docs/experiments.md").read_text().split())
    _, side, lowest, mean, highest, pooled, plain = zip(*rows, strict=True)
    padded = [value for value in mean if value != max(mean)]
    assert side == (32, 32, 16, 16, 16, 8, 8, 8, 8)
    assert f"σ is {min(lowest):.3f} to {max(highest):.3f} times the paper's" in text
    assert f"{min(padded):.3f} to {max(padded):.3f} where it is padded" in text
    assert f"are {min(pooled):.2f} to {max(pooled):.2f} of what pooled statistics predict" in text
    assert f"and {plain[0]:.2f} falling to {min(plain):.2f} of what plain ones do" in text
