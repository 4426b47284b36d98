"""Private training of normalized models: what Opacus clips and sums is what torch.func finds sample by sample."""

from __future__ import annotations

import argparse
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.deep import private as grid
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

import varprop as vp
from tests.norm import processes
from tests.norm.networks import Recalled
from tests.test_federated import example

opacus = pytest.importorskip("opacus", reason="make test-opacus installs it")
opacus_module = pytest.importorskip("varprop.opacus")
PrivacyEngine = opacus_module.PrivacyEngine
BatchMemoryManager = pytest.importorskip("opacus.utils.batch_memory_manager").BatchMemoryManager
pytestmark = [pytest.mark.opacus, pytest.mark.filterwarnings("ignore")]  # Opacus' notes on secure mode and hooks

BOUND = 0.5  # of the norm of a sample's gradient: most are above, some below
MODES = ("hooks", "functorch", "ew", "ghost")


class Tied(nn.Module):
    """One weight in two layers that stand in equal places: their folds are equal at first, and are two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 6), nn.Linear(5, 6, bias=False), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.a(x)) * 0.5 + torch.tanh(self.b(x)))


class LastState(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.gates, self.head = kind(5, 4, batch_first=True, **settings), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gates(x)[0][:, -1])


def convolutions() -> nn.Module:
    body = (nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Sigmoid(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(16, 3))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def with_parameters_between() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (convolutions, (1, 6, 6)),
    "layer norm": (with_parameters_between, (5,)),
    "batch norm": (with_batch_norm, (5,)),
    "called twice": (Recalled, (5,)),
    "tied": (Tied, (5,)),
    "RNN": (lambda: LastState(nn.RNN, nonlinearity="relu"), (3, 5)),
    "LSTM": (lambda: LastState(nn.LSTM, num_layers=2), (3, 5)),
    "GRU": (lambda: LastState(nn.GRU), (3, 5)),
}


def made(name: str, count: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    """A normalized network as some steps of training might leave it, and data."""
    make, shape = NETWORKS[name]
    torch.manual_seed(3)
    x = 0.3 + torch.randn(count, *shape, dtype=torch.float64)
    moments = vp.Moments(torch.full((1, *shape), 0.3).double(), torch.ones(1, *shape).double())
    model = vp.normalize(make().double().train(), moments, example=x[:2])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model, x, torch.arange(count) % 2


def private(model: nn.Module, x: Tensor, y: Tensor, batch: int, **settings: Any) -> tuple[Any, ...]:
    """Everything a private step needs, without noise and with rate 1: the step is the gradient."""
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, "poisson_sampling": False, **settings}
    engine = PrivacyEngine(accountant="rdp")
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)


def by_sample(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of every sample by every parameter, by torch.func."""
    own = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return vmap(grad(loss), (None, 0, 0))(own, x, y)
    found = [grad(loss)(own, *sample) for sample in zip(x, y, strict=True)]  # torch's recurrent kernels have no vmap
    return {name: torch.stack([each[name] for each in found]) for name in own}


def untied(model: nn.Module) -> nn.Module:
    """The plain model with a parameter of its own for every folded tensor."""
    plain = vp.fold(model, keep_batchnorm=False)
    for module in plain.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    for path, module in plain.named_modules():  # a bias that is zero up to rounding is left out by `fold`
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module.bias is None:
            shift = model.get_submodule(path).shift
            module.bias = nn.Parameter(torch.zeros_like(shift))
    return plain


def expected(model: nn.Module, x: Tensor, y: Tensor, centred: bool = True) -> dict[str, Tensor]:
    """The sum of the samples' gradients, each times what brings its gradient by the twin's parameters to the bound."""
    folded = by_sample(untied(model), x, y)
    for path, layer in opacus_module.Twin(copy.deepcopy(model)).plain.named_modules() if centred else ():
        if hasattr(layer, "offset"):  # of inputs minus their predicted mean, and perhaps with centred rows
            by_bias, axes = folded[f"{path}.bias"], tuple(range(2, layer.weight.ndim + 1))
            grads = folded[f"{path}.weight"] - torch.einsum(
                "no,o...->no...", by_bias, layer.offset.expand_as(layer.weight)
            )
            folded[f"{path}.weight"] = grads - grads.mean(axes, keepdim=True) if layer.centred_rows else grads
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in folded.values()]).norm(dim=0)
    assert bool((norms > BOUND).any()) or len(x) < 3
    factors = (BOUND / (norms + 1e-6)).clamp(max=1.0)
    own = by_sample(model, x, y)
    return {name: torch.einsum("i,i...->...", factors, each) for name, each in own.items()}


