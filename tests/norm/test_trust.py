"""Used as people use models: right numbers, or one sentence that says why there are none."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import varprop as vp
from tests.norm.networks import sites
from varprop.norm.fold.reference import fold_parts

pytestmark = pytest.mark.filterwarnings("ignore::varprop.PlainWarning")


def moments(*shape: int, mean: float = 0.3) -> vp.Moments:
    return vp.Moments(torch.full((1, *shape), mean, dtype=torch.float64), torch.ones(1, *shape, dtype=torch.float64))


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def mlp(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), *(between or (nn.ReLU(),)), nn.Linear(6, 3)).double()
    return trained(vp.normalize(plain, moments(4), example=numbers(2, 4)))


@torch.no_grad()
def trained(model: nn.Module) -> nn.Module:
    """As some steps of training might leave it."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return model


def expected(model: nn.Module, x: Tensor) -> Tensor:
    """What a sequential model does with the present parameters, by the reference."""
    network = sites(model)[next(iter(sites(model)))].networks[model.training][0]
    parts = fold_parts(network.layout, network.external_moments(), network.parameters())
    folded = dict(zip(network.layers, zip(parts, parts[len(network.layers) :], strict=False), strict=True))
    for module in model:  # type: ignore[attr-defined]
        x = F.linear(x, *folded[module]) if module in folded else module(x)
    return x


def same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


X = numbers(5, 4)


