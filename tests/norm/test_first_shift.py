"""Layers before activations start with a shift that damps errors of scale, and deep chains stay in range."""

import copy

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from tests.gaussian.test_stability import activation as kernel
from varprop.gaussian.stability import stable_shift
from varprop.norm import initialization
from varprop.norm.api import captured_for, normalized_

RELU, SILU = 0.3767, stable_shift(kernel("silu"))


def shifts(model, given, example=None):
    made = normalized_(model, captured_for(model, given, example), "project", shift="first")
    return {path: layer.shift for path, layer in made.named_modules() if hasattr(layer, "shift")}


class Block(nn.Module):
    """A residual block, with a convolution on its shortcut or without."""

    def __init__(self, channels, shortcut):
        super().__init__()
        self.first, self.last = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.shortcut = nn.Conv2d(channels, channels, 1) if shortcut else nn.Identity()

    def forward(self, x):
        return torch.relu(self.last(torch.relu(self.first(x))) + self.shortcut(x))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value, self.out = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        gate = self.gate(x)
        return self.out(gate * torch.sigmoid(gate) * self.value(x))


def test_in_a_residual_network_stem_first_layers_and_shortcuts_have_it():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), Block(4, False), Block(4, True), nn.Flatten(), nn.Linear(144, 2)
    )
    found = shifts(model, vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1)), (1, 3, 8, 8))
    having = {path for path, shift in found.items() if shift.any()}
    assert having == {"0", "2.first", "3.first", "3.shortcut"}
    assert all(shift == pytest.approx(RELU, abs=1e-4) for path in having for shift in found[path].tolist())


def test_an_activation_written_out_is_recognized_and_moves_are_seen_through():
    model = nn.Sequential(Gate(), nn.Unflatten(1, (2, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(6, 1), nn.Softplus())
    found = shifts(model, vp.Moments(torch.zeros(1, 6), torch.ones(1, 6)))
    expected = {"0.gate": SILU, "0.value": 0.0, "0.out": RELU, "4": 0.0}
    assert {path: float(shift.detach().mean()) for path, shift in found.items()} == pytest.approx(expected, abs=1e-4)


def test_a_mirrored_rectifier_has_a_negative_shift():
    model = nn.Sequential(nn.Linear(3, 4), nn.LogSigmoid(), nn.Linear(4, 2))
    found = shifts(model, vp.Moments(torch.zeros(1, 3), torch.ones(1, 3)))
    assert found["0"].tolist() == pytest.approx(4 * [-stable_shift(kernel("softplus", 1.0))], abs=1e-4)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(3, 4, batch_first=True, nonlinearity="relu"), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.rnn(x)[0]))


def test_recurrent_layers_keep_theirs():
    given = vp.Moments(torch.zeros(1, 1, 3), torch.ones(1, 1, 3))
    captured = captured_for(model := Recurrent(), given, (1, 5, 3))
    paper, deep = (normalized_(copy.deepcopy(model), captured, "project", shift=shift) for shift in (False, True))
    assert all(torch.equal(deep.state_dict()[name], value) for name, value in paper.rnn.named_parameters("rnn"))


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_deep_chains_stay_in_range(activation):
    torch.manual_seed(0)
    layers = [part for _ in range(60) for part in (nn.Linear(64, 64), activation())]
    model = nn.Sequential(*layers[:-1])
    vp.init_(model, vp.Moments(torch.zeros(1, 64), torch.ones(1, 64)), shift="first", orthogonal=False)
    x = torch.randn(512, 64)
    for layer in model.requires_grad_(False):
        x = layer(x)
        if isinstance(layer, nn.Linear):
            assert 0.8 < float(x.std(0).square().mean().sqrt()) < 1.25


@pytest.mark.parametrize(
    ("depth", "activation", "deep"), [(9, nn.ReLU, True), (8, nn.ReLU, False), (9, nn.Tanh, False), (9, nn.GELU, True)]
)
def test_the_form_is_chosen_by_depth_and_activation(depth: int, activation: type[nn.Module], deep: bool) -> None:
    layers = [module for _ in range(depth) for module in (nn.Linear(6, 6), activation())]
    model = vp.normalize(nn.Sequential(*layers), vp.Moments(0.0, 1.0), example=(1, 6))
    assert all(layer.centred == deep for layer in vp.fold_report(model).layers)
    assert bool(model[0].shift.detach().any()) == deep  # type: ignore[union-attr, operator]


class Equilibrium(nn.Module):
    """One layer applied again and again, from zeros of the data's form."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state, entering = torch.zeros_like(x), self.enter(x)
        for _ in range(3):
            state = torch.tanh(self.again(state) + entering)
        return state


def test_an_activation_that_reads_zeros_of_the_form_of_the_data() -> None:
    """It ended in a KeyError: where an activation acts on constants, their form may be that of the data."""
    torch.manual_seed(0)
    model, x = Equilibrium(), torch.randn(4, 8)
    model = vp.init_(model, vp.Moments(torch.zeros(1, 8), 1.0))
    before = model(x)
    assert before.std() > 0.3
    normalized = vp.normalize(model, vp.Moments(torch.zeros(1, 8), 1.0), form="deep")
    torch.testing.assert_close(vp.fold(normalized)(x), normalized(x))


class Positions(nn.Module):
    """Adds a constant to every token of a patch embedding, as vision transformers do."""

    def __init__(self):
        super().__init__()
        self.constant = nn.Parameter(torch.randn(1, 16, 4))

    def forward(self, x):
        return 2 * x.flatten(2).transpose(1, 2) + self.constant


def test_no_shift_is_searched_before_a_line(monkeypatch):
    """With a constant for every token, a search over shifts would take 60 s and 3 GiB in a small vision transformer."""
    searched = []
    monkeypatch.setattr(initialization, "stable_shift", lambda moments: searched.append(moments) or RELU)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2, 2), Positions(), nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)
    )
    found = shifts(model, vp.Moments(torch.zeros(1, 3, 1, 1), 1.0), (1, 3, 8, 8))
    assert {path: bool(shift.any()) for path, shift in found.items()} == {"0": False, "3": True, "5": False}
    assert len(searched) == 1
