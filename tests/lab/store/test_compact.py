"""The tables of a report hold all that verdicts rest on."""

import math
from dataclasses import replace

import pytest

from varprop_lab.paper import report
from varprop_lab.protocol import Cell
from varprop_lab.store import read_run, read_tables, write_tables

from .. import synthetic


def outcomes():
    cells = [Cell("mnist", method, "bn", seed) for method in ("batch", "analytic") for seed in (0, 1)]
    first, second, *rest = map(synthetic.outcome, cells)
    searched = replace(first.search, trace=[(1e-3, 0.1 + 0.2), (1e-2, math.inf)], at_bound=True)
    return [replace(first, search=searched), replace(second, diverged=True, test_loss=math.inf), *rest]


def test_numbers_come_back_to_the_last_bit(tmp_path):
    written = outcomes()
    write_tables(tmp_path, written, {})
    assert read_tables(tmp_path) == written


def test_tables_count_only_where_there_are_no_cells(tmp_path):
    folder = tmp_path / "mnist"
    write_tables(folder, outcomes(), {})
    found = read_run(folder)
    assert found.compact and len(found.outcomes) == 4
    (folder / "cells").mkdir()
    assert not read_run(folder).compact and not read_run(folder).outcomes


@pytest.mark.parametrize("damage", ["", "experiment,method\nmnist,batch\n"])
def test_damaged_tables_are_named(tmp_path, damage):
    folder = tmp_path / "mnist"
    write_tables(folder, outcomes(), {})
    (folder / "curves.csv").write_text(damage)
    (folder / "runs.csv").write_text((folder / "runs.csv").read_text().replace("False", "perhaps"))
    found = read_run(folder)
    assert not found.outcomes and "cannot be read" in found.problems[0]


def test_claims_are_judged_from_tables_which_stay_as_they_are(tmp_path):
    write_tables(tmp_path / "mnist", outcomes(), {})
    assert report.write(tmp_path, ["mnist"]) == tmp_path / "claims.md"
    files = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert files == {"claims.md", "claims.json", "runs.csv", "curves.csv", "searches.csv"}
