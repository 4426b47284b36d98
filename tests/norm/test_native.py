"""The compiled passes against autograd in float64, for all shapes, orders in memory and functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.functions import ADD, DROPOUT, MAX_RELU, MUL, RELU, RULES, SIGMOID, SKIP, SUBTRACT, function
from tests.kernels.reference import Shape, chain
from tests.norm.native_cases import around, backend_of, by_native, check, grads_of, needs_compiler, rows_of, vectors_of
from varprop.norm import native
from varprop.norm.layout import Lanes
from varprop.norm.native import make_native
from varprop.norm.native.structures import CODES, GRIDS, KNOTS, LONGEST_RULE

pytestmark = needs_compiler
SOURCES = Path(native.__file__).parent
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}

SITES = {
    "linear": Shape(20, 24),
    "one": Shape(1, 1),
    "rows of one": Shape(7, 1),
    "one row": Shape(1, 33),
    "odd linear": Shape(5, 7),
    "long odd rows": Shape(2, 1111),
    "conv": Shape(5, 7, (3, 3)),
    "padded": Shape(5, 24, (3, 3), padded=True),
    "channels last": Shape(4, 15, (3, 3), padded=True, channels_last=True),
    "one tap, channels last": Shape(8, 16, (1, 1), channels_last=True),
    "seven taps": Shape(6, 3, (7, 7), padded=True),
    "one dimension": Shape(4, 40, (3,)),
    "nine taps in one dimension": Shape(4, 5, (9,), padded=True),
    "three dimensions": Shape(4, 5, (3, 2, 2), padded=True),
    "grouped": Shape(4, 8, (3, 3), groups=3, padded=True),
    "grouped, channels last": Shape(4, 8, (3, 3), groups=3, padded=True, channels_last=True),
    "depthwise": Shape(1, 1, (3, 3), groups=70, padded=True),
    "depthwise, several rows": Shape(2, 1, (5,), groups=33),
    "depthwise, channels last": Shape(1, 1, (3, 3), groups=8, channels_last=True),
    "transposed": Shape(5, 6, (3, 3), transposed=True, padded=True),
    "transposed in groups": Shape(2, 3, (3, 3), groups=5, transposed=True, padded=True),
    "transposed, one tap": Shape(20, 30, (1, 1), transposed=True),
    "transposed, channels last": Shape(8, 6, (2, 2), transposed=True, channels_last=True),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SITES)
def test_site(name: str, dtype: torch.dtype) -> None:
    layout, weights = rows_of([SITES[name]], seed=0)
    check(layout, [weight.to(dtype) for weight in weights], TOLERANCES[dtype])


def test_sites_of_all_kinds_in_one_layout() -> None:
    check(*rows_of(list(SITES.values()), seed=3), TOLERANCES[torch.float32])


@st.composite
def shapes(draw: Any) -> Shape:
    """Up to about two thousand weights a site."""
    kernel = draw(st.sampled_from([(), (1, 1), (3,), (3, 3), (2, 3), (5, 5)]))
    taps, groups = int(torch.Size(kernel).numel()), draw(st.sampled_from([1, 1, 2, 7]))
    channels = draw(st.integers(1, max(1, 2000 // (taps * groups))))
    per_group = draw(st.integers(1, max(1, min(40, 4000 // (taps * channels * groups)))))
    last = len(kernel) == 2 and draw(st.booleans())
    transposed, padded = (bool(kernel) and draw(st.booleans()) for _ in range(2))
    return Shape(per_group, channels, kernel, groups, transposed, last, padded)


@settings(max_examples=40, deadline=None)
@given(sites=st.lists(shapes(), min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_any_layout(sites: list[Shape], seed: int) -> None:
    check(*rows_of(sites, seed), TOLERANCES[torch.float32], seed)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("scale", (0.3, 1.5, 6.0, 40.0))
@pytest.mark.parametrize("kernel", RULES, ids=str)
def test_function(kernel: tuple[Any, ...], scale: float, dtype: torch.dtype) -> None:
    """Narrow lanes go by the trapezoidal rule, wide ones by panels; the engine's own rule is the reference."""
    lanes = chain(40, [(function(*kernel), [list(range(40))])], list(range(40, 80)))
    check_widened(lanes, scale, dtype)


