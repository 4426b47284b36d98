"""All layers folded together agree with every layer by itself, and never miss a change of the parameters."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import varprop as vp
from tests.norm.networks import NETWORKS, Case, alone_, both_forms, case, kept, sites, train_a_little
from varprop.gaussian.activations import CURVES
from varprop.gaussian.derivatives import DOUBLE, KERNELS, SINGLE
from varprop.norm import Normalized
from varprop.norm import network as network_module
from varprop.norm.backends.torch import with_slopes
from varprop.norm.fold import dispatch
from varprop.norm.fold.layout import Function
from varprop.norm.lowering import AFTER_SKIP, LEARNED_SLOPE

# Between their layers lies what only a walk can follow: embeddings, layer norm, parameters, a layer called twice.
WALKED = {"language", "own norms", "positions", "recalled"}


def run(given: Case, model: nn.Module) -> Tensor:
    torch.manual_seed(0)  # for dropout
    return given.run(model)


def gradients(given: Case, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    run(given, model).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mlp(dtype: torch.dtype = torch.float64, form: Any = "paper") -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    hidden = [nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6), nn.Sigmoid()]
    model = nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), *hidden, nn.Linear(6, 3)).to(dtype)
    x = torch.randn(8, 5, dtype=dtype)
    return vp.normalize(model, vp.Moments(torch.zeros(1, 5, dtype=dtype), torch.ones(1, 5, dtype=dtype)), form=form), x


def close(ours: Tensor, theirs: Tensor, tolerance: float, floor: float = 1e-9) -> bool:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm()) <= tolerance * float(theirs.norm()) + floor


IN_BRIEF = ("mlp", "grouped", "other ranks", "unet", "recalled", "own norms")  # in the deep form
FORMS = [(name, "paper") for name in NETWORKS] + [(name, "deep") for name in IN_BRIEF]
FORMS += [pytest.param(name, "deep", marks=pytest.mark.slow) for name in NETWORKS if name not in IN_BRIEF]


@pytest.mark.compatibility("eager")
@pytest.mark.parametrize(
    "training", (pytest.param(False, marks=pytest.mark.slow), True), ids=("evaluation", "training")
)
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_values_and_gradients_are_those_of_single_layers(name: str, form: str, training: bool) -> None:
    found, normalized = kept(name, form=form)
    model = train_a_little(copy.deepcopy(normalized)).train(training)
    alone = alone_(copy.deepcopy(model))
    expected, theirs = run(found, alone).detach(), gradients(found, alone)
    assert close(run(found, model), expected, 1e-11)
    ours = gradients(found, model)
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert close(ours[key], theirs[key], 1e-9), key


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_most_layers_need_no_walk(name: str) -> None:
    model = case(name).normalized()
    networks = [network for site in sites(model).values() for network, _ in site.networks.values()]
    assert all(not network.evaluated for network in networks) or name in WALKED


LAYERS = {
    "linear": lambda c, o: nn.Conv2d(c, o, 1),
    "3x3": lambda c, o: nn.Conv2d(c, o, 3, padding=1),
    "strided": lambda c, o: nn.Conv2d(c, o, 3, padding=1, stride=2, bias=False),
    "unpadded": lambda c, o: nn.Conv2d(c, o, 2),
    "dilated": lambda c, o: nn.Conv2d(c, o, 3, padding=2, dilation=2),
    "grouped": lambda c, o: nn.Conv2d(c, o - o % 2, 3, padding=1, groups=2 if c % 2 == 0 else 1),
    "up": lambda c, o: nn.ConvTranspose2d(c, o, 3, stride=2, padding=1),
}
ACTIVATIONS = [nn.ReLU, nn.Sigmoid, nn.Tanh, nn.GELU, nn.SiLU, nn.ELU, nn.Hardswish, nn.Softplus, nn.ReLU6, nn.Softsign]
ACTIVATIONS += [nn.Mish, nn.LeakyReLU, nn.Hardsigmoid, nn.SELU, nn.Softshrink, nn.Identity]


def channels_of(layer: Any) -> int:
    return int(layer.out_channels)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    widths=st.lists(st.integers(2, 9), min_size=5, max_size=5),
    activation=st.sampled_from(ACTIVATIONS),
    lasting=st.booleans(),
    form=st.sampled_from(("paper", "deep")),
    seed=st.integers(0, 2**16),
)
def test_single_precision_agrees_with_the_reference(
    kinds: list[str], widths: list[int], activation: Any, lasting: bool, form: str, seed: int
) -> None:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    before = 3
    for kind, width in zip(kinds, widths, strict=False):
        layers += [LAYERS[kind](before, width), activation()]
        before = channels_of(layers[-2])
    plain = nn.Sequential(*layers, nn.Conv2d(before, 4, 1))
    plain = plain.to(memory_format=torch.channels_last) if lasting else plain
    x = torch.randn(2, 3, 9, 9)
    data = Case(plain, (x,), vp.Moments(x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True)))
    model = data.normalized(form=form)
    with torch.no_grad():
        for site in sites(model).values():
            site.scale.uniform_(0.3, 2.0), site.shift.normal_()
    agrees_with_the_reference(model)


def agrees_with_the_reference(model: nn.Module) -> None:
    exact = copy.deepcopy(model).double()
    ours = [site.folded() for site in sites(model).values()]
    theirs = [site.folded() for site in sites(alone_(exact)).values()]
    shapes = [weight.shape for weight, _ in ours]
    directions = [torch.randn(shape) / shape.numel() ** 0.5 for shape in shapes]
    biases = [torch.randn_like(bias) for _, bias in ours]
    for (weight, bias), (exact_weight, exact_bias) in zip(ours, theirs, strict=True):
        assert close(weight, exact_weight, 1e-5) and close(bias, exact_bias, 1e-5, 1e-5)
    for results in (ours, theirs):
        grads = [d.to(w.dtype) for d, (w, _) in zip(directions, results, strict=True)]
        grads += [d.to(b.dtype) for d, (_, b) in zip(biases, results, strict=True)]
        torch.autograd.backward([w for w, _ in results] + [b for _, b in results], grads)
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert close(p.grad, q.grad, 1e-5, 1e-5), name


def two_by_two(**form: Any) -> nn.Module:
    return nn.Conv2d(2, 2, 3, **form)


NEIGHBOURS = {  # layers with weights of one shape that are not of one form
    "groups": lambda: (nn.Conv2d(2, 4, 1), nn.Conv2d(4, 2, 3, groups=2), two_by_two()),
    "transposed": lambda: (nn.ConvTranspose2d(2, 2, 3), two_by_two()),
    "memory": lambda: (two_by_two().to(memory_format=torch.channels_last), two_by_two()),
}


@both_forms
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_layers_of_one_weight_shape_and_different_forms_keep_apart(name: str, form: str) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 2, 1), *NEIGHBOURS[name](), *NEIGHBOURS[name]())
    plain = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
    x = torch.randn(2, 3, 12, 12)
    data = Case(plain, (x,), vp.Moments(x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True)))
    model = data.normalized(form=form)
    agrees_with_the_reference(model)


KERNEL_CASES: list[tuple[Any, ...]] = [
    ("two_slopes", 1.0, 0.0),
    ("two_slopes", 1.03, 0.03),
    ("affine", -2.0, 0.5),
    ("gain", 1.0, 0.25),
    ("dropout", 0.3),
    ("maximum", 1.03, 0.49),
    ("softplus", 2.0),
    ("elu", 1.0, 1.0, 1.0),
    ("clamp", -1.0, 2.0),
    ("compose", "maximum", 1.03, 0.49, "two_slopes", 1.0, 0.0),
    ("hardsigmoid",),
    *((name,) for name in CURVES if name not in ("softplus", "elu")),
]


@pytest.mark.parametrize("nodes", (SINGLE, DOUBLE))
@pytest.mark.parametrize("widest", (1.0, 3.0, 20.0))
@pytest.mark.parametrize("kernel", KERNEL_CASES, ids=str)
def test_slopes_are_the_derivatives(kernel: tuple[Any, ...], widest: float, nodes: int) -> None:
    """By central differences of the moments themselves, which other tests compare with the engine's."""
    mean = torch.linspace(-3, 3, 13, dtype=torch.float64).repeat(3)
    var = torch.tensor([0.02, 0.4, 1.0], dtype=torch.float64).repeat_interleave(13) * widest**2
    function, step = Function("f", lambda x: x, kernel), 1e-4
    _, [found] = with_slopes(function, nodes)((mean, var))
    steps = [(mean + step, var), (mean - step, var), (mean, var * (1 + step)), (mean, var * (1 - step))]
    up, down, wider, narrower = (with_slopes(function, nodes)(pair)[0] for pair in steps)
    measured = torch.stack([(up - down) / (2 * step), (wider - narrower) / (2 * step * var)], 1)
    measured = measured.flatten(0, 1)
    assert (found - measured).abs().max() <= 1e-5 * (1 + found.abs().max())


