"""A normalized model is an ordinary PyTorch model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.func import functional_call
from torch.nn.utils import parametrizations

import varprop as vp
from tests.norm.networks import NETWORKS, Case, apart, both_forms, case, kept, sites, train_a_little
from varprop.norm import Normalized

COPIED = [(name, "paper") for name in ("conv", "dense", "reused", "resnet", "two in two out", "dropout")]
COPIED += [(name, "deep") for name in ("conv", "reused", "recalled")]


def fresh(name: str = "named parts", form: str = "paper") -> tuple[Case, nn.Module]:
    given, normalized = kept(name, form=form)
    return given, train_a_little(copy.deepcopy(normalized))


def single(name: str = "named parts", form: str = "paper") -> tuple[Case, nn.Module]:
    given = case(name, torch.float32)
    return given, given.normalized(form=form)


def test_names_read_naturally() -> None:
    _, model = fresh()
    layers = ("features.0", "features.2", "classifier")
    expected = [f"{layer}.{name}" for layer in layers for name in ("weight", "scale", "shift")]
    assert [name for name, _ in model.named_parameters()] == expected
    facts = [name for name in model.state_dict() if name not in expected]
    assert len(facts) == 1 and facts[0].endswith("._extra_state")  # input moments and sizes, checked when loaded
    assert list(model.buffers()) == []
    assert "normalized" in repr(model) and "Conv2d" in repr(model)


@pytest.mark.compatibility("deepcopy, pickle")
@pytest.mark.parametrize(("name", "form"), COPIED)
def test_a_copy_stands_on_its_own(name: str, form: str) -> None:
    given, model = fresh(name, form)
    before, twin = given.run(model), copy.deepcopy(model)
    assert torch.equal(given.run(twin), before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    assert torch.equal(given.run(twin), before)


@pytest.mark.compatibility("deepcopy, pickle")
@pytest.mark.parametrize(("name", "form"), COPIED)
def test_pickle(name: str, form: str) -> None:
    given, model = fresh(name, form)
    assert torch.equal(given.run(pickle.loads(pickle.dumps(model))), given.run(model))


def test_a_whole_model_in_a_file(tmp_path: Path) -> None:
    given, model = fresh()
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(given.run(torch.load(tmp_path / "model.pt", weights_only=False)), given.run(model))


def test_a_deep_chain_can_be_copied() -> None:
    _, model = kept("resnet")
    assert len(pickle.dumps(model)) < 60 * sum(p.numel() for p in model.parameters())


@pytest.mark.compatibility("deepcopy, pickle")
@both_forms
@pytest.mark.parametrize("name", ("conv", "own batch norm", "recalled"))
def test_state_dict_into_a_freshly_normalized_model(name: str, form: str, tmp_path: Path) -> None:
    given, model = fresh(name, form)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.manual_seed(99)
    other = case(name)
    for parameter in other.model.parameters():
        nn.init.normal_(parameter)
    resumed = other.normalized(form=form)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), strict=True)
    assert torch.equal(given.run(resumed), given.run(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_architecture_compiles_as_one_graph(name: str) -> None:
    given, model = single(name)
    torch._dynamo.reset()
    compiled = torch.compile(model.train(), fullgraph=True, backend="eager")
    torch.manual_seed(0)
    ours = given.run(compiled)
    torch.manual_seed(0)
    assert apart(ours, given.run(model)) <= 1e-5


@pytest.mark.compatibility("torch.compile")
@pytest.mark.parametrize(
    ("name", "form"),
    (
        ("named parts", "paper"),
        pytest.param("dropout", "paper", marks=pytest.mark.slow),
        pytest.param("grouped", "deep", marks=pytest.mark.slow),
        pytest.param("named parts", "deep", marks=pytest.mark.slow),
    ),
)
def test_compiles_without_a_graph_break(name: str, form: str) -> None:
    given, model = single(name, form)
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), fullgraph=True, backend="aot_eager")
    assert apart(given.run(compiled), given.run(model)) <= 1e-5
    given.run(compiled).square().sum().backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    given.run(model).square().sum().backward()
    for n, p in model.named_parameters():
        assert (ours[n] - p.grad).abs().max() <= 1e-4 * (1e-3 + p.grad.abs().max()), n


def test_no_graph_break_in_training_mode() -> None:
    given, model = single("dropout")
    torch._dynamo.reset()
    assert torch._dynamo.explain(model.train())(*given.inputs).graph_break_count == 0


def test_a_compiled_step_copies_no_derivative() -> None:
    given, model = single("conv")
    backward: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        backward.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=keep)
    compiled = torch.compile(model.to(memory_format=torch.channels_last), fullgraph=True, backend=backend)
    given.run(compiled).square().sum().backward()
    (fold,) = [node for node in backward[0].graph.nodes if "fold_backward" in str(node.target)]
    assert not [node for node in fold.all_input_nodes if node.target is torch.ops.aten.clone.default]


@pytest.mark.parametrize("form", ("paper", pytest.param("deep", marks=pytest.mark.slow)))
def test_exports(form: str) -> None:
    given, model = fresh("mlp", form)
    exported = torch.export.export(model, given.inputs)
    assert apart(given.run(exported.module()), given.run(model)) <= 1e-12


@pytest.mark.slow
@pytest.mark.compatibility("ONNX")
@pytest.mark.parametrize("exported", [vp.fold, lambda model: model], ids=["folded", "normalized"])
def test_onnx(exported: Callable[[nn.Module], nn.Module]) -> None:
    given, model = single()
    program = torch.onnx.export(exported(model), given.inputs, dynamo=True)
    outputs = program.call_reference(*given.inputs)
    assert apart(outputs[0], given.run(model).reshape(outputs[0].shape)) <= 1e-5


def test_the_folded_model_is_made_of_stock_operations() -> None:
    given, model = single()
    exported = torch.export.export(vp.fold(model), given.inputs)
    plain = torch.export.export(given.model, given.inputs)
    assert [str(n.target) for n in exported.graph.nodes] == [str(n.target) for n in plain.graph.nodes]


class Dtypes(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects the dtypes computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        self.seen.update([result.dtype] if isinstance(result, Tensor) else [])
        return result


@pytest.mark.compatibility("AMP")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
def test_autocast_leaves_the_statistics_in_full_precision(dtype: torch.dtype) -> None:
    given, model = single()
    before = [site.output_statistics() for site in sites(model).values()]
    with torch.autocast("cpu", dtype):
        with Dtypes() as found:
            inside = [site.output_statistics() for site in sites(model).values()]
        outputs = model(*given.inputs)
    assert not found.seen & {torch.bfloat16, torch.float16}
    for ours, theirs in zip(inside, before, strict=True):
        assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(ours, theirs, strict=True))
    assert outputs.dtype == dtype
    assert apart(outputs.float(), model(*given.inputs)) <= 0.05
    outputs.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("name", ("named parts", "own norms"))
def test_a_model_in_half_precision(name: str, dtype: torch.dtype) -> None:
    given, model = single(name)
    before = given.run(model)
    model.to(dtype)
    assert all(t.dtype == torch.float32 for site in sites(model).values() for t in site.output_statistics())
    outputs = model(*(x.to(dtype) for x in given.inputs))
    assert outputs.dtype == dtype
    assert apart(outputs.float().flatten(), before) <= 0.1


def test_double_precision_afterwards() -> None:
    given, model = single()
    before = given.run(model)
    outputs = model.double()(*(x.double() for x in given.inputs))
    assert outputs.dtype == torch.float64
    assert apart(outputs.flatten(), before.double()) <= 1e-5
    assert all(t.dtype == torch.float64 for site in sites(model).values() for t in site.output_statistics())


class Mixed(nn.Module):
    """A batch norm to absorb, a layer that is called twice, and a product between layers that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.again = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.matrix, self.inner = nn.Parameter(torch.randn(16, 16)), nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.first(x)))
        x = torch.tanh(self.again(torch.relu(self.again(x))))
        return self.last(self.inner(x @ self.matrix))


