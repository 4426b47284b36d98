"""Networks folded in several pieces, where processes exchange gradients or gather parameters piece by piece.

The statistics of a layer depend on its own weight and on the shifts and scales of the layers it reads from, and on no
other weight. So a subnetwork needs only a few vectors of the rest, as moments of external channels, and the gradients
of its weights are ready as soon as those of its folded weights are.

- DistributedDataParallel sends gradients on their way as they come: a large network is folded in pieces of the size of
  a bucket, so that those of the last layers leave while the backward pass still works on the first.
- fully_shard around single blocks gathers the parameters of one block at a time: its layers are folded by themselves,
  from shifts and scales of earlier blocks that were copied when those ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from ..gaussian.normal import Pair
from .fold.dispatch import all_plain, owners_known_as
from .fold.layout import Layout, Rows, consecutive, restricted
from .intact import SHARDED, is_sharded
from .layer_layout import LoweredLayers, evaluation_of
from .network import Folded, Network, Vectors

LIMIT = 25 * 2**20  # bytes of weights folded together: as many as DistributedDataParallel puts in a bucket


def fold_around(network: Network, index: int, vectors: dict[nn.Module, Pair]) -> tuple[Network, Folded]:
    """Fold the layers that have to be folded together with one that is called.

    Args:
        network: The network of all layers.
        index: The layer that is called.
        vectors: Shifts and scales of the layers folded so far in this call of the model, where blocks are sharded;
            those of the layers folded now are added.

    Returns:
        The network, or the subnetwork with the layer, and its fold.

    Raises:
        RuntimeError: If parameters that are needed are sharded.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return network, network.fold()
    if torch.compiler.is_compiling():
        plain = all_plain([parameter for layer in network.layers for parameter in (layer.weight, layer.scale)])
        return _fold_for_ddp(network, index) if plain else _fold_outside_graphs(network, index, vectors)
    sharded = {n for n, layer in enumerate(network.layers) if _has_sharded_parameter(layer)}
    if sharded and index not in sharded:
        return _fold_gathered(network, index, sharded, vectors)
    if sharded:
        raise RuntimeError(SHARDED)
    return _fold_for_ddp(network, index)


def _fold_for_ddp(network: Network, index: int) -> tuple[Network, Folded]:
    """Fold all layers, or where DistributedDataParallel waits for gradients the subnetwork with one of them."""
    in_ddp = getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
    if not (torch.is_grad_enabled() and in_ddp):
        return network, network.fold()
    if torch.compiler.is_compiling():
        _cut_by_bytes(network.executor.number)
    subnetwork = next(piece for piece in subnetworks_by_bytes(network) if index in piece.index_of)
    return subnetwork, subnetwork.fold()


def _cut_by_bytes(number: int) -> bool:
    """Cut the networks known by a number while a graph is made of one of them, without a trace in it."""
    return all(subnetworks_by_bytes(network) for network in owners_known_as(number))


# as torch.compiler.assume_constant_result, which imports the compiler at once
_cut_by_bytes._dynamo_marked_constant = True  # type: ignore[attr-defined]


@_disable_dynamo  # as torch.compiler.disable, which imports the compiler at once
def _fold_outside_graphs(network: Network, index: int, vectors: dict[nn.Module, Pair]) -> tuple[Network, Folded]:
    """`fold_around` where torch.compile meets sharded parameters: it cannot tell whether they are gathered."""
    return fold_around(network, index, vectors)


def _has_sharded_parameter(layer: nn.Module) -> bool:
    return any([is_sharded(parameter) for parameter in layer._parameters.values() if parameter is not None])


def _fold_gathered(
    network: Network, index: int, sharded: set[int], vectors: dict[nn.Module, Pair]
) -> tuple[Network, Folded]:
    """Fold the layers of the block that runs."""
    # a gradient checkpoint calls its block again in the backward pass, where all else is as it was in the forward
    in_backward = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
    available = {**network.latest, **vectors} if in_backward else vectors
    subnetwork = subnetwork_of(network, _ready(network, index, sharded, available))
    folded = subnetwork.fold(available)
    vectors.update(_copied_vectors(subnetwork))
    if not in_backward:
        network.latest = vectors
    return subnetwork, folded


def _ready(network: Network, index: int, sharded: set[int], available: Vectors) -> list[int]:
    """The layers that are gathered now and not folded yet, and whose statistics can be computed."""
    missing = {n for n in sharded if network.layers[n] not in available}
    gathered = [n for n in range(len(network.layers)) if n not in sharded]
    waiting = [n for n in gathered if n == index or network.layers[n] not in available]
    ready = [n for n in waiting if missing.isdisjoint(layers_read_by(network, n))]
    if index not in ready:
        raise RuntimeError(SHARDED)
    return ready


def _copied_vectors(network: Network) -> Iterator[tuple[nn.Module, Pair]]:
    """Shifts and scales for the blocks behind: the memory of the parameters is freed when their own block has run."""
    with torch.enable_grad():  # also for a checkpoint that runs without the first time
        for layer in network.layers:
            yield layer, (layer.shift.clone(), layer.scale.clone())


