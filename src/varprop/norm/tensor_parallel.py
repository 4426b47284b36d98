"""The fold where layers are parallelized by `torch.distributed.tensor.parallel`: weights that stay sharded.

Every process computes the moments of all channels, from gathered shifts and scales, and its own part of the weights.
The sums over a row whose columns are spread over processes have to be exchanged: two vectors at once, and the largest
weights; two more vectors where rows are centred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..gaussian.normal import Pair
from .backends import reference
from .layout import Layout, restricted
from .sharded import REFUSED, is_sharded

NOT_LINEAR = (
    "A convolution of the normalized model is tensor parallel, which only nn.Linear may be: leave it out of the plan "
    "of parallelize_module."
)


def tensor_parallel_parts(
    layout: Layout, given: Pair | None, parameters: Sequence[Tensor], vectors: Sequence[Pair]
) -> list[Tensor]:
    """Folded weights and then biases; those of parallel layers are sharded as their parameters are.

    Args:
        layout: Of the network.
        given: Moments from outside.
        parameters: All weights, then all shifts, then all scales.
        vectors: Shift and scale of every layer, gathered.
    """
    _require_one_mesh(parameters)
    count = len(layout.rows)
    weights, shifts, scales = (parameters[n : n + count] for n in (0, count, 2 * count))
    all_shifts, all_scales = ([pair[k] for pair in vectors] for k in (0, 1))
    found = []
    for place, weight in enumerate(weights):
        own = restricted(layout, [place])
        if not is_sharded(weight):
            folded, bias = reference.fold(own, [weight], all_shifts, all_scales, given)
            found.append((folded[0], bias[0]))
            continue
        if weight.ndim != 2:
            raise RuntimeError(NOT_LINEAR)
        entering = reference.entering(own.lanes, torch.cat(all_shifts), torch.cat(all_scales), given)
        found.append(_fold_linear(weight, shifts[place], scales[place], entering, own.rows[0].centred))
    return [part for k in (0, 1) for part in (pair[k] for pair in found)]


def _require_one_mesh(parameters: Sequence[Any]) -> None:
    """Parameters sharded over other processes too belong to blocks that are not gathered."""
    meshes = {parameter.device_mesh for parameter in parameters if is_sharded(parameter)}
    if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
        raise RuntimeError(REFUSED)


def _fold_linear(weight: Any, shift: Any, scale: Any, entering: Pair, centred: bool) -> Pair:
    """The formula of `layout.Rows` for one tap and no groups, by operations that know where every part lies."""
    work = torch.float64 if weight.dtype == torch.float64 else torch.float32
    mean, var = (_replicated(part.to(work), weight) for part in entering)
    size = torch.exp2(weight.detach().to(work).abs().amax(1).log2().floor())
    size = torch.where(size > 0, size, torch.ones_like(size))
    matrix = weight.to(work) / size[:, None]
    if centred:
        for _ in range(2):  # the second time takes away what rounding has left: all of a row of equal weights
            matrix = matrix - (_whole_rows(matrix.sum(1)) / weight.shape[1])[:, None]
    sums = _whole_rows(torch.stack([matrix * mean, matrix.square() * var]).sum(2))
    rate = reference.rate_of(_replicated(scale, weight).to(work), sums[1])
    folded = (matrix * rate[:, None]).to(weight.dtype).redistribute(placements=weight.placements)
    bias = (_replicated(shift, weight).to(work) - sums[0] * rate).to(weight.dtype)
    return folded, bias.redistribute(placements=shift.placements if is_sharded(shift) else bias.placements)


def _replicated(tensor: Any, like: Any) -> Any:
    """A plain tensor as one that every process has; others as they are."""
    from torch.distributed.tensor import DTensor, Replicate

    if is_sharded(tensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, [Replicate()], run_check=False)


def _whole_rows(sums: Any) -> Any:
    """Sums over rows, those over parts of rows put together."""
    from torch.distributed.tensor import Replicate

    partial = any(placement.is_partial() for placement in sums.placements)
    return sums.redistribute(placements=[Replicate()]) if partial else sums
