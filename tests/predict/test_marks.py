"""Marks of doubtful predictions of a trained network."""

import pytest
import torch
from benchmarks import error_marks
from benchmarks.error_bars import mlp
from torch import nn

import varprop as vp
from varprop.predict import reliability

Grounds = error_marks.Grounds
TRANSFORMER = "transformer, 2 blocks"


def measured(monkeypatch, network, seed, **levels):
    """Records by noise and level, of these levels alone: each takes thousands of draws."""
    monkeypatch.setattr(error_marks, "LEVELS", levels)
    records = error_marks.measured(network, seed, error_marks.digits(), False, tuple(levels))
    return {(record["noise"], record["level"]): record for record in records}


@pytest.mark.slow
def test_marks_of_a_deep_trained_mlp_follow_its_errors(monkeypatch):
    """Weak dropout and noise of weights leave nothing flagged and nearly nothing off; strong noise most of both."""
    found = measured(monkeypatch, "MLP, 8 layers", 0, dropout=(0.1, 0.5), input=(1.0,), weights=(0.01,))
    for weak in (("dropout", 0.1), ("weights", 0.01)):
        flagged, off = error_marks.marked(found[weak])
        assert not flagged.any()
        assert off.sum() <= 1
    for strong in (("dropout", 0.5), ("input", 1.0)):
        flagged, off = error_marks.marked(found[strong])
        assert off.sum() >= 4
        assert (flagged & off).sum() > 0.5 * off.sum()


@pytest.mark.slow
def test_marks_of_a_trained_lstm_follow_its_errors(monkeypatch):
    """What bends it adds a few per cent to the variance where a fifth is missing: the limit is for shared noise."""
    found = measured(monkeypatch, "LSTM", 1, input=(0.1, 1.0))
    assert not error_marks.marked(found["input", 0.1])[0].any()
    flagged, off = error_marks.marked(found["input", 1.0])
    assert off.sum() >= 6
    assert (flagged & off).sum() > 0.8 * off.sum()


def test_a_mark_of_every_kind():
    """Each limit by itself, on samples of which only one quantity is large."""
    none, explained = torch.zeros(6), torch.full((6,), 0.5)
    curved, shared, dropped, relative, bent = (none.clone() for _ in range(5))
    curved[1], shared[2], dropped[3], relative[4], bent[5] = 0.5, 0.3, 0.1, 3.0, 0.2
    grounds = Grounds(curved, explained, shared, dropped, relative, bent)
    assert error_marks.holds(grounds).tolist() == [True, False, False, False, False, False]


@pytest.mark.slow
def test_marks_of_a_trained_transformer_follow_its_errors(monkeypatch):
    found = measured(monkeypatch, TRANSFORMER, 0, input=(0.1, 1.0))
    assert error_marks.marked(found["input", 0.1])[0].sum() <= 2
    flagged, off = error_marks.marked(found["input", 1.0])
    assert off.sum() >= 3
    assert (flagged & off).sum() > 0.8 * off.sum()


@pytest.mark.parametrize("attends", [True, False])
def test_networks_with_attention_have_a_limit_of_their_own(attends, monkeypatch):
    """A softmax by which a network ends is no attention."""
    monkeypatch.setattr(reliability, "RELATIVE_OF_ATTENTION", 0.01)  # that the noise of an untrained network reaches
    torch.manual_seed(0)
    model = error_marks.RowTransformer(2) if attends else nn.Sequential(mlp(3, 0.2, 64, 10, 64), nn.Softmax(1))
    x = torch.randn(64, 1, 8, 8)
    found = vp.predict(model, x)
    grounds = [Grounds.of(found.shares, found.diagonal_var, found.mean, torch.eye(10), kind) for kind in (True, False)]
    strict, usual = map(error_marks.holds, grounds)
    assert (strict & ~usual).sum() == 0 and (strict != usual).any()
    assert torch.equal(found.reliable, strict if attends else usual)
