"""What the recurrent rules state as their error, measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.rules.recurrent import ERRORS

DRAWS = 8_000
DOUBLE = torch.float64
CASES = [
    ("lstm", nn.LSTM, {}),
    ("lstm", nn.LSTM, {"bidirectional": True}),
    ("gru", nn.GRU, {}),
    ("tanh", nn.RNN, {}),
    ("relu", nn.RNN, {"nonlinearity": "relu"}),
    ("stack", nn.LSTM, {"num_layers": 2}),
    ("stack", nn.LSTM, {"proj_size": 3}),
    ("stack", nn.GRU, {"num_layers": 2}),
    ("stack", nn.RNN, {"num_layers": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("units", [6, 64])
@pytest.mark.parametrize(("name", "kind", "options"), CASES, ids=lambda value: str(getattr(value, "__name__", value)))
def test_stated_error(name: str, kind: type[nn.Module], options: dict, units: int) -> None:
    std_errors, mean_errors = [], []
    for seed in range(12 if units == 6 else 2):
        torch.manual_seed(seed)
        model = kind(5, units, batch_first=True, dtype=DOUBLE, **options)
        x = vp.Moments(torch.randn(1, 3, 5, dtype=DOUBLE), (0.5 + torch.rand(1, 3, 5, dtype=DOUBLE)).square())
        with torch.no_grad():
            found = vp.propagate(model, x).output[0]
            drawn = model(x.mean + x.std * torch.randn(DRAWS, 3, 5, dtype=DOUBLE))[0]
        mean, std = drawn.mean(0), drawn.std(0)
        active = (drawn > 0).double().mean(0) > 0.02 if name == "relu" else torch.ones_like(std, dtype=torch.bool)
        std_errors.append((found.std[0] / std - 1).abs()[active])
        mean_errors.append(((found.mean[0] - mean).abs() / std)[active])
    error = torch.cat(std_errors)
    noise = 3 / DRAWS**0.5  # of a measured std, for a kurtosis of 10 a standard error and more
    assert error.median() <= ERRORS[name].median + noise / 3
    assert error.quantile(0.99) <= ERRORS[name].most + noise
    assert torch.cat(mean_errors).quantile(0.99) <= 0.2
