"""The tables: built once, renewed when weights move, never inside a capture; and the backend made of all passes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from varprop.norm.backends import triton as kernels
from varprop.norm.backends.torch import TorchBackend
from varprop.norm.fold.layout import Layout, Rows

from .functions import ADD, RELU
from .reference import Shape, chain, error, make_layout

pytestmark = pytest.mark.kernels


def vectors(layout, device):
    rows, entering = layout.row_count, len(layout.lanes.entering)
    return [torch.rand(size, device=device) + 0.5 for size in (rows, rows, entering, entering)]


def test_tables_follow_weights_that_move(device):
    layout, weights = make_layout([Shape(6, 16), Shape(3, 4, (3, 3))])
    weights = [w.to(device) for w in weights]
    tables, given = kernels.TritonTables(layout, device), vectors(layout, device)
    kept = tables.rows(weights)
    assert tables.rows(weights) is kept
    moved = [2.0 * weights[0], -weights[1]]
    assert tables.rows(moved).columns is kept.columns
    folded, *_ = kernels.rows_forward(layout, tables, moved, *given, torch.float32)
    fresh, *_ = kernels.rows_forward(layout, kernels.TritonTables(layout, device), moved, *given, torch.float32)
    assert torch.equal(folded, fresh)
    old, *_ = kernels.rows_forward(layout, tables, weights, *given, torch.float32)
    assert not torch.equal(old[96:], folded[96:])


def test_tables_follow_another_order_in_memory(device):
    layout, (weight,) = make_layout([Shape(4, 8, (3, 3))])
    weight = weight.to(device)
    tables, given = kernels.TritonTables(layout, device), vectors(layout, device)
    plain, *_ = kernels.rows_forward(layout, tables, [weight], *given, torch.float32)
    last = weight.contiguous(memory_format=torch.channels_last)
    turned, *_ = kernels.rows_forward(layout, tables, [last], *given, torch.float32)
    assert error(torch.as_strided(turned, last.shape, last.stride()), plain.view_as(weight).cpu()) < 1e-6


def test_tables_are_not_built_while_capturing(monkeypatch, device):
    layout, weights = make_layout([Shape(6, 16)])
    weights = [w.to(device) for w in weights]
    tables = kernels.TritonTables(layout, device)
    tables.rows(weights)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tables.rows(weights)
    with pytest.raises(RuntimeError, match="run one step before the capture"):
        tables.rows([w.clone() for w in weights])
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        kernels.TritonTables(layout, device)


def test_weights_that_do_not_fit_are_named(device):
    layout, (weight,) = make_layout([Shape(4, 8, (3, 3))])
    gaps = torch.zeros(4, 16, 3, 3, device=device)[:, ::2]
    turned = weight.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2).to(device)
    assert kernels.fits(layout, [weight.to(device)])
    for bad in (gaps, turned):
        assert not kernels.fits(layout, [bad])
        with pytest.raises(ValueError, match="strides"):
            kernels.TritonTables(layout, device).rows([bad])


def test_whether_weights_fit_can_be_asked_without_their_data():
    """torch.compile asks for the form of the results, and has no addresses."""
    layout, weights = make_layout([Shape(6, 16), Shape(3, 4, (3, 3))])
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(weight) for weight in weights]
        assert kernels.fits(layout, fakes)
        assert not kernels.fits(layout, [fakes[0], fakes[1].transpose(2, 3).transpose(0, 1)])


def test_a_chain_too_long_to_run_in_sequence_is_not_supported():
    gate = chain(5001, [(ADD, [list(range(1, 5001)), [0] * 5000])], [5001])
    assert not kernels.supported(Layout(gate, ()))
    assert kernels.supported(Layout(chain(5000, [(RELU, [list(range(5000))])], [0]), ()))


def network(centred=False):
    """Two layers: the data enters the first, relu of its outputs the second, at four taps with a spread.

    Drawn from a seed: two weights of a centred row that happen to be close leave few digits of their difference.
    """
    torch.manual_seed(0)
    lanes = chain(5, [(RELU, [[0, 1, 2]])], [5, 6, 7, 8, 9], constants=(0.4, -0.3))
    spread = torch.tensor([[0.5, 0.1], [1.0, -0.2], [1.0, 0.0], [0.5, 0.3]], dtype=torch.float64)
    rows = (
        Rows(3, 1, 2, torch.ones(1, 1, dtype=torch.float64), 0, 0, 0, centred=centred),
        Rows(2, 1, 3, spread, 3, 2, 6, centred=centred),
    )
    return Layout(lanes, rows), [torch.randn(3, 2), torch.randn(2, 3, 4)]


@pytest.mark.parametrize("centred", (False, True))
def test_backend_agrees_with_plain_torch(centred, device):
    layout, weights = network(centred)
    shift_scale = torch.stack([torch.randn(5), torch.rand(5) + 0.5])
    exact = [w.double() for w in weights], shift_scale.double()
    plain = TorchBackend(layout, exact[0], torch.float64)
    expected = plain.forward(*exact, None, torch.float64, True)
    single = [w.to(device) for w in weights], shift_scale.to(device)
    ours = kernels.TritonBackend(layout, single[0])
    found = ours.forward(*single, None, torch.float32, True)
    assert [(len(x), x.dtype) for x in found[2]] == kernels.kept_sizes(layout)
    assert error(found[0], expected[0]) < 1e-6 and error(found[1], expected[1]) < 1e-6
    grads = torch.randn(layout.weight_count), torch.randn(layout.row_count)
    e_grads = plain.backward(*exact, expected[2], *(g.double() for g in grads))
    f_grads = ours.backward(*single, found[2], *(g.to(device) for g in grads))
    for got, want in zip(f_grads, e_grads, strict=True):
        assert error(got, want) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
def test_everything_runs_in_a_captured_graph():
    layout, weights = network()
    weights = [w.cuda() for w in weights]
    shift_scale = torch.rand(2, 5, device="cuda") + 0.5
    backend = kernels.TritonBackend(layout, weights)
    grads = torch.randn(layout.weight_count, device="cuda"), torch.randn(layout.row_count, device="cuda")

    def step():
        folded, bias, kept = backend.forward(weights, shift_scale, None, torch.float32, True)
        return [folded, bias, *backend.backward(weights, shift_scale, kept, *grads)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    weights[0].mul_(-3.0)
    shift_scale.mul_(1.5)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
