"""The tables: built once, renewed when weights move, never inside a capture; and the backend made of all passes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from varprop.norm.backends import torch as by_torch
from varprop.norm.backends import triton as kernels
from varprop.norm.fold import reference
from varprop.norm.fold.cuda_replay import runs_on_device_alone
from varprop.norm.fold.dispatch import Backend, layouts_with
from varprop.norm.fold.layout import Layout, Rows

from .functions import ADD, RELU, SOFTSIGN
from .reference import Shape, chain, error, make_layout

pytestmark = pytest.mark.kernels


def vectors(layout, device):
    return [torch.rand(2, size, device=device) + 0.5 for size in (layout.row_count, len(layout.channels.entering))]


def test_tables_follow_weights_that_move(device):
    layout, weights = make_layout([Shape(6, 16), Shape(3, 4, (3, 3))])
    weights = [w.to(device) for w in weights]
    rows, inputs = kernels.TritonRows(layout, device), vectors(layout, device)
    tables = rows.tables(weights)
    assert rows.tables(weights) is tables
    moved = [2.0 * weights[0], -weights[1]]
    assert rows.tables(moved).columns is tables.columns
    folded, *_ = rows.forward(moved, *inputs, torch.float32)
    fresh, *_ = kernels.TritonRows(layout, device).forward(moved, *inputs, torch.float32)
    assert torch.equal(folded, fresh)
    old, *_ = rows.forward(weights, *inputs, torch.float32)
    assert not torch.equal(old[96:], folded[96:])


def test_tables_follow_another_order_in_memory(device):
    layout, (weight,) = make_layout([Shape(4, 8, (3, 3))])
    weight = weight.to(device)
    rows, inputs = kernels.TritonRows(layout, device), vectors(layout, device)
    contiguous, *_ = rows.forward([weight], *inputs, torch.float32)
    last = weight.contiguous(memory_format=torch.channels_last)
    turned, *_ = rows.forward([last], *inputs, torch.float32)
    assert error(torch.as_strided(turned, last.shape, last.stride()), contiguous.view_as(weight).cpu()) < 1e-6


def test_tables_are_not_built_while_capturing(monkeypatch, device):
    layout, weights = make_layout([Shape(6, 16)])
    weights = [w.to(device) for w in weights]
    rows = kernels.TritonRows(layout, device)
    rows.tables(weights)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    rows.tables(weights)
    with pytest.raises(RuntimeError, match="run one step before the capture"):
        rows.tables([w.clone() for w in weights])
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        kernels.TritonRows(layout, device)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        kernels.TritonMoments(layout.channels, device)


def test_weights_that_do_not_fit_are_named(device):
    layout, (weight,) = make_layout([Shape(4, 8, (3, 3))])
    gaps = torch.zeros(4, 16, 3, 3, device=device)[:, ::2]
    turned = weight.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2).to(device)
    assert kernels.fits(layout, [weight.to(device)])
    for bad in (gaps, turned):
        assert not kernels.fits(layout, [bad])
        with pytest.raises(ValueError, match="strides"):
            kernels.TritonRows(layout, device).tables([bad])


def test_whether_weights_fit_can_be_asked_without_their_data():
    """torch.compile asks for the form of the results, and has no addresses."""
    layout, weights = make_layout([Shape(6, 16), Shape(3, 4, (3, 3))])
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(weight) for weight in weights]
        assert kernels.fits(layout, fakes)
        assert not kernels.fits(layout, [fakes[0], fakes[1].transpose(2, 3).transpose(0, 1)])


def test_a_chain_too_long_to_run_in_sequence_is_left_to_torch():
    gate = chain(5001, [(ADD, [list(range(1, 5001)), [0] * 5000])], [5001])
    assert not kernels.supports(Layout(gate, ()))
    assert kernels.supports(Layout(chain(5000, [(RELU, [list(range(5000))])], [0]), ()))


def network(centred=False, function=RELU):
    """Two layers: the data enters the first, a function of its outputs the second, at four taps with a spread.

    Drawn from a seed: two weights of a centred row that happen to be close leave few digits of their difference.
    """
    torch.manual_seed(0)
    lanes = chain(5, [(function, [[0, 1, 2]])], [5, 6, 7, 8, 9], constants=(0.4, -0.3))
    spread = torch.tensor([[0.5, 0.1], [1.0, -0.2], [1.0, 0.0], [0.5, 0.3]], dtype=torch.float64)
    rows = (
        Rows(3, 1, 2, torch.ones(1, 1, dtype=torch.float64), 0, 0, 0, centred=centred),
        Rows(2, 1, 3, spread, 3, 2, 6, centred=centred),
    )
    return Layout(lanes, rows), [torch.randn(3, 2), torch.randn(2, 3, 4)]


def with_kernels(layout, weights, moments_by_kernels=True):
    """Rows by kernels, moments by kernels or by torch; and the sizes of what is saved."""
    device = weights[0].device
    if moments_by_kernels:
        moments, saved = kernels.TritonMoments(layout.channels, device), kernels.moments_saved(layout)
    else:
        moments, saved = by_torch.TorchMoments(layout.channels, device, torch.float32), by_torch.moments_saved(layout)
    sizes = [(2 * layout.row_count, torch.float32), (2 * len(layout.channels.entering), torch.float32)]
    sizes += [*saved, *kernels.rows_saved(layout)]
    rows, layouts = kernels.TritonRows(layout, device), layouts_with(weights, [3, 2, 3, 2])
    return Backend(moments, rows, len(saved), torch.float32, layouts), sizes


def plain(layout, weights):
    """Both passes by torch in float64."""
    moments = by_torch.TorchMoments(layout.channels, weights[0].device, torch.float64)
    rows, saved = by_torch.TorchRows(layout, weights, torch.float64), by_torch.moments_saved(layout)
    return Backend(moments, rows, len(saved), torch.float64, layouts_with(weights, [3, 2, 3, 2]))


@pytest.mark.parametrize("centred", (False, True))
@pytest.mark.parametrize("function", (RELU, SOFTSIGN), ids=("relu", "softsign"))
@pytest.mark.parametrize("moments_by_kernels", (True, False))
def test_backend_agrees_with_torch_and_the_reference(moments_by_kernels, function, centred, device):
    layout, weights = network(centred, function)
    shift_scale = torch.stack([torch.randn(5), torch.rand(5) + 0.5])
    vectors = [part for row in shift_scale for part in row.split([3, 2])]
    exact = [tensor.double() for tensor in (*weights, *vectors)]
    doubles = plain(layout, exact[:2])
    expected = doubles.forward(exact, None, torch.float64, True)
    single = [tensor.to(device) for tensor in (*weights, *vectors)]
    ours, sizes = with_kernels(layout, single[:2], moments_by_kernels)
    found = ours.forward(single, None, torch.float32, True)
    assert [(x.numel(), x.dtype) for x in found[2]] == sizes
    *folded, first_bias, second_bias = reference.fold_parts(layout, None, exact)
    definition = torch.cat([weight.flatten() for weight in folded]), torch.cat([first_bias, second_bias])
    for n in (0, 1):
        assert error(expected[n], definition[n]) < 1e-12 and error(found[n], definition[n]) < 1e-6
    grads = torch.randn(layout.weight_count), torch.randn(layout.row_count)
    e_grads = doubles.backward(exact[:2], expected[2], *(g.double() for g in grads))
    f_grads = ours.backward(single[:2], [x.flatten() for x in found[2]], *(g.to(device) for g in grads))
    for got, want in zip(f_grads, e_grads, strict=True):
        assert error(got, want) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("function", (RELU, SOFTSIGN), ids=("relu", "softsign"))
def test_everything_runs_in_a_captured_graph(function):
    layout, weights = network(function=function)
    weights = [w.cuda() for w in weights]
    shift_scale = torch.rand(2, 5, device="cuda") + 0.5
    backend, _ = with_kernels(layout, weights)
    grads = torch.randn(layout.weight_count, device="cuda"), torch.randn(layout.row_count, device="cuda")

    def step():
        vectors = [part for row in shift_scale for part in row.split([3, 2])]
        folded, bias, saved = backend.forward([*weights, *vectors], None, torch.float32, True)
        return [folded, bias, *backend.backward(weights, saved, *grads)]

    step()
    torch.cuda.synchronize()
    assert runs_on_device_alone(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    weights[0].mul_(-3.0)
    shift_scale.mul_(1.5)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
