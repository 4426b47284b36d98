"""Federated averaging of clients side by side is that of clients one by one, and its grid is recorded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from benchmarks import federated
from benchmarks.federated import CLIENTS, METHODS, Federation, best_rate, clients_of, read, run, shown

from tests.lab.data.test_datasets import write_cifar10

OPTIONS = argparse.Namespace(device="cpu", rounds=1, width=8)


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federated, "SIZE", (8, 8))


def federation(method: str, rates: tuple[float, ...] = (0.1, 0.1)) -> Federation:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (1000, 8, 8, 3), dtype=torch.uint8, generator=generator)
    labels = torch.arange(1000) % 10
    return Federation(method, [(rate, 7) for rate in rates], (images, labels), "two classes", OPTIONS)


def test_clients_hold_two_classes_and_all_images_once() -> None:
    labels = torch.arange(1000) % 10
    for split in federated.SPLITS:
        clients = clients_of(labels, split, 3)
        assert torch.equal(torch.cat(clients).sort()[0], torch.arange(1000))
        classes = [len(set(labels[chosen].tolist())) for chosen in clients]
        assert max(classes) <= 2 if split == "two classes" else min(classes) < 5 < len(clients)


@pytest.mark.parametrize("method", METHODS)
def test_a_round_is_the_average_of_its_clients(method: str) -> None:
    """Two trainings of the same seed and rate end alike, and one at rate zero stays where it is."""
    found = federation(method, (0.1, 0.0))
    start = [tensor.clone() for tensor in found.state(found.server)]
    found.train(torch.zeros(500, 8, 8, 3, dtype=torch.uint8), torch.zeros(500, dtype=torch.int64), 1e12)
    rows = [tensor.reshape(len(found.runs), CLIENTS, -1) for tensor in found.state(found.clients)]
    for server, clients in zip(found.state(found.server), rows, strict=True):
        torch.testing.assert_close(server.reshape(2, -1), clients.mean(1))  # as many images each
    parameters = len(list(found.server.parameters()))
    for old, new in list(zip(start, found.state(found.server), strict=True))[:parameters]:
        (moved, _), (_, still) = (new - old).reshape(2, -1), (old - new).reshape(2, -1)
        assert moved.abs().max() > 0
        if method != "analytic":  # whose rows get length one
            assert still.abs().max() < 1e-6


def test_the_analytic_normalization_sends_parameters_alone() -> None:
    for method, count in (("analytic", 0), ("batch norm", 8)):
        found = federation(method)
        assert len(found.state(found.server)) - len(list(found.server.parameters())) == count


def test_a_grid_is_recorded_and_gone_on_with(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-bin", 20)
    options = argparse.Namespace(
        **vars(OPTIONS),
        records=tmp_path / "found.jsonl",
        data=tmp_path,
        splits=["two classes"],
        methods=["group norm + WS"],
        rates=[0.1, 0.01],
        seeds=[0],
        search_rounds=1,
        held_out=10,
        images=None,
        max_seconds=100.0,
    )
    federated.BATCH, before = 1, federated.BATCH
    try:
        run(options)
        run(options)
    finally:
        federated.BATCH = before
    lines = [json.loads(line) for line in options.records.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["search", "test"]
    assert lines[1]["runs"][0]["rate"] == best_rate(lines[0])
    assert "group norm + WS" in shown(read(options.records))


def test_the_page_has_the_records() -> None:
    docs = Path(__file__).parents[2] / "docs"
    records = read(docs / "results" / "federated.jsonl")
    page = (docs / "fields.md").read_text("utf-8")
    assert shown(records).strip() in page
    final = {name: [run["accuracies"][-1] for run in record["runs"]] for name, record in records.items()}
    for method in ("none", "batch norm", "analytic"):
        assert f"{100 * max(final[f'search, two classes, {method}']):.1f} %" in page
    for method in ("batch norm", "analytic", "group norm + WS"):
        assert f"{100 * sum(final[f'test, two classes, {method}']) / 3:.1f} %" in page
    ahead = zip(final["test, two classes, analytic"], final["test, two classes, group norm + WS"], strict=True)
    assert all(0.0105 < ours - theirs < 0.0135 for ours, theirs in ahead)  # 1.1 to 1.3 points
    for record in records.values():
        if record["kind"] == "test":
            assert [run["seed"] for run in record["runs"]] == list(federated.SEEDS)
        else:
            assert [run["rate"] for run in record["runs"]] == list(federated.RATES)
