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


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_a_state_that_is_the_same_for_all_samples_is_computed_once(cell: type[nn.Module]) -> None:
    """Zeros of the batch's extents, and a parameter expanded to them, against the same numbers written out."""

    class Step(nn.Module):
        def __init__(self, state: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.state = cell(3, 4), state

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.new_zeros(len(x), 4)
            if self.state == "rows":
                h = torch.cat([h[:1], torch.zeros(len(x) - 1, 4)])
            state = self.cell(x, (h, h) if cell is nn.LSTMCell else h)
            return state[0] if cell is nn.LSTMCell else state

    moments = vp.Moments(torch.zeros(1, 3), 1.0)
    uniform, rows = (vp.propagate(Step(state), moments, example=(5, 3)).output for state in ("zeros", "rows"))
    assert uniform.mean.shape == (1, 4) and rows.mean.shape == (5, 4)
    torch.testing.assert_close(uniform.dense().mean, rows.mean)
    torch.testing.assert_close(uniform.dense().var, rows.var)
