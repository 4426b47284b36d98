"""The learning-rate search: known objectives, honest flags, and a model left as it was to the last bit."""

import copy
import functools
import math
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from varprop import LRSearch, find_lr, training_objective


def ordinary_step(model, optimizer, batch):
    x, y = batch
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def quadratic(optimum, floor=0.3):
    return lambda lr: (math.log10(lr) - optimum) ** 2 + floor


def diverging_above(edge, loss, how):
    def objective(lr):
        if math.log10(lr) <= edge:
            return loss(lr)
        if isinstance(how, float):
            return how
        raise how("diverged")

    return objective


DIVERGENCES = [math.nan, math.inf, -math.inf, FloatingPointError, OverflowError]


@pytest.mark.parametrize("optimum", [-5.5, -4.0, -3.1, -2.5])
def test_a_quadratic_is_solved(optimum):
    search = find_lr(quadratic(optimum))
    assert math.log10(search.lr) == pytest.approx(optimum, abs=1e-3)
    assert search.loss == pytest.approx(0.3, abs=1e-5)
    assert not (search.at_bound or search.flat or search.diverged or search.failed)
    assert "inside" in search.message
    assert search.widen() == search.bounds == (1e-6, 1e-2)


@pytest.mark.parametrize("optimum", [-4.6, -3.2])
def test_a_skewed_valley_is_solved(optimum):
    def objective(lr):
        x = math.log10(lr) - optimum
        return math.exp(2 * x) - 2 * x

    assert math.log10(find_lr(objective).lr) == pytest.approx(optimum, abs=0.02)


def test_the_trace_holds_every_evaluation_in_order():
    calls = []

    def objective(lr):
        calls.append(lr)
        return quadratic(-3.3)(lr)

    search = find_lr(objective, maxiter=7)
    assert [lr for lr, _ in search.trace] == calls
    assert len(calls) <= 7
    assert (search.lr, search.loss) == min(search.trace, key=lambda evaluation: evaluation[1])


@pytest.mark.parametrize("seed", range(5))
def test_noise_costs_little(seed):
    noise = random.Random(seed)
    search = find_lr(lambda lr: quadratic(-3.5)(lr) + 0.02 * noise.gauss(0, 1))
    assert math.log10(search.lr) == pytest.approx(-3.5, abs=0.4)


@pytest.mark.parametrize(("slope", "expected"), [(-1, (1e-6, 1.0)), (1, (1e-8, 1e-2))])
def test_an_optimum_outside_is_flagged_with_wider_bounds(slope, expected):
    search = find_lr(lambda lr: 10 + slope * math.log10(lr))
    assert search.at_bound
    assert not search.flat
    assert search.widen() == pytest.approx(expected)
    assert "bounds=({:g}, {:g})".format(*expected) in search.message
    wider = find_lr(quadratic(-0.5 if slope < 0 else -7.3), bounds=search.widen())
    assert not wider.at_bound


@pytest.mark.parametrize(("slope", "bound"), [(-1, 1e-2), (1, 1e-6)])
def test_a_bound_is_tried_where_the_best_rate_lies_next_to_it(slope, bound):
    objective = lambda lr: 10 + slope * math.log10(lr)  # noqa: E731
    search, plain = find_lr(objective), find_lr(objective, try_bounds=False)
    assert search.lr == bound and search.trace == (*plain.trace, (bound, objective(bound)))
    assert plain.lr != bound and plain.at_bound


def test_a_bound_that_is_worse_leaves_the_best_rate_inside():
    """Without trying it nothing tells whether the optimum lies beyond: noise keeps Brent away from .0095."""
    objective = lambda lr: abs(math.log10(lr) + 2.05) + (0.5 if lr == 1e-2 else 0.0)  # noqa: E731
    search = find_lr(objective, grids=(4,), maxiter=7)
    assert search.trace[-1] == (1e-2, pytest.approx(0.55)) and search.lr < 1e-2 and not search.at_bound
    inside = find_lr(quadratic(-3.3))
    assert inside.trace == find_lr(quadratic(-3.3), try_bounds=False).trace


def test_a_bound_where_training_diverges_is_no_choice():
    search = find_lr(lambda lr: math.inf if lr == 1e-2 else -math.log10(lr))
    assert search.trace[-1] == (1e-2, math.inf) and search.diverged and not search.at_bound and search.lr < 1e-2


def test_the_edge_of_divergence_is_no_bound():
    search = find_lr(diverging_above(-2.3, lambda lr: -math.log10(lr), math.nan))
    assert search.diverged
    assert not search.at_bound
    assert -2.5 < math.log10(search.lr) <= -2.3