class Interrupt(nn.Module):
    """Raises what no `except Exception` catches, once."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            self.on = False
            raise KeyboardInterrupt
        return x


def test_an_interrupt_inside_the_model_leaves_nothing_behind() -> None:
    model = mlp(nn.ReLU(), Interrupt())
    model[2].on = True
    with pytest.raises(KeyboardInterrupt):
        model(X)
    for parameter in model.parameters():
        parameter.data.mul_(1.3)  # behind autograd's back
    assert same(model(X), expected(model, X))


def test_threads_do_not_see_each_other() -> None:
    model = mlp().eval()
    wrong: list[float] = []
    stop = threading.Event()

    def serve() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(X)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(30):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            wrong.append(float((model(X) - expected(model, X)).abs().max()))
    stop.set()
    for thread in threads:
        thread.join()
    assert max(wrong) < 1e-10


BETWEEN: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(6),
    "prelu": lambda: nn.PReLU(6),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "softsign": nn.Softsign,
    "celu": nn.CELU,
    "relu": nn.ReLU,
}


@pytest.mark.parametrize("name", BETWEEN)
def test_derivatives_with_a_graph_are_those_without(name: str) -> None:
    model = mlp(BETWEEN[name]())
    parameters = list(model.parameters())
    first = torch.autograd.grad(model(X).square().sum(), parameters)
    again = torch.autograd.grad(model(X).square().sum(), parameters, create_graph=True)
    assert all(same(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.compatibility("double backward")
@pytest.mark.parametrize("name", ("layer norm", "prelu", "celu"))
def test_second_derivatives_are_differences_of_first_ones(name: str) -> None:
    model = mlp(BETWEEN[name]())
    parameters = list(model.parameters())
    direction = [torch.randn_like(p) for p in parameters]

    def slope() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(X).square().sum(), parameters)

    first = torch.autograd.grad(model(X).square().sum(), parameters, create_graph=True)
    along = sum((g * d).sum() for g, d in zip(first, direction, strict=True))
    found = torch.autograd.grad(along, parameters)
    step, sides = 1e-6, []
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(sign * step * d)
        sides.append(slope())
    measured = [(up - down) / (2 * step) for up, down in zip(*sides, strict=True)]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(found, measured, strict=True))


def test_many_derivatives_at_once() -> None:
    model = mlp(nn.LayerNorm(6), nn.GELU())
    outputs, wanted = model(X)[0], list(model.parameters())
    eye = torch.eye(len(outputs)).double()
    together = torch.autograd.grad(outputs, wanted, eye, is_grads_batched=True, retain_graph=True)
    for n, row in enumerate(eye):
        alone = torch.autograd.grad(outputs, wanted, row, retain_graph=True)
        assert all(same(a[n], b) for a, b in zip(together, alone, strict=True))


def test_derivatives_by_parameters_given_to_a_functional_call() -> None:
    model = mlp()
    own = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    first = torch.autograd.grad(functional_call(model, own, (X,)).square().sum(), list(own.values()))
    again = torch.autograd.grad(functional_call(model, own, (X,)).square().sum(), list(own.values()), create_graph=True)
    assert all(same(a, b) and bool(b.any()) for a, b in zip(first, again, strict=True))
    inner = {name: p - 0.1 * g for (name, p), g in zip(own.items(), again, strict=True)}  # a step of MAML
    meta = torch.autograd.grad(functional_call(model, inner, (X,)).square().sum(), list(own.values()))
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in meta)


@pytest.mark.compatibility("jvp")
@pytest.mark.parametrize("name", ("celu", "softsign", "layer norm"))
def test_forward_mode_agrees_with_reverse_mode(name: str) -> None:
    model = mlp(BETWEEN[name]())
    own = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (X,)).square().sum()

    direction = {name: torch.randn_like(p) for name, p in own.items()}
    _, forward = torch.func.jvp(loss, (own,), (direction,))
    reverse = torch.func.grad(loss)(own)
    assert same(forward, sum((reverse[name] * d).sum() for name, d in direction.items()))


def test_a_transform_inside_of_a_call_keeps_its_folds_to_itself() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_exporting():
                own = dict(self.body.named_parameters())
                torch.func.grad(lambda p: functional_call(self.body, p, (x,)).sum())(own)
            return self.head(self.body(x))

    torch.manual_seed(0)
    model = trained(vp.normalize(Inner().double(), moments(4), example=numbers(2, 4)))
    folded = vp.fold(model)
    assert same(model(X), folded.head(folded.body(X)))


def test_freezing_and_unfreezing() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model(X).sum().backward()
    assert model[0].weight.grad is None
    model[0].weight.requires_grad_()
    model(X).sum().backward()
    assert bool(model[0].weight.grad.any())


@pytest.mark.parametrize("grad", (True, False))
def test_parameters_and_buffers_between_layers_count(grad: bool) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n, self.b = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
            self.register_buffer("mask", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.n(self.a(x))) * self.mask)

    torch.manual_seed(0)
    model = trained(vp.normalize(Masked().double(), moments(4), example=numbers(2, 4))).eval()
    with torch.set_grad_enabled(grad):
        before = model(X), model(X)
        model.n.weight.data.mul_(1.5)
        model.mask[0] = 0
        after = model(X)
    assert not same(after, before[0]) and same(after, vp.fold(model)(X))


@pytest.mark.parametrize("write", (lambda w: w.data.mul_(0.5), lambda w: w.detach().mul_(0.5)))
def test_a_parent_that_writes_a_weight_before_it_calls_the_layer(write: Callable[[Tensor], Any]) -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.on = nn.Linear(4, 6), nn.Linear(6, 3), False

        def forward(self, x: Tensor) -> Tensor:
            if self.on:
                self.a.weight.data[:, 0] = 0
                write(self.a.scale)
            return self.b(torch.relu(self.a(x)))

    torch.manual_seed(0)
    model = trained(vp.normalize(Parent().double(), moments(4), example=numbers(2, 4)))
    model.on = True
    ours = model(X)
    model.on = False
    assert same(ours, model(X)) and same(ours, vp.fold(model)(X))


def test_a_weight_written_between_two_layers_of_a_call_is_noticed() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.on = nn.Linear(4, 6), nn.Linear(6, 3), False

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.a(x))
            if self.on:
                with torch.no_grad():
                    self.b.weight.clamp_(-0.1, 0.1)
            return self.b(x)

    torch.manual_seed(0)
    model = trained(vp.normalize(Parent().double(), moments(4), example=numbers(2, 4)))
    model.on = True
    ours = model(X)
    model.on = False
    assert same(ours, model(X))


class Block(nn.Module):
    def __init__(self, act: type[nn.Module]) -> None:
        super().__init__()
        self.n, self.a, self.act, self.b = nn.LayerNorm(8), nn.Linear(8, 16), act(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.act(self.a(self.n(x))))


class Blocks(nn.Module):
    """As transformers are written, with gradient checkpoints around the blocks."""

    reentrant: bool | None = None
    fails = False

    def __init__(self, act: type[nn.Module]) -> None:
        super().__init__()
        self.i, self.o = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Block(act) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.i(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.o(x)


@pytest.mark.slow
@pytest.mark.compatibility("gradient checkpoints")
@pytest.mark.parametrize("reentrant", (True, False))
@pytest.mark.parametrize("act", (nn.GELU, nn.ReLU, nn.Softsign, nn.CELU))
def test_gradient_checkpoints_around_blocks(act: type[nn.Module], reentrant: bool) -> None:
    torch.manual_seed(0)
    model = trained(vp.normalize(Blocks(act).double(), moments(4), example=numbers(2, 4)))
    grads = []
    for mode in (None, reentrant):
        model.reentrant = mode
        model.zero_grad()
        model(X).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(same(a, b) for a, b in zip(*grads, strict=True))


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda block: torch.compile(block, backend="eager"),
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.slow
@pytest.mark.compatibility("torch.compile")
@pytest.mark.parametrize("early", (True, False), ids=("before the first call", "after it"))
@pytest.mark.parametrize("name", WRAPPERS)
def test_blocks_in_wrappers_that_change_no_function(name: str, early: bool) -> None:
    model = trained(vp.normalize(Blocks(nn.GELU).double(), moments(4), example=numbers(2, 4)))
    wrapped = copy.deepcopy(model)
    if not early:
        wrapped(X)
    for n, block in enumerate(wrapped.blocks):
        wrapped.blocks[n] = WRAPPERS[name](block)
    for _ in range(2):  # the second time with other parameters
        both = [[m(X), *torch.autograd.grad(m(X).square().sum(), list(m.parameters()))] for m in (model, wrapped)]
        assert all(same(a, b) for a, b in zip(*both, strict=True))
        assert same(vp.fold(wrapped.eval())(X), model.eval()(X))
        for m in (model.train(), wrapped.train()):
            stepped(m)


def stepped(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def test_an_optimizer_that_steps_within_the_backward_pass() -> None:
    model = mlp(nn.LayerNorm(6), nn.GELU())
    grads = torch.autograd.grad(model(X).square().sum(), list(model.parameters()))
    expected = [p.detach() - grad for p, grad in zip(model.parameters(), grads, strict=True)]
    for parameter in model.parameters():
        step = torch.optim.SGD([parameter], 1.0).step
        parameter.register_post_accumulate_grad_hook(lambda _, step=step: step())
    model(X).square().sum().backward()
    assert all(same(p, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_parameters_that_come_after_the_meta_device() -> None:
    model, start = mlp(nn.LayerNorm(6), nn.GELU()), mlp(nn.LayerNorm(6), nn.GELU()).to("meta")
    start.load_state_dict(model.state_dict(), assign=True)
    assert same(start(X), model(X))
    start.to("meta").to_empty(device="cpu").load_state_dict(model.state_dict())
    assert same(start(X), model(X))


def test_a_checkpoint_that_failed_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = trained(vp.normalize(Blocks(nn.ReLU).double(), moments(4), example=numbers(2, 4)))
    model.reentrant = False
    loss = model(X).square().sum()
    handle = model.blocks[0].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("fails")))
    with pytest.raises(RuntimeError):
        loss.backward()
    handle.remove()
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    assert same(model(X), vp.fold(model)(X))


class Standardized(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class Loud(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return 3 * super().__call__(x)


def doubled(self: nn.Linear, x: Tensor) -> Tensor:
    return 2 * F.linear(x, self.weight, self.bias)


def with_own_forward() -> nn.Module:
    layer = nn.Linear(4, 6)
    layer.forward = types.MethodType(doubled, layer)  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize("layer", (Loud(4, 6), with_own_forward()), ids=("__call__", "instance forward"))
def test_layers_that_compute_otherwise_stay_plain_and_are_named(layer: nn.Module) -> None:
    plain = nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 3)).double().eval()
    with pytest.warns(vp.PlainWarning, match="stay as they are: '0'"):
        model = vp.normalize(plain, moments(4), example=X, init="preserve")
    assert same(model(X), plain(X)) and same(vp.fold(model)(X), plain(X))


def test_convolutions_that_compute_otherwise_stay_plain() -> None:
    x = numbers(2, 3, 6, 6)
    plain = nn.Sequential(Standardized(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).double().eval()
    model = vp.normalize(plain, moments(3, 1, 1), example=x, init="preserve")
    assert same(model(x), plain(x)) and list(sites(model)) == ["2"]


class Named(nn.Linear):
    def name(self) -> str:
        return "mine"


def test_a_subclass_keeps_what_it_adds() -> None:
    plain = nn.Sequential(Named(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    model = trained(vp.normalize(plain, moments(4), example=X))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for copied in (model, copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert copied[0].name() == "mine" and same(copied(X), model(X))
    assert type(vp.fold(model)[0]) is Named


class ByHand(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b, self.what = nn.Linear(4, 6), nn.Linear(6, 4), what

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.sigmoid(self.a(x)))
        return x @ self.a.weight.mT if self.what == "weight" else x * self.a.bias.sum()


@pytest.mark.parametrize("what", ("weight", "bias"))
def test_parameters_read_by_hand_are_refused(what: str) -> None:
    with pytest.raises(ValueError, match=f"reads the {what} of 'a' by hand"):
        vp.normalize(ByHand(what).double(), moments(4), example=X)
    model = vp.normalize(ByHand(what).double(), moments(4), example=X, only="b")
    assert list(sites(model)) == ["b"]


def pruned(layer: nn.Module) -> None:
    prune.random_unstructured(layer, "weight", 0.3)


HOOKS = {"prune": pruned, "weight_norm": nn.utils.weight_norm, "spectral_norm": nn.utils.spectral_norm}


@pytest.mark.parametrize("name", HOOKS)
def test_weights_computed_by_hooks_are_refused(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        HOOKS[name](plain[2])
        with pytest.raises(ValueError, match="weight of '2' is computed by a hook"):
            vp.normalize(plain, moments(4), example=X)
        model = mlp()
        HOOKS[name](model[2])
    with pytest.raises(ValueError, match="weight of '2' is computed by a hook"):
        model(X)


@pytest.mark.compatibility("forward hooks")
@pytest.mark.parametrize("place", (0, 1))
def test_a_hook_added_later_changes_outputs_and_no_statistics(place: int) -> None:
    model = mlp()
    x, folded = X, vp.fold(model)
    model[place].register_forward_hook(lambda module, inputs, output: 2 * output)
    for n, layer in enumerate(folded):
        x = 2 * layer(x) if n == place else layer(x)
    assert same(model(X), x) and same(vp.fold(model)(X), x)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.compatibility("forward hooks")
def test_a_hook_that_was_there_before_counts_like_a_module_in_its_place() -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    written = nn.Sequential(plain[0], plain[1], Twice(), plain[2])
    hooked = copy.deepcopy(plain)
    hooked[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    ours, theirs = (vp.normalize(model, moments(4), example=X) for model in (hooked, written))
    assert same(ours(X), theirs(X)) and same(vp.fold(ours)[2].weight, vp.fold(theirs)[3].weight)


PARAMETRIZATIONS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.compatibility("parametrizations")
@pytest.mark.parametrize("before", (True, False), ids=("before", "after"))
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_parametrizations(name: str, before: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    if before:
        PARAMETRIZATIONS[name](plain[2])
    model = vp.normalize(plain, moments(4), example=X)
    if not before:
        PARAMETRIZATIONS[name](model[2])
    model.eval()  # spectral norm goes on with its power method in training
    model(X).square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    with pytest.warns(UserWarning, match=r"^The weights of these layers are no longer parametrized: 2\.$"):
        folded = vp.fold(model)
    assert same(folded(X), model(X)) and same(copy.deepcopy(model)(X), model(X))
    assert type(folded[2]) is nn.Linear


class Domains(nn.Module):
    """A batch norm for every domain, and a layer for an input that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.more = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(3, 6)
        self.norms = nn.ModuleList([nn.BatchNorm1d(6), nn.BatchNorm1d(6)])

    def forward(self, x: Tensor, domain: int = 0, y: Tensor | None = None) -> Tensor:
        h = self.norms[domain](self.first(x))
        return self.head(torch.relu(h if y is None else h + self.more(y)))


