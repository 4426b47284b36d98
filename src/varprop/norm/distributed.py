"""Networks folded in several pieces, for processes that exchange gradients or gather parameters, and for kernels.

The statistics of a layer depend on its own weight and on the shifts and scales of the layers it reads from, and on no
other weight. So a subnetwork needs only a few vectors of the rest, as moments of external channels, and the gradients
of its weights are ready as soon as those of its folded weights are.

- DistributedDataParallel sends gradients on their way as they come: a large network is folded in pieces of the size of
  a bucket, so that those of the last layers leave while the backward pass still works on the first.
- fully_shard around single blocks gathers the parameters of one block at a time: its layers are folded by themselves,
  from shifts and scales of earlier blocks that were copied when those ran.
- The kernels for CUDA fold layers that are called once: those that are called several times are folded by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from ..gaussian.normal import Pair
from .fold.dispatch import all_plain, networks_known_as
from .fold.layout import sublayout
from .layer_layout import evaluation_of
from .network import Folded, Network, Vectors
from .statistics import SHARDED, is_sharded

WITH_KERNELS = ("cuda",)  # types of devices
LIMIT = 25 * 2**20  # bytes of weights folded together: as many as DistributedDataParallel puts in a bucket


def fold_around(network: Network, index: int, vectors: dict[nn.Module, Pair]) -> tuple[Network, Folded]:
    """Fold the layers that have to be folded together with one that is called: the network with it, and its fold.

    `vectors` holds shifts and scales of the layers folded so far in this call of the model, where blocks are sharded;
    those of the layers folded now are added. Raises a RuntimeError if parameters that are needed are sharded.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return _fold_by_calls(network, index)
    if torch.compiler.is_compiling():
        plain = all_plain([parameter for layer in network.layers for parameter in (layer.weight, layer.scale)])
        return _fold_for_ddp(network, index) if plain else _fold_outside_graphs(network, index, vectors)
    parameters = [(n, p) for n, layer in enumerate(network.layers) for p in layer._parameters.values()]
    sharded = {n for n, parameter in parameters if parameter is not None and is_sharded(parameter)}
    if sharded and index not in sharded:
        return _fold_gathered(network, index, sharded, vectors)
    if sharded:
        raise RuntimeError(SHARDED)
    return _fold_for_ddp(network, index)


def _fold_for_ddp(network: Network, index: int) -> tuple[Network, Folded]:
    """Fold all layers, or where DistributedDataParallel waits for gradients the subnetwork with one of them."""
    in_ddp = getattr(DistributedDataParallel, "_active_ddp_module", None) is not None
    if not (torch.is_grad_enabled() and in_ddp):
        return _fold_by_calls(network, index)
    if torch.compiler.is_compiling():
        _cut_by_bytes(network.executor.number)
    return _fold_of(subnetworks_by_bytes(network), index)


def _fold_of(subnetworks: list[Network], index: int) -> tuple[Network, Folded]:
    """The subnetwork with a layer, and its fold."""
    subnetwork = next(each for each in subnetworks if index in each.index_of)
    return subnetwork, subnetwork.fold()


def _fold_by_calls(network: Network, index: int) -> tuple[Network, Folded]:
    """Fold all layers, or where there are kernels those that they can fold, or the others."""
    if not network.by_calls or network.first_weight().device.type not in WITH_KERNELS:
        return network, network.fold()
    return _fold_of(network.by_calls, index)


def _cut_by_bytes(number: int) -> bool:
    """Cut the networks known by a number while a graph is made of one of them, without a trace in it."""
    return all(subnetworks_by_bytes(network) for network in networks_known_as(number))


# as torch.compiler.assume_constant_result, which imports the compiler at once
_cut_by_bytes._dynamo_marked_constant = True  # type: ignore[attr-defined]


@_disable_dynamo  # as torch.compiler.disable, which imports the compiler at once
def _fold_outside_graphs(network: Network, index: int, vectors: dict[nn.Module, Pair]) -> tuple[Network, Folded]:
    """`fold_around` where torch.compile meets sharded parameters: it cannot tell whether they are gathered."""
    return fold_around(network, index, vectors)


def _fold_gathered(
    network: Network, index: int, sharded: set[int], vectors: dict[nn.Module, Pair]
) -> tuple[Network, Folded]:
    """Fold the layers of the block that runs."""
    # a gradient checkpoint calls its block again in the backward pass, where all else is as it was in the forward
    in_backward = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
    available = {**network.latest, **vectors} if in_backward else vectors
    subnetwork = network.subnetwork(_ready(network, index, sharded, available))
    folded = subnetwork.fold(available)
    with torch.enable_grad():  # also for a checkpoint that runs without the first time
        # copies for the blocks behind: the memory of the parameters is freed when their own block has run
        vectors.update((layer, (layer.shift.clone(), layer.scale.clone())) for layer in subnetwork.layers)
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


def subnetworks_by_bytes(network: Network) -> list[Network]:
    """Subnetworks of limited size, in the order of their calls; the network alone if it is not larger."""
    if network.by_bytes is None:
        paths = network.joint.graph.calls.values()  # without layers that no other layer reads from
        calls = {path: n for n, path in enumerate(paths)}
        order = sorted(range(len(network.specs)), key=lambda n: calls.get(network.specs[n].path, len(calls)))
        cut = cut_by_bytes((index, network.layers[index].weight.nbytes) for index in order)
        network.by_bytes = [network] if len(cut) == 1 else [network.subnetwork(indices) for indices in cut]
    return network.by_bytes


def cut_by_bytes(sizes: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Indices of layers, from index and bytes of each in the order of calls, cut into lists of about `LIMIT` bytes.

    It is cut from the end, for there the backward pass begins.
    """
    pieces: list[list[int]] = []
    room = 0
    for index, size in reversed(list(sizes)):
        if not pieces or size > room:
            pieces.append([])
            room = LIMIT
        pieces[-1].append(index)
        room -= size
    return [sorted(piece) for piece in reversed(pieces)]


def layers_read_by(network: Network, index: int) -> set[int]:
    """The layers whose shifts and scales are needed to fold one, by their indices."""
    if index not in network.reads:
        read = set(sublayout(network.layout, [index], network.fixed_sizes()).read)
        evaluated = [index] if index in network.evaluated else []
        evaluation = evaluation_of(network.joint, network.specs, evaluated, [])
        paths = set(evaluation.graph.calls.values()) if evaluation is not None else set()
        network.reads[index] = read | {n for n, spec in enumerate(network.specs) if spec.path in paths}
    return network.reads[index]