@pytest.mark.parametrize("ripple", [0.0, 1e-5])
def test_a_plateau_is_flagged(ripple):
    search = find_lr(lambda lr: 2.3026 + ripple * math.sin(1e3 * math.log10(lr)))
    assert search.flat
    assert not search.at_bound
    assert search.widen() == pytest.approx((1e-8, 1.0))
    assert "flat" in search.message


def test_a_shallow_valley_is_not_flat_when_asked():
    shallow = lambda lr: 1 + 1e-4 * quadratic(-4)(lr)  # noqa: E731
    assert find_lr(shallow).flat
    assert not find_lr(shallow, flat_tolerance=1e-6).flat


@pytest.mark.parametrize("how", DIVERGENCES)
@pytest.mark.parametrize("edge", [-5.0, -4.6, -4.0, -3.4])
def test_divergence_pushes_the_search_down(how, edge):
    optimum = edge - 0.5
    search = find_lr(diverging_above(edge, quadratic(optimum), how))
    assert search.diverged
    assert not search.failed
    assert math.log10(search.lr) == pytest.approx(optimum, abs=0.15)
    assert all(loss == math.inf or math.isfinite(loss) for _, loss in search.trace)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_penalty_goes_with_the_size_of_the_losses(scale):
    search = find_lr(diverging_above(-3.4, lambda lr: scale * quadratic(-3.9)(lr), math.nan))
    assert math.log10(search.lr) == pytest.approx(-3.9, abs=0.15)


def test_all_diverged_is_said_and_not_applied():
    search = find_lr(lambda lr: math.nan)
    assert search.failed
    assert search.diverged
    assert not search.flat
    assert search.lr == min(lr for lr, _ in search.trace)
    assert search.widen() == pytest.approx((1e-10, 1e-6))
    with pytest.raises(ValueError, match="no rate to apply"):
        search.apply(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def test_other_errors_are_the_users():
    with pytest.raises(KeyError):
        find_lr(lambda lr: {}["missing"])


@pytest.mark.parametrize("bounds", [(0, 1), (1e-2, 1e-4), (1e-3, 1e-3), (1e-3, math.inf), (math.nan, 1)])
def test_bad_bounds_are_refused(bounds):
    with pytest.raises(ValueError, match="bounds"):
        find_lr(quadratic(-3), bounds=bounds)


def test_find_lr_leaves_the_generators_alone():
    before = rng_states()
    find_lr(lambda lr: random.random() + torch.rand(()).item() + np.random.rand())
    assert_same_rng(before)


def test_missing_extras_are_named(monkeypatch):
    search = find_lr(quadratic(-3))
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"\.\[lab\]"):
        find_lr(quadratic(-3))
    with pytest.raises(ImportError, match=r"\.\[lab\]"):
        search.plot()


class RecordingAxes:
    def __init__(self):
        self.lines = []

    def plot(self, x, y, style, label):
        self.lines.append((label, x, y))

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def test_the_plot_shows_every_evaluation():
    search = find_lr(diverging_above(-3.0, quadratic(-3.5), math.nan))
    axes = RecordingAxes()
    assert search.plot(axes) is axes
    lines = {label: list(zip(x, y, strict=True)) for label, x, y in axes.lines}
    assert len(lines["evaluations"]) + len(lines["diverged"]) == len(search.trace)
    assert lines["evaluations"] == sorted(e for e in search.trace if math.isfinite(e[1]))


def test_repr_is_one_line():
    text = repr(find_lr(lambda lr: -math.log10(lr)))
    assert text.startswith("LRSearch(lr=")
    assert "at_bound" in text
    assert "11 evaluations in [1e-06, 0.01]" in text  # the bound is one more


def test_apply_keeps_the_ratios_of_the_groups():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, [1e-3, 4e-3, 0.0, 2e-3], strict=True)]
    groups[3]["lr"] = torch.tensor(2e-3)
    optimizer = torch.optim.AdamW(groups)
    held = optimizer.param_groups[3]["lr"]
    search = LRSearch(0.1, 1.0, ((0.1, 1.0),), (1e-6, 1.0), False, False)
    assert search.apply(optimizer) is optimizer
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.025, 0.1, 0.0, 0.05])
    assert optimizer.param_groups[3]["lr"] is held
    assert "initial_lr" not in optimizer.param_groups[0]


def test_groups_without_a_rate_are_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    with pytest.raises(ValueError, match="ratios are unknown"):
        find_lr(quadratic(-3)).apply(optimizer)


# --- the training objective ---


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


@pytest.fixture
def loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=16, shuffle=True)


def used_optimizer(model):
    """An optimizer in the middle of a training: two groups, momenta, gradients left over."""
    groups = [{"params": model.first.parameters(), "lr": 1e-3}, {"params": list(model.last.parameters())}]
    optimizer = torch.optim.Adam(groups, lr=2e-3)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return optimizer


