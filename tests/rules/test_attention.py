"""Attention over many heads, a few at a time."""

from __future__ import annotations

import pytest
import torch

from varprop.gaussian import series
from varprop.moments import Moments
from varprop.rules.attention import attention


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
    monkeypatch.setattr(series, "BLOCK", 2 * 16 * 16)
    apart = attention(q, k, v, is_causal=causal)
    assert apart.mean.shape == (2, 3, 16, 5)
    torch.testing.assert_close(apart.mean, together.mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(apart.std, together.std, rtol=2e-3, atol=0.0)


def test_uniform_tokens_stay_uniform() -> None:
    torch.manual_seed(0)
    q, k, v = _moments(1, 6, 1, 8, full=(1, 6, 197, 8)), _moments(1, 6, 197, 8), _moments(1, 6, 197, 8)
    assert attention(q, k, v).mean.shape == (1, 6, 1, 8)