@pytest.mark.parametrize("bias", (True, False))
def test_batch_norms_that_train_behind_frozen_weights(bias: bool) -> None:
    plain = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    plain[0].requires_grad_(False)
    model = vp.normalize(plain, moments(4), example=X, init="preserve")
    assert not model[0].weight.requires_grad and model[0].scale.requires_grad and model[0].shift.requires_grad
    model(X).square().sum().backward()
    for mine, its in ((model[0].scale, plain[1].weight), (model[0].shift, plain[1].bias)):
        assert bool(mine.grad.any()) and its.requires_grad
    folded = vp.fold(model)
    assert [p.requires_grad for p in folded.parameters()] == [p.requires_grad for p in plain.parameters()]
    plain[1].requires_grad_(False)
    assert not vp.normalize(plain, moments(4), example=X)[0].scale.requires_grad


def test_what_the_example_does_not_reach_is_named() -> None:
    """Another reason was given for it, and none for what becomes of a call that does reach it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = vp.normalize(Domains().double(), moments(4), example=X)
    (message,) = [str(one.message) for one in told]
    assert message.startswith("The example does not reach these, which stay as they are: 'more', 'norms.1'. Where")
    assert "not reached" in str(vp.fold_report(model))


@pytest.mark.filterwarnings("ignore:The statistics of")
def test_a_recurrent_layer_that_is_parametrized_later() -> None:
    torch.manual_seed(0)
    plain, x = Recurrent(), torch.randn(2, 5, 4).double()
    model = vp.normalize(plain, vp.Moments(torch.zeros(1, 1, 4), torch.ones(1, 1, 4)).to(torch.float64), example=x)
    parametrizations.weight_norm(model.lstm, "weight_hh_l0")
    with torch.no_grad(), pytest.warns(UserWarning, match=r"^The weights of .* are no longer parametrized: lstm\.$"):
        folded = vp.fold(model)
    assert same(folded(x), model(x)) and type(folded.lstm) is nn.LSTM
    assert folded.state_dict().keys() == plain.state_dict().keys()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


@pytest.mark.filterwarnings("ignore:The statistics of", "ignore:These layers compute", "ignore:These layers stay")
@pytest.mark.parametrize("where", ("list", "dict", "weight norm of an LSTM"))
def test_what_an_earlier_call_has_left_is_named(where: str) -> None:
    """copy.deepcopy failed on it, in torch's own words."""
    plain, x = Recurrent(), torch.randn(2, 5, 4).double()
    given = vp.Moments(torch.zeros(1, 1, 4), torch.ones(1, 1, 4)).to(torch.float64)
    if where == "weight norm of an LSTM":
        parametrizations.weight_norm(plain.lstm, "weight_hh_l0")
    for model, call in (
        (plain, lambda m: vp.normalize(m, given, example=x)),
        (vp.normalize(kept_without(plain, x), given, example=x), vp.fold),
    ):
        output = model(x)
        if where != "weight norm of an LSTM":
            model.kept = [output] if where == "list" else {"output": output}
        with pytest.raises(ValueError, match=r"holds tensors with derivatives that an earlier call has left there"):
            call(model)
        call(kept_without(model, x))


