"""Every row of the table: against Monte Carlo, at zero variance, in form, and in its gradients."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tests.rules as package
from varprop import Moments, Tokens
from varprop.rules.registry import lookup, registered

from .case import Case
from .one_op import draw, is_random, leaves, propagate_op, replace, run_op, stand_in

MODULES = [name for _, name, _ in pkgutil.iter_modules(package.__path__) if name.startswith("rows_")]
ROWS: list[Case] = [row for name in MODULES for row in importlib.import_module(f"tests.rules.{name}").rows]
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)


def build(row: Case) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return row.args()


def outputs(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def monte_carlo(row: Case, args: Any, count: int) -> list[Tensor]:
    """Draws of every output, along a new first axis."""
    given, structure = pytree.tree_flatten((args, row.kwargs), is_leaf=is_random)
    random = [leaf for leaf in given if is_random(leaf)]

    def once(*drawn: Tensor) -> Any:
        queue = iter(drawn)
        call = pytree.tree_unflatten([next(queue) if is_random(leaf) else leaf for leaf in given], structure)
        return tuple(outputs(run_op(row.op, *call)))

    samples = [draw(leaf, count) for leaf in random] or [torch.zeros(count)]  # a source draws by itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            drawn = list(torch.vmap(once, randomness="different", chunk_size=20_000)(*samples))
            if random or not torch.equal(drawn[0][0], drawn[0][1]):  # vmap lets some sources draw once for all
                return drawn
        except RuntimeError as error:
            if "vmap" not in str(error) and "atching rule" not in str(error):
                raise
        draws = (once(*one) for one in zip(*samples, strict=True))
        return [torch.stack(column) for column in zip(*draws, strict=True)]


@each_row
def test_agrees_with_monte_carlo(row: Case) -> None:
    agrees_with_monte_carlo(row, max(row.draws // 8, 1000))


@pytest.mark.slow
@each_row
def test_agrees_with_monte_carlo_of_all_draws(row: Case) -> None:
    agrees_with_monte_carlo(row, row.draws)


def agrees_with_monte_carlo(row: Case, count: int) -> None:
    args = build(row)
    analytic = outputs(propagate_op(row.op, args, row.kwargs))
    for moments, drawn in zip(analytic, monte_carlo(row, args, count), strict=False):
        if isinstance(moments, Moments):
            compare(row, moments, drawn.double())


def compare(row: Case, moments: Moments, drawn: Tensor) -> None:
    dense = moments.dense()
    mean, centred = drawn.mean(0), drawn - drawn.mean(0)
    var, count = centred.square().mean(0), len(drawn)
    finite = mean.isfinite()
    tiny = 1e-9 * (1 + mean.abs()[finite].max())
    mean_tolerance = 5 * (var / count).sqrt() + (row.mean_error or 0.0) * var.sqrt() + tiny
    fourth = centred.square().square().mean(0)
    std_tolerance = 5 * ((fourth - var.square()).clamp_min(0) / count).sqrt() / (2 * var.sqrt()).clamp_min(1e-9)
    std_tolerance = std_tolerance + (row.std_error or 0.0) * var.sqrt() + tiny
    assert dense.mean.shape == mean.shape
    mean_excess = ((dense.mean - mean).abs() - mean_tolerance)[finite]
    std_excess = ((dense.var.sqrt() - var.sqrt()).abs() - std_tolerance)[finite]
    assert (mean_excess <= 0).all(), f"mean off by {mean_excess.max()} beyond {mean_tolerance[finite].max()}"
    assert (std_excess <= 0).all(), f"std off by {std_excess.max()} beyond {std_tolerance[finite].max()}"


def _still(leaf: Any) -> Any:
    """Without variance: the mean for certain, or the token that `stand_in` takes."""
    if isinstance(leaf, Tokens):
        return Tokens(torch.eye(1, len(leaf.probabilities), dtype=leaf.probabilities.dtype)[0], leaf.full)
    return Moments(leaf.mean, torch.zeros_like(leaf.var), leaf.full) if isinstance(leaf, Moments) else leaf


def _has_random_arguments(row: Case) -> bool:
    return any(map(is_random, leaves((build(row), row.kwargs))))


STILL = [row for row in ROWS if _has_random_arguments(row) and not row.op_is_random]
DRAWING = [row for row in ROWS if row.op_is_random]


@pytest.mark.parametrize("row", DRAWING, ids=lambda row: row.id)
def test_operations_that_draw_agree_with_monte_carlo_at_zero_variance(row: Case) -> None:
    args, kwargs = replace((build(row), row.kwargs), _still)
    still = dataclasses.replace(row, kwargs=kwargs)
    for moments, drawn in zip(
        outputs(propagate_op(row.op, args, kwargs)), monte_carlo(still, args, max(row.draws // 8, 1000)), strict=False
    ):
        if isinstance(moments, Moments):
            compare(row, moments, drawn.double())


def test_few_rows_draw_all_that_is_random() -> None:
    """Rows without random arguments are sources: all others are tested at zero variance."""
    sources = [row for row in ROWS if row not in STILL and row not in DRAWING]
    assert all(rule is not None and rule.kind in ("source", "constant") for rule in (lookup(row.op) for row in sources))


@pytest.mark.parametrize("row", STILL, ids=lambda row: row.id)
def test_zero_variance_reproduces_the_operation(row: Case) -> None:
    args, kwargs = replace((build(row), row.kwargs), _still)
    expected = outputs(run_op(row.op, *replace((args, kwargs), stand_in)))
    found = zip(outputs(propagate_op(row.op, args, kwargs)), expected, strict=False)
    pairs = [(moments, value) for moments, value in found if isinstance(moments, Moments)]
    assert pairs, "nothing to compare"
    for moments, value in pairs:
        torch.testing.assert_close(moments.dense().mean, value.double(), rtol=1e-7, atol=1e-7)
        assert (moments.var.abs() <= 1e-12 * (1 + moments.mean.abs())).all()


@each_row
def test_shape_and_dtype_follow_the_operation(row: Case) -> None:
    for dtype in (torch.float32, torch.float64):
        args, kwargs = replace((build(row), row.kwargs), lambda leaf, dtype=dtype: _cast(leaf, dtype))
        expected = outputs(run_op(row.op, *replace((args, kwargs), stand_in)))
        for moments, value in zip(outputs(propagate_op(row.op, args, kwargs)), expected, strict=False):
            if isinstance(moments, Moments):
                assert moments.dense().shape == value.shape
                assert moments.dtype == (value.dtype if value.is_floating_point() else moments.dtype)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Moments):
        return leaf.to(dtype)
    if isinstance(leaf, Tokens):
        return Tokens(leaf.probabilities.to(dtype), leaf.full)
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.differentiable], ids=lambda row: row.id)
def test_gradients(row: Case) -> None:
    args = build(row)
    found = [leaf for leaf in leaves((args, row.kwargs)) if _differentiable(leaf)]
    variables = [t for leaf in found for t in ([leaf.mean, leaf.var] if isinstance(leaf, Moments) else [leaf])]
    variables = [t.detach().clone().requires_grad_() for t in variables]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        queue = iter(tensors)

        def put(leaf: Any) -> Any:
            if isinstance(leaf, Moments):
                return Moments(next(queue), next(queue), leaf.full)
            return next(queue) if _differentiable(leaf) else leaf

        result = propagate_op(row.op, *replace((args, row.kwargs), put))
        parts = [t for m in outputs(result) if isinstance(m, Moments) for t in (m.mean, m.var)]
        return tuple(t for t in parts if t.requires_grad)

    assert torch.autograd.gradcheck(function, variables, eps=1e-6, atol=1e-5, rtol=1e-3, fast_mode=True)


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Moments) or (isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 0)


# Logic on truth values: a row needs a random truth value, so these are tested as parts of functions in test_clusters.
aten = torch.ops.aten
IN_CLUSTERS = {aten.bitwise_and, aten.bitwise_or, aten.bitwise_not, aten.__and__, aten.__or__}


def test_every_registered_operation_has_a_row() -> None:
    tested = {row.op for row in ROWS} | {getattr(row.op, "overloadpacket", None) for row in ROWS}
    tested |= IN_CLUSTERS | {key for key, rule in registered().items() if rule.kind == "constant"}
    missing = [str(key) for key in registered() if key not in tested and not isinstance(key, type)]
    assert not missing, f"add a row to tests/rules for: {', '.join(missing)}"
