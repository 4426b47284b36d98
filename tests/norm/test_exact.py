"""In with one line, out with one line, and the function stays what it was."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import varprop as vp
from tests.models import trained_looking
from tests.norm.networks import (
    COME_APART,
    GAIN_A_BIAS,
    NETWORKS,
    Case,
    apart,
    case,
    kept,
    moments_of,
    sites,
    train_a_little,
)
from varprop.norm import statistics


def quiet_fold(model: nn.Module, **settings: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vp.fold(model, **settings)


def check_preserved(given: Case, normalized: nn.Module, tolerance: float) -> None:
    before = given.run(given.model)
    assert sites(normalized)
    assert apart(given.run(normalized), before) <= tolerance
    assert apart(given.run(quiet_fold(normalized)), before) <= tolerance
    assert torch.equal(given.run(given.model), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_trained_model_survives_normalize_and_fold(name: str) -> None:
    check_preserved(*kept(name), 1e-12)


IN_BRIEF = ("conv", "reused", "grouped", "own norms")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_BRIEF else pytest.mark.slow) for name in NETWORKS]
)
def test_a_trained_model_survives_in_single_precision(name: str) -> None:
    given = case(name, torch.float32)
    check_preserved(given, given.normalized(init="preserve"), 1e-5)


@pytest.mark.zoo
def test_resnet18_survives() -> None:
    from tests.torchvision_on_cpu import torchvision

    torch.manual_seed(0)
    model = trained_looking(torchvision.models.resnet18()).double().eval()
    x = 0.5 + torch.randn(2, 3, 64, 64, dtype=torch.float64)
    given = Case(model, (x,), moments_of(x))
    normalized = given.normalized(init="preserve")
    check_preserved(given, normalized, 1e-12)
    fresh = torchvision.models.resnet18().double().eval()
    fresh.load_state_dict(quiet_fold(train_a_little(normalized)).state_dict(), strict=True)
    assert apart(given.run(fresh), given.run(normalized)) <= 1e-12
    single = Case(model.float(), (x.float(),), moments_of(x.float()))
    check_preserved(single, single.normalized(init="preserve"), 1e-5)


DEPLOYED = [(name, "paper") for name in NETWORKS]
DEPLOYED += [(name, "deep") for name in ("grouped", "unet", "recalled", "own batch norm")]


@pytest.mark.parametrize(("name", "form"), DEPLOYED)
def test_deployment_needs_nothing_but_the_original_class(name: str, form: str) -> None:
    given, normalized = kept(name, form=form)
    trained = train_a_little(copy.deepcopy(normalized))
    assert apart(given.run(trained), given.run(normalized)) > 0.01
    folded = quiet_fold(trained)
    assert apart(given.run(folded), given.run(trained)) <= 1e-12
    assert not any(type(m).__module__.startswith("varprop") for m in folded.modules())
    if name not in (*GAIN_A_BIAS, *COME_APART):
        torch.manual_seed(2)
        fresh = NETWORKS[name][0]().double().eval()
        fresh.load_state_dict(folded.state_dict(), strict=True)
        assert apart(given.run(fresh), given.run(trained)) <= 1e-12


class BehindSkip(nn.Module):
    """A function of a rectified sum that has a rectified term, as at the end of a residual block."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.function = function

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.last(self.function(torch.relu(self.second(hidden) + hidden)))


@pytest.mark.parametrize(
    "function", [lambda y: 0.5 * y + 1, torch.relu, nn.functional.gelu], ids=["line", "relu", "gelu"]
)
def test_a_function_of_a_rectified_sum(function):
    """Its statistics are those that `propagate` has for the folded model."""
    torch.manual_seed(0)
    moments = vp.Moments(torch.zeros(1, 6), torch.ones(1, 6))
    model = vp.normalize(BehindSkip(function), moments, form="paper")
    output = vp.propagate(vp.fold(model), moments).output
    torch.testing.assert_close(output.mean, torch.zeros(1, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(output.var, torch.ones(1, 3), atol=1e-4, rtol=0)


def test_work_grows_with_the_layers_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer reads was evaluated together with what all others read, here behind layer norms."""
    evaluated: list[int] = []
    run = statistics.Evaluation.run

    def counted(evaluation: Any) -> None:
        evaluated.append(len(evaluation.plan.program.nodes))
        run(evaluation)

    monkeypatch.setattr(statistics.Evaluation, "run", counted)
    work = []
    for count in (3, 12):
        evaluated.clear()
        layers = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(count)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = vp.normalize(nn.Sequential(*layers), vp.Moments(0.0, 1.0), example=(1, 4), init="preserve")
        assert len(sites(model)) == count
        work.append(sum(evaluated))
    assert work[1] < 6 * work[0]
