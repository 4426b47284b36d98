"""The rules on batch norm: each holds, fails and stays undecided on made-up records."""

from __future__ import annotations

import pytest

from varprop.lab.protocol.experiments import MOMENTUM
from varprop.lab.protocol.records import (
    METHODS,
    STARTS,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    VALID_ACCURACY,
    VALID_BATCH_ACCURACY,
    Cell,
)

from .made_up import ended, verdict

EPOCHS = 21


def curve(share=1.0, wobble=0.0):
    """A loss that falls by a tenth an epoch, times a share, up and down by another share."""
    return [share * 0.9**epoch * (1 + wobble * (-1) ** epoch) for epoch in range(EPOCHS)]


def batch_norm(start, seed, gap=0.0, wobble=0.0, own_wobble=0.001, experiment="mnist", variant="", bound=1e-2):
    """Batch norm whose evaluation is away from training, its lag taken out, by `gap`, and wobbles."""
    now = (1 + gap) * 0.9 ** (1 / 2.302585)
    curves = {TRAIN_LOSS: curve(wobble=own_wobble), TRAIN_EVAL_LOSS: curve(now, wobble)}
    return ended(Cell(experiment, "batch", start, seed, lr_max=bound, variant=variant), **curves)


@pytest.mark.parametrize("name", ["bn-evaluation-early", "bn-evaluation-late"])
@pytest.mark.parametrize(
    ("gaps", "wobbles", "expected"),
    [
        ((0.3, 0.2), (0.1, 0.1), "holds"),
        ((-0.3, 0.2), (0.1, 0.1), "holds"),  # does not match, whichever way
        ((0.02, -0.02), (0.1, 0.1), "does not hold"),
        ((0.3, 0.2), (0.0, 0.0), "does not hold"),  # away, and smooth
        ((0.3, 0.02), (0.1, 0.1), "within noise"),
        ((0.3, 0.2), (0.1, 0.0), "within noise"),
    ],
)
def test_evaluation_is_away_and_rough(name, gaps, wobbles, expected):
    outcomes = [batch_norm("none", s, *both) for s, both in enumerate(zip(gaps, wobbles, strict=True))]
    assert verdict(name, outcomes).verdict == expected
    elsewhere = [batch_norm("bn", s, *both) for s, both in enumerate(zip(gaps, wobbles, strict=True))]
    assert verdict(name, elsewhere).verdict == "no data"


def test_the_lag_of_the_running_loss_alone_is_no_gap():
    outcomes = [batch_norm("none", seed) for seed in (0, 1)]
    line = verdict("bn-evaluation-early", outcomes).measured[0]
    share = float(line.split("away by ")[1].split()[0])
    assert abs(share) < 0.5  # per cent; without the correction it would be 4.5


@pytest.mark.parametrize(
    ("gaps", "expected"), [((-0.2, -0.1), "holds"), ((0.2, 0.1), "does not hold"), ((-0.2, 0.1), "within noise")]
)
def test_evaluation_is_better_from_its_own_start(gaps, expected):
    assert verdict("bn-evaluation-better", [batch_norm("bn", s, g) for s, g in enumerate(gaps)]).verdict == expected
    assert verdict("bn-evaluation-better", [batch_norm("none", 0)]).verdict == "no data"


@pytest.mark.parametrize(
    ("gaps", "expected"), [((2.0, 0.5), "holds"), ((0.0, -0.5), "does not hold"), ((2.0, 0.0), "within noise")]
)
def test_evaluation_fails_in_a_recurrent_network(gaps, expected):
    outcomes = [batch_norm(start, s, g, experiment="recurrent") for start in STARTS for s, g in enumerate(gaps)]
    assert verdict("bn-recurrent", outcomes).verdict == expected
    assert verdict("bn-recurrent", outcomes[:2]).verdict == "no data"


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
    ("gaps", "wobbles", "expected"),
    [
        ((0.1, 0.11), (0.01, 0.011), "holds"),
        ((0.9, 0.91), (0.3, 0.31), "does not hold"),
        ((0.1, 0.9), (0.01, 0.3), "within noise"),
    ],
)
def test_a_smaller_momentum_helps_evaluation(gaps, wobbles, expected):
    usual = [batch_norm("none", seed, 0.5, 0.1, experiment="momentum", bound=1e-3) for seed in (0, 1)]
    small = [
        batch_norm("none", seed, gap, wobble, experiment="momentum", variant=MOMENTUM, bound=1e-3)
        for seed, (gap, wobble) in enumerate(zip(gaps, wobbles, strict=True))
    ]
    assert verdict("bn-momentum", [*usual, *small]).verdict == expected
    assert verdict("bn-momentum", usual).verdict == "no data"


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
