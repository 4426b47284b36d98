import math

import pytest

import varprop as vp
from varprop_lab.execution import search_lr

BOUNDS = (1e-6, 1e-2)


def valley(centre):
    """Not a parabola, whose bottom Brent would find before its evaluations are used up."""
    return lambda lr: abs(math.log10(lr) - centre) ** 1.3


LOSSES = {
    "inside": valley(-3.0),
    "edge": valley(0.0),
    "wild": lambda lr: lr if lr < 1e-4 else math.inf,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_search_is_that_of_find_lr(name):
    found = search_lr(LOSSES[name], BOUNDS, 10)
    assert found == vp.find_lr(LOSSES[name], BOUNDS, 10)
    assert found.diverged == (name == "wild")


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("limit", [None, 10.0])
def test_known_evaluations_are_not_made_again_and_the_result_is_the_same(name, limit):
    whole = search_lr(LOSSES[name], BOUNDS, 8, limit=limit)
    fresh = []

    def counted(lr):
        fresh.append(lr)
        return LOSSES[name](lr)

    assert search_lr(counted, BOUNDS, 8, recorded=list(whole.trace[:5]), limit=limit) == whole
    assert fresh == [lr for lr, _ in whole.trace[5:]]


@pytest.mark.parametrize("limit", [0.1, 10.0])
def test_the_upper_bound_moves_up_to_a_limit_while_the_best_rate_lies_there(limit):
    for name, loss in LOSSES.items():
        wide, fixed = search_lr(loss, BOUNDS, 10, limit=limit), search_lr(loss, BOUNDS, 10)
        assert (wide != fixed) == (name == "edge")
    edge, fixed = search_lr(LOSSES["edge"], BOUNDS, 10, limit=limit), search_lr(LOSSES["edge"], BOUNDS, 10)
    assert edge.trace[:11] == fixed.trace and edge.loss == min(loss for _, loss in edge.trace)
    if limit == 10.0:
        assert edge.lr == pytest.approx(1.0, rel=0.7) and not edge.at_bound and edge.bounds[1] == 10.0
    else:
        assert edge.at_bound and edge.bounds == (1e-6, 0.1)


def test_known_evaluations_of_another_search_are_refused():
    with pytest.raises(RuntimeError, match="other settings or versions"):
        search_lr(LOSSES["inside"], BOUNDS, 8, recorded=[(0.5, 1.0)])


def test_an_error_of_the_evaluation_ends_the_search():
    def failing(lr):
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        search_lr(failing, BOUNDS, 8)