def check_widened(lanes: Lanes, scale: float, dtype: torch.dtype) -> None:
    layout, [weight] = around(lanes, dtype)
    backend = backend_of(layout, [weight])
    shift = torch.linspace(-4, 4, lanes.sources, dtype=dtype)
    scales = torch.linspace(0.05, 1.0, lanes.sources, dtype=dtype).flip(0) * scale
    parameters = [weight, shift, scales]
    parts, kept = backend.fold(parameters, None, dtype)
    grads = grads_of(layout, [weight])
    found = backend.unfold(parameters, kept, grads)[2:]
    leaves = [p.double().clone().requires_grad_() for p in parameters]
    right = reference(layout, leaves)
    expected = torch.autograd.grad(right, leaves, [grad.double() for grad in grads])
    for ours, theirs in zip([*parts, *found], [*right, *expected], strict=True):
        assert (ours.double() - theirs).norm() < (1e-5 if dtype == torch.float32 else 2e-8) * theirs.norm()


def reference(layout: Any, leaves: list[Tensor]) -> list[Tensor]:
    from tests.kernels.reference import NONE, fold, run_lanes

    weight, shift, scale = leaves
    [folded], bias = fold(layout, [weight], scale, shift, *run_lanes(layout.lanes, shift, scale, NONE, NONE))
    return [folded, bias]


