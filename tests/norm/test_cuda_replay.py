"""Folds that are replayed give what folds that are computed give, whoever still holds the results of earlier ones.

CUDA graphs are stood in for by work that is done again and written to where its first results lie.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import varprop as vp
from tests.norm.networks import sites
from varprop.norm.fold import compiled as compiled_module
from varprop.norm.fold import cuda_replay, dispatch

STEPS = cuda_replay.PATIENCE + 4


class Graph:
    """Work that was done once, and is done again into the same buffers."""

    def __init__(self, work: Callable[[], cuda_replay.Results]) -> None:
        self.work, self.results, self.replays = work, work(), 0
        for buffer in self.results[0]:
            buffer.fill_(torch.nan)  # what is recorded has not run yet

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for buffer, new in zip(self.results[0], self.work()[0], strict=True):
            buffer.copy_(new)


_make_backend = dispatch._make_backend


def like_kernels(*arguments: Any) -> dispatch.Backend:
    """The passes in torch as if they could be recorded."""
    backend: Any = _make_backend(*arguments)
    backend.moments.replayable = backend.rows.replayable = True
    return backend


@pytest.fixture(autouse=True)
def _like_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is folded anew at each pass, by kernels that can be recorded."""

    def recorded(work: Callable[[], cuda_replay.Results]) -> tuple[Graph, cuda_replay.Results]:
        graph = Graph(work)
        return graph, graph.results

    monkeypatch.setattr(cuda_replay, "_recorded", recorded)
    monkeypatch.setattr(dispatch, "_make_backend", like_kernels)
    monkeypatch.setattr(dispatch, "RECORDED_ON", ("cpu",))
    monkeypatch.setattr(dispatch, "stream_to_record", lambda parameter: 0)


def network(channels_last: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Sigmoid(), nn.Conv2d(5, 3, 1)]
    moments = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))
    model = vp.normalize(nn.Sequential(*layers), moments, example=torch.zeros(2, 3, 6, 6))
    order = torch.channels_last if channels_last else torch.contiguous_format
    return with_executors_of_its_own(model.to(memory_format=order)), torch.randn(2, 3, 6, 6)


def with_executors_of_its_own(model: nn.Module, recordable: bool = True) -> nn.Module:
    """As if its folds had never run."""
    for site in sites(model).values():
        for network_, _ in site.networks.values():
            network_.executor = dispatch.Executor(network_.layout)
            network_.executor.recordable = recordable
    return model


def network_of(model: nn.Module) -> Any:
    return next(iter(sites(model).values())).networks[True][0]


def recordings(model: nn.Module, compiled: bool = False) -> list[cuda_replay.Recording]:
    """Those at the addresses where the model ran last."""
    found = list(network_of(model).executor.recorders[compiled].recordings.values())
    return found[-1] if found else []


def launched(model: nn.Module) -> nn.Module:
    """The same model, nothing recorded."""
    return with_executors_of_its_own(copy.deepcopy(model), recordable=False)


def warmed(model: nn.Module, x: Tensor) -> nn.Module:
    for _ in range(cuda_replay.PATIENCE + 1):
        model.zero_grad()
        model(x).square().mean().backward()
    assert len(recordings(model)) == 1
    model.zero_grad()
    return model


def shifted_(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True))


