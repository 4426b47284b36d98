"""The tables of a report hold all that verdicts rest on; those in the documentation say what it says."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from varprop_lab.paper import report
from varprop_lab.protocol import Cell
from varprop_lab.store import read_run, read_tables, write_tables

from .. import synthetic

NOT_RECORDED = {"bn-boost"}  # by the runs in the documentation
RESULTS = Path(__file__).parents[3] / "docs" / "results"


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


@pytest.mark.skipif(not RESULTS.is_dir(), reason="the documentation is not there")
def test_the_documentation_says_what_its_records_say(tmp_path):
    copy = tmp_path / "results"
    shutil.copytree(RESULTS, copy, ignore=shutil.ignore_patterns("*.png", "*.svg"))
    for name in ("claims.json", "claims.md", "experiments.md"):
        (copy / name).unlink()
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert report.write(copy, ["claims"]) == copy / "experiments.md"
    for name in ("claims.json", "claims.md", "experiments.md"):
        assert (copy / name).read_text("utf-8") == (RESULTS / name).read_text("utf-8"), name
    claims = json.loads((copy / "claims.json").read_text())["claims"]
    assert {claim["name"] for claim in claims if claim["verdict"] == "no data"} <= NOT_RECORDED
    assert {path: path.read_bytes() for path in before} == before  # records stay as they are