@torch.no_grad()
def kept_without(model: Any, x: Tensor) -> Any:
    """The model after what the error advises."""
    model(x)
    model.kept = None
    return model


def test_init_says_that_it_takes_parametrizations_away() -> None:
    plain = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)).double()
    with pytest.warns(UserWarning, match=r"^The weights of these layers are no longer parametrized: 0\.$"):
        vp.init_(plain, moments(4), example=X)


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.filterwarnings("ignore:The statistics of")
def test_a_batch_norm_behind_a_parametrized_weight_stays(name: str) -> None:
    """The weight takes no factor, and looking for its owners ended in an error."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    PARAMETRIZATIONS[name](plain[0])
    nn.init.normal_(plain[1].weight)
    nn.init.normal_(plain[1].running_mean)
    plain.eval()
    with pytest.warns(vp.PlainWarning, match=r"whose weight is parametrized, .* stay, .*'1'"):
        model = vp.normalize(plain, moments(4), example=X, init="preserve")
    assert same(model(X), plain(X)) and same(vp.fold(model)(X), plain(X))


def test_a_layer_put_in_the_place_of_another_is_refused() -> None:
    model = mlp()
    model[2] = nn.Linear(6, 3).double()
    with pytest.raises(ValueError, match=r"'2' was replaced after vp\.normalize"):
        model(X)
    with pytest.raises(ValueError, match="was replaced"):
        vp.fold(model)


def test_an_activation_put_in_the_place_of_another_is_refused() -> None:
    model = copy.deepcopy(mlp())
    model(X)
    model[1] = nn.Sigmoid()
    with pytest.raises(ValueError, match=r"'1' was replaced after vp\.normalize"):
        model(X)


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize(("module", "name"), [(nn.LeakyReLU(0.1), "negative_slope"), (nn.Dropout(0.5), "p")])
def test_a_setting_that_was_changed_is_refused(module: nn.Module, name: str, copied: Any) -> None:
    plain = nn.Sequential(nn.Linear(X.shape[1], 6), copy.deepcopy(module), nn.Linear(6, 3)).double()
    model = vp.normalize(plain, moments(X.shape[1]), example=X)
    setattr(model[1], name, 0.9)  # before the first call as well as after it
    model[1].inplace = True  # is no matter
    changed = copied(model)
    with pytest.raises(ValueError, match=rf"'{name}' of module '1' was 0\.\d when the model was normalized and is 0.9"):
        changed(X)
    setattr(changed[1], name, getattr(module, name))
    assert changed(X).shape == (len(X), 3)


def steeper(model: Any) -> None:
    model[1].negative_slope = 0.9


@pytest.mark.parametrize(
    "change, dynamic",
    [
        (steeper, None),
        pytest.param(steeper, True, marks=pytest.mark.slow),
        pytest.param(lambda model: model.pop(1), None, marks=pytest.mark.slow),
    ],
)
def test_what_was_changed_is_refused_in_compiled_models(change: Callable[[Any], Any], dynamic: bool | None) -> None:
    torch._dynamo.reset()
    for slope in (0.3, 0.2, 0.1):  # of which Dynamo makes a variable
        model = mlp(nn.LeakyReLU(slope), nn.Identity())
        compiled = torch.compile(model, backend="eager", dynamic=dynamic)
        assert same(compiled(X), model(X))
    change(model)
    with pytest.raises(ValueError, match=r"(was 0\.1 when the model was normalized and is 0\.9|was replaced after)"):
        compiled(X)


def test_the_borders_of_transposed_convolutions_count() -> None:
    """Of a single position every tap makes an output of its own, as in the first layer of a DCGAN's generator."""
    torch.manual_seed(0)
    layer, x = nn.ConvTranspose2d(32, 8, 4, bias=False).double(), torch.randn(4000, 32, 1, 1).double()
    model = vp.normalize(nn.Sequential(layer), moments(32, 1, 1, mean=0.0), example=x[:2])
    assert abs(float(model(x).std((0, 2, 3)).mean()) - 1) < 0.02


