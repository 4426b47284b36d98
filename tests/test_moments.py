"""The value type: what it refuses, and how uniform axes travel."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import varprop as vp


def test_attributes() -> None:
    m = vp.Moments(torch.zeros(2, 3), torch.full((2, 3), 4.0))
    assert m.shape == m.full == (2, 3)
    assert m.dtype == torch.float32 and m.device.type == "cpu"
    assert (m.std == 2).all()
    assert m.to(torch.float64).dtype == torch.float64
    assert m.expand(5, 2, 3).shape == (5, 2, 3)


@pytest.mark.parametrize(
    ("mean", "var", "message"),
    [
        ([0.0, 1.0], [1.0, -2.0], r"variance is negative at position \(1,\): -2.0"),
        ([0.0, float("nan")], [1.0, 1.0], r"mean is NaN at position \(1,\)"),
        ([0.0, 0.0], [float("nan"), 1.0], r"variance is NaN at position \(0,\)"),
        ([0.0], [1.0, 1.0], r"shape \(1,\) but var has shape \(2,\)"),
    ],
)
def test_refuses_impossible_values(mean: list[float], var: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vp.Moments(torch.tensor(mean), torch.tensor(var))


def test_refuses_integers_and_mixed_dtypes() -> None:
    with pytest.raises(ValueError, match="floating"):
        vp.Moments(torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="floating dtype"):
        vp.Moments(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("value", [[0.0, 1.0], None, "1"])
def test_refuses_what_is_neither_tensor_nor_number(value: object) -> None:
    with pytest.raises(TypeError, match=rf"mean must be a tensor or a number, not {type(value).__name__}"):
        vp.Moments(value, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="var must be a tensor or a number"):
        vp.Moments(torch.zeros(2), value)  # type: ignore[arg-type]


def test_is_a_pytree() -> None:
    m = vp.Moments(torch.zeros(1, 3), torch.ones(1, 3), full=(8, 3))
    leaves, spec = pytree.tree_flatten({"x": m})
    again = pytree.tree_unflatten(leaves, spec)["x"]
    assert len(leaves) == 2 and again.full == (8, 3)
    assert torch.equal(again.var, m.var)


def test_extents_survive_copies_and_files(tmp_path) -> None:
    m = vp.Moments(torch.zeros(1, 3), torch.ones(1, 3), full=(8, 3))
    torch.save({"moments": m}, tmp_path / "state.pt")
    copies = [m.to(torch.float64), m.clone(), m.detach(), copy.deepcopy(m), pickle.loads(pickle.dumps(m))]
    for again in [*copies, torch.load(tmp_path / "state.pt")["moments"]]:
        assert again.full == (8, 3) and again.shape == (1, 3) and (again.var == 1).all()
    assert m.clone().mean.data_ptr() != m.mean.data_ptr()


def test_numbers_are_the_same_for_every_element() -> None:
    assert vp.Moments(0.0, 1).shape == ()
    assert torch.equal(vp.Moments(torch.zeros(2, 3), 4).std, torch.full((2, 3), 2.0))
    assert torch.equal(vp.Moments(2, torch.ones(3).double()).mean, torch.full((3,), 2.0).double())
    with pytest.raises(ValueError, match="variance is negative"):
        vp.Moments(0.0, -1.0)


def test_uniform_axes_survive_movement() -> None:
    class Moved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.permute(0, 2, 3, 1).flatten(1, 2)

    given = vp.Moments(torch.randn(1, 4, 1, 1), torch.ones(1, 4, 1, 1), full=(2, 4, 5, 6))
    moved = vp.propagate(Moved(), given, example=(2, 4, 5, 6)).output
    assert moved.shape == (1, 1, 4) and moved.full == (2, 30, 4)


def test_std_has_a_finite_derivative_at_zero() -> None:
    var = torch.zeros(3, requires_grad=True)
    vp.Moments(torch.zeros(3), var).std.sum().backward()
    assert var.grad is not None and var.grad.isfinite().all()


def test_tokens_refuse_what_is_no_distribution() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        vp.Tokens(torch.tensor([0.5, -0.1]))
    assert vp.Tokens(torch.tensor([1.0, 3.0])).probabilities.tolist() == [0.25, 0.75]
