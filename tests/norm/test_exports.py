"""How often a model is captured to be normalized."""

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.norm.modes import capture_modes


class Block(nn.Module):
    """A residual block as users write it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 3, 3, padding=1)
        self.dropout = dropout

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        if self.training and self.dropout:
            y = nn.functional.dropout(y, self.dropout)
        return torch.relu(x + self.second(y))


@pytest.fixture
def exports(monkeypatch):
    export, calls = torch.export.export, []
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: calls.append(args) or export(*args, **kwargs))
    return calls


X = torch.zeros(1, 3, 8, 8)
MOMENTS = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, 1), (0.5, 2)])
@pytest.mark.parametrize("inplace", [False, True])
def test_one_export_serves_unless_the_modes_differ(exports, dropout, expected, inplace):
    model = nn.Sequential(Block(dropout), Block(dropout)).train()
    normalized = vp.normalize(model, MOMENTS, example=X, inplace=inplace)
    assert len(exports) == expected
    assert (normalized is model) == inplace
    assert "4 together, 0 by operation, 0 alone" in str(vp.fold_report(normalized))


class Unused(Block):
    """Holds a dropout that it never calls."""

    def __init__(self):
        super().__init__(0.0)
        self.unused = nn.Dropout(0.5)


@pytest.mark.parametrize(("model", "same"), [(Unused(), True), (nn.Sequential(Block(0.0), nn.Dropout(0.5)), False)])
def test_a_dropout_counts_where_it_is_called(exports, model, same):
    programs = capture_modes(model, X)
    assert len(exports) == 2 and (programs[True] is programs[False]) == same


class Reader(nn.Module):
    """A classifier of sequences as users write it."""

    def __init__(self, dropout):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, num_layers=2, dropout=dropout), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, 1), (0.5, 2)])
def test_recurrent_layers_differ_by_mode_only_in_their_dropout(exports, dropout, expected):
    model = vp.normalize(Reader(dropout), vp.Moments(0.0, 1.0), example=torch.zeros(5, 2, 3))
    assert len(exports) == expected and model.lstm.training


@torch.no_grad()
def test_a_tied_weight_that_its_batch_norm_unties_is_read_where_it_stays():
    """The other reader is no normalized layer: its moments follow from the weight as it was."""
    shared = nn.Conv2d(3, 3, 1, bias=False)
    other = nn.Conv2d(3, 3, 1, bias=False)
    model = nn.Sequential(shared, nn.BatchNorm2d(3), nn.ReLU(), other, nn.Conv2d(3, 3, 1)).eval().double()
    other.weight = shared.weight
    model[1].running_var.fill_(100.0)
    with pytest.warns(UserWarning, match="no longer tied"):
        preserved = vp.normalize(model, MOMENTS, example=X.double(), init="preserve", only=["0", "4"])
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    assert torch.allclose(preserved(x), model(x), atol=1e-12)
