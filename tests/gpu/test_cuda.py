"""The normalization on a GPU: right, reproducible, without host synchronisation, captured and compiled."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from tests.models import ResNet, UNet
from tests.norm.networks import both_forms
from varprop.norm import Normalized
from varprop.norm.fold.cuda_replay import PATIENCE, SETS, Recording
from varprop.norm.fold.reference import fold_parts
from varprop.norm.network import Network
from varprop_lab.training import captured_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """cuDNN's reproducible algorithms without TF32, so that what differs is ours."""
    torch.compiler.reset()  # the models of all tests together would exceed what one function may be compiled for
    backends = torch.backends
    before = backends.cudnn.deterministic, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    backends.cudnn.deterministic, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = True, False, False
    yield
    backends.cudnn.deterministic, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = before


class PaperNet(nn.Sequential):
    """The paper's CIFAR network, its activation written by hand unless another is asked for."""

    def __init__(self, width: int = 24, activation: Callable[[], nn.Module] | None = None) -> None:
        plan = [(3, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 2), (3, 1, 2), (3, 2, 2), (1, 1, 2)]
        layers: list[nn.Module] = []
        before = 3
        for kernel, stride, times in plan:
            layers += [nn.Conv2d(before, width * times, kernel, stride, kernel // 2), (activation or Leaky)()]
            before = width * times
        super().__init__(*layers, nn.Conv2d(before, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LogSoftmax(1))


class Leaky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + 0.03 * x


class Chain(nn.Sequential):
    """A plain stack, to see what depth costs."""

    def __init__(self, depth: int = 6) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for place in range(depth):
            layers += [nn.Linear(3 * 16 * 16 if not place else 20, 20), nn.Sigmoid()]
        super().__init__(*layers, nn.Linear(20, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "paper": PaperNet,
    "smooth": lambda: PaperNet(activation=nn.SiLU),
    "resnet": ResNet,
    "unet": UNet,
    "sigmoid": Chain,
    "softsign": lambda: nn.Sequential(  # without a kernel: torch evaluates it between two launches of the moment pass
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.Softsign(),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 9, 3),
    ),
    "gelu": lambda: nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.GELU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 9, 3)),
}


def normalized(name: str, seed: int = 0, form: Any = "paper") -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    model = MODELS[name]()
    shape = (8, 3, 16, 16)
    data = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))
    found = vp.normalize(model, data, example=torch.zeros(shape), form=form)
    with torch.no_grad():
        for site in sites(found):
            site.scale.uniform_(0.5, 1.5), site.shift.normal_(0, 0.3)
    return found.cuda(), torch.randn(shape, device="cuda")


def sites(model: nn.Module) -> list[Normalized]:
    return [m for m in model.modules() if isinstance(m, Normalized)]


def network_of(model: nn.Module) -> Network:
    return sites(model)[0].networks[True][0]


def recordings(model: nn.Module, compiled: bool = False) -> list[Recording]:
    """Those at the addresses where the model ran last."""
    found = list(network_of(model).executor.recorders[compiled].recordings.values())
    return found[-1] if found else []


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    ours, theirs = ours.double().cpu(), theirs.double().cpu()
    return float((ours - theirs).norm()) <= tolerance * float(theirs.norm()) + 1e-5


def folded_parts(network: Network) -> list[Tensor]:
    """Folded weights of all layers, then their biases."""
    pairs = network.fold().pairs
    return [pair[k] for k in (0, 1) for pair in pairs]