def test_complex_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="The weight of '0' is complex"):
        vp.normalize(
            nn.Sequential(nn.Linear(4, 3, dtype=torch.cfloat)), vp.Moments(torch.zeros(1, 4), torch.ones(1, 4))
        )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_another_dtype_after_evaluation(dtype: torch.dtype) -> None:
    model = mlp().eval()
    with torch.no_grad():
        first, _ = model(X), model(X)
        assert torch.allclose(model.to(dtype)(X.to(dtype)).double(), first, rtol=0.1, atol=0.1)


TRACERS: dict[str, Callable[[nn.Module], Any]] = {
    "fx": torch.fx.symbolic_trace,
    "jit": lambda model: torch.jit.trace(model, X),
    "onnx": lambda model: torch.onnx.export(model, (X,), io.BytesIO(), dynamo=False),
}


@pytest.mark.compatibility("ONNX")
@pytest.mark.compatibility("torch.jit")
@pytest.mark.parametrize("name", TRACERS)
def test_tracing_that_would_bake_weights_in_is_refused(name: str) -> None:
    model = mlp().eval()
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match=r"trace vp\.fold\(model\)"):
        warnings.simplefilter("ignore")
        TRACERS[name](model)


@pytest.mark.compatibility("torch.jit")
def test_scripting_is_for_the_folded_model() -> None:
    model = mlp().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=r"script vp\.fold\(model\)"):
            torch.jit.script(model)
        assert torch.allclose(torch.jit.script(vp.fold(model))(X), model(X))


