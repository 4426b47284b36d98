"""Federated averaging of a normalized model: there are no running statistics to average, so nothing is left out.

Two clients hold different digits (0 to 4 and 5 to 9), train on their own, and a server averages their parameters. This
is McMahan's FedAvg in plain torch; `tests/test_flower.py` does the same with Flower's, which receives the parameters as
arrays (`[p.detach().numpy() for p in model.parameters()]`).

The scale of a normalized weight means nothing, and that of two clients may differ. `vp.unit_norm_` gives all rows
norm 1 before they are averaged, so that each client counts by its direction.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp


@torch.no_grad()
def federated_average(models: Sequence[nn.Module], counts: Sequence[int]) -> nn.Module:
    """The model whose parameters are the clients' average, weighted by how many samples each has."""
    result = copy.deepcopy(models[0])
    clients = [vp.unit_norm_(copy.deepcopy(model)) for model in models]
    for own, *theirs in zip(result.parameters(), *(client.parameters() for client in clients), strict=True):
        own.copy_(sum(count * p for count, p in zip(counts, theirs, strict=True)) / sum(counts))
    return result


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 1) -> nn.Module:
    """A client's part of a round."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model


def main(rounds: int = 20) -> float:
    """Train in rounds; the accuracy of the server's model on digits that no client has seen."""
    from varprop_lab import datasets

    torch.manual_seed(0)
    data = datasets.load("digits")
    x, test = data.train_x.flatten(1), data.test_x.flatten(1)
    clients = [(x[mask], data.train_y[mask]) for mask in (data.train_y < 5, data.train_y >= 5)]
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    moments = vp.Moments(torch.full((1, 64), 0.3), torch.full((1, 64), 0.14))  # agreed on, not measured on clients
    server = vp.normalize(plain, moments)
    assert not list(server.buffers())
    accuracy = 0.0
    for number in range(1, rounds + 1):
        trained = [train(copy.deepcopy(server), *client) for client in clients]
        server = federated_average(trained, [len(labels) for _, labels in clients])
        accuracy = (server(test).argmax(1) == data.test_y).float().mean().item()
        if number % 5 == 0:
            print(f"round {number:>2}  accuracy on unseen digits {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
