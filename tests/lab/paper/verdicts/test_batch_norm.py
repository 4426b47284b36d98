"""The rules on batch norm: each holds, fails and stays undecided on made-up records."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from varprop_lab.protocol import (
    METHODS,
    STARTS,
    TRAIN_EVAL_LOSS,
    TRAIN_STILL_LOSS,
    VALID_ACCURACY,
    VALID_BATCH_ACCURACY,
    Cell,
)

from .made_up import batch_norm, ended, verdict

GRIDS = ("mnist", "noisy-mnist")


@pytest.mark.parametrize(
    ("wobbles", "expected"),
    [((0.1, 0.101), "holds"), ((0.01, 0.011), "does not hold"), ((0.0, 0.1), "within noise")],
)
def test_batch_norm_oscillates_from_other_starts(wobbles, expected):
    home = [batch_norm("bn", seed, wobble=0.05, own_wobble=0.05) for seed in (0, 1)]
    away = [batch_norm("ap2", seed, wobble=w, own_wobble=w) for seed, w in enumerate(wobbles)]
    from_none = [batch_norm("none", seed, wobble=w, own_wobble=w) for seed, w in enumerate(wobbles)]
    assert verdict("bn-oscillates", [*home, *away]).verdict == expected
    assert verdict("bn-unstable", [*home, *away, *from_none]).verdict == expected
    assert verdict("bn-unstable", [*home, *away]).verdict == "no data"
    assert verdict("bn-oscillates", home).verdict == "no data"


def test_one_case_alone_does_not_decide_whether_batch_norm_is_unstable():
    home = [batch_norm("bn", seed, wobble=0.05, own_wobble=0.05, experiment=e) for e in GRIDS for seed in (0, 1)]
    for rough, smooth, expected in ((2, 2, "holds"), (1, 3, "does not hold"), (1, 2, "within noise")):
        wobbles = [(0.1, 0.101)] * rough + [(0.01, 0.011)] * smooth + [(0.01, 0.1)] * (4 - rough - smooth)
        away = [
            batch_norm(start, seed, wobble=w, own_wobble=w, experiment=experiment)
            for (experiment, start), pair in zip(itertools.product(GRIDS, ("none", "ap2")), wobbles, strict=True)
            for seed, w in enumerate(pair)
        ]
        assert verdict("bn-unstable", [*home, *away]).verdict == expected


@pytest.mark.parametrize(
    ("wobbles", "expected"),
    [((0.1, 0.101), "holds"), ((0.01, 0.011), "does not hold"), ((0.0, 0.1), "within noise")],
)
def test_batch_norm_is_more_stochastic_than_others(wobbles, expected):
    def outcome(method, seed, wobble):
        made = batch_norm("bn", seed, wobble=wobble, own_wobble=wobble)
        return replace(made, cell=replace(made.cell, method=method))

    own = [outcome("batch", seed, wobble) for seed, wobble in enumerate(wobbles)]
    others = [outcome(method, seed, 0.05) for method in METHODS if method != "batch" for seed in (0, 1)]
    assert verdict("bn-stochastic", [*own, *others]).verdict == expected
    assert verdict("bn-stochastic", [*own, *others[:4]]).verdict == "no data"


@pytest.mark.parametrize(
    ("valid", "expected"),
    [((0.05, 0.06), "holds"), ((0.4, 0.41), "does not hold"), ((0.05, 0.4), "within noise")],
)
@pytest.mark.parametrize(
    ("name", "experiment", "training"),
    [("bn-overfits-less", "overfitting", TRAIN_STILL_LOSS), ("bn-overfits-less-still", "still-mnist", TRAIN_EVAL_LOSS)],
)
def test_batch_norm_overfits_less(name, experiment, training, valid, expected):
    own = [ended(Cell(experiment, "batch", "bn", s), valid=v, **{training: [0.1]}) for s, v in enumerate(valid)]
    others = [
        ended(Cell(experiment, method, "bn", seed), valid=0.2, **{training: [0.1]})
        for method in METHODS
        if method != "batch"
        for seed in (0, 1)
    ]
    assert verdict(name, [*own, *others]).verdict == expected
    assert verdict(name, [*own, *others[:4]]).verdict == "no data"


@pytest.mark.parametrize(
    ("rates", "expected"),
    [((1e-3, 1.1e-3), "holds"), ((9e-3, 1e-2), "does not hold"), ((1e-3, 1e-2), "within noise")],
)
def test_batch_norm_wants_a_smaller_rate(rates, expected):
    home = [ended(Cell("mnist", "batch", "bn", seed), lr=1e-2) for seed in (0, 1)]
    away = [ended(Cell("mnist", "batch", "ap2", seed), lr=rate) for seed, rate in enumerate(rates)]
    assert verdict("bn-smaller-rate", [*home, *away]).verdict == expected
    assert verdict("bn-smaller-rate", home).verdict == "no data"


@pytest.mark.parametrize(
    ("batches", "expected"),
    [((0.6, 0.61), "holds"), ((0.9, 0.91), "does not hold"), ((0.6, 0.9), "within noise")],
)
def test_the_boost_of_evaluation_mode(batches, expected):
    outcomes = [
        ended(Cell("noisy-cifar10", "batch", start, s), **{VALID_ACCURACY: [0.7], VALID_BATCH_ACCURACY: [accuracy]})
        for start in STARTS
        for s, accuracy in enumerate(batches)
    ]
    assert verdict("bn-boost", outcomes).verdict == expected
    assert verdict("bn-boost", [ended(Cell("noisy-cifar10", "batch", s, 0)) for s in STARTS]).verdict == "no data"


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
@pytest.mark.parametrize(("name", "experiment"), [("bn-generalizes", "mnist"), ("bn-generalizes-still", "still-mnist")])
def test_batch_norm_generalizes(name, experiment, loss, error, expected):
    outcomes = validation(
        experiment, {**dict.fromkeys(METHODS, 0.2), "batch": loss}, {**dict.fromkeys(METHODS, 0.05), "batch": error}
    )
    assert verdict(name, outcomes).verdict == expected
    missing = [o for o in outcomes if o.cell.method != "standard"]
    assert verdict(name, missing).verdict == "no data"


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
