"""Test rows for `varprop.rules.linear`."""

import torch

from varprop.graph import ops

from .case import Case, normal, weight

aten = torch.ops.aten

rows = [
    Case(aten.linear.default, lambda: (normal(3, 5), weight(4, 5), weight(4))),
    Case(aten.linear.default, lambda: (normal(2, 3, 5), weight(4, 5)), label="no-bias"),
    Case(aten.linear.default, lambda: (normal(3, 5), normal(4, 5), normal(4)), label="random-weight"),
    Case(aten.linear.default, lambda: (weight(3, 5), normal(4, 5), weight(4)), label="constant-input"),
    Case(ops.transposed_linear, lambda: (normal(2, 3, 5), weight(5, 4), weight(4))),
    Case(ops.transposed_linear, lambda: (normal(3, 5), normal(5, 4)), label="random-weight"),
    Case(aten.conv1d.default, lambda: (normal(2, 3, 7), weight(4, 3, 3), weight(4), [2], [1])),
    Case(aten.conv1d.default, lambda: (normal(4, 7), weight(6, 2, 2), None, [1], [0], [2], 2), label="groups"),
    Case(aten.conv1d.padding, lambda: (normal(2, 3, 7), weight(4, 3, 4), weight(4), [1], "same")),
    Case(aten.conv2d.default, lambda: (normal(2, 3, 5, 4), weight(4, 3, 3, 3), weight(4), [1, 2], [1, 0])),
    Case(
        aten.conv2d.default,
        lambda: (normal(1, 3, 5, 6), weight(6, 1, 3, 3), None, [1, 1], [2, 1], [2, 1], 3),
        label="depthwise",
    ),
    Case(aten.conv2d.default, lambda: (normal(3, 5, 4), weight(2, 3, 3, 1), weight(2)), label="unbatched"),
    Case(
        aten.conv2d.default,
        lambda: (normal(1, 2, 4, 4), normal(3, 2, 2, 2), normal(3)),
        label="random-weight",
    ),
    Case(
        aten.conv2d.padding,
        lambda: (normal(1, 2, 5, 4), weight(3, 2, 2, 3), None, [1, 1], "same", [2, 1]),
        label="same",
    ),
    Case(
        aten.conv2d.padding,
        lambda: (normal(1, 2, 5, 4), weight(3, 2, 2, 3), None, [1, 1], "valid"),
        label="valid",
    ),
    Case(
        aten.conv3d.default,
        lambda: (normal(1, 2, 3, 4, 3), weight(2, 2, 2, 3, 2), weight(2), [1, 1, 1], [0, 1, 0]),
    ),
    Case(aten.conv3d.padding, lambda: (normal(1, 2, 3, 3, 3), weight(2, 2, 2, 3, 2), None, [1, 1, 1], "same")),
    Case(aten.conv_transpose1d.default, lambda: (normal(2, 3, 4), weight(3, 2, 3), weight(2), [2], [1], [1])),
    Case(
        aten.conv_transpose2d.input,
        lambda: (normal(1, 4, 3, 3), weight(4, 2, 3, 2), weight(4), [2, 1], [1, 0], [1, 0], 2, [1, 2]),
    ),
    Case(
        aten.conv_transpose3d.input,
        lambda: (normal(1, 2, 2, 3, 2), weight(2, 2, 2, 2, 2), weight(2), [2, 2, 2]),
    ),
    Case(
        aten.convolution.default,
        lambda: (normal(2, 3, 5, 4), weight(4, 3, 3, 3), weight(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
    Case(
        aten.convolution.default,
        lambda: (normal(2, 3, 4), weight(3, 2, 3), None, [2], [1], [1], True, [1], 1),
        label="transposed",
    ),
    Case(aten.bilinear.default, lambda: (normal(3, 4), normal(3, 2), weight(5, 4, 2), weight(5)), draws=8000),
    Case(
        aten.bilinear.default,
        lambda: (normal(2, 3, 4), weight(2, 3, 2), weight(5, 4, 2)),
        label="one-random",
        draws=8000,
    ),
    Case(
        aten.bilinear.default,
        lambda: (normal(1, 4), normal(1, 2), normal(5, 4, 2), normal(5)),
        label="random-weights",
        draws=8000,
    ),
]