def _numbers(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


ASKED: dict[str, Callable[[nn.Module, nn.Module, vp.Moments, Tensor], list[Tensor]]] = {
    "normalize": lambda plain, model, moments, x: _numbers(vp.normalize(plain, moments)),
    "deep form": lambda plain, model, moments, x: _numbers(vp.normalize(plain, moments, form="deep")),
    "preserve": lambda plain, model, moments, x: _numbers(vp.normalize(plain, moments, init="preserve")),
    "fold": lambda plain, model, moments, x: _numbers(vp.fold(model)),
    "init_": lambda plain, model, moments, x: _numbers(vp.init_(copy.deepcopy(plain), moments)),
    "to batch norm": lambda plain, model, moments, x: _numbers(vp.reparametrize(plain, "batch", batch=x)),
    "batch_norm_start": lambda plain, model, moments, x: _numbers(
        vp.batch_norm_start(plain, x, torch.Generator().manual_seed(0))
    ),
    "propagate": lambda plain, model, moments, x: [
        getattr(vp.propagate(plain, moments).output, part) for part in ("mean", "var")
    ],
    "inspect": lambda plain, model, moments, x: [
        torch.tensor(list(vp.inspect(plain, moments, check=x).text().encode()))
    ],
    "predict": lambda plain, model, moments, x: [
        getattr(vp.predict(plain, x, input_var=0.1), part) for part in ("mean", "std")
    ],
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_asked_under_autocast_is_what_it_is_without(asked: str) -> None:
    torch.manual_seed(0)
    plain, x = Mixed().eval(), torch.randn(64, 6)
    moments = vp.input_moments(x)
    model = vp.normalize(plain, moments)
    expected = ASKED[asked](plain, model, moments, x)
    with torch.autocast("cpu", torch.bfloat16):
        found = ASKED[asked](plain, model, moments, x)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


class InPart(nn.Module):
    """A network whose middle is of another dtype than the rest."""

    def __init__(self, inner: torch.dtype) -> None:
        super().__init__()
        self.first, self.last, self.inner = nn.Linear(6, 16), nn.Linear(16, 3), inner
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16, bias=False)).to(inner)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.relu(self.first(x)).to(self.inner))
        return self.last(torch.tanh(x).to(self.last.weight.dtype))


