"""Linear layers of classes that are none of torch's do what nn.Linear does, and what is not linear stays as it is."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.norm import Normalized


class Conv1D(nn.Module):
    """The linear layer of transformers' GPT-2: its weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * nx**-0.5), nn.Parameter(torch.randn(nf))

    def __repr__(self) -> str:
        return f"Conv1D({self.nf})"

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class ChannelLinear(nn.Module):
    """The linear layer of PyTorch Geometric, which is copied and saved by code of its own."""

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels) * in_channels**-0.5)
        self.register_parameter("bias", nn.Parameter(torch.randn(out_channels)) if bias else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ChannelLinear:
        copied = ChannelLinear(self.in_channels, self.out_channels, self.bias is not None)
        copied.weight, copied.bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        return copied.train(self.training)

    def __repr__(self) -> str:
        return f"ChannelLinear({self.in_channels}, {self.out_channels})"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight if keep_vars else self.weight.detach()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def forward(self, values: Tensor) -> Tensor:
        return F.linear(values, self.weight, self.bias)


class Turned(nn.Linear):
    """A subclass of torch's with another forward, by a square weight, whose extents do not tell which way it lies."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight + self.bias


class Network(nn.Module):
    """Every kind of custom layer: alone, called twice, before a batch norm, before something the engine evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = Conv1D(6, 5), Turned(6, 6)
        self.before_norm, self.norm = ChannelLinear(6, 8), nn.BatchNorm1d(8)
        self.inside = nn.Sequential(ChannelLinear(8, 8, bias=False), nn.LayerNorm(8), nn.GELU())
        self.head = Conv1D(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.tanh(self.twice(torch.relu(self.twice(x))))
        x = torch.relu(self.norm(self.before_norm(x)))
        out: Tensor = self.head(x + self.inside(x))
        return out


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


CUSTOM = (Conv1D, ChannelLinear, Turned)
MOMENTS = vp.Moments(torch.tensor([[0.5, -1.0, 0.0, 2.0, 0.3]]), torch.tensor([[1.0, 0.3, 2.0, 0.5, 1.0]]))


def turned(layer: Any) -> bool:
    return isinstance(layer, (Conv1D, Turned))


def stock(layer: Any) -> nn.Linear:
    """The layer of torch that does the same."""
    weight = layer.weight.mT if turned(layer) else layer.weight
    linear = nn.Linear(weight.shape[1], weight.shape[0], layer.bias is not None)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if layer.bias is not None:
            linear.bias.copy_(layer.bias)
    return linear


def pair() -> tuple[nn.Module, nn.Module]:
    """A network of custom layers in evaluation mode, and the same of torch's own."""
    network: Any = Network()
    with torch.no_grad():
        for tensor in (network.norm.weight, network.norm.running_var):
            tensor.uniform_(0.5, 2)
        for tensor in (network.norm.bias, network.norm.running_mean):
            tensor.normal_()
    twin = copy.deepcopy(network)
    for parent in (twin, twin.inside):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, CUSTOM):
                setattr(parent, name, stock(layer))
    return network.eval(), twin.eval()


def normalized(model: nn.Module, **settings: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a bias that is gained, and of time
        return vp.normalize(model, MOMENTS, example=(1, 5), **settings)


def plainly(function: Callable[..., nn.Module], *args: Any, **settings: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **settings)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def same_parameters(ours: nn.Module, theirs: nn.Module, of: Callable[[Tensor], Any] = lambda p: p.detach()) -> None:
    """The same names, and the same values but for the order of the axes of weights that are (in, out)."""
    theirs_by_name = dict(theirs.named_parameters())
    assert list(theirs_by_name) == [name for name, _ in ours.named_parameters()]
    for name, parameter in ours.named_parameters():
        is_turned = name.endswith("weight") and turned(ours.get_submodule(name.rpartition(".")[0]))
        close(of(parameter).mT if is_turned else of(parameter), of(theirs_by_name[name]))


FORMS: tuple[dict[str, Any], ...] = ({}, {"init": "preserve"}, {"form": "paper"}, {"form": "deep"})


@pytest.mark.compatibility("custom linear layers")
@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_they_are_normalized_trained_and_folded_as_those_of_torch(settings: dict[str, Any]) -> None:
    plain, plain_twin = pair()
    ours, theirs = normalized(plain, **settings), normalized(plain_twin, **settings)
    assert sum(isinstance(module, Normalized) for module in ours.modules()) == 5
    assert isinstance(ours.norm, nn.Identity)
    x = torch.randn(16, 5) + MOMENTS.mean
    close(ours(x), theirs(x))
    if settings.get("init") == "preserve":
        close(ours(x), plain(x))
    for _ in range(2):
        for model in (ours, theirs):
            model.train().zero_grad()
            model(x).square().sum().backward()
        same_parameters(ours, theirs, lambda parameter: parameter.grad)
        for model in (ours, theirs):
            torch.optim.SGD(model.parameters(), 1e-3).step()
        same_parameters(ours, theirs)
    folded, folded_twin = (plainly(vp.fold, model.eval()) for model in (ours, theirs))
    close(folded(x), ours(x))
    assert [type(m) for m in folded.modules()] == [type(m) for m in plain.modules()]
    assert folded.state_dict().keys() - plain.state_dict().keys() == {"inside.0.bias"}
    assert vars(folded.first).keys() == vars(plain.first).keys()
    same_parameters(folded, folded_twin)


@pytest.mark.parametrize("center", [True, False])
def test_they_are_initialized_as_those_of_torch(center: bool) -> None:
    ours, theirs = (plainly(vp.init_, model, MOMENTS, example=(1, 5), center=center) for model in pair())
    same_parameters(ours, theirs)


def test_they_are_called_by_themselves_and_their_rows_get_length_one() -> None:
    ours, theirs = (normalized(model) for model in pair())
    x = torch.randn(3, 2, 6)
    close(ours.twice(input=x), theirs.twice(x))
    same_parameters(plainly(vp.unit_norm_, ours), plainly(vp.unit_norm_, theirs))


def test_copies_pickles_and_states() -> None:
    model, x = normalized(pair()[0]), torch.randn(4, 5)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), model(x))
        assert [type(m) for m in copied.modules()] == [type(m) for m in model.modules()]
        assert isinstance(copied.first, Conv1D) and isinstance(copied.first, Normalized)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.1)
    resumed = normalized(Network().eval())
    resumed.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())), strict=True)
    assert torch.equal(resumed(x), model(x))
    assert "NormalizedConv1D(in_features=5, out_features=6, normalized)" in repr(model)
    assert "NormalizedChannelLinear(in_features=6, out_features=8, normalized)" in repr(model)