def taken(model: nn.Module, before: nn.Module) -> dict[str, Tensor]:
    old = dict(before.named_parameters())
    return {name: (old[name] - p).detach() for name, p in model.named_parameters()}


def agree(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-6) -> bool:
    return all(torch.allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance) for name in theirs)


def backward(mode: str, parts: tuple[Any, ...], x: Tensor, y: Tensor) -> None:
    model, criterion = parts[1], parts[3] if mode == "ghost" else F.cross_entropy
    criterion(model(x), y).backward()


@pytest.mark.compatibility("Opacus")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("convolutions", "layer norm", "batch norm", "tied"))
def test_a_step_is_the_clipped_gradients_of_torch_func(name: str, mode: str) -> None:
    model, x, y = made(name)
    before = copy.deepcopy(model)
    parts = private(model, x, y, len(x), grad_sample_mode=mode)
    backward(mode, parts, x, y)
    parts[2].step()
    theirs = {key: value / len(x) for key, value in expected(before, x, y, centred=mode != "ew").items()}
    assert agree(taken(model, before), theirs)
    assert max(float(value.abs().max()) for value in theirs.values()) > 1e-2


@pytest.mark.parametrize(
    ("name", "mode"),
    [("called twice", "hooks"), ("called twice", "functorch"), ("called twice", "ew"), ("RNN", "hooks"), ("GRU", "ew")]
    + [("LSTM", mode) for mode in MODES],
)
def test_layers_that_are_called_several_times(name: str, mode: str) -> None:
    model, x, y = made(name)
    before = copy.deepcopy(model)
    parts = private(model, x, y, len(x), grad_sample_mode=mode)
    with torch.no_grad():
        assert torch.allclose(parts[1](x), before(x))
    backward(mode, parts, x, y)
    parts[2].step()
    theirs = expected(before, x, y, centred=mode != "ew")
    assert agree(taken(model, before), {key: value / len(x) for key, value in theirs.items()})


def test_ghost_clipping_refuses_them() -> None:
    model, x, y = made("called twice")
    parts = private(model, x, y, len(x), grad_sample_mode="ghost")
    with pytest.raises(NotImplementedError, match="Parameter tying is not supported"):
        backward("ghost", parts, x, y)


@pytest.mark.parametrize("form", ("paper", "deep"))
def test_the_mean_of_a_layer_s_input_is_in_no_gradient(form: Any) -> None:
    torch.manual_seed(0)
    moments = vp.Moments(torch.full((1, 1, 1, 1), 0.4), torch.ones(1, 1, 1, 1), (1, 1, 12, 12))
    plain = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
    plain.append(nn.Linear(512, 3))
    model = vp.normalize(plain, moments, form=form).double()
    x, y = torch.randn(16, 1, 12, 12, dtype=torch.float64), torch.arange(16) % 3
    lengths = []
    for centred in (False, True):
        twin = opacus_module.Twin(copy.deepcopy(model), centred)
        torch.testing.assert_close(twin.plain(x), model(x))
        gradients = grid.sample_gradients(twin.plain, x, y)
        lengths.append(torch.cat([each.each().flatten(1) for each in gradients.values()], 1).norm(dim=1).median())
    assert lengths[1] < (0.75 if form == "deep" else 1.0) * lengths[0]
    result = vp.propagate(vp.fold(model).float(), moments)  # what layers read, by the propagation of the plain model
    for path, before in (("2", result["1"].mean), ("5", result["3"].mean)):
        expected_means = before.mean((0, 2, 3)) if path == "2" else before.mean((2, 3)).repeat_interleave(64, 1)
        offset = twin.plain.get_submodule(path).offset
        torch.testing.assert_close(offset.flatten(), expected_means.flatten().to(offset), rtol=1e-4, atol=1e-5)


