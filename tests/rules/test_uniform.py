"""A uniform axis stored once gives what the same statistics written out give (away from borders)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import varprop  # noqa: F401  (fills the registry)
from varprop import Moments, Tokens
from varprop.rules.registry import lookup

aten = torch.ops.aten


def uniform(*full: int, axes: Sequence[int]) -> Moments:
    """Random statistics that do not change along the axes."""
    torch.manual_seed(0)
    shape = [1 if axis in axes else extent for axis, extent in enumerate(full)]
    var = torch.rand(shape, dtype=torch.float64) + 0.2
    return Moments(torch.randn(shape, dtype=torch.float64), var, full)


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def apply(op: Any, x: Any, *args: Any, **kwargs: Any) -> Moments:
    found = lookup(op)
    assert found is not None
    assert found.function is not None
    result = found.function(x, *args, **kwargs)
    return result[0] if isinstance(result, tuple) else result


def note(op: Any, x: Any, *args: Any) -> str | None:
    found = lookup(op)
    assert found is not None
    return found.approximate(x, *args) if callable(found.approximate) else found.approximate


def tolerance(op: Any) -> dict[str, float]:
    """Rounding, or for maxima the accuracy of their quadrature."""
    bound = 1e-7 if "max" in str(op) or "min" in str(op) else 1e-9
    return {"rtol": bound, "atol": bound}


def middle(x: Tensor, axes: Sequence[int], width: int) -> Tensor:
    """Positions away from both ends of the axes."""
    for axis in axes:
        start = (x.shape[axis] - width) // 2
        x = x.narrow(axis, start, width)
    return x


def agree(op: Any, x: Moments, *args: Any, inside: Sequence[int] = (), width: int = 1) -> Moments:
    """Compact against dense; with `inside`, in the middle of those axes, pooled over `width` positions.

    Where the rule says that it pools all positions, the border included, it is held to that.
    """
    compact, dense = apply(op, x, *args), apply(op, x.dense(), *args)
    said = note(op, x, *args) or ""
    everywhere = "are pooled" in said and "border" in said
    mean, var = (t if everywhere else middle(t, inside, width) for t in (dense.mean, dense.var))
    if inside:
        centre = mean.mean(tuple(inside), keepdim=True)
        mean, var = centre, (var + (mean - centre).square()).mean(tuple(inside), keepdim=True)
    torch.testing.assert_close(compact.mean.expand_as(mean), mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(compact.var.expand_as(var), var, rtol=1e-9, atol=1e-9)
    return compact


def test_linear_keeps_uniform_rows_and_writes_out_features() -> None:
    assert agree(aten.linear.default, uniform(4, 5, axes=[0]), weight(3, 5), weight(3)).shape == (1, 3)
    assert agree(aten.linear.default, uniform(4, 5, axes=[1]), weight(3, 5)).shape == (4, 3)
    assert agree(aten.bilinear.default, uniform(4, 5, axes=[0]), weight(4, 3), weight(2, 5, 3)).shape == (
        4,
        2,
    )


CONVOLUTIONS = [
    (aten.conv1d.default, (2, 4, 16), (6, 4, 3), [2], [1], [1], 1),
    (aten.conv1d.default, (2, 4, 16), (6, 2, 3), [1], [2], [2], 2),
    (aten.conv2d.default, (2, 4, 16, 16), (6, 4, 3, 2), [2, 1], [1, 1], [1, 1], 1),
    (aten.conv2d.default, (2, 4, 16, 16), (4, 1, 3, 3), [1, 1], [1, 2], [1, 2], 4),
    (aten.conv3d.default, (1, 2, 10, 10, 10), (3, 2, 3, 2, 3), [1, 2, 1], [1, 0, 1], [1, 1, 2], 1),
]


@pytest.mark.parametrize(("op", "full", "kernel", "stride", "padding", "dilation", "groups"), CONVOLUTIONS)
def test_convolution_on_uniform_axes(
    op: Any, full: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> None:
    spatial = list(range(2, len(full)))
    for axes in (spatial, [0, *spatial], spatial[-1:], [1, *spatial], [0]):
        x, inside = uniform(*full, axes=axes), [axis for axis in axes if axis > 1]
        args = (weight(*kernel), weight(kernel[0]), stride, padding, dilation, groups)
        result = agree(op, x, *args, inside=inside)
        assert all(result.shape[axis] == 1 for axis in inside)
        padded = any(padding[axis - 2] > 0 for axis in inside)
        assert (note(op, x, *args) is not None) == padded


@pytest.mark.parametrize("axes", [[2, 3], [2], [3]])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_convolution_with_named_padding(axes: list[int], padding: str) -> None:
    x = uniform(1, 3, 12, 12, axes=axes)
    args = (weight(4, 3, 3, 2), None, [1, 1], padding, [1, 2], 1)
    agree(aten.conv2d.padding, x, *args, inside=axes)
    assert (note(aten.conv2d.padding, x, *args) is not None) == (padding == "same")


def test_an_axis_of_extent_one_is_convolved_with_its_padding() -> None:
    x = uniform(2, 3, 1, 1, axes=[])
    args = (weight(4, 3, 3, 3), None, [1, 1], [1, 1])
    centre = weight(4, 3, 3, 3)[:, :, 1, 1]
    result = apply(aten.conv2d.default, x, *args)
    torch.testing.assert_close(result.mean[..., 0, 0], x.mean[..., 0, 0] @ centre.T)
    assert note(aten.conv2d.default, x, *args) is None


def test_unbatched_convolution() -> None:
    x = uniform(3, 9, 9, axes=[1, 2])
    agree(aten.conv2d.default, x, weight(4, 3, 3, 3), weight(4), inside=[1, 2])


def test_random_weights_on_uniform_axes() -> None:
    x, kernel = uniform(1, 2, 9, 9, axes=[2, 3]), uniform(3, 2, 3, 3, axes=[])
    agree(aten.conv2d.default, x, kernel, inside=[2, 3])


TRANSPOSED = [
    (aten.conv_transpose1d.default, (2, 4, 16), (4, 3, 3), [1], [1], [0], 1, [1]),
    (aten.conv_transpose1d.default, (2, 4, 16), (4, 3, 4), [2], [1], [0], 2, [1]),
    (aten.conv_transpose1d.default, (2, 4, 3), (4, 3, 4), [2], [1], [0], 1, [1]),
    (aten.conv_transpose1d.default, (2, 4, 5), (4, 3, 2), [3], [0], [2], 1, [1]),
    (aten.conv_transpose1d.default, (2, 4, 5), (4, 3, 3), [2], [0], [1], 1, [3]),
    (aten.conv_transpose1d.default, (2, 4, 4), (4, 3, 5), [1], [3], [0], 4, [1]),
    (aten.conv_transpose2d.input, (2, 4, 12, 12), (4, 3, 3, 2), [2, 2], [1, 0], [1, 0], 1, [1, 1]),
    (aten.conv_transpose2d.input, (2, 4, 4, 5), (4, 2, 3, 3), [2, 2], [1, 1], [1, 1], 2, [1, 3]),
    (aten.conv_transpose2d.input, (1, 6, 4, 4), (6, 3, 4, 4), [2, 2], [1, 1], [0, 0], 1, [1, 1]),
    (aten.conv_transpose2d.input, (1, 3, 2, 2), (3, 2, 16, 16), [16, 16], [0, 0], [0, 0], 1, [1, 1]),
    (
        aten.conv_transpose3d.input,
        (1, 2, 3, 4, 2),
        (2, 3, 2, 3, 2),
        [2, 1, 2],
        [0, 1, 0],
        [0, 0, 1],
        1,
        [1, 1, 2],
    ),
]


@pytest.mark.parametrize(("op", "full", "kernel", "stride", "padding", "extra", "groups", "dilation"), TRANSPOSED)
def test_transposed_convolution_pools_all_positions(
    op: Any, full: Any, kernel: Any, stride: Any, padding: Any, extra: Any, groups: int, dilation: Any
) -> None:
    spatial = list(range(2, len(full)))
    for axes in (spatial, [0, *spatial], spatial[:1], [1, *spatial]):
        x, inside = uniform(*full, axes=axes), [axis for axis in axes if axis > 1]
        args = (weight(*kernel), weight(kernel[1] * groups), stride, padding, extra, groups, dilation)
        result = agree(op, x, *args, inside=inside)
        assert all(result.shape[axis] == 1 for axis in inside)


def test_transposed_convolution_says_when_it_pools() -> None:
    x = uniform(1, 4, 6, axes=[2])
    op, kernel = aten.conv_transpose1d.default, weight(4, 3, 3)
    assert note(op, x, kernel, None, [2], [1]) is not None
    assert note(op, x, kernel, None, [1], [0]) is not None  # the border
    assert note(op, x, kernel, None, [1], [2]) is None  # only whole windows are left
    assert note(op, x, weight(4, 3, 1), None, [1], [0]) is None
    agree(op, x, uniform(4, 3, 3, axes=[]), uniform(3, axes=[]), [2], [1], inside=[2])


def test_transposed_convolution_against_sampling() -> None:
    """The second layer of a DCGAN generator, 4x4 -> 8x8: what batch norm would measure."""
    x, kernel = uniform(1, 8, 4, 4, axes=[2, 3]), weight(8, 2, 4, 4)
    found = apply(aten.conv_transpose2d.input, x, kernel, None, [2, 2], [1, 1])
    torch.manual_seed(0)
    drawn = x.mean + x.std * torch.randn(20_000, 8, 4, 4, dtype=torch.float64)
    out = torch.conv_transpose2d(drawn, kernel, None, 2, 1)
    each = out.mean((2, 3))  # positions of one draw are correlated, draws are not
    assert ((out.mean((0, 2, 3)) - found.mean.flatten()).abs() < 5 * each.std(0) / 20_000**0.5).all()
    squares = (out - found.mean).square().mean((2, 3))
    assert ((squares.mean(0) - found.var.flatten()).abs() < 5 * squares.std(0) / 20_000**0.5).all()


def test_generic_convolution_dispatches() -> None:
    x = uniform(1, 3, 9, axes=[2])
    plain = (weight(4, 3, 3), None, [1], [1], [1], False, [0], 1)
    turned = (weight(3, 4, 4), None, [2], [1], [1], True, [0], 1)
    agree(aten.convolution.default, x, *plain, inside=[2])
    agree(aten.convolution.default, x, *turned, inside=[2])
    assert note(aten.convolution.default, x, *plain) != note(aten.convolution.default, x, *turned)


def test_embedding_of_tokens_is_uniform_over_positions() -> None:
    table, chance = weight(5, 3), torch.rand(5, dtype=torch.float64)
    result = apply(aten.embedding.default, table, Tokens(chance, (2, 7)))
    share = chance / chance.sum()
    assert result.shape == (1, 1, 3)
    torch.testing.assert_close(result.mean[0, 0], share @ table)
    torch.testing.assert_close(result.var[0, 0], share @ table.square() - (share @ table).square())


AVERAGES: list[tuple[Any, ...]] = [
    (aten.avg_pool1d.default, (2, 3, 12), [2]),
    (aten.avg_pool2d.default, (2, 3, 12, 12), [3, 2], [2, 2], [1, 1]),
    (aten.avg_pool2d.default, (2, 3, 12, 12), [3, 3], [2, 2], [1, 1], True, False),
    (aten.avg_pool2d.default, (2, 3, 12, 12), [3, 3], [2, 2], [0, 0], False, True, 5),
    (aten.avg_pool3d.default, (1, 2, 6, 6, 6), [2, 2, 2]),
    (aten.max_pool1d.default, (2, 3, 12), [2]),
    (aten.max_pool2d.default, (2, 3, 8, 8), [3, 3], [2, 2], [1, 1]),
    (aten.max_pool2d.default, (1, 2, 8, 8), [2, 2], [1, 1], [0, 0], [2, 1]),
    (aten.max_pool2d_with_indices.default, (1, 2, 6, 6), [2, 2]),
    (aten.max_pool3d.default, (1, 2, 4, 4, 4), [2, 2, 2]),
]


@pytest.mark.parametrize("case", AVERAGES, ids=str)
def test_pooling_on_uniform_axes(case: tuple[Any, ...]) -> None:
    op, full, *args = case
    spatial = list(range(2, len(full)))
    for axes in (spatial, [0, *spatial], spatial[-1:], [0]):
        x, inside = uniform(*full, axes=axes), [axis for axis in axes if axis > 1]
        compact, dense = apply(op, x, *args), apply(op, x.dense(), *args)
        assert all(compact.shape[axis] == 1 for axis in inside)
        for part in ("mean", "var"):
            expected = middle(getattr(dense, part), inside, 1)
            actual = getattr(compact, part).expand_as(expected)
            torch.testing.assert_close(actual, expected, **tolerance(op))
        padded = len(args) > 2 and max(args[2]) > 0
        assert (note(op, x, *args) is not None) == bool(padded and inside)


def _sizes(extent: int, count: int) -> set[int]:
    return {-(-(i + 1) * extent // count) - i * extent // count for i in range(count)}


@pytest.mark.parametrize("size", [[1, 1], [3, 2], [4, 5], [6, 6], [7, 9], [4, 3]])
@pytest.mark.parametrize("axes", [[2, 3], [0, 2], [3]])
def test_adaptive_pooling_on_uniform_axes(size: list[int], axes: list[int]) -> None:
    """Exact where all windows are of one size, else pooled over them; uniform axes stay uniform."""
    x, inside = uniform(2, 3, 6, 6, axes=axes), [axis for axis in axes if axis > 1]
    for op in (aten.adaptive_avg_pool2d.default, aten.adaptive_max_pool2d.default):
        compact, dense = apply(op, x, size), apply(op, x.dense(), size)
        assert all(compact.shape[axis] == 1 for axis in inside)
        mean = dense.mean.mean(inside, keepdim=True)
        var = (dense.var + (dense.mean - mean).square()).mean(inside, keepdim=True)
        torch.testing.assert_close(compact.mean.expand_as(mean), mean, **tolerance(op))
        torch.testing.assert_close(compact.var.expand_as(var), var, **tolerance(op))
        alike = all(len(_sizes(6, size[axis - 2])) == 1 for axis in inside)
        assert (note(op, x, size) is None) == alike
        if alike:
            torch.testing.assert_close(compact.var.expand_as(dense.var), dense.var, **tolerance(op))


REDUCTIONS: list[tuple[Any, ...]] = [
    (aten.sum.default,),
    (aten.sum.dim_IntList, [1, -1]),
    (aten.mean.default,),
    (aten.mean.dim, [1], True),
    (aten.cumsum.default, 1),
    (aten.cumprod.default, 1),
    (aten.diff.default, 1, 1),
    (aten.linalg_vector_norm.default, 1, [1, 2]),
    (aten.amax.default, [1, 2], True),
    (aten.amax.default, [1]),
    (aten.amin.default, [-1]),
    (aten.max.dim, 2, True),
    (aten.prod.dim_int, 1),
    (aten.var.dim, [1, 2]),
    (aten.var.default,),
    (aten.std.dim, [1], False, True),
    (aten.var_mean.dim, [2]),
]


@pytest.mark.parametrize("case", REDUCTIONS, ids=str)
@pytest.mark.parametrize("axes", [[1], [1, 2], [0, 1], [2], [0, 1, 2]])
def test_reduction_over_uniform_axes(case: tuple[Any, ...], axes: list[int]) -> None:
    op, *args = case
    x = uniform(2, 3, 4, axes=axes)
    compact, dense = apply(op, x, *args), apply(op, x.dense(), *args)
    torch.testing.assert_close(compact.mean.expand_as(dense.mean), dense.mean, **tolerance(op))
    torch.testing.assert_close(compact.var.expand_as(dense.var), dense.var, **tolerance(op))


@pytest.mark.parametrize("op", [aten.upsample_nearest2d.vec, aten._upsample_nearest_exact2d.vec], ids=str)
@pytest.mark.parametrize("axes", [[2, 3], [3], [0]])
def test_nearest_keeps_uniform_axes(op: Any, axes: list[int]) -> None:
    x = uniform(2, 3, 4, 5, axes=axes)
    result = agree(op, x, None, [2.0, 1.5])
    assert all(result.shape[axis] == 1 for axis in axes)


@pytest.mark.parametrize(
    "op",
    [aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec, aten._upsample_bilinear2d_aa.vec],
    ids=str,
)
@pytest.mark.parametrize("axes", [[2, 3], [2], [0, 3]])
def test_interpolation_pools_over_uniform_axes(op: Any, axes: list[int]) -> None:
    x, inside = uniform(2, 3, 6, 6, axes=axes), [axis for axis in axes if axis > 1]
    size = [9, 8]
    compact, dense = apply(op, x, size, False, None), apply(op, x.dense(), size, False, None)
    mean, var = (t.mean(inside, keepdim=True) for t in (dense.mean, dense.var))
    torch.testing.assert_close(compact.mean.expand_as(mean), mean)
    torch.testing.assert_close(compact.var.expand_as(var), var)
    assert note(op, x, size, False, None) is not None
    assert note(op, x.dense(), size, False, None) is None


def test_grid_and_overlapping_sums_write_out() -> None:
    grid = torch.rand(2, 3, 3, 2, dtype=torch.float64) * 2.4 - 1.2
    agree(aten.grid_sampler.default, uniform(2, 3, 5, 4, axes=[0, 2, 3]), grid, 0, 0, False)
    agree(aten.col2im.default, uniform(2, 8, 9, axes=[1, 2]), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])


def test_dropout_keeps_uniform_axes() -> None:
    x = uniform(2, 3, 5, axes=[0, 2])
    for op in (aten.dropout.default, aten.alpha_dropout.default):
        assert agree(op, x, 0.3, True).shape == x.shape
    assert agree(aten.rrelu.default, x, 0.1, 0.3, True).shape == x.shape
