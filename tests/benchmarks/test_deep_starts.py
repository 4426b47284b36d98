"""The benchmark of starts: its stacked weights are those of vp.init_, and it runs from records to tables."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import deep_starts
from benchmarks.deep_starts import ACTIVATIONS, Cell, Sizes, Start, response, shape_for, shift_for, starts
from torch import Tensor, nn

import varprop as vp
from tests.lab.data.test_datasets import write_mnist

ROOT = Path(__file__).parents[2]
MODULES = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
SIZES = Sizes(width=12, seeds=2)


class Chain(nn.Module):
    """A cell as a plain network."""

    def __init__(self, cell: Cell, inputs: int) -> None:
        super().__init__()
        sizes = [inputs, *[SIZES.width] * (cell.depth - 1), 10]
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in itertools.pairwise(sizes))
        self.activation, self.cell = MODULES[cell.activation](), cell

    def forward(self, x: Tensor) -> Tensor:
        return deep_starts.walk(x, self.cell, lambda layer, h: self.layers[layer](h), self.activation, torch.add)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_stacked_starts_are_those_of_init(activation: str, skips: bool) -> None:
    cell = Cell(10, skips, activation, "adam")
    data = torch.randn(500, 20, generator=torch.Generator().manual_seed(0)) + 0.5
    names = {"mean 0, gaussian": {"shift": False}, "second moment, orthogonal": {"center": False}}
    names |= {"shaped 0.4, orthogonal": {}} if activation == "tanh" and not skips else {}
    names |= {"first shift, gaussian": {"shift": "first"}} if activation == "relu" else {}
    names |= {"shift by depth 1, orthogonal": {}} if activation == "relu" and not skips else {}
    names |= {"first shift, orthogonal, even branches": {}} if skips else {}
    for name, options in names.items():
        start = Start(cell, SIZES, data, {})
        starts(cell)[name](start)
        model = Chain(cell, 20)
        kind = name.split(", ")[1]
        for index, layer in enumerate(model.layers):
            layer.weight.data = start.draw("gaussian", index, *layer.weight.shape)[1]
        moments = vp.Moments(data.mean(0, keepdim=True), data.var(0, keepdim=True))
        vp.init_(model, moments, orthogonal=kind == "orthogonal", **options)
        for layer, weight, bias in zip(model.layers, start.weights, start.biases, strict=True):
            torch.testing.assert_close(layer.weight, weight[1], rtol=2e-3, atol=1e-4)
            torch.testing.assert_close(layer.bias, bias[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_units_in_pairs_make_a_network_linear(activation: str) -> None:
    for skips in (False, True):
        cell = Cell(10, skips, activation, "adam")
        data = torch.randn(400, 20, generator=torch.Generator().manual_seed(0)) + 0.5
        start = Start(cell, SIZES, data, {})
        start.paired(1.0)
        stack = deep_starts.Stack(cell, [start], (0.1,), "sgd")
        x = data[:3].expand(2, -1, -1)
        middle = stack.outputs((x[:, :1] + x[:, 1:2]) / 2)
        ends = stack.outputs(x)
        torch.testing.assert_close(middle[:, 0], (ends[:, 0] + ends[:, 1]) / 2, rtol=1e-4, atol=1e-5)
        std = float(stack.outputs(data.expand(2, -1, -1)).detach().var(1).mean().sqrt())
        assert std == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_chosen_by_depth_bounds_gradients_and_errors_of_scale(activation: str) -> None:
    f, chi = ACTIVATIONS[activation], math.exp(1 / 30)
    chosen = [(shift_for(f, chi), 1.0)] if activation != "tanh" else []
    chosen += [shape_for(f, chi)] if activation != "relu" else []
    for shift, std in chosen:
        growth, rate = response(f, shift, std)
        assert growth == pytest.approx(chi, abs=2e-4) and rate <= 1 + 1e-4


def test_one_step_is_that_of_torch() -> None:
    """Of networks side by side, each with its rate: clipped, then Adam or momentum, against one trained alone."""
    cell, data = Cell(4, False, "gelu", "adam"), torch.randn(64, 20)
    labels = torch.arange(64) % 10
    start = Start(cell, SIZES, data, {})
    start.by_gain("orthogonal", 3.0)
    for optimizer in ("adam", "sgd"):
        stack = deep_starts.Stack(cell, [start], (0.01, 0.1), optimizer)
        model = Chain(cell, 20)
        for layer, weight, bias in zip(model.layers, start.weights, start.biases, strict=True):
            layer.weight.data, layer.bias.data = weight[1].clone(), bias[1].clone()
        alone = torch.optim.Adam(model.parameters()) if optimizer == "adam" else torch.optim.SGD(model.parameters())
        alone.param_groups[0]["momentum"] = 0.9
        for left in (1.0, 0.5):
            alone.param_groups[0]["lr"] = 0.1 * left
            alone.zero_grad()
            nn.functional.cross_entropy(model(data), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            alone.step()
            stack.step(data.expand(4, -1, -1), labels.expand(4, -1), torch.tensor(left))
        for layer, weight in zip(model.layers, stack.parameters[::2], strict=True):
            torch.testing.assert_close(layer.weight, weight[3].mT, rtol=1e-4, atol=1e-5)


def test_it_runs_and_skips_what_its_records_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mnist(tmp_path / "MNIST" / "raw", train=60, test=20)
    monkeypatch.setattr(deep_starts, "TINY", Sizes(8, 2, 4, 1, 40, 20, 20))
    cells = [Cell(10, False, "tanh", "adam"), Cell(10, True, "tanh", "adam")]
    monkeypatch.setattr(deep_starts, "cells", lambda depths: cells)
    records = tmp_path / "records.jsonl"
    monkeypatch.setattr(sys, "argv", ["deep_starts", "run", str(records), "--data", str(tmp_path), "--tiny"])
    for _ in range(2):
        deep_starts.main()
    found = [json.loads(line) for line in records.read_text().splitlines()]
    assert [record["cell"]["skips"] for record in found] == [False, True]
    assert {"versions", "hardware", "git", "seconds"} <= found[0].keys()
    row = found[0]["starts"]["LSUV"]
    assert len(row["held-out loss by rate"]) == 5 and len(row["test accuracy"]) == 1
    monkeypatch.setattr(sys, "argv", ["deep_starts", "show", str(records)])
    capsys.readouterr()
    deep_starts.main()
    shown = capsys.readouterr().out
    assert "### adam, with skips" in shown and "| zero branches |" in shown


def test_the_tables_of_the_page_are_those_of_the_records() -> None:
    """And the start that is the default is the first of them."""
    found = deep_starts.records(ROOT / "docs/results/deep_starts.jsonl")
    groups = (("adam", False), ("adam", True), ("sgd", False))
    chosen = [[r for r in found if (r["cell"]["optimizer"], r["cell"]["skips"]) == group] for group in groups]
    tables = [deep_starts.table(records, "test loss").splitlines() for records in chosen]
    page = (ROOT / "docs/initialization.md").read_text().splitlines()
    heads = [index for index, line in enumerate(page) if line.startswith("| start |")]
    for head, table in zip(heads, tables, strict=True):
        end = page.index("", head)
        assert end - head > 9 and set(page[head:end]) <= set(table)
    assert tables[0][2].startswith("| vp.init_ |") and len(tables[0]) == 25 + 2
