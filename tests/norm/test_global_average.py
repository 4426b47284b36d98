"""A global average counts as one of its positions, and as independent ones where the paper's form is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.norm.fold.layout import EPS

SIZE = 4


class Network(nn.Module):
    """A convolution, a way to average its positions, and a linear layer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(WAYS[self.way](self.conv(x)).flatten(1))


WAYS: dict[str, Any] = {
    "adaptive": lambda x: nn.functional.adaptive_avg_pool2d(x, 1),
    "window": lambda x: nn.functional.avg_pool2d(x, SIZE),
    "mean": lambda x: x.mean((2, 3)),
    "kept mean": lambda x: x.mean((-2, -1), keepdim=True),
    "tokens": lambda x: x.flatten(2).mT.mean(1),
}


def normalized(way: str, form: Any, init: Any = "project") -> Any:
    torch.manual_seed(0)
    model = Network(way).double()
    moments = vp.Moments(torch.zeros(1, 3, 1, 1).double(), torch.ones(1, 3, 1, 1).double())
    return vp.normalize(model, moments, example=(1, 3, SIZE, SIZE), form=form, init=init)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["deep", "paper", None])
def test_what_the_layer_behind_it_is_divided_by(way: str, form: str | None) -> None:
    model = normalized(way, form)
    weight = model.head.weight.detach()
    rows = weight - weight.mean(1, keepdim=True) if form == "deep" else weight
    positions = SIZE * SIZE if form == "paper" else 1
    sigma = (
        rows.square().sum(1, keepdim=True) * (1 / positions + EPS)
    ).sqrt()  # the convolution's outputs have variance 1
    folded: Any = vp.fold(model)
    torch.testing.assert_close(
        folded.head.weight.detach(), rows / sigma, rtol=1e-6, atol=0
    )  # epsilon is 1e-6 of the variance
    if form != "paper":
        assert {row.path: row.how for row in vp.fold_report(model).layers}["head"] == "together"


def test_a_preserved_function_has_the_scale_of_one_position() -> None:
    model = normalized("mean", None, "preserve")
    weight = model.head.weight.detach()
    var = model.conv.scale.detach().square() + EPS
    torch.testing.assert_close(model.head.scale.detach(), (weight.square() @ var).sqrt(), rtol=1e-12, atol=0)
    x = torch.randn(2, 3, SIZE, SIZE).double()
    torch.manual_seed(0)
    torch.testing.assert_close(model(x), Network("mean").double()(x))


def test_the_report_says_so() -> None:
    said = "; a global average counts as one position"
    reports = {form: vp.fold_report(normalized("mean", form)) for form in ("deep", "paper", None)}
    assert {form: report.form for form, report in reports.items()} == {"deep": "deep", "paper": "paper", None: "paper"}
    assert {form: said in str(report) for form, report in reports.items()} == {"deep": True, "paper": False, None: True}


@pytest.mark.parametrize("forms", [("paper", None), (None, "paper"), ("deep", None), (None, "deep")])
def test_a_checkpoint_of_the_other_way_to_count_is_refused(forms: tuple[Any, Any]) -> None:
    saved, loaded = (normalized("mean", form) for form in forms)
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    with pytest.raises(ValueError, match="in another form"):
        loaded.load_state_dict(saved.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
    loaded.load_state_dict(normalized("mean", forms[1]).state_dict())


class Repeated(nn.Module):
    """A layer that is called twice, each time behind an average; then one that reads the average of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head, self.recurrent = nn.Conv2d(3, 4, 1), nn.Linear(4, 4), nn.GRU(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        first, second = self.head(y.mean((2, 3))), self.head(y.relu().mean((2, 3)))
        tokens = torch.stack([first, second], 1)
        return self.recurrent(tokens.mean(1, keepdim=True))[0]


@pytest.mark.parametrize("forms", [("paper", None), (None, "paper")])
def test_a_checkpoint_without_a_number_for_the_form_is_refused_as_well(forms: tuple[Any, Any]) -> None:
    moments = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))

    def made(form: Any) -> nn.Module:
        return vp.normalize(Repeated(), moments, example=(1, 3, SIZE, SIZE), form=form)

    state = {name: value for name, value in made(forms[0]).state_dict().items() if not name.startswith("conv")}
    for prefix in ("head", "recurrent"):
        own = {name: value for name, value in state.items() if name.startswith(prefix)}
        with pytest.raises(ValueError, match="in another form"):
            made(forms[1]).load_state_dict(own, strict=False)


def test_windows_smaller_than_the_image_count_as_independent() -> None:
    WAYS["windows"] = lambda x: nn.functional.avg_pool2d(x, SIZE // 2)[:, :, :1, :1]
    model = normalized("windows", "deep")
    weight = model.head.weight.detach()
    rows = weight - weight.mean(1, keepdim=True)
    sigma = (rows.square().sum(1, keepdim=True) * (4 / SIZE**2 + EPS)).sqrt()
    folded: Any = vp.fold(model)
    torch.testing.assert_close(
        folded.head.weight.detach(), rows / sigma, rtol=1e-6, atol=0
    )  # epsilon is 1e-6 of the variance
    del WAYS["windows"]


def test_channels_are_averaged_as_independent_ones() -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(1, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.conv(x).mean(1, keepdim=True))

    torch.manual_seed(0)
    moments = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))
    folded: Any = vp.fold(vp.normalize(Channels(), moments, example=(1, 3, SIZE, SIZE), form="deep"))
    torch.testing.assert_close(folded.last.weight.abs().flatten(), torch.full((5,), (1 / 8 + EPS) ** -0.5))
