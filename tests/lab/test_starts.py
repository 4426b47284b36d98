import pytest
import torch
from torch import nn

from varprop.lab import starts
from varprop.lab.models import RowByRow
from varprop.lab.protocol import DOUBLE, UNIT_NORM
from varprop.lab.records import METHODS, Cell

from . import tiny

ALL_STARTS = ("none", "bn", "ap2", "orthogonal")


@pytest.fixture(scope="module")
def ground():
    material = tiny.material()
    batch = material.source(0, 16).first_batch().double()
    return starts.Ground(material.moments, batch, material.validation(0)[0].double())


@pytest.fixture(scope="module")
def plain(ground):
    return {start: starts.plain_network(tiny.network, start, 0, ground) for start in ALL_STARTS}


@pytest.mark.parametrize("start", ALL_STARTS)
@pytest.mark.parametrize("method", METHODS)
def test_all_methods_start_from_the_same_function(plain, ground, start, method):
    model = starts.in_form(plain[start], method, ground)
    assert starts.gap(model, plain[start], ground.probe) < 1e-12
    trainable = {name for name, _ in model.named_parameters()}
    assert (method == "standard") == (trainable == {name for name, _ in plain[start].named_parameters()})


@pytest.mark.parametrize("start", ALL_STARTS)
def test_batch_norm_in_training_mode_does_the_same_on_the_batch_of_its_statistics(plain, ground, start):
    model = starts.in_form(plain[start], "batch", ground).train()
    assert torch.allclose(model(ground.batch), plain[start](ground.batch), rtol=0, atol=1e-12)


def test_no_two_starts_are_the_same(plain, ground):
    distances = [
        starts.gap(plain[one], plain[other], ground.probe) for one in ALL_STARTS for other in ALL_STARTS if one < other
    ]
    assert min(distances) > 0.01


def test_the_start_of_batch_norm_has_scales_between_0_and_1_and_no_shift(plain, ground):
    outputs = plain["bn"][:2](ground.batch)
    assert torch.allclose(outputs.mean(0), torch.zeros(5, dtype=torch.float64), atol=1e-12)
    deviations = outputs.std(0, correction=0)
    assert deviations.min() > 0 and deviations.max() < 1
    assert deviations.std() > 0.05


def test_orthogonal_weights_stay_orthogonal_but_for_their_lengths(plain):
    weight = plain["orthogonal"][3].weight
    directions = weight / weight.norm(dim=1, keepdim=True)
    assert torch.allclose(directions @ directions.T, torch.eye(5, dtype=torch.float64), atol=1e-10)
    random = plain["ap2"][3].weight
    directions = random / random.norm(dim=1, keepdim=True)
    assert (directions @ directions.T - torch.eye(5, dtype=torch.float64)).abs().max() > 0.1


def test_doubling_leaves_the_function_and_halves_the_weights(plain, ground):
    model = starts.in_form(plain["none"], "standard", ground, DOUBLE)
    assert starts.gap(model, plain["none"], ground.probe) < 1e-12
    assert torch.equal(2 * model[1].parametrizations.weight.original, plain["none"][1].weight)


def test_the_projection_leaves_the_function(plain, ground):
    model = starts.in_form(plain["ap2"], "analytic", ground, UNIT_NORM)
    assert starts.gap(model, plain["ap2"], ground.probe) < 1e-12
    assert torch.allclose(model[3].weight.norm(dim=1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS)
def test_a_recurrent_network_has_all_forms(ground, method):
    plain = starts.plain_network(lambda: RowByRow(tiny.SIDE, 2, 4, tiny.CLASSES), "ap2", 0, ground)
    assert starts.gap(starts.in_form(plain, method, ground), plain, ground.probe) < 1e-12


def test_another_function_is_refused(ground, monkeypatch):
    def other(plain, method, ground, variant):
        with torch.no_grad():
            plain[-1].bias += torch.arange(tiny.CLASSES)
        return tiny.network().double()

    monkeypatch.setattr(starts, "in_form", other)
    with pytest.raises(RuntimeError, match="does not start from the same function"):
        starts.starting_points(tiny.network, [Cell("tiny", "weight", "none", 0)], ground)


def test_cells_that_differ_in_their_bounds_share_a_start(ground):
    cells = [Cell("tiny", "weight", "none", 0, lr_max=bound) for bound in (1e-2, 1e-1)]
    found = starts.starting_points(tiny.network, cells, ground)
    assert found[cells[0]].model is found[cells[1]].model
    assert isinstance(found[cells[0]].model, nn.Module) and found[cells[0]].gap < 1e-12
