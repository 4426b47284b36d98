"""Random networks used in random ways agree with the reference after each of them, forward and all gradients."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import varprop as vp
from tests.norm.networks import sites
from varprop.norm.fold.reference import fold_parts

pytestmark = pytest.mark.filterwarnings("ignore")
Blocks = tuple[tuple[int, bool], ...]  # an activation, and whether there is a skip around it


class Doubled(nn.ReLU):
    """A subclass of a standard module that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Named(nn.Linear):
    """A subclass of a standard layer that computes the same."""


class NormAct(nn.BatchNorm1d):
    """A batch norm that activates, and has seen data."""

    def __init__(self, width: int = 5) -> None:
        super().__init__(width)
        with torch.no_grad():
            self.weight.uniform_(0.5, 2), self.running_mean.normal_(), self.running_var.uniform_(0.5, 2)

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(super().forward(input))


ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.GELU,
    nn.Softsign,
    nn.CELU,
    nn.Tanh,
    lambda: nn.LayerNorm(5),
    lambda: nn.PReLU(5),
    Doubled,
    NormAct,
)


class Net(nn.Module):
    """Blocks, some with skips, and a switch that raises between them."""

    fails = False

    def __init__(self, blocks: list[tuple[int, bool]]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.skips = [skip for _, skip in blocks]
        kinds = [ACTIVATIONS[kind] for kind, _ in blocks]
        # where no layer can take over a batch norm, it would follow the batch
        kinds = [Doubled if kind is NormAct and (n or self.skips[0]) else kind for n, kind in enumerate(kinds)]
        self.blocks = nn.ModuleList([nn.Sequential(kind(), Named(5, 5)) for kind in kinds])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, skip in zip(self.blocks, self.skips, strict=True):
            x = x + block(x) if skip else block(x)
            if self.fails:
                raise KeyboardInterrupt
        return self.head(x)


def normalized(blocks: Blocks, form: Any) -> Any:
    moments = vp.Moments(torch.full((1, 4), 0.3).double(), torch.ones(1, 4).double())
    return vp.normalize(Net(list(blocks)).double(), moments, example=torch.zeros(2, 4).double(), form=form)


def by_reference(model: Any, x: Tensor) -> Tensor:
    """The present function, layer by layer, from the folded weights of the reference."""
    network = next(iter(sites(model).values())).networks[model.training][0]
    parts = fold_parts(network.layout, network.external_moments(), network.parameters())
    folded = {layer: (parts[k], parts[k + len(network.layers)]) for k, layer in enumerate(network.layers)}
    x = F.linear(x, *folded[model.stem])
    for (act, layer), skip in zip(model.blocks, model.skips, strict=True):
        x = F.linear(act(x), *folded[layer]) + (x if skip else 0)
    return F.linear(x, *folded[model.head])


def agrees(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor]) -> None:
    wanted = [p for p in model.parameters() if p.requires_grad]
    found = []
    for function in (call, lambda x: by_reference(model, x)):
        output = function(x)
        found.append([output, *torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)])
    for ours, theirs in zip(*found, strict=True):
        zero = torch.zeros(()).double()
        assert torch.allclose(zero if ours is None else ours, zero if theirs is None else theirs, rtol=1e-8, atol=1e-9)


def written(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def stepped(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)


def interrupted(model: Any) -> None:
    model.fails = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 4).double())
    model.fails = False


def frozen(model: Any) -> None:
    model.stem.weight.requires_grad_(not model.stem.weight.requires_grad)


def evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4).double())
    with torch.inference_mode():
        model(torch.ones(2, 4).double())


def in_a_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=lambda: model(torch.ones(2, 4).double()))
    thread.start()
    thread.join()


def promised(model: nn.Module) -> None:
    with vp.unchanged(model):
        model(torch.ones(2, 4).double()), model(torch.ones(2, 4).double())


def modules_copied(model: Any) -> None:
    """A copy of a block is refused, since it does not hold what it reads from; one of the first layer is used."""
    for copied in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        with pytest.raises(ValueError, match="copy the whole model"):
            copied(model.blocks[0])(torch.ones(2, 5).double())
        x = torch.ones(2, 4).double()
        assert torch.equal(copied(model.stem)(x), model.stem(x))


EVENTS: dict[str, Callable[[Any], Any]] = {
    "modules copied": modules_copied,
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "written": written,
    "stepped": stepped,
    "interrupted": interrupted,
    "frozen": frozen,
    "evaluated": evaluated,
    "in a thread": in_a_thread,
    "promised": promised,
    "train": lambda model: model.train(),
    "eval": lambda model: model.eval(),
}
CALLS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "plain": lambda model: model,
    "checkpoint": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    "functional": lambda model: lambda x: functional_call(model, dict(model.named_parameters()), (x,)),
    "with a graph": lambda model: lambda x: twice(model, x),
}


def twice(model: nn.Module, x: Tensor) -> Tensor:
    """The output after a derivative with a graph was taken, which must leave nothing behind."""
    output = model(x)
    wanted = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(output.sum(), wanted, create_graph=True, allow_unused=True)
    return output


