"""The samples a network sees, step by step: the same for every method, in every way of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .augmentation import Augmentation, augmented

_CHUNK_BYTES = 1 << 25  # prepared at once: many batches of small images, a few of large ones
_CHUNK_STEPS = 64

# What random numbers are drawn for; each has a stream of its own.
ORDER, AUGMENT, MEASURE, FIXED, GENERAL = range(5)


def seeded(purpose: int, seed: int, epoch: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator that depends on nothing but its arguments."""
    return torch.Generator(device).manual_seed(seed_of(purpose, seed, epoch))


def seed_of(purpose: int, seed: int, epoch: int = 0) -> int:
    """One number for a purpose, seed and epoch, far from that of any other."""
    return (0x9E3779B97F4A7C15 * (1 + purpose + 8 * (epoch + 4096 * seed))) % (1 << 62)


@dataclass(frozen=True)
class Batches:
    """The training part of a data set for one seed, in batches."""

    images: Tensor  # all of them
    labels: Tensor  # likewise
    indices: Tensor  # those trained on
    augmentation: Augmentation  # what happens to each image, anew every time
    batch_size: int  # samples in a step
    seed: int  # of order and augmentation

    @property
    def steps(self) -> int:
        """Batches in an epoch; the last is filled up with the first samples of the epoch."""
        return math.ceil(len(self.indices) / self.batch_size)

    def chunks(self, epoch: int, purpose: int = AUGMENT) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch as pairs of images (steps, batch, C, H, W) and labels (steps, batch), several steps at once."""
        device = self.images.device
        order = self._order(epoch)
        generator = seeded(purpose, self.seed, epoch, device)
        for rows in order.split(self._steps_at_once()):
            chosen = self.indices[rows.flatten().to(device)]
            images = augmented(self.images[chosen], self.augmentation, generator)
            yield images.unflatten(0, rows.shape), self.labels[chosen].unflatten(0, rows.shape)

    def still(self) -> Batches:
        """The batches without offsets and flips, as validation images are."""
        return replace(self, augmentation=replace(self.augmentation, shift=0, flip=False))

    def first_batch(self) -> Tensor:
        """One augmented batch, for statistics that a start is made with."""
        chosen = self.indices[self._order(0)[0].to(self.images.device)]
        return augmented(self.images[chosen], self.augmentation, seeded(FIXED, self.seed, 0, self.images.device))

    def _order(self, epoch: int) -> Tensor:
        order = torch.randperm(len(self.indices), generator=seeded(ORDER, self.seed, epoch))
        filled = order.repeat(1 + math.ceil(self.batch_size / len(order)))
        return filled[: self.steps * self.batch_size].view(self.steps, self.batch_size)

    def _steps_at_once(self) -> int:
        size = 4 * self.batch_size * self.images[0].numel()
        return max(1, min(_CHUNK_STEPS, _CHUNK_BYTES // size))


def evaluation_images(images: Tensor, augmentation: Augmentation, seed: int) -> Tensor:
    """Images for evaluation: with the noise, which makes the task, drawn once; without offsets and flips."""
    noise = replace(augmentation, shift=0, flip=False)
    return augmented(images, noise, seeded(FIXED, seed, 1, images.device))
