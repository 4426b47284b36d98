"""A clear word when it cannot work, and the model is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import varprop as vp
from tests.norm.networks import Case, case, kept


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    state, modules = copy.deepcopy(model.state_dict()), list(model.named_modules())
    classes, modes = [type(m) for _, m in modules], [m.training for _, m in modules]
    flags = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    yield
    assert [(name, id(m)) for name, m in model.named_modules()] == [(name, id(m)) for name, m in modules]
    assert [type(m) for m in model.modules()] == classes
    assert [m.training for m in model.modules()] == modes
    assert [(name, id(p), p.requires_grad) for name, p in model.named_parameters()] == flags
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(state[key].nan_to_num(7), after[key].nan_to_num(7)) for key in state)


def zero_row(given: Case) -> None:
    given.model[3].weight.data[2] = 0


def equal_row(given: Case) -> None:
    given.model[3].weight.data[2] = 0.1


def not_a_number(given: Case) -> None:
    given.model[3].weight.data[1, 0, 0, 0] = float("nan")


def infinite(given: Case) -> None:
    given.model[8].weight.data[1, 0] = float("inf")


def no_variance(given: Case) -> None:
    given.moments = vp.Moments(given.moments.mean, 0 * given.moments.var)


def wrong_rank(given: Case) -> None:
    given.moments = vp.Moments(given.moments.mean.flatten(), given.moments.var.flatten())


def wrong_channels(given: Case) -> None:
    given.moments = vp.Moments(torch.zeros(1, 4, 1, 1).double(), torch.ones(1, 4, 1, 1).double())


def no_layer(given: Case) -> None:
    given.model = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)).double()


BAD: dict[str, tuple[Callable[[Case], None], str]] = {
    "zero row": (zero_row, r"Output 2 of '3' has only zero weights"),
    "equal row": (equal_row, r"Output 2 of '3' has only equal weights"),
    "nan": (not_a_number, r"weight of '3'.*not finite"),
    "infinity": (infinite, r"weight of '8'.*not finite"),
    "no variance": (no_variance, r"variance is zero everywhere"),
    "wrong rank": (wrong_rank, r"Input 0 has moments of shape"),
    "wrong channels": (wrong_channels, r"Input 0 has moments of shape"),
    "no layer": (no_layer, r"no linear layer"),
}


def check_harmless(name: str, inplace: bool) -> None:
    spoil, message = BAD[name]
    given = case("own batch norm")
    spoil(given)
    given.model.train()
    form = "deep" if "equal" in name else "paper"
    with untouched(given.model), pytest.raises((ValueError, vp.VarpropError), match=message):
        given.normalized(inplace=inplace, form=form)


@pytest.mark.parametrize("name", BAD)
def test_bad_use_is_said_and_harmless_in_place(name: str) -> None:
    check_harmless(name, inplace=True)


@pytest.mark.parametrize("name", ("zero row", pytest.param("nan", marks=pytest.mark.slow), "no layer"))
def test_bad_use_is_said_and_harmless_on_a_copy(name: str) -> None:
    check_harmless(name, inplace=False)


def test_a_failed_initialization_changes_nothing() -> None:
    given = case("own batch norm")
    zero_row(given)
    with untouched(given.model), pytest.raises(ValueError, match="Output 2 of '3'"):
        vp.init_(given.model, given.moments, example=given.inputs)


@pytest.mark.parametrize("inplace", (False, True), ids=("copy", "inplace"))
def test_normalizing_twice(inplace: bool) -> None:
    given, normalized = kept("mlp")
    with untouched(normalized), pytest.raises(ValueError, match="normalized already"):
        vp.normalize(normalized, given.moments, example=given.inputs, inplace=inplace)


@pytest.mark.parametrize("inplace", (False, True), ids=("copy", "inplace"))
def test_folding_a_plain_model(inplace: bool) -> None:
    model = case("mlp").model
    with untouched(model), pytest.raises(ValueError, match="nothing to fold"):
        vp.fold(model, inplace=inplace)


def test_an_unknown_path_or_start() -> None:
    given = case("mlp")
    with untouched(given.model):
        with pytest.raises(ValueError, match="init must be"):
            given.normalized(init="keep")
        with pytest.raises(ValueError, match="form must be"):
            given.normalized(form="shallow")
        with pytest.raises(ValueError, match="means of weights away"):
            given.normalized(form="deep", init="preserve")
        with pytest.raises(ValueError, match="nowhere"):
            given.normalized(only="nowhere", inplace=True)


class WithSpectrum(nn.Module):
    """The layer `second` reads the result of an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.fft.fft(self.first(x)).abs())