def numbers(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


GRAPHS = {
    "residual": chain(
        30,
        [
            (ADD, [numbers(0, 10), numbers(10, 10)]),
            (RELU, [numbers(30, 10)]),
            (SUBTRACT, [numbers(40, 10), numbers(20, 10)]),
            (RELU, [numbers(50, 10)]),
        ],
        [*numbers(40, 10), *numbers(60, 10), *numbers(40, 10)],
    ),
    "skips": chain(
        30,
        [
            (RELU, [numbers(0, 10)]),
            (SKIP, [numbers(30, 10), numbers(10, 10)]),
            (SKIP, [numbers(40, 10), numbers(20, 10)]),
        ],
        [*numbers(50, 10), *numbers(40, 10), *numbers(30, 10)],
    ),
    "shuffled": chain(
        6, [(RELU, [[3, 1, 0]]), (DROPOUT, [[2, 5]]), (MAX_RELU, [[6, 9]])], [8, 0, 10, 6, 4, 9, 7, 11, 6]
    ),
    "constants and given": chain(
        4,
        [(ADD, [[0, 1, 2, 3], [4, 4, 4, 5]]), (MUL, [[9, 10], [6, 7]]), (SIGMOID, [[4, 6]])],
        numbers(4, 13),
        constants=(0.3, -1.2),
        given=3,
    ),
    "one lane twice": chain(
        2, [(MUL, [[0, 1], [0, 1]]), (SUBTRACT, [[2, 0], [2, 0]]), (MUL, [[4], [4]])], [2, 3, 4, 5, 6, 6]
    ),
    "no steps": chain(3, [], [2, 0]),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph(name: str) -> None:
    check(*around(GRAPHS[name], torch.float32), TOLERANCES[torch.float32])
    check(*around(GRAPHS[name], torch.float64), TOLERANCES[torch.float64])


@st.composite
def graphs(draw: Any) -> Lanes:
    """Any functions of any earlier lanes."""
    sources, constants, given_lanes = draw(st.integers(1, 8)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    known, links = sources + constants + given_lanes, []
    functions = [RELU, MAX_RELU, DROPOUT, SIGMOID, ADD, SUBTRACT, MUL, SKIP]
    for link in draw(st.lists(st.sampled_from(functions), max_size=5)):
        count = draw(st.integers(1, 6))
        pick = st.lists(st.integers(0, known - 1), min_size=count, max_size=count)
        links.append((link, [draw(pick) for _ in range(link.arity)]))
        known += count
    entering = draw(st.lists(st.integers(0, known - 1), min_size=1, max_size=20))
    return chain(sources, links, entering, constants=(0.7, -0.2)[:constants], given=given_lanes)


@settings(max_examples=40, deadline=None)
@given(lanes=graphs(), seed=st.integers(0, 1000))
def test_any_graph(lanes: Lanes, seed: int) -> None:
    check(*around(lanes, torch.float64), TOLERANCES[torch.float64], seed)


def test_equal_bits_twice() -> None:
    layout, weights = rows_of(list(SITES.values()), seed=0)
    first, second = (by_native(layout, weights) for _ in range(2))
    for ours, theirs in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert torch.equal(ours, theirs)


class Guards:
    """Memory between strips of a number that nobody else writes."""

    STRIP, NUMBER = 13, 12345.0

    def __init__(self) -> None:
        self.rooms: list[tuple[Tensor, int]] = []

    def room(self, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        whole = torch.full((count + 2 * self.STRIP,), self.NUMBER, dtype=dtype)
        self.rooms.append((whole, count))
        return whole.as_strided(shape, stride, self.STRIP)

    def holding(self, tensor: Tensor) -> Tensor:
        """A copy with NaN around it, which shows in every result if it is read."""
        found = self.room(tensor.shape, tensor.stride(), tensor.dtype).copy_(tensor)
        whole, count = self.rooms.pop()
        whole[: self.STRIP], whole[self.STRIP + count :] = torch.nan, torch.nan
        return found

    def untouched(self) -> bool:
        strips = [(whole[: self.STRIP], whole[self.STRIP + count :]) for whole, count in self.rooms]
        return bool(strips) and all(bool((strip == self.NUMBER).all()) for pair in strips for strip in pair)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SITES)
def test_nothing_is_read_or_written_outside(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, weights = rows_of([SITES[name], SITES["odd linear"]], seed=0)
    weights = [weight.to(dtype) for weight in weights]
    backend, guards = backend_of(layout, weights), Guards()
    vectors, moments = vectors_of(layout, dtype)
    expected = by_native(layout, weights)
    parameters = [guards.holding(p) for p in (*weights, *vectors)]
    mean, var = (guards.holding(part) for part in moments)
    grads = [guards.holding(grad) for grad in grads_of(layout, weights)]
    monkeypatch.setattr(torch, "empty_like", lambda t: guards.room(t.shape, t.stride(), t.dtype))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: guards.room((size,), (1,), dtype))
    parts, kept = backend.fold(parameters, (mean, var), dtype)
    derivatives = backend.unfold(parameters, kept, grads)
    assert guards.untouched()
    for ours, theirs in zip([*parts, *derivatives], [*expected[0], *expected[1]], strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_may_lie_anywhere() -> None:
    layout, weights = rows_of([Shape(4, 6), Shape(3, 5, (3, 3), channels_last=True)], seed=0)
    backend, (vectors, moments) = backend_of(layout, weights), vectors_of(layout, torch.float32)
    grads = [torch.ones(()).expand(4, 6), grads_of(layout, weights)[1], *(torch.ones(()).expand(n) for n in (4, 3))]
    _, kept = backend.fold([*weights, *vectors], moments, torch.float32)
    alike = [torch.empty_like(w).copy_(grad) for grad, w in zip(grads, [*weights, *vectors], strict=False)]
    assert [g.stride() for g in grads] != [g.stride() for g in alike]
    results = [backend.unfold([*weights, *vectors], kept, by) for by in (grads, alike)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_parameters_may_move_between_the_passes() -> None:
    layout, weights = rows_of([Shape(4, 6), Shape(3, 5, (3, 3))], seed=0)
    backend, (vectors, moments) = backend_of(layout, weights), vectors_of(layout, torch.float32)
    parameters, grads = [*weights, *vectors], grads_of(layout, weights)
    _, kept = backend.fold(parameters, moments, torch.float32)
    expected = backend.unfold(parameters, kept, grads)
    moved = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.fill_(torch.nan)
    assert all(torch.equal(a, b) for a, b in zip(backend.unfold(moved, kept, grads), expected, strict=True))
    turned = [moved[0].t().contiguous().t(), *moved[1:]]
    with pytest.raises(RuntimeError, match="order in memory"):
        backend.unfold(turned, kept, grads)


def test_what_it_cannot_take_is_left_to_torch() -> None:
    layout, [weight] = rows_of([Shape(4, 6)], seed=0)
    vectors = [torch.zeros(4), torch.ones(4)]
    assert make_native(layout, [weight, *vectors], torch.float32) is not None
    assert make_native(layout, [torch.zeros(4, 12)[:, ::2], *vectors], torch.float32) is None
    assert make_native(layout, [weight, torch.zeros(8)[::2], vectors[1]], torch.float32) is None
    assert make_native(layout, [t.bfloat16() for t in (weight, *vectors)], torch.float32) is None
    assert make_native(layout, [t.to("meta") for t in (weight, *vectors)], torch.float32) is None
    unknown = type(RELU)("softsign", RELU.moments)
    inner, weights = around(chain(4, [(unknown, [[0, 1, 2, 3]])], numbers(4, 4)), torch.float32)
    assert make_native(inner, [*weights, *vectors], torch.float32) is None


def test_one_row_may_have_any_stride() -> None:
    layout, [weight] = rows_of([Shape(1, 6)], seed=0)
    shift, scale = torch.randn(1, 5)[:, 0], torch.ones(1, 5)[:, 0]
    backend = make_native(layout, [weight, shift, scale], torch.float32)
    assert backend is not None and shift.stride() == (5,)
    _, moments = vectors_of(layout, torch.float32)
    strange, _ = backend.fold([weight, shift, scale], moments, torch.float32)
    plain, _ = backend_of(layout, [weight]).fold(
        [weight, torch.tensor(shift.tolist()), torch.ones(1)], moments, torch.float32
    )
    assert all(torch.equal(a, b) for a, b in zip(strange, plain, strict=True))


def test_a_parameter_of_another_size_is_refused() -> None:
    layout, weights = rows_of([Shape(4, 6)], seed=0)
    backend, (vectors, moments) = backend_of(layout, weights), vectors_of(layout, torch.float32)
    with pytest.raises(RuntimeError, match="another shape"):
        backend.fold([weights[0], vectors[0][:3], vectors[1]], moments, torch.float32)


def test_one_thread_does_only_what_it_does_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    from varprop.norm.native.backend import worthwhile

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert worthwhile(10**9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert worthwhile(20_000) and not worthwhile(10**6)


def test_numbers_are_those_of_the_sources() -> None:
    codes = re.search(r"enum Code \{([^}]*)\}", (SOURCES / "curves.h").read_text())
    assert codes is not None
    assert tuple(name.strip().lower() for name in codes[1].split(",")) == CODES
    plan = (SOURCES / "plan.h").read_text()
    assert f"KNOTS = {KNOTS}, GRIDS = {GRIDS}, LONGEST_RULE = {LONGEST_RULE}" in plan


@pytest.mark.parametrize("where", ("shift", "scale", "weight"))
def test_nan_is_not_hidden(where: str) -> None:
    lanes = chain(4, [(SIGMOID, [[0, 1, 2, 3]])], numbers(4, 4))
    layout, [weight] = around(lanes, torch.float32)
    values = {"weight": weight, "shift": torch.zeros(4), "scale": torch.ones(4)}
    values[where].view(-1)[0] = torch.nan
    parts, _ = backend_of(layout, [weight]).fold(list(values.values()), None, torch.float32)
    assert parts[0].isnan().any() and parts[1].isnan().any()
