"""What rules say of their operations beyond the moments, held against the operations themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import varprop as vp
from varprop import Moments
from varprop.rules.registry import Rule, lookup, registered

from .case import Case
from .one_op import draw, is_random, leaves, propagate_op, replace, run_op
from .test_rows import ROWS, build, outputs

aten = torch.ops.aten
OPERATIONS = {str(key): rule for key, rule in registered().items() if not isinstance(key, type)}


def named(*words: str) -> list[str]:
    return [name for name in OPERATIONS if any(word in name for word in words)]


def operations(field: str) -> set[str]:
    return {name for name, rule in OPERATIONS.items() if getattr(rule, field)}


@pytest.mark.parametrize("name", named("pool", "upsample", "dropout", "rrelu.", "aten.rrelu"))
def test_what_works_channel_by_channel_says_so(name: str) -> None:
    assert OPERATIONS[name].per_channel or name == "aten.rrelu_with_noise_functional"


def test_linear_layers_are_those_with_weights_as_their_second_argument() -> None:
    convolutions = {f"aten.conv{kind}{axes}d" for kind in ("", "_transpose") for axes in (1, 2, 3)}
    matrices = {"aten.linear", *named("transposed_linear")}
    assert operations("linear") == {*matrices, "aten.convolution", *convolutions}
    assert operations("linear") <= operations("weighted")
    assert {name for name in operations("linear") if OPERATIONS[name].convolution} == operations("linear") - matrices


def test_averages_and_interpolations_say_so() -> None:
    assert operations("averages") == {
        *named("avg_pool"),
        *named("aten.sum.", "aten.mean.", "aten.nansum", "aten.nanmean"),
    }
    assert operations("resizes") == set(named("upsample"))


def test_sums_have_signs() -> None:
    assert operations("signs") == {"aten.add", "aten.sub", "aten.rsub"}


@pytest.mark.parametrize("name", sorted(operations("selects")))
def test_what_selects_has_elements_of_its_arguments_alone(name: str) -> None:
    rows = [row for row in ROWS if str(row.op).startswith(f"{name}.") or str(row.op) == name]
    assert rows
    for row in rows:
        tensors = [leaf for leaf in leaves(build(row)) if isinstance(leaf, (Moments, Tensor))]
        given = [leaf.mean if isinstance(leaf, Moments) else leaf for leaf in tensors]
        moved = outputs(propagate_op(row.op, build(row), row.kwargs))[0].dense().mean
        assert torch.isin(moved, torch.cat([x.flatten() for x in given])).all()


# --- bends and bounds, on a grid ---

GRID = torch.linspace(-30, 30, 6001, dtype=torch.float64)
SETTINGS: dict[str, tuple[Any, ...]] = {
    "aten.threshold": (0.5, -2.0),
    "aten.clamp_min": (-0.3,),
    "aten.clamp_max": (2.0,),
}
SETTINGS |= {"aten.clamp": (0.0, 3.0), "aten.clip": (-1.0, None)}
FUNCTIONS = [name for name, rule in OPERATIONS.items() if rule.kind == "elementwise" and name.startswith("aten.")]
EVERYTHING = (-math.inf, math.inf)


def operation(name: str) -> Any:
    found = aten
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def rule_with(name: str, field: str) -> tuple[Rule, Any]:
    rule = OPERATIONS[name]
    try:
        return rule, getattr(rule, field)(*SETTINGS.get(name, ()))
    except TypeError:
        return rule, None  # needs arguments that have no default, and is no activation


BENT = [name for name in FUNCTIONS if rule_with(name, "bend")[1] is not None]
BOUNDED = [name for name in FUNCTIONS if rule_with(name, "bounds")[1] != EVERYTHING]


def test_activations_are_bent_and_bounded() -> None:
    assert {"aten.relu", "aten.sigmoid", "aten.tanh", "aten.gelu", "aten.clamp"} <= set(BENT)
    assert {"aten.relu", "aten.sigmoid", "aten.tanh", "aten.exp", "aten.clamp", "aten.frac"} <= set(BOUNDED)


@pytest.mark.parametrize("name", BENT)
def test_an_activation_is_flat_where_its_bend_says(name: str) -> None:
    bend = rule_with(name, "bend")[1]
    x = GRID.clone().requires_grad_()
    (slope,) = torch.autograd.grad(operation(name)(x, *SETTINGS.get(name, ())).sum(), x)
    slope, steepest = slope.abs(), slope.abs().max()
    flat = bend.is_flat(GRID)
    on, linear = bend.is_above(GRID)
    assert (slope[flat] <= steepest / 19).all()
    if bend.rectifier is not None:
        assert (slope[~on] <= steepest / 8).all()
        assert (slope[linear & ~flat] - 1).abs().max() < 0.055


@pytest.mark.parametrize("name", BOUNDED)
def test_values_stay_within_their_bounds(name: str) -> None:
    low, high = rule_with(name, "bounds")[1]
    positive = OPERATIONS[name].positive is not None
    value = operation(name)(GRID[GRID > 0] if positive else GRID, *SETTINGS.get(name, ()))
    assert value.min() >= low and value.max() <= high


# --- gradients: the derivative of the variance is the mean square of the Jacobian ---


def is_plain(row: Case) -> bool:
    """Exact as it stands, with every position for itself."""
    rule = lookup(row.op)
    dense = all(leaf.shape == leaf.full for leaf in leaves(build(row)) if isinstance(leaf, Moments))
    random = any(isinstance(leaf, Moments) for leaf in leaves(build(row)))
    exact = row.mean_error is None and row.std_error is None and row.differentiable
    return rule is not None and rule.transposable and not isinstance(row.op, type) and dense and random and exact


@pytest.mark.parametrize("row", [row for row in ROWS if is_plain(row)], ids=lambda row: row.id)
def test_the_derivative_of_the_variance_is_the_mean_square_of_the_jacobian(row: Case) -> None:
    args = build(row)
    given = [leaf for leaf in leaves((args, row.kwargs)) if isinstance(leaf, Moments)]
    variances = iter([leaf.var.clone().requires_grad_() for leaf in given])
    kept: list[Tensor] = []

    def with_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Moments):
            return leaf
        kept.append(next(variances))
        return Moments(leaf.mean, kept[-1])

    first = outputs(propagate_op(row.op, *replace((args, row.kwargs), with_leaf)))[0]
    expected = sum(float(part.sum()) for part in slopes(first.dense().var.sum(), kept))
    energies = torch.tensor([energy(row, args) for _ in range(40)], dtype=torch.float64)
    error = float(energies.std() / math.sqrt(len(energies)))
    assert float(energies.mean()) == pytest.approx(expected, rel=1e-6, abs=5 * error + 1e-9)


def energy(row: Case, args: Any) -> float:
    """The squared gradient for random signs at the output: on average the sum of the squared Jacobian."""
    drawn: list[Tensor] = []

    def one(leaf: Any) -> Any:
        if not is_random(leaf):
            return leaf
        drawn.append(draw(leaf, 1)[0].requires_grad_())
        return drawn[-1]

    rule = lookup(row.op)
    moved = rule.evaluate if rule is not None and rule.kind == "structural" else None  # torch's own has no derivative
    first = outputs(run_op(moved or row.op, *replace((args, row.kwargs), one)))[0]
    signs = torch.randint(0, 2, first.shape, dtype=first.dtype) * 2 - 1
    return sum(float(part.square().sum()) for part in slopes((first * signs).sum(), drawn))


def slopes(total: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Derivatives; none where everything was dropped."""
    if not total.requires_grad:
        return ()
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


# --- a new operation ---


class Fraction(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.frac(x)


def test_an_operation_registered_in_one_line_is_exact_in_the_inspector() -> None:
    """`aten.frac` stands in one line of rules/elementwise.py; nothing else in varprop knows its name."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), Fraction(), torch.nn.Linear(8, 3)).double()
    moments = Moments(torch.zeros(1, 6).double(), torch.full((1, 6), 1.5).double())
    assert not vp.coverage(model, torch.zeros(1, 6).double()).missing
    report = vp.inspect(model, moments, example=torch.zeros(16, 6).double(), check="gaussian", samples=8_000)
    row = report["1"]
    assert (row.status, row.gradient_status) == ("exact", "exact")
    assert row.gain == pytest.approx(1.0)
    assert max(map(abs, (row.ranges["low"] + row.ranges["high"]))) <= 1.0
    for label in ("1", "0"):
        for what in ("mean", "std", "gradient"):
            seen = report[label].measured[what]
            assert report[label].numbers[what] == pytest.approx(seen["value"], abs=5 * seen["error"] + 1e-9)
