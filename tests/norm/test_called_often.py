"""Layers that a model calls many times: folded once in a call of the model, from all that enters them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import varprop as vp
from varprop.norm.layers import Normalized
from varprop.norm.statistics import Statistics

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


def normalized(plain: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(shape, dtype=torch.float64)
    data = vp.Moments(*(f(1, *[1] * (len(shape) - 2), 3, dtype=torch.float64) for f in (torch.zeros, torch.ones)))
    return vp.normalize(plain.double(), data, example=x), x


CASES = {"chain": (Chain, (4, 3)), "flow": (Flow, (4, 3)), "unrolled": (Unrolled, (4, CALLS, 3))}


def called_often(model: nn.Module) -> Iterator[Any]:
    for layer in model.modules():
        if isinstance(layer, Normalized) and not layer.networks:
            yield layer


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    output = model(x)
    return [output, *torch.autograd.grad(output.square().mean(), list(model.parameters()))]


@pytest.mark.parametrize(("plain", "shape"), CASES.values(), ids=CASES)
def test_merged_inputs_are_those_of_every_call(plain: type[nn.Module], shape: tuple[int, ...]) -> None:
    model, x = normalized(plain(), shape)
    apart = copy.deepcopy(model)
    for layer in called_often(apart):
        layer.statistics = {
            mode: Statistics(found.graph, [found.targets[number] for number in found.numbers])
            for mode, found in layer.statistics.items()
        }
    assert any(len(layer.uses[True]) == CALLS for layer in called_often(model))
    for own, expected in zip(results(model, x), results(apart, x), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(vp.fold(model)(x), model(x), rtol=1e-12, atol=1e-13)


def test_inputs_that_follow_in_the_same_way_are_computed_once() -> None:
    model, _ = normalized(Chain(), (4, 3))
    (layer,) = called_often(model)
    assert layer.statistics[True].numbers == [0, 1, 1, 1, 1, 1]
    model, _ = normalized(Flow(), (4, 3))
    numbers = [layer.statistics[True].numbers for layer in called_often(model)]
    assert numbers == [list(range(CALLS)), [0] * CALLS]


def test_a_layer_is_folded_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = normalized(Chain(), (4, 3))
    folds: list[Any] = []
    fold = Normalized._folded_alone
    monkeypatch.setattr(Normalized, "_folded_alone", lambda self: folds.append(self) or fold(self))
    model(x), model(x)
    assert len(folds) == 2
    layer: Any = model.again
    layer(torch.randn(4, 5, dtype=torch.float64))  # outside of a call of the model
    assert len(folds) == 3


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


@pytest.mark.parametrize(("plain", "shape"), [CASES["flow"], CASES["unrolled"]], ids=("flow", "unrolled"))
def test_what_takes_long_is_said_with_the_reason(plain: type[nn.Module], shape: tuple[int, ...]) -> None:
    message = r"operation by operation in every call: .*called 6 times.*adds about \d+ ms.*with `only`"
    with pytest.warns(UserWarning, match=message):
        normalized(plain(), shape)


@pytest.mark.parametrize("width", (6, 2048), ids=("small", "large"))
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