def test_unchanged_and_reports_by_their_names() -> None:
    model, twin = (normalized(model) for model in pair())
    x = torch.randn(4, 5)
    with vp.unchanged(model), torch.no_grad():
        assert torch.equal(model(x), model(x))
        with pytest.raises(RuntimeError, match="'first' is folded from was changed"):
            model.first.weight.add_(1.0)
            model(x)
    model = normalized(pair()[0])
    assert vp.fold_report(model).table() == vp.fold_report(twin).table()
    rows = [row["path"] for row in vp.inspect(model, MOMENTS, example=(1, 5)).to_dict()["rows"] if row["path"]]
    assert rows == ["first", "twice", "twice", "before_norm", "inside", "inside.0", "inside.1", "inside.2", "head"]


@pytest.mark.compatibility("custom linear layers")
def test_they_compile_without_a_graph_break() -> None:
    twice, act = Turned(6, 6), nn.ReLU()  # rectifiers take few operations to fold: nothing here asks for others
    plain = nn.Sequential(Conv1D(6, 5), act, twice, act, twice, act, ChannelLinear(6, 8), act, Conv1D(3, 8))
    model, x = normalized(plain), torch.randn(4, 5)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(x), model(x))
    compiled(x).square().sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        close(ours[name], parameter.grad)


