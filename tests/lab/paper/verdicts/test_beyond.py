"""The rules on hypotheses and footnotes: each holds, fails and stays undecided on made-up records."""

from __future__ import annotations

import pytest

from varprop_lab.protocol import METHODS, TRAIN_LOSS, Cell

from .made_up import ended, seeds, verdict

LOWER, HIGHER, MIXED = (0.1, 0.11), (0.3, 0.31), (0.1, 0.31)
DECAYING = ("weight", "batch", "analytic")


@pytest.mark.parametrize(("values", "expected"), [(LOWER, "holds"), (HIGHER, "does not hold"), (MIXED, "within noise")])
def test_orthogonal_weights_help(values, expected):
    random = [o for method in METHODS for o in seeds("orthogonal", method, "ap2", (0.2, 0.21))]
    orthogonal = [o for method in METHODS for o in seeds("orthogonal", method, "orthogonal", values)]
    assert verdict("orthogonal", [*random, *orthogonal]).verdict == expected
    assert verdict("orthogonal", random).verdict == "no data"


def decaying(variant, values, name="train"):
    return [o for m in DECAYING for o in seeds("decay", m, "ap2", values, variant=variant, name=name)]


@pytest.mark.parametrize(
    ("errors", "expected"),
    [((0.05, 0.051), "holds"), ((0.02, 0.021), "does not hold"), ((0.01, 0.05), "within noise")],
)
def test_decay_achieves_nothing(errors, expected):
    plain = decaying("", (0.05, 0.05), "error")
    assert verdict("decay-nothing", [*plain, *decaying("decay", errors, "error")]).verdict == expected
    assert verdict("decay-nothing", plain).verdict == "no data"


def wobbling(variant, shares):
    """Losses that go up and down by these shares, one a seed."""
    return [
        ended(Cell("decay", m, "ap2", s, variant=variant), **{TRAIN_LOSS: [1 + w * (-1) ** e for e in range(8)]})
        for m in DECAYING
        for s, w in enumerate(shares)
    ]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((0.3, 0.31), "holds"), ((0.01, 0.011), "does not hold"), ((0.01, 0.3), "within noise")],
)
def test_decay_makes_training_rough(shares, expected):
    plain = wobbling("", (0.1, 0.1))
    assert verdict("decay-destabilizes", [*plain, *wobbling("decay", shares)]).verdict == expected
    assert verdict("decay-destabilizes", plain).verdict == "no data"


@pytest.mark.parametrize(
    ("values", "expected"), [((0.2, 0.21), "holds"), (HIGHER, "does not hold"), (MIXED, "within noise")]
)
def test_projection_replaces_decay(values, expected):
    decayed = [*decaying("", (0.15, 0.15)), *decaying("decay", (0.2, 0.21))]
    found = verdict("projection", [*decayed, *decaying("unit-norm", values)])
    assert found.verdict == expected
    assert "with neither (lower in 2 of 2)" in found.measured[0] or values == MIXED
    assert verdict("projection", decayed).verdict == "no data"


def test_one_of_two_methods_that_is_worse_by_chance_does_not_refute_projection():
    """p = 0.04 for one of two methods, more than half of 0.05."""
    decayed, projected = decaying("decay", (0.2, 0.2, 0.2)), decaying("unit-norm", (0.3357, 0.3, 0.2643))
    mixed = [o if o.cell.method == "weight" else ended(o.cell, train=0.2) for o in projected]
    found = verdict("projection", [*decayed, *mixed])
    assert found.verdict == "within noise" and "does not hold" in found.measured[0]


def batches(method, size, values, name="error"):
    return seeds("small-batches", method, "bn", values, name=name, batch_size=size)


@pytest.mark.parametrize(
    ("values", "analytic", "batch"),
    [
        ((0.30, 0.31), "does not hold", "holds"),
        ((0.10, 0.11), "holds", "does not hold"),
        ((0.10, 0.31), "within noise", "within noise"),
    ],
)
@pytest.mark.parametrize(("what", "name"), [("training", "train"), ("validation", "error")])
def test_small_batches(values, analytic, batch, what, name):
    for method, short, expected in (("analytic", "ap2", analytic), ("batch", "bn", batch)):
        usual = batches(method, 128, (0.2, 0.21), name)
        outcomes = [*usual, *batches(method, 4, values, name), *batches(method, 16, values, name)]
        assert verdict(f"{short}-batch-size-{what}", outcomes).verdict == expected
        assert verdict(f"{short}-batch-size-{what}", usual).verdict == "no data"


def test_each_batch_size_is_judged_by_itself():
    outcomes = [
        *batches("batch", 128, (0.2, 0.21)),
        *batches("batch", 4, (0.3, 0.31)),
        *batches("batch", 16, (0.1, 0.11)),
    ]
    found = verdict("bn-batch-size-validation", outcomes)
    assert found.verdict == "does not hold"
    assert [line.rsplit(": ", 1)[1] for line in found.measured] == ["holds", "does not hold"]