some_blocks = st.lists(st.tuples(st.integers(0, len(ACTIVATIONS) - 1), st.booleans()), min_size=1, max_size=3).map(
    tuple
)
some_events = st.lists(
    st.tuples(st.sampled_from(sorted(EVENTS)), st.sampled_from(sorted(CALLS))), min_size=1, max_size=6
)
forms = st.sampled_from(("paper", "deep"))
seeds = st.integers(0, 2**16)


def check(model: Any, events: list[tuple[str, str]], seed: int) -> None:
    """After every event the model agrees with the reference, however it is called, and so does its fold."""
    torch.manual_seed(seed)
    x = torch.randn(3, 4).double()
    for event, call in events:
        model = EVENTS[event](model) or model
        agrees(model, x, CALLS[call](model))
    assert torch.allclose(vp.fold(model.eval())(x), model(x), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "20")), deadline=None)
@given(blocks=some_blocks, form=forms, events=some_events, seed=seeds)
def test_any_use_gives_the_numbers_of_the_reference(
    blocks: Blocks, form: str, events: list[tuple[str, str]], seed: int
) -> None:
    torch.manual_seed(seed)
    check(normalized(blocks, form), events, seed)


# Most of the time of an example goes into the capture of its network: here are ten, captured once a form and copied.
FEW: tuple[Blocks, ...] = (
    ((0, False),),
    ((1, True), (0, False)),
    ((5, False),),
    ((6, True),),
    ((0, True), (2, True), (4, False)),
    ((3, False), (5, True)),
    ((4, False), (6, False), (0, True)),
    ((2, True), (1, False)),
    ((8, False), (7, True)),
    ((7, False), (8, False)),
)
captured = functools.cache(normalized)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "200")), deadline=None)
@given(blocks=st.sampled_from(FEW), form=forms, events=some_events, seed=seeds)
def test_any_use_of_a_few_networks(blocks: Blocks, form: str, events: list[tuple[str, str]], seed: int) -> None:
    model = copy.deepcopy(captured(blocks, form))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    check(model, events, seed)


class Scaled(nn.Linear):
    """A layer with a forward of its own, whose weight and bias do not do what torch's do."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / self.weight.std(), 2 * self.bias) * 0.5 + 1


class Reversed(nn.Sequential):
    """A container that calls its modules from the last to the first."""

    def forward(self, input: Tensor) -> Tensor:
        for module in reversed(self):
            input = module(input)
        return input


class Shuffled(nn.Module):
    """Joins axes of a transposed tensor, and passes on a tuple."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input.view(-1, 2, 3).transpose(1, 2).flatten(1), input.flip(1)


class Chosen(nn.Module):
    """Both outputs of the one before, of which one was changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.shuffle, self.layer = Shuffled(), nn.Linear(6, 6)

    def forward(self, input: Tensor) -> Tensor:
        first, second = self.shuffle(input)
        second = self.layer(second)
        second[:, ::2] += first[:, 1::2]
        return second.relu_()


def reversed_pair() -> nn.Module:
    return Reversed(nn.Tanh(), nn.Linear(6, 6))


PIECES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6), "without bias": lambda: nn.Linear(6, 6, bias=False),
    "own forward": lambda: Scaled(6, 6),
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "norm": lambda: nn.BatchNorm1d(6), "norm without parameters": lambda: nn.BatchNorm1d(6, affine=False),
    "norm that activates": lambda: NormAct(6), "relu": lambda: nn.ReLU(inplace=True), "doubled": Doubled,
    "dropout": lambda: nn.Dropout(0.3), "reversed": reversed_pair, "chosen": Chosen,
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "15")), deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=5),
    shared=st.integers(0, 9),
    seed=seeds,
)
def test_a_model_computes_the_same_in_every_form(names: list[str], shared: int, seed: int) -> None:
    """Whatever is absorbed, replaced or put behind a layer; `shared` is the piece that is called again at the end."""
    torch.manual_seed(seed)
    pieces = [PIECES[name]() for name in names]
    plain = nn.Sequential(nn.Linear(4, 6), *pieces, pieces[shared % len(pieces)], nn.Linear(6, 3)).double()
    x = torch.randn(16, 4).double()
    with torch.no_grad():
        for _ in range(3):
            plain(3 * x + 1)  # the running statistics of batch norms
        plain.eval()
        expected = plain(x)
        moments = vp.Moments(torch.full((1, 4), 0.3).double(), torch.ones(1, 4).double())
        preserved: nn.Module = vp.normalize(plain, moments, example=x, init="preserve")
        forms = {
            "preserved": preserved,
            "folded": vp.fold(preserved),
            "copied": copy.deepcopy(preserved),
            "standard": vp.reparametrize(plain, "standard", example=x),
            "batch": vp.reparametrize(plain, "batch", batch=x),
        }
        for name, model in forms.items():
            assert torch.allclose(model(x), expected, rtol=1e-8, atol=1e-9), name
