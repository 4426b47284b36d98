"""The public function: results, known fixed points, errors, and what it leaves untouched."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import varprop as vp
from varprop.rules import registry
from varprop.rules.registry import registered, unregister

DOUBLE = torch.float64


def standard(*shape: int, dtype: torch.dtype = DOUBLE) -> vp.Moments:
    return vp.Moments(torch.zeros(shape, dtype=dtype), torch.ones(shape, dtype=dtype))


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Difference(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x - y


PAIR = {"x": torch.zeros(1, 2, dtype=DOUBLE), "y": torch.zeros(1, 2, dtype=DOUBLE)}


@pytest.mark.parametrize("on_missing", ["raise", "sample"])
def test_places_of_the_largest_entries_have_no_moments(on_missing) -> None:
    model = Function(lambda x: x.topk(2).indices.view(-1) * 2.0)
    with pytest.raises(vp.MissingRule, match=r"reads a result of aten\.topk that has no mean and variance"):
        vp.propagate(model, standard(1, 4), on_missing=on_missing)


def test_selu_keeps_zero_mean_and_unit_variance() -> None:
    output = vp.propagate(nn.SELU(), standard(1, 1)).output
    assert abs(output.mean.item()) <= 1e-12 and abs(output.var.item() - 1) <= 1e-12


def test_relu_constants_of_normalization_propagation() -> None:
    output = vp.propagate(nn.ReLU(), standard(1, 1)).output
    assert output.mean.item() == pytest.approx(1 / math.sqrt(2 * math.pi), abs=1e-15)
    assert output.var.item() == pytest.approx((1 - 1 / math.pi) / 2, abs=1e-15)


def test_mean_field_recursion_of_wide_random_networks() -> None:
    """Deep information propagation: q' = w^2 E relu(sqrt(q) Z)^2 + b^2 = w^2 q / 2 + b^2 (arc-cosine kernel)."""
    torch.manual_seed(0)
    width, depth, weight_var, bias_var = 2000, 5, 1.2, 0.2
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width, dtype=DOUBLE)
        nn.init.normal_(linear.weight, std=math.sqrt(weight_var / width))
        nn.init.normal_(linear.bias, std=math.sqrt(bias_var))
        layers += [linear, nn.ReLU()]
    with torch.no_grad():
        result = vp.propagate(nn.Sequential(*layers), standard(1, width))
    q = weight_var + bias_var
    for index in range(0, 2 * depth, 2):
        moments = result[str(index)]
        # the average over the layer fluctuates by sqrt(2 / width) a layer: the tolerance is three of these
        second_moment = (moments.mean.square() + moments.var).mean().item()
        assert second_moment == pytest.approx(q, rel=0.1), f"layer {index}"
        q = weight_var * q / 2 + bias_var


def test_the_cifar_activation_of_the_paper() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x) + 0.03 * x

    output = vp.propagate(Net(), standard(1, 1)).output
    assert output.mean.item() == pytest.approx(0.39894228040143268, abs=1e-14)
    assert output.var.item() == pytest.approx(0.37174505690810466, abs=1e-13)


def test_uniform_and_full_resolution_agree_away_from_the_border() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, dtype=DOUBLE), nn.ReLU(), nn.Conv2d(4, 5, 3, 2, dtype=DOUBLE), nn.Tanh())
    uniform = vp.propagate(model, standard(1, 3, 1, 1), torch.zeros(1, 3, 12, 12, dtype=DOUBLE))
    full = vp.propagate(model, standard(1, 3, 12, 12))
    assert uniform.output.shape == (1, 5, 1, 1) and uniform.output.full == full.output.shape
    torch.testing.assert_close(uniform.output.dense().mean, full.output.mean)
    torch.testing.assert_close(uniform.output.dense().var, full.output.var)


