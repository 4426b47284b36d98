"""Verdicts on made-up records of changed statistics, distributions and decay: each may hold, fail or be undecided."""

from __future__ import annotations

import pytest
from benchmarks.questions import of_statistics, of_training

from tests.benchmarks.questions.test_rules import CLEAR, CLOSE, run, verdict
from varprop_lab.seed_statistics import FAILS, HOLDS, NOISE

WIDE = of_statistics.overestimated_arm(of_statistics.FACTOR, True)


def seeds(arm, values, name, rates=(0.01,), **more):
    """A run for every rate and value; curves of two epochs."""
    return [
        run(arm, seed, rate=rate, **{**more, name: value if name.endswith("eval_loss") else [value, value]})
        for rate in rates
        for seed, value in enumerate(values)
    ]


def at(mean, apart=CLEAR):
    return [mean + own for own in apart]


@pytest.mark.parametrize(("mean", "apart", "expected"), [(0.5, CLEAR, HOLDS), (2.0, CLEAR, FAILS), (1.0, CLOSE, NOISE)])
def test_whether_a_wrong_variance_looks_faster_at_one_rate(mean, apart, expected):
    runs = seeds(WIDE, at(mean, apart), "train_loss") + seeds(of_statistics.RIGHT, at(1.0), "train_loss")
    assert verdict(of_statistics.OVERESTIMATED, f"{WIDE}: at one rate", runs) == expected


@pytest.mark.parametrize(
    ("mean", "apart", "expected"), [(1.02, CLEAR, HOLDS), (1.5, CLEAR, FAILS), (1.1, CLOSE, NOISE)]
)
def test_whether_a_wrong_variance_matters_at_the_best_rate(mean, apart, expected):
    worse = seeds(WIDE, at(3.0), "train_loss", rates=(0.02,), train_eval_loss=5.0)
    runs = seeds(WIDE, at(mean, apart), "train_loss", train_eval_loss=1.0) + worse
    runs += seeds(of_statistics.RIGHT, at(1.0), "train_loss")
    assert verdict(of_statistics.OVERESTIMATED, f"{WIDE}: each at the best", runs) == expected


@pytest.mark.parametrize(("own", "apart", "expected"), [(0.5, CLEAR, HOLDS), (2.0, CLEAR, FAILS), (1.0, CLOSE, NOISE)])
def test_whether_statistics_that_follow_train_better(own, apart, expected):
    runs = seeds(of_statistics.FOLLOWED, at(own, apart), "train_eval_loss") + seeds(
        of_statistics.HELD, at(1.0), "train_eval_loss"
    )
    claim = f"{of_statistics.FOLLOWED} has a lower training loss than {of_statistics.HELD}"
    assert verdict(of_statistics.FROZEN, claim, runs) == expected


@pytest.mark.parametrize(("worst", "expected"), [([2.0] * 3, HOLDS), ([1.2] * 3, FAILS), ([1.2, 2.0, 2.0], NOISE)])
def test_whether_tangents_are_off(worst, expected):
    arm = of_statistics.linear_arm(of_statistics.LARGE, True)
    runs = [run(arm, seed, ratios=((1.0, ratio), (1.0, 1.0))) for seed, ratio in enumerate(worst)]
    assert verdict(of_statistics.LINEAR, f"{arm}: before training some layer", runs) == expected


@pytest.mark.parametrize(("worst", "expected"), [([0.6] * 3, HOLDS), ([0.4] * 3, FAILS), ([0.4, 0.6, 0.6], NOISE)])
def test_whether_normality_is_rejected(worst, expected):
    arm = of_statistics.NORMALITY_NAMES["ap2"]
    runs = [run(arm, seed, rejected=[[0.05, 0.05], [0.05, share]]) for seed, share in enumerate(worst)]
    assert verdict(of_statistics.NORMALITY, f"{arm}: at the end a test", runs) == expected
    assert verdict(of_statistics.NORMALITY, f"{arm}: before training a test", runs) == HOLDS


@pytest.mark.parametrize(
    ("plain", "apart", "expected"),
    [(0.1, (0.0, 0.001, 0.002), HOLDS), (0.2, (0.0, 0.001, 0.002), FAILS), (0.1, CLOSE, NOISE)],
)
def test_whether_decay_of_scale_and_shift_achieves_something(plain, apart, expected):
    decayed, without = of_training.scale_decay_arm("AP2", True), of_training.scale_decay_arm("AP2", False)
    runs = seeds(decayed, at(0.1, (0, 0, 0)), "valid_error") + seeds(without, at(plain, apart), "valid_error")
    assert verdict(of_training.SCALE_DECAY, "AP2: without", runs) == expected


@pytest.mark.parametrize(("own", "apart", "expected"), [(0.5, CLEAR, HOLDS), (2.0, CLEAR, FAILS), (1.0, CLOSE, NOISE)])
@pytest.mark.parametrize(("name", "claim"), [("shifts", "shifts shorter"), ("effective", "equal function shorter")])
def test_whether_decay_shortens(name, claim, own, apart, expected):
    decayed, without = of_training.scale_decay_arm("AP2", True), of_training.scale_decay_arm("AP2", False)
    runs = seeds(decayed, at(own, apart), name) + seeds(without, at(1.0), name)
    assert verdict(of_training.SCALE_DECAY, claim, runs) == expected
