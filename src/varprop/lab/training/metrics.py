"""The running training loss, and loss and accuracy on images that are not trained on; of one network or many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

LabelledImages = tuple[Tensor, Tensor]
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
def loss_and_accuracy(scores: Scores, parts: Iterable[LabelledImages]) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy and share of right answers; an answer that is not finite is not right.

    Args:
        scores: Makes scores (..., samples, classes) of images.
        parts: Images, and their labels in a shape that broadcasts to (..., samples).

    Returns:
        Two float64 tensors, without the axis of samples: nothing here waits for the device.
    """
    sums = [_sums(scores(images), labels) for images, labels in parts]
    loss, right, count = (torch.stack(part).sum(0) for part in zip(*sums, strict=True))
    return loss / count, right / count


def _sums(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logs = F.log_softmax(scores.float() if scores.dtype != torch.float64 else scores, -1)
    labels = labels.expand(logs.shape[:-1])
    loss = -logs.gather(-1, labels[..., None])[..., 0].double().sum(-1)
    right = (logs.argmax(-1) == labels) & logs.isfinite().all(-1)
    return loss, right.double().sum(-1), torch.full_like(loss, labels.shape[-1])


class RunningLoss:
    """Means of several streams of losses whose weights vanish to `remain` in one epoch.

    After losses l_1 ... l_n it is sum q^(n-i) l_i / sum q^(n-i) with q = remain^(1 / steps): the objective of
    `vp.training_objective`, without waiting for the device. Once infinite or NaN it stays so.

    Args:
        count: Of the streams.
        steps: In an epoch.
        remain: The share of a weight that is left after one epoch.
        device: Where losses are.
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
