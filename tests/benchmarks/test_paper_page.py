"""The page on the paper's experiments: what it says of made-up runs, and that it says what the records say."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import paper_page

from tests.lab import synthetic
from varprop_lab import figures
from varprop_lab.protocol import Cell, Search
from varprop_lab.store import read_run

NOT_RECORDED = {"bn-boost"}  # by the runs in the documentation
RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Figures are only noted, not drawn, which has tests of its own; the repository's documentation is out of sight."""
    monkeypatch.chdir(tmp_path)
    noted = []
    monkeypatch.setattr(figures, "draw", lambda figure, stem, heading="": noted.append(stem))
    return noted


def page_of(out, results):
    paper_page.add_runs(out, results)
    return paper_page.write_page(results)


def test_the_documentation_says_what_its_records_say(tmp_path):
    copy = tmp_path / "results"
    shutil.copytree(RESULTS, copy, ignore=shutil.ignore_patterns("*.png", "*.svg"))
    for name in ("claims.json", "claims.md", "experiments.md"):
        (copy / name).unlink()
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert paper_page.write_page(copy) == copy / "experiments.md"
    for name in ("claims.json", "claims.md", "experiments.md"):
        assert (copy / name).read_text("utf-8") == (RESULTS / name).read_text("utf-8"), name
    claims = json.loads((copy / "claims.json").read_text())["claims"]
    assert {claim["name"] for claim in claims if claim["verdict"] == "no data"} <= NOT_RECORDED
    assert {path: path.read_bytes() for path in before} == before  # records stay as they are


def test_documentation_has_commands_numbers_figures_and_tables(tmp_path, drawn):
    out = synthetic.write(tmp_path / "out", [*synthetic.grid("mnist"), *synthetic.naive()])
    page = page_of(out, tmp_path / "results")
    results = tmp_path / "results"
    text = page.read_text("utf-8")
    assert page == results / "experiments.md"
    assert "- Command: `varprop reproduce mnist --seeds 3`" in text
    assert "- Hardware: synthetic, no hardware" in text
    assert "- Time: 83.2 s" in text
    assert "| AP2 trains from all three starts | **holds** |" in text
    for name in ("mnist/runs.csv", "mnist/curves.csv", "mnist/searches.csv", "mnist/manifest.json", "claims.json"):
        assert (results / name).exists()
    pictures = re.findall(r"\]\(([^)]+)\.png\)", text)
    assert {results / picture for picture in pictures} == set(drawn)
    assert {"mnist/training", "naive/naive-training"} <= set(pictures)


def test_documentation_says_which_sitting_a_fact_is_about(tmp_path, drawn):
    out = synthetic.write(tmp_path / "out", synthetic.grid("mnist"))
    sittings = [{"command": "varprop one"}, {"command": "varprop two --resume", "seconds": 83.2}]
    resumed = {**synthetic.manifest("mnist"), "command": "varprop one && varprop two --resume", "sittings": sittings}
    (out / "mnist" / "manifest.json").write_text(json.dumps(resumed))
    text = page_of(out, tmp_path / "results").read_text("utf-8")
    assert "- Sitting 1: `varprop one`, broken off\n- Sitting 2: `varprop two --resume`, 83.2 s\n" in text
    assert "- Git, last sitting: 0123456789abcdef\n" in text
    assert "- Started, first sitting: 2026" in text
    assert "- Time, all sittings that were not broken off: 83.2 s" in text
    assert "- Command:" not in text
    dirty = {"command": "varprop one", "git": {"commit": "abc", "dirty": True}, "seconds": 2}
    sittings = [dirty, {"command": "varprop one", "seconds": 1}]
    (out / "mnist" / "manifest.json").write_text(json.dumps({**resumed, "sittings": sittings}))
    text = page_of(out, tmp_path / "results").read_text("utf-8")
    assert "- Sitting 1: `varprop one`, git abc, with local changes, 2.0 s\n- Sitting 2: `varprop one`, 1.0 s\n" in text


def test_new_results_replace_those_of_their_experiment_in_the_documentation_and_leave_others(tmp_path, drawn):
    results = tmp_path / "results"
    page_of(synthetic.write(tmp_path / "old", [*synthetic.grid("mnist"), *synthetic.naive()]), results)
    (results / "mnist" / "training-lr1e-01.png").touch()  # a figure that the new run has not
    new = synthetic.write(tmp_path / "new", [synthetic.outcome(Cell("mnist", "analytic", "bn", 7))])
    text = page_of(new, results).read_text("utf-8")
    assert "## Equal learning rates" in text and "w = 2w' looks like an improvement | **holds**" in text
    assert [o.cell.seed for o in read_run(results / "mnist").outcomes] == [7]
    assert not (results / "mnist" / "training-lr1e-01.png").exists()


def test_documentation_is_the_same_every_time(tmp_path, drawn):
    out = synthetic.write(tmp_path / "out", synthetic.grid("mnist"))
    first = page_of(out, tmp_path / "results").read_bytes()
    assert page_of(out, tmp_path / "results").read_bytes() == first


def test_documentation_gives_the_noise_of_the_search_apart(tmp_path, drawn):
    narrow, wide = (synthetic.outcome(Cell("mnist", "analytic", "bn", 0, lr_max=bound)) for bound in (1e-2, 1e-1))
    narrow = replace(narrow, search=Search(5e-3, 0.44, [(5e-3, 0.44), (1e-3, 0.6)]))
    wide = replace(wide, search=Search(3e-2, 0.3, [(3e-2, 0.3), (8e-3, 0.4)]))
    text = page_of(synthetic.write(tmp_path / "out", [narrow, wide]), tmp_path / "results").read_text("utf-8")
    regrets = [line.split("|")[4].strip() for line in text.splitlines() if line.startswith("| init = BN | AP2")]
    assert regrets == ["10.0 %, 10.0 %", "0.0 %, 0.0 %"]


def test_one_search_alone_has_no_regret(tmp_path, drawn):
    once = replace(synthetic.outcome(Cell("mnist", "analytic", "bn", 0)), search=Search(5e-3, 0.44, [(5e-3, 0.44)]))
    text = page_of(synthetic.write(tmp_path / "out", [once]), tmp_path / "results").read_text("utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| init = BN | AP2"))
    assert row.split("|")[4].strip() == "–"