def test_maximum_of_a_copy_is_that_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is integrated for functions that are lines."""

    def unwanted(*_: object) -> None:
        pytest.fail("a line was integrated")

    monkeypatch.setattr("varprop.engine.clusters.Clusters._integrate", unwanted)
    x = vp.Moments(torch.randn(1, 2, 5, 5), torch.rand(1, 2, 5, 5) + 0.5)
    plain = vp.propagate(nn.MaxPool2d(3, 2), x).output
    copied = vp.propagate(nn.Sequential(Copy(), nn.MaxPool2d(3, 2)), x).output
    assert torch.equal(plain.mean, copied.mean) and torch.equal(plain.var, copied.var)


class Copy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone().double().float()


def test_maximum_is_taken_before_the_activation() -> None:
    """mathematics.md, 7: k = 4, mu = -1, relu then pool: sd .441 exactly, .419 in this order, .183 in the other."""
    model = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    moments = vp.Moments(torch.full((1, 1, 2, 2), -1.0, dtype=DOUBLE), torch.ones(1, 1, 2, 2, dtype=DOUBLE))
    for given in (moments, vp.Moments(moments.mean[..., :1, :1], moments.var[..., :1, :1])):
        output = vp.propagate(model, given, torch.zeros(1, 1, 2, 2, dtype=DOUBLE)).output
        assert output.std.item() == pytest.approx(0.419, abs=2e-3)


def shuffled(x: Tensor) -> Tensor:
    """The channels in another order, as ShuffleNet writes it."""
    return x.view(len(x), 2, -1, *x.shape[2:]).transpose(1, 2).reshape(x.shape)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "views": shuffled,
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "roll and flip": lambda x: x.roll(1, 1).flip(-1),
    "slice": lambda x: x[:, 2:6],
}


@pytest.mark.parametrize("extent", (1, 6), ids=("alike", "apart"))
@pytest.mark.parametrize("name", MOVES)
def test_moves_between_an_activation_and_a_maximum_make_no_difference(name: str, extent: int) -> None:
    torch.manual_seed(0)
    move = MOVES[name]
    x = vp.Moments(torch.randn(1, 8, extent, extent, dtype=DOUBLE), torch.ones(1, 8, extent, extent, dtype=DOUBLE))
    example = torch.zeros(1, 8, 6, 6, dtype=DOUBLE)
    behind, before = (
        vp.propagate(Function(function), x, example).output.dense()
        for function in (
            lambda x: F.max_pool2d(move(x.relu()), 3, 1, 1),
            lambda x: F.max_pool2d(move(x).relu(), 3, 1, 1),
        )
    )
    torch.testing.assert_close(behind.mean, before.mean)
    torch.testing.assert_close(behind.var, before.var)


def test_parts_that_are_joined_between_an_activation_and_a_maximum() -> None:
    """As after the fire modules of SqueezeNet; with two functions there is none to apply after the maximum."""
    torch.manual_seed(0)
    x, y = (vp.Moments(torch.randn(1, 4, 6, dtype=DOUBLE), torch.ones(1, 4, 6, dtype=DOUBLE)) for _ in range(2))

    def of(function: Callable[[Tensor, Tensor], Tensor]) -> vp.Moments:
        return vp.propagate(Function(lambda x, y: F.max_pool1d(function(x, y), 2)), (x, y)).output

    joined, expected = of(lambda x, y: torch.cat([x.relu(), y.relu()], 1)), of(lambda x, y: torch.cat([x, y], 1).relu())
    torch.testing.assert_close(joined.var, expected.var)
    mixed = of(lambda x, y: torch.cat([x.relu(), y.sigmoid()], 1))
    sigmoids = vp.propagate(Function(lambda y: F.max_pool1d(y.sigmoid(), 2)), y).output
    assert mixed.mean[:, 4:].max() < 1 and not torch.allclose(mixed.mean[:, 4:], expected.mean[:, 4:])
    torch.testing.assert_close(mixed.mean[:, 4:], sigmoids.mean, rtol=0.02, atol=0.0)


ZERO, ONE = torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)
RANKS = {  # functions of four values, and true over predicted standard deviation
    "sort": (lambda x: x.relu().sort(-1).values[..., -1], 1.02),
    "topk": (lambda x: x.relu().topk(2, -1).values[..., 0], 1.02),
    "a rising line": (lambda x: (2 * x.relu() + 1).amax(-1), 1.02),
    "two functions": (lambda x: x.relu().tanh().amax(-1), 1.0),
    "leaky": (lambda x: F.leaky_relu(x, 0.1).amax(-1), 1.02),
    "ELU": (lambda x: F.elu(x, alpha=0.5).amax(-1), 1.02),
    "CELU": (lambda x: F.celu(x, alpha=2.0).amax(-1), 1.02),
    "GELU": (lambda x: F.gelu(x).amax(-1), 1.02),
    "SiLU": (lambda x: F.silu(x - 1).amax(-1), 1.02),
    "Mish": (lambda x: F.mish(x - 1).amax(-1), 1.02),
    "hardswish": (lambda x: F.hardswish(x - 1).amax(-1), 1.02),
    "maximum": (lambda x: torch.maximum(x[..., 0].relu(), x[..., 1].relu()), 1.38),  # from here on inexact, and marked
    "least of GELU": (lambda x: F.gelu(x).amin(-1), 0.23),
    "absolute": (lambda x: x.abs().amax(-1), 1.35),
    "border": (lambda x: F.pad(x.relu(), (0, 1)).amax(-1), 1.64),
    "dropout": (lambda x: F.dropout(x.relu(), 0.3).amax(-1), 1.89),
    "batch norm": (lambda x: F.batch_norm(x.relu().view(-1, 1, 4), ZERO, ONE).amax(-1).view(-1), 1.64),
    "a negative slope": (lambda x: F.leaky_relu(x, -0.5).amax(-1), 1.55),
    "a falling line": (lambda x: (-x.relu()).amax(-1), 0.21),
}
BENT = "compares functions of Gaussian values as if these were Gaussian"
DIPPING = "the maximum is taken before a function that dips"
DIPS = ("GELU", "SiLU", "Mish", "hardswish")


@pytest.mark.parametrize("name", RANKS)
def test_ranks_of_activations_are_as_near_as_the_documentation_says(name: str) -> None:
    function, ratio = RANKS[name]
    program = vp.capture(Function(function), torch.zeros(1, 4, dtype=DOUBLE))
    reasons = {r for e in vp.coverage(program, torch.zeros(1, 4)) for r in e.reasons}
    assert any(r.startswith(BENT) for r in reasons) == (list(RANKS).index(name) >= list(RANKS).index("maximum"))
    assert any(r.startswith(DIPPING) for r in reasons) == (name in DIPS)
    torch.manual_seed(1)  # of dropout: with the seed of the values its draws would depend on them
    x = torch.randn(200_000, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    found = vp.propagate(program, standard(1, 4)).output
    assert found.mean.shape == (1,)
    assert float(function(x).std() / found.std) == pytest.approx(ratio, abs=0.03)


@pytest.mark.parametrize("function", [F.gelu, F.silu, F.mish, F.hardswish])
@pytest.mark.parametrize("count", [2, 4, 25])
def test_maxima_of_functions_that_dip_are_as_near_as_their_note_says(function, count: int) -> None:
    mean = torch.tensor([0, 0, 0, 1, -0.3, -1, -3], dtype=DOUBLE).view(-1, 1).expand(-1, count)
    std = torch.tensor([0.3, 1, 3, 1, 0.3, 1, 3], dtype=DOUBLE).view(-1, 1).expand(-1, count)
    x = mean + std * torch.randn(40_000, 7, count, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    true = function(x).amax(-1)
    found = vp.propagate(Function(lambda x: function(x).amax(-1)), vp.Moments(mean, std.square())).output
    assert bool(((found.mean - true.mean(0)).abs() <= 0.15 * true.std(0)).all())
    torch.testing.assert_close(found.std, true.std(0), rtol=0.06, atol=0.0)


def test_a_border_between_an_activation_and_a_maximum_is_no_move() -> None:
    """The sigmoid of the border would be a half."""
    padded = Function(lambda x: F.max_pool1d(F.pad(x.sigmoid(), (3, 0)), 3))
    output = vp.propagate(padded, standard(1, 1, 3)).output.dense()
    assert output.mean[0, 0, 0] == 0 and output.var[0, 0, 0] == 0


def test_results_by_module_and_operation() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.act(self.linear(x)))

    model = Twice()
    result = vp.propagate(model, standard(1, 4, dtype=torch.float32))
    first, second = result.calls["linear"]
    torch.testing.assert_close(result["linear"].mean, (first.mean + second.mean) / 2)
    assert torch.equal(second.mean, result.output.mean)
    assert list(result.by_module()) == ["", "linear", "act"]
    assert [entry.module for entry in result.by_op()["aten.linear.default"]] == ["linear", "linear"]
    assert "linear #2" in result.table()
    plain = result.to_dict(values=True)
    assert len(plain["modules"]["linear"]["calls"][0]["means"][0]) == 4
    with pytest.raises(KeyError, match="no module 'nowhere'"):
        result["nowhere"]


def test_several_inputs_constants_and_structured_outputs() -> None:
    def function(a: Tensor, b: Tensor, *, c: Tensor) -> dict[str, Tensor]:
        return {"sum": a + b, "scaled": a * c}

    example = (torch.zeros(1, 3), torch.zeros(1, 3))
    model = Function(lambda a, b: function(a, b, c=torch.full((3,), 2.0)))
    output = vp.propagate(model, (standard(1, 3, dtype=torch.float32), torch.ones(1, 3)), example).output
    torch.testing.assert_close(output["sum"].mean, torch.ones(1, 3))
    torch.testing.assert_close(output["scaled"].var, torch.full((1, 3), 4.0))
    both = vp.propagate(model, (standard(1, 3, dtype=torch.float32),) * 2)
    torch.testing.assert_close(both.output["sum"].var, torch.full((1, 3), 2.0))
    assert not both.approximations, "separate inputs are independent"


def test_keyword_inputs() -> None:
    class Model(nn.Module):
        def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
            return left - right

    output = vp.propagate(Model(), {"left": standard(1, 2), "right": standard(1, 2)}).output
    torch.testing.assert_close(output.var, torch.full((1, 2), 2.0, dtype=DOUBLE))


def test_a_value_multiplied_by_itself_is_marked() -> None:
    class Gram(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x

    (entry,) = vp.propagate(Gram(), standard(3, 3)).approximations
    assert entry.op == "aten.matmul.default" and "assumes independence" in entry.reasons[0]
    (entry,) = vp.coverage(Gram(), torch.zeros(3, 3)).approximate
    assert "assumes independence" in entry.reasons[0]


@pytest.mark.parametrize(
    ("function", "marked"),
    [
        (lambda x: x.long(), True),
        (lambda x: torch.zeros(1, 4, dtype=torch.long).copy_(x), True),
        (lambda x: torch.zeros(1, 4, dtype=DOUBLE).copy_(x), False),
        (lambda x: (x > 0).long(), False),
    ],
)
def test_a_cast_to_whole_numbers_is_marked(function: Callable[[Tensor], Tensor], marked: bool) -> None:
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x) * 2.0

    entries = vp.propagate(Cast(), standard(1, 4)).approximations
    assert any("whole numbers" in reason for entry in entries for reason in entry.reasons) == marked
    assert bool(vp.coverage(Cast(), torch.zeros(1, 4)).approximate) == marked


def test_shared_ancestors_are_marked() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(F.relu(x))

    result = vp.propagate(Residual(), standard(1, 4, dtype=torch.float32))
    (entry,) = result.approximations
    assert entry.op == "aten.add.Tensor" and "assumes independence" in entry.reasons[0]
    (entry,) = vp.coverage(Residual(), torch.zeros(1, 4)).approximate
    assert entry.op == "aten.add.Tensor" and "test_propagate.py" in entry.line


def _with_rows(x: Tensor, places: list[int], rows: Tensor) -> Tensor:
    x = x.clone()
    x[:, :, places] = rows
    return x


def _interleaved(x: Tensor, second: int) -> Tensor:
    result = torch.zeros_like(x)
    result[:, :, ::2], result[:, :, 1::2] = x[:, :, ::2], x[:, :, second::2]
    return result


KERNEL = torch.ones(3, 3, 3, 3, dtype=DOUBLE)
FIRST = torch.zeros(1, 6, 8, 8, dtype=torch.long)
COPIES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "expand, sum": (lambda x: x.expand(4, 3, 8, 8).sum(0), True),
    "expand, no sum": (lambda x: x.expand(4, 3, 8, 8).relu(), False),
    "repeat, mean": (lambda x: x.repeat(1, 2, 1, 1).relu().mean(1), True),
    "interleave, pool": (lambda x: F.avg_pool2d(x.repeat_interleave(2, -1), 2), True),
    "broadcast, sum": (lambda x: (torch.ones(5, 1, 1, 1, dtype=DOUBLE) * x).sum(0), True),
    "broadcast sum of two, sum": (lambda x: (x[:, :1] + torch.randn(1, 3, 1, 8, dtype=DOUBLE)).sum(2), True),
    "broadcast of parts of one": (lambda x: (x[:, :1] * x[:, 1:, :1]).sum(2), False),  # the product is marked itself
    "stack of functions": (lambda x: torch.stack([x, 2 * x, x.relu()]).mean(0), True),
    "concatenated rectifiers": (
        lambda x: F.conv2d(torch.cat([x.relu(), (-x).relu()], 1), KERNEL.repeat(1, 2, 1, 1)),
        True,
    ),
    "concatenated with a constant": (lambda x: torch.cat([x, torch.zeros_like(x)], 1).mean(1), False),
    "upsampling, dropout, convolution": (lambda x: F.conv2d(F.dropout(F.interpolate(x, scale_factor=2)), KERNEL), True),
    "downsampling, convolution": (lambda x: F.conv2d(F.interpolate(x, scale_factor=0.5), KERNEL), False),
    "zeros around, convolution": (lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), KERNEL), False),
    "numbers around, maximum": (lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-1e9), 3), False),
    "fives around, convolution": (lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), value=5.0), KERNEL), False),
    "parts of copies": (lambda x: torch.cat(x.repeat(1, 2, 1, 1).chunk(2, 1), 1).sum(1), True),
    "parts put together": (lambda x: torch.cat(x.chunk(3, 1), 1).sum(1), False),
    "written over, mean": (lambda x: x.new_zeros(4, 3, 8, 8).copy_(x).mean(0), True),
    "written over, no copies": (lambda x: torch.zeros_like(x).copy_(x).mean(1), False),
    "one row written to several": (lambda x: _with_rows(x, [0, 1], x[:, :, 7:]).sum(2), True),
    "as many rows written": (lambda x: _with_rows(torch.zeros_like(x), [0, 1], x[:, :, 6:]).sum(2), False),
    "random bias": (
        lambda x: F.linear(torch.randn(4, 3, dtype=DOUBLE), KERNEL[0, :, :, 0], x[0, :, 0, 0]).sum(0),
        True,
    ),
    "random bias of one element each": (lambda x: torch.addmm(x[0, 0], x[0, 1], torch.eye(8).double()).sum(0), False),
    "filled, mean": (lambda x: torch.zeros_like(x).fill_(x.sum()).mean(1), True),
    "one channel twice": (lambda x: x[:, [0, 0, 2]].sum(1), True),
    "channels in another order": (lambda x: x[:, [2, 0, 1]].sum(1), False),
    "channels of a mask": (lambda x: x[:, torch.tensor([True, False, True])].sum(1), False),
    "edges of a graph": (lambda x: x.index_select(1, torch.tensor([0, 1, 2, 0, 1])).sum(1), True),
    "gathered": (lambda x: x.gather(1, torch.zeros(1, 3, 8, 8, dtype=torch.long)).sum(1), True),
    "copies scattered": (lambda x: x.new_zeros(1, 3, 8, 8).scatter_add(1, FIRST, x.repeat(1, 2, 1, 1)), True),
    "elements scattered": (lambda x: x.new_zeros(1, 3, 8, 8).scatter_add(1, FIRST[:, :3], x), False),
    "reflected border, convolution": (lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), KERNEL), True),
    "overlapping windows": (lambda x: F.unfold(x, 3, padding=1).mean(1), True),
    "windows side by side": (lambda x: F.unfold(x, 2, stride=2).mean(1), False),
    "expected value": (lambda x: (x.softmax(1) * torch.arange(3.0).view(3, 1, 1)).sum(1), True),
    "running sums, added": (lambda x: x.cumsum(-1).sum(-1), True),
    "differences, added": (lambda x: x.diff(dim=-1).sum(-1), True),
    "outer product, added": (lambda x: torch.outer(x[0, 0, 0], torch.arange(3.0, dtype=DOUBLE)).sum(1), True),
    "sorted, added": (lambda x: x.sort(-1).values[..., 4:].mean(-1), True),
    "joined with itself turned": (lambda x: torch.cat([x, x.flip(1)], 1).sum(1), True),
    "one slice twice": (lambda x: torch.cat([x[:, :2], x[:, :2]], 1).sum(1), True),
    "slices that overlap": (lambda x: torch.cat([x[:, :2], x[:, 1:]], 1).sum(1), True),
    "slices side by side": (lambda x: torch.cat([x[:, 1:], x[:, :1].relu()], 1).sum(1), False),
    "every second": (lambda x: torch.cat([x[..., ::2], x[..., 1::2]], 1).sum(1), False),
    "one row stacked twice": (lambda x: torch.stack([x[:, 0], x[:, 0]], 1).sum(1), True),
    "rows stacked": (lambda x: torch.stack([x[:, 0], x[:, 2]], 1).sum(1), False),
    "written twice": (lambda x: _interleaved(x, 0).sum(2), True),
    "written once": (lambda x: _interleaved(x, 1).sum(2), False),
    "overwritten": (lambda x: x.slice_scatter(x[:, :1], 1, 0, 1).sum(1), False),
    "row written over another": (lambda x: x.select_scatter(x[:, 0], 1, 2).sum(1), True),
    "rows copied": (lambda x: x.index_copy(1, torch.tensor([2]), x[:, :1]).sum(1), True),
    "scattered over itself": (lambda x: x.scatter(1, FIRST[:, :1] + 2, x[:, :1]).sum(1), True),
    "joined with its sum": (lambda x: torch.cat([x, x + torch.randn_like(x)], 1).sum(1), True),
    "joined with its maxima": (lambda x: torch.cat([x, F.max_pool2d(x, 3, 1, 1)], 1).sum(1), True),
    "maxima of parts": (lambda x: torch.cat([x[:, :1], F.max_pool2d(x[:, 1:], 3, 1, 1)], 1).sum(1), False),
    "joined behind weights": (lambda x: torch.cat([x, F.conv2d(x, KERNEL, padding=1)], 1).sum(1), False),
    "normalized, taken apart": (lambda x: torch.cat(F.layer_norm(x, (8,)).split([3, 5], -1), -1).sum(1), False),
    "meshgrid": (lambda x: torch.meshgrid(x[0, 0, 0], x[0, 1, 0], indexing="ij")[0].sum(1), True),
}
SHARED = {
    "scattered onto itself": lambda x: x.scatter_add(1, FIRST[:, :3], x),
    "put onto itself": lambda x: x.index_put((torch.tensor([0]),), x[:, [1, 0, 2]], accumulate=True),
}


@pytest.mark.parametrize("name", SHARED)
def test_sums_with_itself_are_marked(name: str) -> None:
    example = torch.zeros(1, 3, 8, 8, dtype=DOUBLE)
    program = vp.capture(Function(SHARED[name]), example)
    found = vp.propagate(program, standard(1, 3, 8, 8)), vp.coverage(program, example)
    for entries in (found[0].entries, found[1].entries):
        assert any("share a random ancestor" in reason for entry in entries for reason in entry.reasons)


def test_coverage_says_what_propagate_says_of_one_value_read_twice() -> None:
    model = Function(lambda x: torch.einsum("bij,bkj->bik", x, x))
    (covered,) = vp.coverage(model, torch.zeros(1, 3, 4, dtype=DOUBLE))
    (propagated,) = vp.propagate(model, standard(1, 3, 4)).entries
    assert covered.status == propagated.status == "approximate" and covered.reasons == propagated.reasons


@pytest.mark.parametrize("name", COPIES)
def test_sums_of_copies_are_marked(name: str) -> None:
    function, marked = COPIES[name]
    example = torch.zeros(1, 3, 8, 8, dtype=DOUBLE)
    program = vp.capture(Function(function), example)
    found = vp.propagate(program, standard(1, 3, 8, 8)), vp.coverage(program, example)
    for entries in (found[0].entries, found[1].entries):
        assert any("copies or functions of one another" in r for e in entries for r in e.reasons) == marked


def test_a_distribution_broadcasts_constants_beside_random_values() -> None:
    """As torch.distributions does: what was a constant index must not count as random."""

    class Policy(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            policy = torch.distributions.Categorical(logits=x)
            return policy.log_prob(torch.tensor([2])), x.log_softmax(-1)[:, 2]

    chosen, expected = vp.propagate(Policy(), standard(1, 4)).output
    torch.testing.assert_close(chosen.mean, expected.mean, rtol=1e-6, atol=0)
    assert 0 < float(chosen.var) < float("inf")
    assert len(vp.summary(Policy(), (4,)).rows) == 1


def test_missing_rules_are_raised_once_with_stub_and_place() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.logcumsumexp(x, -1)
            return torch.logcumsumexp(x, -1) + torch.fft.rfft(x).real.sum()

    with pytest.raises(vp.MissingRule) as caught:
        vp.propagate(Model(), standard(1, 4, dtype=torch.float32))
    message = str(caught.value)
    assert "aten.logcumsumexp.default, 2 time(s)" in message
    assert "aten.fft_rfft.default, 1 time(s)" in message
    assert "test_propagate.py" in message and "torch.logcumsumexp(x, -1)" in message
    assert "@vp.rule(torch.ops.aten.logcumsumexp)" in message
    assert {entry.op for entry in vp.coverage(Model(), torch.zeros(1, 4)).missing} >= {"aten.logcumsumexp.default"}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.one_hot(x.argmax(-1), 4) * x,
        lambda x: x.norm(p=3, dim=-1),
        lambda x: x.gather(1, (x > 0).long()),
        lambda x: F.grid_sample(x.view(1, 1, 2, 2), x.view(1, 2, 1, 2), mode="bicubic", align_corners=False),
    ],
    ids=["argmax", "norm of order 3", "random index", "bicubic at a random place"],
)
def test_what_a_rule_cannot_do_is_missing_before_anything_runs(function) -> None:
    """Neither passed over as a constant nor found out halfway: coverage and propagate agree."""
    assert vp.coverage(Function(function), torch.zeros(1, 4)).missing
    with pytest.raises(vp.MissingRule):
        vp.propagate(Function(function), standard(1, 4, dtype=torch.float32))


def test_sampling_is_opt_in_and_marked() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    result = vp.propagate(
        Function(lambda x: torch.nanmedian(x, -1)[0]), standard(1, 2, dtype=torch.float32), on_missing="sample"
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert result.output.mean.item() == pytest.approx(-1 / math.sqrt(math.pi), abs=0.1)  # the lower of two
    assert [entry.status for entry in result.by_op()["aten.nanmedian.dim"]] == ["sampled"]
    with pytest.raises(ValueError, match="on_missing"):
        vp.propagate(nn.ReLU(), standard(1, 2), on_missing="guess")  # type: ignore[arg-type]


def test_complex_numbers_are_not_sampled() -> None:
    """Their real parts alone would give wrong moments of what is computed from them."""
    model = Function(lambda x: torch.fft.fft(x).abs())
    with pytest.raises(vp.MissingRule, match=r"aten\.fft_fft\.default gives complex numbers"):
        vp.propagate(model, standard(1, 4, dtype=torch.float32), on_missing="sample")


def test_a_user_adds_an_operation() -> None:
    @torch.library.custom_op("varprop_test::triple", mutates_args=())
    def triple(x: Tensor) -> Tensor:
        return 3 * x

    @triple.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    key = torch.ops.varprop_test.triple

    @vp.rule(key)
    def triple_rule(x: vp.Moments) -> vp.Moments:
        return vp.Moments(3 * x.mean, 9 * x.var)

    try:
        output = vp.propagate(Function(lambda x: torch.ops.varprop_test.triple(x)), standard(1, 2)).output
        assert (output.var == 9).all()
        with pytest.raises(ValueError, match="already has a rule"):
            vp.structural(key)
    finally:
        unregister(key)


def test_a_module_class_is_kept_as_a_leaf() -> None:
    class Gate(nn.Module):
        """Branches on its input, so it could not be traced."""

        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor, offset: float = 0.0) -> tuple[Tensor, Tensor]:
            return (self.gain * x + offset, x) if x.sum() > 0 else (x, x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate, self.last = nn.Linear(3, 3), Gate(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.gate(self.first(x), offset=1.0)
            return self.last(F.relu(a)) + self.last(b)

    model = Model()
    with pytest.raises(vp.CaptureError, match=r"branches on the values.*vp.rule\(ThatModule\)"):
        vp.propagate(model, standard(1, 3, dtype=torch.float32))

    @vp.rule(Gate, approximate="takes the first branch")
    def gate(module: Gate, x: vp.Moments, offset: float = 0.0) -> tuple[vp.Moments, vp.Moments]:
        return vp.Moments(module.gain * x.mean + offset, module.gain**2 * x.var), x

    try:
        result = vp.propagate(model, standard(1, 3, dtype=torch.float32))
        torch.testing.assert_close(result["gate"].mean, 2 * result["first"].mean + 1)
        assert "Gate" in result.by_op() and "forward" not in vars(model.gate)
        assert result.by_op()["Gate"][0].reasons == ("takes the first branch",)
    finally:
        unregister(Gate)


def test_a_rule_that_is_registered_anew_counts_for_a_captured_program() -> None:
    program, given = vp.capture(nn.ReLU(), torch.zeros(1, 3)), standard(1, 3, dtype=torch.float32)
    first = vp.propagate(program, given).output
    removed = registered()[torch.ops.aten.relu]
    unregister(torch.ops.aten.relu)
    try:
        with pytest.raises(vp.MissingRule):
            vp.propagate(program, given)

        @vp.rule(torch.ops.aten.relu)
        def seven(x: vp.Moments) -> vp.Moments:
            return vp.Moments(torch.full_like(x.mean, 7.0), x.var)

        assert (vp.propagate(program, given).output.mean == 7).all()
    finally:
        unregister(torch.ops.aten.relu)
        registry._register((torch.ops.aten.relu,), removed)
    torch.testing.assert_close(vp.propagate(program, given).output.mean, first.mean)


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (lambda x: x.mean, "a tensor"),
        (lambda x: (x.mean, x.var), "a tensor"),
        (lambda x: vp.Moments(x.mean[:, :2], x.var[:, :2]), r"moments of shape \(1, 2\)"),
        (lambda x: vp.Moments(x.mean[0], x.var[0]), r"moments of shape \(3,\)"),
    ],
    ids=["mean", "pair", "too short", "an axis less"],
)
def test_what_a_rule_must_not_return_is_refused(returned: Callable[[vp.Moments], object], found: str) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    vp.rule(Twice)(lambda module, x: returned(x))
    try:
        with pytest.raises(vp.VarpropError, match=rf"rule of Twice returned {found}, .*of shape \(1, 3\)"):
            vp.propagate(nn.Sequential(Twice(), nn.ReLU()), standard(1, 3))
    finally:
        unregister(Twice)


@pytest.mark.parametrize("key", ["relu", torch.relu, F.relu, nn.Linear(2, 2)], ids=["name", "torch", "F", "module"])
def test_rules_of_what_no_graph_holds_are_refused(key: object) -> None:
    with pytest.raises(TypeError, match=r"Rules belong to operations such as torch.ops.aten.relu"):
        vp.elementwise(key)
    with pytest.raises(TypeError, match="Name the operations"):
        vp.rule()(lambda x: x)


def test_kinks_may_depend_on_arguments_given_by_name() -> None:
    @torch.library.custom_op("varprop_test::above", mutates_args=())
    def above(x: Tensor, *, start: float) -> Tensor:
        return (x - start).relu()

    above.register_fake(lambda x, start: torch.empty_like(x))
    key = torch.ops.varprop_test.above
    vp.elementwise(key, kinks=lambda start: (start,))
    try:
        output = vp.propagate(Function(lambda x: key(x, start=0.7)), standard(1, 2)).output
        expected = vp.propagate(Function(lambda x: torch.relu(x - 0.7)), standard(1, 2)).output
        torch.testing.assert_close((output.mean, output.var), (expected.mean, expected.var))
    finally:
        unregister(key)


class Pair(nn.Module):
    """Two outputs, of which the second is computed first."""

    def __init__(self, order: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> object:
        second = 3 * x
        return self.order(2 * x, second)


ORDERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "tuple": lambda first, second: (first, second),
    "list": lambda first, second: [first, second],
    "dict": lambda first, second: {"a": first, "b": second},
    "a constant first": lambda first, second: (torch.zeros(2), first, second),
    "nested": lambda first, second: ((first,), None, second),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_module_that_returns_several_has_the_statistics_of_the_first(name: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair(ORDERS[name])

        def forward(self, x: Tensor) -> list[Tensor]:
            return [t + 1 for _ in range(2) for t in pytree.tree_leaves(self.pair(x))[::-1] if t is not None]

    result = vp.propagate(Outer(), standard(1, 2))
    assert [call.std.unique().item() for call in result.calls["pair"]] == [2.0, 2.0]
    assert result["pair"].std.unique().item() == 2.0
    assert vp.propagate(Pair(ORDERS[name]), standard(1, 2))[""].std.unique().item() == 2.0
    assert not any("alias" in entry.op for entry in result.entries)


def test_derivatives_are_recorded_where_they_are_asked_for() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    moments = vp.Moments(torch.zeros(1, 3), torch.ones(1, 3))
    assert not any(m.var.requires_grad for m in vp.propagate(model, moments).by_module().values())
    vp.propagate(model, moments, gradients=True).output.var.sum().backward()
    assert model[0].weight.grad is not None
    var = torch.ones(1, 3, requires_grad=True)
    assert vp.propagate(model, vp.Moments(torch.zeros(1, 3), var)).output.var.requires_grad
    with torch.no_grad():
        assert not vp.propagate(model, moments, gradients=True).output.var.requires_grad

    program = vp.capture(model, (1, 3))

    def total(weight: Tensor) -> Tensor:
        with torch.nn.utils.stateless._reparametrize_module(model, {"0.weight": weight}):
            return vp.propagate(program, moments).output.var.sum()

    expected = model[0].weight.grad
    torch.testing.assert_close(torch.func.grad(total)(model[0].weight.detach()), expected)


def test_looking_changes_nothing() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU(), nn.Flatten(), nn.LSTM(16, 3)
    )
    model.train()
    model[1].eval()
    seen: list[object] = []
    model[0].register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    flat = [id(weight) for weight in model[5]._flat_weights]
    state = torch.get_rng_state()
    vp.propagate(model, standard(1, 3, 4, 4, dtype=torch.float32))
    vp.coverage(model, torch.zeros(1, 3, 4, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    assert attributes == [set(vars(module)) for module in model.modules()]
    assert flat == [id(weight) for weight in model[5]._flat_weights]
    assert not seen


def test_one_capture_follows_the_parameters() -> None:
    model = nn.Linear(3, 2)
    program = vp.capture(model, torch.zeros(1, 3))
    first = vp.propagate(program, standard(1, 3, dtype=torch.float32)).output
    with torch.no_grad():
        model.weight.mul_(2)
    second = vp.propagate(program, standard(1, 3, dtype=torch.float32)).output
    torch.testing.assert_close(second.var, 4 * first.var)


def test_propagation_is_differentiable_in_the_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    program = vp.capture(model, torch.zeros(1, 3, dtype=DOUBLE))

    def statistics(weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.nn.utils.stateless._reparametrize_module(model, {"0.weight": weight}):
            output = vp.propagate(program, standard(1, 3), gradients=True).output
            return output.mean, output.var

    assert torch.autograd.gradcheck(statistics, (model[0].weight.detach().clone().requires_grad_(),))


@pytest.mark.parametrize(
    ("model", "given", "example", "message"),
    [
        (nn.Linear(3, 2), standard(1, 4, dtype=torch.float32), None, "could not be run on the example"),
        (
            nn.Linear(3, 2),
            standard(1, 2, dtype=torch.float32),
            torch.zeros(1, 3),
            r"moments of shape \(1, 2\).*sees \(1, 3\)",
        ),
        (nn.Linear(3, 2), standard(3, dtype=torch.float32), torch.zeros(1, 3), r"moments of shape \(3,\)"),
        (nn.Linear(3, 2), standard(1, 3), None, r"Input 0 is float64.*parameters are float32.*to\(torch.float32\)"),
        (nn.Embedding(5, 2), standard(1, 3), torch.zeros(1, 3, dtype=torch.long), r"whole numbers.*vp.Tokens"),
        (nn.Embedding(5, 2), vp.Tokens.uniform(5), None, "give one, such as example="),
        (nn.ReLU(), (standard(1, 2), standard(1, 2)), torch.zeros(1, 2), r"takes 1 tensor input\(s\), but 2"),
        (nn.Linear(3, 2), torch.zeros(8, 3), None, r"No input is random.*did you mean vp.input_moments\(x\)"),
        (nn.Linear(3, 2), torch.zeros(8, 3), torch.zeros(8, 3), r"No input is random"),
        (nn.Embedding(5, 2), torch.zeros(1, 3, dtype=torch.long), None, r"No input is random.*vp.Tokens"),
        (nn.ReLU(), {"inputs": standard(1, 2)}, torch.zeros(1, 2), "has no input 'inputs': .* inputs are 'input'"),
        (Difference(), {"y": standard(1, 2)}, PAIR, "also takes 'x': its tensor inputs are 'x', 'y'"),
        (Difference(), {"y": standard(1, 2), "x": standard(1, 2), "z": standard(1, 2)}, PAIR, "has no input 'z'"),
        (Function(lambda x: x @ x), standard(1, 3, 5), None, "could not be run on the example"),
        (Function(lambda x: x if x.sum() > 0 else -x), standard(1, 3), None, "branches on the values"),
    ],
)
def test_bad_input_gets_one_sentence(
    model: nn.Module, given: object, example: object, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(vp.CaptureError, match=message) as caught:
        vp.propagate(model, given, example)
    assert "Traceback" not in str(caught.value)
    assert capfd.readouterr() == ("", ""), "torch's own account of the failure"


@pytest.mark.parametrize("captured", [dict, tuple])
def test_inputs_are_matched_by_name(captured: type) -> None:
    """In whatever order they are given, and however the example was."""
    x, y = vp.Moments(*(torch.full((1, 2), v, dtype=DOUBLE) for v in (5.0, 1.0))), standard(1, 2)
    example = PAIR if captured is dict else tuple(PAIR.values())
    for given in ({"x": x, "y": y}, {"y": y, "x": x}, (x, y)):
        assert (vp.propagate(Difference(), given, example).output.mean == 5.0).all()
    nested = Function(lambda pair: pair["x"] - pair["y"])
    for pair in ({"x": x, "y": y}, {"y": y, "x": x}):
        assert (vp.propagate(nested, (pair,), (PAIR,)).output.mean == 5.0).all()


def test_constants_beside_moments_by_name() -> None:
    model = Function(lambda x, mask=None, times=2: x * mask * times)
    given = {"mask": torch.tensor([[1.0, 0.0]], dtype=DOUBLE), "x": standard(1, 2)}
    output = vp.propagate(model, given, {"x": PAIR["x"], "mask": PAIR["y"], "times": 3}).output
    assert output.var.tolist() == [[9.0, 0.0]]


def test_batch_norm_in_training_mode_normalizes_by_the_batch() -> None:
    """Mean and variance of its output are bias and squared weight, whatever enters; the running statistics stay."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5)
    )
    nn.init.uniform_(model[1].weight)
    nn.init.normal_(model[1].bias)
    found = vp.propagate(model, vp.Moments(3.0, 40.0), (1, 3, 6, 6))
    assert torch.allclose(found["1"].mean.flatten(), model[1].bias)
    assert torch.allclose(found["1"].var.flatten(), model[1].weight.square(), rtol=1e-4)
    assert torch.allclose(found["5"].var, torch.ones(1, 5), rtol=1e-3) and bool((found["5"].mean.abs() < 1e-5).all())
    assert not model[1].running_mean.any() and model.training
    assert any("infinitely many" in reason for e in vp.coverage(model, (1, 3, 6, 6)) for reason in e.reasons)


