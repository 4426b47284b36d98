"""The study of searches: regrets against the best of all, and what is written of them."""

import csv
import json
import math
from pathlib import Path

import pytest
from benchmarks import search_study

import varprop as vp

ROOT = Path(__file__).parents[2]


def smooth(lr):
    """A valley at 1e-4."""
    return 1 + (math.log10(lr) + 4) ** 2


def valleys(lr):
    """A broad one at 1e-5, and a narrow deeper one near the upper bound."""
    place = math.log10(lr)
    return min(2 + 0.1 * (place + 5) ** 2, 1 + 20 * (place + 2.3) ** 2)


def compared(loss):
    return search_study.compared((1e-6, 1e-2), loss)


def test_regret_is_measured_against_the_best_that_anybody_tried():
    found = {"smooth": compared(smooth), "valleys": compared(valleys)}
    for searches in found.values():
        assert min(search["regret"] for search in searches.values()) == 0
        best = min(search["loss"] for search in searches.values())
        assert all(search["regret"] == pytest.approx(search["loss"] / best - 1) for search in searches.values())
    assert found["valleys"]["brent"]["regret"] > 0.5  # it settles in the broad valley
    assert found["valleys"]["grid+brent"]["regret"] < 0.02
    assert found["smooth"]["grid+brent"]["regret"] < 0.02


def test_the_study_writes_its_numbers_and_a_table(tmp_path, monkeypatch):
    made: list[str] = []

    def found(job):
        made.append(job.cell.key)
        return compared(valleys if job.cell.method == "batch" else smooth)

    monkeypatch.setattr(search_study._SearchedCell, "found", found)
    search_study.study(tmp_path, experiments={"digits, seed 0": search_study.STUDIED["digits, seed 0"]})
    assert len(made) == 12
    page = search_study.study(tmp_path)
    assert len(made) == len(set(made)) == 48  # none twice
    stored = json.loads((tmp_path / "search.json").read_text())
    assert set(stored["cells"]) == set(search_study.STUDIED) and stored["versions"]["torch"]
    rows = [line for line in page.read_text().splitlines() if line.startswith("| digits, seed 0")]
    assert [row.split("|")[2].strip() for row in rows] == ["grid", "brent", "grid+brent", "grid+brent+bound"]
    assert rows[1].split("|")[6].strip() == "3 of 12"
    assert rows[3].split("|")[3].strip() == "12 or one more"


def test_another_study_is_not_gone_on_with(tmp_path):
    (tmp_path / "search.json").write_text('{"cells": {}}')  # as an earlier version wrote it
    with pytest.raises(vp.VarpropError, match=r"search\.json compares other searches: choose another --out"):
        search_study.study(tmp_path)


def test_nothing_is_begun_when_the_time_is_over(tmp_path):
    page = search_study.study(tmp_path, max_seconds=-1.0)
    assert page.exists() and not (tmp_path / "search.json").exists()


def test_the_default_search_is_one_of_those_compared():
    from varprop_lab.paper.experiments import EXPERIMENTS

    protocol = EXPERIMENTS["mnist"].protocol
    assert protocol == EXPERIMENTS["mnist"].adapted(search="grid+brent+bound").protocol
    plain = EXPERIMENTS["mnist"].adapted(search="brent").protocol
    assert (plain.evaluations, plain.grids, plain.try_bounds) == (10, (), False)  # the paper's
    with pytest.raises(vp.VarpropError, match="search must be one of brent, grid\\+brent"):
        EXPERIMENTS["mnist"].adapted(search="golden")


def test_the_page_says_what_its_record_says():
    results = Path(__file__).parents[2] / "docs" / "results"
    cells = json.loads((results / "search.json").read_text("utf-8"))["cells"]
    page = search_study.markdown({title: cells[title] for title in search_study.STUDIED})
    assert (results / "search.md").read_text("utf-8") == page


def test_a_bound_that_is_tried_changes_no_rate_of_noisy_cifar10() -> None:
    folder = ROOT / "docs/results/noisy-cifar10"
    with (folder / "runs.csv").open(newline="") as file:
        near = [row for row in csv.DictReader(file) if not 0.1 < (math.log10(float(row["lr"])) + 6) / 4 < 0.9]
    assert [(row["method"], row["start"], row["seed"]) for row in near] == [("batch", "none", "1")]
    found, bound = json.loads((folder / "bound.json").read_text("utf-8"))["losses"]
    assert found["loss"] == float(near[0]["search_loss"]) < bound["loss"] and bound["lr"] == float(near[0]["lr_max"])
