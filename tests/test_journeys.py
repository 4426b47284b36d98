"""What goes wrong in the first minute: every bad input is answered in one sentence that says what to do."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import varprop as vp
import varprop_lab
from varprop.cli.main import main

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
CLASSES = (X[:, 0] > 0).long()
UNIT = vp.Moments(0.0, 1.0)
HOLED = X.clone().index_fill(0, torch.tensor([3]), torch.nan)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def with_(value: float, name: str = "weight") -> nn.Module:
    model = net()
    with torch.no_grad():
        getattr(model[0], name)[0] = value
    return model


class Policy(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        return torch.distributions.Categorical(logits=super().forward(x))


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


PYTHON = {
    "moments of bytes": (lambda: vp.input_moments(torch.zeros(2, 3, dtype=torch.uint8)), "convert the input to float"),
    "moments of nothing": (lambda: vp.input_moments(torch.zeros(0, 3)), "The data is empty"),
    "moments of NaN": (lambda: vp.input_moments(HOLED), "The data holds NaN or infinity in item 3"),
    "moments per pixel": (lambda: vp.input_moments(X, per="pixel"), 'per must be "channel" or "element"'),
    "data for moments": (lambda: vp.propagate(net(), X), "did you mean vp.input_moments(x)"),
    "loader for moments": (
        lambda: vp.normalize(net(), torch.utils.data.DataLoader(X)),
        "did you mean vp.input_moments(x)",
    ),
    "numbers for moments": (lambda: vp.inspect(net(), (0.0, 1.0), example=(1, 4)), "vp.Moments(mean, var)"),
    "no values": (lambda: vp.inspect(net().to("meta"), UNIT, example=(1, 4)), "'0.weight' is on the meta device"),
    "fold of no values": (
        lambda: vp.fold(vp.normalize(net(), UNIT, example=(1, 4)).to("meta")),
        "'0.weight' is on the meta device",
    ),
    "overflow": (lambda: vp.inspect(with_(1e30), UNIT, example=(1, 4)), "variance came out of aten.linear"),
    "NaN to preserve": (
        lambda: vp.normalize(with_(math.nan, "bias"), UNIT, example=(1, 4), init="preserve"),
        "Outputs of '0' have no finite mean",
    ),
    "wrong shape": (lambda: vp.propagate(net(), UNIT, example=(1, 5)), "could not be run on the example"),
    "wrong extents": (lambda: vp.propagate(net(), vp.input_moments(X[:, :3]), example=(1, 4)), "but the model sees"),
    "wrong dtype": (lambda: vp.propagate(net(), vp.input_moments(X.double())), "convert one of them"),
    "no shape": (lambda: vp.propagate(net(), UNIT), "example="),
    "branches": (lambda: vp.propagate(Branching(), UNIT, example=(1, 4)), "branches on the values"),
    "distribution": (
        lambda: vp.propagate(Policy(), UNIT, example=(1, 4)),
        "returns a Categorical, in which no graph can end",
    ),
    "lazy": (lambda: vp.normalize(nn.Sequential(nn.LazyLinear(4)), UNIT, example=(1, 4)), "call it once on data first"),
    "unknown layer": (lambda: vp.propagate(net(), UNIT, example=(1, 4))["3"], "3"),
    "normalized twice": (lambda: vp.normalize(vp.normalize(net(), UNIT, example=(1, 4)), UNIT), "normalized already"),
    "nothing to normalize": (lambda: vp.normalize(nn.ReLU(), UNIT, example=(1, 4)), "no linear layer to normalize"),
    "misspelt init": (
        lambda: vp.normalize(net(), UNIT, example=(1, 4), init="keep"),
        'must be "project" or "preserve"',
    ),
    "unknown only": (lambda: vp.normalize(net(), UNIT, example=(1, 4), only="5"), "5"),
    "fold of plain": (lambda: vp.fold(net()), "The model is not normalized"),
    "misspelt form": (lambda: vp.reparametrize(net(), "batchnorm"), "must be one of"),
    "form without batch": (lambda: vp.reparametrize(net(), "batch"), "needs `batch`"),
    "iterator as data": (
        lambda: vp.training_objective(net(), torch.optim.SGD, iter([]), nn.functional.mse_loss),
        "pass a DataLoader or a list",
    ),
    "model for compare": (
        lambda: varprop_lab.compare(net(), (X, CLASSES, X, CLASSES)),
        "given as a function that makes it",
    ),
    "summary of no shape": (lambda: vp.summary(net(), (5,)), "could not be run on the example"),
}


@pytest.mark.parametrize("name", PYTHON)
def test_in_python(name):
    call, sentence = PYTHON[name]
    with pytest.raises((vp.VarpropError, ValueError, TypeError, KeyError)) as raised:
        call()
    message = str(raised.value)
    assert sentence in message and len(message.splitlines()) <= 2, message


OWN = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def narrow():
    return nn.Linear(3, 10)

def broken():
    raise RuntimeError("the sky fell")
"""
COMPARE = "compare --dataset digits --out OUT"
COMMANDS = {
    "comapre": "invalid choice: 'comapre'",
    "reproduce mnits": "Did you mean mnist",
    "data get minst": "Did you mean mnist",
    "compare --dataset digits": "--model",
    f"{COMPARE} --model OWN:mkae": "has no function or class 'mkae'. Did you mean make?",
    f"{COMPARE} --model none.py:make": "There is no file none.py.",
    f"{COMPARE} --model OWN": "The model is given as path.py:function",
    f"{COMPARE} --model OWN:narrow": "The model does not take inputs of shape",
    f"{COMPARE} --model OWN:make --methods bacth": "Did you mean batch",
    f"{COMPARE} --model OWN:make --starts ap": "Did you mean ap2",
    f"{COMPARE} --model OWN:make --optimizer Adm": "Did you mean Adam",
    f"{COMPARE} --model OWN:make --resume --overwrite": "give one of them",
    f"{COMPARE} --model OWN:make --shift -1": "argument --shift: -1 must be at least 0; `varprop compare --help` lists",
    "inspect OWN:make": "--input-shape",
    "inspect OWN:mkae --input-shape 1,8,8": "Did you mean make",
    "inspect OWN:make --input-shape 1,8,9": "does not take inputs of shape (1, 8, 9)",
    "inspect OWN:make --input-shape a,b": "a,b",
    "inspect OWN:broken --input-shape 1,8,8": "the sky fell",
    "doctor none.py:make --input-shape 3": "none.py",
    "bench --models resnet": "varprop bench: there is no --models, did you mean --modes",
}


@pytest.mark.parametrize("line", COMMANDS)
def test_on_the_command_line(line, tmp_path, capsys, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    words = [
        word.replace("OWN", str(tmp_path / "own.py")).replace("OUT", str(tmp_path / "out")) for word in line.split()
    ]
    monkeypatch.setattr(sys, "argv", ["varprop", *words])
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and COMMANDS[line] in told, told
    assert "Traceback" not in told and "unexpected" not in told
    assert len(told.strip().splitlines()) <= 2
    assert not Path(tmp_path / "out").exists()
