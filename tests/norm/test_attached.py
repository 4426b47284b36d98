"""One autograd node serves pass after pass, and nobody can tell; models that ran are freed.

CUDA graphs are stood in for as in `test_recording`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from tests.norm import test_recording
from tests.norm.networks import sites
from tests.norm.test_recording import STEPS, gradients, launched, network, plan_of, same, shifted_, trained, warmed
from varprop.norm import autograd_node, together, traced

like_cuda = test_recording._like_cuda  # used by every test here too


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every node that is made, as it is made."""
    nodes = []

    def apply(*arguments: Any) -> Any:
        found = autograd_node.apply_fold(*arguments)
        nodes.append(found[0].grad_fn)
        return found

    monkeypatch.setattr(together, "apply_fold", apply)
    yield nodes
    nodes.clear()


def one_layer() -> tuple[nn.Module, Tensor]:
    """Nothing of its weight is saved for the backward, since its input needs no gradient."""
    torch.manual_seed(0)
    moments = vp.Moments(torch.zeros(1, 4), torch.ones(1, 4))
    return vp.normalize(nn.Sequential(nn.Linear(4, 3)), moments, example=torch.zeros(2, 4)), torch.randn(2, 4)


class TwoHeads(nn.Module):
    """Two layers that read the same, so that neither needs the other on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def two_heads() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    moments = vp.Moments(torch.zeros(1, 4), torch.ones(1, 4))
    return vp.normalize(TwoHeads(), moments, example=torch.zeros(2, 4)), torch.randn(2, 4)


def step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def test_one_node_serves_all_passes_once_they_are_replayed(made: list[Any]) -> None:
    model, x = network()
    other = launched(model)
    for ours, theirs in zip(trained(model, x, model), trained(other, x, other), strict=True):
        assert same(ours, theirs)
    of_ours = [node for node in made if node.recording is not None]
    assert len(of_ours) == 1 and len(made) == STEPS + test_recording.recording.PATIENCE + 1


@pytest.mark.parametrize("make", (network, one_layer))
@pytest.mark.parametrize("retained", (False, True))
def test_a_pass_that_is_not_over_keeps_its_versions(make: Callable[[], Any], retained: bool) -> None:
    model, x = make()
    loss = warmed(model, x)(x).square().mean()
    if retained:
        loss.backward(retain_graph=True)
    shifted_(model, 0.1)
    model(x)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_a_pass_that_went_backwards_in_part_keeps_its_versions() -> None:
    model, x = two_heads()
    for _ in range(STEPS):
        left, right = model(x)
        (left.sum() + right.sum()).backward()
    left, right = model(x)
    left.sum().backward()
    shifted_(model, 0.1)
    model(x)
    with pytest.raises(RuntimeError, match="changed in place"):
        right.sum().backward()


def test_a_part_that_nobody_asked_for() -> None:
    model, x = two_heads()
    other = launched(model)
    for network_ in (model, other):
        for n in range(STEPS + 2):
            network_.zero_grad()
            left, right = network_(x + n)
            (left.sum() + (right.sum() if n % 2 else 0)).backward()
            shifted_(network_, 0.1)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]


def test_parameters_are_frozen_and_thawed() -> None:
    model, x = network()
    next(iter(sites(model).values())).weight.requires_grad_(False)
    other = launched(warmed(model, x))
    for network_ in (model, other):
        first = next(iter(sites(network_).values()))
        for frozen in (True, False, False, True, False):
            first.weight.requires_grad_(not frozen)
            step(network_, x)
            assert (first.weight.grad is None) == frozen
            shifted_(network_, 0.1)
    assert same(gradients(model), gradients(other))


def test_another_parameter_at_the_same_address() -> None:
    model, x = network()
    warmed(model, x)
    first = next(iter(sites(model).values()))
    first.weight = nn.Parameter(first.weight.data)
    other = launched(model)
    step(model, x)
    step(other, x)
    assert same(gradients(model), gradients(other))


@pytest.mark.parametrize("hold", (lambda part: part, lambda part: part[:1], lambda part: part.detach()))
def test_what_is_held_of_a_pass_stays(hold: Callable[[Tensor], Tensor]) -> None:
    model, x = network()
    warmed(model, x)
    held: list[Tensor] = []
    first = next(iter(sites(model).values()))
    handle = first.register_forward_hook(lambda layer, *_: held.append(hold(layer.effective()[1])))
    step(model, x)
    handle.remove()
    before = held[0].detach().clone()
    for _ in range(3):
        shifted_(model, 0.1)
        step(model, x)
    assert torch.equal(held[0], before)


def test_what_a_hook_saved_stays() -> None:
    model, x = network()
    warmed(model, x)
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    output.sum().backward()
    before = [tensor.detach().clone() for tensor in held]
    del output
    for _ in range(3):
        shifted_(model, 0.1)
        step(model, x)
    assert same([tensor.detach() for tensor in held], before)


def test_passes_without_gradients_in_between(made: list[Any]) -> None:
    model, x = network()
    other = launched(warmed(model, x))
    made.clear()
    for network_ in (model, other):
        for _ in range(3):
            with torch.no_grad():
                network_(x)
            step(network_, x)
            shifted_(network_, 0.1)
    assert same(gradients(model), gradients(other))
    assert not [node for node in made if node is not None and node.recording is not None]


def test_passes_that_share_a_fold_by_promise() -> None:
    model, x = one_layer()
    warmed(model, x)
    with vp.unchanged(model):
        first, second = model(x).sum(), model(x + 1).sum()
        first.backward()
    shifted_(model, 0.1)
    step(model, x)
    with pytest.raises(RuntimeError, match="changed in place"):
        second.backward()


def test_derivatives_of_derivatives_of_a_replayed_fold() -> None:
    model, x = network()
    other = launched(warmed(model, x))
    found = []
    for network_ in (model, other):
        network_.double()
        for _ in range(STEPS):
            step(network_, x.double())
        grads = torch.autograd.grad(
            network_(x.double()).square().mean(), list(network_.parameters()), create_graph=True
        )
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), list(network_.parameters())))
    torch.testing.assert_close(*found)


def freed(model: nn.Module) -> Callable[[], bool]:
    alive = weakref.ref(model)
    gc.collect()
    return lambda: gc.collect() is not None and alive() is None


@pytest.mark.parametrize("make", (network, two_heads))
def test_a_model_that_ran_is_freed(make: Callable[[], Any]) -> None:
    model, x = make()
    for _ in range(STEPS):
        outputs = model(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
    is_freed = freed(model)
    assert not is_freed()
    del model, outputs
    assert is_freed()


def test_a_loss_outlives_its_model() -> None:
    model, x = network()
    other = launched(warmed(model, x))
    parameters = [*model.parameters()]
    loss = model(x).square().mean()
    is_freed = freed(model)
    del model
    assert is_freed()
    loss.backward()
    step(other, x)
    assert same([p.grad for p in parameters], gradients(other))  # type: ignore[misc]


def test_derivatives_of_derivatives_ask_for_the_model() -> None:
    model, x = network()
    loss = warmed(model, x)(x).square().mean()
    parameters = [*model.parameters()]
    is_freed = freed(model)
    del model
    assert is_freed()
    with pytest.raises(RuntimeError, match="no longer exists"):
        torch.autograd.grad(loss, parameters, create_graph=True)


def test_a_compiled_pass_lets_go_of_what_eager_ones_left_but_not_of_the_one_around_it() -> None:
    model, x = network()
    warmed(model, x)
    plan = plan_of(model)
    parameters = [p.detach() for p in plan.parameters()]
    plan.begin()
    around = plan.active
    traced._fold(parameters, [], [], plan.number, torch.float32)
    assert plan.active is around is not None
    plan.end()
    assert plan.folded is None and not plan.attachments.of


def test_what_is_attached_goes_with_its_recording() -> None:
    model, x = network()
    warmed(model, x)
    plan = plan_of(model)
    assert len(plan.attachments.of) == 1
    model.eval().train()
    assert not plan.attachments.of
    warmed(model, x)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    model(x)
    assert not plan.attachments.of
