import math

import pytest

import varprop as vp
from varprop_lab.execution import find_lrs

BOUNDS = (1e-6, 1e-2)


def valley(centre):
    """Not a parabola, whose bottom Brent would find before its evaluations are used up."""
    return lambda lr: abs(math.log10(lr) - centre) ** 1.3


LOSSES = {
    "a": valley(-3.0),
    "b": valley(-5.2),
    "edge": valley(0.0),
    "wild": lambda lr: lr if lr < 1e-4 else math.inf,
}


def evaluate(wanted):
    return {name: LOSSES[name](lr) for name, lr in wanted.items()}


def test_every_search_is_that_of_find_lr():
    found = find_lrs(dict.fromkeys(LOSSES, BOUNDS), evaluate, 10)
    for name, loss in LOSSES.items():
        assert found[name] == vp.find_lr(loss, BOUNDS, 10)
    assert found["edge"].at_bound and found["wild"].diverged


def test_all_unfinished_searches_ask_together():
    waves = []

    def counted(wanted):
        waves.append(sorted(wanted))
        return evaluate(wanted)

    find_lrs({"a": BOUNDS, "b": (1e-4, 1e-1)}, counted, 6)
    assert waves == [["a", "b"]] * 6 + [["b"]]  # whose best rate lies next to the bound


def test_known_evaluations_are_answered_at_once_and_the_result_is_the_same():
    whole = find_lrs({"a": BOUNDS, "b": BOUNDS}, evaluate, 8)
    known = {name: list(search.trace[:5]) for name, search in whole.items()}
    fresh = []

    def counted(wanted):
        fresh.append(wanted)
        return evaluate(wanted)

    assert find_lrs({"a": BOUNDS, "b": BOUNDS}, counted, 8, recorded=known) == whole
    assert len(fresh) == 3


@pytest.mark.parametrize("limit", [0.1, 10.0])
def test_the_upper_bound_moves_up_to_a_limit_while_the_best_rate_lies_there(limit):
    wide = find_lrs(dict.fromkeys(LOSSES, BOUNDS), evaluate, 10, limit=limit)
    fixed = find_lrs(dict.fromkeys(LOSSES, BOUNDS), evaluate, 10)
    assert {name for name in LOSSES if wide[name] != fixed[name]} == {"edge"}
    edge = wide["edge"]
    assert edge.trace[:11] == fixed["edge"].trace and edge.loss == min(loss for _, loss in edge.trace)
    if limit == 10.0:
        assert edge.lr == pytest.approx(1.0, rel=0.7) and not edge.at_bound and edge.bounds[1] == 10.0
    else:
        assert edge.at_bound and edge.bounds == (1e-6, 0.1)
    known = {"edge": list(edge.trace[:14])}
    assert find_lrs({"edge": BOUNDS}, evaluate, 10, recorded=known, limit=limit)["edge"] == edge


def test_known_evaluations_of_another_search_are_refused():
    with pytest.raises(RuntimeError, match="other settings or versions"):
        find_lrs({"a": BOUNDS}, evaluate, 8, recorded={"a": [(0.5, 1.0)]})


def test_an_error_of_the_evaluation_ends_all_searches():
    def failing(wanted):
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        find_lrs({"a": BOUNDS, "b": BOUNDS}, failing, 8)


def test_every_evaluation_is_in_the_trace():
    found = find_lrs({"wild": BOUNDS}, evaluate, 5)["wild"]
    assert len(found.trace) == 5
    assert found.diverged and math.inf in [loss for _, loss in found.trace]
