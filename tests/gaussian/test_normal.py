"""Values decide what is computed only where that is not recorded for others."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from varprop.gaussian import maximum
from varprop.gaussian.normal import readable


def _seen_within(how) -> list[bool]:
    seen = []

    def function(x):
        seen.append(readable(x))
        return x + 1

    how(function)
    return seen


def test_values_are_not_read_where_work_is_recorded_or_transformed() -> None:
    x = torch.ones(3)
    assert readable(x) and readable(torch.nn.Parameter(x))
    assert _seen_within(lambda f: make_fx(f)(x)) == [False]
    assert not any(_seen_within(lambda f: torch.jit.trace(f, x, check_trace=False)))
    assert _seen_within(lambda f: torch.vmap(f)(x)) == [False]
    assert _seen_within(lambda f: torch.func.grad(lambda y: f(y).sum())(x)) == [False]


def test_a_recorded_maximum_holds_for_other_values() -> None:
    near = torch.linspace(-1, 1, 40, dtype=torch.float64), torch.full((40,), 0.5, dtype=torch.float64)
    far = 30 * near[0].flip(0), 4 * near[1]
    graph = make_fx(lambda mean, std: maximum.independent(mean, std, -1))(*near)
    for one, other in zip(graph(*far), maximum.independent(*far, -1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
