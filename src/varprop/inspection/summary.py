"""A model at a glance: extents, parameters, work, memory, mean and standard deviation, module by module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..engine.inputs import example_for
from ..engine.report import unknown_name
from ..errors import CaptureError
from ..graph.capture import is_shape
from ..graph.node import TensorInfo
from ..moments import Moments
from ..text_table import text_table
from .regions import Region, macs, moments_of, regions_of
from .rows import UnitStatistics, layer_numbers
from .run import captured, evaluated

HEADER = ("layer", "class", "output", "parameters", "MACs", "memory", "mean", "std")


@dataclass(frozen=True)
class SummaryRow:
    """One call of a module."""

    label: str  # path of the module, with the number of the call from the second on
    class_name: str
    depth: int  # in the tree of modules
    extents: tuple[int, ...]  # of its output
    parameters: int  # how many numbers it holds, those of its parts included; 0 in further calls
    macs: int  # multiplications with additions of the call, for the whole batch
    memory: int  # bytes of its output
    mean: float  # over the units of the output
    std: float  # root mean square over the units


@dataclass(frozen=True, repr=False)
class Summary:
    """The result of `summary`; it prints as a table.

    Attributes:
        rows: One a module call, in the order of execution, containers before what they hold.
        parameters: Of the whole model.
        trainable: Those of them that take gradients.
        macs: Of one call of the model.
        parameter_memory: Bytes of parameters and buffers.
        activation_memory: Bytes of the results of all operations, which is what training keeps at most.
        depth: The deepest level that is printed.

    Example:
        >>> table = vp.summary(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (8,))
        >>> table.parameters, table["0"].class_name
        (36, 'Linear')
    """

    rows: tuple[SummaryRow, ...]
    parameters: int
    trainable: int
    macs: int
    parameter_memory: int
    activation_memory: int
    depth: int | None = None

    def __getitem__(self, label: str) -> SummaryRow:
        """The row of a module's call by its label."""
        for row in self.rows:
            if row.label == label:
                return row
        raise KeyError(unknown_name("no module", label, [row.label for row in self.rows]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON.

        Returns:
            Dicts, lists, numbers and text.

        Example:
            >>> table = vp.summary(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (8,))
            >>> table.to_dict()["macs"]
            32
        """
        return asdict(self)

    def __repr__(self) -> str:
        rows = [row for row in self.rows if self.depth is None or row.depth <= self.depth]
        total = (
            f"{self.parameters:,} parameters ({self.trainable:,} trainable, {_bytes(self.parameter_memory)}), "
            f"{_count(self.macs)} MACs, activations {_bytes(self.activation_memory)}"
        )
        return "\n".join([text_table(HEADER, [_cells(row) for row in rows]), total])


def summary(
    model: nn.Module, shape: Any = None, *, example: Any = None, moments: Any = None, depth: int | None = None
) -> Summary:
    """A model at a glance: what every module gives out, holds and computes, and the mean and std of its units.

    Args:
        model: Any module `torch.export` can trace; batch norms that have seen no data count as in training.
        shape: Of one input, without a batch axis: ``(3, 32, 32)``. An input in its place is taken as `example`.
        example: The real shape with its batch axis, ``(1, 3, 32, 32)`` or an input of it, as for `propagate`.
        moments: Of the data, as for `propagate`; mean 0 and variance 1 if left out.
        depth: The deepest level of modules to print, the model itself being level 0; all if left out.

    Returns:
        Rows and totals; printed, a table.

    Raises:
        ValueError: If nothing, or more than one argument, says how large the input is.
        CaptureError: If the model cannot be captured or the input does not fit it.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 2))
        >>> _ = nn.init.ones_(model[0].weight), nn.init.zeros_(model[0].bias)
        >>> print(vp.summary(model, (8,)))
        layer  class       output  parameters  MACs  memory  mean   std
        ...
        18 parameters (18 trainable, 72 B), 16 MACs, activations 8 B
    """
    if depth is not None and depth < 0:
        raise ValueError(f"depth must be 0 or more, not {depth!r}.")
    if shape is not None and example is not None:
        raise ValueError("Give `shape`, that of one input without a batch axis, or `example`, not both.")
    if shape is None and example is None and moments is None:
        raise ValueError("How large the input is follows from `shape`, such as (3, 32, 32), `example` or `moments`.")
    if shape is not None:
        example = (1, *shape) if is_shape(shape) else shape
    input_moments = Moments(0.0, 1.0) if moments is None else moments
    example = example_for(model, input_moments, example)
    try:
        program, _ = captured(model, example)
    except CaptureError as error:
        if is_shape(shape) and "could not be run on the example" in str(error):
            raise CaptureError(f"{error}\nA shape is that of one input, without a batch axis: (3, 32, 32).") from error
        raise
    evaluation = evaluated(program, input_moments, "sample")
    calls = [region for region in regions_of(evaluation) if region.kind == "module"]
    held = {*model.parameters(), *model.buffers()}
    return Summary(
        tuple(_row(model, region, moments_of(evaluation, region.output)) for region in calls),
        sum(parameter.numel() for parameter in model.parameters()),
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        sum(macs(node) for node in program.nodes),
        sum(tensor.numel() * tensor.element_size() for tensor in held),
        sum(
            math.prod(node.info.shape) * node.info.dtype.itemsize
            for node in program.nodes
            if evaluation.plan.random(node) and isinstance(node.info, TensorInfo)
        ),
        depth,
    )


def _row(model: nn.Module, region: Region, moments: Moments) -> SummaryRow:
    numbers = layer_numbers(UnitStatistics(moments.mean.detach(), moments.var.detach()))
    module = model.get_submodule(region.path)
    return SummaryRow(
        label=region.label,
        class_name=region.name,
        depth=region.depth,
        extents=tuple(moments.full),
        parameters=0 if region.call else sum(parameter.numel() for parameter in module.parameters()),
        macs=sum(macs(node) for node in region.nodes),
        memory=math.prod(moments.full) * moments.mean.element_size(),
        mean=numbers["mean"],
        std=numbers["std"],
    )


def _cells(row: SummaryRow) -> Sequence[str]:
    return (
        "  " * row.depth + row.label.rpartition(".")[2],
        row.class_name,
        "x".join(map(str, row.extents)),
        f"{row.parameters:,}" if row.parameters else "",
        _count(row.macs) if row.macs else "",
        _bytes(row.memory),
        f"{row.mean:.3g}",
        f"{row.std:.3g}",
    )


def _count(value: int) -> str:
    return _with_unit(value, 1000, ("", " k", " M", " G", " T"))


def _bytes(value: int) -> str:
    return _with_unit(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _with_unit(value: float, step: int, units: Sequence[str]) -> str:
    """Three digits and a unit."""
    for unit in units[:-1]:
        if value < 0.9995 * step:
            return f"{value:.3g}{unit}"
        value /= step
    return f"{value:.3g}{units[-1]}"
