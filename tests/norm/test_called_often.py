"""Layers that a model calls many times: folded once in a call of the model, from all that enters them."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import varprop as vp
import varprop.norm.network
from varprop.norm import distributed

from .networks import alone_, both_forms, sites, train_a_little

CALLS = 6


class Chain(nn.Module):
    """One layer called again and again, the last time behind another function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(CALLS - 1):
            x = torch.relu(self.again(x))
        return self.last(torch.tanh(self.again(x)))


class Flow(nn.Module):
    """Steps of an ordinary differential equation: every call reads another sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.outer, self.last = (nn.Linear(*s) for s in ((3, 5), (5, 5), (5, 5), (5, 2)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(CALLS):
            x = x + 0.2 * self.outer(torch.tanh(self.inner(x)))
        return self.last(x)


class Unrolled(nn.Module):
    """A recurrent cell from a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new, self.last = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 5, dtype=x.dtype)
        for now in x.unbind(1):
            both = torch.cat([now, state], 1)
            gate = torch.sigmoid(self.gate(both))
            state = gate * state + (1 - gate) * torch.tanh(self.new(both))
        return self.last(state)


def normalized(plain: nn.Module, shape: tuple[int, ...], **settings: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(shape, dtype=torch.float64)
    return vp.normalize(plain.double(), vp.Moments(0.0, 1.0), example=x, **settings), x


class Pyramid(nn.Module):
    """One head for images of several sizes, padded, in groups, and one transposed convolution for two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.up, self.head = nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(4, 6, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [torch.relu(self.first(x))]
        for _ in range(CALLS - 1):
            sizes.append(torch.relu(self.down(sizes[-1])))
        sizes[0] = sizes[0] + self.up(sizes[1])
        sizes[1] = torch.tanh(self.up(sizes[2]))
        return torch.cat([self.head(image).flatten(1) for image in sizes[:4]], 1)


class Behind(nn.Module):
    """A layer behind operations that the engine evaluates, called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + torch.relu(self.again(self.norm(x)))
        return self.last(x)


CASES = {
    "chain": (Chain, (4, 3)),
    "flow": (Flow, (4, 3)),
    "unrolled": (Unrolled, (4, CALLS, 3)),
    "pyramid": (Pyramid, (2, 3, 32, 32)),
    "behind": (Behind, (4, 3)),
}
cases = pytest.mark.parametrize(("plain", "shape"), CASES.values(), ids=CASES)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    output = model(x)
    return [output, *torch.autograd.grad(output.square().mean(), list(model.parameters()))]


@both_forms
@cases
def test_they_are_folded_with_the_others_as_by_themselves(
    plain: type[nn.Module], shape: tuple[int, ...], form: str
) -> None:
    model, x = normalized(plain(), shape, form=form)
    expected = results(alone_(train_a_little(copy.deepcopy(model))), x)
    assert len(set(networks(model))) == 1
    compare(results(train_a_little(model), x), expected)


@cases
def test_merged_inputs_are_those_of_every_call(
    plain: type[nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = normalized(plain(), shape)
    monkeypatch.setattr(varprop.norm.network, "derivation_of", lambda target, graph: target.name)
    apart, _ = normalized(plain(), shape)
    assert plain not in (Chain, Flow) or len(distinct_calls(apart)) > len(distinct_calls(model))
    compare(results(train_a_little(model), x), results(train_a_little(apart), x))


@cases
def test_autocast_leaves_their_statistics_in_full_precision(plain: type[nn.Module], shape: tuple[int, ...]) -> None:
    model, x = normalized(plain(), shape)
    model, x = train_a_little(model).float(), x.float()
    (network,) = set(networks(model))
    expected = [part.bfloat16() for pair in network.fold().pairs for part in pair]
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        compare([part for pair in network.fold().pairs for part in pair], expected)
        network.fold().pairs[-1][1].float().square().sum().backward()
    assert output.isfinite().all()
    derivatives = [layer.shift.grad for layer in network.layers]
    model.zero_grad()
    network.fold().pairs[-1][1].square().sum().backward()
    for found, layer in zip(derivatives, network.layers, strict=True):
        torch.testing.assert_close(found, layer.shift.grad, rtol=0.02, atol=0.02)


@cases
def test_other_ways_to_fold_agree(plain: type[nn.Module], shape: tuple[int, ...]) -> None:
    model, x = normalized(plain(), shape)
    expected = results(train_a_little(model), x)
    compare([vp.fold(model)(x)], expected[:1])
    names, parameters = zip(*model.named_parameters(), strict=True)

    def loss(*values: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, values, strict=True)), (x,)).square().mean()

    compare(list(grad(loss, tuple(range(len(names))))(*parameters)), expected[1:])  # by the reference
    for network in set(networks(model)):  # in pieces, as processes that exchange gradients do
        network.by_bytes = [network.subnetwork([index]) for index in range(len(network.layers))]
        for piece in network.by_bytes:
            (index,) = piece.index_of
            compare(piece.fold().pairs[0], network.fold().pairs[index])


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
def test_they_are_folded_by_themselves_where_kernels_fold_the_others(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    model, x = normalized(Chain(), (4, 3))
    expected = results(train_a_little(model), x)
    monkeypatch.setattr(distributed, "WITH_KERNELS", ("cpu",))
    torch._dynamo.reset()
    called = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    compare(results(called, x), expected)
    (network,) = set(networks(model))
    pieces = {tuple(network.specs[index].path for index in indices) for indices in network.subnetworks}
    assert pieces == {("last", "first"), ("again",)}


@pytest.mark.slow
def test_many_networks_are_traced_at_once_where_kernels_fold_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = normalized(Chain(), (4, 3))
    expected = results(train_a_little(model), x)
    monkeypatch.setattr(distributed, "WITH_KERNELS", ("cpu",))
    template = normalized(Chain(), (4, 3))[0]  # never called: all that a call makes once would be made in the trace

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(template, parameters, (x,)).square().mean()

    stacked = {name: parameter.detach().expand(2, *parameter.shape) for name, parameter in model.named_parameters()}
    step = vmap(grad(loss))
    traced = make_fx(step)(stacked)(stacked)
    compare([traced[name][1] for name in stacked], expected[1:])


def compare(results: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-10, atol=1e-12)


def networks(model: nn.Module) -> list[Any]:
    return [layer.networks[True][0] for layer in sites(model).values()]


def distinct_calls(model: nn.Module) -> list[Any]:
    return [call for spec in networks(model)[0].specs for call in spec.calls]


def test_inputs_that_follow_in_the_same_way_are_computed_once() -> None:
    model, _ = normalized(Chain(), (4, 3))
    shares = {spec.path: [call.share for call in spec.calls] for spec in networks(model)[0].specs}
    assert shares == {"first": [1.0], "again": [1 / 6, 5 / 6], "last": [1.0]}
    model, _ = normalized(Flow(), (4, 3))
    calls = {spec.path: len(spec.calls) for spec in networks(model)[0].specs}
    assert calls == {"first": 1, "inner": CALLS, "outer": 1, "last": 1}


@pytest.mark.parametrize("name", ("chain", "flow", "unrolled", "pyramid"))
def test_nothing_is_left_to_the_engine(name: str) -> None:
    plain, shape = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = normalized(plain(), shape)
    assert {layer.how for layer in vp.fold_report(model).layers} == {"together"}
    assert networks(model)[0].evaluation is None


def test_all_layers_are_folded_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = normalized(Chain(), (4, 3))
    folds: list[Any] = []
    network_class = type(networks(model)[0])
    fold = network_class.fold
    monkeypatch.setattr(network_class, "fold", lambda self, *vectors: folds.append(self) or fold(self, *vectors))
    model(x), model(x)
    assert len(folds) == 2


class Written(Chain):
    """Writes a weight between two calls of its layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.again(self.first(x)))
        if self.training:
            with torch.no_grad():
                self.again.weight.mul_(torch.tensor([1.0, 2.0, 1.0, -1.0, 1.0]))
        return self.last(torch.relu(self.again(x)))


def test_a_weight_written_between_two_calls_is_noticed() -> None:
    model, x = normalized(Written().eval(), (4, 3))
    outputs: list[Tensor] = []
    model.again.register_forward_hook(lambda *arguments: outputs.append(arguments[2]))
    with torch.no_grad():
        first = model.again(model.first(x))
        model.train()(x)
        model.eval()  # with the weight that the second call had
        torch.testing.assert_close(outputs[1], first, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(outputs[2], model.again(torch.relu(first)), rtol=1e-12, atol=1e-12)


class Checkpointed(Chain):
    """Its calls stand in gradient checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda x: torch.relu(self.again(x)), x, use_reentrant=False)
        return self.last(x)


def test_gradient_checkpoints_around_calls() -> None:
    model, x = normalized(Checkpointed(), (4, 3))
    plain = copy.deepcopy(model)
    plain.forward.hidden = lambda x: plain.last(
        torch.relu(plain.again(torch.relu(plain.again(torch.relu(plain.again(plain.first(x)))))))
    )
    for own, expected in zip(results(model, x), results(plain, x), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)


def test_compiled_as_one_graph() -> None:
    model, x = normalized(Chain(), (4, 3))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for own, expected in zip(results(compiled, x), results(model, x), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)


def test_results_of_compiled_folds_begin_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = normalized(Chain(), (4, 3))
    executor_class = type(networks(model)[0].executor)
    results: list[Tensor] = []
    backward_flat = executor_class.backward_flat

    def keep(*arguments: Any) -> list[Tensor]:
        results.extend(backward_flat(*arguments))
        return results

    monkeypatch.setattr(executor_class, "backward_flat", keep)
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).square().mean().backward()
    assert results and not any(result.storage_offset() for result in results)  # else they are not aligned


