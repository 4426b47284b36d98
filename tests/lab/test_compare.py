import contextlib

import pytest

import varprop as vp
from varprop.lab.compare import CompareError, compare
from varprop.lab.progress import Progress
from varprop.lab.protocol.records import METHODS


def quiet(total, title):
    return contextlib.nullcontext(Progress(total, title))


OWN = """
import torch
from torch import nn

def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(80, 1, 4, 4, generator=generator)
    y = (x.mean((1, 2, 3)) > 0.5).long()
    return x[:60], y[:60], x[60:], y[60:]

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 2))

def too_small():
    return nn.Linear(3, 2)

def not_data():
    return 1

def holed():
    x, y, test_x, test_y = data()
    test_x[7, 0, 1, 2] = float("nan")
    return x, y, test_x, test_y
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.mark.slow
def test_a_model_and_data_of_ones_own_are_compared(own, tmp_path):
    options = {"batch_size": 16, "epochs": 1, "show": quiet, "device": "cpu"}
    outcomes = compare(tmp_path, f"{own}:data", f"{own}:model", METHODS, ("bn",), **options)
    assert {outcome.cell.method for outcome in outcomes} == set(METHODS)
    assert (tmp_path / "compare" / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("data", "model", "method", "message"),
    [
        ("data", "too_small", "batch", "does not take images of shape"),
        ("holed", "model", "batch", r"own.py:holed: 1 of 20 test samples hold NaN or infinity, the first is number 7"),
        ("not_data", "model", "batch", "must return four tensors"),
        ("data", "nothing", "batch", "has no function 'nothing'"),
        ("data", "model", "layer", "There is no method 'layer'"),
    ],
)
def test_what_cannot_be_compared_is_refused(own, tmp_path, data, model, method, message):
    with pytest.raises(vp.VarpropError, match=message):
        compare(tmp_path, f"{own}:{data}", f"{own}:{model}", (method,), ("none",), show=quiet)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CompareError, match=r"There is no file .*none\.py"):
        compare(tmp_path, "digits", f"{tmp_path}/none.py:model", show=quiet)
