"""The moment pass over whole graphs: chains, sums, products, concatenations, lanes that enter many times."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from varprop.norm.backends import triton as kernels
from varprop.norm.backends.triton.moments import component_labels, templates_of

from .functions import ADD, COUPLED, DROPOUT, MAX_RELU, MUL, RELU, SIGMOID, SKIP, SLOPE, SOFTSIGN, SUBTRACT
from .reference import chain, error, run_lanes

pytestmark = pytest.mark.kernels


def inputs_of(lanes, seed=0):
    """Shift, scale, given means and variances, and gradients of the entering means and variances."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (lanes.sources, lanes.sources, lanes.external, lanes.external, len(lanes.entering), len(lanes.entering))
    shift, scale, mean, var, d_mean, d_var = (torch.randn(size, generator=generator) for size in sizes)
    return [shift, 0.5 + scale.abs(), mean, 0.1 + var.abs()], [d_mean, d_var]


def by_kernels(lanes, device, seed=0):
    inputs, grads = ([x.to(device) for x in part] for part in inputs_of(lanes, seed))
    moments, shift_scale = kernels.TritonMoments(lanes, device), torch.stack(inputs[:2])
    entering, saved = moments.forward(shift_scale, tuple(inputs[2:]) if lanes.external else None, True)
    by_source, *by_external = moments.backward(shift_scale, saved, torch.stack(grads), torch.zeros_like(shift_scale))
    return [*entering, *by_source, *by_external]


def by_autograd(lanes, seed=0):
    inputs, grads = inputs_of(lanes, seed)
    leaves = [x.double().requires_grad_() for x in inputs]
    results = run_lanes(lanes, *leaves)
    loss = sum((x * grad.double()).sum() for x, grad in zip(results, grads, strict=True))
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*results, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))]


def check(lanes, device, seed=0):
    for found, expected in zip(by_kernels(lanes, device, seed), by_autograd(lanes, seed), strict=True):
        assert error(found, expected) < 1e-6


def numbers(start, count):
    return list(range(start, start + count))


def test_residual_chain(device):
    """Sources 0..9 are the trunk, 10..19 and 20..29 the branches: relu(relu(a + b) + c), every sum entering."""
    links = [
        (ADD, [numbers(0, 10), numbers(10, 10)]),  # 30
        (RELU, [numbers(30, 10)]),  # 40
        (SUBTRACT, [numbers(40, 10), numbers(20, 10)]),  # 50
        (RELU, [numbers(50, 10)]),  # 60
    ]
    check(chain(30, links, [*numbers(40, 10), *numbers(60, 10), *numbers(40, 10)]), device)


def test_skip_connections(device):
    """As above, but every sum has a rectified term, and its rectifier knows it."""
    links = [
        (RELU, [numbers(0, 10)]),  # 30
        (SKIP, [numbers(30, 10), numbers(10, 10)]),  # 40
        (SKIP, [numbers(40, 10), numbers(20, 10)]),  # 50
    ]
    check(chain(30, links, [*numbers(50, 10), *numbers(30, 10), *numbers(40, 10)]), device)


def test_learned_slopes(device):
    """Sources 0..9, slopes 10..19 given: relu with a slope below zero, twice with the same ones."""
    links = [(SLOPE, [numbers(0, 10), numbers(10, 10)]), (SLOPE, [numbers(20, 10), numbers(10, 10)])]
    check(chain(10, links, [*numbers(20, 10), *numbers(30, 10)], given=10), device)


def test_concatenation_and_shuffled_channels(device):
    """Relu of some lanes and dropout of others enter side by side, in any order, with bare sources."""
    links = [(RELU, [[3, 1, 0]]), (DROPOUT, [[2, 5]]), (MAX_RELU, [[6, 9]])]
    check(chain(6, links, [8, 0, 10, 6, 4, 9, 7, 11, 6]), device)


def test_one_lane_enters_at_every_position(device):
    """After flattening every channel enters 49 times, some also elsewhere."""
    links = [(RELU, [numbers(0, 5)])]
    repeated = torch.arange(5, 10).repeat_interleave(49).tolist()
    check(chain(5, links, [*repeated, 0, 7, 7]), device)


def test_constants_and_given_lanes(device):
    """Constants are shared by all components without joining them; given lanes get a gradient."""
    # sources 0..3, constants 4, 5, given 6..8
    links = [(ADD, [[0, 1, 2, 3], [4, 4, 4, 5]]), (MUL, [[9, 10], [6, 7]]), (SIGMOID, [[4, 6]])]
    lanes = chain(4, links, [4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16], constants=(0.3, -1.2), given=3)
    assert len(set(component_labels(lanes)[:4])) == 4
    check(lanes, device)


def test_arguments_that_are_one_lane(device):
    """x x and x - x / 2 read their lane twice; a square of a square reads a computed one twice."""
    links = [(MUL, [[0, 1], [0, 1]]), (SUBTRACT, [[2, 0], [2, 0]]), (MUL, [[4], [4]])]
    check(chain(2, links, [2, 3, 4, 5, 6, 6]), device)


