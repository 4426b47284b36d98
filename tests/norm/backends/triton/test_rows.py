"""The fold of rows and its gradients against float64 autograd, for all shapes and orders in memory."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from varprop.norm.backends import triton as kernels
from varprop.norm.backends.triton import rows as row_tables

from .conftest import INTERPRETED
from .reference import Shape, error, fold, like_memory, make_layout

pytestmark = pytest.mark.kernels

# Of a number; the interpreter cuts bits off where the GPU rounds.
ROUNDING = {
    torch.float64: 0.0,
    torch.float32: 1e-6,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0 ** (-7 if INTERPRETED else -8),
}


def vectors_of(layout, seed=0):
    """Scale, shift, mean and var."""
    generator = torch.Generator().manual_seed(seed)
    rows, entering = layout.row_count, len(layout.channels.entering)
    scale, shift = torch.rand(rows, generator=generator) + 0.5, torch.randn(rows, generator=generator)
    return [scale, shift, torch.randn(entering, generator=generator), torch.rand(entering, generator=generator) + 0.1]


def grads_of(layout, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in (layout.weight_count, layout.row_count)]


def by_kernels(layout, weights, dtype, device):
    """Folded weights and biases, then the gradients of weights, scale, mean and var."""
    scale, shift, mean, var = (x.to(device) for x in vectors_of(layout))
    weights = [weight.to(device) for weight in weights]
    rows, shift_scale, entering = (
        kernels.TritonRows(layout, device),
        torch.stack([shift, scale]),
        torch.stack([mean, var]),
    )
    folded, bias, saved = rows.forward(weights, shift_scale, entering, dtype)
    grads = [x.to(device) for x in grads_of(layout, dtype)]
    by_weight, by_scale, by_entering = rows.backward(weights, shift_scale, saved, entering, *grads)
    return [x.cpu() for x in (folded, bias, by_weight, by_scale, *by_entering)]


def by_autograd(layout, weights, dtype):
    """The same; weights as lists of tensors."""
    leaves, vectors = [w.double().clone().requires_grad_() for w in weights], vectors_of(layout)
    vectors = [x.double().requires_grad_() for x in vectors]
    folded, bias = fold(layout, leaves, *vectors)
    flat, grad_bias = (x.double() for x in grads_of(layout, dtype))
    parts = zip(layout.rows, folded, weights, strict=True)
    loss = (bias * grad_bias).sum() + sum((like_memory(flat, r, w) * f).sum() for r, f, w in parts)
    loss.backward()
    scale, _, mean, var = vectors  # that of the shift is that of the bias
    return folded, bias, [leaf.grad for leaf in leaves], scale.grad, mean.grad, var.grad


def check(shapes, device, dtype=torch.float32, seed=0):
    layout, weights = make_layout(shapes, seed)
    folded, bias, d_weight, *d_vectors = by_kernels(layout, weights, dtype, device)
    e_folded, e_bias, e_d_weight, *e_d_vectors = by_autograd(layout, weights, dtype)
    assert folded.dtype == bias.dtype == dtype
    for rows, weight, expected, e_grad in zip(layout.rows, weights, e_folded, e_d_weight, strict=True):
        found = like_memory(folded, rows, weight).double()
        assert ((found - expected).abs() <= ROUNDING[dtype] * expected.abs() + 1e-5 * expected.abs().max()).all()
        # Its two parts cancel along the weight: all of them in a row of one, where nothing but rounding is left.
        direct = like_memory(grads_of(layout, dtype)[0], rows, weight).double() * (expected.detach() / weight.double())
        limit = 1e-5 + ROUNDING[weight.dtype]
        assert error(like_memory(d_weight, rows, weight), e_grad, float(direct.norm())) < limit
    assert error(bias, e_bias) < 1e-5 + ROUNDING[dtype]
    # Centred weights that all meet one channel add up to zero: of the derivative by its mean, only rounding is left.
    alone = any(rows.centred and rows.channels == 1 for rows in layout.rows)
    least = float(e_d_vectors[0].norm()) if alone else 1e-30
    for found, expected in zip(d_vectors, e_d_vectors, strict=True):
        assert found.dtype == torch.float32
        assert error(found, expected, least) < 1e-5


SITES = {
    "linear": Shape(20, 24),
    "one": Shape(1, 1),
    "odd linear": Shape(5, 7),
    "long rows": Shape(3, 2000),
    "long odd rows": Shape(2, 1111),
    "rows longer than a tile": Shape(2, 9000),
    "conv, rows longer than a tile": Shape(3, 600, (3, 3), padded=True),
    "channels last, rows longer than a tile": Shape(3, 600, (3, 3), padded=True, channels_last=True),
    "channels last, rows in pieces": Shape(3, 1200, (3, 3), padded=True, channels_last=True),
    "several tiles of rows": Shape(40, 500, (1, 1), channels_last=True),
    "many short rows": Shape(150, 3),
    "conv": Shape(5, 7, (3, 3)),
    "padded": Shape(5, 24, (3, 3), padded=True),
    "wide padded": Shape(4, 150, (3, 3), padded=True),
    "channels last": Shape(4, 150, (3, 3), padded=True, channels_last=True),
    "aligned channels last": Shape(4, 72, (3, 3), padded=True, channels_last=True),
    "one tap, channels last": Shape(8, 16, (1, 1), channels_last=True),
    "seven taps": Shape(6, 3, (7, 7), padded=True),
    "seven taps, channels last": Shape(3, 16, (7, 7), channels_last=True),
    "more taps than a tile": Shape(3, 3, (9, 8), padded=True),
    "more taps than a tile, channels last": Shape(2, 20, (9, 8), padded=True, channels_last=True),
    "one dimension": Shape(4, 40, (3,)),
    "three dimensions": Shape(4, 5, (3, 2, 2), padded=True),
    "grouped": Shape(4, 8, (3, 3), groups=3, padded=True),
    "grouped linear rows": Shape(40, 70, (1,), groups=2),
    "few channels in groups": Shape(3, 2, (3, 3), groups=5),
    "depthwise": Shape(1, 1, (3, 3), groups=70, padded=True),
    "depthwise, several rows": Shape(2, 1, (5,), groups=33),
    "depthwise, more rows than a tile": Shape(3, 1, (7, 7), groups=11, padded=True),
    "transposed depthwise": Shape(1, 1, (3, 3), groups=9, transposed=True, padded=True),
    "depthwise, channels last": Shape(1, 1, (3, 3), groups=8, channels_last=True),
    "transposed": Shape(5, 6, (3, 3), transposed=True, padded=True),
    "transposed in groups": Shape(2, 3, (3, 3), groups=5, transposed=True, padded=True),
    "transposed, one tap": Shape(20, 30, (1, 1), transposed=True),
    "transposed, channels last": Shape(8, 6, (2, 2), transposed=True, channels_last=True),
}


@pytest.mark.parametrize("name", SITES)
def test_site(name, device):
    check([SITES[name]], device)


CENTRED = (  # every way in which a block takes its rows
    "odd linear",
    "long odd rows",
    "rows longer than a tile",
    "channels last, rows longer than a tile",
    "channels last, rows in pieces",
    "conv",
    "wide padded",
    "aligned channels last",
    "seven taps",
    "more taps than a tile, channels last",
    "grouped",
    "few channels in groups",
    "depthwise",
    "depthwise, several rows",
    "transposed depthwise",
    "transposed in groups",
    "transposed, channels last",
)


@pytest.mark.parametrize("name", CENTRED)
def test_centred_site(name, device):
    check([centred(SITES[name])], device)


def centred(shape):
    return replace(shape, centred=True)


@pytest.mark.parametrize("name", ("odd linear", "conv", "padded", "aligned channels last", "depthwise", "transposed"))
def test_a_mean_of_a_thousand_times_the_spread_costs_no_digits(name, device):
    layout, (weight,) = make_layout([centred(SITES[name])])
    weight += 1000
    found = by_kernels(layout, [weight], torch.float32, device)
    expected = by_autograd(layout, [weight], torch.float32)
    rows = layout.rows[0]
    assert error(like_memory(found[0], rows, weight), expected[0][0]) < 1e-5
    assert error(found[1], expected[1]) < 1e-5
    assert error(like_memory(found[2], rows, weight), expected[2][0]) < 1e-5


@pytest.mark.parametrize("name", ("odd linear", "conv", "padded", "aligned channels last", "depthwise", "transposed"))
def test_equal_weights_of_a_centred_row_give_its_shift(name, device):
    layout, (weight,) = make_layout([centred(SITES[name])])
    weight.fill_(0.1)
    folded, bias, d_weight, d_scale, *_ = by_kernels(layout, [weight], torch.float32, device)
    assert not any(bool(part.any()) for part in (folded, d_weight, d_scale))
    assert torch.equal(bias, vectors_of(layout)[1])


@pytest.mark.parametrize("at_once", (1, 10))
def test_blocks_that_take_several_tiles_in_turn(at_once, device, monkeypatch):
    monkeypatch.setattr(row_tables, "AT_ONCE", at_once)
    sites = [Shape(40, 500, (1, 1), channels_last=True), Shape(7, 300, (3, 3), padded=True, channels_last=True)]
    sites += [Shape(30, 100, groups=2), Shape(40, 20, (3, 3), padded=True, channels_last=True)]
    layout, weights = make_layout(sites)
    tables = kernels.TritonRows(layout, torch.device("cpu")).tables(weights)
    for launches in (tables.forward, tables.backward):
        assert max(body.rounds for launch in launches for body in launch.bodies) > 1
    check(sites, device)
    check([centred(site) for site in sites], device)


def test_sites_of_all_kinds_in_one_layout(device):
    names = ("linear", "padded", "odd linear", "depthwise", "channels last", "transposed", "one dimension", "conv")
    sites = [SITES[name] for name in names]
    check(sites, device)
    check([replace(site, centred=n % 2 == 0) for n, site in enumerate(sites)], device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_results(dtype, device):
    sites = [Shape(16, 64), Shape(9, 5, (3, 3), padded=True), Shape(1, 1, (3,), groups=20)]
    check(sites, device, dtype)
    check([centred(site) for site in sites], device, dtype)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_dtype(weight, device):
    sites = [Shape(16, 64, dtype=weight), Shape(4, 5, (3, 3), padded=True, dtype=weight)]
    check(sites, device)
    check([centred(site) for site in sites], device)


def test_float64_weights_are_summed_in_float64(device):
    layout, weights = make_layout([Shape(6, 90, dtype=torch.float64)])
    found, expected = by_kernels(layout, weights, torch.float64, device), by_autograd(layout, weights, torch.float64)
    assert error(found[0].view(6, 90), expected[0][0]) < 1e-14
    assert error(found[2].view(6, 90), expected[2][0]) < 1e-14


def test_a_transposed_view_is_read_in_place(device):
    layout, (weight,) = make_layout([Shape(12, 20)])
    weight = weight.t().contiguous().t()
    folded, *_ = by_kernels(layout, [weight], torch.float32, device)
    expected, *_ = by_autograd(layout, [weight], torch.float32)
    assert error(like_memory(folded, layout.rows[0], weight), expected[0]) < 1e-6


def test_equal_bits_twice(device):
    layout, weights = make_layout([SITES["linear"], SITES["wide padded"], SITES["depthwise"]])
    pairs = zip(*(by_kernels(layout, weights, torch.bfloat16, device) for _ in range(2)), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_gradient_is_orthogonal_to_the_weight(device):
    """A row's normalization does not see its length."""
    layout, (weight,) = make_layout([SITES["padded"]])
    d_weight = by_kernels(layout, [weight], torch.float32, device)[2]
    d_weight = like_memory(d_weight, layout.rows[0], weight).flatten(1)
    rows = weight.flatten(1)
    assert ((rows * d_weight).sum(1).abs() <= 1e-5 * rows.norm(dim=1) * d_weight.norm(dim=1)).all()


@st.composite
def shapes(draw):
    """Up to about two thousand weights a site."""
    kernel = draw(st.sampled_from([(), (1, 1), (3,), (3, 3), (2, 3), (5, 5)]))
    taps = int(torch.Size(kernel).numel())
    groups = draw(st.sampled_from([1, 1, 2, 7]))
    channels = draw(st.integers(1, max(1, 2000 // (taps * groups))))
    per_group = draw(st.integers(1, max(1, min(40, 4000 // (taps * channels * groups)))))
    flat = len(kernel) < 2
    return Shape(
        per_group,
        channels,
        kernel,
        groups,
        transposed=bool(kernel) and draw(st.booleans()),
        channels_last=not flat and draw(st.booleans()),
        padded=bool(kernel) and draw(st.booleans()),
        centred=channels * taps > 1 and draw(st.booleans()),
    )


@settings(max_examples=20, deadline=None)
@given(sites=st.lists(shapes(), min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_any_layout(sites, seed, device):
    check(sites, device, seed=seed)
