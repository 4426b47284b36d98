"""The answer of a comparison: who leads, from how many starts, and how surely."""

from dataclasses import replace

from varprop_lab.protocol.records import TRAIN_LOSS, VALID_ACCURACY, Cell, Outcome, Search
from varprop_lab.report.answer import answer


def run(method, start, loss, accuracy=0.5, seed=0):
    curves = {TRAIN_LOSS: [2.0, loss], VALID_ACCURACY: [0.1, accuracy]}
    return Outcome(Cell("compare", method, start, seed), Search(0.1, loss), curves, loss, accuracy, False, 0.0, 1.0)


def test_every_leader_is_named_with_its_starts():
    outcomes = [
        *(run("batch", start, 0.3, 0.9) for start in ("none", "bn", "ap2")),
        *(run("analytic", start, loss, 0.8) for start, loss in (("none", 0.2), ("bn", 0.1), ("ap2", 0.5))),
    ]
    assert answer(outcomes) == (
        "AP2 has the lowest training loss from 2 of 3 starts and BN from 1; BN has the highest validation accuracy "
        "from 3 of 3 starts; with one seed, small differences mean nothing."
    )


def test_a_lead_within_the_noise_is_told_from_one_beyond():
    near = [run("batch", "bn", 0.30 + 0.1 * seed, 0.8, seed) for seed in range(3)]
    near += [run("analytic", "bn", 0.29 + 0.05 * seed, 0.7 + 0.01 * seed, seed) for seed in range(3)]
    far = [run("batch", "ap2", 0.30 + 0.01 * seed, 0.8, seed) for seed in range(3)]
    far += [run("analytic", "ap2", 0.1 + 0.011 * seed, 0.7 + 0.01 * seed, seed) for seed in range(3)]
    assert "AP2 has the lowest training loss from 2 of 2 starts (by more than the noise between seeds: 1)" in answer(
        [*near, *far]
    )
    assert "BN has the highest validation accuracy from 1 of 1 start (by more than the noise between seeds)" in answer(
        far
    )


def test_what_diverged_does_not_lead():
    lost = replace(run("analytic", "bn", 0.01, 0.99), diverged=True)
    found = answer([lost, run("batch", "bn", 0.5)])
    assert (
        found.startswith("BN has the lowest training loss from 1 of 1 start; BN has")
        and "1 of 2 runs diverged" in found
    )


def test_equal_numbers_and_single_methods_have_no_leader():
    assert answer([run("batch", "bn", 0.5), run("analytic", "bn", 0.5)]).startswith(
        "No method has the lowest training loss"
    )
    assert answer([run("batch", "bn", 0.5)]) == answer([]) == ""
