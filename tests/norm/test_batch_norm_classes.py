"""Batch norms of classes of their own: what their forward does beside the batch norm stays in the model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from tests.norm.networks import sites

pytestmark = pytest.mark.filterwarnings("ignore::varprop.PlainWarning")


class Unchanged(nn.BatchNorm2d):
    """Torch's forward under another name."""


class Calling(nn.BatchNorm2d):
    """A forward of its own that does nothing else."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


class NormDropAct(nn.BatchNorm2d):
    """As timm writes it: torch's function, dropout and activation as modules inside."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.drop, self.act = nn.Dropout(0.4), nn.PReLU(features)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        mean = self.running_mean if not self.training or self.track_running_stats else None
        var = self.running_var if not self.training or self.track_running_stats else None
        x = F.batch_norm(x, mean, var, self.weight, self.bias, by_batch, self.momentum or 0.0, self.eps)
        return self.act(self.drop(x))


class InItsOwnDtype(nn.BatchNorm2d):
    """Computes where and in the dtype in which its parameters are, as detectron2 does."""

    def forward(self, input: Tensor) -> Tensor:
        inside = input.to(self.weight.device, self.running_var.dtype)
        return torch.relu(super().forward(inside)).to(input.dtype) * self.weight.shape[0]


class DropsByItself(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(F.dropout(super().forward(input), 0.4, self.training))


class Scaled(nn.BatchNorm2d):
    """A parameter of its own, after the batch norm."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.gain = nn.Parameter(torch.full((1,), -0.7))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.gain


class Frozen(nn.BatchNorm2d):
    """By its stored statistics in both modes, nothing of it trains."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        for name in ("weight", "bias"):
            value = self._parameters.pop(name).detach()
            self.register_buffer(name, value)

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Squashed(nn.BatchNorm2d):
    """Something before the batch norm."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(torch.tanh(input))


class OnePlus(nn.BatchNorm2d):
    """A scale that is not the parameter."""

    def forward(self, input: Tensor) -> Tensor:
        weight = 1 + self.weight
        return F.batch_norm(input, self.running_mean, self.running_var, weight, self.bias, self.training, 0.1, self.eps)


class ReadTwice(nn.BatchNorm2d):
    """A parameter that is read once more."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.bias[:, None, None]


class FrozenAffine(nn.Module):
    """As torchvision writes it: arithmetic with buffers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((features,), value))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, var = (buffer[:, None, None] for buffer in self.buffers())
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


ABSORBED = (Unchanged, Calling, Activated, NormDropAct, DropsByItself, Scaled, Frozen, InItsOwnDtype)
STAYING = (Squashed, OnePlus, ReadTwice, FrozenAffine)
MOMENTS = vp.Moments(torch.full((1, 3, 1, 1), 0.3).double(), torch.ones(1, 3, 1, 1).double())
EXAMPLE = (2, 3, 8, 8)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def network(kind: Callable[[int], nn.Module]) -> nn.Module:
    """Two of a kind, with statistics as data might leave them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False), kind(6), nn.Conv2d(6, 5, 3), kind(5), nn.Conv2d(5, 4, 3)
    ).double()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            tensor.add_(torch.rand_like(tensor) if "var" in name else 0.3 * torch.randn_like(tensor))
    return model.eval()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", (*ABSORBED, *STAYING), ids=lambda kind: kind.__name__)
def test_every_form_computes_the_same(kind: Any) -> None:
    model, x = network(kind), numbers(*EXAMPLE)
    expected, state = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    preserved = vp.normalize(model, MOMENTS, example=EXAMPLE, init="preserve")
    assert close(preserved(x), expected)
    folded = vp.fold(preserved)
    assert close(folded(x), expected) and [type(m) for m in folded] == [type(m) for m in model]
    assert {*model.state_dict()} - {*folded.state_dict()} == set()
    for keep in (True, False):
        assert close(vp.fold(preserved, keep_batchnorm=keep)(x), expected)
    for to in ("standard", "weight", "batch", "analytic"):
        given: Any = {"moments": MOMENTS} if to == "analytic" else {"batch": x} if to == "batch" else {}
        form = vp.reparametrize(model, to, example=x, **given)
        assert close(form(x), expected), to
        back: Any = {"batch": {"batch": x}, "standard": {"example": x}}
        for other in back.keys() - {to} if kind in (Unchanged, Frozen, FrozenAffine) or to == "analytic" else ():
            assert close(vp.reparametrize(form, other, **back[other])(x), expected), to
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ABSORBED, ids=lambda kind: kind.__name__)
def test_what_a_layer_can_do_is_absorbed(kind: Any) -> None:
    model, x = vp.normalize(network(kind), MOMENTS, example=EXAMPLE).train(), numbers(*EXAMPLE)
    assert not [name for name in model.state_dict() if "running" in name or name == "1.weight"]
    torch.manual_seed(1)
    alone = model(x[:1])
    torch.manual_seed(1)
    assert close(alone, model(torch.cat([x[:1], 5 + x[1:]]))[:1]) or kind in (NormDropAct, DropsByItself)
    assert isinstance(model[1], nn.Identity) == (kind is Unchanged)


