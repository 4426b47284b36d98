"""Shorter ways to moments of functions, for those who train and ask for first derivatives alone.

What the normalization computes in every step need not be right to the last digit, and is hardly ever differentiated
twice. Both shortcuts are taken only within their contexts.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .normal import Pair, differentiated

MOST = 1 << 16  # values beyond which integrals are taken in blocks of nodes, and formulas not at all
Formula = Callable[[Pair], Any]  # mean and variance to both of the result, and to the derivatives
FORMULAS: dict[str, Formula] = {}  # by the name of the activation; those of `derivatives`


class _Taken(threading.local):
    first_order = False
    formulas = False


_taken = _Taken()


@contextlib.contextmanager
def first_order() -> Iterator[None]:
    """Within, nothing is done for second derivatives: they are wrong where a function has kinks."""
    before, _taken.first_order = _taken.first_order, True
    try:
        yield
    finally:
        _taken.first_order = before


def is_first_order() -> bool:
    """True within `first_order`."""
    return not torch.compiler.is_compiling() and _taken.first_order


@contextlib.contextmanager
def by_formulas() -> Iterator[None]:
    """Within, moments of activations and their derivatives come together, with a relative error of 5e-11."""
    if torch.compiler.is_compiling():
        yield
        return
    before, _taken.formulas = _taken.formulas, True
    try:
        yield
    finally:
        _taken.formulas = before


def may_take_formulas(mean: Tensor) -> bool:
    """True for a few values within `by_formulas`, but not within transforms, which differentiate in other ways."""
    if torch.compiler.is_compiling() or not _taken.formulas or mean.numel() > MOST:
        return False
    return not (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)


class _ByFormula(torch.autograd.Function):
    """Moments by a formula that gives their derivatives too; second ones by what computes the same otherwise."""

    @staticmethod
    def forward(ctx: Any, formula: Formula, plain: Any, mean: Tensor, std: Tensor) -> Any:
        (m, v), [derivatives] = formula((mean.flatten(), std.flatten().square()))
        ctx.plain = plain
        ctx.save_for_backward(mean, std, derivatives)
        return m.view(mean.shape), v.view(mean.shape)

    @staticmethod
    def backward(ctx: Any, by_m: Tensor, by_v: Tensor) -> Any:
        mean, std, derivatives = ctx.saved_tensors
        if torch.is_grad_enabled():  # the derivatives are to be differentiated
            return None, None, *_differentiable(ctx.plain, mean, std, by_m, by_v)
        (m_by_mean, m_by_var), (v_by_mean, v_by_var) = derivatives.view(2, 2, *mean.shape)
        by_mean = by_m * m_by_mean + by_v * v_by_mean
        by_std = 2.0 * std * (by_m * m_by_var + by_v * v_by_var)
        return None, None, by_mean, by_std


def _differentiable(plain: Any, mean: Tensor, std: Tensor, by_m: Tensor, by_v: Tensor) -> tuple[Tensor, ...]:
    inputs = [t if t.requires_grad else t.detach().requires_grad_() for t in (mean, std)]
    return torch.autograd.grad(plain(*inputs), inputs, (by_m, by_v), create_graph=True)


def with_formula(name: str) -> Callable[[Callable[[Tensor, Tensor], Pair]], Callable[[Tensor, Tensor], Pair]]:
    """Decorates the moments of an activation, from mean and standard deviation in float64, that may have a formula."""

    def decorate(moments: Callable[[Tensor, Tensor], Pair]) -> Callable[[Tensor, Tensor], Pair]:
        @functools.wraps(moments)
        def wrapped(mean: Tensor, std: Tensor) -> Pair:
            if name not in FORMULAS or not may_take_formulas(mean):
                return moments(mean, std)
            mean, std = torch.broadcast_tensors(mean, std)
            if differentiated(mean, std):
                m, v = _ByFormula.apply(FORMULAS[name], moments, mean, std)  # type: ignore[no-untyped-call]
                return m, v
            (m, v), _ = FORMULAS[name]((mean.flatten(), std.flatten().square()))
            return m.view(mean.shape), v.view(mean.shape)

        return wrapped

    return decorate
