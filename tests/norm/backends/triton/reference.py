"""Layouts to try, and both passes in float64 by autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from varprop.norm.fold.layout import Channels, Function, Layout, Rows, Step

EPS = 1e-6
NONE = torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True)
class Shape:
    """One site."""

    per_group: int
    channels: int
    kernel: tuple[int, ...] = ()
    groups: int = 1
    transposed: bool = False
    channels_last: bool = False
    padded: bool = False
    centred: bool = False
    dtype: torch.dtype = torch.float32


def tap_matrix(shape: Shape, generator: torch.Generator) -> Tensor:
    """A share for every tap, and a spread of two columns if padded."""
    taps = int(torch.Size(shape.kernel).numel())
    if not shape.padded:
        return torch.ones(taps, 1, dtype=torch.float64)
    share = 0.5 + 0.5 * torch.rand(taps, 1, dtype=torch.float64, generator=generator)
    return torch.cat([share, 0.3 * torch.randn(taps, 2, dtype=torch.float64, generator=generator)], 1)


def make_weight(shape: Shape, generator: torch.Generator) -> Tensor:
    """A random weight that lies in memory as the shape says."""
    size = (shape.groups * shape.per_group, shape.channels, *shape.kernel)
    if shape.transposed:
        size = (shape.groups * shape.channels, shape.per_group, *shape.kernel)
    weight = torch.randn(size, dtype=torch.float64, generator=generator).to(shape.dtype)
    return weight.contiguous(memory_format=torch.channels_last) if shape.channels_last else weight


def make_layout(shapes: list[Shape], seed: int = 0) -> tuple[Layout, list[Tensor]]:
    """Sites of these shapes, whose channels enter from outside, with random weights and tap matrices."""
    generator = torch.Generator().manual_seed(seed)
    rows, weights, row, channel, place = [], [], 0, 0, 0
    for shape in shapes:
        taps, outputs = tap_matrix(shape, generator), shape.groups * shape.per_group
        form = (shape.transposed, shape.centred)
        site = Rows(outputs, shape.groups, shape.channels, taps, row, channel, place, *form)
        rows.append(site)
        weights.append(make_weight(shape, generator))
        row, channel, place = row + outputs, channel + shape.groups * shape.channels, place + site.weights
    lanes = Channels(0, NONE, NONE, channel, (), torch.arange(channel))
    return Layout(lanes, tuple(rows)), weights


def like_memory(flat: Tensor, rows: Rows, weight: Tensor) -> Tensor:
    """A site's part of a flat buffer as a tensor that lies in memory as its weight does."""
    piece = flat[rows.first_weight : rows.first_weight + rows.weights].clone()
    return torch.as_strided(piece, weight.shape, weight.stride())


def fold_site(rows: Rows, weight: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, var: Tensor):
    """Folded weight and bias of one site, differentiable."""
    w = weight.reshape(rows.groups, rows.outputs // rows.groups, rows.channels, -1)
    if rows.transposed:
        w = weight.reshape(rows.groups, rows.channels, rows.outputs // rows.groups, -1).transpose(1, 2)
    w = w - w.mean((2, 3), keepdim=True) if rows.centred else w
    own = slice(rows.first_channel, rows.first_channel + rows.groups * rows.channels)
    m, v = mean[own].view(rows.groups, -1), var[own].view(rows.groups, -1)
    levers = torch.einsum("goij,gi,jp->gop", w, m, rows.taps).flatten(0, 1)
    second = torch.einsum("goij,gi,j->go", w.square(), v, rows.taps[:, 0]).flatten() + levers[:, 1:].square().sum(1)
    mine = slice(rows.first_row, rows.first_row + rows.outputs)
    rate = scale[mine] / second.sqrt()
    folded = w * rate.view(rows.groups, -1, 1, 1)
    folded = folded.transpose(1, 2) if rows.transposed else folded
    return folded.reshape(weight.shape), shift[mine] - levers[:, 0] * rate


def fold(layout: Layout, weights: list[Tensor], *vectors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Folded weights, and the biases of all rows; vectors: scale, shift, mean, var."""
    pairs = [fold_site(rows, weight, *vectors) for rows, weight in zip(layout.rows, weights, strict=True)]
    return [weight for weight, _ in pairs], torch.cat([bias for _, bias in pairs])


def run_lanes(lanes: Channels, shift: Tensor, scale: Tensor, given_mean: Tensor, given_var: Tensor):
    """Entering means and variances, epsilon included, by the functions' own rules; differentiable."""
    mean = torch.cat([shift, lanes.constant_mean, given_mean])
    var = torch.cat([scale.square(), lanes.constant_var, given_var])
    for step in lanes.steps:
        m, v = step.function.moments(*((mean[index], var[index]) for index in step.inputs))
        mean, var = torch.cat([mean, m]), torch.cat([var, v])
    return mean[lanes.entering], var[lanes.entering] + EPS


def chain(sources: int, links: list[tuple[Function, list[list[int]]]], entering: list[int], constants=(), given=0):
    """Lanes after `sources`, a constant of each mean (variance 0.3), and given ones: each link a function and the lanes
    of every argument."""
    start, steps = sources + len(constants) + given, []
    for function, inputs in links:
        steps.append(Step(function, tuple(torch.tensor(lane) for lane in inputs), start, len(inputs[0])))
        start += len(inputs[0])
    mean = torch.tensor(constants, dtype=torch.float64)
    return Channels(
        sources, mean, torch.full_like(mean, 0.3), given, tuple(steps), torch.tensor(entering, dtype=torch.int64)
    )


def error(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """Distance relative to the size of what is expected, or to `least` where that is larger."""
    found, expected = found.detach().cpu().double(), expected.detach().double()
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm().clamp(min=least))
