"""The table of alternatives: every row trains, in which order, and what the changes of the deep form are."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from benchmarks.deep import alternatives, grid, strong
from benchmarks.deep.alternatives import (
    AGAIN,
    FORMS,
    RATES,
    ROWS,
    TableGrid,
    TableWorker,
    ablation,
    cell_of,
    costs,
    figure,
    main,
    page,
    ready,
    runs_of,
    searched,
    table,
)
from benchmarks.deep.form_changes import normalized
from benchmarks.deep.grid import COST, SEARCH, TEST, GridCell, best_of, read
from benchmarks.deep.side_by_side import SideBySide
from examples.train_cifar import augmented, resnet
from scipy.stats import ttest_ind

import varprop as vp

SHORT = {"batch": "batch norm", "group": "group norm", "group-ws": ROWS["group-ws"].label, "analytic": "analytic"}
TINY = ["--device", "cpu", "--model", "tiny", "--width", "8", "--held-out", "8"]
SMALL = [*TINY, "--images", "16", "--epochs", "2", "--search-epochs", "1"]


def options(records: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    """Options of a small table."""
    parsed: list[argparse.Namespace] = []
    with monkeypatch.context() as patch:
        patch.setattr(alternatives, "serve", lambda worker: parsed.append(worker.options))
        main(["serve", str(records), *SMALL, *words])
    return parsed[0]


def about(cell: GridCell) -> dict[str, Any]:
    return {"cell": cell.key, "kind": cell.kind, "norm": cell.norm, "batch": cell.batch, "seconds": 1.0}


@pytest.mark.parametrize("norm", [*ROWS, pytest.param("form-101", marks=pytest.mark.slow)])
def test_every_row_trains(norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "BATCH", 8)
    monkeypatch.setattr(SideBySide, "milliseconds", lambda self, seconds: 1.0)
    made = TableGrid(options(tmp_path / "records.jsonl", monkeypatch))
    worker = TableWorker(made.options)
    assert "prepared" in worker.prepare(made.prepared(norm))
    first = cell_of(SEARCH, norm, 0.05, (2.0, 0.0))
    results = [worker.trained(cell, 1e12) for cell in (first, cell_of(TEST, norm, 0.1, (0.0, 0.0), 1), first)]
    assert results[0]["runs"] == results[2]["runs"]  # whatever was trained between
    assert [len(result["runs"][0]["losses"]) for result in results] == [1, 2, 1]
    assert all(result["runs"][0]["accuracy"] is not None for result in results)
    assert worker.trained(first, 0.0).keys() == {"needs"}
    assert worker.cost(cell_of(COST, norm, 1e-4, (2.0, 0.0)))["ms"] == 1.0


class Pretended(TableGrid):
    """Runs that take no time; accuracy is highest at a rate, and with clipping."""

    best = 0.1

    def _started(self, name: str) -> Any:
        class Process:
            def kill(self) -> None: ...

        return Process()

    def _asked(self, process: Any, cell: GridCell, prepare: bool = False) -> dict[str, Any]:
        if prepare:
            return {"prepared": 0.0}
        self.asked = [*getattr(self, "asked", ()), cell]
        member = cell.members[0]
        accuracy = 0.9 - abs(member.rate - self.best) - (0.01 if not member.clip else 0.0)
        run = {"rate": member.rate, "clip": member.clip, "seed": member.seed, "accuracy": accuracy, "losses": [1.0]}
        bad = cell.norm == "none" and cell.kind == SEARCH
        return {**about(cell), "runs": [run | ({"accuracy": None} if bad else {})]}


def test_the_order_and_what_is_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pretended(options(tmp_path / "records.jsonl", monkeypatch, "--jobs", "1"))
    made.run()
    keys = [cell.key for cell in made.asked]
    assert len(keys) == len(set(keys)) == len(made.records)
    tests = [cell for cell in made.asked if cell.kind == TEST]
    assert {(cell.members[0].rate, cell.members[0].clip) for cell in tests} == {(0.1, 2.0)}
    assert {norm: sum(cell.norm == norm for cell in tests) for norm in ROWS} == {
        norm: row.seeds * (norm != "none") for norm, row in ROWS.items()
    }
    assert sum(cell.kind == AGAIN for cell in made.asked) == 16
    assert len([cell for cell in made.asked if cell.norm == "nf" and cell.kind == SEARCH]) == 16
    assert {cell.norm for cell in ready({})[:8]} == {"batch"} and not ready(made.records)
    assert "| batch norm | 0.1 | 2 | 0.9000 (0.9000 to 0.9000) | 5 | 1.000 |" in table(made.records).markdown()
    assert "| no | no | no | 0.8900 (0.8900 to 0.8900) at 0.1 |" in ablation(made.records).markdown()
    assert "diverged" in searched(made.records).markdown()
    drawn = figure(made.records)
    assert [len(panel.series) for panel in drawn.panels] == [6, 6]
    assert drawn.panels[1].series[0].y == pytest.approx((85.0, 90.0, 80.0, 60.0))
    again = Pretended(made.options)
    again.run()
    assert not hasattr(again, "asked")


@pytest.mark.parametrize(("best", "beyond"), [(0.01, [0.025, 0.0125]), (5.0, [0.8, 1.6]), (0.03, [0.025])])
def test_a_best_rate_at_the_edge_is_followed(
    best: float, beyond: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternatives, "ROWS", {"batch": ROWS["batch"]})
    monkeypatch.setattr(alternatives, "FORMS", {})
    made = Pretended(options(tmp_path / "records.jsonl", monkeypatch))
    made.best = best
    made.run()
    tried = dict.fromkeys(cell.members[0].rate for cell in made.asked if cell.kind == SEARCH)
    assert list(tried) == [*RATES, *beyond][: len(tried)] and len(tried) >= len(RATES) + 1
    expected = min(tried, key=lambda rate: abs(rate - best))
    assert {cell.members[0].rate for cell in made.asked if cell.kind == TEST} == {expected}


@pytest.mark.slow
def test_the_changes_of_the_deep_form() -> None:
    torch.manual_seed(0)
    moments = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1), (1, 3, 32, 32))
    plain, x = resnet("tiny", "analytic", 8), torch.randn(2, 3, 32, 32)
    outputs = {}
    for changes in FORMS:
        model = normalized(plain, moments, changes)
        outputs[changes] = model(x).detach()
        shifts = [float(p.detach().abs().max()) for name, p in model.named_parameters() if name == "0.shift"]
        assert (shifts[0] > 0) == changes[1]
        with torch.no_grad():
            model.get_parameter("0.weight").add_(0.1)  # which centred rows do not notice
        assert torch.allclose(model(x), outputs[changes], atol=1e-4) == changes[0]
    for changes, form in (((True,) * 3, "deep"), ((False,) * 3, "paper")):
        torch.testing.assert_close(outputs[changes], vp.normalize(plain, moments, form=form)(x))
    for centred, shifted, _ in FORMS:  # the average's rule scales what is behind it: logits are smaller with one
        one, many = outputs[centred, shifted, True], outputs[centred, shifted, False]
        assert float(many.std()) > 3 * float(one.std())


@pytest.mark.slow
def test_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "ROWS", {"batch": ROWS["batch"]._replace(seeds=1), "fixup": ROWS["fixup"]})
    monkeypatch.setattr(alternatives, "FORMS", {})
    monkeypatch.setattr(grid, "LAST_START", 0.0)
    file = tmp_path / "records.jsonl"
    words = [*SMALL, "--images", "512", "--jobs", "2", "--max-seconds", "600"]
    main(["run", str(file), *words, "--crash", "search batch rate 0.1 clip 0 seed 0"])
    assert not any(record["norm"] == "batch" and record["kind"] == TEST for record in read(file).values())
    main(["run", str(file), *words])
    assert sum(record["kind"] == TEST for record in read(file).values()) == 3
    main(["cost", str(file), *words])
    assert sum(record["kind"] == COST for record in read(file).values()) == 2
    main(["show", str(file)])


def test_pages_show_the_records() -> None:
    docs = Path(__file__).parents[2] / "docs"
    records = read(docs / "results" / "alternatives.jsonl")
    assert (docs / "results" / "alternatives.md").read_text("utf-8") == page(records)
    text = (docs / "deep.md").read_text("utf-8")
    for made in (table(records), ablation(records), costs(records)):
        assert made.markdown().strip() in text
    ms = {record["norm"]: record["ms"] for record in records.values() if record["kind"] == COST}
    evidence = " ".join((docs / "evidence.md").read_text("utf-8").split())
    for norm in ("analytic", "group-ws", "batch"):
        accuracies = [run["accuracy"] for run in runs_of(norm, records, TEST)]
        assert f"{sum(accuracies) / len(accuracies):.4f}" in evidence
    assert f"at {ms['group-ws'] / ms['analytic']:.2f} times the deep form's step" in evidence
    seeds = {
        norm: [run["accuracy"] for run in runs_of(norm, records, TEST)] for norm in ("analytic", "batch", "group-ws")
    }
    p_batch, p_group = (ttest_ind(seeds["analytic"], seeds[n], equal_var=False).pvalue for n in ("batch", "group-ws"))
    assert f"p = {p_batch:.2f} by Welch's test, {p_group:.2f} against" in " ".join(text.split())
    diverged = [run for run in runs_of("analytic", records) if not run["clip"]]
    assert "diverges without, at every rate from 0.05 to 0.4" in evidence
    assert {run["rate"] for run in diverged} == set(RATES) and not any(run["accuracy"] for run in diverged)
    readme = (docs.parent / "README.md").read_text("utf-8")
    small = read(docs / "results" / "batch_sizes.jsonl")
    for norm in ("batch", "group", "group-ws", "analytic"):
        values = [run["accuracy"] for run in runs_of(norm, records, TEST)]
        line = next(line for line in readme.splitlines() if line.replace("*", "").startswith(f"| {SHORT[norm]} |"))
        cells = [cell.strip(" *") for cell in line.split("|")[2:-1]]
        few = [run["accuracy"] for run in small[f"test {norm} 2"]["runs"]]
        shown = [f"{sum(each) / len(each):.4f} ({len(each)})" for each in (values, few)]
        prices = [f"{ms[norm]:.2f}", f"{small[f'cost {norm} 2']['ms']:.2f}"]
        assert cells == [shown[0], prices[0], shown[1], prices[1]]


def test_the_page_shows_the_records_of_the_second_network() -> None:
    docs = Path(__file__).parents[2] / "docs"
    records = read(docs / "results" / "alternatives34.jsonl")
    text, evidence = ((docs / name).read_text("utf-8") for name in ("deep.md", "evidence.md"))
    assert table(records).markdown().strip() in text
    seeds = {
        norm: [run["accuracy"] for run in runs_of(norm, records, TEST)]
        for norm in ("analytic", "batch", "group-ws", "evonorm")
    }
    assert all(f"{mean(accuracies):.4f}" in evidence for accuracies in seeds.values())
    words = " ".join(text.split())
    ahead = [100 * (mean(seeds["analytic"]) - mean(seeds[n])) for n in ("batch", "group-ws", "evonorm")]
    p_values = [
        ttest_ind(seeds["analytic"], seeds[n], equal_var=False).pvalue for n in ("batch", "group-ws", "evonorm")
    ]
    assert all(
        f"{points:.2f} " in words and f"(p = {p:.3f}" in words for points, p in zip(ahead, p_values, strict=True)
    )
    assert 3 * max(p_values) < 0.05  # what the page says of three comparisons
    short = {(norm, run["rate"]): run["accuracy"] for norm in seeds for run in runs_of(norm, records) if run["clip"]}
    assert {f"{short['analytic', rate]:.2f}" for rate in (0.2, 0.4)} == {"0.26"}
    assert f"batch norm has {short['batch', 0.2]:.2f} and {short['batch', 0.4]:.2f}" in words


def test_some_rows_are_trained_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Pretended(options(tmp_path / "records.jsonl", monkeypatch, "--jobs", "1", "--norms", "batch,group-ws"))
    made.run()
    assert {cell.norm for cell in made.asked} == {"batch", "group-ws"}


def test_full_strength_searches_then_trains_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PretendedStrong(Pretended, strong.StrongGrid):
        best = 0.3

    made = PretendedStrong(options(tmp_path / "records.jsonl", monkeypatch, "--jobs", "1"))
    made.run()
    for norm in strong.ROWS:
        kinds = [cell.kind for cell in made.asked if cell.norm == norm]
        assert kinds == sorted(kinds) and kinds.count(TEST) == 3  # searches first
    assert {cell.members[0].rate for cell in made.asked if cell.norm == "batch"} == {0.1, 0.2, 0.4}
    assert {cell.members[0].clip for cell in made.asked if cell.norm == "analytic"} == {2.0}
    assert "group norm + weight standardization | 0.2 |" in strong.table(made.records).markdown()


def test_full_strength_trains_with_cutout_and_smoothed_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "BATCH", 8)
    made = strong.StrongGrid(options(tmp_path / "records.jsonl", monkeypatch))
    worker, plain = strong.StrongWorker(made.options), TableWorker(made.options)
    cell = cell_of(SEARCH, "analytic", 0.05, (2.0, 0.0))
    losses = []
    for one in (worker, plain):
        one.prepare(made.prepared("analytic"))
        record = one.trained(cell, 1e12)
        losses.append(record["runs"][0]["losses"][0])
    assert abs(losses[0] - losses[1]) > 1e-3
    assert worker.about(cell)["cutout"] == 8 and "cutout" not in plain.about(cell)
    images = torch.ones(64, 3, 32, 32)
    cut, whole = (augmented(images, torch.Generator().manual_seed(0), size) for size in (8, 0))
    holes = (cut == 0).sum((1, 2, 3)) / 3
    assert (whole == 1).all() and holes.max() == 64 and holes.min() >= 16
    assert torch.equal(cut[0, 0], cut[0, 2])


def test_the_page_shows_the_records_at_full_strength() -> None:
    docs = Path(__file__).parents[2] / "docs"
    records = read(docs / "results" / "strong.jsonl")
    assert (docs / "results" / "strong.md").read_text("utf-8") == strong.page(records)
    text = (docs / "deep.md").read_text("utf-8")
    assert table(records).markdown().strip() in text
    analytic, batch = ([run["accuracy"] for run in runs_of(norm, records, TEST)] for norm in ("analytic", "batch"))
    p = ttest_ind(analytic, batch, equal_var=False).pvalue
    words = " ".join(text.split())
    assert f"{100 * (mean(batch) - mean(analytic)):.2f} points apart" in words
    assert f"(p = {p:.2f} by Welch's test)" in words


def test_what_each_change_brings_is_what_the_page_says() -> None:
    docs = Path(__file__).parents[2] / "docs"
    records = read(docs / "results" / "alternatives.jsonl")
    reached = {}
    for changes, norm in FORMS.items():
        best = best_of(run for run in runs_of(norm, records) if run["clip"])
        assert best is not None
        again = [run["accuracy"] for run in runs_of(norm, records, AGAIN) if run["clip"]]
        reached[changes] = mean([best["accuracy"], *again])
    gains = []
    for which in range(3):
        pairs = [(value, reached[(*c[:which], False, *c[which + 1 :])]) for c, value in reached.items() if c[which]]
        gains.append([100 * (with_it - without) for with_it, without in pairs])
    words = " ".join((docs / "deep.md").read_text("utf-8").split())
    rows, shift, average = (f"by {min(gain):.1f} to {max(gain):.1f}" for gain in gains)
    assert f"centred rows {rows} points, the average as one position {average}, the first shift {shift}." in words
