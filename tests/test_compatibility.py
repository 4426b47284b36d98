"""The table of what a normalized model works with is what the tests say; and the rows that have no test elsewhere."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import varprop as vp
from tests.compatibility import PAGE, ROWS, Proof, page, proofs, proofs_in

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


@functools.cache
def start() -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return vp.normalize(plain, vp.Moments(torch.zeros(1, 5), torch.ones(1, 5)))


def model() -> nn.Module:
    return copy.deepcopy(start())


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model(X).square().mean().backward()
    optimizer.step()
    model.zero_grad()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_table_is_what_the_tests_say() -> None:
    assert PAGE.read_text("utf-8") == page(proofs()), "run `python -m tests.compatibility`"


def test_every_row_is_proved_and_every_proof_has_a_row() -> None:
    assert {proof.row for proof in proofs()} == set(ROWS)


def test_markers_are_read_as_pytest_reads_them(tmp_path: Path) -> None:
    text = """
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
@pytest.mark.compatibility("a row")
@pytest.mark.compatibility("another")
def test_one(): ...
def test_none(): ...
@pytest.mark.opacus
@pytest.mark.compatibility("third")
def test_two(): ...
"""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(text)
    found = list(proofs_in(tmp_path / "tests" / "test_it.py", tmp_path / "tests"))
    file = "tests/test_it.py"
    slow = [Proof(row, file, "test_one", "test-slow") for row in ("a row", "another")]
    assert found == [*slow, Proof("third", file, "test_two", "test-opacus")]


@pytest.mark.compatibility("EMA")
def test_an_exponential_average_of_a_model() -> None:
    online = model()
    average = AveragedModel(online, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    wanted = {name: p.detach().clone() for name, p in online.named_parameters()}
    for count in range(3):
        step(online)
        average.update_parameters(online)
        for name, p in online.named_parameters():
            wanted[name] = p.detach().clone() if count == 0 else wanted[name].lerp(p.detach(), 0.1)
    by_hand = model()
    with torch.no_grad():
        for name, p in by_hand.named_parameters():
            p.copy_(wanted[name])
    assert close(average(X), by_hand(X)) and close(vp.fold(average.module)(X), by_hand(X))
    assert not close(average(X), online(X))


@pytest.mark.compatibility("torch.jit")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_of_the_folded_model() -> None:
    trained = model()
    step(trained)
    traced = torch.jit.trace(vp.fold(trained).eval(), X)
    assert close(traced(X[:2]), trained(X[:2]))


@pytest.mark.slow
@pytest.mark.compatibility("torch.compile, inductor")
@pytest.mark.parametrize("mode", ("default", "reduce-overhead"))
def test_compiled_by_inductor(mode: str) -> None:
    """On the CPU the modes differ in nothing but their settings; with CUDA graphs they are tested on a GPU."""
    ours, theirs = model(), model()
    torch._dynamo.reset()
    compiled = torch.compile(ours, mode=mode)
    for _ in range(3):
        compiled(X).square().mean().backward()
        theirs(X).square().mean().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert close(a.grad, b.grad)
            with torch.no_grad():
                a.sub_(0.05 * a.grad), b.sub_(0.05 * b.grad)
        ours.zero_grad(), theirs.zero_grad()
    assert close(compiled(X), theirs(X))
