"""`vp.init_` with skips: branches start so small that all of them together add as much as the stream begins with."""

import pytest
import torch
from torch import nn

import varprop as vp

WIDTH = 24


def unit(*shape):
    return vp.Moments(torch.zeros(1, *shape), torch.ones(1, *shape))


class Residual(nn.Module):
    """x + W2 f(W1 x), so many times."""

    def __init__(self, blocks, activation=nn.ReLU):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        pairs = [[nn.Linear(WIDTH, WIDTH), activation(), nn.Linear(WIDTH, WIDTH)] for _ in range(blocks)]
        self.blocks = nn.ModuleList(nn.Sequential(*parts) for parts in pairs)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def deviations(model, moments):
    """By the computed moments, the root mean square of the deviations of every layer's outputs."""
    report = vp.propagate(model, moments)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {name: float(report[name].var.mean().sqrt()) for name in names}


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Tanh])
def test_the_stream_grows_evenly_to_twice_its_variance(activation):
    torch.manual_seed(0)
    model = vp.init_(Residual(9, activation), unit(WIDTH))
    computed = deviations(model, unit(WIDTH))
    assert all(computed[f"blocks.{k}.2"] == pytest.approx(1 / 3, rel=1e-3) for k in range(9))
    assert all(computed[name] == pytest.approx(1, rel=1e-3) for name in ("first", "blocks.7.0", "last"))
    samples = torch.randn(4000, WIDTH)
    h, variances = model.first(samples), []
    for block in model.blocks:
        h = h + block(h)
        variances.append(float(h.detach().var(0).mean()))
    assert variances[4] == pytest.approx(1 + 5 / 9, rel=0.1) and variances[-1] == pytest.approx(2, rel=0.15)


def test_gradients_keep_their_size_where_unit_branches_let_them_grow():
    growth = {}
    for shift in ("depth", "first"):
        torch.manual_seed(0)
        model = vp.init_(Residual(20), unit(WIDTH), shift=shift)
        first = model.first(torch.randn(512, WIDTH))
        h = first
        for block in model.blocks:
            h = h + block(h)
        (gradient,) = torch.autograd.grad(h, first, torch.randn_like(h))
        growth[shift] = float(gradient.square().mean().sqrt())
    assert growth["depth"] < 2.2 < 4 < growth["first"]


def test_the_inspector_finds_nothing():
    torch.manual_seed(0)
    model = vp.init_(Residual(12), unit(WIDTH))
    assert not vp.inspect(model, unit(WIDTH)).findings


class Net(nn.Module):
    """Layers a, b, ... of equal width, each with a batch norm, in a graph that a function tells."""

    def __init__(self, graph):
        super().__init__()
        self.graph = graph
        for name in "abcdefgh":
            self.add_module(name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))

    def forward(self, x):
        return self.graph(self, torch.tanh(x))


def variances(graph):
    """By layer, the variance of its outputs: the square of the factor that its batch norm comes back with."""
    model = vp.init_(Net(graph), unit(WIDTH), orthogonal=False)
    return {name: float(layer[1].weight.detach().square().mean()) for name, layer in model.named_children()}


def stages(net, x):
    """As a ResNet: the first block of a stage has a projection, and rectifiers stand over the sums."""
    x = torch.relu(net.c(x) + net.b(torch.relu(net.a(x))))
    x = torch.relu(x + net.e(torch.relu(net.d(x))))
    return torch.relu(net.h(x) + net.g(torch.relu(net.f(x))))


def parallel(net, x):
    x = x + net.b(torch.tanh(net.a(x))) + net.d(torch.tanh(net.c(x)))
    return x + (net.f(torch.tanh(net.e(x))) + net.h(torch.tanh(net.g(x))))


def nested(net, x):
    inner = net.a(x)
    inner = inner + net.c(torch.tanh(net.b(inner)))
    x = x + inner
    return x + net.e(torch.tanh(net.d(x)))


def gated(net, x):
    x = x + torch.sigmoid(net.a(x)) * net.b(x)
    return x + net.e(torch.nn.functional.silu(net.c(x)) * net.d(x))


def attention(net, x):
    q, k, v = (layer(x).view(-1, 4, 6) for layer in (net.a, net.b, net.c))
    x = x + net.d(nn.functional.scaled_dot_product_attention(q, k, v).reshape(-1, WIDTH))
    return x + nn.functional.dropout(net.f(torch.tanh(net.e(x))), 0.1, net.training)


def tied(net, x):
    for _ in range(4):
        x = x + net.b(torch.tanh(net.a(x)))
    return x


def rectified(net, x):
    for layer in (net.a, net.b, net.c, net.d):
        x = x + torch.relu(layer(x))
    return x


EVEN = {  # the variance of the layers that end branches
    "stages": (stages, {"b": 1 / 3, "e": 1 / 3, "g": 1 / 3}),
    "parallel": (parallel, {"b": 1 / 3, "d": 1 / 3, "f": 1 / 3, "h": 1 / 3}),
    "nested": (nested, {"a": 1 / 2, "c": 1 / 4, "e": 1 / 2}),
    "gated": (gated, {"b": 1 / 2, "e": 1 / 2}),
    "attention": (attention, {"d": 1 / 2, "f": 1 / 2}),
    "tied": (tied, {"b": 1 / 4}),
    "rectified": (rectified, {"a": 1 / 4, "b": 1 / 4, "c": 1 / 4, "d": 1 / 4}),
}


@pytest.mark.parametrize("name", EVEN)
def test_what_ends_a_branch(name):
    graph, small = EVEN[name]
    assert variances(graph) == pytest.approx(dict.fromkeys("abcdefgh", 1.0) | small)


UNCHANGED = {
    "concatenation": lambda net, x: net.b(torch.cat([x, net.a(x)], 1)[:, :WIDTH]),
    "equal ways": lambda net, x: net.c(net.a(x) + net.b(x)),
    "one branch": lambda net, x: x + net.b(torch.tanh(net.a(x))),
    "read elsewhere": lambda net, x: (lambda y: (x + y) + (x + net.b(y)))(net.a(x)),
    "returned": lambda net, x: (lambda y: (x + y, y, x + y + net.b(x)))(net.a(x))[:2],
    "normalized": lambda net, x: (lambda f: f(f(x, net.a), net.b))(
        lambda x, layer: x + nn.functional.layer_norm(layer(x), (WIDTH,))
    ),
    "chain": lambda net, x: net.c(torch.tanh(net.b(torch.tanh(net.a(x))))),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_nothing_else_changes(name):
    assert variances(UNCHANGED[name]) == pytest.approx(dict.fromkeys("abcdefgh", 1.0))


def test_recurrent_layers_stay_as_they_are():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.GRU(4, 4, batch_first=True) for _ in range(2))
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            x = x + self.first(x)[0]
            x = x + self.second(x)[0]
            return x + self.linear(x)

    models = []
    for shift in ("depth", "first"):
        torch.manual_seed(0)
        models.append(vp.init_(Recurrent(), unit(3, 4), shift=shift))
    for name in ("first", "second"):
        assert torch.equal(getattr(models[0], name).bias_ih_l0, getattr(models[1], name).bias_ih_l0)
    assert not torch.equal(models[0].linear.weight, models[1].linear.weight)
