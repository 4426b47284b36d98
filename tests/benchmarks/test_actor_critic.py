"""Actor-critics side by side: agents do not mix, and an action does not depend on the batch it is computed in."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import actor_critic
from benchmarks.actor_critic import (
    METHODS,
    Adam,
    Agents,
    called,
    curves,
    filled,
    network,
    pool,
    read,
    run,
    shown,
    shown_search,
)
from torch import Tensor

SIZES = 4, 2, 4, 1, 1


def agents(method: str, count: int = 3, width: int = 16) -> Agents:
    torch.manual_seed(0)
    replay = torch.randn(300, count, sum(SIZES)) * torch.linspace(0.1, 3, sum(SIZES)) + 1
    replay[..., -1] = 0
    return Agents(METHODS[method], torch.full((count,), 1e-3), replay, SIZES, 300, width, 32)


def means(learner: Agents, states: Tensor, training: bool = False) -> Tensor:
    return called(learner.actor, states, learner.count, training).chunk(2, 2)[0]


def test_an_action_at_batch_1_is_that_at_256() -> None:
    """In training, too: there is one mode. With batch norm the batch decides."""
    states = 3 * torch.randn(256, 3, 4) + 2
    for method, same in (("analytic", True), ("batch norm", False)):
        learner = agents(method)
        learner.actor.double()
        many = means(learner, states.double(), training=True)
        alone = torch.cat([means(learner, states[n : n + 2].double(), training=True)[:1] for n in (0, 128)])
        assert torch.allclose(many[::128], alone, rtol=1e-12, atol=1e-12) == same
    learner = agents("analytic")
    learner.actor.double()
    one = means(learner, states[:1].double(), training=True)
    assert torch.allclose(one, means(learner, states.double(), training=True)[:1], rtol=1e-12, atol=1e-12)


def test_moments_are_those_of_an_agents_random_steps() -> None:
    learner = agents("analytic")
    states = learner.replay[..., :4]
    first = learner.actor[0](states.flatten(1)[:, :, None, None]).flatten(1)
    assert torch.allclose(first.mean(0), torch.zeros(48), atol=1e-4)
    assert (first.std(0) - 1).abs().mean() < 0.1  # of inputs that are independent up to chance
    assert not list(learner.actor.buffers()) and not list(learner.critics.buffers())


@pytest.mark.parametrize("method", METHODS)
def test_agents_do_not_mix(method: str) -> None:
    learner = agents(method)
    before = [parameter.detach().clone() for parameter in learner.critics.parameters()]
    learner.replay[:, 1] = torch.nan
    for with_actor in (True, False):
        learner.update(with_actor)
    for old, new in zip(before, learner.critics.parameters(), strict=True):
        by_agent = new.detach().reshape(2, 3, -1).transpose(0, 1)
        assert by_agent[1].isnan().any() and by_agent[[0, 2]].isfinite().all()
        assert not torch.equal(old, new)


@pytest.mark.parametrize("method", METHODS)
def test_critics_learn_rewards(method: str) -> None:
    learner = agents(method)
    learner.replay[..., -1] = 1  # every step is the last: the value is the reward
    learner.replay[..., -2] = learner.replay[..., 0] - learner.replay[..., 4]

    def error() -> float:
        state, action, _, reward, _ = learner.replay.split(list(SIZES), 2)
        with torch.no_grad():
            values = learner.values(learner.critics, state, action)
        return (values - reward[:, None, :, 0]).square().mean().item()

    at_first = error()
    for _ in range(60):
        learner.update(with_actor=False)
    assert error() < 0.8 * at_first


def test_adam_is_torchs_with_a_rate_for_each_agent() -> None:
    torch.manual_seed(0)
    parameters, target = [torch.randn(4, 3, requires_grad=True) for _ in range(2)], torch.randn(4, 3)
    twins = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    ours = Adam(parameters, torch.tensor([1e-2, 1e-3]), 0.5)
    theirs = [torch.optim.Adam(twins, rate, betas=(0.5, 0.999)) for rate in (1e-2, 1e-3)]
    for _ in range(5):
        ours.step(sum((p - target).square().sum() for p in parameters))
    for rows, optimizer in ((slice(0, 2), theirs[0]), (slice(2, 4), theirs[1])):
        start = [twin.detach().clone() for twin in twins]
        for _ in range(5):
            optimizer.zero_grad()
            sum((twin - target).square().sum() for twin in twins).backward()
            optimizer.step()
        for parameter, twin, old in zip(parameters, twins, start, strict=True):
            torch.testing.assert_close(parameter[rows], twin[rows])
            twin.data.copy_(old)


def test_networks_have_the_layers_of_their_methods() -> None:
    inputs = torch.randn(50, 8, 1, 1)
    kinds = {
        norm: [type(layer).__name__ for layer in network(norm, (4, 6, 6, 1), 2, inputs)]
        for norm in ("batch", "layer", "analytic")
    }
    assert kinds["batch"][0] == "BatchNorm2d" and kinds["batch"].count("BatchNorm2d") == 3
    assert kinds["layer"].count("GroupNorm") == 2
    assert kinds["analytic"] == ["NormalizedConv2d", "ReLU", "NormalizedConv2d", "ReLU", "Conv2d"]


class Corridor:
    """An environment of three steps whose reward is the action."""

    action_space = SimpleNamespace(low=np.array([-2.0], np.float32), high=np.array([2.0], np.float32))

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin."""
        self.left = 3
        return np.array([0.0, 1.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go on."""
        self.left -= 1
        return np.array([self.left, action[0]]), float(action[0]), self.left == 0, False, {}


def test_a_grid_is_recorded_and_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=lambda *_, **__: Corridor()))
    threads = torch.get_num_threads()
    options = argparse.Namespace(
        records=tmp_path / "found.jsonl",
        environments=["Pendulum-v1"],
        methods=["analytic", "SAC"],
        rates=[1e-3, 3e-3],
        search=1,
        seeds=[0],
        steps=60,
        random_steps=30,
        width=8,
        batch=8,
        device="cpu",
        max_seconds=60.0,
    )
    run(options)
    run(options)
    torch.set_num_threads(threads)
    lines = [json.loads(line) for line in options.records.read_text().splitlines()]
    assert [(line["method"], line["done"]) for line in lines] == [("analytic", 60), ("SAC", 60)]
    assert len(lines[0]["runs"]) == 4 and len(lines[0]["runs"][0]["returns"]) == actor_critic.INTERVALS
    assert "| Pendulum-v1 | 60 | analytic |" in shown(read(options.records)).replace("    ", "").replace("  ", " ")


@pytest.mark.slow
def test_a_pool_tests_the_rate_that_it_has_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=lambda *_, **__: Corridor()))
    monkeypatch.setattr(actor_critic, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count))
    monkeypatch.setattr(actor_critic, "TOLD_EVERY", 0.0)
    threads = torch.get_num_threads()
    options = argparse.Namespace(
        records=tmp_path / "found.jsonl",
        environments=["Hopper-v5"],
        methods=["analytic", "none"],
        rates=[1e-3, 3e-3],
        search=1,
        seeds=[0, 1],
        steps=60,
        random_steps=30,
        width=8,
        batch=8,
        device="cpu",
        max_seconds=60.0,
        processes=1,
    )
    pool(options)
    torch.set_num_threads(threads)
    lines = [json.loads(line) for line in options.records.read_text().splitlines()]
    assert {line["done"] for line in lines} == {1, 51, 60}  # what an agent has told on its way, and all
    whole = len(lines)
    pool(options)
    assert len(options.records.read_text().splitlines()) == whole
    records = read(options.records)
    assert [len(record["runs"]) for record in records.values()] == [4, 4]
    for method, found in curves(records, "Hopper-v5").items():
        tested = [run for run in records["Hopper-v5", method]["runs"] if run["seed"] in (0, 1)]
        assert {run["rate"] for run in tested} == {found["rate"]} and len(found["curves"]) == 2
        by_rate = {rate: actor_critic.score(curve) for rate, (curve,) in found["by rate"].items()}
        assert found["rate"] == max(by_rate, key=lambda rate: by_rate[rate])


def test_runs_that_hardly_began_are_left_out(tmp_path: Path) -> None:
    def line(seed: int, done: int) -> str:
        found = {"environment": "Hopper-v5", "method": "SAC", "steps": 100, "done": done}
        return json.dumps({**found, "runs": [{"rate": 1e-3, "seed": seed, "returns": [done] * 20}]}) + "\n"

    file = tmp_path / "found.jsonl"
    file.write_text(line(100, 40) + line(100, 100) + line(0, 80) + line(0, 60) + line(1, 49))
    record = read(file)["Hopper-v5", "SAC"]
    assert record["done"] == 80 and [run["seed"] for run in record["runs"]] == [0, 100]
    assert curves(read(file), "Hopper-v5")["SAC"]["steps"] == 80
    file.write_text("".join(json.dumps(record) + "\n" for record in read(file).values()))  # as gathered
    assert [run["done"] for run in read(file)["Hopper-v5", "SAC"]["runs"]] == [80, 100]


def test_the_first_seeds_choose_the_rate_of_the_others() -> None:
    runs = [
        {"rate": rate, "seed": seed, "returns": [0.0] * 15 + [value] * 5}
        for rate, seed, value in ((1e-3, 100, 1.0), (1e-3, 0, 9.0), (3e-3, 100, 2.0), (3e-3, 0, 5.0))
    ]
    found = curves({("Hopper-v5", "SAC"): {"steps": 40, "done": 40, "runs": runs}}, "Hopper-v5")["SAC"]
    assert found["rate"] == 3e-3 and found["curves"] == [[0.0] * 15 + [5.0] * 5] and found["steps"] == 40
    assert filled([None, 1.0, None, 2.0]) == [1.0, 1.0, 1.0, 2.0]


def test_the_page_has_the_records() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "fields.md").read_text("utf-8")
    records = read(docs / "results" / "actor_critic.jsonl")
    assert shown(records).strip() in page
    for (environment, _), record in records.items():
        assert (record["width"], record["batch"]) == (256, 256)
        if environment == "Pendulum-v1":
            assert {run["seed"] for run in record["runs"]} == {*actor_critic.SEARCH_SEEDS, *actor_critic.SEEDS}
            assert {run["rate"] for run in record["runs"]} == set(actor_critic.RATES)
    searches = read(docs / "results" / "actor_critic_mujoco.jsonl")
    assert shown_search(searches).strip() in page and shown(searches).strip() in page
    batch_norm = curves(searches, "InvertedDoublePendulum-v5")["batch norm"]["curves"]
    assert f"batch norm's worst ends at {min(map(actor_critic.score, batch_norm)):,.0f}" in " ".join(page.split())
    cheetah = read(docs / "results" / "actor_critic_halfcheetah.jsonl")
    assert shown_search(cheetah).strip() in page
    for method in ("batch norm", "layer norm", "analytic", "none"):
        runs = sorted(cheetah["HalfCheetah-v5", method]["runs"], key=lambda run: (run["seed"] < 100, run["seed"]))
        scores = [
            ", ".join(f"{actor_critic.score(filled(run['returns'])):,.0f}" for run in runs if run["rate"] == rate)
            for rate in (0.001, 0.003)
        ]
        assert f"| {method} | {scores[0]} | {scores[1]} |" in page
    cost = json.loads((docs / "results" / "actor_critic_cost.json").read_text())["of none"]
    for method, name in (
        ("analytic", "update"),
        ("batch norm", "update"),
        ("analytic", "act"),
        ("analytic", "act, unchanged"),
    ):
        assert f"{cost[method][name]:.2f}" in page
