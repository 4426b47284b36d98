"""`print(vp.fold_report(model))`: what was done to a model, what stays and why, and how to train it, in ten lines."""

import pytest
import torch
from torch import nn

import varprop as vp

MOMENTS = vp.Moments(0.0, 1.0)


def chain(depth: int, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(6, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(6, 3))


def report_of(model: nn.Module, **settings: object) -> vp.FoldReport:
    return vp.fold_report(vp.normalize(model, MOMENTS, example=(2, 6), **settings))


def test_batch_norms_that_were_replaced_are_counted():
    report = report_of(chain(3, norm=True))
    assert report.batch_norms == 3
    assert "4 layers; 3 batch norms replaced" in str(report)
    assert report_of(chain(3)).batch_norms == 0 and "batch norms replaced" not in str(report_of(chain(3)))


@pytest.mark.parametrize(
    ("depth", "settings", "form", "why"),
    [
        (3, {}, "paper", "4 layers in a row, and errors of scale do not pile up"),
        (9, {}, "deep", "10 layers in a row, and activations that let errors of scale grow"),
        (3, {"form": "deep"}, "deep", 'as form="deep" asked for (4 layers in a row)'),
        (9, {"form": "paper"}, "paper", "10 layers in a row; asked for"),
    ],
)
def test_the_form_comes_with_its_reason(depth, settings, form, why):
    report = report_of(chain(depth), **settings)
    assert (report.form, report.in_a_row) == (form, depth + 1)
    assert f"{form}, weights" in str(report) and why in str(report)


class Block(nn.Module):
    """Attention and layers on a stream, with a batch norm that follows no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(6), nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.first, self.second, self.plain = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.second(self.first(x).relu())
        return self.plain(self.last(x.mean(1)))


@pytest.mark.filterwarnings("ignore")
def test_what_stays_is_named_with_the_reason():
    torch.manual_seed(0)
    model = vp.normalize(Block(), MOMENTS, example=(2, 4, 6), only=["first", "second"])
    text = str(vp.fold_report(model))
    assert "1 LayerNorm: normalizes every sample by itself" in text
    assert "1 MultiheadAttention: its projections are arguments of one function" in text
    assert "1 BatchNorm1d: follows no plain linear layer" in text and "depends on the batch" in text
    assert "1 Linear: left out with only=" in text
    assert len(text.splitlines()) <= 12


def test_it_says_how_to_train():
    for text in (str(report_of(chain(3))), str(report_of(chain(9, norm=True)))):
        lines = dict(line.split(":", 1) for line in text.splitlines())
        assert "one made before vp.normalize trains nothing" in lines["optimizer"]
        assert "0.2 x batch size / 256" in lines["rate"] and "vp.find_lr" in lines["rate"]
        assert "2 sqrt(256 / batch size)" in lines["clipping"]
        assert len(text.splitlines()) <= 10


def test_skips_and_layers_called_in_turns_are_counted():
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.a(x)
            return self.c(x + self.b(x.relu()))

    assert report_of(Skips()).in_a_row == 3

    class Turns(Skips):
        def forward(self, x):
            return self.b(self.a(self.b(self.a(x).relu()).relu()).relu())

    report = report_of(Turns())
    assert report.in_a_row == 0 and "layers called in turns" in str(report)

    class Twice(Skips):
        def forward(self, x):
            first, second = self.a(x.relu()).relu(), self.a(x.tanh()).tanh()
            return self.c(self.b(first).relu() + self.b(second).tanh())

    assert report_of(Twice()).in_a_row == 3


def test_an_optimizer_made_before_trains_nothing():
    plain, x = chain(3), torch.randn(8, 6)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    model = vp.normalize(plain, MOMENTS, example=(2, 6))
    before = model(x)
    model(x).square().mean().backward()
    optimizer.step()
    assert torch.equal(model(x), before)


def test_an_optimizer_made_before_has_no_scale_or_shift_in_place():
    plain = chain(3)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    model = vp.normalize(plain, MOMENTS, example=(2, 6), inplace=True)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert not any(id(layer.scale) in held or id(layer.shift) in held for layer in model if hasattr(layer, "scale"))


class Rows(nn.Module):
    """Two layers on every row of a sequence, with position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.up, self.out = nn.Parameter(torch.randn(1, 5, 4)), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.up(x + self.positions)))


class LastStep(nn.Module):
    """A layer on the last state of a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.states(x)[0][:, -1])


@pytest.mark.parametrize(
    ("model", "layer", "why"),
    [
        (Rows, "up", "after add in '(model)'"),
        (LastStep, "out", "after select in '(model)', whose positions have moments of their own"),
    ],
)
def test_what_is_computed_by_operation_names_where_it_begins(model: type[nn.Module], layer: str, why: str) -> None:
    with pytest.warns(UserWarning, match="operation by operation"):
        normalized = vp.normalize(model(), vp.Moments(torch.zeros(1, 1, 4), torch.ones(1, 1, 4)), example=(1, 5, 4))
    assert {folded.path: folded.why for folded in vp.fold_report(normalized).layers}[layer] == why