@pytest.mark.parametrize("name", sorted(KERNELS[DOUBLE]))
def test_every_kernel_is_tested(name: str) -> None:
    assert name in {kernel[0] for kernel in KERNEL_CASES} | {"add", "mul", "skip", "slope"}


@pytest.mark.parametrize("function", (AFTER_SKIP, LEARNED_SLOPE), ids=("skip", "slope"))
def test_slopes_of_two_arguments_are_the_derivatives(function: Function) -> None:
    torch.manual_seed(0)
    mean, other_mean = torch.rand(500, dtype=torch.float64) * 3, torch.randn(500, dtype=torch.float64)
    var, other_var = (0.01 + torch.rand(500, dtype=torch.float64) * 2 for _ in range(2))
    found, derivatives = with_slopes(function)((mean, var), (other_mean, other_var))
    leaves = [t.clone().requires_grad_() for t in (mean, var, other_mean, other_var)]
    expected = function.moments(leaves[:2], leaves[2:])
    for row, moment in enumerate(expected):
        torch.testing.assert_close(found[row], moment)
        by = torch.autograd.grad(moment.sum(), leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(torch.cat([part.view(2, 2, -1)[row] for part in derivatives]), torch.stack(by))


class Counter:
    """Counts how often the passes run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, inner = 0, network_module.apply_fold

        def counted(*args: Any) -> Any:
            self.count += 1
            return inner(*args)

        monkeypatch.setattr(network_module, "apply_fold", counted)


def test_folded_once_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp()
    counter = Counter(monkeypatch)
    for training in (True, False):
        model.train(training)
        for part in x.split(2):
            before = counter.count
            model(part).square().mean()
            assert counter.count == before + 1


def test_accumulated_gradients_are_the_sum() -> None:
    model, x = mlp()
    for _ in range(3):
        model.zero_grad()
        for part in x.split(2):
            model(part).square().sum().backward()
        accumulated = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        assert all(close(a, p.grad, 1e-12) for a, p in zip(accumulated, model.parameters(), strict=True))
        with torch.no_grad():
            model[0].weight.add_(0.1)


def behind(model: nn.Module) -> None:
    model[0].weight.data[0, 0] += 1.0  # a single number, past autograd's version counter


def replaced(model: nn.Module) -> None:
    model[0].scale.data = 2 * model[0].scale.data


def swapped(model: nn.Module) -> None:
    model[0].weight.data.copy_(model[0].weight.data.flip(0))


def loaded(model: nn.Module) -> None:
    state = model.state_dict()
    model.load_state_dict({name: state[name] if "extra" in name else 1.1 * state[name] for name in state})


def exchanged(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 1.5 + 0.1)


def stepped(model: nn.Module) -> None:
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("grad", (True, False), ids=("grad", "no grad"))
@pytest.mark.parametrize("change", (behind, replaced, swapped, loaded, exchanged, stepped))
def test_every_change_is_noticed(change: Any, grad: bool) -> None:
    model, x = mlp()
    model.train(grad)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            before = model(x)
        with torch.enable_grad():
            change(model)
        after = model(x)
    alone = alone_(copy.deepcopy(model))
    assert not close(after, before, 1e-3)
    assert close(after, alone(x), 1e-12)


def test_a_promise_saves_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp()
    counter = Counter(monkeypatch)
    with vp.unchanged(model):
        model(x).sum().backward(), model(x).sum().backward()
    assert counter.count == 1
    model[0].weight.data.mul_(2).add_(0.1)
    assert close(model(x), alone_(copy.deepcopy(model))(x), 1e-12)


@pytest.mark.parametrize("change", (loaded, exchanged, stepped))
def test_a_broken_promise_is_refused(change: Any) -> None:
    model, x = mlp()
    with vp.unchanged(model):
        model(x)
        change(model)
        with pytest.raises(RuntimeError, match=r"within `vp\.unchanged`"):
            model(x)
    assert close(model(x), alone_(copy.deepcopy(model))(x), 1e-12)


def test_a_change_between_forward_and_backward_is_refused() -> None:
    model, x = mlp()
    loss = model(x).sum()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize("reentrant", (True, False), ids=("reentrant", "non-reentrant"))
def test_gradient_checkpoints(reentrant: bool) -> None:
    model, x = mlp()
    x.requires_grad_()
    front, back = model[:4], model[4:]
    y = checkpoint(front, x, use_reentrant=reentrant)
    checkpoint(back, y, use_reentrant=reentrant).square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    assert all(close(a, p.grad, 1e-12) for a, p in zip(ours, model.parameters(), strict=True))


@both_forms
def test_derivatives_of_derivatives(form: str) -> None:
    model, x = mlp(form=form)
    parameters = list(model.parameters())

    def penalty(network: nn.Module, wanted: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(network(x).square().mean(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    ours = penalty(model, parameters)
    alone = alone_(copy.deepcopy(model))
    theirs = penalty(alone, list(alone.parameters()))
    assert all(close(a, b, 1e-9) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.compatibility("double backward")
def test_gradient_penalty_on_the_input() -> None:
    model, x = mlp()
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    alone = alone_(copy.deepcopy(model))
    alone.zero_grad()
    (slope,) = torch.autograd.grad(alone(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert close(p.grad, torch.zeros_like(p) if q.grad is None else q.grad, 1e-10)


def test_copies_and_files_after_use() -> None:
    model, x = mlp()
    output = model(x)
    other = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded_model = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        other[0].weight.add_(1.0)
    assert torch.equal(model(x), output) and torch.equal(loaded_model(x), output)
    assert not torch.equal(other(x), output)


def test_parts_can_be_called_by_themselves() -> None:
    model, x = mlp()
    assert close(model[4:](model[:4](x)), model(x), 1e-12)


def test_under_autocast_the_weights_come_in_its_dtype() -> None:
    model, x = mlp(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        assert model[0].folded()[0].dtype == torch.bfloat16
    assert model[0].folded()[0].dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.compatibility("vmap")
@both_forms
def test_transforms_of_torch_func_see_single_layers(form: str) -> None:
    model, x = mlp(form=form)
    parameters = {name: torch.stack([p.detach(), 1.1 * p.detach()]) for name, p in model.named_parameters()}

    def call(own: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, own, (x,))

    both = torch.vmap(call)(parameters)
    for place in range(2):
        single = call({name: p[place] for name, p in parameters.items()})
        assert close(both[place], single, 1e-10)


def test_fold_leaves_no_hooks() -> None:
    model, x = mlp()
    expected = model(x)
    folded = vp.fold(model)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in folded.modules())
    assert not any(isinstance(m, Normalized) for m in folded.modules())
    assert close(folded(x), expected, 1e-12)


def test_frozen_layers_get_no_gradient() -> None:
    model, x = mlp()
    model[0].weight.requires_grad_(False)
    model(x).sum().backward()
    assert model[0].weight.grad is None and model[0].scale.grad is not None


def test_modes_that_agree_share_one_network():
    model = vp.normalize(
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3)), vp.Moments(0.0, 1.0), example=(1, 2)
    )
    network = model[0].networks[True][0]
    owners = [owner for owner in dispatch._networks[network.executor.number] if owner.layers[0] is model[0]]
    assert owners == [network] and model[0].networks[False][0] is network


def test_graphs_that_torch_keeps_on_disk_are_found_by_those_alone_who_compute_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is kept for the backward has other sizes with and without kernels: a graph of the other would fail."""
    layout, works = mlp()[0][0].networks[True][0].executor.layout, dispatch.triton_works()
    found = [dispatch.fingerprint(layout) for _ in range(2)]
    monkeypatch.setattr(dispatch, "triton_works", lambda: not works)
    found.append(dispatch.fingerprint(layout))
    monkeypatch.setattr(dispatch, "__version__", "next")
    found.append(dispatch.fingerprint(layout))
    assert found[0] == found[1] and len(set(found)) == 3