def test_batch_norm_in_training_mode_agrees_with_a_large_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8))
    x = torch.randn(40000, 6)
    seen = model(x).detach()
    found = vp.propagate(model, vp.Moments(0.0, 1.0), (1, 6)).output
    assert torch.allclose(found.mean, seen.mean(0, keepdim=True), atol=0.02)
    assert torch.allclose(found.std, seen.std(0, keepdim=True), rtol=0.02)


def test_nan_in_a_weight_is_found_at_its_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[1, 2] = float("nan")
    with pytest.raises(vp.VarpropError, match=r"NaN came out of aten.linear.default in module '0'"):
        vp.propagate(model, standard(1, 3, dtype=torch.float32))


class HandWritten(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        if self.kind == "rms sqrt":
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        if self.kind == "layer var":
            return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        if self.kind == "layer":
            centred = x - x.mean(-1, keepdim=True)
            return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        if self.kind == "unit linalg":
            return x / torch.linalg.norm(x, dim=-1, keepdim=True) * x.shape[-1] ** 0.5
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5


@pytest.mark.parametrize("kind", ["rms", "rms sqrt", "layer var", "layer", "unit", "unit linalg"])
def test_hand_written_normalizations_are_recognised(kind: str) -> None:
    torch.manual_seed(0)
    moments = vp.Moments(torch.randn(1, 64, dtype=DOUBLE), torch.rand(1, 64, dtype=DOUBLE))
    output = vp.propagate(HandWritten(kind), moments).output
    whole = nn.LayerNorm(64, elementwise_affine=False) if kind.startswith("layer") else nn.RMSNorm(64, eps=1e-5)
    expected = vp.propagate(whole.double(), moments).output
    torch.testing.assert_close(output.mean, expected.mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(output.var, expected.var, rtol=1e-4, atol=1e-6)


def test_what_a_recognised_expression_replaces_is_gone() -> None:
    program = vp.capture(Function(lambda x: x / (1 + x.abs())), torch.zeros(2, 3))
    assert len(program.nodes) == 1


@pytest.mark.parametrize(("pool", "shape"), [(nn.LPPool2d(2, 2), (1, 2, 6, 4)), (nn.LPPool1d(2, 3), (1, 2, 9))])
def test_power_average_pooling(pool: nn.Module, shape: tuple[int, ...]) -> None:
    """The root of a sum of squares as that of a log-normal variable: std 10 % low of four values, 11 % of three."""
    torch.manual_seed(0)
    x = vp.Moments(0.5 * torch.randn(shape, dtype=DOUBLE), torch.ones(shape, dtype=DOUBLE))
    result = vp.propagate(pool, x)
    drawn = pool(x.mean + torch.randn(40_000, *shape[1:], dtype=DOUBLE))
    std = drawn.std(0)
    assert ((result.output.mean[0] - drawn.mean(0)).abs() < 0.06 * std).all()
    assert ((result.output.std[0] / std - 1).abs() < 0.13).all()
    assert [entry.status for entry in result.entries] == ["exact", "exact", "exact", "exact", "approximate"]


def test_power_average_pooling_of_odd_order_is_refused() -> None:
    """Its root is NaN wherever the average is negative, in torch itself."""
    with pytest.raises(vp.VarpropError, match="NaN came out"):
        vp.propagate(nn.LPPool2d(3, 2), standard(1, 2, 4, 4))


def test_dropout_counts_in_training_and_not_in_evaluation() -> None:
    moments = vp.Moments(torch.full((1, 3), 2.0), torch.ones(1, 3))
    model = nn.Dropout(0.25)
    torch.testing.assert_close(vp.propagate(model, moments).output.var, torch.full((1, 3), (1 + 0.25 * 4) / 0.75))
    torch.testing.assert_close(vp.propagate(model.eval(), moments).output.var, torch.ones(1, 3))


def test_multihead_attention_module() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    moments = standard(1, 5, 16, dtype=torch.float32)
    output = vp.propagate(Function(lambda x: model(x, x, x, need_weights=False)[0]), moments).output
    with torch.no_grad():
        x = torch.randn(8192, 5, 16)
        drawn = model(x, x, x, need_weights=False)[0]
    assert (output.std / drawn.std(0) - 1).abs().median() < 0.1


def test_a_parameter_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].bias[1] = torch.nan
    with pytest.raises(vp.VarpropError, match=r"in module '2'.*; 2\.bias of the model has values that are not finite"):
        vp.propagate(model, vp.Moments(torch.zeros(1, 3), torch.ones(1, 3)))
