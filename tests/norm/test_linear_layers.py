"""Finding layers, the axes of their weights, and the batch norms after them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.convert.networks import close, network, numbers
from varprop.norm.batchnorm import batch_norms_after
from varprop.norm.linear_layers import (
    along_outputs,
    find_layers,
    find_linear_layers,
    is_linear_layer,
    output_size,
    weight_norms,
)

LAYERS = {
    "linear": (nn.Linear(4, 6, bias=False), (2, 4)),
    "conv1d": (nn.Conv1d(4, 6, 3, groups=2, bias=False), (2, 4, 5)),
    "conv2d": (nn.Conv2d(4, 8, 3, groups=4, bias=False), (2, 4, 5, 5)),
    "conv3d": (nn.Conv3d(4, 6, 2, bias=False), (2, 4, 3, 3, 3)),
    "transposed1d": (nn.ConvTranspose1d(4, 6, 3, bias=False), (2, 4, 5)),
    "transposed2d": (nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), (2, 4, 5, 5)),
    "transposed3d": (nn.ConvTranspose3d(4, 8, 2, groups=4, bias=False), (2, 4, 3, 3, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_factor_along_the_outputs_multiplies_them(name: str) -> None:
    layer, shape = LAYERS[name]
    layer, x = layer.double(), numbers(*shape)
    factor = 1 + torch.arange(output_size(layer), dtype=torch.float64)
    before = layer(x).detach()
    norms = weight_norms(layer.weight, layer)
    original = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.mul_(along_outputs(factor, layer.weight, layer))
    assert close(layer(x), before * factor.view(-1, *[1] * (len(shape) - 2)))
    assert close(weight_norms(layer.weight, layer), norms * factor)
    with torch.no_grad():
        layer.weight.copy_(original)


def test_sites_come_in_order_and_once() -> None:
    model, _ = network("residual")
    model.alias = model.projection
    assert list(find_linear_layers(model)) == ["body.0", "body.2", "projection", "head"]
    assert list(find_layers(model, "body", is_linear_layer)) == ["body.0", "body.2"]
    assert list(find_layers(model, ["alias", "body.2"], is_linear_layer)) == ["body.2", "projection"]
    by_class = find_layers(model, lambda path, module: isinstance(module, nn.Linear), is_linear_layer)
    assert list(by_class) == ["head"]
    with pytest.raises(ValueError, match="'bod', where the model has no linear layer"):
        find_layers(model, "bod", is_linear_layer)


def test_attention_projections_are_no_sites() -> None:
    assert list(find_linear_layers(nn.TransformerEncoderLayer(8, 2, 16))) == ["linear1", "linear2"]


def test_the_batch_norms_of_a_resnet() -> None:
    model, x = network("resnet")
    found = batch_norms_after(model.train(), x)
    assert model.training
    assert found["conv1"] == "bn1"
    assert found["layers.1.0.downsample.0"] == "layers.1.0.downsample.1"
    assert len(found) == 10


class Cases(nn.Module):
    """Batch norms that follow a layer directly, or only seem to."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.layer, self.other, self.norm, self.second = nn.Linear(6, 6), nn.Linear(6, 6), *(nn.BatchNorm1d(6),) * 2
        self.second = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.which == "direct":
            return self.norm(y)
        if self.which == "twice":
            return self.norm(self.layer(self.norm(y)))
        if self.which == "read twice":
            return self.norm(y) + y
        if self.which == "between":
            return self.norm(y * 2)
        if self.which == "two norms":
            return self.second(self.layer(self.norm(y)))
        if self.which == "once without":
            return self.layer(self.norm(y))
        if self.which == "norm elsewhere":
            return self.norm(torch.relu(self.norm(y)))
        if self.which == "two layers":
            return self.norm(self.other(self.norm(y)))
        if self.which == "weight by hand":
            return F.linear(self.norm(y), self.layer.weight)
        return self.norm(self.layer(x.expand(6, 6, 6)))  # "other axis"


DIRECT = ("direct", "twice")
WHICH = [*DIRECT, "read twice", "between", "two norms", "once without", "norm elsewhere", "two layers"]


@pytest.mark.parametrize("which", [*WHICH, "weight by hand", "other axis"])
def test_only_a_batch_norm_directly_after_counts(which: str) -> None:
    model = Cases(which).double()
    assert batch_norms_after(model, numbers(6, 6)) == ({"layer": "norm"} if which in DIRECT else {})