class Computing(nn.Module):
    """Whatever a function makes of an input, a weight (3, 3) and a bias."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


LINEAR: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product": lambda x, w, b: x @ w + b,
    "the bias first": lambda x, w, b: b + x @ w.T,
    "in place": lambda x, w, b: x.matmul(w).add_(b),
    "transposed twice": lambda x, w, b: F.linear(x, w.t().mT, b),
    "a transposed weight": lambda x, w, b: F.linear(x, w.transpose(-2, -1), b),
    "flattened": lambda x, w, b: (torch.mm(x.reshape(-1, 3), w.permute(1, 0)) + b).unflatten(0, x.shape[:-1]),
    "added matrices": lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w).view(x.shape),
    "linear and sum": lambda x, w, b: F.linear(x, w) + b,
}
OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "activated": lambda x, w, b: torch.relu(x @ w + b),
    "clamped weight": lambda x, w, b: F.linear(x, w.clamp(-1, 1), b),
    "detached weight": lambda x, w, b: F.linear(x, w.detach(), b),
    "bias twice": lambda x, w, b: x @ w + b + b,
    "bias subtracted": lambda x, w, b: x @ w - b,
    "scaled bias": lambda x, w, b: torch.add(x @ w, b, alpha=2),
    "scaled product": lambda x, w, b: torch.addmm(b, x.view(-1, 3), w, alpha=0.5).view(x.shape),
    "one bias for all": lambda x, w, b: F.linear(x, w) + b[:1],
    "no bias": lambda x, w, b: x @ w,
    "skip": lambda x, w, b: x + F.linear(x, w, b),
    "weight first": lambda x, w, b: (w @ x.mT).mT + b,
    "tokens moved": lambda x, w, b: F.linear(x.mT.reshape(x.shape), w, b),
    "rows regrouped": lambda x, w, b: F.linear(x, w, b).view(x.shape[1], x.shape[0], 3).transpose(0, 1),
    "half": lambda x, w, b: F.linear(x.float(), w.float(), b.float()).double(),
    "two products": lambda x, w, b: x @ w @ w + b,
    "a product with itself": lambda x, w, b: x @ w + x @ w + b,
}
EXAMPLE = (2, 4, 3)
UNIT = vp.Moments(torch.zeros(1, 1, 3), torch.ones(1, 1, 3))


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_map_is_known_however_it_is_written(name: str) -> None:
    plain = nn.Sequential(Computing(LINEAR[name]), nn.Tanh(), nn.Linear(3, 2))
    model = plainly(vp.normalize, plain, UNIT, example=EXAMPLE, init="preserve")
    assert isinstance(model[0], Normalized)
    x = torch.randn(EXAMPLE)
    close(model(x), plain(x))
    close(vp.fold(model)(x), plain(x))


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_else_is_computed_stays_as_it_is(name: str) -> None:
    plain = nn.Sequential(Computing(OTHERS[name]), nn.Tanh(), nn.Linear(3, 2))
    with (
        pytest.warns(vp.PlainWarning, match=r"These layers stay as they are: '0' \(Computing\)"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The statistics of 1")  # of time
        model = vp.normalize(plain, UNIT, example=EXAMPLE, init="preserve")
    assert type(model[0]) is Computing
    x = torch.randn(EXAMPLE)
    close(model(x), plain(x))
    with pytest.raises(ValueError, match="`only` names '0', where the model has no linear layer"):
        vp.normalize(plain, UNIT, example=EXAMPLE, only="0")


class NoBias(nn.Module):
    """x W, with or without a place for a bias, which is not added."""

    def __init__(self, place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))
        if place:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Switched(ChannelLinear):
    """Linear in evaluation mode, noisy in training."""

    def forward(self, values: Tensor) -> Tensor:
        weight = F.dropout(self.weight, 0.5, self.training)
        return F.linear(values, weight, self.bias)


class OfTwo(ChannelLinear):
    """Takes a second argument, whatever for."""

    def forward(self, values: Tensor, more: Any = None) -> Tensor:
        return F.linear(values, self.weight, self.bias)


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    return layer


def borrowing() -> nn.Module:
    """A layer that multiplies by another module's weight, and has one of the same extents."""
    lender, layer = nn.Embedding(2, 3), ChannelLinear(3, 2)
    layer.forward = lambda values: F.linear(values, lender.weight, layer.bias)  # type: ignore[method-assign]
    return layer