def test_one_lane_read_by_many_of_its_component(device):
    """A gate of one lane multiplies all channels, which joins them into one component."""
    links = [(SIGMOID, [[0]]), (MUL, [numbers(1, 20), [21] * 20]), (RELU, [numbers(22, 20)])]
    lanes = chain(21, links, numbers(22, 40))
    assert len(set(component_labels(lanes))) == 1
    check(lanes, device)


def test_more_components_than_a_program_takes(device):
    """Three hundred equal chains beside a thousand idle lanes."""
    links = [(RELU, [numbers(0, 300)]), (ADD, [numbers(1300, 300), numbers(300, 300)])]
    lanes = chain(1300, links, [*numbers(1600, 300), *numbers(700, 600)])
    parts = templates_of(lanes)
    assert [len(part.instructions) for part in parts] == [2, 0]
    assert [len(part.members) for part in parts] == [300, 700]
    check(lanes, device)


def launches_and_steps_by_torch(lanes, device):
    tables = kernels.TritonMoments(lanes, device).tables
    return len(tables.phases), [[step.function.name for step in steps] for steps in tables.by_torch]


def test_a_function_without_a_kernel_is_evaluated_between_two_launches(device):
    """As `test_skip_connections`, with a softsign in the first branch and beside all of them."""
    links = [
        (RELU, [numbers(0, 10)]),  # 30
        (SOFTSIGN, [numbers(10, 20)]),  # 40: of both branches
        (SKIP, [numbers(30, 10), numbers(40, 10)]),  # 60
        (SKIP, [numbers(60, 10), numbers(20, 10)]),  # 70
    ]
    lanes = chain(30, links, [*numbers(70, 10), *numbers(30, 30), *numbers(60, 10)])
    assert launches_and_steps_by_torch(lanes, device) == (2, [["softsign"]])
    check(lanes, device)


def test_functions_without_a_kernel_that_follow_from_each_other(device):
    """softsign(relu(softsign(x))), then a function of it and of x, and a chain beside that needs none of them."""
    links = [
        (SOFTSIGN, [numbers(0, 7)]),  # 14
        (RELU, [numbers(14, 7)]),  # 21
        (SOFTSIGN, [numbers(21, 7)]),  # 28
        (COUPLED, [numbers(28, 7), numbers(0, 7)]),  # 35
        (SIGMOID, [numbers(7, 7)]),  # 42
        (ADD, [numbers(42, 7), numbers(35, 7)]),  # 49
    ]
    lanes = chain(14, links, [*numbers(49, 7), *numbers(14, 14), *numbers(42, 3)])
    assert launches_and_steps_by_torch(lanes, device) == (4, [["softsign"], ["softsign"], ["coupled"]])
    check(lanes, device)


def test_nothing_but_functions_without_a_kernel(device):
    check(chain(5, [(SOFTSIGN, [numbers(0, 5)])], numbers(5, 5)), device)
    check(chain(4, [(COUPLED, [[0, 4, 6], [1, 5, 6]])], [7, 8, 9, 9], constants=(0.5, -0.4), given=1), device)


def test_no_steps_and_nothing_that_enters(device):
    check(chain(3, [], [2, 0]), device)
    check(chain(0, [], [1, 0, 2], constants=(1.0,), given=2), device)
    d_shift, d_scale = by_kernels(chain(2, [(RELU, [[0]])], []), device)[2:4]
    assert (d_shift == 0).all() and (d_scale == 0).all()


def test_equal_bits_twice(device):
    lanes = chain(40, [(RELU, [numbers(0, 40)]), (ADD, [numbers(40, 20), numbers(60, 20)])], numbers(40, 60) * 3)
    for first, second in zip(by_kernels(lanes, device), by_kernels(lanes, device), strict=True):
        assert torch.equal(first, second)


@st.composite
def graphs(draw):
    """Any functions of any earlier lanes."""
    sources, constants, given_lanes = draw(st.integers(1, 8)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    known, links = sources + constants + given_lanes, []
    for function in draw(
        st.lists(st.sampled_from([RELU, MAX_RELU, DROPOUT, ADD, SUBTRACT, MUL, SOFTSIGN, COUPLED]), max_size=5)
    ):
        count = draw(st.integers(1, 6))
        pick = st.lists(st.integers(0, known - 1), min_size=count, max_size=count)
        links.append((function, [draw(pick) for _ in range(function.arity)]))
        known += count
    entering = draw(st.lists(st.integers(0, known - 1), min_size=1, max_size=20))
    return chain(sources, links, entering, constants=(0.7, -0.2)[:constants], given=given_lanes)


@settings(max_examples=25, deadline=None)
@given(lanes=graphs(), seed=st.integers(0, 1000))
def test_any_graph(lanes, seed, device):
    for found, expected in zip(by_kernels(lanes, device, seed), by_autograd(lanes, seed), strict=True):
        assert error(found, expected) < 1e-5
