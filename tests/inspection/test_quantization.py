"""Ranges and bias correction for quantized weights, against sampled networks."""

import copy
import json
import math
import pickle

import pytest
import torch
import torch.nn as nn

import varprop as vp

SAMPLES = 40_000


def standard(*shape):
    return vp.Moments(torch.full(shape, 0.3).double(), torch.ones(shape).double())


def drawn(count, *shape):
    return 0.3 + torch.randn(count, *shape, dtype=torch.float64)


def flipping(module):
    """Batch norms with scales of both signs and statistics of their own."""
    for norm in module.modules():
        if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
            norm.weight.data.uniform_(0.5, 1.5).mul_(torch.where(torch.arange(norm.num_features) % 2 == 0, -1.0, 1.0))
            norm.bias.data.normal_(std=0.5)
            norm.running_mean.normal_(std=0.3)
            norm.running_var.uniform_(0.5, 2.0)
    return module.double().eval()


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 6, 3), nn.BatchNorm2d(6), nn.ReLU6()
    )


def test_ranges_behind_negative_scales_hold_what_is_sampled():
    torch.manual_seed(0)
    model = flipping(convolutional())
    report = vp.inspect(model, standard(1, 2, 1, 1), example=torch.zeros(1, 2, 8, 8, dtype=torch.float64))
    found = {one["label"]: one for one in report.quantization(k=3.0)["activations"]}
    x = drawn(2000, 2, 8, 8)
    for path in "012":
        x, seen = model[int(path)](x).detach(), found[path]
        columns = x.transpose(0, 1).flatten(1)
        mean, std, least = columns.mean(1), columns.std(1), 0.0 if path == "2" else -math.inf
        assert all(low < high for low, high in zip(seen["low"], seen["high"], strict=True))
        assert seen["mean"] == pytest.approx(mean.tolist(), abs=0.03)
        assert seen["std"] == pytest.approx(std.tolist(), rel=0.05)
        assert seen["low"] == pytest.approx((mean - 3 * std).clamp_min(least).tolist(), abs=0.1)
        assert seen["high"] == pytest.approx((mean + 3 * std).tolist(), abs=0.1)
    assert min(found["2"]["low"]) == 0.0 and max(found["5"]["high"]) <= 6.0


