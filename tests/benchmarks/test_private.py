"""Private trainings by normalization: gradients of single samples against torch.func, and the order of the grid."""

from __future__ import annotations

import copy
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.deep import private
from torch import Tensor
from torch.func import functional_call, grad, vmap

ROOT = Path(__file__).parents[2]


SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "wrn-16-4": (3, 8, 8)}
METHODS = ("none", "none, tanh", "group norm", "group norm + WS")


@pytest.mark.parametrize(
    ("data", "method", "copies"),
    [*itertools.product(SHAPES, METHODS, (2,)), *itertools.product(("mnist",), METHODS, (1,))],
)
def test_gradients_of_samples_are_those_of_torch_func(data: str, method: str, copies: int) -> None:
    torch.manual_seed(0)
    model = private.network(data, method).double()
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if isinstance(module, private.GroupNorm):
            module.__class__ = torch.nn.GroupNorm  # torch's own
    x, y = torch.randn(4, *SHAPES[data], dtype=torch.float64), torch.tensor([3, 3, 1, 1])
    x = x.contiguous(memory_format=torch.channels_last)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(reference, parameters, (x,)), y)

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    samples = x.unflatten(0, (-1, copies)), y.unflatten(0, (-1, copies))
    expected = vmap(grad(loss), (None, 0, 0))(parameters, *samples)
    gradients = private.sample_gradients(model, x, y, copies)
    torch.testing.assert_close({n: g.each() for n, g in gradients.items()}, expected, rtol=1e-9, atol=1e-12)


def test_group_norm_of_channels_last_is_torch_s() -> None:
    torch.manual_seed(0)
    norm = private.GroupNorm(3, 12).double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(5, 12, 4, 3, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    grad = torch.randn_like(x)
    ours, theirs = norm(x), F.group_norm(x, 3, norm.weight, norm.bias)
    assert ours.is_contiguous(memory_format=torch.channels_last) and type(ours.grad_fn) is not type(theirs.grad_fn)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (ours, theirs)))


@pytest.mark.parametrize("method", ("analytic, deep form", "group norm + WS"))
def test_rows_of_norm_one_compute_the_same(method: str) -> None:
    model = private.first_model("mnist", method, 0, (1, 28, 28)).double()
    x = torch.randn(4, 1, 28, 28, dtype=torch.float64)
    before = model(x)
    private.unit_rows_(model)
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-3)  # standardization adds 1e-5 to deviations
    torch.testing.assert_close(model[0].weight.flatten(1).norm(dim=1), torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(model[0].weight.flatten(1).mean(1), torch.zeros(8, dtype=torch.float64))


def test_a_wide_resnet_trains_in_the_deep_form() -> None:
    """It has as many parameters as the published one, and branches of deviation one before training."""
    assert sum(p.numel() for p in private.network("wrn-16-4", "group norm").parameters()) == 2_751_146
    model = private.first_model("wrn-16-4", "analytic, deep form", 0, (3, 32, 32))
    seen: list[float] = []
    for name, layer in model.named_modules():
        if "branch" in name and isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(lambda module, inputs, output: seen.append(float(output.detach().std())))
    with torch.no_grad():
        model(torch.randn(16, 3, 32, 32))
    assert len(seen) == 12 and all(0.5 < std < 1.5 for std in seen), seen


def test_a_layer_that_is_called_twice_is_refused() -> None:
    layer = torch.nn.Linear(10, 10)
    with pytest.raises(ValueError, match="called once"):
        private.sample_gradients(torch.nn.Sequential(layer, layer), torch.randn(2, 10), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    "method",
    ["none", "group norm + WS", *(pytest.param(name, marks=pytest.mark.opacus) for name in private.ANALYTIC)],
)
def test_sums_are_of_gradients_within_the_bound(method: str) -> None:
    model = private.first_model("mnist", method, 0, (1, 28, 28)).double()
    if method in private.ANALYTIC:
        model = pytest.importorskip("varprop.opacus").Twin(model).plain
    x, y = torch.randn(6, 1, 28, 28, dtype=torch.float64), torch.tensor([3, 1, 4, 1, 5, 9])
    gradients = private.sample_gradients(model, x, y)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == parameters.keys()
    for sample in range(len(x)):
        loss = F.cross_entropy(model(x[sample : sample + 1]), y[sample : sample + 1])
        for (name, _), wanted in zip(parameters.items(), torch.autograd.grad(loss, parameters.values()), strict=True):
            torch.testing.assert_close(gradients[name].each()[sample], wanted, rtol=1e-7, atol=1e-10)
    norms = torch.cat([each.each().flatten(1) for each in gradients.values()], 1).norm(dim=1)
    counts, bound = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64), float(norms.mean())
    sums, longer = private.clipped_sum(gradients, counts, bound)
    factors = counts * (bound / (norms + 1e-6)).clamp(max=1)
    for name, each in gradients.items():
        torch.testing.assert_close(sums[name], torch.einsum("i,i...->...", factors, each.each()))
    assert float(longer) == float((counts * (norms > bound)).sum())