@pytest.mark.parametrize("kind", (Squashed, OnePlus, ReadTwice), ids=lambda kind: kind.__name__)
def test_what_no_layer_can_do_stays_with_a_word(kind: Any) -> None:
    with pytest.warns(vp.PlainWarning, match="'1', '3'"):
        vp.normalize(network(kind), MOMENTS, example=EXAMPLE)


@pytest.mark.parametrize("kind", (NormDropAct, DropsByItself), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("training", (False, True))
def test_statistics_are_those_of_separate_modules(kind: Any, training: bool) -> None:
    model = network(kind)
    acts = [m.act if kind is NormDropAct else nn.ReLU() for m in (model[1], model[3])]
    norms = [nn.BatchNorm2d(m.num_features).double() for m in (model[1], model[3])]
    for norm, own in zip(norms, (model[1], model[3]), strict=True):
        norm.load_state_dict({name: own.state_dict()[name] for name in norm.state_dict()})
    parts = [nn.Sequential(norm, nn.Dropout(0.4), act) for norm, act in zip(norms, acts, strict=True)]
    separate = nn.Sequential(model[0], parts[0], model[2], parts[1], model[4])
    found = [vp.normalize(m, MOMENTS, example=EXAMPLE).train(training) for m in (model, separate)]
    for ours, theirs in zip(*(sites(m).values() for m in found), strict=True):
        for a, b in zip(ours.folded(), theirs.folded(), strict=True):
            assert close(a, b)


@pytest.mark.parametrize("kind", (NormDropAct, Scaled, InItsOwnDtype), ids=lambda kind: kind.__name__)
def test_without_its_batch_norm_a_module_is_an_ordinary_one(kind: Any) -> None:
    model, x = vp.normalize(network(kind), MOMENTS, example=EXAMPLE).eval(), numbers(*EXAMPLE)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert close(other(x), model(x)) and close(vp.fold(other)(x), model(x))
    assert vp.fold(model.float())(x.float()).dtype is torch.float32


def test_a_module_without_its_batch_norm_compiles_and_exports() -> None:
    model, x = vp.normalize(network(NormDropAct), MOMENTS, example=EXAMPLE).eval(), numbers(*EXAMPLE)
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    assert close(compiled(x), model(x))
    exported = torch.export.export(model, (x,), strict=False)
    assert close(exported.module()(x), model(x))


def test_a_layer_that_computes_its_weight_keeps_its_batch_norm() -> None:
    class Standardized(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return self._conv_forward(input, weight / weight.std((1, 2, 3), keepdim=True), self.bias)

    torch.manual_seed(0)
    model, x = nn.Sequential(Standardized(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double(), numbers(*EXAMPLE)
    model(x), model.eval()
    assert close(vp.reparametrize(model, "standard", example=x)(x), model(x))


def test_an_initialized_model_has_its_batch_norms_back() -> None:
    model, x = network(NormDropAct).train(), numbers(*EXAMPLE)
    keys = list(model.state_dict())
    vp.init_(model, MOMENTS, example=EXAMPLE)
    assert list(model.state_dict()) == keys
    assert torch.isfinite(model(x)).all()


def test_weights_under_a_class_of_its_own_are_spared_by_what_the_graph_says() -> None:
    model = network(Activated)
    with pytest.warns(UserWarning, match="without `example`"):
        decaying = vp.param_groups(model, 0.1)[0]["params"]
    assert model[0].weight in set(decaying)
    assert model[0].weight not in set(vp.param_groups(model, 0.1, example=numbers(*EXAMPLE))[0]["params"])
    squashed = network(Squashed)
    assert squashed[2].weight in set(vp.param_groups(squashed, 0.1, example=numbers(*EXAMPLE))[0]["params"])