def trained(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor], passes: int = 1) -> Iterator[list[Tensor]]:
    """Losses and gradients of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for part in range(passes):
            loss = call(x + step + part).square().mean()
            loss.backward()
            losses.append(loss.detach())
        yield [*losses, *gradients(model)]
        optimizer.step()


@pytest.mark.parametrize("channels_last", (False, True))
def test_training_is_the_same_and_needs_one_set_of_buffers(channels_last: bool) -> None:
    model, x = network(channels_last)
    other = launched(model)
    for ours, theirs in zip(trained(model, x, model), trained(other, x, other), strict=True):
        assert same(ours, theirs)
    assert not recordings(other)
    (found,) = recordings(model)
    assert found.forward.graph.replays == STEPS - cuda_replay.PATIENCE == found.backwards[0].graph.replays
    assert len(found.backwards) == 1


@pytest.mark.parametrize("passes", (2, 3))
def test_accumulated_gradients(passes: int) -> None:
    model, x = network()
    other = launched(model)
    for ours, theirs in zip(trained(model, x, model, passes), trained(other, x, other, passes), strict=True):
        assert same(ours, theirs)
    (found,) = recordings(model)
    assert len(found.backwards) == cuda_replay.SETS  # one holds the sum, the other takes what is added to it


def test_what_somebody_holds_stays() -> None:
    model, x = network()
    warmed(model, x)
    held: list[Tensor] = []
    for step in range(5):
        model.zero_grad()
        model(x + step).square().mean().backward()
        weight, bias = network_of(model).fold().pairs[0]
        held += [weight, bias.detach(), *(p.grad[:1] for p in model.parameters())]
        if not step:
            before = [tensor.detach().clone() for tensor in held]
        shifted_(model, 0.1)
    assert same([tensor.detach() for tensor in held[: len(before)]], before)
    other = launched(model)
    for network_ in (model, other):
        network_.zero_grad()
        network_(x).square().mean().backward()
    assert same(gradients(model), gradients(other))
    assert len(recordings(model)) == cuda_replay.SETS


def test_buffers_are_taken_again_once_they_are_let_go() -> None:
    model, x = network()
    warmed(model, x)
    (first,) = recordings(model)
    held = model(x)
    count = first.forward.graph.replays
    model(x)
    assert first.forward.graph.replays == count and len(recordings(model)) == 2
    del held
    model(x)
    assert first.forward.graph.replays == count + 1 and len(recordings(model)) == 2


@pytest.mark.parametrize("passes", (2, 3))
def test_several_passes_before_the_first_backward(passes: int) -> None:
    model, x = network()
    other = launched(warmed(model, x))
    for network_ in (model, other):
        outputs = [network_(x + part) for part in range(passes)]
        for output in reversed(outputs):
            output.square().mean().backward()
    assert same(gradients(model), gradients(other))


def test_a_retained_graph_can_be_run_again_after_other_passes() -> None:
    model, x = network()
    warmed(model, x)
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    expected = gradients(model)
    model(x + 1).square().mean().backward()
    model.zero_grad()
    loss.backward()
    assert same(gradients(model), expected)


def test_a_change_before_the_backward_is_refused_still() -> None:
    model, x = network()
    loss = warmed(model, x)(x).square().mean()
    shifted_(model, 0.1)
    model(x)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize("reentrant", (False, True))
def test_gradient_checkpoints(reentrant: bool) -> None:
    model, x = network()
    x = x.requires_grad_()
    other = launched(model)
    for network_ in (model, other):
        for _ in range(STEPS):
            network_.zero_grad()
            checkpoint(network_, x, use_reentrant=reentrant).square().mean().backward()
    assert recordings(model) and same(gradients(model), gradients(other))


def test_what_was_recorded_in_inference_mode_can_be_trained() -> None:
    model, x = network()
    with torch.inference_mode():
        for _ in range(STEPS):
            model(x)
    assert recordings(model)
    other = launched(model)
    for network_ in (model, other):
        network_(x).square().mean().backward()
    assert same(gradients(model), gradients(other))


def moved(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def read_in_another_order(model: nn.Module) -> None:
    """The same addresses, other strides."""
    for site in sites(model).values():
        strides = torch.empty_like(site.weight, memory_format=torch.channels_last).stride()
        site.weight.data = site.weight.data.as_strided(site.weight.shape, strides)


@pytest.mark.parametrize("change", (moved, read_in_another_order))
def test_parameters_that_moved_are_recorded_anew(change: Callable[[nn.Module], None]) -> None:
    model, x = network()
    warmed(model, x)
    old = recordings(model)[0]
    change(model)
    other = launched(model)
    for network_ in (model, other):
        for _ in range(STEPS):
            network_.zero_grad()
            network_(x).square().mean().backward()
    assert same(gradients(model), gradients(other))
    assert recordings(model) and recordings(model)[0] is not old


def test_parameters_that_move_before_the_backward_do_not_lead_it_astray() -> None:
    model, x = network()
    warmed(model, x)
    (found,) = recordings(model)
    output, count = model(x), found.backwards[0].graph.replays
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    output.square().mean().backward()
    assert found.backwards[0].graph.replays == count
    ours = gradients(model)
    other = launched(model)
    other.zero_grad()
    other(x).square().mean().backward()
    assert same(ours, gradients(other))


@pytest.mark.parametrize("backend", ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow)))
@pytest.mark.parametrize("passes", (1, 2))
def test_compiled_training_is_the_same(backend: str, passes: int) -> None:
    torch._dynamo.reset()
    model, x = network(channels_last=True)
    other = launched(model)
    ours, theirs = (torch.compile(network_, backend=backend, fullgraph=True) for network_ in (model, other))
    for found, expected in zip(trained(model, x, ours, passes), trained(other, x, theirs, passes), strict=True):
        assert same(found, expected)
    (replayed,) = recordings(model, compiled=True)
    assert replayed.forward.graph.replays and all(back.graph.replays for back in replayed.backwards)
    assert len(replayed.backwards) == min(passes, cuda_replay.SETS)
    assert not recordings(model) and not recordings(other, compiled=True)


def test_what_a_compiled_model_returned_stays() -> None:
    torch._dynamo.reset()
    model, x = network()
    compiled = torch.compile(model, backend="aot_eager")
    held, expected = [], []
    for step in range(STEPS + 3):
        output = compiled(x + step)
        model.zero_grad(set_to_none=True)
        output.square().mean().backward(retain_graph=True)
        held.append([output.detach(), *(p.grad for p in model.parameters())])
        expected.append([tensor.clone() for tensor in held[-1]])
        if step % 2:
            shifted_(model, 0.1)
    assert recordings(model, compiled=True)
    assert all(same(ours, theirs) for ours, theirs in zip(held, expected, strict=True))


def test_what_a_compiled_fold_keeps_for_its_backward_stays() -> None:
    model = network()[0]
    parameters = [p.detach() for p in network_of(model).parameters()]
    fold = functools.partial(
        compiled_module._fold, parameters, [], [], network_of(model).executor.number, torch.float32
    )
    for _ in range(STEPS):
        fold()
    kept = fold()[2:]
    before = [part.clone() for part in kept]
    shifted_(model, 0.1)
    others = fold()[2:]
    assert len(recordings(model, compiled=True)) == 2
    assert same(kept, before) and not same(others, before)


@pytest.mark.parametrize("rows", (False, True))
@pytest.mark.parametrize("alone", (False, True))
def test_functions_evaluated_by_torch_are_recorded_if_they_run_on_the_device_alone(
    alone: bool, rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def partly(*arguments: Any) -> dispatch.Backend:
        backend: Any = _make_backend(*arguments)
        backend.rows.replayable = rows
        return backend

    def trial(work: Callable[[], Any]) -> bool:
        tried.append(work())
        return alone

    monkeypatch.setattr(dispatch, "_make_backend", partly)
    monkeypatch.setattr(dispatch, "runs_on_device_alone", trial)
    model, x = network()
    other = launched(model)
    for ours, theirs in zip(trained(model, x, model), trained(other, x, other), strict=True):
        assert same(ours, theirs)
    assert bool(recordings(model)) == (alone and rows)
    assert len(tried) == rows  # once, not in every pass