@both_forms
@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_agree_with_the_float64_reference(name: str, form: str) -> None:
    model, _ = normalized(name, form=form)
    exact = copy.deepcopy(model).cpu().double()
    network, reference = network_of(model), network_of(exact)
    ours, theirs = folded_parts(network), fold_parts(reference.layout, None, reference.parameters())
    backend = network.executor.backend([layer.weight for layer in network.layers])
    assert [type(of_pass).__name__ for of_pass in (backend.moments, backend.rows)] == ["TritonMoments", "TritonRows"]
    torch.manual_seed(1)
    grads = [torch.randn_like(part).cpu() / part.numel() ** 0.5 for part in ours]
    for parts in (ours, theirs):
        torch.autograd.backward(parts, [g.to(part) for g, part in zip(grads, parts, strict=True)])
    assert all(close(a, b, 1e-5) for a, b in zip(ours, theirs, strict=True))
    for (path, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert close(p.grad, q.grad, 1e-5), path


def step_of(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, **autocast: Any) -> Callable[[], Tensor]:
    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", enabled=bool(autocast), **autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@both_forms
@pytest.mark.parametrize("name", ("paper", "resnet", "sigmoid"))
def test_no_host_synchronisation_and_reproducible(name: str, form: str) -> None:
    results = []
    for _ in range(2):
        model, x = normalized(name, form=form)
        step = step_of(model, x, torch.optim.SGD(model.parameters(), 1e-4))
        step(), step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            losses = [step() for _ in range(3)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append((torch.stack(losses), [p.detach().clone() for p in model.parameters()]))
    folds = [folded_parts(network_of(model)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*folds, strict=True))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(p, q) for p, q in zip(results[0][1], results[1][1], strict=True))


@both_forms
@pytest.mark.parametrize("name", ("paper", "resnet", "sigmoid"))
def test_a_captured_step_trains_like_an_eager_one(name: str, form: str) -> None:
    losses = {}
    for captured in (False, True):
        model, x = normalized(name, form=form)
        step = step_of(model, x, torch.optim.SGD(model.parameters(), 1e-4))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        if not captured:
            losses[captured] = [float(step()) for _ in range(5)]
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        losses[captured] = [(graph.replay(), float(loss))[1] for _ in range(5)]
        assert float(model(x).float().square().mean()) == pytest.approx(float(step()), rel=1e-5)  # eager sees it too
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


@both_forms
@pytest.mark.parametrize("name", ("paper",))
def test_compiled_without_a_graph_break(name: str, form: str) -> None:
    model, x = normalized(name, form=form)
    other = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    for network, called in ((model, compiled), (other, other)):
        called(x).float().square().mean().backward()
        assert all(p.grad is not None for p in network.parameters())
    for (path, p), q in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert close(p.grad, q[1].grad, 2e-3), path


@pytest.mark.parametrize("compiled", (False, True))
def test_a_captured_step_on_ever_new_batches_trains_like_an_eager_one(compiled: bool) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(8, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last) for _ in range(12)]
    targets = [(x.mean((1, 2, 3)) > 0).long() for x in batches]
    losses = {}
    for captured in (False, True):
        model = normalized("paper")[0].to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), torch.tensor(1e-3, device="cuda"), capturable=True)
        network = torch.compile(model) if compiled and captured else model
        found = torch.zeros((), device="cuda")

        def step(x: Tensor, y: Tensor, network: Any = network, optimizer: Any = optimizer, found: Any = found) -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                scores = network(x)
            loss = nn.functional.nll_loss(scores.float(), y)
            loss.backward()
            optimizer.step()
            found.copy_(loss.detach())

        start = copy.deepcopy(model.state_dict())
        run = captured_step(step, batches[0], targets[0]) if captured else step
        model.load_state_dict(start)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
        losses[captured] = [(run(x, y), float(found))[1] for x, y in zip(batches, targets, strict=True)]
    assert losses[True] == pytest.approx(losses[False], rel=0.05)


@pytest.mark.parametrize("name", ("paper", "sigmoid"))
def test_replayed_passes_are_those_launched_one_by_one(name: str) -> None:
    model, x = normalized(name)
    results = []
    for _ in range(PATIENCE + 3):  # the first are launched, the rest replayed
        model.zero_grad()
        output = model(x)
        output.float().square().mean().backward()
        results.append((output.detach().clone(), [p.grad.clone() for p in model.parameters()]))
    (recording,) = recordings(model)
    assert len(recording.backwards) == 1
    for output, grads in results[1:]:
        assert torch.equal(output, results[0][0])
        assert all(torch.equal(a, b) for a, b in zip(grads, results[0][1], strict=True))
    first = model(x)
    kept = model(x)
    with torch.no_grad():
        sites(model)[0].weight.mul_(-1)
    changed = model(x)
    assert torch.equal(first, kept) and not close(changed, kept, 1e-2)


