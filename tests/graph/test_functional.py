"""The functional form of a program is the one that torch finds, whoever writes it."""

from collections import Counter

import pytest
import torch
from torch import fx, nn
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

import varprop as vp
from tests.models import GPT, BasicBlock, UNet
from varprop.graph import functional
from varprop.graph.functional import in_functional_form


class Calls(nn.Module):
    """A function of one tensor as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def in_place_of_what_was_read(x):
    h = x + 1
    before = h * 2
    h.relu_()
    h.add_(before)
    return h.mul_(3).sub_(1), h, before


def viewed_after_a_change(x):
    h = x + 1
    h.relu_()
    return h.T.flatten() * 2


def views(x):
    first, second = x.chunk(2, 1)
    joined = torch.cat([first.mT.reshape(-1).unflatten(0, (2, -1)).mT, second.contiguous()], 1)
    return joined.double().float().view_as(x) + torch.tensor([1.0])


def in_half_precision(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


WITHIN_REACH = {
    "residual": (lambda: BasicBlock(3, 4, 2).eval(), torch.zeros(2, 3, 8, 8)),
    "GPT": (lambda: GPT(depth=1), torch.zeros(2, 12, dtype=torch.long)),
    "UNet": (lambda: UNet(4), torch.zeros(1, 3, 8, 8)),
    "encoder, in training": (lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True), torch.zeros(2, 5, 8)),
    "in place after dropout": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.ReLU(inplace=True)),
        torch.zeros(2, 3),
    ),
    "dropout in place, in evaluation": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(inplace=True), nn.ReLU(inplace=True)).eval(),
        torch.zeros(2, 3),
    ),
    "dropout of none": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0)).train(), torch.zeros(2, 3)),
    "batch norm without statistics": (
        lambda: nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Flatten(0)),
        torch.zeros(2, 3),
    ),
    "in place of what was read": (lambda: Calls(in_place_of_what_was_read), torch.zeros(2, 2)),
    "viewed after a change": (lambda: Calls(viewed_after_a_change), torch.zeros(2, 2)),
    "views": (lambda: Calls(views), torch.zeros(4, 4)),
}


def set_in_part(x):
    h = x * 2
    h[:, 0] = 1
    return h


def changed_under_a_view(x):
    h = x + 1
    view = h.view(-1)
    h.relu_()
    return view


def changed_through_a_part(x):
    h = x + 1
    h.split(1)[0].relu_()
    return h


def changed_under_a_view_of_the_result(x):
    h = x + 1
    view = h.relu_().view(-1)
    h.add_(1)
    return view


LEFT_TO_TORCH = {
    "set in part": set_in_part,
    "changed under a view": changed_under_a_view,
    "changed through a part": changed_through_a_part,
    "changed under a view of the result": changed_under_a_view_of_the_result,
    "in half precision": in_half_precision,
    "sum of two types": lambda x: (x + 1).add_(torch.ones_like(x, dtype=torch.double)),
    "a list of views": lambda x: torch.tensor_split(x, 2)[0] * 1,
    "random in place": lambda x: nn.functional.dropout(x + 1, inplace=True),
}


def exported(model, x):
    return torch.export.export(model, (x,), strict=False)


def steps(program):
    """The operations, each with its arguments by number, the form of its result and its place in the model."""
    number, found = {}, []
    for node in program.graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), number.get)
        if node.op == "placeholder":
            number[node] = node.name
        elif node.op == "output":
            found.append(str(arguments))
        elif node.users:  # others assert what was known when the model was captured
            number[node] = str(len(found))
            form = pytree.tree_map(lambda value: (value.shape, value.dtype), node.meta["val"])
            found.append(str((node.target, arguments, form, node.meta["nn_module_stack"], node.meta["stack_trace"])))
    assert {spec.kind for spec in program.graph_signature.output_specs} == {OutputKind.USER_OUTPUT}
    return found, [(spec.kind, spec.arg, spec.target) for spec in program.graph_signature.input_specs]


@pytest.mark.parametrize("name", WITHIN_REACH)
def test_the_form_is_the_one_that_torch_finds(name, monkeypatch):
    make, x = WITHIN_REACH[name]
    program = exported(make(), x)
    expected = steps(program.run_decompositions({}))
    monkeypatch.setattr(type(program), "run_decompositions", None)  # it must not be needed
    assert steps(in_functional_form(program)) == expected


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_is_beyond_reach_is_left_to_torch(name):
    program = exported(Calls(LEFT_TO_TORCH[name]), torch.zeros(2, 2))
    assert not functional._is_within_reach(program.graph)


@pytest.mark.parametrize("name", ["in place of what was read", "viewed after a change", "views", *LEFT_TO_TORCH])
def test_it_computes_what_the_model_does(name):
    model = (Calls(LEFT_TO_TORCH[name]) if name in LEFT_TO_TORCH else WITHIN_REACH[name][0]()).eval()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    expected = model(x.clone())
    program = in_functional_form(exported(model, x.clone()))
    torch.manual_seed(1)
    torch.testing.assert_close(program.module()(x.clone()), expected)


def test_batch_norms_in_training_have_the_moments_that_torch_leads_to(monkeypatch):
    model = BasicBlock(3, 4, 2).train()
    moments = [vp.propagate(model, vp.Moments(torch.full((2, 3, 8, 8), 0.5), torch.full((2, 3, 8, 8), 2.0))).output]
    monkeypatch.setattr(functional, "_is_within_reach", lambda graph: False)
    moments.append(vp.propagate(model, vp.Moments(torch.full((2, 3, 8, 8), 0.5), torch.full((2, 3, 8, 8), 2.0))).output)
    torch.testing.assert_close(*((m.mean, m.var) for m in moments))


def without_gradients(x):
    with torch.no_grad():
        shift = x.mean(0)
        with torch.enable_grad():
            scale = x.square().relu_().flatten()
    with torch.no_grad():
        return (x - shift).flatten() * scale, shift


def in_full_precision(x):
    with torch.autocast("cpu", enabled=False):
        scale = x.square().relu_().flatten()
        with torch.no_grad():
            return (x - x.mean(0)).flatten() * scale, scale


@pytest.mark.parametrize("function", [without_gradients, in_full_precision])
def test_what_is_under_no_grad_or_without_autocast_stands_in_the_graph_with_its_own_line(function, monkeypatch):
    model, x = Calls(function), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    program = exported(model, x)
    expected = Counter(node.target for node in operations(program.run_decompositions({})))
    monkeypatch.setattr(type(program), "run_decompositions", None)
    found = operations(in_functional_form(program))
    counts = Counter(node.target for node in found)
    # torch forgets what no gradient passes
    assert counts.pop(torch.ops.aten.detach.default, 0) == (2 if function is without_gradients else 0)
    assert counts == expected
    assert all(__file__ in node.meta["stack_trace"] for node in found)
    torch.testing.assert_close(program.module()(x), model(x))


def operations(program):
    return [node for node in program.graph.nodes if node.op == "call_function"]
