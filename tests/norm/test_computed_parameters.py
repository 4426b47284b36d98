"""Layers and batch norms whose weights or biases are no parameters of theirs stay as they are, with a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import varprop as vp


class Model(nn.Module):
    """Two layers, a batch norm between them, and parameters to compute others from."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.matrix, self.vector = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(8))
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.lin(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x)))


class WrittenWeight(Model):
    """Its code sets the weight anew in every call, as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        del self.lin.weight

    def hidden(self, x: Tensor) -> Tensor:
        self.lin.weight = torch.tanh(self.matrix)  # type: ignore[assignment]
        return super().hidden(x)


class FromData(Model):
    """A hypernetwork."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper = nn.Linear(6, 48)
        del self.lin.weight

    def hidden(self, x: Tensor) -> Tensor:
        self.lin.weight = self.hyper(x).mean(0).view(8, 6)  # type: ignore[assignment]
        return super().hidden(x)


class WrittenBias(Model):
    def __init__(self) -> None:
        super().__init__()
        del self.lin.bias

    def hidden(self, x: Tensor) -> Tensor:
        self.lin.bias = torch.tanh(self.vector)  # type: ignore[assignment]
        return super().hidden(x)


class OfProperty(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 8)
        self.core = self._parameters.pop("weight")

    weight = property(lambda self: self.core.tanh() if "core" in self._parameters else self.__getattr__("weight"))  # type: ignore[assignment]


class WithProperty(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lin = OfProperty()


class WithBuffer(Model):
    def __init__(self) -> None:
        super().__init__()
        del self.lin.weight
        self.lin.register_buffer("weight", torch.randn(8, 6))


class Shifted(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.tanh() + 0.5


class ParametrizedBias(Model):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.lin, "bias", Shifted())


class OtherWeight(Model):
    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(functional_call(self.lin, {"weight": self.matrix.tanh()}, (x,)))


class ScaledWeight(Model):
    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(functional_call(self.lin, {"weight": self.vector[:, None] * self.lin.weight}, (x,)))


class OtherBias(Model):
    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(functional_call(self.lin, {"bias": self.vector.tanh()}, (x,)))


class OtherOriginal(Model):
    """One that is given what a parametrization starts from."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.lin)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(functional_call(self.lin, {"parametrizations.weight.original1": self.matrix}, (x,)))


class Recurrent(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.LSTM(6, 8, batch_first=True)  # type: ignore[assignment]
        self.matrix = nn.Parameter(torch.randn(32, 6))

    def hidden(self, x: Tensor) -> Tensor:
        states, _ = functional_call(self.lin, {"weight_ih_l0": self.matrix.tanh()}, (x[:, None],))
        return self.norm(states[:, 0])


class WrittenNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        del self.norm.weight

    def hidden(self, x: Tensor) -> Tensor:
        self.norm.weight = self.vector.exp()  # type: ignore[assignment]
        return super().hidden(x)


class OtherNorm(Model):
    def hidden(self, x: Tensor) -> Tensor:
        return functional_call(self.norm, {"weight": self.vector.exp()}, (self.lin(x),))


class ParametrizedNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.norm, "weight", Shifted())


LAYERS: tuple[type[Model], ...] = (
    WrittenWeight,
    FromData,
    WrittenBias,
    WithProperty,
    WithBuffer,
    ParametrizedBias,
    OtherWeight,
    ScaledWeight,
    OtherBias,
    OtherOriginal,
    Recurrent,
)
NORMS: tuple[type[Model], ...] = (WrittenNorm, OtherNorm, ParametrizedNorm)


def made(kind: type[Model]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return kind().double().eval(), torch.randn(64, 6).double()


@torch.no_grad()
def require_same(found: nn.Module, expected: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(found.eval()(x), expected(x), rtol=1e-9, atol=1e-9)


@pytest.mark.compatibility("computed weights")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.filterwarnings("ignore:The statistics of", "ignore:Batch norms that do not")
def test_a_layer_with_computed_parameters_stays_plain(kind: type[Model]) -> None:
    plain, x = made(kind)
    moments = vp.Moments(torch.zeros(1, 6).double(), torch.ones(1, 6).double())
    with pytest.warns(vp.PlainWarning, match=r"that are no parameters of theirs .* so they stay as they are: 'lin'\."):
        model = vp.normalize(plain, moments, init="preserve")
    assert type(model.get_submodule("lin")) is type(plain.get_submodule("lin"))
    assert type(model.get_submodule("out")).__name__ == "NormalizedLinear"
    require_same(model, plain, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    require_same(vp.fold(model), model, x)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.filterwarnings("ignore:The statistics of")
def test_a_batch_norm_with_computed_parameters_stays(kind: type[Model]) -> None:
    plain, x = made(kind)
    with pytest.warns(vp.PlainWarning, match=r"Batch norms that .*'norm'"):
        model = vp.normalize(plain, vp.input_moments(x), init="preserve")
    require_same(model, plain, x)
    require_same(vp.fold(model), plain, x)
    with pytest.warns(UserWarning, match="Batch norm 'norm' has no parameters of its own to undo other statistics"):
        require_same(vp.reparametrize(plain, "batch", batch=x), plain, x)


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind not in (OtherOriginal, Recurrent)])
def test_other_forms_leave_such_a_layer_alone(kind: type[Model]) -> None:
    plain, x = made(kind)
    forms: list[Callable[[], nn.Module]] = [
        lambda: vp.reparametrize(plain, "standard", example=x),
        lambda: vp.reparametrize(plain, "weight", example=x),
    ]
    for form in forms:
        require_same(form(), plain, x)
    if kind is FromData:
        return  # a batch norm behind the hypernetwork would see the whole batch's weight as one sample
    with pytest.warns(UserWarning, match=r"compute with weights .* and get no batch norm: 'lin'\."):
        require_same(vp.reparametrize(plain, "batch", batch=x), plain, x)
    with pytest.warns(UserWarning, match=r"compute with weights .* and get no batch norm: 'lin'\."):
        assert torch.isfinite(vp.batch_norm_start(plain, x)(x)).all()


def test_only_such_layers_are_refused() -> None:
    model = nn.Sequential(OfProperty())
    with pytest.raises(ValueError, match=r"no parameters of the layers that compute with them \('0'\)\.$"):
        vp.normalize(model, vp.Moments(0.0, 1.0), example=(1, 6))


def test_what_an_earlier_call_has_left_is_named() -> None:
    model, x = made(WrittenWeight)
    model(x)
    for copied in (
        lambda: vp.normalize(model, vp.input_moments(x)),
        lambda: vp.reparametrize(model, "standard", example=x),
    ):
        with pytest.raises(ValueError, match=r"Attribute 'weight' of 'lin' is a tensor with derivatives .*no_grad"):
            copied()
    with torch.no_grad():
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vp.normalize(model, vp.input_moments(x))
