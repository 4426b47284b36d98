"""torch's encoder layers, whose fused operation would take the weights of normalized layers as they are."""

import copy

import pytest
import torch
from torch import nn

import varprop as vp


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x, padding=None):
        return self.head(self.encoder(x, src_key_padding_mask=padding))


@pytest.fixture(scope="module")
def made():
    """Normalized once: tests get a copy each."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    model = vp.normalize(Encoder(), vp.Moments(0.0, 1.0), example=x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def model(made):
    return copy.deepcopy(made)


X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
PADDING = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2])


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_is_training_and_what_is_folded(model, padding, grad):
    expected = model.train()(X, padding)
    seen = torch.ones_like(expected[..., :1]).bool() if padding is None else ~padding[..., None]
    with torch.set_grad_enabled(grad):
        for evaluated in (model.eval(), vp.fold(model).eval()):
            torch.testing.assert_close(evaluated(X, padding) * seen, expected * seen, rtol=1e-5, atol=1e-5)


def test_folded_layers_may_fuse_again(model):
    folded, plain = vp.fold(model), Encoder()
    for ours, theirs in zip(folded.encoder.layers, plain.encoder.layers, strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert ours.activation_relu_or_gelu == theirs.activation_relu_or_gelu != 0
    assert folded.encoder.use_nested_tensor == plain.encoder.use_nested_tensor
    assert vars(folded.encoder).keys() == vars(plain.encoder).keys()
