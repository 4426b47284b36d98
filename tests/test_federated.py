"""Averages of normalized models, over clients or over time: parameters are all there is, and scales do not matter."""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import varprop as vp


def example(name: str) -> ModuleType:
    """A script of examples/, by path: packages elsewhere are called `examples` too."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


federated, target_network = example("federated"), example("target_network")
X = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@functools.cache
def start() -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    return vp.normalize(plain, vp.Moments(torch.zeros(1, 5).double(), torch.ones(1, 5).double()))


def clients(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(1)
    found = [copy.deepcopy(start()) for _ in range(count)]
    with torch.no_grad():
        for client in found:
            for parameter in client.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return found


def rescaled(model: nn.Module) -> nn.Module:
    """The same function with other weights."""
    with torch.no_grad():
        model[0].weight.mul_(7.0)
        model[2].weight[1].mul_(0.01)
    return model


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def plain_average(models: list[nn.Module]) -> nn.Module:
    result = copy.deepcopy(models[0])
    with torch.no_grad():
        for own, *theirs in zip(result.parameters(), *(m.parameters() for m in models), strict=True):
            own.copy_(torch.stack(theirs).mean(0))
    return result


def test_there_is_nothing_to_average_but_parameters() -> None:
    model = clients(1)[0]
    assert not list(model.buffers())
    assert {name for name in model.state_dict() if not name.endswith("_extra_state")} == dict(
        model.named_parameters()
    ).keys()


def test_the_average_of_equal_clients_is_what_they_are() -> None:
    model = clients(1)[0]
    assert close(federated.federated_average([model, rescaled(copy.deepcopy(model))], [3, 1])(X), model(X))


def test_the_scale_of_a_clients_weights_does_not_matter() -> None:
    one, other = clients()
    assert close(rescaled(copy.deepcopy(other))(X), other(X))
    ours = federated.federated_average([one, rescaled(copy.deepcopy(other))], [2, 1])
    assert close(ours(X), federated.federated_average([one, other], [2, 1])(X))
    naive = [plain_average([one, each])(X) for each in (other, rescaled(copy.deepcopy(other)))]
    assert not close(*naive)  # what unit_norm_ is for


def test_clients_count_by_their_samples() -> None:
    one, other = clients()
    assert close(federated.federated_average([one, other], [1, 0])(X), one(X))
    assert not close(federated.federated_average([one, other], [1, 3])(X), one(X))


def test_a_target_follows_and_arrives() -> None:
    target, online = clients()
    assert float((target(X) - online(X)).detach().abs().max()) > 0.1
    halfway = target_network.follow_(copy.deepcopy(target), copy.deepcopy(online), 0.5)
    assert not close(halfway(X), target(X)) and not close(halfway(X), online(X))
    arrived = target_network.follow_(copy.deepcopy(target), rescaled(copy.deepcopy(online)), 1.0)
    assert close(arrived(X), online(X))
    same = target_network.follow_(copy.deepcopy(target), copy.deepcopy(online), 0.0)
    assert close(same(X), target(X))


@pytest.mark.slow
def test_the_federated_example_learns_the_digits_of_both_clients() -> None:
    assert federated.main(rounds=5) > 0.85  # one client alone could reach a half


@pytest.mark.slow
def test_the_target_network_example_learns_the_values() -> None:
    untrained = target_network.true_values().square().mean().sqrt().item()
    assert target_network.main(steps=600) < 0.5 * untrained