def test_without_a_bound_it_is_the_ordinary_gradient() -> None:
    model, x, y = made("layer norm")
    before = copy.deepcopy(model)
    parts = private(model, x, y, len(x), max_grad_norm=1e6)
    backward("hooks", parts, x, y)
    parts[2].step()
    F.cross_entropy(before(x), y).backward()
    assert agree(taken(model, before), {n: p.grad for n, p in before.named_parameters()}, 1e-9)


@pytest.mark.compatibility("Opacus")
def test_poisson_sampling() -> None:
    model, x, y = made("layer norm", 40)
    _, twin, optimizer, loader = private(model, x, y, 4, poisson_sampling=True)
    torch.manual_seed(1)
    sizes = []
    for data, label in loader:
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        F.cross_entropy(twin(data), label).backward()
        optimizer.step()
        sizes.append(len(data))
        if len(data):
            assert agree(taken(model, before), {k: v / 4 for k, v in expected(before, data, label).items()})
        else:
            assert not any(bool(step.any()) for step in taken(model, before).values())
    assert len(set(sizes)) > 2


@pytest.mark.compatibility("Opacus")
@pytest.mark.parametrize("mode", ("hooks", "ghost"))
def test_virtual_steps(mode: str) -> None:
    model, x, y = made("layer norm")
    before = copy.deepcopy(model)
    parts = private(model, x, y, len(x), grad_sample_mode=mode)
    manager = BatchMemoryManager(data_loader=parts[-1], max_physical_batch_size=5, optimizer=parts[2])
    with manager as loader:
        for data, label in loader:
            parts[2].zero_grad()
            backward(mode, parts, data, label)
            parts[2].step()
    assert agree(taken(model, before), {k: v / len(x) for k, v in expected(before, x, y).items()})


def test_noise_reaches_every_parameter_and_is_accounted_for() -> None:
    model, x, y = made("convolutions")
    engine, twin, optimizer, _ = private(model, x, y, len(x), noise_multiplier=1.0)
    F.cross_entropy(twin(x), y).backward()
    clipped = expected(model, x, y)
    before = copy.deepcopy(model)
    optimizer.step()
    for name, step in taken(model, before).items():
        assert float((step - clipped[name] / len(x)).abs().max()) > 1e-3, name
    assert engine.get_epsilon(1e-5) > 0


def test_evaluation_has_the_statistics_of_evaluation() -> None:
    model, x, y = made("layer norm")
    plain = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    model = vp.normalize(plain, vp.Moments(torch.zeros(1, 5).double(), torch.ones(1, 5).double()), example=x)
    _, twin, *_ = private(model, x, y, len(x))
    twin.eval(), model.eval()
    assert torch.allclose(twin(x), model(x))
    twin.train(), model.train()
    torch.manual_seed(0)
    ours = twin(x)
    torch.manual_seed(0)
    assert torch.allclose(ours, model(x)) and all(module.training for module in model.modules())


def test_what_happens_to_the_model_happens_to_its_twin() -> None:
    model, x, y = made("layer norm")
    _, twin, *_ = private(model, x, y, len(x))
    model[0].scale.data.mul_(1.5)
    assert torch.allclose(twin(x), model(x))


def test_frozen_parameters_stay() -> None:
    model, x, y = made("layer norm")
    model[0].weight.requires_grad_(False), model[3].requires_grad_(False)
    before = copy.deepcopy(model)
    parts = private(model, x, y, len(x), max_grad_norm=1e6)
    backward("hooks", parts, x, y)
    parts[2].step()
    F.cross_entropy(before(x), y).backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in before.named_parameters()}
    assert agree(taken(model, before), wanted, 1e-9)