STAYING: dict[str, Callable[[], nn.Module]] = {
    "no place for a bias": lambda: NoBias(False),
    "a bias that would not be added": lambda: NoBias(True),
    "another function in training": lambda: Switched(3, 2),
    "a second argument": lambda: OfTwo(3, 2),
    "a hook that changes the input": lambda: hooked(ChannelLinear(3, 2)),
    "a forward of the instance": borrowing,
}


@pytest.mark.parametrize("name", STAYING)
def test_a_layer_that_could_not_be_folded_or_does_more_is_refused(name: str) -> None:
    why = "to multiply its one argument by its own `weight`, to add its own `bias` and to do nothing else, unlike '0'"
    with pytest.raises(ValueError, match=why):
        vp.normalize(nn.Sequential(STAYING[name](), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 3))


def test_a_scripted_module_is_none() -> None:
    plain = nn.Linear(3, 3)
    plain.held = torch.jit.script(Turned(3, 3))
    model = plainly(vp.normalize, plain, vp.Moments(0.0, 1.0), example=(1, 3))
    assert isinstance(model, Normalized) and isinstance(model.held, torch.jit.ScriptModule)


@pytest.mark.compatibility("torch.jit")
def test_a_scripted_module_is_refused_where_it_is_called_and_a_traced_one_stays() -> None:
    torch.manual_seed(0)
    inner, x = nn.Sequential(nn.Linear(5, 5), nn.Tanh()), torch.randn(4, 3)
    plain = nn.Sequential(nn.Linear(3, 5), torch.jit.script(inner), nn.Linear(5, 2))
    with pytest.raises(vp.CaptureError, match="'1' is a scripted module"):
        vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, 3))
    plain[1] = torch.jit.trace(inner, torch.randn(4, 5))
    model = plainly(vp.normalize, plain, vp.Moments(0.0, 1.0), example=(1, 3), init="preserve")
    close(model(x), plain(x))
    assert [isinstance(layer, Normalized) for layer in model] == [True, False, True]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    close(plainly(vp.fold, model)(x), model(x))


def test_a_weight_that_is_parametrized_later() -> None:
    model, x = normalized(pair()[0]), torch.randn(4, 5)
    nn.utils.parametrizations.weight_norm(model.first)
    with torch.no_grad():
        model.first.parametrizations.weight.original1.mul_(2).add_(0.1)
    folded = plainly(vp.fold, model)
    assert type(folded.first) is Conv1D
    close(folded(x), model(x))


class Tied(nn.Module):
    """Two layers of which the second multiplies by the first's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = ChannelLinear(3, 3), ChannelLinear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


def test_a_tied_weight_is_the_layers_own() -> None:
    plain, x = Tied(), torch.randn(4, 3)
    model = plainly(vp.normalize, plain, vp.Moments(0.0, 1.0), example=(1, 3), init="preserve")
    assert isinstance(model.first, Normalized) and isinstance(model.second, Normalized)
    close(model(x), plain(x))
    close(plainly(vp.fold, model)(x), plain(x))


def test_the_projections_of_attention_are_no_layers() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x)[0]
            return out

    with pytest.raises(
        ValueError, match=r"MultiheadAttention \('attention'\) are arguments of one function, not layers"
    ):
        vp.normalize(Attending(), vp.Moments(0.0, 1.0), example=(3, 1, 4))
