"""The pains of batch norm, one by one, and that they are gone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import varprop as vp
from tests.norm.networks import Case, apart, both_forms, kept, sites


def fresh(name: str = "identity skip") -> tuple[Case, nn.Module]:
    given, normalized = kept(name)
    return given, copy.deepcopy(normalized).train()


def numbers(count: int, given: Case) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return 0.3 + torch.randn(count, *given.inputs[0].shape[1:], generator=generator, dtype=torch.float64)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def check_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert apart(ours[name], theirs[name]) <= tolerance, name


@pytest.mark.parametrize("name", ("conv", "own batch norm"))
def test_training_with_batch_size_one(name: str) -> None:
    given, model = fresh(name)
    optimizer = torch.optim.SGD(vp.param_groups(model, 0.1), lr=0.05)
    x, losses = given.inputs[0][:1], []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), torch.tensor([2]))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", ("conv", "own batch norm", "own norms", "branches"))
def test_train_and_eval_agree(name: str) -> None:
    given, model = fresh(name)
    assert torch.equal(given.run(model.train()), given.run(model.eval()))


def test_a_sample_does_not_see_its_neighbours() -> None:
    given, model = fresh()
    x = numbers(8, given)
    alone = torch.cat([model(x[i : i + 1]) for i in range(8)])
    assert apart(model(x), alone) <= 1e-12


def test_accumulated_batches_of_one_are_one_batch() -> None:
    given, model = fresh()
    x, target = numbers(64, given), torch.arange(64) % 4
    F.cross_entropy(model(x), target).backward()
    whole = gradients(model)
    model.zero_grad()
    for i in range(64):
        (F.cross_entropy(model(x[i : i + 1]), target[i : i + 1]) / 64).backward()
    check_close(gradients(model), whole, 1e-10)


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    given, model = fresh()
    x = numbers(4, given).requires_grad_()
    outputs = model(x)
    outputs.square().sum().backward()
    before = gradients(model)
    model.zero_grad()
    again = checkpoint(model, x, use_reentrant=use_reentrant)
    again.square().sum().backward()
    assert torch.equal(again, outputs)
    check_close(gradients(model), before, 1e-14)


@pytest.mark.parametrize("average", (None, get_ema_multi_avg_fn(0.9)), ids=("swa", "ema"))
def test_averaged_weights_need_no_pass_over_the_data(average: object) -> None:
    given, model = fresh("named parts")
    averaged = AveragedModel(model, multi_avg_fn=average)
    mean = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        given.run(model).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        with torch.no_grad():
            for ours, theirs in zip(mean.parameters(), model.parameters(), strict=True):
                rate = 1.0 if step == 0 else 0.1 if average else 1 / (step + 1)
                ours.lerp_(theirs, rate)
    assert not list(model.buffers())
    assert apart(given.run(averaged), given.run(mean)) <= 1e-12
    assert apart(given.run(vp.fold(averaged.module)), given.run(averaged)) <= 1e-12
    for site in sites(averaged).values():  # its own parameters, not those it was copied from
        found = [*site.statistics.values(), *(network.joint for network, _ in site.networks.values())]
        assert len(found) == 2 and all(one.graph.program.model is averaged.module for one in found)


def test_vmap_over_samples() -> None:
    given, model = fresh()
    x = numbers(5, given)
    assert apart(vmap(lambda sample: model(sample[None])[0])(x), model(x)) <= 1e-12


def test_per_sample_gradients() -> None:
    given, model = fresh()
    x, target = numbers(3, given), torch.tensor([0, 3, 1])
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (sample[None],)), label[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, target)
    for i in range(3):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), target[i : i + 1]).backward()
        check_close({name: g[i] for name, g in each.items()}, gradients(model), 1e-10)


def test_a_frozen_backbone_stays_put() -> None:
    given, model = fresh("named parts")
    model.features.requires_grad_(False)
    x = given.inputs[0]
    before = model.features(x)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(5 + 3 * x).square().sum().backward()  # other data than it was made for, in training mode
        optimizer.step()
    assert torch.equal(model.features(x), before)
    assert all(p.grad is None for p in model.features.parameters())


@both_forms
def test_gradcheck_through_the_statistics(form: str) -> None:
    torch.manual_seed(0)

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body, self.head = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(F.gelu(x + self.body(F.gelu(x))).mean((2, 3)))

    x = 0.5 + torch.randn(2, 1, 3, 3, dtype=torch.float64)
    moments = vp.Moments(torch.full((1, 1, 1, 1), 0.5).double(), torch.ones(1, 1, 1, 1).double())
    model = vp.normalize(Small().double(), moments, example=x, form=form)
    names = [name for name, _ in model.named_parameters()]
    generator = torch.Generator().manual_seed(4)
    values = [p.detach() + 0.2 * torch.randn(p.shape, generator=generator).double() for p in model.parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, values, strict=True)), (x,))

    inputs = tuple(t.clone().requires_grad_() for t in (x, *values))
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradcheck(run, inputs)