def record(cell: private.PrivateCell, accuracy: float) -> dict[str, Any]:
    return {"cell": cell.key, "rate": cell.rate, "bound": cell.bound, "accuracy": accuracy}


def test_a_search_goes_on_while_the_best_rate_is_at_its_edge_and_seeds_follow() -> None:
    records: dict[str, Any] = {}
    rates, bounds = private.TASKS["cifar10-1"].rates, private.TASKS["cifar10-1"].bounds
    tried = []
    while (cells := [c for c in private.ready(records, ["cifar10-1"]) if c.method == "group norm"]) and cells[
        0
    ].kind == private.SEARCH:
        for cell in cells:
            tried.append((cell.rate, cell.bound))
            records[cell.key] = record(cell, 50 + cell.rate)  # larger is better
    assert tried[:8] == [(rate, bound) for rate in rates for bound in bounds]
    assert sorted({rate for rate, _ in tried[8:]}) == [2 * max(rates), 4 * max(rates)]
    assert [(cell.kind, cell.rate, cell.seed) for cell in cells] == [("test", 4 * max(rates), s) for s in (0, 1, 2)]


def test_records_are_read_again_and_shown(tmp_path: Path) -> None:
    file, lines = tmp_path / "records.jsonl", []
    records: dict[str, Any] = {}
    for _ in range(2):
        for cell in private.ready(records, ["mnist-1"]):
            if cell.method == "group norm":
                records[cell.key] = record(cell, 90 + cell.seed - abs(cell.rate - 0.1) - (cell.bound > 1))
                lines.append(json.dumps(records[cell.key]))
    file.write_text("\n".join(lines) + '\n{"cell": "cut o')
    assert private.read(file) == records
    shown = private.table("mnist-1", private.read(file))
    assert "91.00 ± 1.00 %" in shown and "90.00, 91.00, 92.00" in shown and "none" not in shown


def test_the_page_says_what_the_records_say() -> None:
    page = (ROOT / "docs/private.md").read_text("utf-8")
    records = private.read(ROOT / "docs/results/private.jsonl")
    evidence = (ROOT / "docs/evidence.md").read_text("utf-8")
    message = (ROOT / "src/varprop/opacus.py").read_text("utf-8")
    for task in {record["task"] for record in records.values() if record["kind"] != "common"}:
        assert private.search_table(task, records) in page
        if any(r.get("task") == task and r["kind"] == "test" for r in records.values()):
            assert private.table(task, records) in page
    for task in ("cifar10-3", "mnist-1"):
        for method in ("analytic, deep form", "analytic, paper's form", "group norm", "group norm + WS"):
            cells = [r for r in records.values() if (r["method"], r["kind"]) == (method, "test") and r["task"] == task]
            mean = statistics.mean(cell["accuracy"] for cell in cells)
            assert len(cells) == 3 and f"{mean:.1f} %" in evidence and ("paper" in method or f"{mean:.1f}" in page)
            assert task == "mnist-1" or "group" in method or f"{mean:.1f}" in message
    for record in records.values():
        if record["kind"] == "common":
            means = {
                r["data"]: statistics.mean(r["common"])
                for r in records.values()
                if r["method"] == record["method"] and r["kind"] == "common"
            }
            assert f"| {record['method']} | {100 * means['cifar10']:.1f} | {100 * means['mnist']:.1f} |" in page
        else:
            assert (
                record["epsilon"] <= private.TASKS[record["task"]].epsilon
                and record["versions"]["opacus"]
                and record["git"]["commit"]
            )
            assert f"{record['sigma']:.3f}" in page or record["task"] == "cifar10-1"  # whose tests are not made
