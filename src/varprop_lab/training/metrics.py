"""The running training loss, and loss and accuracy on images that are not trained on; of one network or many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

LabelledImages = tuple[Tensor, Tensor]
Losses = Callable[[Tensor, Tensor], Tensor]
Scores = Callable[[Tensor], Tensor]

_AT_ONCE = {"cpu": 2000, "cuda": 10_000}  # images


def in_parts(images: Tensor, labels: Tensor, axis: int = 0) -> Iterator[LabelledImages]:
    """Images and labels, as many at a time as the device takes well."""
    count = _AT_ONCE.get(images.device.type, 2000)
    yield from zip(images.split(count, axis), labels.split(count, axis), strict=True)


def full_batches(images: Tensor, labels: Tensor, size: int, axis: int = 0) -> Iterator[LabelledImages]:
    """Images and labels in batches of one size, for statistics of batches; the rest is left out, unless it is all."""
    count = images.shape[axis]
    size = min(size, count)
    for first in range(0, count - size + 1, size):
        yield images.narrow(axis, first, size), labels.narrow(axis, first, size)


@torch.no_grad()
def loss_and_accuracy(
    scores: Scores, parts: Iterable[LabelledImages], losses: Losses | None = None, axis: int = 0
) -> tuple[Tensor, Tensor]:
    """Mean loss and share of right answers; an answer that is not finite is not right.

    Args:
        scores: Makes scores (..., samples, classes) of images.
        parts: Images, and their labels in a shape that broadcasts to (..., samples).
        losses: Mean losses of networks, from their outputs and the targets; cross-entropy by default. With it outputs
            may have any shape, and the share of right answers is NaN unless targets are classes of their last axis.
        axis: Of the samples in the outputs, for `losses`.

    Returns:
        Two float64 tensors, without the axis of samples: nothing here waits for the device.
    """
    if losses is None:
        sums = [_sums(scores(images), labels) for images, labels in parts]
    else:
        sums = [_own_sums(scores(images), labels, losses, axis) for images, labels in parts]
    loss, right, count = (torch.stack(part).sum(0) for part in zip(*sums, strict=True))
    return loss / count, right / count


def _sums(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logs = F.log_softmax(scores.float() if scores.dtype != torch.float64 else scores, -1)
    labels = labels.expand(logs.shape[:-1])
    loss = -logs.gather(-1, labels[..., None])[..., 0].double().sum(-1)
    right = (logs.argmax(-1) == labels) & logs.isfinite().all(-1)
    return loss, right.double().sum(-1), torch.full_like(loss, labels.shape[-1])


def _own_sums(outputs: Tensor, targets: Tensor, losses: Losses, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    loss = losses(outputs, targets).double()
    count = torch.full_like(loss, outputs.shape[axis])
    return loss * count, _share_right(outputs, targets, axis).expand_as(loss) * count, count


def _share_right(outputs: Tensor, targets: Tensor, axis: int) -> Tensor:
    if targets.is_floating_point() or outputs.ndim < 2 or targets.shape[-1:] != outputs.shape[:-1][-1:]:
        return outputs.new_tensor(torch.nan, dtype=torch.float64)
    right = (outputs.argmax(-1) == targets) & outputs.isfinite().all(-1)
    return right.double().flatten(axis).mean(-1)


class RunningLoss:
    """Means of several streams of losses whose weights vanish to `remain` in one epoch.

    After losses l_1 ... l_n it is sum q^(n-i) l_i / sum q^(n-i) with q = remain^(1 / steps): the objective of
    `vp.training_objective`, without waiting for the device. Once infinite or NaN it stays so.
    """

    def __init__(self, count: int, steps: int, remain: float, device: torch.device) -> None:
        self.decay = remain ** (1.0 / steps)
        self.sums = torch.zeros(count, dtype=torch.float64, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, losses: Tensor) -> None:
        """Take in one loss of each stream."""
        self.sums.mul_(self.decay).add_(losses)
        self.weight.mul_(self.decay).add_(1)

    def values(self) -> list[float]:
        """The means so far."""
        found: list[float] = (self.sums / self.weight).tolist()
        return found

    def reset_(self) -> None:
        """Forget everything."""
        self.sums.zero_()
        self.weight.zero_()

    def state(self) -> dict[str, Tensor]:
        """What changes in training."""
        return {"sums": self.sums, "weight": self.weight}
