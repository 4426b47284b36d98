"""Parameters between layers that act channel by channel are folded with the layers, not walked."""

import copy
import pickle

import pytest
import torch
from torch import nn

import varprop as vp
from tests.norm.networks import alone_

TOGETHER = "3 together, 0 by operation, 0 alone"


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
    from varprop.norm.lowering import Lowering, NotLowered

    def refuse(*_):
        raise NotLowered

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
        for own, expected in zip(network.subnetwork([place]).fold().pairs[0], whole.pairs[place], strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


class Between(nn.Module):
    """Two layers, and between them a parameter and what is written."""

    def __init__(self, written):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.parameter, self.positions, self.written = (
            nn.Parameter(torch.randn(5)),
            nn.Parameter(torch.randn(9)),
            written,
        )

    def forward(self, x):
        return self.last(self.written(self, self.first(x), self.parameter))


def swished(value):
    return value * torch.sigmoid(value)


def bump(value):
    return (torch.relu(value + 1) * torch.relu(1 - value)).square()


def residual(model, value):
    return value + model.inner(value)


BEHIND = {  # with how many layers are folded together, by functions of single channels
    "a factor": (lambda m, h, p: (h + p) * 2, 2),
    "an offset": (lambda m, h, p: h * p + 1, 2),
    "the negative": (lambda m, h, p: -(h + p), 2),
    "a quotient, then a residual": (lambda m, h, p: residual(m, (h + p) / 8), 3),
    "itself": (lambda m, h, p: h * p + h, 1),
    "a slice of parameters, scaled": (lambda m, h, p: (h + m.positions[:5]) * 0.5, 2),
    "a bend of a factor": (lambda m, h, p: torch.relu((h + p) * 2), 2),
    "bends on both sides": (lambda m, h, p: bump(h - p), 2),
    "a bend of a bend": (lambda m, h, p: torch.relu(1 - (h - p).abs()), 2),
    "two bends": (lambda m, h, p: torch.tanh(torch.relu(3 * (h + p)) - 1), 2),
    "a function that reads it twice": (lambda m, h, p: swished(h + p), 2),
    "a function of both sides": (lambda m, h, p: torch.sigmoid(h) * (h + p), 1),
    "two parameters": (lambda m, h, p: torch.relu((h + p) * 2 + m.positions[:5]) * 3, 2),
    "dropout": (lambda m, h, p: nn.functional.dropout(h + p, 0.1, m.training).double(), 2),
}


@pytest.mark.parametrize(("written", "together"), BEHIND.values(), ids=BEHIND)
def test_what_is_written_behind_a_parameter(written, together):
    """Each of its layers, folded with the others, is what it is by itself."""
    torch.manual_seed(0)
    data = vp.Moments(torch.zeros(1, 4).double(), torch.ones(1, 4).double())
    model = vp.normalize(Between(written).double(), data, only=["first", "last"] if together < 3 else None).eval()
    assert f"{together} together" in str(vp.fold_report(model))
    x = torch.randn(3, 4).double()
    (output, grads), (expected, expected_grads) = (results_of_used(m, x) for m in (model, alone_(copy.deepcopy(model))))
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(vp.fold(model)(x), output, rtol=1e-12, atol=1e-12)


def results_of_used(model, x):
    """The output, and the gradients of those parameters that it depends on."""
    output = model(x)
    grads = torch.autograd.grad(output.square().mean(), list(model.parameters()), allow_unused=True)
    return output, [grad for grad in grads if grad is not None]


class Positioned(nn.Module):
    """A tensor for every position is added to what a layer returns, multiplies it and divides it, before a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.places, self.gains = nn.Parameter(torch.randn(5, 4)), nn.Parameter(1 + torch.rand(5, 4))

    def forward(self, x):
        x = (self.places + self.first(x) - 2 * self.places) / self.gains
        return self.last(self.norm((self.places - self.gains * x) * self.gains))


def test_tensors_for_every_position_compile_without_a_graph_break():
    torch.manual_seed(0)
    model = vp.normalize(Positioned(), vp.Moments(torch.zeros(1, 1, 3), torch.ones(1, 1, 3)), example=(1, 5, 3))
    x = torch.randn(2, 5, 3)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))


class Cached(nn.Module):
    """Joins what a layer returns to a cache that is empty still, as models of language do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.cat([torch.tensor([], dtype=x.dtype), self.first(x)], -2))


def test_what_is_joined_to_an_empty_cache_is_itself():
    torch.manual_seed(0)
    model, x = vp.normalize(Cached(), vp.Moments(0.0, 1.0), example=(1, 5, 3)), torch.randn(2, 5, 3)
    assert [layer.how for layer in vp.fold_report(model).layers] == ["together", "together"]
    torch.testing.assert_close(model(x), model.last(model.first(x)))
    torch.testing.assert_close(vp.fold(model)(x), model(x))
