"""Mean and variance of a data set in one streaming pass: what propagation starts from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ..moments import Mixture, Moments

_CHUNK_ELEMENTS = 1 << 20  # 8 MB in float64: bounds the memory of a pass whatever the batch size
_OF_IMAGES = (torch.uint8, torch.int16, torch.uint16)  # labels and indices are of others
_LARGEST = 1 << 14  # elements of an item whose covariances are measured: 2 GiB of them
_OF_TOKENS = ("torch.int64", "torch.int32")


def input_moments(
    data: Tensor | Dataset[Any] | Iterable[Any],
    per: Literal["channel", "element"] | None = None,
    *,
    covariance: bool = False,
    labels: Tensor | None = None,
) -> Moments:
    """Mean and population variance of the input, in float64 over one pass (Chan, Golub & LeVeque 1983).

    An item or batch may be a tensor, or a tuple, list or dict whose first floating tensor is the input.
    A Dataset yields items; a DataLoader or any other iterable yields batches.

    Args:
        data: A tensor (N, C, ...), a Dataset (map-style or iterable), a DataLoader, or any batches.
        per: "channel" gives statistics of shape (1, C, 1, ..., 1), and (1, F) for items of one axis;
            "element" gives ``(1, *item shape)``. Left out, it is "channel", and "element" with a covariance.
        covariance: Also measure the covariance of all elements of an item, for ``covariance="full"`` of `propagate` and
            `inspect`.
        labels: The class of every item of a tensor: each class gets moments of its own, and the result is a `Mixture`.

    Returns:
        Moments with a batch axis of extent 1, on the data's device, in its dtype (float32 for halves). They know the
        extents of the data, where all items have the same, so that a model can be looked at without an example.

    Raises:
        ValueError: On empty data, items whose statistics differ in shape, NaN or infinity (with its place), items too
            large for a covariance.
        TypeError: On data without a floating tensor, images of bytes among it.

    Example:
        >>> vp.input_moments(torch.tensor([[1.0, 2.0], [3.0, 2.0]])).mean
        tensor([[2., 2.]])
        >>> vp.input_moments(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), covariance=True).covariance
        tensor([[1., 1.],
                [1., 1.]])
    """
    if per not in (None, "channel", "element"):
        raise ValueError(f'per must be "channel" or "element", got {per!r}.')
    if covariance and per == "channel":
        raise ValueError('A covariance is one of all elements: leave `per` out, or give "element".')
    if labels is not None:
        return _by_class(data, labels, per, covariance)
    per = per or ("element" if covariance else "channel")
    total: _RunningStatistics | None = None
    with torch.no_grad():
        for chunk in _split(_chunks(data)):
            statistics = _statistics(chunk, per, covariance)
            total = statistics if total is None else total.merged(statistics, chunk)
    if total is None:
        raise ValueError("The data is empty: input_moments needs at least one item.")
    return total.moments()


def _by_class(data: Any, labels: Tensor, per: Literal["channel", "element"] | None, covariance: bool) -> Mixture:
    if not isinstance(data, Tensor) or not isinstance(labels, Tensor) or labels.shape != data.shape[:1]:
        raise ValueError("labels= takes a tensor with the class of every item, beside data that is a tensor, too.")
    classes, counts = labels.unique(return_counts=True)
    components = [input_moments(data[labels == label], per, covariance=covariance) for label in classes]
    return Mixture(components, counts.tolist())


@dataclass(frozen=True)
class _Chunk:
    """Some rows of the stream, and where they stood in it."""

    values: Tensor
    unit: Literal["item", "batch"]
    index: int
    row: int = 0

    def position(self, row: int = 0) -> str:
        """The item, or the batch and its row, that a row of the values is."""
        row += self.row
        return f"item {self.index + row}" if self.unit == "item" else f"batch {self.index} (row {row})"


@dataclass(frozen=True)
class _RunningStatistics:
    """Count, mean and sum of squared deviations in float64, with the batch axis kept.

    With `joint`, in place of the squares there are the products of all elements' deviations, (elements, elements).
    """

    count: int
    mean: Tensor
    deviations: Tensor
    dtype: torch.dtype
    device: torch.device
    extents: tuple[int, ...]  # of the data, 1 along an axis where items differ
    joint: bool = False

    def merged(self, new: _RunningStatistics, chunk: _Chunk) -> _RunningStatistics:
        """The statistics of all values so far and those of one more chunk."""
        if self.mean.shape != new.mean.shape:
            raise ValueError(
                f"All items must have one shape to be averaged, but {chunk.position()} gives statistics of "
                f"shape {tuple(new.mean.shape[1:])} where those before gave {tuple(self.mean.shape[1:])}."
            )
        count = self.count + new.count
        shift = new.mean.to(self.mean.device) - self.mean
        mean = self.mean + shift * (new.count / count)
        between = torch.outer(shift.flatten(), shift.flatten()) if self.joint else shift.square()
        between = between * (self.count * (new.count / count))
        deviations = self.deviations + new.deviations.to(self.mean.device) + between
        dtype = torch.promote_types(self.dtype, new.dtype)
        extents = tuple(a if a == b else 1 for a, b in zip(self.extents, new.extents, strict=True))
        return _RunningStatistics(count, mean, deviations, dtype, self.device, extents, self.joint)

    def moments(self) -> Moments:
        mean, var = (values.to(self.device, self.dtype) for values in (self.mean, self.deviations / self.count))
        if self.joint:
            return Moments(mean, full=self.extents, covariance=var)
        return Moments(mean, var, self.extents)


def _statistics(chunk: _Chunk, per: str, covariance: bool) -> _RunningStatistics:
    # Apple's GPUs have no float64.
    values = (chunk.values.cpu() if chunk.values.device.type == "mps" else chunk.values).double()
    channels_first = per == "channel" and values.dim() > 1
    axes = [axis for axis in range(values.dim()) if axis != 1] if channels_first else [0]
    mean = values.mean(axes, keepdim=True)
    # The mean is finite exactly if every value is: one look at it spares a pass over the data.
    if not mean.isfinite().all():
        bad_rows = ~values.flatten(1).isfinite().all(1) if values.dim() > 1 else ~values.isfinite()
        raise ValueError(f"The data holds NaN or infinity in {chunk.position(int(bad_rows.nonzero()[0, 0]))}.")
    if covariance:
        size = mean.numel()
        if size > _LARGEST:
            raise ValueError(
                f"Items of {size:,} elements have {size**2:.2g} covariances: they are measured up to {_LARGEST:,} "
                f"elements; leave `covariance` out, or take smaller items."
            )
        centred = (values - mean).flatten(1)
        deviations = centred.mT @ centred
    else:
        deviations = (values - mean).square().sum(axes, keepdim=True)
    count = math.prod(values.shape[axis] for axis in axes)
    dtype = torch.float64 if chunk.values.dtype == torch.float64 else torch.float32
    extents = (1, *values.shape[1:])
    return _RunningStatistics(count, mean, deviations, dtype, chunk.values.device, extents, covariance)


def _chunks(data: Tensor | Dataset[Any] | Iterable[Any]) -> Iterator[_Chunk]:
    if isinstance(data, Tensor):
        yield _Chunk(_floating_tensor(data, "the tensor", batched=True), "item", 0)
    elif isinstance(data, Dataset):
        # a map-style dataset need not raise IndexError at its end, so it is not iterated directly
        items: Any = data if isinstance(data, IterableDataset) else (data[i] for i in range(len(data)))  # type: ignore[arg-type]
        yield from _stacked(_floating_tensor(x, f"item {i}", batched=False) for i, x in enumerate(items))
    elif isinstance(data, Iterable):
        for index, batch in enumerate(data):
            yield _Chunk(_floating_tensor(batch, f"batch {index}", batched=True), "batch", index)
    else:
        raise TypeError(
            f"input_moments takes a tensor, a Dataset, a DataLoader or an iterable of batches, not "
            f"{type(data).__name__}."
        )


def _stacked(items: Iterator[Tensor]) -> Iterator[_Chunk]:
    """Items of one shape together, since a merge costs as much for one item as for a thousand."""
    pending: list[Tensor] = []
    start = 0
    for item in items:
        if pending and (_kind(item) != _kind(pending[0]) or len(pending) * item.numel() >= _CHUNK_ELEMENTS):
            yield _Chunk(torch.stack(pending), "item", start)
            start += len(pending)
            pending = []
        pending.append(item)
    if pending:
        yield _Chunk(torch.stack(pending), "item", start)


def _kind(item: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return item.shape, item.dtype, item.device


def _split(chunks: Iterable[_Chunk]) -> Iterator[_Chunk]:
    for chunk in chunks:
        if chunk.values.numel() == 0:
            continue
        rows = max(1, _CHUNK_ELEMENTS * len(chunk.values) // chunk.values.numel())
        for row in range(0, len(chunk.values), rows):
            yield _Chunk(chunk.values[row : row + rows], chunk.unit, chunk.index, row)


def _floating_tensor(item: Any, position: str, *, batched: bool) -> Tensor:
    """The first floating tensor in an item or a batch; `position` names it in errors."""
    for tensor in _tensors(item):
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise TypeError(
                f"Moments are taken of dense tensors, but {position} holds a {kind} one: give it by its parts."
            )
        if tensor.is_floating_point():
            if batched and tensor.dim() == 0:
                raise ValueError(f"A batch needs a batch axis, but {position} is a single number.")
            return tensor.detach()
        # Taking the float label that may follow an image of whole numbers would be a silent mistake.
        if tensor.dtype in _OF_IMAGES and tensor.dim() > int(batched):
            break
    kind = next((str(tensor.dtype) for tensor in _tensors(item)), type(item).__name__)
    if kind == "ndarray":
        raise TypeError(
            f"No tensor to take moments of in {position} (found ndarray): give torch.from_numpy(x).float()."
        )
    if kind in _OF_TOKENS:
        raise TypeError(
            f"No floating tensor to take moments of in {position} (found {kind}): where these are tokens, give "
            "vp.Tokens(probabilities) or vp.Tokens.uniform(vocabulary) in place of moments; where they are numbers, "
            "convert them to float first, exactly as the model will see them."
        )
    raise TypeError(
        f"No floating tensor to take moments of in {position} (found {kind}): convert the input to float "
        "first, for instance by ToTensor() or x.float() / 255, exactly as the model will see it."
    )


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (Mapping, tuple, list)):
        for value in item.values() if isinstance(item, Mapping) else item:
            yield from _tensors(value)