def rng_states():
    return random.getstate(), torch.get_rng_state(), np.random.get_state()


def assert_same_rng(before):
    after = rng_states()
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert all(np.array_equal(a, b) for a, b in zip(before[2], after[2], strict=True))


def snapshot(model, optimizer):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    grads = {name: copy.deepcopy(p.grad) for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    return values, grads, modes, copy.deepcopy(optimizer.state_dict())


def assert_same(one, other):
    """Equality to the last bit of nested containers of tensors."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def test_everything_is_restored_to_the_bit(loader):
    model = Network()
    optimizer = used_optimizer(model)
    model.eval()
    model.drop.train()
    gradient = model.first.weight.grad
    before, rng = snapshot(model, optimizer), rng_states()
    objective = training_objective(model, optimizer, loader, F.mse_loss, epochs=2)
    loss = objective(1e-2)
    assert math.isfinite(loss)
    assert_same(before, snapshot(model, optimizer))
    assert_same_rng(rng)
    assert model.first.weight.grad is gradient
    assert objective(1e-2) == loss
    assert objective(2e-2) != loss


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, FloatingPointError])
def test_everything_is_restored_after_an_exception(loader, error):
    model = Network()
    optimizer = used_optimizer(model)
    before, rng = snapshot(model, optimizer), rng_states()
    steps = []

    def failing(model, optimizer, batch):
        steps.append(ordinary_step(model, optimizer, batch))
        if len(steps) == 3:
            raise error("in the middle")
        return steps[-1]

    with pytest.raises(error):
        training_objective(model, optimizer, loader, step=failing)(1e-2)
    assert_same(before, snapshot(model, optimizer))
    assert_same_rng(rng)


def test_a_fresh_optimizer_and_absent_gradients_are_restored(loader):
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training_objective(model, optimizer, loader, F.mse_loss, epochs=1)(1e-2)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_a_loader_with_its_own_generator_is_restored():
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=generator)
    before = generator.get_state()
    objective = training_objective(Network, torch.optim.Adam, loader, F.mse_loss, epochs=1)
    assert objective(1e-3) == objective(1e-3)
    assert torch.equal(generator.get_state(), before)


def test_the_value_is_the_mean_of_the_steps_with_weights_that_vanish_to_a_tenth_in_one_epoch(loader):
    seen = []

    def recording(model, optimizer, batch):
        seen.append(float(ordinary_step(model, optimizer, batch)))
        return seen[-1]

    value = training_objective(Network, torch.optim.Adam, loader, step=recording)(1e-3)
    assert len(seen) == 5 * 4
    weights = 0.1 ** (torch.arange(19, -1, -1, dtype=torch.float64) / 4)
    assert value == pytest.approx(float((weights * torch.tensor(seen)).sum() / weights.sum()), rel=1e-13)


def test_the_mean_of_one_step_is_its_loss():
    objective = training_objective(Network, torch.optim.Adam, [None], step=lambda *_: 5.0, epochs=1)
    assert objective(1e-3) == 5.0


def test_groups_scale_together_and_follow_the_schedule(loader):
    rates = []

    def recording(model, optimizer, batch):
        rates.append([group["lr"] for group in optimizer.param_groups])
        return 0.0

    model = Network()
    optimizer = used_optimizer(model)
    schedule = [1.0, 0.0, 0.5]
    objective = training_objective(model, optimizer, loader, epochs=3, step=recording, schedule=schedule.__getitem__)
    objective(0.08)
    expected = [[0.04 * factor, 0.08 * factor] for factor in schedule for _ in range(4)]
    assert rates == [pytest.approx(pair) for pair in expected]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 2e-3]


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        functools.partial(torch.optim.SGD, momentum=0.0),
        lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    ],
)
def test_factories_start_from_the_same_weights(loader, optimizer):
    objective = training_objective(Network, optimizer, loader, F.mse_loss, epochs=1)
    rng = rng_states()
    losses = [objective(1e-2), objective(1e-2)]
    assert losses[0] == losses[1]
    assert_same_rng(rng)


def test_any_batch_structure_goes_through_the_step():
    batches = [{"text": torch.randn(3, 4), "weights": torch.rand(3)} for _ in range(6)]

    def accumulate(model, optimizer, batch):
        loss = (model(batch["text"]).squeeze(1).square() * batch["weights"]).mean()
        (loss / 2).backward()
        model.count = getattr(model, "count", 0) + 1
        if model.count % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    objective = training_objective(Network, torch.optim.Adam, batches, step=accumulate, epochs=2)
    assert math.isfinite(objective(1e-3))


@pytest.mark.parametrize(("limit", "bad"), [(math.inf, math.nan), (math.inf, math.inf), (10.0, 1e9)])
def test_an_evaluation_stops_where_it_diverges(loader, limit, bad):
    calls = []

    def diverging(model, optimizer, batch):
        calls.append(batch)
        return 1.0 if len(calls) < 3 else bad

    objective = training_objective(Network, torch.optim.Adam, loader, step=diverging, loss_limit=limit)
    assert objective(1e-3) == math.inf
    assert len(calls) == 3


def test_a_stream_without_length_needs_its_steps():
    class Stream:
        def __iter__(self):
            return iter([(torch.ones(2, 4), torch.ones(2, 1))] * 3)

    with pytest.raises(TypeError, match="steps_per_epoch"):
        training_objective(Network, torch.optim.Adam, Stream(), F.mse_loss)
    objective = training_objective(Network, torch.optim.Adam, Stream(), F.mse_loss, epochs=1, steps_per_epoch=3)
    assert math.isfinite(objective(1e-3))


def test_bad_use_of_the_objective_is_refused(loader):
    model = Network()
    with pytest.raises(TypeError, match="either loss_fn"):
        training_objective(model, torch.optim.Adam, loader)
    with pytest.raises(TypeError, match="either loss_fn"):
        training_objective(model, torch.optim.Adam, loader, F.mse_loss, step=ordinary_step)
    with pytest.raises(TypeError, match="iterator"):
        training_objective(model, torch.optim.Adam, iter(loader), F.mse_loss)
    with pytest.raises(ValueError, match="empty"):
        training_objective(model, torch.optim.Adam, [], F.mse_loss)
    with pytest.raises(ValueError, match="epochs"):
        training_objective(model, torch.optim.Adam, loader, F.mse_loss, epochs=0)
    with pytest.raises(TypeError, match="factory"):
        training_objective(Network, torch.optim.Adam(model.parameters()), loader, F.mse_loss)


def test_a_search_over_a_real_training_prefers_a_sensible_rate(loader):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = snapshot(model, optimizer)
    objective = training_objective(model, optimizer, loader, F.mse_loss, epochs=2, loss_limit=1e3)
    search = find_lr(objective, bounds=(1e-4, 1e4))
    assert 1e-2 < search.lr < 1.5
    assert search.diverged
    assert_same(before, snapshot(model, optimizer))
    assert optimizer.param_groups[0]["lr"] == 1.0
    search.apply(optimizer)
    assert optimizer.param_groups[0]["lr"] == search.lr


def test_a_grid_first_finds_the_deeper_of_two_valleys():
    def loss(lr):
        place = math.log10(lr)
        return min(2 + 0.1 * (place + 5) ** 2, 1 + 20 * (place + 2.3) ** 2)

    plain, looked = find_lr(loss), find_lr(loss, maxiter=12, grids=(4, 4))
    assert plain.loss > 1.5 and looked.loss < 1.01
    assert len(looked.trace) == 13 and looked.trace[-1][0] == 1e-2  # next to the bound, so that this is tried too
    spaced = [math.log10(lr) for lr, _ in looked.trace[:4]]
    assert spaced == pytest.approx([-5.5, -4.5, -3.5, -2.5])
    assert all(-3.5 < math.log10(lr) < -2 for lr, _ in looked.trace[4:-1])


@pytest.mark.parametrize("grids", [(10,), (0,), (5, 5)])
def test_grids_leave_brent_an_evaluation(grids):
    with pytest.raises(ValueError, match="maxiter must be at least 1 above the evaluations on grids"):
        find_lr(lambda lr: lr, grids=grids)


@pytest.mark.parametrize(
    "batch", [{"x": torch.ones(4, 2), "y": torch.zeros(4)}, torch.ones(2, 3), [torch.ones(2, 3)] * 3]
)
def test_a_batch_that_is_no_pair_is_named(batch):
    """Of a tensor with two rows one was taken for the input and one for the target."""
    model = torch.nn.Linear(3, 1)
    objective = training_objective(model, torch.optim.SGD, [batch], torch.nn.functional.mse_loss)
    with pytest.raises(TypeError, match=rf"two tensors, not for a {type(batch).__name__}: pass `step`"):
        find_lr(objective)


@pytest.mark.parametrize(("value", "named"), [(None, "NoneType"), (torch.ones(3), r"Tensor of shape \(3,\)")])
def test_an_objective_without_a_number_is_named(value, named):
    with pytest.raises(TypeError, match=f"The objective must return the loss, one number, not a {named}"):
        find_lr(lambda lr: value)
    step = training_objective(torch.nn.Linear(3, 1), torch.optim.SGD, [0], step=lambda *_: value)
    with pytest.raises(TypeError, match=f"The step must return the loss, one number, not a {named}"):
        find_lr(step)
