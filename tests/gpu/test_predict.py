"""Predictions on a GPU: those of the CPU, and replayed as CUDA graphs where a program is called again."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.predict.cuda_replay import PATIENCE, PredictionGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    hidden = [nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.2), *hidden, nn.Linear(64, 5)), torch.randn(16, 8)


def convolutional() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)]
    strided = [nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]
    return nn.Sequential(*layers, *strided), torch.randn(6, 3, 16, 16)


def with_dropout(model: nn.Module) -> nn.Module:
    model.eval()
    for module in model.modules():
        module.train(isinstance(module, nn.Dropout))
    return model


# Products of a convolution's random weights with other noise take a few draws, which differ between devices.
@pytest.mark.parametrize(
    ("make", "weights", "tolerance"), [(mlp, True, 1e-3), (convolutional, False, 1e-3), (convolutional, True, 0.15)]
)
def test_replayed_predictions_are_those_of_the_cpu(make, weights, tolerance):
    model, x = make()
    names = [name for name, p in model.named_parameters() if p.ndim > 1 and weights]
    expected = vp.predict(model, x, input_var=0.01, parameter_var=dict.fromkeys(names, 1e-4))
    model, x = with_dropout(model).cuda(), x.cuda()
    program = vp.capture(model, x)
    for _ in range(PATIENCE + 2):
        found = vp.predict(program, x, input_var=0.01, parameter_var=dict.fromkeys(names, 1e-4))
        torch.testing.assert_close(found.mean.cpu(), expected.mean, rtol=1e-3, atol=1e-4)
        scale = float(expected.covariance.abs().max())
        torch.testing.assert_close(found.covariance.cpu(), expected.covariance, rtol=1e-2, atol=tolerance * scale)
        assert [share.name for share in found.shares] == [share.name for share in expected.shares]


def test_a_recording_is_replayed_and_sees_other_inputs_outputs_and_parameters():
    model, x = mlp()
    model, x = with_dropout(model).cuda(), x.cuda()
    program = vp.capture(model, x)
    for _ in range(PATIENCE + 1):
        vp.predict(program, x)
    assert [recording is not None for recording in program.facts[PredictionGraphs].recordings.values()] == [True]
    before = vp.predict(program, x)
    with torch.no_grad():
        model[-1].weight.mul_(2)
    doubled = vp.predict(program, x)
    torch.testing.assert_close(doubled.std, 2 * before.std, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(vp.predict(program, x.flip(0)).std, doubled.std.flip(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(vp.predict(program, x, outputs=[3]).std, doubled.std[:, 3:4], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(before.std, doubled.std / 2, rtol=1e-4, atol=1e-6)  # results are not written again
    assert not copy.deepcopy(program.facts[PredictionGraphs]).recordings


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.LSTM(4, 8, batch_first=True), nn.Dropout(0.3)
        self.second, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.dropout(self.first(x)[0]))[0][:, -1])


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Rows(), torch.randn(4, 3, 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's own use of torch
@pytest.mark.parametrize("make", [mlp, convolutional, recurrent])
def test_compiled_predictions_are_replayed_and_the_same(make):
    model, x = make()
    program = vp.capture(with_dropout(model).cuda(), x.cuda())
    for _ in range(PATIENCE + 2):
        expected, found = vp.predict(program, x.cuda()), vp.predict(program, x.cuda(), compile=True)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-3, atol=1e-4)
        scale = float(expected.covariance.abs().max())
        torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-2, atol=1e-3 * scale)
        x = x.flip(0)
    assert None not in program.facts[PredictionGraphs].recordings.values()


def test_what_waits_for_the_device_is_not_recorded():
    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    @vp.rule(Waits)
    def waits(module: nn.Module, x: vp.Moments) -> vp.Moments:
        assert bool((x.var >= 0).all())
        return x

    model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 4), Waits()).cuda(), torch.randn(4, 8, device="cuda")
    program = vp.capture(model, x)
    first = vp.predict(program, x)
    for _ in range(PATIENCE + 1):
        torch.testing.assert_close(vp.predict(program, x).covariance, first.covariance)
    assert [*program.facts[PredictionGraphs].recordings.values()] == [None]


def test_garbage_with_graphs_does_not_disturb_a_recording():
    """A program that was dropped is collected at some time, and its graphs must not be destroyed within a recording."""
    for _ in range(3):
        model, x = mlp()
        model, x = with_dropout(model).cuda(), x.cuda()
        program = vp.capture(model, x)
        for _ in range(PATIENCE + 2):
            vp.predict(program, x)
        assert None not in program.facts[PredictionGraphs].recordings.values()
        program.facts["itself"] = program  # collected by the garbage collector alone
        torch.cuda.synchronize()
        torch.rand(4, device="cuda")