def test_schedules_of_either_optimizer_reach_both() -> None:
    model, x, y = made("layer norm")
    groups = [
        {"params": [model[0].weight], "lr": 0.1},
        {"params": [p for n, p in model.named_parameters() if n != "0.weight"]},
    ]
    own = torch.optim.SGD(groups, 1.0, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    twin, optimizer, _ = PrivacyEngine().make_private(module=model, optimizer=own, data_loader=loader, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    F.cross_entropy(twin(x), y).backward()
    optimizer.step(), schedule.step()
    assert [group["lr"] for group in own.param_groups] == [0.05, 0.5] == schedule.get_last_lr()
    own.param_groups[1]["lr"] = 0.3
    assert optimizer.param_groups[1]["lr"] == 0.3
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    own.param_groups[1]["lr"] = 0.2
    assert optimizer.param_groups[1]["lr"] == 0.2


def test_checkpoints_hold_the_normalized_model(tmp_path: Path) -> None:
    model, x, y = made("layer norm")
    engine, twin, optimizer, _ = private(model, x, y, len(x), noise_multiplier=1.0)
    F.cross_entropy(twin(x), y).backward()
    optimizer.step()
    engine.save_checkpoint(path=tmp_path / "state.pt", module=twin, optimizer=optimizer)
    other, *_ = made("layer norm")
    again, copied, their_optimizer, _ = private(other, x, y, len(x))
    again.load_checkpoint(path=tmp_path / "state.pt", module=copied, optimizer=their_optimizer)
    assert torch.allclose(other(x), model(x)) and torch.allclose(copied(x), model(x))
    assert again.get_epsilon(1e-5) == engine.get_epsilon(1e-5)


class Code:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_a_checkpoint_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    model, x, y = made("layer norm")
    engine, twin, *_ = private(model, x, y, len(x))
    torch.save({"module_state_dict": model.state_dict(), "more": Code(str(tmp_path / "ran"))}, tmp_path / "state.pt")
    files = [tmp_path / "state.pt", io.BytesIO(pickle.dumps(Code(str(tmp_path / "ran")))), io.BytesIO(b"PK\x03\x04")]
    for file in files:
        with pytest.raises(ValueError, match="no checkpoint of tensors and numbers alone"):
            engine.load_checkpoint(path=file, module=twin)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("mode", MODES)
def test_opacus_itself_refuses_a_normalized_model(mode: str) -> None:
    model, x, y = made("convolutions")
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "grad_sample_mode": mode}
    with pytest.raises(RuntimeError, match=r"varprop\.opacus|Expanded Weights"):
        parts = opacus.PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)
        parts[0](x)


def test_plain_models_are_left_to_opacus() -> None:
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 0, 1])
    plain = nn.Linear(5, 2)
    before = copy.deepcopy(plain)
    parts = private(plain, x, y, 4, max_grad_norm=1e6)
    backward("hooks", parts, x, y)
    parts[2].step()
    F.cross_entropy(before(x), y).backward()
    assert torch.allclose(before.weight - plain.weight, before.weight.grad, atol=1e-6)


def test_the_example_trains() -> None:
    script = example("private_training")
    x, y = torch.randn(96, 1, 28, 28), torch.arange(96) % 10
    settings = argparse.Namespace(epsilon=8.0, epochs=1, batch=32, rate=0.1)
    model, epsilon = script.train(x, y, settings)
    assert 0 < epsilon < 8.1 and 0 <= script.accuracy(model, x, y) <= 100
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("method", grid.METHODS)
def test_every_method_of_the_grid_trains(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randint(256, (96, 1, 28, 28), dtype=torch.uint8), torch.arange(96) % 10
    monkeypatch.setattr(grid, "images_of", lambda *_: (x, y, x, y))
    options = {"device": "cpu", "root": None, "limit": 0, "epochs": 1}
    cell = grid.PrivateCell("mnist-1", method, grid.SEARCH, 0.1, 1.0, 0)
    assert grid.train(cell, options, until=0.0) is None
    record = grid.train(cell, options, until=float("inf"))
    assert record is not None and record["accuracy"] is not None
    assert 0.9 < record["epsilon"] <= 1.0 and record["steps"] == 4 and record["batch"] == 24


@pytest.mark.parametrize("form", grid.ANALYTIC.values())
def test_the_grid_clips_what_the_engine_clips(form: Any) -> None:
    torch.manual_seed(0)
    moments = vp.Moments(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1), (1, 1, 28, 28))
    model = vp.normalize(grid.network("mnist", "none"), moments, form=form).double()
    x, y = torch.randn(6, 1, 28, 28, dtype=torch.float64), torch.arange(6)
    twin = opacus_module.Twin(copy.deepcopy(model))
    sums, _ = grid.clipped_sum(grid.sample_gradients(twin.plain, x, y), torch.ones(6), BOUND)
    for name, parameter in twin.parameters.items():
        parameter.grad = sums[name] / len(x)
    twin.pull_back()
    ours = {name: parameter.grad for name, parameter in twin.model.named_parameters()}
    before = copy.deepcopy(model)
    parts = private(model, x, y, len(x))
    backward("hooks", parts, x, y)
    parts[2].step()
    assert agree(ours, taken(model, before))


