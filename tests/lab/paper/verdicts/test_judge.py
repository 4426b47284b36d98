"""Verdicts: each claim holds, fails, is within noise or without data exactly where its rule says so."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from varprop_lab.paper.verdicts.evidence import all_of
from varprop_lab.paper.verdicts.judge import CLAIMS, judge, judge_claim, markdown, write
from varprop_lab.protocol import PAPER_GRIDS
from varprop_lab.seed_statistics import FAILS, HOLDS, NOISE, Sample, lower, within
from varprop_lab.store import Run, read_runs

from .made_up import from_all_starts, verdict

NAMES = [claim.name for claim in CLAIMS]


# --- when a difference counts ---


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((1.0, 1.1, 0.9), (2.0, 2.1, 1.9), HOLDS),
        ((2.0, 2.1, 1.9), (1.0, 1.1, 0.9), FAILS),
        ((1.0, 1.2, 0.8), (1.3, 1.5, 1.1), HOLDS),  # in every seed by the same, though the seeds differ by more
        ((1.0, 1.2, 0.8), (1.1, 1.5, 1.3), NOISE),  # -0.3 on average, the interval reaches from -0.8 to 0.2
        ((1.0,), (2.0, 2.1, 1.9), NOISE),
        ((1.0,), (9.0,), NOISE),
        ((1.0, 1.1), (math.inf, math.inf), HOLDS),
        ((math.inf, math.inf), (1.0,), FAILS),
        ((1.0, 1.1), (math.inf, 2.0), NOISE),
        ((math.inf,), (math.inf,), NOISE),
    ],
)
def test_a_difference_counts_where_its_interval_leaves_out_zero(a, b, expected):
    assert lower(Sample(a), Sample(b)) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((1.0, 1.1, 0.9), (1.01, 1.1, 0.9), HOLDS),
        ((1.0, 1.1, 0.9), (1.5, 1.61, 1.4), FAILS),
        ((1.5, 1.61, 1.4), (1.0, 1.1, 0.9), FAILS),
        ((1.0, 1.1, 0.9), (1.0, 1.6, 0.9), NOISE),
        ((1.0, 1.1), (math.inf, math.inf), FAILS),
        ((math.inf, math.inf), (1.0, 1.1), FAILS),
        ((1.0, 1.1, 0.9), (math.inf, 1.1, 0.9), NOISE),  # one run that diverged decides nothing
        ((math.inf, 1.0), (math.inf, 1.0), NOISE),
    ],
)
def test_two_are_alike_where_the_interval_keeps_the_tolerance(a, b, expected):
    assert within(Sample(a), Sample(b), 0.1) == expected


def test_differences_are_taken_seed_by_seed():
    assert lower(Sample((1.0, 3.0)), Sample((5.0, 5.0))).p == pytest.approx(0.2048, abs=1e-4)  # t = -3, one degree
    shuffled = lower(Sample((1.0, 3.0, 9.0), (0, 1, 2)), Sample((5.0, 5.0), (1, 0)))
    assert shuffled.p == lower(Sample((1.0, 3.0)), Sample((5.0, 5.0))).p
    assert lower(Sample((1.0, 3.0), (0, 1)), Sample((5.0, 5.0), (1, 2))) == NOISE  # one seed in common


def test_one_of_many_parts_fails_by_chance():
    part = lower(Sample((2.0, 2.1, 1.9)), Sample((1.0, 1.3, 0.8)))
    assert part == FAILS and 0.005 < part.p < 0.02
    assert all_of([part]) == all_of([part, NOISE]) == FAILS
    assert all_of([part, *[HOLDS] * 9]) == NOISE  # 0.05 / 10 is not reached
    assert all_of([FAILS, *[HOLDS] * 9]) == FAILS  # of a threshold that no seed keeps
    assert all_of([all_of([part] * 3)] * 3) == NOISE  # parts of parts
    assert all_of([HOLDS] * 10) == HOLDS


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0.123, 0.127, 0.125), "0.1250 ± 0.0020 (3 seeds)"),
        ((0.5,), "0.5 (1 seed)"),
        ((2.0, 2.0), "2 ± 0 (2 seeds)"),
        ((1.0, math.inf), "diverged in 1 of 2 seeds"),
    ],
)
def test_numbers_are_given_with_their_spread(values, text):
    assert Sample(values).text() == text


# --- all claims ---


def test_without_runs_nothing_is_said_but_what_is_measured_here():
    verdicts = {found.name: found.verdict for found in judge([])}
    assert list(verdicts) == NAMES
    measured = {"four-times", "four-times-adam", "image-size"}
    assert {name for name, verdict in verdicts.items() if verdict != "no data"} == measured


def test_what_is_missing_comes_with_the_command_that_makes_it():
    for found in judge([]):
        if found.verdict == "no data":
            assert any("to be made by: varprop " in line for line in found.measured), found.name


def test_the_limit_of_training_separates_in_every_experiment_on_record():
    runs = read_runs(Path(__file__).parents[4] / "docs" / "results")
    found = {verdict.name: verdict for verdict in judge(runs)}["trains"]
    (missed,) = (line for line in found.measured if line.startswith("others that miss"))
    assert missed.count(";") == len(PAPER_GRIDS)


def test_the_papers_bound_decides_and_others_are_given_beside_it():
    paper = from_all_starts("analytic", (2.3, 2.3))
    wide = from_all_starts("analytic", (0.1, 0.1), bound=1e-1)
    found = verdict("trains", [*wide, *paper])
    assert (found.verdict, found.setting) == ("does not hold", "lr ≤ 0.01")
    assert [(other.verdict, other.setting) for other in found.others] == [("holds", "lr ≤ 0.1")]
    assert verdict("trains", wide).verdict == "holds"


def test_the_same_cells_with_other_settings_do_not_enter_the_claims():
    meant, other = (
        Run(name, from_all_starts("analytic", (loss, loss))) for name, loss in (("mnist", 0.1), ("m2", 2.3))
    )
    (trains,) = (claim for claim in CLAIMS if claim.name == "trains")
    assert judge_claim(trains, [meant, other]) == judge_claim(trains, [other, meant]) == judge_claim(trains, [meant])
    assert judge_claim(trains, [other]).verdict == "no data"


def test_small_batches_do_not_enter_the_claims():
    outcomes = [replace(o, cell=replace(o.cell, batch_size=4)) for o in from_all_starts("analytic", (0.1, 0.1))]
    assert verdict("trains", outcomes).verdict == "no data"


# --- what is written ---


def test_claims_are_written_as_json_and_markdown(tmp_path):
    judged = judge([Run("mnist", from_all_starts("analytic", (0.1, 0.2)))])
    write(judged, tmp_path)
    stored = json.loads((tmp_path / "claims.json").read_text("utf-8"))
    assert [claim["name"] for claim in stored["claims"]] == NAMES
    assert next(c for c in stored["claims"] if c["name"] == "trains")["verdict"] == "holds"
    rows = [line for line in (tmp_path / "claims.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(NAMES)  # headings, the rule below them, claims
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)


def test_markdown_links_only_figures_that_exist():
    judged = judge([])
    text = markdown(judged, lambda figure: "there.png" if figure == "mnist/training" else "")
    assert text.count("(there.png)") == sum(found.figure == "mnist/training" for found in judged)
    assert "[naive" not in text