def test_the_mean_behind_a_rectifier_knows_the_sign_of_the_scale():
    """With one scale flipped the same rectifier passes the other half."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()).eval()
    model[0].weight.data = torch.tensor([2.0, -2.0])
    model[0].running_mean.fill_(0.5)  # it has seen data, and counts as in evaluation mode
    report = vp.inspect(model, vp.Moments(torch.full((1, 2), 1.5), torch.ones(1, 2)))
    (_, rectified) = report.quantization()["activations"]
    # E max(0, +-2 + 2 Z) = +-2 Phi(+-1) + 2 phi(1)
    assert rectified["mean"] == pytest.approx([2 * 0.841345 + 2 * 0.241971, -2 * 0.158655 + 2 * 0.241971], abs=1e-4)


def rounded(model, found, corrected):
    """A copy with the weights that the scales say, and with the correction in the biases if wanted."""
    model = copy.deepcopy(model)
    for layer in found["layers"]:
        module = model.get_submodule(layer["weight"].rpartition(".")[0])
        axis = 1 if isinstance(module, nn.ConvTranspose2d) else 0
        scale = torch.tensor(layer["scale"], dtype=torch.float64)
        scale = scale.view([-1 if a == axis else 1 for a in range(module.weight.ndim)])
        module.weight.data = (module.weight.data / scale).round() * scale
        if corrected:
            module.bias.data += torch.tensor(layer["correction"], dtype=torch.float64)
    return model


NETWORKS = {
    "rectifiers": (
        lambda: nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 5)),
        (16,),
    ),
    "sigmoids": (lambda: nn.Sequential(nn.Linear(16, 48), nn.Sigmoid(), nn.Linear(48, 5)), (16,)),
    "negative scales": (
        lambda: nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 5)),
        (16,),
    ),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(4, 16, 2), nn.ReLU(), nn.Conv2d(16, 5, 2)), (4, 4, 4)),
    "padded": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3, padding=1)), (4, 4, 4)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2)), (4, 3, 3)),
}


def mean_errors(model, other, shape):
    """Difference of the mean outputs by channel, in standard errors (the same inputs for both)."""
    torch.manual_seed(1)
    x = drawn(SAMPLES, *shape)
    with torch.no_grad():
        difference = other(x) - model(x)
    difference = difference.flatten(2).mean(2) if difference.ndim > 2 else difference
    return difference.mean(0) / (difference.std(0) / SAMPLES**0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS.keys())
def test_the_correction_takes_the_mean_error_away(make, shape):
    torch.manual_seed(0)
    model = flipping(make())
    report = vp.inspect(model, standard(1, *shape))
    found = report.quantization(bits=6)
    before = mean_errors(model, rounded(model, found, False), shape)
    after = mean_errors(model, rounded(model, found, True), shape)
    assert float(before.abs().max()) > 8
    assert float(after.abs().max()) < 4


def deep():
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5))


def test_deeper_down_the_units_are_correlated_and_four_fifths_of_the_error_go():
    torch.manual_seed(0)
    model = deep().double()
    found = vp.inspect(model, standard(1, 16)).quantization(bits=6)
    before, after = (mean_errors(model, rounded(model, found, corrected), (16,)) for corrected in (False, True))
    assert float(after.square().mean()) < float(before.square().mean()) / 25


def test_a_transposed_convolution_in_groups_has_its_channels_in_order():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 2, groups=2)).double()
    moments = standard(1, 4, 3, 3)
    (layer,) = vp.inspect(model, moments).quantization(bits=4)["layers"]
    weight = model[0].weight.data
    scale = torch.tensor(layer["scale"], dtype=torch.float64)
    halves = [weight[:2], weight[2:]]
    largest = torch.cat([half.abs().amax((0, 2, 3)) for half in halves])
    assert scale.tolist() == pytest.approx((largest / 7).tolist())
    parts = [half / scale[3 * g : 3 * g + 3].view(1, 3, 1, 1) for g, half in enumerate(halves)]
    changed = copy.deepcopy(model)
    changed[0].weight.data = torch.cat(
        [part.round() * scale[3 * g : 3 * g + 3].view(1, 3, 1, 1) for g, part in enumerate(parts)]
    )
    with torch.no_grad():
        shift = (changed(moments.mean) - model(moments.mean)).mean((0, 2, 3))
    assert layer["shift"] == pytest.approx(shift.tolist(), abs=1e-12)


def test_one_scale_for_the_whole_layer():
    model = nn.Sequential(nn.Linear(8, 4))
    (layer,) = vp.inspect(model, vp.Moments(*torch.ones(2, 1, 8))).quantization(4, per_channel=False)["layers"]
    assert layer["scale"] == pytest.approx([float(model[0].weight.detach().abs().max()) / 7])
    assert (layer["weight"], layer["bias"], len(layer["shift"])) == ("0.weight", "0.bias", 4)


def test_rows_of_zeros_and_layers_without_bias():
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    model[0].weight.data[0] = 0
    (layer,) = vp.inspect(model, vp.Moments(*torch.ones(2, 1, 3))).quantization()["layers"]
    assert layer["shift"][0] == 0.0 and layer["bias"] == "" and layer["scale"][0] > 0


def test_the_dict_is_plain():
    torch.manual_seed(0)
    report = vp.inspect(
        flipping(convolutional()), standard(1, 2, 1, 1), example=torch.zeros(1, 2, 8, 8, dtype=torch.float64)
    )
    found = report.quantization()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [layer["label"] for layer in found["layers"]] == ["0", "3"]
    assert found["inputs"][0]["low"] == pytest.approx([0.3 - 4, 0.3 - 4]) and found["k"] == 4.0


def test_a_model_trained_on_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    report = vp.inspect(model, vp.Moments(*torch.ones(2, 1, 4)))
    report.quantization()
    model[0].weight.data.add_(0.1)
    with pytest.raises(vp.VarpropError, match="The weights in 0 have changed"):
        report.quantization()


def test_a_loaded_report_is_without_its_model():
    report = pickle.loads(pickle.dumps(vp.inspect(nn.Sequential(nn.Linear(4, 4)), vp.Moments(*torch.ones(2, 1, 4)))))
    assert report["0"].numbers["std"] > 0
    with pytest.raises(vp.VarpropError, match="inspect again"):
        report.quantization()


@pytest.mark.parametrize(("bits", "k"), [(1, 4.0), (8, 0.0), (40, 4.0)])
def test_impossible_settings_are_refused(bits, k):
    report = vp.inspect(nn.Sequential(nn.Linear(4, 4)), vp.Moments(*torch.ones(2, 1, 4)))
    with pytest.raises(ValueError, match=r"(bits|k) must"):
        report.quantization(bits, k=k)
