"""The demonstration: what it trains, what it says of results, and the files it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from varprop_lab import demo
from varprop_lab.demo import Digits, Trained


def results(batch_norm: list[float], analytic: list[float]) -> list[Trained]:
    small = {"batch norm": batch_norm, "group norm": [0.8, 0.8, 0.8], "analytic": analytic}
    large = [0.84, 0.85, 0.86]
    return [
        Trained(method, batch, 0.01, False, {}, small[method] if batch == 2 else large, 1.0)
        for batch in (2, 32)
        for method in demo.METHODS
    ]


@pytest.mark.parametrize(
    ("batch_norm", "analytic", "sentences"),
    [
        (
            [0.3, 0.4, 0.5],
            [0.84, 0.85, 0.86],
            ("batch norm loses 45.0 points", "45.0 points ahead of", "in every seed"),
        ),
        (
            [0.83, 0.84, 0.85],
            [0.82, 0.85, 0.85],
            ("changes by -1.0 points", "ahead of batch norm, which these seeds do"),
        ),
        ([0.9, 0.9, 0.9], [0.8, 0.8, 0.8], ("batch norm gains 5.0", "10.0 points behind batch norm, in every seed")),
    ],
)
def test_the_answer_says_what_the_seeds_decide(
    batch_norm: list[float], analytic: list[float], sentences: tuple[str, ...]
) -> None:
    answer = demo.answer(results(batch_norm, analytic))
    assert all(sentence in answer for sentence in sentences), answer


def test_networks_of_one_seed_start_with_the_same_weights() -> None:
    first, *others = (demo.network(method, seed=1) for method in demo.METHODS)
    for other in others:
        torch.testing.assert_close(other[0].weight, first[0].weight, rtol=0, atol=0)
    assert not torch.equal(demo.network("analytic", seed=2)[0].weight, first[0].weight)


def test_it_trains_judges_and_leaves_a_report_with_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = demo.load()
    few = [(images[:20], labels[:20]) for images, labels in vars(digits).values()]
    monkeypatch.setattr(demo, "load", lambda: Digits(*few))
    monkeypatch.setattr(demo, "RATES", (0.01, 0.02))
    monkeypatch.setattr(demo, "SEEDS", (0, 1))
    monkeypatch.setattr(demo, "BATCHES", (2, 4))
    lines: list[str] = []
    found = demo.run(tmp_path / "demo", lines.append, epochs=1)
    assert [(result.batch, result.method) for result in found] == [(b, m) for b in (2, 4) for m in demo.METHODS]
    for result in found:
        means = {rate: sum(seeds) for rate, seeds in result.held_out.items()}
        assert means[result.rate] == max(means.values()) and len(result.test) == 2
    report = (tmp_path / "demo" / "report.md").read_text("utf-8")
    assert demo.answer(found) in report and demo.answer(found) in lines[-1] and "demo.png" in report
    assert (tmp_path / "demo" / "demo.png").stat().st_size > 1000
    records = json.loads((tmp_path / "demo" / "demo.json").read_text("utf-8"))
    assert len(records["results"]) == 6 and records["versions"]["torch"] == torch.__version__


def test_the_first_page_says_what_the_records_say() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "start.md").read_text("utf-8")
    recorded = json.loads((docs / "results" / "demo.json").read_text("utf-8"))["results"]
    for result in recorded:
        values = [100 * accuracy for accuracy in result["test"]]
        assert f"{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})" in page
    assert len(recorded) == len(demo.METHODS) * len(demo.BATCHES)


def test_held_out_and_test_images_are_not_trained_on() -> None:
    digits = demo.load()
    rows = torch.cat([images.flatten(1) for images, _ in vars(digits).values()])
    assert len(rows.unique(dim=0)) == len(rows) == 1797


def test_networks_side_by_side_become_what_they_become_alone() -> None:
    seeds, rates, batch, steps = [1, 2], [0.05, 0.1], 4, 3
    images, labels = (tensor[: steps * batch] for tensor in demo.load().train)
    for method in ("batch norm", "group norm"):
        model = demo.joined(method, seeds)
        momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
        apart = [demo.network(method, seed) for seed in seeds]
        optimizers = []
        for single, rate in zip(apart, rates, strict=True):
            decays = [parameter.numel() > len(parameter) for parameter in single.parameters()]
            groups = [
                {"params": [p for p, d in zip(single.parameters(), decays, strict=True) if d == decayed]}
                | {"weight_decay": demo.WEIGHT_DECAY * decayed}
                for decayed in (True, False)
            ]
            optimizers.append(torch.optim.SGD(groups, rate, demo.MOMENTUM, nesterov=True))
        for x, y in zip(images.split(batch), labels.split(batch), strict=True):
            model.zero_grad()
            logits = model(x.expand(-1, 2, -1, -1)).unflatten(1, (2, -1))
            (F.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(2), reduction="sum") / batch).backward()
            demo.move_(model, momenta, torch.tensor(rates))
            for single, optimizer in zip(apart, optimizers, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(single(x), y).backward()
                optimizer.step()
        for together, *singles in zip(model.parameters(), *(single.parameters() for single in apart), strict=True):
            torch.testing.assert_close(together, torch.cat(singles), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("steps", [8, 25, 103])
def test_the_rates_are_those_of_one_cycle(steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], 1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, steps, pct_start=0.25, cycle_momentum=False)
    for step in range(steps):
        assert demo.one_cycle(step, steps) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step() if step + 1 < steps else None


def test_rates_of_a_few_steps_start_at_the_top() -> None:
    for steps in range(1, 5):  # torch's own scheduler divides by zero at four
        rates = [demo.one_cycle(step, steps) for step in range(steps)]
        assert max(rates) == rates[0] <= 1.0 and rates == sorted(rates, reverse=True)
    assert demo.one_cycle(0, 4) == 1.0
