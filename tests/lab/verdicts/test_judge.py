"""Verdicts: each claim holds, fails, is within noise or without data exactly where its rule says so."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from varprop.lab.protocol.records import METHODS, STARTS, TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_ACCURACY, VALID_LOSS, Cell
from varprop.lab.store.runs import Run
from varprop.lab.verdicts.claims import CLAIMS
from varprop.lab.verdicts.judge import judge, markdown, write
from varprop.lab.verdicts.seed_statistics import Sample, difference, order

from .. import synthetic

NAMES = [*(claim.name for claim in CLAIMS), "overhead"]


def ended(cell, train=0.1, valid=0.2, error=0.05, evaluation=None, diverged=False):
    """A synthetic outcome that ends with these values."""
    curves = {TRAIN_LOSS: [2.0, train, train], VALID_LOSS: [valid], VALID_ACCURACY: [1 - error]}
    if evaluation is not None:
        curves[TRAIN_EVAL_LOSS] = [evaluation, evaluation, evaluation]
    return replace(synthetic.outcome(cell), curves=curves, diverged=diverged)


def seeds(experiment, method, start, values, bound=1e-2, variant="", **name_of_value):
    """One outcome a value; the keyword says what the values are, ``name="train"`` by default."""
    name = name_of_value.get("name", "train")
    cells = [Cell(experiment, method, start, seed, lr_max=bound, variant=variant) for seed in range(len(values))]
    return [ended(cell, **{name: value}) for cell, value in zip(cells, values, strict=True)]


def verdict(name, outcomes, benchmarks=()):
    names = dict.fromkeys(outcome.cell.experiment for outcome in outcomes)
    runs = [Run(name, [o for o in outcomes if o.cell.experiment == name]) for name in names]
    return {found.name: found for found in judge(runs, benchmarks)}[name]


# --- when a difference counts ---


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((1.0, 1.1, 0.9), (2.0, 2.1, 1.9), "lower"),
        ((2.0, 2.1, 1.9), (1.0, 1.1, 0.9), "higher"),
        ((1.0, 1.2, 0.8), (1.3, 1.5, 1.1), "lower"),  # in every seed by the same, though the seeds differ by more
        ((1.0, 1.2, 0.8), (1.1, 1.5, 1.3), "noise"),  # -0.3 on average, the interval reaches from -0.8 to 0.2
        ((1.0,), (2.0, 2.1, 1.9), "noise"),
        ((1.0,), (9.0,), "noise"),
        ((1.0, 1.1), (math.inf, math.inf), "lower"),
        ((math.inf, math.inf), (1.0,), "higher"),
        ((1.0, 1.1), (math.inf, 2.0), "noise"),
        ((math.inf,), (math.inf,), "noise"),
    ],
)
def test_a_difference_counts_where_its_interval_leaves_out_zero(a, b, expected):
    assert order(Sample(a), Sample(b)) == expected


def test_differences_are_taken_seed_by_seed():
    mean, margin = difference(Sample((1.0, 3.0)), Sample((5.0, 5.0)))
    assert (mean, margin) == (-3.0, pytest.approx(12.706, abs=1e-3))  # Student's t with one degree of freedom
    assert difference(Sample((1.0, 3.0, 9.0), (0, 1, 2)), Sample((4.0, 2.0), (1, 0)))[0] == -1.0
    assert all(map(math.isnan, difference(Sample((1.0, 3.0), (0, 1)), Sample((5.0, 5.0), (1, 2)))))


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


# --- claim by claim ---


def test_without_runs_nothing_is_said():
    assert [(found.name, found.verdict) for found in judge([])] == [(name, "no data") for name in NAMES]


def from_all_starts(method, values, **more):
    return [outcome for start in STARTS for outcome in seeds("mnist", method, start, values, **more)]


@pytest.mark.parametrize(
    ("last_start", "expected"),
    [((0.1, 0.2, 0.1), "holds"), ((2.2, 2.3, 2.2), "does not hold"), ((0.1, 2.3, 0.1), "within noise")],
)
def test_analytic_trains_from_all_starts(last_start, expected):
    good = from_all_starts("analytic", (0.1, 0.2, 0.1))[:6]
    found = verdict("trains", [*good, *seeds("mnist", "analytic", "ap2", last_start)])
    assert found.verdict == expected
    assert "Noisy MNIST: not run" in found.measured
    assert verdict("trains", good).verdict == "no data"


def test_a_diverged_run_did_not_train():
    outcomes = [replace(o, diverged=True) for o in from_all_starts("analytic", (0.1, 0.1))]
    assert verdict("trains", outcomes).verdict == "does not hold"


@pytest.mark.parametrize(("weight", "expected"), [(0.2, "holds"), (2.3, "does not hold")])
def test_others_work_from_the_analytic_start(weight, expected):
    outcomes = [*seeds("mnist", "standard", "ap2", (0.3, 0.2)), *seeds("mnist", "weight", "ap2", (weight, weight))]
    assert verdict("others-from-ap2", outcomes).verdict == expected
    assert verdict("others-from-ap2", outcomes[:2]).verdict == "no data"


def test_what_trains_is_measured_by_the_best_of_the_experiment():
    slow = [o for method in ("standard", "weight") for o in seeds("mnist", method, "ap2", (0.5, 0.5))]
    assert verdict("others-from-ap2", slow).verdict == "holds"
    best = seeds("mnist", "analytic", "none", (0.2, 0.2))
    assert verdict("others-from-ap2", [*slow, *best]).verdict == "does not hold"
    nobody = [o for method in ("standard", "weight") for o in seeds("mnist", method, "ap2", (2.3, 2.3))]
    assert verdict("others-from-ap2", nobody).verdict == "does not hold"


def four_methods(analytic, others, start="bn", experiment="mnist"):
    rest = [o for method in METHODS if method != "analytic" for o in seeds(experiment, method, start, others)]
    return [*rest, *seeds(experiment, "analytic", start, analytic)]


WIN, LOSS, TIE = ((0.10, 0.11), (0.20, 0.21)), ((0.30, 0.31), (0.20, 0.21)), ((0.2, 0.35), (0.25, 0.3))


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ((WIN, WIN, LOSS), "holds"),
        ((WIN, LOSS, LOSS), "does not hold"),
        ((WIN, TIE, LOSS), "within noise"),
        ((TIE, TIE, TIE), "within noise"),
    ],
)
def test_analytic_is_lowest_in_many_cases(cases, expected):
    outcomes = [o for start, case in zip(STARTS, cases, strict=True) for o in four_methods(*case, start=start)]
    found = verdict("lower-loss", outcomes)
    assert found.verdict == expected
    assert found.measured[0].startswith(f"lowest in {cases.count(WIN)} of 3 cases")


def test_a_case_needs_all_four_methods():
    outcomes = [o for o in four_methods(*WIN) if o.cell.method != "weight"]
    assert verdict("lower-loss", outcomes).verdict == "no data"


@pytest.mark.parametrize(
    ("evaluations", "expected"),
    [((0.2, 0.3), "holds"), ((0.102, 0.098), "does not hold"), ((0.2, 0.1), "within noise")],
)
def test_batch_norm_evaluates_differently_from_none(evaluations, expected):
    outcomes = [ended(Cell("mnist", "batch", "none", s), evaluation=v) for s, v in enumerate(evaluations)]
    assert verdict("bn-evaluation", outcomes).verdict == expected
    elsewhere = [replace(o, cell=replace(o.cell, start="bn")) for o in outcomes]
    assert verdict("bn-evaluation", elsewhere).verdict == "no data"


def validation(experiment, losses, errors, start="bn"):
    """Two seeds a method around a loss and an error; the second is a little better for AP2 and worse for the others."""
    sign = {"analytic": -1}
    return [
        ended(
            Cell(experiment, method, start, seed),
            valid=losses[method] + 0.001 * seed * sign.get(method, 1),
            error=errors[method] + 1e-4 * seed * sign.get(method, 1),
        )
        for method in losses
        for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("loss", "error", "expected"),
    [(0.1, 0.02, "holds"), (0.1, 0.05, "within noise"), (0.3, 0.02, "does not hold"), (0.3, 0.09, "does not hold")],
)
def test_batch_norm_generalizes(loss, error, expected):
    outcomes = validation(
        "mnist", {**dict.fromkeys(METHODS, 0.2), "batch": loss}, {**dict.fromkeys(METHODS, 0.05), "batch": error}
    )
    assert verdict("bn-generalizes", outcomes).verdict == expected
    missing = [o for o in outcomes if o.cell.method != "standard"]
    assert verdict("bn-generalizes", missing).verdict == "no data"


@pytest.mark.parametrize(
    ("loss", "error", "expected"),
    [
        (0.205, 0.052, "holds"),
        (0.2, 0.08, "does not hold"),
        (0.2, 0.02, "does not hold"),
        (0.3, 0.05, "does not hold"),
        (0.2, 0.05995, "within noise"),
        (0.2, 0.06005, "within noise"),
    ],
)
def test_on_par_needs_a_small_difference_with_noise_to_spare(loss, error, expected):
    outcomes = validation("noisy-mnist", {"batch": 0.2, "analytic": loss}, {"batch": 0.05, "analytic": error})
    assert verdict("on-par", outcomes).verdict == expected


def test_equal_numbers_of_single_seeds_prove_nothing():
    outcomes = [ended(Cell("noisy-mnist", method, "bn", 0)) for method in ("batch", "analytic")]
    assert verdict("on-par", outcomes).verdict == "within noise"


def cifar(train, errors):
    return [
        ended(
            Cell("noisy-cifar10", method, start, seed),
            train=train[method] + 0.001 * seed,
            error=errors[method] + 1e-3 * seed,
        )
        for start in STARTS
        for method in METHODS
        for seed in (0, 1)
    ]


ALIKE, BATCH_FIRST = dict.fromkeys(METHODS, 0.5), {**dict.fromkeys(METHODS, 0.2), "batch": 0.1}


@pytest.mark.parametrize(
    ("train", "errors", "expected"),
    [
        (ALIKE, BATCH_FIRST, "holds"),
        ({**ALIKE, "standard": 0.9}, BATCH_FIRST, "does not hold"),
        (ALIKE, {**BATCH_FIRST, "weight": 0.05}, "does not hold"),
        (ALIKE, dict.fromkeys(METHODS, 0.2), "within noise"),
    ],
)
def test_cifar_differences_are_small_and_batch_norm_leads(train, errors, expected):
    outcomes = cifar(train, errors)
    assert verdict("cifar", outcomes).verdict == expected
    assert verdict("cifar", [o for o in outcomes if o.cell.method != "weight"]).verdict == "no data"


def test_a_single_seed_in_common_decides_nothing():
    outcomes = [o for o in cifar(ALIKE, BATCH_FIRST) if o.cell.seed == 0 or o.cell.method in ("batch", "analytic")]
    assert verdict("cifar", outcomes).verdict == "within noise"


@pytest.mark.parametrize(
    ("double", "expected"),
    [((0.2, 0.21), "holds"), ((0.9, 0.91), "does not hold"), ((0.5, 0.51), "within noise")],
)
def test_equal_rates_mislead(double, expected):
    plain = seeds("naive", "standard", "none", (0.5, 0.51), bound=1e-3)
    doubled = seeds("naive", "standard", "none", double, bound=1e-3, variant="double")
    found = verdict("equal-rates", [*plain, *doubled])
    assert (found.verdict, found.setting) == (expected, "lr = 0.001")
    assert verdict("equal-rates", plain).verdict == "no data"


def test_the_papers_bound_decides_and_others_are_given_beside_it():
    paper = from_all_starts("analytic", (2.3, 2.3))
    wide = from_all_starts("analytic", (0.1, 0.1), bound=1e-1)
    found = verdict("trains", [*wide, *paper])
    assert (found.verdict, found.setting) == ("does not hold", "lr ≤ 0.01")
    assert [(other.verdict, other.setting) for other in found.others] == [("holds", "lr ≤ 0.1")]
    assert verdict("trains", wide).verdict == "holds"


def test_small_batches_do_not_enter_the_claims():
    outcomes = [replace(o, cell=replace(o.cell, batch_size=4)) for o in from_all_starts("analytic", (0.1, 0.1))]
    assert verdict("trains", outcomes).verdict == "no data"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"models": {"net": {"batch": 2.0, "analytic": 1.5, "standard": 1.0}}}, "holds"),
        ({"models": {"net": {"batch": 1.0, "analytic": 1.5}}}, "does not hold"),
        ({"models": {"net": {"batch": [1.0, 1.2, 1.1], "analytic": [1.1, 1.1, 1.2]}}}, "holds"),
        ({"models": {"net": {"batch": [1.0, 1.2, 1.1], "analytic": [1.1, 1.3, 1.2]}}}, "does not hold"),
        ({"models": {"net": {"batch": [1.0, 1.01], "analytic": [1.2, 1.21]}}}, "does not hold"),
        ({"models": {"a": {"batch": 2.0, "analytic": 1.0}, "b": {"batch": 1.0, "analytic": 2.0}}}, "does not hold"),
        ({"models": {"net": {"batch": 2.0}}}, "no data"),
        ({"models": {}}, "no data"),
        ({"other": 1}, "no data"),
        ([], "no data"),
    ],
)
def test_overhead_is_read_from_the_benchmark(content, expected, tmp_path):
    file = tmp_path / "normalization.json"
    file.write_text(json.dumps(content))
    assert verdict("overhead", [], [tmp_path / "missing.json", file]).verdict == expected


# --- what is written ---


def test_claims_are_written_as_json_and_markdown(tmp_path):
    judged = judge([Run("mnist", from_all_starts("analytic", (0.1, 0.2)))])
    write(judged, tmp_path)
    stored = json.loads((tmp_path / "claims.json").read_text("utf-8"))
    assert [claim["name"] for claim in stored["claims"]] == NAMES
    assert stored["claims"][0]["verdict"] == "holds"
    rows = [line for line in (tmp_path / "claims.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(NAMES)
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)


def test_markdown_links_only_figures_that_exist():
    judged = judge([])
    text = markdown(judged, lambda figure: "there.png" if figure == "mnist/training" else "")
    assert text.count("(there.png)") == sum(found.figure == "mnist/training" for found in judged)
    assert "[naive" not in text
