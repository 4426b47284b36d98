"""Networks that are trained side by side become what they become alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.deep.joined import joined
from benchmarks.deep.side_by_side import GroupedConvolutions, Member, SideBySide, by_products
from examples.train_cifar import Data, Run, epoch_of, parser, resnet
from torch import Tensor

import varprop as vp
from tests.lab.data.test_datasets import write_cifar10

MEMBERS = [Member(0.02, 0.0, 1), Member(0.05, 0.5, 2)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder / "cifar-10-batches-bin")
    return str(folder)


def alone(data: str, norm: str, member: Member) -> Run:
    options = f"--model tiny --width 16 --held-out 4 --batch 4 --epochs 2 --norm {norm} --data {data}".split()
    chosen = ["--lr", str(member.rate), "--clip", str(member.clip), "--seed", str(member.seed)]
    run = Run(parser().parse_args([*options, *chosen]))
    run.model.double()
    run.data = Data(*((images.double(), labels) for images, labels in run.data))
    return run


def trainer(data: str, norm: str, members: list[Member] = MEMBERS) -> SideBySide:
    run = alone(data, norm, members[0])
    images, labels = run.data.train

    def epoch(seed: int, number: int) -> tuple[Tensor, Tensor]:
        xs, ys = zip(*epoch_of(images, labels, 4, seed, number), strict=True)
        return torch.cat(xs), torch.cat(ys)

    models = []
    for member in members:
        torch.manual_seed(member.seed)
        models.append(resnet("tiny", norm, 16))
    model = joined(models)
    if norm == "analytic":
        model = vp.normalize(model, vp.input_moments(images.float().repeat(1, len(members), 1, 1)), form="deep")
    return SideBySide(model.double(), members, epoch, len(images), 4, 2, CPU)


@pytest.mark.parametrize("norm", ["analytic", "batch", "renorm", pytest.param("group16-ws", marks=pytest.mark.slow)])
def test_side_by_side_is_alone(data: str, norm: str) -> None:
    together = trainer(data, norm)
    assert together.train()
    for number, member in enumerate(MEMBERS):
        run = alone(data, norm, member)
        result = run.train()
        losses = [epoch[number] for epoch in together.losses]
        assert losses == pytest.approx([epoch["loss"] for epoch in result["history"]], rel=1e-6)
        for mine, single in zip(together.parameters, run.model.parameters(), strict=True):
            part = mine.unflatten(0, (len(MEMBERS), -1))[number]
            torch.testing.assert_close(part.reshape(single.shape), single, rtol=1e-5, atol=1e-8)
    judged = together.accuracies(*run.data.judged)
    assert judged[-1] == run.accuracy()


def test_one_that_diverges_leaves_the_others_alone(data: str) -> None:
    good, bad = MEMBERS[0], Member(math.inf, 0.0, 1)
    single, pair = trainer(data, "batch", [good]), trainer(data, "batch", [good, bad])
    single.train()
    pair.train()
    assert [epoch[0] for epoch in pair.losses] == pytest.approx([epoch[0] for epoch in single.losses], rel=1e-5)
    assert not math.isfinite(pair.losses[-1][1])


def test_it_goes_on_where_it_was_stopped(data: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("benchmarks.deep.side_by_side.CHECKED_EVERY", 1)
    whole, stopped, resumed = (trainer(data, "renorm") for _ in range(3))
    whole.train()
    while not stopped.train(until=0.0) and stopped.done < 3:
        pass
    stopped.save(tmp_path / "state.pt")
    resumed.load(tmp_path / "state.pt")
    resumed.train()
    assert resumed.losses == whole.losses
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters, whole.parameters, strict=True))


@pytest.mark.parametrize(
    ("size", "stride", "padding", "extent"), [(3, 1, 1, 8), (3, 2, 1, 8), (1, 2, 0, 8), (1, 1, 0, 1), (3, 2, 1, 7)]
)
def test_convolutions_by_products(size: int, stride: int, padding: int, extent: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, extent, extent, dtype=torch.double, requires_grad=True)
    weight = torch.randn(12, 2, size, size, dtype=torch.double, requires_grad=True)
    bias = torch.randn(12, dtype=torch.double)
    wanted, result = F.conv2d(x, weight, bias, stride, padding, 1, 3), by_products(x, weight, bias, stride, padding, 3)
    torch.testing.assert_close(result, wanted)
    by = torch.randn_like(wanted)
    for here, there in zip(*(torch.autograd.grad(out, (x, weight), by) for out in (result, wanted)), strict=True):
        torch.testing.assert_close(here, there)


def test_convolutions_are_taken_over_where_products_are_faster(data: str) -> None:
    for norm in ("analytic", "group-ws"):
        made = trainer(data, norm)
        x = torch.randn(2, 6, 32, 32, dtype=torch.double)
        mode = GroupedConvolutions({})
        with mode:
            wanted = made.model(x)
        assert len(mode.met) == 6 and all(shapes[4] == 2 for shapes in mode.met.values())
        with GroupedConvolutions(dict.fromkeys(mode.met, "products")) as taken:
            torch.testing.assert_close(made.model(x), wanted)
        assert taken.met.keys() == mode.met.keys()
