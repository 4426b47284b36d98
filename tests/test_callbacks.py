"""Callbacks without their frameworks: the numbers are right, and every writer gets them by its own interface."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import varprop as vp
from varprop import callbacks
from varprop.callbacks import CallbackError, LayerWatcher

X = torch.randn(4000, 5, generator=torch.Generator().manual_seed(0))
MOMENTS = vp.Moments(torch.zeros(1, 5), torch.ones(1, 5))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))


class Board:
    def __init__(self):
        self.seen = {}

    def add_scalar(self, name, value, step):
        self.seen[name, step] = value


class Log:
    def __init__(self):
        self.lines = []

    def log(self, values, step):
        self.lines.append((step, values))


def test_predictions_follow_the_parameters_and_agree_with_what_is_measured():
    board, log, seen = Board(), Log(), []
    network = model()
    watcher = LayerWatcher(network, MOMENTS, to=[board, log, lambda values, step: seen.append((values, step))], every=2)
    for step in range(3):
        with watcher.step(step):
            network(X)
        with torch.no_grad():
            network[0].weight.mul_(2.0)
    steps = [step for step, _ in log.lines]
    assert steps == [0, 2] and [step for _, step in seen] == [0, 2] and {step for _, step in board.seen} == {0, 2}
    for _, values in log.lines:
        assert set(values) == {f"std/{path}/{kind}" for path in "012" for kind in ("predicted", "measured")}
        for path in "012":
            assert values[f"std/{path}/predicted"] == pytest.approx(values[f"std/{path}/measured"], rel=0.1)
    assert board.seen["std/0/measured", 2] > 3 * board.seen["std/0/measured", 0]
    assert not network[0]._forward_hooks


def test_positions_that_are_predicted_as_alike_are_measured_together():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())  # zeros at the border: other means there
    x, seen = torch.rand(1000, 3, 6, 6), []
    for per in ("channel", "element"):
        watcher = LayerWatcher(network, vp.input_moments(x, per=per), to=lambda values, step: seen.append(values))
        with watcher.step(0):
            network(x)
    alike, apart = seen
    assert alike["std/0/measured"] > 1.1 * apart["std/0/measured"]
    for values in seen:
        assert values["std/0/measured"] == pytest.approx(values["std/0/predicted"], rel=0.01)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 6), nn.Linear(3, 6)

    def forward(self, x, y):
        return self.left(x) + self.right(y)


def test_moments_say_the_shapes_of_all_inputs():
    y = torch.randn(4000, 3, generator=torch.Generator().manual_seed(1))
    network, log = TwoInputs(), Log()
    given = {"x": vp.input_moments(X), "y": vp.input_moments(y)}
    with LayerWatcher(network, given, to=log).step(0):
        network(X, y)
    ((_, values),) = log.lines
    for path in ("left", "right"):
        assert values[f"std/{path}/predicted"] == pytest.approx(values[f"std/{path}/measured"], rel=0.1)


def test_the_shape_of_an_example_is_enough_for_tokens():
    network, log = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3)), Log()
    with LayerWatcher(network, vp.Tokens.uniform(10), (1, 7), to=log).step(0):
        network(torch.randint(10, (64, 7)))
    assert "std/1/predicted" in log.lines[0][1]


@pytest.mark.parametrize(
    ("network", "given", "message"),
    [
        (model, vp.Moments(0.0, 1.0), "Moments of one number have no shape"),
        # its predictions would be those of images of one pixel
        (lambda: nn.Conv2d(3, 4, 3, padding=1), vp.Moments(torch.zeros(1, 3, 1, 1), 1.0), "say how long it is"),
    ],
)
def test_moments_that_do_not_say_the_shape_are_asked_for_it(network, given, message):
    with pytest.raises(vp.CaptureError, match=message):
        LayerWatcher(network(), given, to=Log())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LayerWatcher(model(), MOMENTS, to=3), "int has neither add_scalar nor log"),
        (lambda: LayerWatcher(model(), MOMENTS), "There is nothing to write to"),
        (lambda: LayerWatcher(model(), MOMENTS, to=Log(), every=0), "every must be at least 1 step, got 0"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(call, message):
    with pytest.raises(CallbackError, match=message):
        call()


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_framework_that_is_missing_is_named(monkeypatch, name):
    for module in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    for call in (
        getattr(callbacks, f"{name}_lr_finder"),
        lambda: getattr(callbacks, f"{name}_watcher")(MOMENTS, to=Log()),
    ):
        with pytest.raises(CallbackError, match=rf"needs {name}.*pip install {name}".replace("needs l", "needs L")):
            call()


def test_the_finder_sets_the_rate_and_where_schedules_begin(monkeypatch, tmp_path):
    stand_in = ModuleType("transformers")
    stand_in.TrainerCallback = object
    monkeypatch.setitem(sys.modules, "transformers", stand_in)

    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model()

        def forward(self, x):
            return {"loss": self.body(x).square().mean()}

    trained = Trained()
    before = trained.body[0].weight.detach().clone()
    optimizer = torch.optim.SGD(trained.parameters(), 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    finder = callbacks.transformers_lr_finder(steps=3, maxiter=4, plot=tmp_path / "search.png")
    given = {"model": trained, "optimizer": optimizer, "lr_scheduler": schedule}
    finder.on_train_begin(None, SimpleNamespace(), None, train_dataloader=[{"x": X[:8]}] * 5, **given)
    assert len(finder.found.trace) == 4 and (tmp_path / "search.png").stat().st_size > 1000
    assert optimizer.param_groups[0]["lr"] == finder.found.lr == schedule.base_lrs[0]
    assert torch.equal(trained.body[0].weight, before)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(finder.found.lr / 2)
