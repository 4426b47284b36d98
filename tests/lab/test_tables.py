"""Tidy tables: one row an observation, nothing lost, nothing invented."""

from __future__ import annotations

import csv
import json
import math
import sys

import pytest

from varprop.lab import tables
from varprop.lab.gather import Run, gather, read_run
from varprop.lab.records import TRAIN_LOSS, Cell

from . import synthetic

OUTCOMES = synthetic.grid("mnist", seeds=(0, 1), starts=("bn", "ap2"))


def run_of(outcomes, experiment="mnist"):
    return Run(experiment, outcomes, synthetic.manifest(experiment))


def read(file):
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_runs_have_one_row_a_cell_with_where_it_came_from(tmp_path):
    tables.write(run_of(OUTCOMES), tmp_path)
    rows = read(tmp_path / "runs.csv")
    assert len(rows) == len(OUTCOMES)
    for row, outcome in zip(rows, OUTCOMES, strict=True):
        assert (row["method"], row["start"], int(row["seed"])) == (
            outcome.cell.method,
            outcome.cell.start,
            outcome.cell.seed,
        )
        assert float(row["final_train_loss"]) == outcome.curves[TRAIN_LOSS][-1]
        assert float(row["lr"]) == outcome.search.lr
        assert row["at_bound"] == str(outcome.search.at_bound)
        assert (row["commit"], row["torch"], row["hardware"]) == (
            "0123456789abcdef",
            "2.13.0",
            "synthetic, no hardware",
        )
        assert (row["final_train_eval_loss"] == "") == (outcome.cell.method != "batch")


def test_curves_and_searches_keep_every_value(tmp_path):
    tables.write(run_of(OUTCOMES), tmp_path)
    curves = read(tmp_path / "curves.csv")
    assert len(curves) == sum(len(values) for outcome in OUTCOMES for values in outcome.curves.values())
    first = OUTCOMES[0]
    own = [row for row in curves if (row["method"], row["start"], row["seed"]) == ("standard", "bn", "0")]
    values = [float(row["value"]) for row in own if row["curve"] == TRAIN_LOSS]
    assert values == first.curves[TRAIN_LOSS]
    assert [int(row["epoch"]) for row in own if row["curve"] == TRAIN_LOSS] == list(range(1, len(values) + 1))
    searches = read(tmp_path / "searches.csv")
    assert len(searches) == sum(len(outcome.search.trace) for outcome in OUTCOMES)
    assert any(math.isinf(float(row["loss"])) for row in searches)
    assert sum(row["chosen"] == "True" for row in searches) == len(OUTCOMES)


def test_parquet_says_the_same_and_carries_the_manifest(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    tables.write(run_of(OUTCOMES), tmp_path)
    for name, columns in tables.COLUMNS.items():
        table = parquet.read_table(tmp_path / f"{name}.parquet")
        rows = read(tmp_path / f"{name}.csv")
        assert tuple(table.column_names) == columns == tuple(rows[0])
        as_text = [
            {key: "" if value is None else str(value) for key, value in row.items()} for row in table.to_pylist()
        ]
        assert as_text == rows
        assert json.loads(table.schema.metadata[b"varprop"]) == synthetic.manifest("mnist")


def test_without_pyarrow_there_is_csv_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    written = tables.write(run_of(OUTCOMES), tmp_path)
    assert sorted(file.name for file in written) == ["curves.csv", "runs.csv", "searches.csv"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curves.csv", "runs.csv", "searches.csv"]


def test_a_diverged_run_is_a_row_too(tmp_path):
    broken = synthetic.outcome(Cell("mnist", "batch", "bn", 0), epochs=9, diverged=True)
    tables.write(Run("mnist", [broken]), tmp_path)
    (row,) = read(tmp_path / "runs.csv")
    assert (row["diverged"], row["epochs"], row["test_loss"], row["commit"]) == ("True", "3", "nan", "")


def test_gathering_names_what_it_cannot_read_and_keeps_the_rest(tmp_path):
    synthetic.write(tmp_path, OUTCOMES)
    cells = sorted((tmp_path / "mnist" / "cells").iterdir())
    cells[0].write_text("{ not json")
    cells[1].write_text(json.dumps({**json.loads(cells[2].read_text()), "curves": {"train_loss": ["low"]}}))
    (tmp_path / "mnist" / "manifest.json").write_text("[]")
    run = read_run(tmp_path / "mnist")
    assert len(run.outcomes) == len(OUTCOMES) - 2
    assert run.manifest == {}
    assert [sum(name in problem for problem in run.problems) for name in (cells[0].name, cells[1].name)] == [1, 1]
    assert any("manifest.json" in problem for problem in run.problems)


def test_gathering_shows_the_missing_and_skips_what_is_no_experiment(tmp_path):
    synthetic.write(tmp_path, OUTCOMES)
    (tmp_path / "notes").mkdir()
    runs = gather(tmp_path, ["relu", "noisy-mnist", "claims"])
    assert [run.experiment for run in runs] == ["mnist", "noisy-mnist", "relu"]
    assert runs[1].problems == ["no finished cells"]
    missing = [f"no finished cell of {method} from none" for method in ("standard", "weight", "batch", "analytic")]
    assert [problem.split(" (")[0] for problem in runs[0].problems] == missing
    assert gather(tmp_path / "nowhere") == []


def test_gathering_names_the_seeds_that_are_missing(tmp_path):
    outcomes = [o for o in synthetic.grid("mnist") if o.cell.method != "weight" or o.cell.seed == 0]
    lost = next(o for o in outcomes if (o.cell.method, o.cell.start, o.cell.seed) == ("batch", "ap2", 2))
    synthetic.write(tmp_path, [o for o in outcomes if o is not lost])
    assert read_run(tmp_path / "mnist").problems == [
        "no finished cell of weight with seed 1, 2 from none, bn, ap2 (batch 128, lr at most 0.01)",
        "no finished cell of batch with seed 2 from ap2 (batch 128, lr at most 0.01)",
    ]


def test_a_seed_asked_for_and_never_finished_is_missing(tmp_path):
    synthetic.write(tmp_path, synthetic.grid("mine", seeds=(0,), starts=("bn",), methods=("batch",)))
    manifest = tmp_path / "mine" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "seeds": [0, 1]}))
    (problem,) = read_run(tmp_path / "mine").problems
    assert problem.startswith("no finished cell of batch with seed 1 from bn")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "seeds": "many"}))
    assert read_run(tmp_path / "mine").problems == []


def test_no_commit_is_given_for_the_cells_of_several_sittings(tmp_path):
    resumed = {**synthetic.manifest("mnist"), "command": "varprop reproduce mnist && varprop reproduce mnist --resume"}
    tables.write(Run("mnist", OUTCOMES, resumed), tmp_path)
    assert {(row["commit"], row["dirty"], row["torch"]) for row in read(tmp_path / "runs.csv")} == {("", "", "2.13.0")}
