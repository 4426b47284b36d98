import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value

from varprop_lab.ensemble import EnsembleTrainer, flat_step, with_plain_norms_
from varprop_lab.protocol import DECAY, DOUBLE, METHODS, MOMENTUM, UNIT_NORM, Cell
from varprop_lab.training import SingleTrainer, adam_, invariant_names, project_

from .. import tiny


def cell(method, start="ap2", seed=0, **others):
    return Cell("tiny", method, start, seed, batch_size=16, **others)


CELLS = [
    *(cell(method, start, seed) for method in METHODS for start in ("none", "ap2") for seed in (0, 1)),
    cell("standard", "none", variant=DOUBLE),
    cell("analytic", variant=DECAY),
    cell("weight", variant=DECAY),
    cell("analytic", variant=UNIT_NORM),
    cell("weight", variant=UNIT_NORM),
    cell("batch", variant=DECAY),
    cell("batch", variant=MOMENTUM),
]
CHANGING = [
    cell("batch"),
    cell("weight", variant=DECAY),
    cell("weight", variant=UNIT_NORM),
]  # buffers, and all of a step
RATES = {each: 1e-3 * 1.3**index for index, each in enumerate(CELLS)}


def tick(steps):
    assert steps > 0


def trained(trainer, rates, epochs=2):
    trainer.reset(rates)
    for number in range(epochs):
        trainer.epoch(number, tick)
    return trainer


@pytest.fixture(scope="module")
def task():
    return tiny.task()


@pytest.fixture(scope="module")
def started(task):
    return task.starts(CELLS)


@pytest.fixture(scope="module")
def few_started(task):
    return task.starts([cell(method) for method in METHODS])


@pytest.fixture(scope="module")
def ensemble(task, started):
    return EnsembleTrainer(task, CELLS, started)


