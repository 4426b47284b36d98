"""Copies of normalized models and of their modules: what was replaced, what is missing, what checkpoints say."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import varprop as vp

pytestmark = pytest.mark.filterwarnings("ignore::varprop.PlainWarning")


def moments(*shape: int, mean: float = 0.3, var: float = 1.0) -> vp.Moments:
    return vp.Moments(torch.full((1, *shape), mean).double(), torch.full((1, *shape), var).double())


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def encoder_and_head(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
    head = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    return vp.normalize(nn.Sequential(encoder, head).double(), moments(4), example=numbers(2, 4), **settings)


class Recurrent(nn.Module):
    """Nothing of it is folded together with others."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.layer = nn.Tanh(), nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.act(x))[0]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.head = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.layer(self.act(self.layer(x)))))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "a copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
    "share_memory": lambda model: model.share_memory(),
    "averaged": lambda model: AveragedModel(model).module,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("init", ("project", "preserve"))
def test_a_module_replaced_before_the_first_call_is_refused(how: str, init: str) -> None:
    for place in (1, 3):
        model = COPIES[how](encoder_and_head(init=init))
        model[0][place] = nn.Tanh()
        for use in (model, vp.fold):
            with pytest.raises(ValueError, match=f"Module '{place}' was replaced after"):
                use(model if use is vp.fold else numbers(3, 4))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", (Recurrent, Twice))
def test_it_is_refused_by_layers_that_are_folded_by_themselves(how: str, kind: Any) -> None:
    x = numbers(2, 3, 4) if kind is Recurrent else numbers(2, 4)
    shape = (1, 4) if kind is Recurrent else (4,)
    model = COPIES[how](vp.normalize(kind().double(), moments(*shape), example=x))
    model.act = nn.Sigmoid()
    with pytest.raises(ValueError, match="Module 'act' was replaced after"):
        model(x)


class Shuffled(nn.Module):
    """Joins axes of a transposed tensor, which the graph writes as a copy in a memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).view(-1, 2, 3).transpose(1, 2).flatten(1).relu())


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_knows_the_memory_formats_of_its_graph(how: str) -> None:
    model = vp.normalize(Shuffled().double(), moments(4), example=numbers(2, 4))
    assert torch.equal(COPIES[how](model)(numbers(3, 4)), model(numbers(3, 4)))


@pytest.mark.parametrize("how", COPIES)
def test_what_comes_behind_the_last_layer_may_be_replaced(how: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2), nn.Identity()).double()
    model = COPIES[how](vp.normalize(plain, moments(4), example=numbers(2, 4)))
    model[3] = nn.Tanh()
    assert torch.allclose(model(numbers(3, 4)), vp.fold(model.eval())(numbers(3, 4)))


PARTS = {name: COPIES[name] for name in ("deepcopy", "a copy of a copy", "pickle", "torch.save", "averaged")}


@pytest.mark.parametrize("how", PARTS)
def test_a_copy_of_a_head_is_refused(how: str) -> None:
    model = encoder_and_head()
    hidden = model[0](numbers(3, 4))
    head = PARTS[how](model[1])
    assert torch.allclose(model[1](hidden), model(numbers(3, 4)))  # the modules of the model itself may be called
    with pytest.raises(ValueError, match=r"without '0\.2', from which their statistics follow: copy the whole model"):
        head(hidden)
    with pytest.raises(ValueError, match="copy the whole model"):
        vp.fold(head)
    with pytest.raises(ValueError, match="copy the whole model"):
        PARTS[how](model[1][0])(hidden)
    plain = PARTS[how](vp.fold(model.eval())[1])
    assert torch.allclose(plain(hidden), model[1](hidden))


@pytest.mark.parametrize("how", PARTS)
def test_a_copy_of_a_block_that_starts_with_a_batch_norm_is_refused(how: str) -> None:
    """The layer before the block has absorbed the batch norm, which knows it; still it is not copied by the user."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model = vp.normalize(nn.Sequential(nn.Linear(4, 6), block).double(), moments(4), example=numbers(2, 4))
    with pytest.raises(ValueError, match="without '0', from which their statistics follow"):
        PARTS[how](model[1])(numbers(3, 6))
    assert torch.equal(PARTS[how](model)(numbers(3, 4)), model(numbers(3, 4)))


@pytest.mark.parametrize("how", PARTS)
def test_a_copy_that_holds_all_it_reads_from_is_used(how: str) -> None:
    model, x = encoder_and_head(), numbers(3, 4)
    encoder = PARTS[how](model[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)
    assert not torch.allclose(encoder(x), model[0](x))
    encoder.load_state_dict(model[0].state_dict())
    assert torch.allclose(encoder(x), model[0](x))
    assert torch.allclose(vp.fold(encoder.eval())(x), model[0](x))


@pytest.mark.parametrize("how", PARTS)
def test_modules_that_are_copied_together_are_used_together(how: str) -> None:
    model, x = encoder_and_head(), numbers(3, 4)
    both = nn.ModuleDict({"encoder": model[0], "head": model[1]})
    several = PARTS[how](both)
    assert torch.allclose(several["head"](several["encoder"](x)), model(x))


@pytest.mark.parametrize("how", PARTS)
def test_a_model_that_is_reached_after_its_modules(how: str) -> None:
    class Holder(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.head, self.model = model[1], model

    model, x = encoder_and_head(), numbers(3, 4)
    globals()["Holder"], Holder.__qualname__ = Holder, "Holder"
    other = PARTS[how](Holder(model))
    assert torch.allclose(other.model(x), model(x))
    assert torch.allclose(other.head(other.model[0](x)), model(x))


def test_a_head_behind_parameters_that_are_no_layers_is_refused() -> None:
    plain = nn.Sequential(nn.Sequential(nn.LayerNorm(4)), nn.Sequential(nn.Linear(4, 3))).double()
    model = vp.normalize(plain, moments(4), example=numbers(2, 4))
    with pytest.raises(ValueError, match=r"without '0\.0'"):
        copy.deepcopy(model[1])(numbers(2, 4))


def test_a_compiled_copy_of_modules() -> None:
    model, x = encoder_and_head(), numbers(3, 4)
    encoder = torch.compile(copy.deepcopy(model[0]), backend="eager", fullgraph=True)
    assert torch.allclose(encoder(x), model[0](x))
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported, torch._dynamo.exc.ObservedException), match="copy"):
        torch.compile(copy.deepcopy(model[1]), backend="eager")(numbers(3, 6))