@pytest.mark.compatibility("parts in another dtype")
@pytest.mark.filterwarnings("ignore:The statistics of", "ignore:vp.fold will")
@pytest.mark.parametrize("inner, error", ((torch.float64, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.003)))
def test_a_part_in_another_dtype(inner: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    plain, x = InPart(inner), torch.randn(64, 6)
    moments = vp.Moments(torch.zeros(1, 6), torch.ones(1, 6))
    exact = copy.deepcopy(plain).double()
    exact.inner = torch.float64
    assert apart(vp.normalize(plain, moments, init="preserve")(x), plain(x)) <= error
    model = vp.normalize(plain, moments, form="deep")
    reference = vp.normalize(exact, moments.to(torch.float64), form="deep")
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.copy_(ours)
    outputs, expected = model(x), reference(x.double())
    assert outputs.dtype == torch.float32 and apart(outputs.double(), expected) <= error
    assert apart(vp.fold(model)(x), outputs) <= error
    for result in (outputs, expected):
        result.square().sum().backward()
    assert all(parameter.grad.dtype == parameter.dtype for parameter in model.parameters())
    found, true = (torch.cat([p.grad.double().flatten() for p in m.parameters()]) for m in (model, reference))
    assert (found - true).norm() <= 5 * error * true.norm()


@pytest.mark.parametrize(
    ("dtype", "error"),
    (
        (torch.float64, 1e-5),
        pytest.param(torch.float16, 1e-2, marks=pytest.mark.slow),
        (torch.bfloat16, 1e-1),
    ),
)
def test_plain_layers_between_normalized_ones_in_another_dtype(dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)  # its attention stays plain
    plain, x = nn.Sequential(nn.Linear(6, 8), encoder, nn.Linear(8, 8), nn.Linear(8, 3)), torch.randn(4, 5, 6)
    moments = vp.Moments(torch.zeros(1, 1, 6), torch.ones(1, 1, 6))

    def normalized(model: nn.Module) -> nn.Module:
        given = moments.to(model[0].weight.dtype)
        return vp.normalize(model, given, example=(4, 5, 6), only=lambda path, _: path != "2").eval()

    expected = normalized(plain)(x)
    for model in (normalized(plain).to(dtype), normalized(plain.to(dtype))):
        outputs = model(x.to(dtype))
        assert outputs.dtype == dtype and apart(outputs.float(), expected) <= error
        assert apart(vp.fold(model)(x.to(dtype)), outputs) <= error
        outputs.square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("kind", ("weight norm", "attention", "called twice"))
def test_weights_made_in_inference_mode(kind: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(4, 5, 8)
    layer = parametrizations.weight_norm(layer) if kind == "weight norm" else layer
    inner = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) if kind == "attention" else nn.Tanh()
    plain = nn.Sequential(layer, inner, layer if kind == "called twice" else nn.Linear(8, 8)).eval()
    model = vp.normalize(plain, vp.Moments(torch.zeros(1, 1, 8), torch.ones(1, 1, 8)), example=x)
    expected = model(x).detach()
    with torch.inference_mode():
        assert apart(model(x), expected) <= 1e-6
        assert apart(vp.fold(model)(x), expected) <= 1e-5
        with vp.unchanged(model):
            assert apart(model(x), expected) <= 1e-6
        for copied in (copy.deepcopy(model), model.double().float()):
            assert apart(copied(x), expected) <= 1e-5
    with torch.no_grad():
        assert apart(model(x), expected) <= 1e-5


@pytest.mark.compatibility("parts in another dtype")
def test_parameters_of_a_layer_in_different_dtypes_are_refused() -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    moments = vp.Moments(torch.zeros(1, 6), torch.ones(1, 6))
    plain[4].bias.data = plain[4].bias.data.half()
    with pytest.raises(ValueError, match=r"^Parameters of '4' have different dtypes \(torch.float16, torch.float32\)"):
        vp.normalize(plain, moments)
    plain.float()[3].double()
    for refused in (lambda: vp.normalize(plain, moments), lambda: vp.reparametrize(plain, "standard", example=(1, 6))):
        with pytest.raises(ValueError, match=r"^Parameters of '2' and of the batch norm '3' behind it have different"):
            refused()
    vp.normalize(plain.float(), moments)


@pytest.mark.compatibility("AMP")
def test_grad_scaler() -> None:
    given, model = single()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**10), torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(*given.inputs).float(), torch.tensor([0, 1, 2, 0]))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.compatibility("functional_call")