def subnetwork_of(network: Network, indices: list[int]) -> Network:
    """The network of some of the layers, by their indices in ascending order; made once."""
    key = tuple(indices)
    if key not in network.subnetworks:
        layout, read, fixed = sublayout(network.layout, indices, _fixed_sizes(network))
        evaluated = {n: network.evaluated[index] for n, index in enumerate(indices) if index in network.evaluated}
        lowered = LoweredLayers(layout, evaluated, [network.fixed[n] for n in fixed], network.data)
        specs, layers = ([values[index] for index in indices] for values in (network.specs, network.layers))
        subnetwork = Network(network.joint, specs, layers, network.intact, lowered)
        subnetwork.outside = [network.layers[index] for index in read]
        subnetwork.full, subnetwork.index_of = network, {index: n for n, index in enumerate(indices)}
        network.subnetworks[key] = subnetwork
    return network.subnetworks[key]


def subnetworks_by_bytes(network: Network) -> list[Network]:
    """Subnetworks of limited size, in the order of their calls; the network alone if it is not larger."""
    if network.by_bytes is None:
        paths = network.joint.graph.calls.values()  # without layers that no other layer reads from
        calls = {path: n for n, path in enumerate(paths)}
        order = sorted(range(len(network.specs)), key=lambda n: calls.get(network.specs[n].path, len(calls)))
        cut = cut_by_bytes((index, network.layers[index].weight.nbytes) for index in order)
        network.by_bytes = [network] if len(cut) == 1 else [subnetwork_of(network, indices) for indices in cut]
    return network.by_bytes


def cut_by_bytes(sizes: Iterable[tuple[int, int]], limit: int | None = None) -> list[list[int]]:
    """Indices of layers in the order of their calls, cut into lists of about `limit` bytes.

    It is cut from the end, for there the backward pass begins.

    Args:
        sizes: Index and bytes of every layer, in the order of their calls.
        limit: `LIMIT` by default.
    """
    pieces: list[list[int]] = []
    room = 0
    for index, size in reversed(list(sizes)):
        if not pieces or size > room:
            pieces.append([])
            room = LIMIT if limit is None else limit
        pieces[-1].append(index)
        room -= size
    return [sorted(piece) for piece in reversed(pieces)]


def layers_read_by(network: Network, index: int) -> set[int]:
    """The layers whose shifts and scales are needed to fold one, by their indices."""
    if index not in network.reads:
        read = set(sublayout(network.layout, [index], _fixed_sizes(network)).read)
        evaluated = [index] if index in network.evaluated else []
        evaluation = evaluation_of(network.joint, network.specs, evaluated, [])
        paths = set(evaluation.graph.calls.values()) if evaluation is not None else set()
        network.reads[index] = read | {n for n, spec in enumerate(network.specs) if spec.path in paths}
    return network.reads[index]


def _fixed_sizes(network: Network) -> list[int]:
    return [math.prod(value.channels) for value in network.fixed]


class Sublayout(NamedTuple):
    """The layout of some of the layers, and what they read of the others.

    Attributes:
        layout: In which outputs of other layers are no sources but external channels, before those external already.
        read: The indices of those other layers.
        fixed: Which of the values between layers that are not random are read, by their numbers.
    """

    layout: Layout
    read: list[int]
    fixed: list[int]


def sublayout(layout: Layout, indices: Sequence[int], fixed: Sequence[int]) -> Sublayout:
    """The layout of some of the layers by themselves.

    Args:
        layout: Of all layers.
        indices: The layers.
        fixed: How many channels each value between layers has that is not random; they are the last external ones.
    """
    selected = restricted(layout, indices)
    channels = selected.channels
    is_read = torch.zeros(channels.total, dtype=torch.bool)
    is_read[channels.entering] = True
    for step in channels.steps:
        for numbers in step.inputs:
            is_read[numbers] = True
    read = [
        n for n, rows in enumerate(layout.rows) if n not in set(indices) and bool(is_read[_output_channels(rows)].any())
    ]
    sources, outside = (_joined([_output_channels(layout.rows[n]) for n in group]) for group in (indices, read))
    constants, external, computed = torch.arange(channels.sources, channels.total).split(
        [len(channels.constant_mean), channels.external, sum(step.count for step in channels.steps)]
    )
    evaluated, *parameters = external.split([len(external) - sum(fixed), *fixed])
    used = {n: numbers for n, numbers in enumerate(parameters) if bool(is_read[numbers].any())}
    external = _joined([outside, evaluated[is_read[evaluated]], *used.values()])
    order = _joined([sources, constants, external, computed])
    renumbered = torch.full((channels.total,), -1)  # channels that are left out have no number
    renumbered[order] = torch.arange(len(order))
    steps = tuple(
        replace(step, inputs=tuple(renumbered[n] for n in step.inputs), start=int(renumbered[step.start]))
        for step in channels.steps
    )
    entering = renumbered[channels.entering]
    channels = replace(channels, sources=len(sources), external=len(external), steps=steps, entering=entering)
    return Sublayout(Layout(channels, consecutive(selected.rows)), read, list(used))


def _output_channels(rows: Rows) -> Tensor:
    """The channels of a layer's outputs, which are sources."""
    return torch.arange(rows.first_row, rows.first_row + rows.outputs)


def _joined(channels: list[Tensor]) -> Tensor:
    return torch.cat(channels) if channels else torch.arange(0)
