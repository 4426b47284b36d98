"""The rules on training: each holds, fails and stays undecided on made-up records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from varprop_lab.protocol import METHODS, STARTS, TRAIN_EVAL_LOSS, TRAIN_STILL_LOSS, VALID_LOSS, Cell

from .made_up import ended, from_all_starts, seeds, verdict


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
    ("weight", "expected"),
    [((0.2, 0.21), "holds"), ((2.2, 2.2), "does not hold"), ((0.2, 2.2), "within noise")],
)
def test_all_methods_train_from_the_start_of_batch_norm(weight, expected):
    outcomes = [o for method in METHODS for o in seeds("mnist", method, "bn", (0.1, 0.12))]
    outcomes = [o for o in outcomes if o.cell.method != "weight"] + seeds("mnist", "weight", "bn", weight)
    assert verdict("all-from-bn", outcomes).verdict == expected
    assert verdict("all-from-bn", outcomes[:2]).verdict == "no data"


@pytest.mark.parametrize(
    ("standard", "batch", "expected"),
    [
        ((2.0, 2.1), (0.1, 0.12), "holds"),
        ((0.12, 0.12), (0.1, 0.1), "does not hold"),
        ((2.0, 0.12), (0.1, 0.1), "within noise"),
        ((2.0, 2.1), (2.2, 2.3), "does not hold"),
    ],
)
def test_random_weights_are_hard_to_train(standard, batch, expected):
    best = seeds("mnist", "analytic", "bn", (0.1, 0.1))
    outcomes = [*best, *seeds("mnist", "standard", "none", standard), *seeds("mnist", "batch", "none", batch)]
    assert verdict("hard-from-none", outcomes).verdict == expected
    assert verdict("hard-from-none", best).verdict == "no data"


def test_the_limit_lies_on_the_way_from_guessing_to_the_best():
    best = seeds("mnist", "analytic", "none", (0.3026, 0.3026))  # limit 0.5026
    for loss, expected in ((0.50, "holds"), (0.51, "does not hold")):
        others = [o for method in ("standard", "weight") for o in seeds("mnist", method, "ap2", (loss, loss))]
        assert verdict("others-from-ap2", [*best, *others]).verdict == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [((0.001, 0.02), "holds"), ((0.1, 0.2), "does not hold"), ((0.001, 0.2), "within noise")],
)
def test_the_training_loss_comes_close_to_zero(values, expected):
    outcomes = from_all_starts("analytic", values)
    assert verdict("near-zero", outcomes).verdict == expected
    assert verdict("near-zero", outcomes[:2]).verdict == "no data"
    assert verdict("near-zero-still", from_all_starts("analytic", values, "still-mnist")).verdict == expected


def validating(experiment, method, start, curves, **more):
    """One outcome for every curve of the validation loss, all with a training loss of 0.1."""
    return [
        ended(Cell(experiment, method, start, seed), **{VALID_LOSS: list(c)}, **more) for seed, c in enumerate(curves)
    ]


RISING, FLAT, BELOW = (0.3, 0.2, 0.3), (0.3, 0.2, 0.21), (0.09, 0.05, 0.06)


@pytest.mark.parametrize(
    ("curves", "expected"),
    [((RISING, RISING), "holds"), ((FLAT, BELOW), "does not hold"), ((RISING, FLAT), "within noise")],
)
@pytest.mark.parametrize(
    ("name", "experiment", "training"),
    [("overfits", "overfitting", TRAIN_STILL_LOSS), ("overfits-still", "still-mnist", TRAIN_EVAL_LOSS)],
)
def test_overfitting_is_a_validation_loss_that_rises_above_the_training_loss(
    name, experiment, training, curves, expected
):
    more = {training: [0.1]}
    outcomes = [o for start in STARTS for o in validating(experiment, "analytic", start, curves, **more)]
    assert verdict(name, outcomes).verdict == expected
    assert verdict(name, outcomes[:2]).verdict == "no data"
    shifted = [o for start in STARTS for o in validating(experiment, "analytic", start, curves)]
    assert verdict(name, shifted).verdict == "no data"  # the running loss is that of other images


@pytest.mark.parametrize(
    ("curves", "expected"),
    [((RISING, RISING), "does not hold"), ((FLAT, BELOW), "holds"), ((RISING, FLAT), "within noise")],
)
def test_with_noise_overfitting_does_not_occur(curves, expected):
    others = [o for m in METHODS if m != "standard" for o in validating("noisy-mnist", m, "bn", (FLAT, FLAT))]
    outcomes = [*others, *validating("noisy-mnist", "standard", "bn", curves)]
    assert verdict("noise-prevents", outcomes).verdict == expected
    assert verdict("noise-prevents", others).verdict == "no data"


def spread(method, ratios):
    """Losses of 0.1 from two starts and a multiple of it from the third."""
    values = {"none": tuple(0.1 * ratio for ratio in ratios), "bn": (0.1,) * len(ratios), "ap2": (0.1,) * len(ratios)}
    return [o for start in STARTS for o in seeds("mnist", method, start, values[start])]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [((2.0, 2.1), "holds"), ((1.01, 1.0299), "does not hold"), ((1.0, 1.4), "within noise")],
)
def test_robustness_is_a_small_spread_over_the_starts(batch, expected):
    others = [o for method in ("standard", "weight") for o in spread(method, (3.0, 3.1))]
    outcomes = [*others, *spread("analytic", (1.1, 1.12)), *spread("batch", batch)]
    assert verdict("robust", outcomes).verdict == expected  # at a third of the level: batch norm is one of three
    assert verdict("robust", others).verdict == "no data"


@pytest.mark.parametrize(
    ("batch", "expected"), [((0.2, 0.21), "holds"), ((0.05, 0.071), "does not hold"), ((0.1, 0.12), "within noise")]
)
def test_the_loss_in_evaluation_mode_is_a_reading_of_its_own(batch, expected):
    values = {**dict.fromkeys(METHODS, (0.2, 0.21)), "analytic": (0.1, 0.12), "batch": batch}
    outcomes = [
        ended(Cell("mnist", method, start, seed), train=0.1, **{TRAIN_EVAL_LOSS: [value]})
        for start in STARTS
        for method in METHODS
        for seed, value in enumerate(values[method])
    ]
    assert verdict("lower-loss-evaluation", outcomes).verdict == expected
    unrecorded = [replace(o, curves={}) if o.cell.method == "analytic" else o for o in outcomes]
    assert verdict("lower-loss-evaluation", unrecorded).verdict == "no data"
