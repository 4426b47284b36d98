"""Parameters between layers that act channel by channel are folded with the layers, not walked."""

import copy
import pickle

import pytest
import torch
from torch import nn

import varprop as vp

TOGETHER = "3 together, 0 walked, 0 alone"


class Scaled(nn.Module):
    """A branch with a learned factor, as in networks that start as the identity; and an affine map before a bend."""

    def __init__(self, per_channel):
        super().__init__()
        shape = (4, 1, 1) if per_channel else ()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)
        self.factor, self.offset = nn.Parameter(torch.rand(shape) + 0.5), nn.Parameter(torch.randn(4, 1, 1))
        self.log_gain = nn.Parameter(torch.zeros(shape) - 1)

    def forward(self, x):
        x = torch.relu(self.first(x) * self.factor + self.offset)
        return self.head(x - self.log_gain.exp() * torch.tanh(self.second(x)))


def prelu(parameters):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.PReLU(parameters), nn.Conv2d(4, 4, 3), nn.PReLU(parameters), nn.Conv2d(4, 2, 1)
    )


CASES = {
    "PReLU, one slope": lambda: prelu(1),
    "PReLU by channel": lambda: prelu(4),
    "factors": lambda: Scaled(False),
    "factors by channel": lambda: Scaled(True),
}
X = torch.zeros(1, 3, 8, 8, dtype=torch.float64)
MOMENTS = vp.Moments(torch.zeros(1, 3, 1, 1).double(), torch.ones(1, 3, 1, 1).double())


def walked(model, monkeypatch):
    """The same model with all that reads a parameter left to the walk."""
    from varprop.norm.lowering import Lowering
    from varprop.norm.numbering import NotLanes

    def refuse(*_):
        raise NotLanes

    with monkeypatch.context() as patch:
        patch.setattr(Lowering, "_with_parameter", refuse)
        return vp.normalize(model, MOMENTS, example=X)


def results(model, x):
    output = model(x)
    return output, torch.autograd.grad(output.square().mean(), list(model.parameters()))


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_equals_the_walk(make, monkeypatch):
    torch.manual_seed(0)
    plain = make().double()
    together, by_walk = vp.normalize(plain, MOMENTS, example=X), walked(plain, monkeypatch)
    assert TOGETHER in str(vp.fold_report(together))
    assert TOGETHER not in str(vp.fold_report(by_walk))
    with torch.no_grad():  # statistics follow the parameters as they are, not as they were
        for own, other in zip(together.parameters(), by_walk.parameters(), strict=True):
            other.copy_(own.add_(0.2 * torch.randn_like(own)))
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    (output, grads), (expected, expected_grads) = results(together, x), results(by_walk, x)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    for own, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_reads_its_own_parameters(copied):
    model = vp.normalize(prelu(4).double(), MOMENTS, example=X)
    twin, x = copied(model), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        twin[1].weight.fill_(-1.0)
    with torch.no_grad():
        assert not torch.allclose(twin(x), model(x))
        model[1].weight.fill_(-1.0)
        torch.testing.assert_close(twin(x), model(x), rtol=0, atol=0)


def test_folding_keeps_the_function():
    model = vp.normalize(Scaled(True).double(), MOMENTS, example=X)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(vp.fold(model)(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("between", [lambda: nn.LayerNorm(4), lambda: nn.PReLU(4)], ids=["walked", "together"])
def test_parts_of_a_copied_network_are_parts_of_the_whole(between):
    model = nn.Sequential(nn.Linear(3, 4), between(), nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)).double()
    data = vp.Moments(torch.zeros(1, 3).double(), torch.ones(1, 3).double())
    twin = copy.deepcopy(vp.normalize(model, data))
    network, _ = twin[0].networks[twin.training]
    whole = network.fold()
    for place in range(3):
        for own, expected in zip(network.part([place]).fold().layer(0), whole.layer(place), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
