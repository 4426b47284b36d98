"""The answer of a comparison: who leads from how many starts, and when that is undecided."""

from dataclasses import replace

from varprop_lab.protocol import TRAIN_LOSS, VALID_ACCURACY, Cell, Outcome, Search
from varprop_lab.report import answer


def run(method, start, loss, accuracy=0.5, seed=0, at_bound=False):
    curves = {TRAIN_LOSS: [2.0, loss], VALID_ACCURACY: [0.1, accuracy]}
    search = Search(0.1, loss, at_bound=at_bound)
    return Outcome(Cell("compare", method, start, seed), search, curves, loss, accuracy, False, 0.0, 1.0)


def runs(method, start, loss, accuracy=0.5, **settings):
    """Three seeds that hardly differ."""
    return [run(method, start, loss + 0.001 * s, accuracy + 0.0001 * s, s, **settings) for s in range(3)]


def test_every_leader_is_named_with_its_starts():
    outcomes = [outcome for start in ("none", "bn", "ap2") for outcome in runs("batch", start, 0.3, 0.9)]
    for start, loss in (("none", 0.2), ("bn", 0.1), ("ap2", 0.5)):
        outcomes += runs("analytic", start, loss, 0.8)
    assert answer(outcomes) == (
        "AP2 has the lowest training loss from 2 of 3 starts, BN from 1; BN has the highest validation accuracy "
        "from 3 of 3 starts."
    )


def test_a_lead_within_the_noise_is_undecided():
    near = [run("batch", "bn", 0.30 + 0.1 * seed, 0.8, seed) for seed in range(3)]
    near += [run("analytic", "bn", 0.29 + 0.05 * seed, 0.7 + 0.01 * seed, seed) for seed in range(3)]
    far = [*runs("batch", "ap2", 0.3, 0.8), *runs("analytic", "ap2", 0.1, 0.7)]
    assert answer(near).startswith("Which method has the lowest training loss is undecided; BN has")
    assert answer([*near, *far]).startswith("AP2 has the lowest training loss from 1 of 2 starts, undecided from 1;")
    assert "noise" not in answer([*near, *far])


def test_one_seed_decides_nothing():
    found = answer([run("batch", "bn", 0.9), run("analytic", "bn", 0.1)])
    assert found.startswith("Which method has the lowest training loss is undecided; which")
    assert found.endswith("one seed decides nothing, take three or more (--seeds 3).")
    lost = replace(run("analytic", "bn", 0.01, 0.99), diverged=True)
    assert "BN has" not in answer([lost, run("batch", "bn", 0.5)])


def test_a_method_that_is_behind_at_the_bound_of_its_search_may_be_ahead_beyond_it():
    ahead, behind = runs("analytic", "bn", 0.1, 0.9), runs("batch", "bn", 0.3, 0.8)
    bounded = [replace(o, search=replace(o.search, at_bound=True)) for o in behind]
    assert answer([*ahead, *behind]).startswith("AP2 has the lowest training loss;")
    found = answer([*ahead, *bounded])
    assert found == (
        "Which method has the lowest training loss is undecided; which method has the highest validation accuracy is "
        "undecided; a best learning rate lies at the bound of its search (--lr-max)."
    )
    leading = [replace(o, search=replace(o.search, at_bound=True)) for o in ahead]
    assert answer([*leading, *behind]).startswith("AP2 has the lowest training loss;")


def test_what_diverged_does_not_lead():
    lost = [replace(outcome, diverged=True) for outcome in runs("analytic", "bn", 0.01, 0.99)]
    found = answer([*lost, *runs("batch", "bn", 0.5)])
    assert found.startswith("BN has the lowest training loss; BN has")
    assert "3 of 6 runs diverged" in found


def test_equal_numbers_and_single_methods_have_no_leader():
    same = [*runs("batch", "bn", 0.5), *runs("analytic", "bn", 0.5)]
    assert answer(same).startswith("Which method has the lowest training loss is undecided")
    assert answer(runs("batch", "bn", 0.5)) == answer([]) == ""
