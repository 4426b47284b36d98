"""Verdicts on made-up records: each rule can hold, fail and stay undecided; and what the page says of the real ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from benchmarks.questions import of_statistics, of_training
from benchmarks.questions.runs import Question, Records
from benchmarks.questions.study import PAGE, QUESTIONS, page, recorded, study

from varprop_lab.paper.verdicts.evidence import MISSING
from varprop_lab.seed_statistics import FAILS, HOLDS, NOISE

ROOT = Path(__file__).parents[3]
CLEAR, CLOSE = (0.0, 0.01, 0.02), (0.0, 0.4, -0.3)  # how seeds differ: less, and more, than arms


def run(arm, seed, loss=1.0, rate=0.01, ratios=((1.0,), (1.0,)), **curves):
    named = {name: [9.0, loss] for name in ("valid_loss", "valid_error", "averaged_loss", "averaged_error")}
    made = {"arm": arm, "rate": rate, "seed": seed, "train_eval_loss": loss, "ratios": [list(r) for r in ratios]}
    return {**made, **named, "batch_loss": [loss], "batch_error": [loss], **curves}


def seeds(arm, loss, apart=(0.0, 0.0, 0.0), **more):
    return [run(arm, seed, loss + own, **more) for seed, own in enumerate(apart)]


def verdict(question: Question, claim: str, runs) -> str:
    rule = next(rule for text, rule in question.claims if claim in text)
    return rule(Records(runs)).verdict


def test_the_rate_of_an_arm_is_that_of_the_lowest_training_loss():
    runs = [*seeds("a", 0.5, rate=0.03), *seeds("a", 0.4, rate=0.01), *seeds("a", 0.3, rate=0.1)]
    runs[-1]["train_eval_loss"] = None  # one seed diverged there
    assert {one["rate"] for one in Records(runs).at("a")} == {0.01}
    assert Records(runs).last("a", "train_eval_loss", 0.1).values[-1] == float("inf")


@pytest.mark.parametrize(
    ("own", "other", "apart", "expected"),
    [(0.5, 1.0, CLEAR, HOLDS), (1.0, 0.5, CLEAR, FAILS), (0.9, 1.0, CLOSE, NOISE)],
)
@pytest.mark.parametrize(
    ("question", "claim", "first", "second"),
    [
        (of_training.AVERAGING, "evaluation mode validates better than AP2", of_training.BN, of_training.AP2),
        (of_training.AVERAGING, "better with batch norm's noise", of_training.NOISY, of_training.AP2),
        (
            of_training.DROPOUT,
            "0.1 in the statistics has a lower validation",
            of_training.inside(0.1),
            of_training.outside(0.1),
        ),
        (of_training.DROPOUT, "lower training loss than no dropout", of_training.inside(0.1), of_training.NONE),
        (of_statistics.CORRELATIONS, "lower training loss", of_statistics.FULL, of_statistics.DIAGONAL),
    ],
)
def test_lower_than_another_arm(question, claim, first, second, own, other, apart, expected):
    assert verdict(question, claim, [*seeds(first, own, apart), *seeds(second, other)]) == expected


@pytest.mark.parametrize(("mean", "expected"), [(0.5, HOLDS), (1.5, FAILS), (1.0, NOISE)])
def test_averaged_weights_are_compared_with_the_last_ones(mean, expected):
    runs = seeds(of_training.AP2, 1.0)
    for one, own in zip(runs, CLEAR, strict=True):
        one |= {"averaged_loss": [mean - own + 0.01], "averaged_error": [mean + own - 0.01]}
    assert verdict(of_training.AVERAGING, "AP2 validates better with averaged weights", runs) == expected


def test_loss_and_error_must_agree():
    runs = seeds(of_training.AP2, 1.0)
    for one in runs:
        one |= {"averaged_loss": [0.5], "averaged_error": [1.5]}
    assert verdict(of_training.AVERAGING, "AP2 validates better with averaged weights", runs) == FAILS


@pytest.mark.parametrize(
    ("before", "claim", "expected"),
    [
        ([(0.95, 1.05)] * 3, "before training", HOLDS),
        ([(0.8, 1.0)] * 3, "before training", FAILS),
        ([(0.95, 1.0), (1.0, 1.2), (1.0, 1.0)], "before training", NOISE),
        ([(1.0, 0.0)] * 3, "before training", FAILS),  # nothing varies any more
        ([(0.5, 1.0)] * 3, "after one epoch", HOLDS),
        ([(1.4, 0.7)] * 3, "after one epoch", FAILS),
        ([(1.4, 1.0), (1.6, 1.0), (1.0, 1.0)], "after one epoch", NOISE),
    ],
)
def test_whether_the_prediction_is_true(before, claim, expected):
    arm = of_statistics.TRUTH_ARMS[2].name
    runs = [run(arm, seed, ratios=(layers, layers, (1.0,))) for seed, layers in enumerate(before)]
    assert verdict(of_statistics.TRUTH, f"{arm}: {claim}", runs) == expected


@pytest.mark.parametrize(
    ("ends", "expected"), [((3.0, 3.1, 3.2), HOLDS), ((1.2, 1.3, 1.1), FAILS), ((2.5, 1.5, 2.2), NOISE)]
)
def test_whether_it_gets_worse(ends, expected):
    arm = of_statistics.TRUTH_ARMS[2].name
    runs = [run(arm, seed, ratios=((1.0,), (2.0,), (end,))) for seed, end in enumerate(ends)]
    assert verdict(of_statistics.TRUTH, f"{arm}: the worst layer", runs) == expected
    runs += [run(of_statistics.FULL, seed, ratios=((1.0,), (1.0,))) for seed in range(3)]
    runs += [run(of_statistics.DIAGONAL, seed, ratios=((1.0,), (end,))) for seed, end in enumerate((2.0, 2.1, 2.2))]
    assert verdict(of_statistics.CORRELATIONS, "closer than variances alone", runs) == HOLDS
    assert verdict(of_statistics.CORRELATIONS, "within 1.1 times at the end", runs) == HOLDS


def lengths(loss_of):
    return [
        run(of_training.norm_arm(factor), seed, loss_of(factor, rate, seed), rate)
        for factor in of_training.FACTORS
        for rate in of_training.NORM_RATES
        for seed in range(3)
    ]


@pytest.mark.parametrize(
    ("loss_of", "expected"),
    [
        (lambda factor, rate, seed: 1 + abs(rate / factor - 0.01), (FAILS, HOLDS, HOLDS)),
        (lambda factor, rate, seed: 1 + 50 * abs(rate / factor - 0.01), (HOLDS, HOLDS, HOLDS)),
        (lambda factor, rate, seed: 1 + factor, (HOLDS, FAILS, FAILS)),
        (lambda factor, rate, seed: 1 + 0.2 * (seed == 0 and factor == 9), (NOISE, NOISE, NOISE)),
    ],
)
def test_what_the_length_of_weights_does(loss_of, expected):
    found = tuple(rule(Records(lengths(loss_of))).verdict for _, rule in of_training.NORM.claims)
    assert found == expected


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda question: question.name)
def test_without_runs_there_is_no_verdict(question):
    rows = question.verdicts(Records([])).splitlines()[2:]
    assert len(rows) == len(question.claims) and all(f"| {MISSING} |" in row for row in rows)
    assert all("python -m benchmarks.questions |" in row for row in rows)


RECORDED = [QUESTIONS[name] for name in recorded(ROOT / "docs/results")]


@pytest.mark.parametrize("question", RECORDED, ids=lambda question: question.name)
def test_the_page_says_what_the_records_say(question):
    records = recorded(ROOT / "docs/results")[question.name]
    assert len(records["runs"]) == question.seeds * sum(len(arm.rates) for arm in question.arms)
    page = (ROOT / "docs/questions.md").read_text()
    assert question.title in page and f"results/question-{question.name}.png" in page


def test_the_page_of_verdicts_is_that_of_the_records():
    assert (ROOT / "docs/results" / PAGE).read_text("utf-8") == page(recorded(ROOT / "docs/results"))


def test_questions_are_answered_from_the_records_that_are_there(tmp_path):
    shutil.copy(ROOT / "docs/results/questions.json", tmp_path)
    said = []
    study(tmp_path, only=["correlations"], say=said.append)
    assert said[0].startswith("\nWould statistics with covariances do better?\n| claim | verdict | measured |")
    assert (tmp_path / "question-correlations.png").exists() and len(said) == 1