@pytest.mark.parametrize("name", ("named parts", "reused", "resnet"))
def test_functional_call_replaces_what_statistics_read(name: str) -> None:
    given, model = fresh(name)
    before = given.run(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    state = dict(other.named_parameters())
    assert apart(functional_call(model, state, given.inputs).flatten(), given.run(other)) <= 1e-12
    assert torch.equal(given.run(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@both_forms
def test_moves_between_devices(form: str, dtype: torch.dtype) -> None:
    given = case("named parts", dtype)
    model = train_a_little(given.normalized(form=form))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = given.run(model)
    there = copy.deepcopy(model).to("meta")
    outputs = there(given.inputs[0].to("meta"))
    assert outputs.device.type == "meta" and outputs.numel() == before.numel()
    back = there.to_empty(device="cpu")
    back.load_state_dict(state)
    assert torch.equal(given.run(back), before)


def test_requires_grad_switches_everything() -> None:
    given, model = fresh()
    assert not given.run(model.requires_grad_(False)).requires_grad
    given.run(model.requires_grad_(True)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@both_forms
def test_channels_last(form: str) -> None:
    given, model = fresh(form=form)
    before = given.run(model)
    model = model.to(memory_format=torch.channels_last)
    x = given.inputs[0].contiguous(memory_format=torch.channels_last)
    features = model.features(x)
    assert features.is_contiguous(memory_format=torch.channels_last)
    assert apart(model(x).flatten(), before) <= 1e-12


def test_it_is_still_the_layer_people_ask_for() -> None:
    _, model = fresh()
    assert isinstance(model.features[0], nn.Conv2d) and isinstance(model.features[0], Normalized)
    assert isinstance(model.classifier, nn.Linear) and model.classifier.in_features == 4


def test_hooks_stay() -> None:
    given, seen = case("named parts"), []
    given.model.features[0].register_forward_hook(lambda module, args, output: seen.append(type(module)))
    normalized = given.normalized(inplace=True)
    seen.clear()
    given.run(normalized)
    given.run(vp.fold(normalized, inplace=True))
    assert len(seen) == 2 and seen[1] is nn.Conv2d


def test_other_batch_sizes_and_resolutions() -> None:
    _, model = fresh()
    for shape in ((1, 3, 7, 7), (5, 3, 12, 9)):
        assert model(torch.randn(shape, dtype=torch.float64)).shape == (shape[0], 3)


def test_weights_in_a_buffer() -> None:
    buffer = io.BytesIO()
    given, model = fresh()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = fresh()[1]
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(given.run(other), given.run(model))


class Island(nn.Module):
    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.first, self.last, self.autocast = nn.Linear(4, 8), nn.Linear(8, 2), autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.last(self.first(x).relu())


def test_layers_where_autocast_is_off_are_normalized() -> None:
    """They were not found, and the model had no linear layer."""
    model = vp.normalize(Island(False), vp.Moments(torch.zeros(1, 4), 1.0))
    assert [path for path, module in model.named_modules() if hasattr(module, "scale")] == ["first", "last"]
    with pytest.raises(ValueError, match=r"it calls none of 'first', 'last', or only where torch.autocast or vmap"):
        vp.normalize(Island(True), vp.Moments(torch.zeros(1, 4), 1.0))