def steps_of(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, passes: int) -> Iterator[list[Tensor]]:
    """Gradients of some steps of several passes each."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for step in range(PATIENCE + 3):
        optimizer.zero_grad(set_to_none=True)
        for part in range(passes):
            call(x + 0.1 * step + part).float().square().mean().backward()
        yield [p.grad.clone() for p in model.parameters()]
        optimizer.step()


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("passes", (1, 2, 3))
def test_replayed_training_is_that_of_launched_kernels(passes: int, compiled: bool) -> None:
    model, x = normalized("paper")
    other = copy.deepcopy(model)
    network_of(other).executor.recordable = False
    calls = [torch.compile(network, fullgraph=True) if compiled else network for network in (model, other)]
    for ours, theirs in zip(
        *(steps_of(m, c, x, passes) for m, c in zip((model, other), calls, strict=True)), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    (recording,) = recordings(model, compiled)
    assert len(recording.backwards) == min(passes, SETS)
    assert not recordings(other, compiled)


def test_results_that_somebody_holds_are_not_written_again() -> None:
    model, x = normalized("paper")
    held, before = [], []
    for step in range(PATIENCE + 5):
        model.zero_grad()
        model(x + step).float().square().mean().backward()
        held.append([*network_of(model).fold().pairs[0], *(p.grad for p in model.parameters())])
        before.append([tensor.detach().clone() for tensor in held[-1]])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
    assert len(recordings(model)) == SETS
    for ours, theirs in zip(held, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_eager_passes_do_not_stand_in_the_way_of_a_capture() -> None:
    model, x = normalized("paper")

    def passed() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        model(x).float().square().mean().backward()
        return [p.grad for p in model.parameters()]

    for _ in range(PATIENCE + 3):
        expected = [grad.clone() for grad in passed()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passed()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_a_row_of_zeros_and_weights_of_any_size() -> None:
    model, x = normalized("paper")
    first = sites(model)[0]
    with torch.no_grad():
        expected = model(x)
        first.weight.mul_(2.0**70)
        assert close(model(x), expected, 1e-5) or bool(model(x).isnan().any())  # never a number that is wrong
        first.weight.mul_(2.0**-70)
        first.weight[0] = 0
    model.zero_grad()
    output = model(x)
    output.float().square().mean().backward()
    assert bool(output.isfinite().all()) and all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_models_that_ran_leave_no_memory_behind() -> None:
    left = []
    for _ in range(3):
        model, x = normalized("paper")
        for _ in range(PATIENCE + 2):
            model.zero_grad()
            model(x).float().square().mean().backward()
        del model, x
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[1] == left[2]


@pytest.mark.compatibility("torch.compile, reduce-overhead")
@pytest.mark.parametrize("mode", ("reduce-overhead", "max-autotune-no-cudagraphs"))
def test_other_modes_of_the_compiler(mode: str) -> None:
    # Without kinks: kernels that the tuner chooses round otherwise, and a single value that so crosses zero before a
    # rectifier changes a gradient by 3e-3.
    model, x = normalized("smooth")
    other = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for step in range(PATIENCE + 4):
        for network, call in ((model, compiled), (other, other)):
            network.zero_grad(set_to_none=True)
            torch.compiler.cudagraph_mark_step_begin()
            call(x + step).float().square().mean().backward()
        for (path, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert close(p.grad, q.grad, 1e-4), path


def test_folded_weights_come_in_the_compute_dtype() -> None:
    model, x = normalized("paper")
    model = model.to(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        network = network_of(model)
        weight, bias = network.fold().pairs[network.layers.index(sites(model)[1])]
        assert weight.dtype == bias.dtype == torch.bfloat16
        assert weight.is_contiguous(memory_format=torch.channels_last)
        model(x).float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.isfinite().all()) for p in model.parameters())


def launches(work: Callable[[], Any]) -> int:
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def test_launches_do_not_grow_with_depth() -> None:
    counts = []
    for depth in (3, 12):
        torch.manual_seed(0)
        given = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))
        model = vp.normalize(Chain(depth), given, example=torch.zeros(2, 3, 16, 16)).cuda()
        network = network_of(model)

        def fold(network: Network = network) -> None:
            parts = folded_parts(network)
            torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])

        ones = sum(2 for _ in sites(model))
        counts.append(launches(fold) - ones)
    # what is left grows by the gradients that autograd adds to the parameters, three for each layer
    assert counts[1] - counts[0] <= 3 * 9 + 4, counts


def test_a_change_behind_autograd_is_noticed() -> None:
    model, x = normalized("paper")
    model.eval()
    with torch.no_grad():
        before = model(x)
        sites(model)[0].weight.data.mul_(-1.0)
        after = model(x)
    assert not close(after, before, 1e-2)


class SharedBlocks(nn.Module):
    """A convolution that is called three times, between layers that are called once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for _ in range(3):
            x = torch.relu(self.shared(x)) + 0.5 * x
        return self.last(x.mean((2, 3)))


@pytest.mark.parametrize("compiled", (False, True))
@both_forms
def test_a_layer_that_is_called_often_computes_on_a_gpu_what_it_computes_in_float64(form: str, compiled: bool) -> None:
    torch.manual_seed(0)
    data = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))
    expected = vp.normalize(SharedBlocks(), data, example=torch.zeros(2, 3, 12, 12), form=form).double()
    model, x = copy.deepcopy(expected).float().cuda(), torch.randn(4, 3, 12, 12)
    call = torch.compile(model, fullgraph=True) if compiled else model
    for _ in range(PATIENCE + 2):
        model.zero_grad()
        output = call(x.cuda())
        output.square().mean().backward()
    theirs = expected(x.double())
    theirs.square().mean().backward()
    assert close(output.detach(), theirs.detach(), 1e-5)
    for ours, reference in zip(model.parameters(), expected.parameters(), strict=True):
        assert close(ours.grad, reference.grad, 1e-4)
