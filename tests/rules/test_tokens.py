"""Tokens on their way to an embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import varprop as vp


class Reshaped(nn.Module):
    """An embedding of tokens that are brought into another shape first, as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens.view(-1, 3))


def test_tokens_can_be_reshaped() -> None:
    model, tokens = Reshaped(), vp.Tokens(torch.arange(1.0, 8.0))
    found = vp.propagate(model, tokens, torch.zeros(2, 6, dtype=torch.long)).output
    plain = vp.propagate(model.table, tokens, torch.zeros(4, 3, dtype=torch.long)).output
    assert found.full == (4, 3, 5)
    torch.testing.assert_close(found.mean, plain.mean)
    torch.testing.assert_close(found.var, plain.var)
