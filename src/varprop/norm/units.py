"""Which layers are folded together with the one that is called: all, unless processes exchange them in parts.

- DistributedDataParallel sends gradients on their way as they come: a large network is folded in parts, so that those
  of the last layers leave while the backward pass still works on the first.
- fully_shard around single blocks gathers the parameters of one block at a time: its layers are folded by themselves,
  from what they read of the blocks before, which was copied when those ran.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from ..gaussian.normal import Pair
from .fold.dispatch import all_plain, owners_known_as
from .network import Folded, Network, Vectors
from .sharded import REFUSED, is_sharded


def fold_with_others(network: Network, place: int, met: dict[nn.Module, Pair]) -> tuple[Network, Folded]:
    """The network or the part of it that is folded when a layer is called, and its fold.

    Args:
        network: The whole network.
        place: The layer.
        met: Shifts and scales of the layers that this call of the model has met, where blocks are sharded; grows.
    """
    if not _distributed():
        return network, network.fold()
    if torch.compiler.is_compiling():
        plain = all_plain([parameter for layer in network.layers for parameter in (layer.weight, layer.scale)])
        return _fold_for_ddp(network, place) if plain else _fold_outside_graphs(network, place, met)
    sharded = {n for n, layer in enumerate(network.layers) if _is_sharded(layer)}
    if sharded and place not in sharded:
        return _fold_gathered(network, place, sharded, met)
    if sharded:
        raise RuntimeError(REFUSED)
    return _fold_for_ddp(network, place)


def _fold_for_ddp(network: Network, place: int) -> tuple[Network, Folded]:
    """Fold all layers, or where DistributedDataParallel waits for gradients the part with one of them."""
    if not (torch.is_grad_enabled() and _in_ddp()):
        return network, network.fold()
    if torch.compiler.is_compiling():
        _cut_in_parts(network.executor.number)
    unit = next(part for part in network.parts_by_bytes() if place in part.places)
    return unit, unit.fold()


def _cut_in_parts(number: int) -> bool:
    """Cut the networks known by a number while a graph is made of one of them, without a trace in it."""
    return all(network.parts_by_bytes() for network in owners_known_as(number))


# as torch.compiler.assume_constant_result, which imports the compiler at once
_cut_in_parts._dynamo_marked_constant = True  # type: ignore[attr-defined]


@_disable_dynamo  # as torch.compiler.disable, which imports the compiler at once
def _fold_outside_graphs(network: Network, place: int, met: dict[nn.Module, Pair]) -> tuple[Network, Folded]:
    """The same where torch.compile meets sharded parameters, of which it cannot tell whether they are gathered."""
    return fold_with_others(network, place, met)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _in_ddp() -> bool:
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


def _is_sharded(layer: nn.Module) -> bool:
    return any([is_sharded(parameter) for parameter in layer._parameters.values() if parameter is not None])


def _fold_gathered(
    network: Network, place: int, sharded: set[int], met: dict[nn.Module, Pair]
) -> tuple[Network, Folded]:
    """Fold the layers of the block that runs."""
    # a gradient checkpoint calls its block again in the backward pass, where all else is as it was in the forward
    known = {**network.latest, **met} if _in_backward() else met
    unit = network.part(_ready(network, place, sharded, known))
    found = unit.fold(known)
    met.update(_copies(unit))
    if not _in_backward():
        network.latest = met
    return unit, found


def _in_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _ready(network: Network, place: int, sharded: set[int], known: Vectors) -> list[int]:
    """The layers that are gathered now and not folded yet, and whose statistics can be computed."""
    missing = {n for n in sharded if network.layers[n] not in known}
    gathered = [n for n in range(len(network.layers)) if n not in sharded]
    waiting = [n for n in gathered if n == place or network.layers[n] not in known]
    ready = [n for n in waiting if missing.isdisjoint(network.read_by(n))]
    if place not in ready:
        raise RuntimeError(REFUSED)
    return ready


def _copies(unit: Network) -> Iterator[tuple[nn.Module, Pair]]:
    """Shifts and scales for the blocks behind: the memory of the parameters is freed when their own block has run."""
    with torch.enable_grad():  # also for a checkpoint that runs without the first time
        for layer in unit.layers:
            yield layer, (layer.shift.clone(), layer.scale.clone())
