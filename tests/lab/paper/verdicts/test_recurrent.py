"""The rules on recurrent networks: each holds, fails and stays undecided on made-up records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from varprop_lab.protocol import STARTS, TRAIN_EVAL_LOSS, TRAIN_LOSS

from .made_up import batch_norm, from_all_starts, seeds, verdict


@pytest.mark.parametrize(
    ("gaps", "expected"), [((2.0, 0.5), "holds"), ((0.0, -0.5), "does not hold"), ((2.0, 0.0), "within noise")]
)
def test_evaluation_fails_in_a_recurrent_network(gaps, expected):
    outcomes = [batch_norm(start, s, g, experiment="recurrent") for start in STARTS for s, g in enumerate(gaps)]
    assert verdict("bn-recurrent", outcomes).verdict == expected
    assert verdict("bn-recurrent", outcomes[:2]).verdict == "no data"


def evaluated(outcomes, gap=0.0):
    """The same with curves that have ended long ago, the loss in evaluation mode away from the other by a share."""
    return [
        replace(o, curves={TRAIN_LOSS: [end] * 21, TRAIN_EVAL_LOSS: [(1 + gap) * end] * 21})
        for o in outcomes
        for end in o.curves[TRAIN_LOSS][-1:]
    ]


@pytest.mark.parametrize(
    ("last", "gap", "expected"),
    [
        ((0.1, 0.1), 0.0, "holds"),
        ((2.0, 2.0), 0.0, "does not hold"),
        ((0.1, 2.0), 0.0, "within noise"),
        ((0.1, 0.1), 0.5, "does not hold"),  # trains, and is another network in evaluation
    ],
)
def test_analytic_works_in_a_recurrent_network(last, gap, expected):
    outcomes = evaluated(from_all_starts("analytic", (0.1, 0.1), experiment="recurrent")[:4])
    outcomes += evaluated(seeds("recurrent", "analytic", "ap2", last), gap)
    assert verdict("recurrent", outcomes).verdict == expected
    assert verdict("recurrent", outcomes[:4]).verdict == "no data"
