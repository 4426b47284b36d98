"""Rows for operations that move elements."""

from __future__ import annotations

from typing import Any

import torch

from varprop import Moments

from .case import Case, normal, weight

aten = torch.ops.aten


def on(shape: tuple[int, ...], op: Any, *constants: Any, label: str = "", **kwargs: Any) -> Case:
    return Case(op, lambda: (normal(*shape), *constants), kwargs, draws=4_000, label=label)


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values)


rows = [
    on((2, 6), aten.view.default, [3, 4]),
    on((2, 6), aten._unsafe_view.default, [3, 4]),
    on((2, 6), aten.reshape.default, [3, 4]),
    on((2, 3, 4), aten.permute.default, [2, 0, 1]),
    on((2, 3), aten.transpose.int, 0, 1),
    on((2, 3), aten.t.default),
    on((2, 3), aten.unsqueeze.default, 1),
    on((2, 1, 3), aten.squeeze.dim, 1),
    on((2, 3, 4), aten.movedim.int, 0, 2),
    on((2, 3), aten.swapaxes.default, 0, 1),
    on((2, 1), aten.expand.default, [2, 3]),
    on((2, 3), aten.repeat.default, [2, 1]),
    on((2, 3), aten.repeat_interleave.self_int, 2, 1),
    on((2, 3), aten.tile.default, [2, 1]),
    on((2, 3), aten.select.int, 1, 2),
    on((2, 5), aten.slice.Tensor, 1, 1, 4, 2),
    on((2, 5), aten.narrow.default, 1, 1, 3),
    on((4, 4), aten.diagonal.default),
    on((2, 6), aten.unfold.default, 1, 3, 2),
    on((1, 2, 4, 4), aten.im2col.default, [2, 2], [1, 1], [0, 0], [2, 2]),
    on((2, 6), aten.split.Tensor, 2, 1),
    on((2, 6), aten.split_with_sizes.default, [1, 5], 1),
    on((2, 6), aten.chunk.default, 3, 1),
    on((2, 6), aten.tensor_split.sections, 4, 1),
    on((2, 3), aten.unbind.int, 1),
    on((4, 3), aten.index.Tensor, [index(0, 2, 2)]),
    on((4, 3), aten.index_select.default, 0, index(3, 1)),
    on((2, 3), aten.gather.default, 1, torch.tensor([[0, 2], [1, 1]])),
    on((2, 3), aten.flip.default, [1]),
    on((2, 3), aten.fliplr.default),
    on((2, 3), aten.flipud.default),
    on((2, 3), aten.take.default, torch.tensor([[0, -1], [4, 4]])),
    Case(aten.column_stack.default, lambda: ([normal(3), normal(3, 2), weight(3)],), draws=4_000),
    Case(aten.index_copy.default, lambda: (normal(2, 4), 1, index(2, 0), normal(2, 2)), draws=4_000),
    Case(aten.index_copy.default, lambda: (normal(2, 4), 1, index(3), weight(2, 1)), draws=4_000, label="constant"),
    on((3, 3), aten.tril.default),
    on((3, 3), aten.triu.default, 1),
    Case(aten.slice_scatter.default, lambda: (normal(2, 5), weight(2, 2), 1, 1, 3), draws=4_000),
    Case(aten.select_scatter.default, lambda: (weight(2, 5), normal(2), 1, 3), draws=4_000),
    Case(aten.index_put.default, lambda: (normal(4, 3), [index(1)], normal(3)), draws=4_000),
    Case(aten.copy.default, lambda: (weight(2, 3), normal(2, 3)), draws=4_000),
    Case(aten.copy.default, lambda: (weight(2, 3), normal(3)), draws=4_000, label="broadcast"),
    Case(aten.fill.Tensor, lambda: (normal(2, 3), Moments(0.3, 0.5).to(torch.float64)), draws=4_000),
    on((1, 8, 2, 2), aten.pixel_shuffle.default, 2),
    on((1, 2, 4, 4), aten.pixel_unshuffle.default, 2),
    on((1, 4, 2, 2), aten.channel_shuffle.default, 2),
    on((2, 3, 5), aten.reflection_pad1d.default, [1, 2]),
    on((2, 3, 5, 5), aten.reflection_pad2d.default, [1, 2, 0, 1]),
    on((2, 3, 4, 4, 4), aten.reflection_pad3d.default, [1, 1, 0, 1, 1, 0]),
    on((2, 3, 5), aten.replication_pad1d.default, [1, 2]),
    on((2, 3, 5, 5), aten.replication_pad2d.default, [1, 2, 0, 1]),
    on((2, 3, 4, 4, 4), aten.replication_pad3d.default, [1, 1, 0, 1, 1, 0]),
    on((2, 3), aten.constant_pad_nd.default, [1, 2], 0.7),
    on((2, 3), aten.pad.default, [1, 2], "constant", 0.7),
    on((1, 2, 5), aten.pad.default, [1, 2], "reflect", label="reflect"),
    on((1, 2, 5), aten.pad.default, [1, 2], "circular", label="circular"),
    on((2, 3), aten.type_as.default, weight(1)),
    on((2, 3), aten.rot90.default),
    on((3,), aten.diag.default),
    on((2, 3), aten.diag_embed.default),
    on((3, 3), aten.trace.default),
    on((2, 3), aten.take_along_dim.default, torch.tensor([[0, 2], [1, 1]]), 1),
    on((2, 3), aten.masked_select.default, torch.tensor([[True, False, True]] * 2)),
    Case(
        aten.scatter_add.default, lambda: (weight(2, 3), 1, torch.tensor([[0, 0], [2, 1]]), normal(2, 2)), draws=4_000
    ),
    *(
        Case(op.default, lambda: ([normal(2, 3), weight(2, 3)],), draws=4_000)
        for op in (aten.vstack, aten.hstack, aten.dstack, aten.broadcast_tensors)
    ),
    Case(aten.meshgrid.indexing, lambda: ([normal(3), normal(2)],), {"indexing": "ij"}, draws=4_000),
    on((2, 5), aten.roll.default, [2], [1]),
    on((2, 5), aten.roll.default, [2], label="flat"),
    Case(aten.cat.default, lambda: ([normal(2, 3), weight(2, 2), normal(2, 1)], 1), draws=4_000),
    Case(aten.stack.default, lambda: ([normal(2, 3), weight(2, 3)], 1), draws=4_000),
]
