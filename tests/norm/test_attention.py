"""Attention between normalized layers: its output counts with the mean and variance of its values."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.norm.modes import attended_values

WIDTH, HEADS, TOKENS = 32, 4, 6


class Attention(nn.Module):
    """Self-attention with one projection, and a way to attend."""

    def __init__(self, attend: str) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(WAYS[self.attend](q, k, v).transpose(1, 2).flatten(-2))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.mT / 3.0, -1)
    return F.dropout(weights, 0.1, training=False) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    few = (t[:, ::2] for t in (k, v))
    return F.scaled_dot_product_attention(q, *few, enable_gqa=True)


WAYS = {
    "plain": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "by hand": by_hand,
    "grouped": grouped,
    "across": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :4], v[:, :, :4]),
}


def normalized(attend: str) -> nn.Module:
    torch.manual_seed(0)
    moments = vp.Moments(torch.zeros(1, 1, WIDTH), torch.ones(1, 1, WIDTH))
    model = vp.normalize(Attention(attend), moments, example=torch.zeros(2, TOKENS, WIDTH))
    with torch.no_grad():
        for layer in (model.qkv, model.proj):
            layer.scale.uniform_(0.5, 2.0)
            layer.shift.uniform_(-1.0, 1.0)
    return model


@pytest.mark.parametrize("attend", WAYS)
def test_layers_behind_attention_are_folded_with_the_others(attend: str) -> None:
    report = str(vp.fold_report(normalized(attend)))
    assert "2 together, 0 by operation, 0 alone" in report


@pytest.mark.parametrize("attend", WAYS)
def test_the_statistics_are_those_of_the_values(attend: str) -> None:
    model = normalized(attend)
    places = torch.arange(2 * WIDTH, 3 * WIDTH)
    if attend == "grouped":  # two heads of queries share one of values
        heads = places.view(HEADS, -1)
        places = heads[::2].repeat_interleave(2, 0).flatten()
    mean, std = model.proj.output_statistics()
    weight = model.proj.weight.double()
    shift, var = model.qkv.shift[places].double(), model.qkv.scale[places].double().square()
    torch.testing.assert_close(mean.double(), weight @ shift, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(std.double(), (weight.square() @ (var + 1e-6)).sqrt(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("attend", ["plain", "causal", "by hand"])
def test_they_hold_for_tokens_that_are_all_alike(attend: str) -> None:
    model, generator = normalized(attend), torch.Generator().manual_seed(1)
    x = torch.randn(20_000, 1, WIDTH, generator=generator).expand(-1, 3, -1)
    with torch.no_grad():
        out = model(x)[:, 0]
    # Gaussian values: the standard errors of mean and std are std / sqrt(n) and std / sqrt(2 n). The rows of one
    # projection are correlated, which the statistics of the next leave out: they are compared on average.
    assert ((out.mean(0) - model.proj.shift).abs() < 6 * model.proj.scale.abs() / 20_000**0.5 + 0.02).all()
    ratio = out.var(0) / model.proj.scale.detach().square()
    assert 0.8 < float(ratio.mean()) < 1.25


def test_propagate_still_takes_tokens_as_independent() -> None:
    torch.manual_seed(0)
    model, moments = Attention("plain"), vp.Moments(torch.zeros(1, 1, WIDTH), torch.ones(1, 1, WIDTH))
    six, one = (vp.propagate(vp.capture(model, torch.zeros(2, n, WIDTH)), moments).output for n in (TOKENS, 1))
    assert float((six.var.mean() / one.var.mean()).detach()) < 0.4


def test_gradients_reach_the_values_and_not_the_scores() -> None:
    model = normalized("causal")
    model.proj.folded()[0].square().sum().backward()
    by_scale = model.qkv.scale.grad
    assert by_scale is not None
    assert (by_scale[: 2 * WIDTH] == 0).all() and (by_scale[2 * WIDTH :] != 0).all()


def test_copies_and_states_keep_it() -> None:
    model, x = normalized("by hand"), torch.randn(2, TOKENS, WIDTH)
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(twin(x), model(x))
    torch.testing.assert_close(vp.fold(model)(x), model(x))


def test_other_products_are_no_attention() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x, 1) @ x.mT  # sums to one along another axis

    program = vp.capture(Product(), torch.zeros(2, 5, 5))
    assert all(attended_values(node) is None for node in program.nodes)