def test_tracing_of_a_recurrent_model_is_refused() -> None:
    sequence = numbers(3, 2, 4)
    model = vp.normalize(nn.LSTM(4, 3).double(), moments(1, 4), example=sequence)
    with pytest.raises(RuntimeError, match=r"trace vp\.fold\(model\)"):
        torch.jit.trace(model, sequence, check_trace=False)
    with pytest.raises(ValueError, match="has no bias_ih_l0: set its shift"):
        model.bias_ih_l0 = nn.Parameter(torch.zeros(12).double())


def test_a_bias_that_would_do_nothing_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="has no bias: set its shift"):
        model[0].bias = nn.Parameter(torch.ones(6).double())
    with pytest.raises(ValueError, match="has no bias: set its shift"):
        torch.nn.utils.fusion.fuse_linear_bn_eval(model[0].eval(), nn.BatchNorm1d(6).double().eval())


@pytest.mark.slow
@pytest.mark.compatibility("torch.export")
def test_an_exported_model_computes_the_same() -> None:
    model = mlp(nn.LayerNorm(6), nn.GELU()).eval()
    exported = torch.export.export(model, (X,)).module()
    assert same(exported(X), model(X))
    with torch.no_grad():
        model[0].scale.mul_(1.5)
    assert same(torch.export.export(model, (X,)).module()(X), model(X))


@pytest.mark.compatibility("torch.compile")
@pytest.mark.parametrize("act", (nn.ReLU, nn.CELU))
def test_the_first_compiled_step_has_the_whole_gradient(act: type[nn.Module]) -> None:
    check_first_compiled_step(mlp(act()))


@pytest.mark.slow
@pytest.mark.parametrize("act", (nn.Softsign, nn.LogSigmoid))
def test_the_first_compiled_step_of_other_activations(act: type[nn.Module]) -> None:
    check_first_compiled_step(mlp(act()))


def check_first_compiled_step(model: nn.Module) -> None:
    torch._dynamo.reset()
    model(X).square().sum().backward()
    theirs = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(X).square().sum().backward()
    assert all(same(p.grad, g) for p, g in zip(model.parameters(), theirs, strict=True))


