"""`vp.summary`: extents, parameters, work, memory and moments of every module."""

import pytest
import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import varprop as vp


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Conv2d(8, 16, 3, stride=2, groups=2)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.down(self.stem(x)).relu().mean((2, 3)))


def test_what_every_module_gives_out_holds_and_computes():
    torch.manual_seed(0)
    model = Small()
    found = vp.summary(model, (3, 9, 9))
    assert [row.label for row in found.rows] == ["(model)", "stem", "stem.0", "stem.1", "stem.2", "down", "head"]
    assert found["stem.0"].extents == (1, 8, 9, 9) and found["stem.0"].memory == 4 * 8 * 81
    assert found["stem.0"].parameters == 8 * 27 + 8 and found["stem"].parameters == 8 * 27 + 8 + 16
    assert found["stem.0"].macs == 81 * 8 * 27 and found["down"].macs == 16 * 16 * 36 and found["head"].macs == 80
    assert found.macs == found["(model)"].macs == 81 * 8 * 27 + 16 * 16 * 36 + 80
    assert found.parameters == found.trainable == sum(p.numel() for p in model.parameters())
    assert found["stem.1"].std == pytest.approx(1.0, rel=1e-3)  # new batch norms count as in training
    expected = vp.propagate(model, vp.Moments(0.0, 1.0), (1, 3, 9, 9)).output
    assert found["(model)"].std == pytest.approx(float(expected.var.detach().mean().sqrt()), rel=1e-5)


class Einsum(nn.Module):
    def __init__(self, equation, *shapes):
        super().__init__()
        self.equation, self.weights = equation, nn.ParameterList(torch.ones(shape) for shape in shapes)

    def forward(self, x):
        return torch.einsum(self.equation, x, *self.weights)


WORK = {
    "einsum": (Einsum("btd,dk->btk", (16, 4)), (7, 16)),
    "einsum with an ellipsis": (Einsum("...d,kd", (4, 16)), (7, 16)),
    "einsum of three": (Einsum("btd,de,ef->btf", (16, 4), (4, 3)), (7, 16)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 5, 5)),
    "one axis": (nn.Conv1d(4, 6, 3, groups=2), (4, 9)),
    "attention": (nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), (7, 16)),
    "three axes": (nn.Linear(16, 4), (7, 16)),
}


@pytest.mark.parametrize(("model", "shape"), WORK.values(), ids=WORK.keys())
def test_work_is_what_torch_counts(model, shape):
    # its counter does not know the CPU's kernels of attention
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, *shape, requires_grad=True))
    assert 2 * vp.summary(model, shape).macs == counter.get_total_flops()


def test_depth_limits_what_is_printed():
    text = str(vp.summary(Small(), (3, 9, 9), depth=1))
    assert "stem" in text and "BatchNorm2d" not in text
    assert text.splitlines()[-1].startswith("917 parameters (917 trainable, ")
    assert len(str(vp.summary(Small(), (3, 9, 9))).splitlines()) == 2 + 7 + 1


def test_other_inputs():
    tokens = vp.summary(nn.Embedding(10, 4), (6,), moments=vp.Tokens.uniform(10))
    assert tokens["(model)"].extents == (1, 6, 4)
    data = torch.randn(10, 3, 9, 9)
    assert vp.summary(Small(), data[:2], moments=vp.input_moments(data))["head"].extents == (2, 5)


def test_names_that_were_meant():
    with pytest.raises(KeyError, match=r"no module 'stem0'; did you mean 'stem.0'"):
        vp.summary(Small(), (3, 9, 9))["stem0"]
    with pytest.raises(KeyError, match=r"did you mean 'down'\?"):
        vp.inspect(Small(), vp.Moments(0.0, 1.0), example=(1, 3, 9, 9))["downs"]
    with pytest.raises(KeyError, match=r"did you mean 'down'\?"):
        vp.propagate(Small(), vp.Moments(0.0, 1.0), (1, 3, 9, 9))["downs"]


def test_bad_depths_are_refused():
    with pytest.raises(ValueError, match="depth must be 0 or more"):
        vp.summary(Small(), (3, 9, 9), depth=-1)


def test_a_shape_with_a_batch_axis_is_answered_with_one_without():
    with pytest.raises(vp.CaptureError, match=r"without a batch axis: \(3, 32, 32\)"):
        vp.summary(Small(), (1, 3, 9, 9))


def test_shape_example_and_moments_say_how_large_the_input_is():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    by_shape = vp.summary(model, shape=(3, 8, 8))
    assert vp.summary(model, (3, 8, 8)).rows == by_shape.rows
    assert vp.summary(model, example=(1, 3, 8, 8)).rows == by_shape.rows
    assert vp.summary(model, example=torch.randn(1, 3, 8, 8)).rows == by_shape.rows
    by_moments = vp.summary(model, moments=vp.input_moments(torch.randn(64, 3, 8, 8)))
    assert [row.extents for row in by_moments.rows] == [row.extents for row in by_shape.rows]


def test_a_summary_of_no_size_or_of_two_is_refused():
    with pytest.raises(ValueError, match="follows from `shape`"):
        vp.summary(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="not both"):
        vp.summary(nn.Linear(3, 2), (3,), example=(1, 3))
