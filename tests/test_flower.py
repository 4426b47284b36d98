"""Flower's FedAvg averages normalized models: clients send their parameters, and there is nothing else to send."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import varprop as vp
from tests.test_federated import clients, close, federated, start

pytestmark = pytest.mark.flower
flwr = pytest.importorskip("flwr", reason="make test-flower installs it")
X = torch.randn(64, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = (X.sum(1) > 0).long()


def arrays(model: nn.Module) -> list[Any]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


@torch.no_grad()
def loaded(values: list[Any]) -> nn.Module:
    model = copy.deepcopy(start())
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(torch.from_numpy(value))
    return model


class Client(flwr.client.NumPyClient):  # type: ignore[misc, name-defined]
    """Trains on its own half of the samples, and sends directions of length one."""

    def __init__(self, part: slice) -> None:
        self.x, self.y = X[part], LABELS[part]

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """A client's part of a round."""
        model = federated.train(loaded(parameters), self.x, self.y, epochs=2)
        return arrays(vp.unit_norm_(model)), len(self.x), {}


def averaged(results: list[tuple[list[Any], int]]) -> list[Any]:
    """What Flower's strategy makes of the clients' results."""
    common = flwr.common
    status = common.Status(common.Code.OK, "")
    fits = [common.FitRes(status, common.ndarrays_to_parameters(values), count, {}) for values, count in results]
    strategy = flwr.server.strategy.FedAvg(min_fit_clients=2, min_available_clients=2)
    parameters, _ = strategy.aggregate_fit(1, [(None, fit) for fit in fits], [])
    found: list[Any] = common.parameters_to_ndarrays(parameters)
    return found


def test_flowers_average_is_that_of_the_example() -> None:
    models = clients()
    found = averaged(
        [(arrays(vp.unit_norm_(copy.deepcopy(model))), count) for model, count in zip(models, (2, 1), strict=True)]
    )
    assert close(loaded(found)(X), federated.federated_average(models, [2, 1])(X))


@pytest.mark.compatibility("Flower")
def test_two_clients_learn_together() -> None:
    torch.manual_seed(0)
    server = arrays(start())
    members = [Client(slice(0, 32)), Client(slice(32, 64))]
    before = nn.functional.cross_entropy(loaded(server)(X), LABELS)
    for _ in range(5):
        server = averaged([member.fit(server, {})[:2] for member in members])
    assert nn.functional.cross_entropy(loaded(server)(X), LABELS) < 0.5 * before