@pytest.mark.compatibility("torch.compile, dynamic")
def test_compiled_for_batches_of_any_size() -> None:
    model = mlp()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    assert all(same(compiled(x), model(x)) for x in (X, X[:2], X.repeat(3, 1)))


def test_many_models_of_one_architecture_share_what_is_compiled() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True, recompile_limit=2):
        for seed in range(4):
            torch.manual_seed(seed)
            plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
            model = trained(vp.normalize(plain, moments(4), example=numbers(2, 4)))
            assert same(torch.compile(model, backend="aot_eager")(X), model(X))


@pytest.mark.slow
def test_models_of_different_classes_have_a_limit_of_recompilation_each() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (5, 6, 7):
            kind = type(f"Model{width}", (nn.Sequential,), {})
            plain = kind(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3)).double()
            model = trained(vp.normalize(plain, moments(4), example=numbers(2, 4)))
            assert same(torch.compile(model, backend="eager", fullgraph=True)(X), model(X))


@pytest.mark.parametrize("act", (nn.ReLU, nn.Softsign, nn.CELU, nn.Tanhshrink))
def test_inference_mode(act: type[nn.Module]) -> None:
    model = mlp(act())
    ordinary = model(X)
    with torch.inference_mode():
        assert same(model(X), ordinary)
    model(X).sum().backward()


def test_a_parameter_without_memory_is_refused() -> None:
    model = mlp()
    loss = model(X).sum()
    model[0].weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"memory of a parameter .* was freed"):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"memory of a parameter .* was freed"):
        model(X)


@pytest.mark.parametrize("factor", (1e20, 1e-20, 1e15, 1e-15))
def test_weights_of_any_size(factor: float) -> None:
    torch.manual_seed(0)
    model = trained(vp.normalize(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double(), moments(4)))
    model, x = model.float(), X.float()
    ours = model(x)
    with torch.no_grad():
        model[0].weight.mul_(factor)
        model[2].weight[1].mul_(factor)  # one row of many
    assert torch.allclose(model(x), ours, rtol=1e-4, atol=1e-5)
    assert torch.allclose(vp.fold(model)(x), ours, rtol=1e-4, atol=1e-5)
    model(x).square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_a_row_that_becomes_zero_in_training() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[1] = 0
    output = model(X)
    output.square().sum().backward()
    assert bool(output.isfinite().all()) and all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert not bool(model[0].weight.grad[1].any())
    assert same(model[0](X)[:, 1], model[0].shift[1].expand(5)) and same(vp.fold(model)(X), output)


def shuffled(x: Tensor) -> Tensor:
    return x.view(x.shape[0], 2, -1, *x.shape[2:]).transpose(1, 2).reshape(x.shape)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: F.max_pool2d(x, 3, 1, 1),
    "average": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 5),
}


@pytest.mark.slow
@pytest.mark.compatibility("vmap")
@pytest.mark.parametrize("shuffle", (True, False), ids=("shuffled", "as it is"))
@pytest.mark.parametrize("name", POOLS)
def test_one_function_whoever_computes_it(name: str, shuffle: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.a(x))
            return self.b(POOLS[name](shuffled(x) if shuffle else x))

    torch.manual_seed(0)
    x, plain = numbers(2, 3, 8, 8), Net().double().eval()
    model = vp.normalize(plain, moments(3, 1, 1), example=x, init="preserve")
    assert same(model(x), plain(x))
    trained(model)
    own = dict(model.named_parameters())
    assert same(vp.fold(model)(x), model(x))
    assert same(functional_call(model, own, (x,)), model(x))
    assert same(
        torch.vmap(lambda p: functional_call(model, p, (x,)))({n: p[None] for n, p in own.items()})[0], model(x)
    )
    assert same(torch.export.export(model, (x,)).module()(x), model(x))


def test_an_operation_that_makes_nan_is_refused() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.LPPool2d(3, 2), nn.Conv2d(8, 4, 1)).double()
    with pytest.raises(ValueError, match="What enters layer '2' has no finite mean and variance"):
        vp.normalize(plain, moments(3, 1, 1), example=numbers(2, 3, 8, 8))


def test_the_last_gamma_of_a_residual_branch_may_be_zero() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double().eval()
    nn.init.zeros_(plain[1].weight), nn.init.ones_(plain[1].bias)
    kept = vp.normalize(plain, moments(4), example=X, init="preserve")
    assert same(kept(X), plain(X)) and not bool(kept[0].scale.any()) and bool(kept[0].weight.any())
    projected = vp.normalize(plain, moments(4), example=X)
    assert not bool(projected[0].scale.any()) and same(projected[0](X), torch.zeros(5, 6).double())


