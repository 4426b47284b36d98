"""A captured program for a copy of its model."""

import copy

import torch
from torch import nn

import varprop as vp
from varprop.graph.program import transferred

X = torch.zeros(1, 4).double()


def moments_of(program):
    return vp.propagate(program, vp.Moments(X, X + 1)).output


def test_a_transferred_program_reads_the_other_model():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    program = vp.capture(model, X)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.mul_(3)
    expected = moments_of(vp.capture(twin, X))
    found = moments_of(transferred(program, twin))
    assert torch.equal(found.mean, expected.mean) and torch.equal(found.var, expected.var)
    assert not torch.equal(moments_of(program).mean, expected.mean)


def test_a_bypassed_operation_is_gone():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    program = vp.capture(model, X)
    before = moments_of(program)
    relu = next(node for node in program.nodes if "relu" in str(node.target))
    found = moments_of(transferred(program, model, {relu: relu.args[0]}))
    expected = moments_of(vp.capture(nn.Sequential(model[0], model[2]), X))
    assert torch.equal(found.mean, expected.mean) and torch.equal(found.var, expected.var)
    assert torch.equal(moments_of(program).mean, before.mean)  # the original is as it was