@pytest.fixture(scope="module")
def together(ensemble):
    """Losses, curves and tests of the ensemble, by cell."""
    trained(ensemble, [RATES[each] for each in ensemble.cells])
    return dict(
        zip(ensemble.cells, zip(ensemble.losses(), ensemble.curves(1), ensemble.test(), strict=True), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("which", CELLS, ids=lambda each: each.key)
def test_ensemble_and_one_at_a_time_agree(task, started, together, which):
    alone = trained(SingleTrainer(task, which, started[which]), [RATES[which]])
    loss, curves, tested = together[which]
    assert loss == pytest.approx(alone.losses()[0], rel=1e-9)
    assert curves == pytest.approx(alone.curves(1)[0], rel=1e-7)
    assert tested == pytest.approx(alone.test()[0], rel=1e-7)


def test_in_single_precision_they_agree_as_far_as_rounding_lets_them():
    # Twelve steps of Adam, whose first ones divide gradients by their own size, lose about three of seven digits.
    task = tiny.task(dtype=torch.float32)
    cells = [cell(method, "bn") for method in ("standard", "batch")]
    together = trained(EnsembleTrainer(task, cells), [1e-3] * 2)
    for index, each in enumerate(together.cells):
        alone = trained(SingleTrainer(task, each), [1e-3])
        assert together.losses()[index] == pytest.approx(alone.losses()[0], rel=1e-4)


@pytest.mark.slow
def test_divergence_of_one_cell_does_not_touch_the_others(ensemble):
    rates = [RATES[each] for each in ensemble.cells]
    calm = trained(ensemble, rates, epochs=1).losses()
    wild = [1e200 if index % 3 == 1 else rate for index, rate in enumerate(rates)]
    losses = trained(ensemble, wild, epochs=1).losses()
    for index, loss in enumerate(losses):
        assert loss == calm[index] if index % 3 != 1 else not loss < 1e6
    lost = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    assert lost
    tests = ensemble.test()
    assert all(tests[index][1] == 0 for index in lost if not math.isfinite(tests[index][0]))


def test_it_goes_on_from_a_kept_state_to_the_last_bit(task):
    ensemble = EnsembleTrainer(task, CHANGING)
    rates = [1e-3 * (1 + index) for index, _ in enumerate(ensemble.cells)]
    trained(ensemble, rates, epochs=1)
    kept = {name: tensor.clone() for name, tensor in ensemble.state().items()}
    ensemble.epoch(1, tick)
    wanted = ensemble.losses(), ensemble.curves(1)
    ensemble.load_(rates, kept)
    ensemble.epoch(1, tick)
    assert (ensemble.losses(), ensemble.curves(1)) == wanted


def test_cells_of_several_batch_sizes_are_refused(task):
    with pytest.raises(ValueError, match="one batch size"):
        EnsembleTrainer(task, [cell("weight"), Cell("tiny", "weight", "ap2", 0, batch_size=4)])


@pytest.mark.slow
def test_convolutions_train_together_too():
    def network():
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )

    task = tiny.task(factory=network, data=tiny.dataset(channels=2))
    cells = [cell(method, "bn") for method in ("batch", "analytic")]
    together = trained(EnsembleTrainer(task, cells), [1e-2] * 2, epochs=1)
    for index, each in enumerate(together.cells):
        alone = trained(SingleTrainer(task, each), [1e-2], epochs=1)
        assert together.losses()[index] == pytest.approx(alone.losses()[0], rel=1e-9)


def test_adam_is_that_of_torch_for_every_row():
    torch.manual_seed(0)
    rows = torch.randn(3, 7, dtype=torch.float64)
    rates = torch.tensor([1e-3, 1e-1, 3.0], dtype=torch.float64)
    parameters = [nn.Parameter(row.clone()) for row in rows]
    optimizers = [torch.optim.Adam([p], lr=float(rate)) for p, rate in zip(parameters, rates, strict=True)]
    mean, square = torch.zeros_like(rows), torch.zeros_like(rows)
    for number in range(1, 20):
        gradients = torch.randn_like(rows) * 10.0 ** torch.randint(-6, 3, rows.shape)
        for parameter, optimizer, gradient in zip(parameters, optimizers, gradients, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
        adam_(rows, gradients, mean, square, rates, torch.tensor(float(number), dtype=torch.float64))
    assert torch.allclose(rows, torch.stack([p.detach() for p in parameters]), rtol=1e-12, atol=0)


def test_the_projection_scales_rows_of_the_chosen_networks_only():
    weight = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    before = weight.clone()
    project_(weight, torch.tensor([True, False]))
    assert torch.allclose(weight[0].flatten(1).norm(dim=1), torch.ones(3, dtype=torch.float64))
    ratio = weight[0] / before[0]
    assert torch.allclose(ratio, ratio[:, :1, :1].expand_as(ratio))
    assert torch.equal(weight[1], before[1])


def test_names_of_weights_whose_scale_does_not_matter(few_started):
    models = {method: few_started[cell(method)].model for method in METHODS}
    assert invariant_names(models["standard"]) == []
    assert invariant_names(models["batch"]) == []
    assert invariant_names(models["analytic"]) == [f"{index}.weight" for index in (1, 3, 5)]
    assert len(invariant_names(models["weight"])) == 3


@pytest.mark.parametrize("method", METHODS)
def test_a_flat_graph_computes_the_same(task, few_started, method):
    model = few_started[cell(method)].model
    names = [name for name, _ in model.named_parameters()]
    buffers = {name: buffer for name, buffer in model.named_buffers()}

    def function(*tensors):
        *parameters, x, y = tensors

        def loss(values):
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            return F.cross_entropy(functional_call(model, ({**values}, copies), (x,)), y)

        gradients, value = grad_and_value(loss)(dict(zip(names, parameters, strict=True)))
        return [*(gradients[name] for name in names), value]

    x, y = task.batches(0, 16).first_batch().double(), torch.arange(16) % 3
    arguments = [*(p.detach() for p in model.parameters()), x, y]
    graph = flat_step(function, arguments)
    for ours, theirs in zip(graph(*arguments), function(*arguments), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    moved = [*(tensor * 1.1 for tensor in arguments[:-2]), x * 0.9, (y + 1) % 3]
    for ours, theirs in zip(graph(*moved), function(*moved), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 4), (8, 3, 4, 5)], ids=str)
def test_batch_norm_in_ordinary_operations_is_that_of_torch(shape):
    torch.manual_seed(0)
    theirs = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3).double()
    nn.init.normal_(theirs.weight)
    ours = with_plain_norms_(copy.deepcopy(theirs), batch_norm=True)
    assert type(ours) is not type(theirs)
    for training in (True, True, False):
        x, y = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for _ in range(2))
        x.requires_grad_(), y.requires_grad_()
        one, other = theirs.train(training)(x), ours.train(training)(y)
        assert torch.allclose(one, other, rtol=1e-12)
        one.pow(3).sum().backward()
        other.pow(3).sum().backward()
        assert torch.allclose(x.grad, y.grad, rtol=1e-9, atol=1e-12)
        assert torch.allclose(theirs.weight.grad, ours.weight.grad) and torch.allclose(theirs.bias.grad, ours.bias.grad)
        assert torch.allclose(theirs.running_mean, ours.running_mean, rtol=1e-12)
        assert torch.allclose(theirs.running_var, ours.running_var, rtol=1e-12)


def test_batch_norm_in_ordinary_operations_trains_together(task, monkeypatch):
    which = [cell("batch", start) for start in ("none", "bn")]
    plain = with_plain_norms_
    monkeypatch.setattr("varprop_lab.ensemble.with_plain_norms_", lambda model, batch_norm: plain(model, True))
    together = trained(EnsembleTrainer(task, which), [1e-2] * 2, epochs=1)
    for index, each in enumerate(which):
        alone = trained(SingleTrainer(task, each), [1e-2], epochs=1)
        assert together.losses()[index] == pytest.approx(alone.losses()[0], rel=1e-9)
        assert together.curves(1)[index] == pytest.approx(alone.curves(1)[0], rel=1e-7)
