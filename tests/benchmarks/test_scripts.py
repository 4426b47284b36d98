"""Benchmarks whose tables are in the documentation: what they measure, and that they run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.called_often import measured
from benchmarks.cost_of_steps import count_of
from benchmarks.epsilon import READERS, epsilon
from benchmarks.forms import write
from benchmarks.ratios import ratios
from benchmarks.truth_of_sigma import drawn, shown
from examples.train_cifar import resnet
from torch import nn

import varprop as vp
from tests.lab.data.test_datasets import write_cifar10

ROOT = Path(__file__).parents[2]


def test_the_ratio_is_that_of_true_and_predicted_deviation() -> None:
    torch.manual_seed(0)
    model = vp.normalize(
        nn.Sequential(nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 10)), vp.Moments(0.0, 1.0), example=(1, 50)
    )
    x = torch.randn(20_000, 50)
    assert all(abs(ratio - 1) < 0.05 for ratio in ratios(model, x).values())
    assert abs(ratios(model, 3 * x)["0"] - 3) < 0.1


def test_another_epsilon_reaches_every_fold() -> None:
    """On a CPU; the kernels of a GPU have theirs from the same place."""
    norm = Path(vp.__file__).parent / "norm"
    users = [
        file for file in norm.rglob("*.py") if re.search(r"\bEPS\b", file.read_text()) and "triton" not in file.parts
    ]
    names = {".".join(file.relative_to(norm).with_suffix("").parts) for file in users}
    assert names == {"fold.layout", *READERS}
    model = vp.normalize(nn.Sequential(nn.Linear(3, 2)), vp.Moments(0.0, 1e-6), example=(1, 3))
    usual = vp.fold(model)[0].weight
    with epsilon(1e-18):
        torch.testing.assert_close(vp.fold(model)[0].weight, 2**0.5 * usual)


def test_a_record_says_what_made_it(tmp_path: Path) -> None:
    write(tmp_path / "found.json", "python -m benchmarks.forms", {"logistic": []})
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept["command"].startswith("python -m benchmarks.forms") and kept["hardware"]["device"] == "cpu"
    assert {"git", "versions", "started", "logistic"} <= kept.keys()


def test_layers_that_are_called_often_are_measured_with_how_they_are_folded() -> None:
    found = measured("neural ODE, 20 steps", rounds=1)
    assert found["together"] == found["of"] == 4
    assert found["ratio"] == pytest.approx(found["normalized"] / found["plain"], rel=0.05)  # type: ignore[operator]


def test_its_table_and_figure(tmp_path: Path) -> None:
    states = [{"trained": n, "loss": 1.0, "ratios": {"a": 1.0, "b": 2.0 + n, "c": 9.0}} for n in range(3)]
    drawn({"deep form": states}, "resnet", tmp_path / "truth")
    assert (tmp_path / "truth.png").read_bytes().startswith(b"\x89PNG")
    assert "| deep form | 2 | 1.00 | 4.00 | 9.00 |" in shown({"deep form": states})


@pytest.mark.slow
def test_costs_are_measured_one_after_the_other(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    small = ["--models", "tiny", "--methods", "batch norm", "none", "--width", "4", "--batch", "2", "--images", "8"]
    where = ["--held-out", "4", "--data", str(tmp_path), "--json", str(tmp_path / "cost.json")]
    command = [sys.executable, "-m", "benchmarks.cost_of_steps", *small, *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "cost.json").read_text())["steps"]["tiny"]
    assert found["batch norm"]["of batch norm"] == 1 and found["none"]["ms"] > 0
    assert found["batch norm"]["parameters"] == count_of(resnet("tiny", "batch", 4))