OTHER_DATA: dict[str, tuple[Any, Any, Any, Tensor]] = {
    "recurrent": (Recurrent, moments(1, 4), moments(1, 4, mean=2.0, var=9.0), numbers(2, 3, 4)),
    "called twice": (Twice, moments(4), moments(4, mean=2.0), numbers(2, 4)),
    "tokens": (
        Embedded,
        vp.Tokens.uniform(7),
        vp.Tokens(torch.tensor([1.0, 1, 1, 5, 5, 5, 5])),
        torch.zeros(2, 3, dtype=torch.int64),
    ),
}


@pytest.mark.parametrize("form", ("paper", "deep"))
@pytest.mark.parametrize("name", OTHER_DATA)
def test_a_checkpoint_for_other_data_is_refused(name: str, form: Any) -> None:
    kind, given, others, x = OTHER_DATA[name]
    torch.manual_seed(0)
    model, again, other = (vp.normalize(kind().double(), m, example=x, form=form) for m in (given, given, others))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(x), model.eval()(x))
    before = {name: value.clone() for name, value in other.named_parameters()}
    with pytest.raises(ValueError, match="other input moments"):
        other.load_state_dict(model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in other.named_parameters())


def mlp(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), *between, nn.ReLU(), nn.Linear(6, 3)).double()
    return vp.normalize(plain, moments(4), example=numbers(2, 4))


@pytest.mark.parametrize("optimizer", (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad))
@pytest.mark.parametrize("fused", (False, True))
def test_a_step_within_a_promise_is_refused(optimizer: Any, fused: bool) -> None:
    model, x = mlp(), numbers(3, 4)
    steps = optimizer(model.parameters(), lr=0.1, fused=fused)
    with vp.unchanged(model):
        model(x).square().sum().backward()
        steps.step()
        with pytest.raises(RuntimeError, match=r"changed within `vp\.unchanged`"):
            model(x)
    assert torch.allclose(model(x), vp.fold(model)(x))


def test_a_step_of_another_model_is_none() -> None:
    model, other, x = mlp(), nn.Linear(4, 2).double(), numbers(3, 4)
    steps = torch.optim.SGD(other.parameters(), lr=0.1, fused=True)
    with vp.unchanged(model):
        model(x)
        other(x).sum().backward()
        steps.step()
        model(x)


class Gain(nn.Module):
    """A parameter and a buffer between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))
        self.register_buffer("offset", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x) * self.gain + self.offset


BETWEEN: dict[str, Callable[[Any], Tensor]] = {
    "layer norm": lambda model: model[1].weight,
    "parameter": lambda model: model[1].gain,
    "buffer": lambda model: model[1].offset,
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_changes_between_layers_within_a_promise_is_refused(name: str) -> None:
    model, x = mlp(nn.LayerNorm(6) if name == "layer norm" else Gain()), numbers(3, 4)
    with torch.no_grad(), vp.unchanged(model):
        first = model(x)
        assert torch.equal(first, model(x))
        BETWEEN[name](model).add_(1.0)
        with pytest.raises(RuntimeError, match=r"changed within `vp\.unchanged`"):
            model(x)


@pytest.mark.parametrize("by", (parametrizations.weight_norm, parametrizations.orthogonal))
def test_parametrized_weights_within_a_promise(by: Callable[[nn.Module], Any]) -> None:
    model, x = mlp(), numbers(3, 4)
    by(model[0]), by(model[2])
    expected = model(x)
    with vp.unchanged(model):
        assert torch.allclose(model(x), expected) and torch.allclose(model(x), expected)
        with torch.no_grad():
            next(model[2].parametrizations.parameters()).add_(0.3)
        with pytest.raises(RuntimeError, match=r"changed within `vp\.unchanged`"):
            model(x)


def test_compiled_models_follow_changes_within_a_promise() -> None:
    model, x = mlp(), numbers(3, 4)
    compiled = torch.compile(model, backend="eager")
    with vp.unchanged(model), torch.no_grad():
        compiled(x)
        model[0].weight.add_(numbers(6, 4))
        model[2].shift.add_(1.0)
        assert torch.allclose(compiled(x), vp.fold(model)(x))


@pytest.mark.parametrize("given", ({"var": float("inf")}, {"mean": float("inf")}), ids=str)
def test_moments_that_are_not_finite_are_refused(given: dict[str, float]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    with pytest.raises(ValueError, match="finite"):
        vp.normalize(model, moments(4, **given), example=numbers(2, 4))