def test_the_way_around_a_missing_rule_is_one_that_there_is() -> None:
    given = vp.Moments(torch.zeros(1, 4), 1.0)
    with pytest.raises(vp.MissingRule, match="leave out the layers behind them with `only`") as caught:
        vp.normalize(WithSpectrum(), given)
    assert "on_missing" not in str(caught.value)
    vp.normalize(WithSpectrum(), given, only="first")


class TransposedLinear(nn.Module):
    """A linear layer that is none of torch's and has no place for the bias that `fold` would give it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class WithEmptyBranch(nn.Module):
    """One of its two branches has no channels."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.empty, self.head = nn.Linear(3, 4), nn.Linear(3, 0), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.full(x), self.empty(x)], 1))


UNIT = vp.Moments(torch.zeros(1, 3), torch.ones(1, 3))


def test_a_model_of_other_layers_is_told_which_they_are() -> None:
    with pytest.raises(ValueError, match=r"add its own `bias` and to do nothing else, unlike '0' \(TransposedLinear\)"):
        vp.normalize(nn.Sequential(TransposedLinear()), UNIT)


def test_layers_without_weights() -> None:
    with pytest.raises(ValueError, match=r"weight of '0' has no entries, for its shape is \(0, 3\)"):
        vp.normalize(nn.Sequential(nn.Linear(3, 0), nn.ReLU(), nn.Linear(0, 2)), UNIT)
    with pytest.raises(ValueError, match=r"weight of 'empty' has no entries.*leave the layer out with `only`"):
        vp.normalize(WithEmptyBranch(), UNIT)
    model = vp.normalize(WithEmptyBranch(), UNIT, only=["full", "head"])
    x = torch.randn(5, 3)
    torch.testing.assert_close(vp.fold(model)(x), model(x))


class ReadsItsNorm(nn.Module):
    """Multiplies by the factors of its batch norm once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))) * self.norm.weight)


def test_a_batch_norm_that_something_else_reads_stays() -> None:
    with pytest.warns(vp.PlainWarning, match=r"whose parameters something else reads, stay.*'norm'"):
        model = vp.normalize(ReadsItsNorm().eval(), UNIT)
    x = torch.randn(5, 3)
    assert type(model.norm) is nn.BatchNorm1d
    torch.testing.assert_close(vp.fold(model)(x), model(x))


@pytest.mark.filterwarnings("ignore")
def test_a_part_is_folded_in_a_copy_alone() -> None:
    model = vp.normalize(nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.ReLU()), nn.Linear(5, 2)), UNIT)
    x = torch.randn(4, 3)
    with untouched(model), pytest.raises(ValueError, match=r"part of a normalized model, whose layers '1' are"):
        vp.fold(model[0], inplace=True)
    torch.testing.assert_close(vp.fold(model[0])(x), model[0](x))
    expected = model(x)
    wrapped = nn.ModuleDict({"model": model})
    torch.testing.assert_close(vp.fold(wrapped, inplace=True)["model"](x), expected)


def test_frozen_weights_with_trained_biases() -> None:
    """The shifts train in the place of the biases; where nothing is left that does, it is said."""
    plain = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    model = vp.normalize(plain, UNIT)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"0.shift", "2.shift"}
    model(torch.randn(4, 3)).square().sum().backward()
    assert all(bool(layer.shift.grad.any()) for layer in (model[0], model[2]))
    recurrent = Recurrent()
    for name, parameter in recurrent.named_parameters():
        parameter.requires_grad_("bias" in name)
    with pytest.warns(vp.PlainWarning, match=r"Nothing trains in the normalized model.*'cells.bias_ih_l0'"):
        vp.normalize(recurrent, vp.Moments(torch.zeros(1, 1, 3), torch.ones(1, 1, 3)), example=(2, 4, 3))


class Recurrent(nn.Module):
    """A recurrent layer, of which the outputs count."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.cells(x)[0]
        return outputs
