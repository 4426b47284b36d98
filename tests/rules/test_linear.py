"""Linear layers with many weights."""

from __future__ import annotations

import pytest
import torch

from varprop import Moments
from varprop.rules import linear


@pytest.mark.parametrize("bias", [None, torch.randn(11), Moments(torch.randn(11), torch.rand(11))])
def test_squares_made_part_by_part_are_those_made_at_once(bias: object, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight = Moments(torch.randn(2, 5, 7), torch.rand(2, 5, 7)), torch.randn(11, 7)
    whole = linear.linear(x, weight, bias)
    monkeypatch.setattr(linear, "LARGE", 10)
    monkeypatch.setattr(linear, "PART", 3 * 7)
    parts = linear.linear(x, weight, bias)
    torch.testing.assert_close((parts.mean, parts.var), (whole.mean, whole.var))
