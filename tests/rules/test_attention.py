"""Attention over many heads, a few at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from tests.rules.one_op import propagate_op
from varprop import Moments
from varprop.gaussian import softmax


def attention(*tensors: Moments, **options: bool) -> Moments:
    return propagate_op(torch.ops.aten.scaled_dot_product_attention.default, tensors, options)


def _moments(*shape: int, full: tuple[int, ...] | None = None) -> Moments:
    return Moments(0.3 * torch.randn(*shape), 0.2 + 0.1 * torch.rand(*shape), full or shape)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [(2, 3, 16, 8), (1, 3, 16, 8)], ids=["a sample each", "one sample for all"])
def test_heads_in_parts_are_those_of_one_call(
    keys: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    q, k, v = _moments(2, 3, 16, 8), _moments(*keys, full=(2, 3, 16, 8)), _moments(2, 3, 16, 5)
    together = attention(q, k, v, is_causal=causal)
    monkeypatch.setattr(softmax, "CACHED", 2 * 16 * 16)
    apart = attention(q, k, v, is_causal=causal)
    assert apart.mean.shape == (2, 3, 16, 5)
    torch.testing.assert_close(apart.mean, together.mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(apart.std, together.std, rtol=2e-3, atol=0.0)


def test_uniform_tokens_stay_uniform() -> None:
    torch.manual_seed(0)
    q, k, v = _moments(1, 6, 1, 8, full=(1, 6, 197, 8)), _moments(1, 6, 197, 8), _moments(1, 6, 197, 8)
    assert attention(q, k, v).mean.shape == (1, 6, 1, 8)


def test_padded_keys_that_weights_are_asked_of_count_for_nothing() -> None:
    """With its weights asked for, attention adds the mask in `baddbmm`; minus infinity was made NaN there."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.attention(x, x, x, key_padding_mask=padding)[0]

    torch.manual_seed(0)
    model, given = Padded().double().eval(), vp.Moments(torch.randn(1, 5, 8).double(), 0.7)
    padding = torch.tensor([[False, False, False, True, True]])
    found = vp.propagate(model, (given, padding)).output
    shorter = vp.propagate(model, (vp.Moments(given.mean[:, :3], 0.7), padding[:, :3])).output
    torch.testing.assert_close(found.mean[:, :3], shorter.mean)
    torch.testing.assert_close(found.var[:, :3], shorter.var)
