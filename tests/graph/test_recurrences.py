"""Recurrent layers are captured without running them step by step."""

import pytest
import torch
from torch import nn
from torch._decomp import decomposition_table

from varprop import CaptureError, capture
from varprop.graph.tracing import RECURRENCES, recurrences_not_run

LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4),
    "projected": lambda: nn.LSTM(3, 4, proj_size=2, bidirectional=True, num_layers=2),
    "gru": lambda: nn.GRU(3, 4, batch_first=True, bidirectional=True),
    "tanh": lambda: nn.RNN(3, 4, num_layers=2),
    "relu": lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_forms_are_those_of_a_run(name, monkeypatch):
    def run(*_):
        raise AssertionError("a step was run")

    for cell in ("lstm_cell", "gru_cell", "rnn_cell"):
        monkeypatch.setattr(f"torch._decomp.decompositions.{cell}", run)
    layer, x = LAYERS[name](), torch.zeros(6, 5, 3)
    found = [(node.info.shape, node.info.dtype) for node in capture(layer, x).outputs]
    output, states = layer(x)
    states = states if isinstance(states, tuple) else (states,)
    assert found == [(value.shape, value.dtype) for value in (output, *states)]


def state():
    return {op: (dict(op.py_kernels), decomposition_table.get(op)) for op in RECURRENCES}


def test_torch_is_left_as_it_was():
    before = state()
    with recurrences_not_run():
        assert state() != before
    assert state() == before
    with pytest.raises(CaptureError):
        capture(nn.LSTM(3, 4), torch.zeros(6, 5, 2))
    assert state() == before
