"""A network folded in parts gives the weights and the gradients of one that is folded at once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from varprop.norm import Normalized
from varprop.norm.distributed import cut_by_bytes, layers_read_by, subnetworks_by_bytes

from .networks import kept

NAMES = ("identity skip", "branches", "two in two out", "pools, one input channel", "own norms", "dropout")


def whole(model: Any) -> Any:
    return next(m for m in model.modules() if isinstance(m, Normalized)).networks[False][0]


def gradients(network: Any, parts: list[Any]) -> list[Tensor]:
    """By all parameters, of a function of all folded weights; last its value."""
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        folded = part.fold()
        for place, here in part.index_of.items():
            weight, bias = folded.pairs[here]
            total = total + (place + 1) * weight.sin().sum() + bias.cos().sum()
    parameters = list(network.joint.graph.program.model.parameters())
    return [*torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True), total.detach()]


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_the_whole(name: str) -> None:
    network = whole(kept(name)[1])
    count = len(network.layers)
    alone = [network.subnetwork([place]) for place in range(count)]
    halves = [network.subnetwork(list(range(0, count, 2))), network.subnetwork(list(range(1, count, 2)))]
    expected = gradients(network, [network])
    for parts in (alone, halves):
        for ours, theirs in zip(gradients(network, parts), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_copies_have_parts() -> None:
    model = kept("own norms")[1]
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        network = whole(copied)
        found = gradients(network, [network.subnetwork([place]) for place in range(len(network.layers))])
        for ours, theirs in zip(found, gradients(network, [network]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_part_reads_what_its_layers_read() -> None:
    network = whole(kept("identity skip")[1])
    index = {spec.path: n for n, spec in enumerate(network.specs)}
    assert layers_read_by(network, index["stem"]) == set()
    assert layers_read_by(network, index["body.2"]) == {index["body.0"]}
    assert layers_read_by(network, index["head"]) == {index["stem"], index["body.2"]}
    part = network.subnetwork([index["head"]])
    assert part.layout.channels.sources == 4 and part.layout.channels.external == 12


@pytest.mark.parametrize(
    ("limit", "pieces"),
    [(10, [[3], [0], [1, 2]]), (20, [[3], [0, 1, 2]]), (1, [[3], [0], [2], [1]]), (30, [[0, 1, 2, 3]])],
)
def test_cut_by_bytes_from_the_end(limit: int, pieces: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varprop.norm.distributed.LIMIT", limit)
    assert cut_by_bytes([(3, 10), (0, 10), (2, 5), (1, 5)]) == pieces


def test_without_processes_there_is_one_part() -> None:
    network = whole(kept("identity skip")[1])
    assert subnetworks_by_bytes(network) == [network]