def test_the_paper_s_form_is_advised_against_and_the_deep_one_not() -> None:
    x, y = torch.randn(8, 5), torch.arange(8) % 3
    moments = vp.Moments(torch.zeros(1, 5), torch.ones(1, 5))
    for form in ("paper", "deep"):
        model = vp.normalize(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)), moments, form=form)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            private(model, x, y, 4)
        advice = [str(each.message) for each in caught if "form=" in str(each.message)]
        assert advice == ([opacus_module.PAPER_FORM] if form == "paper" else [])


def half_a_step(rank: int) -> Any:
    """One private step of the first half of the samples in one process, and of the second in the other."""
    model, x, y = made("layer norm")
    if rank:
        with torch.no_grad():
            model[0].weight.add_(1.0)  # the first process decides
    wrapped = opacus_module.DPDDP(model)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    engine = PrivacyEngine(accountant="rdp")
    settings = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, "poisson_sampling": False}
    twin, private_optimizer, _ = engine.make_private(
        module=wrapped, optimizer=optimizer, data_loader=loader, **settings
    )
    half = slice(6 * rank, 6 * rank + 6)
    F.cross_entropy(twin(x[half]), y[half]).backward()
    private_optimizer.step()
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=twin, optimizer=private_optimizer)
    file.seek(0)
    return model.state_dict(), torch.load(file)["module_state_dict"]


def test_two_processes_take_the_step_of_one(tmp_path: Path) -> None:
    state, saved = processes.run(half_a_step, tmp_path, world=2)
    model, x, y = made("layer norm")
    before = copy.deepcopy(model)
    model.load_state_dict(state)
    assert agree(taken(model, before), {k: v / len(x) for k, v in expected(before, x, y).items()})
    assert saved.keys() == state.keys() and all(torch.equal(saved[name], state[name]) for name in state)


def test_the_page_says_what_the_search_would_cost() -> None:
    root = Path(__file__).parents[1]
    records = grid.read(root / "docs/results/private.jsonl")
    charged = grid.epsilon_with_search("cifar10-3", "analytic, deep form", records)
    assert f"the RDP accountant would ask {charged:.1f} instead of" in (root / "docs/private.md").read_text("utf-8")


def test_bad_use_is_named() -> None:
    model, x, y = made("layer norm")
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    settings = {"data_loader": loader, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 1.0)
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        PrivacyEngine().make_private(module=model, optimizer=other, **settings)
    own = torch.optim.SGD(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="wrap_model=True"):
        PrivacyEngine().make_private(module=model, optimizer=own, wrap_model=False, **settings)
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    with pytest.raises(ValueError, match="DifferentiallyPrivateDistributedDataParallel around the model"):
        PrivacyEngine().make_private(module=wrapped, optimizer=own, **settings)
    plain = nn.LSTM(5, 4, batch_first=True, proj_size=2).double()
    moments = vp.Moments(torch.zeros(1, 3, 5).double(), torch.ones(1, 3, 5).double())
    projected = vp.normalize(plain, moments, example=torch.zeros(1, 3, 5).double())
    with pytest.raises(ValueError, match="no LSTM with a projection"):
        optimizer = torch.optim.SGD(projected.parameters(), 1.0)
        PrivacyEngine().make_private(module=projected, optimizer=optimizer, **settings)
