"""The C code as a backend for small networks on the CPU."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Layout, Pair
from ..memory import flattened
from .build import compiled
from .structures import Pointer
from .tables import known, make_tables, site_strides

# Nanoseconds, both ways together: a weight in C, a weight in torch by one thread, and starting torch's operations.
BY_WEIGHT, BY_WEIGHT_IN_TORCH, STARTING_TORCH = 5.0, 9.0, 8e5
OTHER = "A parameter of a normalized layer has another shape or order in memory than when the layer was last called."
_TYPES = {torch.float32: "float", torch.float64: "double"}


@dataclass(frozen=True)
class Kept:
    """What the way back needs besides the parameters: numbers, and where the parameters lay."""

    backend: NativeBackend
    numbers: Tensor
    parameters: Places


@dataclass(frozen=True)
class Places:
    """Addresses of the parameters, as a list to compare and as an array that C reads."""

    addresses: list[int]
    table: array[int]


def make_native(layout: Layout, parameters: Sequence[Tensor], dtype: torch.dtype) -> NativeBackend | None:
    """Compiled code for a layout, where it can be had and is faster than torch; `dtype` is that of the statistics."""
    first = parameters[0]
    if first.device.type != "cpu" or first.dtype != dtype or not worthwhile(layout.weight_count):
        return None
    if not _knows(layout, parameters) or compiled().library is None:
        return None
    return NativeBackend(layout, parameters, dtype)


def worthwhile(weights: int) -> bool:
    """Whether one thread in C is faster than all of torch's."""
    return weights * (BY_WEIGHT - BY_WEIGHT_IN_TORCH / torch.get_num_threads()) < STARTING_TORCH


def _knows(layout: Layout, parameters: Sequence[Tensor]) -> bool:
    count = len(layout.rows)
    if not count or layout.lanes.sources != layout.row_count:
        return False
    if any(site_strides(rows, weight) is None for rows, weight in zip(layout.rows, parameters[:count], strict=True)):
        return False
    return all(vector.is_contiguous() for vector in parameters[count:]) and all(map(known, layout.lanes.steps))


class NativeBackend:
    """All layers of a layout folded in one call of compiled code, for parameters that lie in memory as those given.

    Parameters are weights, then shifts, then scales, of all layers.
    """

    def __init__(self, layout: Layout, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        library = compiled().library
        assert library is not None
        self.dtype, self.count = dtype, len(layout.rows)
        self.tables = make_tables(layout, parameters[: self.count], dtype)
        self.plan = ctypes.addressof(self.tables.plan)
        outputs = [rows.outputs for rows in layout.rows]
        self.sizes = [rows.weights for rows in layout.rows] + outputs + outputs
        self.strides = [parameter.stride() for parameter in parameters]
        self.given = layout.lanes.given
        self.last = Places([], array("Q"))
        self._forward, self._backward = (library[f"fold_{way}_{_TYPES[dtype]}"] for way in ("forward", "backward"))
        self._forward.argtypes, self._backward.argtypes = [Pointer] * 6, [Pointer] * 7

    def fold(self, parameters: Sequence[Tensor], given: Pair | None, dtype: torch.dtype) -> tuple[list[Tensor], Kept]:
        """The folded weights of all layers, then their biases, and what `unfold` needs."""
        self.last = places = self._places(parameters, self.last)
        moments = [] if given is None else [part.double().contiguous() for part in given]
        parts = [torch.empty_like(parameter) for parameter in parameters[: 2 * self.count]]
        numbers = torch.empty(self.tables.kept_size, dtype=torch.float64, device="cpu")
        results = _addresses(parts)
        mean, var = [part.data_ptr() for part in moments] or (None, None)
        _succeed(self._forward(self.plan, _start(places.table), mean, var, _start(results), numbers.data_ptr()))
        kept = Kept(self, numbers, places)
        return (parts if dtype == self.dtype else [part.to(dtype) for part in parts]), kept

    def unfold(self, parameters: Sequence[Tensor], kept: Kept, grads: Sequence[Tensor]) -> list[Tensor]:
        """Derivatives by given means and variances, and by the parameters.

        Args:
            parameters: As for `fold`.
            kept: What `fold` kept.
            grads: Of all folded weights, then of all biases.
        """
        places = self._places(parameters, kept.parameters)
        matching = [
            grad if grad.stride() == stride and grad.dtype is self.dtype else self._as_parameter(grad, parameter)
            for grad, stride, parameter in zip(grads, self.strides, parameters, strict=False)
        ]
        results = [torch.empty_like(parameter) for parameter in parameters]
        mean, var = (torch.empty(self.given, dtype=torch.float64, device="cpu") for _ in range(2))
        by, to, numbers = _addresses(matching), _addresses(results), kept.numbers.data_ptr()
        tables = _start(places.table), numbers, _start(by), _start(to)
        _succeed(self._backward(self.plan, *tables, mean.data_ptr(), var.data_ptr()))
        return [mean, var, *results]

    def _places(self, parameters: Sequence[Tensor], known: Places) -> Places:
        """Where the parameters lie; if not where they are known to, they are looked at more closely."""
        addresses = list(map(Tensor.data_ptr, parameters))
        if addresses == known.addresses:
            return known
        sizes, strides = [p.numel() for p in parameters], [p.stride() for p in parameters]
        if sizes != self.sizes or strides != self.strides:
            raise RuntimeError(OTHER)
        return Places(addresses, array("Q", addresses))

    def _as_parameter(self, grad: Tensor, parameter: Tensor) -> Tensor:
        """A gradient that lies in memory as what it belongs to does."""
        return flattened(grad.to(self.dtype), parameter).contiguous()


def _addresses(tensors: list[Tensor]) -> array[int]:
    return array("Q", map(Tensor.data_ptr, tensors))


def _start(table: array[int]) -> int:
    return table.buffer_info()[0]


def _succeed(failed: int) -> None:
    if failed:
        raise MemoryError("There is no memory left to fold the normalized layers.")
