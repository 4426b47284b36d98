"""Where training begins: one plain network for a start, and the same function in the four forms."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import varprop as vp

from ..data.batches import GENERAL, seed_of
from .experiments import DOUBLE, MOMENTUM, UNIT_NORM
from .models import Factory, build
from .records import Cell, Method, Start

# Of the log-probabilities, in units of the rounding of their dtype: what nine layers add up to, with room to spare.
_GAP = 1e5


@dataclass(frozen=True)
class StartData:
    """The data that all starts of a seed are made from.

    Attributes:
        moments: Of the augmented training data.
        batch: One augmented batch; its statistics are those of batch norm at the start.
        probe: Images on which functions are compared.
    """

    moments: vp.Moments
    batch: Tensor
    probe: Tensor


@dataclass(frozen=True)
class StartingPoint:
    """A network ready to be trained, and how far its function is from that of the plain network of its start."""

    model: nn.Module
    gap: float


def plain_network(factory: str | Factory, start: Start, seed: int, data: StartData) -> nn.Module:
    """The plain network of a start.

    Args:
        factory: Of the network.
        start: ``none``: PyTorch's weights. ``bn``: as batch norm begins, s uniform on (0, 1), b = 0, statistics of one
            batch. ``ap2``: the projection, s = 1, b = 0. ``orthogonal``: the projection of orthogonal weights.
        seed: Of the weights and of s.
        data: Behind it.
    """
    placed = {"device": data.batch.device, "dtype": data.batch.dtype}
    model = build(factory, seed_of(GENERAL, seed), **placed)
    if start == "none":
        return model
    if start == "bn":
        return vp.batch_norm_start(model, data.batch, torch.Generator().manual_seed(seed_of(GENERAL, seed, 1)))
    if start == "orthogonal":
        _orthogonal_(model, torch.Generator().manual_seed(seed_of(GENERAL, seed, 2)))
    return vp.init_(model, data.moments, example=data.batch[:1])


@torch.no_grad()
def _orthogonal_(model: nn.Module, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
            parameter.copy_(nn.init.orthogonal_(drawn, generator=generator))


def parametrized(plain: nn.Module, method: Method, data: StartData, variant: str = "") -> nn.Module:
    """The same function as the plain network, in the parametrization of a method and variant."""
    if variant == DOUBLE:
        return doubled(plain)
    needs: dict[str, dict[str, Any]] = {
        "batch": {"batch": data.batch},
        "analytic": {"input": data.moments, "example": data.batch[:1]},
    }
    model = vp.reparametrize(plain, method, **needs.get(method, {}))
    if variant == MOMENTUM:
        _small_momentum_(model)
    return vp.unit_norm_(model) if variant == UNIT_NORM else model


def _small_momentum_(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.01


class _Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def doubled(plain: nn.Module) -> nn.Module:
    """The same function with every weight written as w = 2w': no normalization, only other units of measurement."""
    model = copy.deepcopy(plain)
    for layer in model.modules():
        if isinstance(getattr(layer, "weight", None), nn.Parameter):
            parametrize.register_parametrization(layer, "weight", _Double())
    return model


@torch.no_grad()
def gap(model: nn.Module, plain: nn.Module, probe: Tensor) -> float:
    """Largest difference between the log-probabilities of two networks, in evaluation mode."""
    outputs = [F.log_softmax(network.eval()(probe).double(), -1) for network in (model, plain)]
    return float((outputs[0] - outputs[1]).abs().max())


def starting_points(factory: str | Factory, cells: list[Cell], data: StartData) -> dict[Cell, StartingPoint]:
    """The networks of all cells of one seed.

    Raises:
        RuntimeError: If a form computes something else than the plain network of its start.
    """
    plain: dict[Start, nn.Module] = {}
    found: dict[tuple[Method, Start, str], StartingPoint] = {}
    for cell in cells:
        kind = (cell.method, cell.start, cell.variant)
        if cell.start not in plain:
            plain[cell.start] = plain_network(factory, cell.start, cell.seed, data)
        if kind not in found:
            found[kind] = _started(cell, plain[cell.start], data)
    return {cell: found[cell.method, cell.start, cell.variant] for cell in cells}


def _started(cell: Cell, plain: nn.Module, data: StartData) -> StartingPoint:
    model = parametrized(plain, cell.method, data, cell.variant)
    distance = gap(model, plain, data.probe)
    limit = _GAP * torch.finfo(data.probe.dtype).eps
    if not distance <= limit:
        raise RuntimeError(
            f"{cell.key} does not start from the same function as the plain network: log-probabilities differ by "
            f"{distance:.2g}, more than the {limit:.2g} that rounding explains."
        )
    return StartingPoint(model.train(), distance)