def test_a_checkpoint_for_other_data_is_refused() -> None:
    def made(mean: float, size: int = 8) -> nn.Module:
        plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)).double()
        return vp.normalize(plain, moments(3, 1, 1, mean=mean), example=numbers(2, 3, size, size))

    saved = made(0.3).state_dict()
    made(0.3).load_state_dict(saved)
    for other in (made(0.6), made(0.3, 12)):
        with pytest.raises(ValueError, match="other input moments, in another form or for inputs of another size"):
            other.load_state_dict(saved)


def test_what_stays_dependent_on_the_batch_is_named() -> None:
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    with pytest.warns(vp.PlainWarning, match="dependence on the batch: '2'"):
        vp.normalize(plain, moments(4), example=X)


def test_a_report_says_how_layers_are_folded() -> None:
    report = vp.fold_report(mlp(nn.LayerNorm(6), nn.GELU()))
    assert [(layer.path, layer.how) for layer in report.layers] == [("0", "together"), ("3", "by operation")]
    assert "layer_norm" in report.layers[1].why and report.table().endswith("1 together, 1 by operation, 0 alone")
    deep = vp.normalize(nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 3)).double(), moments(1), form="deep")
    assert [layer.centred for layer in vp.fold_report(deep).layers] == [False, True]  # the first has rows of one weight
    assert vp.fold_report(deep).table().endswith("1 with centred rows")
    with pytest.raises(ValueError, match="not normalized"):
        vp.fold_report(nn.Linear(2, 2))


STAY_TOGETHER: dict[str, tuple[nn.Module, ...]] = {
    "flatten": (nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)),
    "nearest-exact": (nn.Upsample(scale_factor=2, mode="nearest-exact"), nn.Conv2d(8, 4, 3)),
    "reflection": (nn.ReLU(), nn.ReflectionPad2d(1), nn.Conv2d(8, 4, 3)),
    "channel shuffle": (nn.ReLU(), nn.ChannelShuffle(2), nn.Conv2d(8, 4, 3)),
    "shuffle and pool": (nn.ReLU(), nn.ChannelShuffle(2), nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 4, 3)),
    "PReLU": (nn.PReLU(8), nn.Conv2d(8, 4, 3)),
    "softsign": (nn.Softsign(), nn.Conv2d(8, 4, 3)),
}


@pytest.mark.parametrize("name", STAY_TOGETHER)
def test_the_fast_fold_is_not_lost(name: str) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *STAY_TOGETHER[name]).double()
    model = vp.normalize(plain, moments(3, 1, 1), example=numbers(4, 3, 6, 6))
    assert {layer.how for layer in vp.fold_report(model).layers} == {"together"}


@pytest.mark.compatibility("DataParallel")
def test_data_parallel_is_refused() -> None:
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        mlp()[0]._replicate_for_data_parallel()


def test_a_large_kernel_takes_little_memory() -> None:
    plain = nn.Sequential(nn.Conv2d(2, 2, 15, padding=7, groups=2), nn.ReLU(), nn.Conv2d(2, 1, 1)).double()
    model = vp.normalize(plain, moments(2, 1, 1), example=numbers(1, 2, 20, 20))
    assert {layer.how for layer in vp.fold_report(model).layers} == {"together"}


def test_opacus_is_refused() -> None:
    sampler = type("GradSampleModule", (), {"__module__": "opacus.grad_sample", "hook": lambda self, *_: None})()
    with pytest.raises(RuntimeError, match="Opacus"):
        mlp()[0].register_forward_hook(sampler.hook)
    mlp()[0].register_forward_hook(lambda *_: None)


@pytest.mark.compatibility("FSDP")
def test_sharded_parameters_are_refused() -> None:
    class Sharded(nn.Parameter):
        def full_tensor(self) -> Tensor:
            return self.data

    model = mlp()
    model[0].scale = Sharded(model[0].scale.detach())
    with pytest.raises(RuntimeError, match="fully_shard on the whole model"):
        model(X)


def test_a_promise_for_one_model_holds_for_no_other() -> None:
    teacher, student = mlp(), mlp()
    with vp.unchanged(teacher):
        for _ in range(3):
            teacher(X), student(X)
            student[0].weight.data.mul_(1.2)
            student[0].scale.data.add_(0.1)
            with torch.no_grad():
                student[2].shift.add_(0.1)
            assert same(student(X), expected(student, X)) and same(teacher(X), expected(teacher, X))
