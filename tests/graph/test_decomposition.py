"""What is kept of a decomposition changes nothing in the graphs, nor in torch."""

import pytest
import torch
from torch import nn
from torch.export import exported_program

from tests.models import BasicBlock, LSTMClassifier, ViT
from varprop.graph import decomposition
from varprop.graph.decomposition import decomposed

MODELS = {
    "residual, in training": (lambda: BasicBlock(3, 4, 2).train(), torch.zeros(2, 3, 8, 8)),
    "LSTM": (lambda: LSTMClassifier().eval(), torch.zeros(2, 5, 8)),
    "ViT": (lambda: ViT(depth=1).eval(), torch.zeros(2, 3, 32, 32)),
    "in place": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Dropout()), torch.zeros(2, 3)),
}


def text(program):
    return [
        (node.op, str(node.target), node.name, str(node.args), str(node.kwargs), str(node.meta.get("nn_module_stack")))
        for node in program.graph.nodes
    ] + [str(program.graph_signature)]


def exported(name):
    make, x = MODELS[name]
    return torch.export.export(make(), (x,), strict=False)


def kernels():
    return {op: dict(op.py_kernels) for op in torch._export.utils._collect_all_valid_cia_ops()}


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_the_one_that_torch_makes(name):
    program = exported(name)
    expected = text(program.run_decompositions({}))
    assert [text(decomposed(program)) for _ in range(2)] == [expected] * 2


def test_torch_is_left_as_it_was():
    program, before = exported("in place"), kernels()
    original = getattr(exported_program, decomposition.OVERRIDE)
    for _ in range(2):
        decomposed(program)
        assert kernels() == before
        assert getattr(exported_program, decomposition.OVERRIDE) is original


def test_torch_is_left_as_it_was_after_an_error(monkeypatch):
    program = exported("in place")
    decomposed(program)
    before = kernels()

    def fails(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(exported_program, "_decompose_and_get_gm_with_new_signature_constants", fails)
    with pytest.raises(RuntimeError, match="broken"):
        decomposed(program)
    assert kernels() == before


def test_torch_is_left_as_it_was_by_an_interrupt_while_operators_are_prepared(monkeypatch):
    program = exported("in place")
    decomposed(program)
    before, own, waiting = kernels(), decomposition.set_kernels, iter(range(5))

    def interrupted(op, found):
        own(op, found)
        if next(waiting, None) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(decomposition, "set_kernels", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decomposed(program)
    assert kernels() == before


def test_the_second_time_torch_prepares_nothing(monkeypatch):
    program, asked = exported("in place"), []
    decomposed(program)
    by_torch = getattr(exported_program, decomposition.OVERRIDE)
    monkeypatch.setattr(exported_program, decomposition.OVERRIDE, lambda ops: asked.append(len(ops)) or by_torch(ops))
    decomposed(program)
    assert asked == [0]


def test_an_operator_that_was_changed_is_prepared_anew(monkeypatch):
    program, seen = exported("in place"), []
    decomposed(program)
    op, by_torch = torch.ops.aten.linear.default, getattr(exported_program, decomposition.OVERRIDE)
    monkeypatch.setitem(op.py_kernels, torch._C.DispatchKey.PrivateUse1, lambda *a: None)
    monkeypatch.setattr(exported_program, decomposition.OVERRIDE, lambda ops: seen.append(set(ops)) or by_torch(ops))
    decomposed(program)
    assert seen == [{op}]


@pytest.mark.parametrize("name", ["OVERRIDE", "MATERIALIZE", "FAKE_RULES"])
def test_without_these_parts_of_torch_it_is_done_by_torch(monkeypatch, name):
    monkeypatch.setattr(decomposition, name, "gone")
    program = exported("in place")
    assert text(decomposed(program)) == text(program.run_decompositions({}))
