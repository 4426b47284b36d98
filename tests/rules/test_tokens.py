"""Tokens on their way to an embedding."""

from __future__ import annotations

import pytest
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


BAGS = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1])  # one of a token and one of two
EMBEDDING = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 3))


class Shifted(Reshaped):
    """An embedding of all tokens but the last, as a language model reads them in training."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens[:, :-1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vp.Tokens([0.5, 0.5]), "Tokens take a tensor of non-negative floating numbers"),
        (lambda: vp.Tokens(torch.tensor([1, 2])), "Tokens take a tensor of non-negative floating numbers"),
        (lambda: vp.Tokens(torch.zeros(4)), "do not sum to zero"),
        (lambda: vp.Tokens(torch.tensor([torch.nan, 1.0])), "Tokens take a tensor"),
        (lambda: vp.Tokens.uniform(0), "a whole number above 0, not 0"),
        (lambda: vp.propagate(EMBEDDING, vp.Tokens.uniform(7), (1, 3)), "7 probabilities, .* has 10 rows"),
        (
            lambda: vp.propagate(nn.EmbeddingBag(7, 2, padding_idx=0), vp.Tokens.uniform(7), (2, 3)),
            "Token 0 is the padding of an embedding bag, which leaves it out: give it probability 0",
        ),
        (
            lambda: vp.propagate(nn.EmbeddingBag(7, 2), (vp.Tokens.uniform(7), torch.tensor([0, 1])), BAGS),
            "equally many random tokens",
        ),
        (lambda: vp.propagate(nn.ReLU(), vp.Tokens.uniform(7), (1, 3)), "Only an embedding can read vp.Tokens.*relu"),
        (lambda: vp.propagate(nn.Linear(3, 2), vp.Tokens.uniform(7), (1, 3)), "Only an embedding .*linear"),
        (lambda: vp.propagate(Shifted(), vp.Tokens.uniform(7), (1, 3)), "Only an embedding .*slice"),
        (lambda: vp.propagate(EMBEDDING, vp.Moments(0.0, 1.0), (1, 3)), r"give vp\.Tokens\(probabilities\)"),
    ],
)
def test_wrong_tokens_are_one_sentence(call, message):
    with pytest.raises((vp.VarpropError, ValueError), match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
