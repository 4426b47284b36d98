"""Tidy tables: one row an observation, nothing lost, nothing invented."""

from __future__ import annotations

import csv
import math

from varprop_lab.protocol import TRAIN_LOSS, Cell
from varprop_lab.store import write_tables

from .. import synthetic

OUTCOMES = synthetic.grid("mnist", seeds=(0, 1), starts=("bn", "ap2"))


def read(file):
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_runs_have_one_row_a_cell_with_where_it_came_from(tmp_path):
    write_tables(tmp_path, OUTCOMES, synthetic.manifest("mnist"))
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
            "{'machine': 'synthetic, no hardware'}",
        )
        assert (row["final_train_eval_loss"] == "") == (outcome.cell.method != "batch")


def test_curves_and_searches_keep_every_value(tmp_path):
    write_tables(tmp_path, OUTCOMES, synthetic.manifest("mnist"))
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


def test_a_diverged_run_is_a_row_too(tmp_path):
    broken = synthetic.outcome(Cell("mnist", "batch", "bn", 0), epochs=9, diverged=True)
    write_tables(tmp_path, [broken], {})
    (row,) = read(tmp_path / "runs.csv")
    assert (row["diverged"], row["epochs"], row["test_loss"], row["commit"]) == ("True", "3", "nan", "")


def test_no_commit_is_given_for_the_cells_of_several_sittings(tmp_path):
    resumed = {**synthetic.manifest("mnist"), "sittings": [{"command": "varprop"}, {"command": "varprop --resume"}]}
    write_tables(tmp_path, OUTCOMES, resumed)
    assert {(row["commit"], row["dirty"], row["torch"]) for row in read(tmp_path / "runs.csv")} == {("", "", "2.13.0")}