def test_what_takes_long_is_said_with_the_reason() -> None:
    message = r"operation by operation in every call: .*layer_norm.*adds about \d+ ms.*with `only`"
    with pytest.warns(UserWarning, match=message):
        normalized(Behind(), (4, 3))


class Bumps(nn.Module):
    """A layer that reads Gaussian functions of what another gives, as in Kolmogorov-Arnold networks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.exp(-self.first(x).square()))
        return y


class CellByHand(nn.Module):
    """A recurrent cell called by hand, from a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 16)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.head(h)


def test_the_time_of_a_cell_called_by_hand_counts_its_many_operations() -> None:
    moments = vp.Moments(torch.zeros(1, 1, 8), 1.0)
    with pytest.warns(UserWarning, match="adds about [4-6][0-9] ms"):
        vp.normalize(CellByHand(), moments, example=(4, 6, 8))


def test_functions_that_are_integrated_are_named_as_slow() -> None:
    with pytest.warns(UserWarning, match=r"integrated in every call: exp.*square.*adds about 8 ms.*with `only`"):
        normalized(Bumps(), (4, 3))


def test_layers_that_are_called_many_times_are_named_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CALLS", 20)
    message = r"several times, .* in 2[0-9] steps: 'inner' \(20 times\).*adds about [6-9] ms.*with `only`"
    with pytest.warns(UserWarning, match=message):
        normalized(Flow(), (4, 3))


@pytest.mark.parametrize("width", (6, pytest.param(2048, marks=pytest.mark.slow)), ids=("small", "large"))
def test_nothing_is_said_of_time_where_it_does_not_count(width: int) -> None:
    between: nn.Module = nn.LayerNorm(width) if width > 6 else nn.ReLU()  # which is walked
    with torch.device("meta" if width > 6 else "cpu"):
        plain = nn.Sequential(nn.Linear(3, width), between, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    plain = plain.to_empty(device="cpu") if width > 6 else plain
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vp.normalize(plain, vp.Moments(torch.zeros(1, 3), torch.ones(1, 3)))
