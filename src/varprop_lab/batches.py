"""The samples a network sees, step by step: the same for every method, in every way of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import varprop as vp

from .datasets import Dataset

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
        steps_at_once = _CHUNK_BYTES // (4 * self.batch_size * self.images[0].numel())
        for rows in order.split(max(1, min(_CHUNK_STEPS, steps_at_once))):
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


def evaluation_images(images: Tensor, augmentation: Augmentation, seed: int) -> Tensor:
    """Images for evaluation: with the noise, which makes the task, drawn once; without offsets and flips."""
    noise = replace(augmentation, shift=0, flip=False)
    return augmented(images, noise, seeded(FIXED, seed, 1, images.device))


_CHUNK = 4096  # images summed at once: 100 MB in float64 for CIFAR-10


@dataclass(frozen=True)
class Augmentation:
    """Random changes of an image on its way into training."""

    shift: int = 0  # offsets are uniform on the integers in [-shift, shift], along both axes, with zero padding
    flip: bool = False  # whether half of the images are mirrored left to right
    noise_variance: float = 0.0  # of the Gaussian noise added to pixels in [0, 1]

    @property
    def moves(self) -> bool:
        """True if images are moved or mirrored."""
        return self.shift > 0 or self.flip

    def __post_init__(self) -> None:
        if self.shift < 0 or self.noise_variance < 0:
            raise ValueError(f"shift and noise_variance must not be negative, got {self}.")


@torch.no_grad()
def augmented(images: Tensor, augmentation: Augmentation, generator: torch.Generator | None = None) -> Tensor:
    """The images (B, C, H, W) as the network sees them: moved, mirrored, scaled to [0, 1], noise added; float32.

    Random numbers are drawn in a fixed order on the device, without synchronisation.
    """
    drawn: dict[str, Any] = {"device": images.device, "generator": generator}
    shift, count = augmentation.shift, (len(images),)
    rows, columns = (torch.randint(0, 2 * shift + 1, count, **drawn) if shift else None for _ in range(2))
    flips = torch.rand(count, **drawn) < 0.5 if augmentation.flip else None
    pixels = scaled(moved(images, shift, rows, columns, flips))
    if not augmentation.noise_variance:
        return pixels
    noisy = pixels.clone() if pixels is images else pixels
    return noisy.add_(torch.randn(images.shape, **drawn), alpha=augmentation.noise_variance**0.5)


def scaled(images: Tensor) -> Tensor:
    """Images as float32 in [0, 1], without augmentation: bytes divided by 255, floats and tokens as they are."""
    if is_tokens(images):
        return images
    return images.float().div_(255) if images.dtype == torch.uint8 else images.float()


def is_tokens(samples: Tensor) -> bool:
    """True if samples are numbers of tokens: integers, except bytes, which are pixels."""
    return not samples.is_floating_point() and samples.dtype != torch.uint8


def moved(images: Tensor, shift: int, rows: Tensor | None, columns: Tensor | None, flips: Tensor | None) -> Tensor:
    """Images moved down and to the right by an offset of each less the shift, zeros coming in, then mirrored.

    One gather for offsets and flips together: it moves bytes, a quarter of what floats would be.
    """
    if rows is None and flips is None:
        return images
    padded = F.pad(images, (shift, shift, shift, shift))
    down = _positions(images.shape[-2], rows, shift, images.device)
    right = _positions(images.shape[-1], columns, shift, images.device, flips)
    index = (down * padded.shape[-1])[:, :, None] + right[:, None, :]
    index = index.flatten(1)[:, None, :].expand(len(images), images.shape[1], -1)
    return padded.flatten(2).gather(2, index).view(images.shape)


def _positions(
    extent: int, offsets: Tensor | None, shift: int, device: torch.device, flips: Tensor | None = None
) -> Tensor:
    """Where each of `extent` positions is read from in the padded axis, one row an image (or one for all)."""
    straight = torch.arange(extent, device=device)
    order = straight[None] if flips is None else torch.where(flips[:, None], extent - 1 - straight, straight)
    return order if offsets is None else order + (2 * shift - offsets)[:, None]


def statistics(dataset: Dataset, indices: Tensor, augmentation: Augmentation) -> vp.Moments:
    """Mean and variance of the augmented training images: of pixels (1, C, H, W), of elements of other samples.

    Nothing is sampled: they are averages over every offset and both orientations, and noise adds its variance. Images
    of several channels go through convolutions and get one value for all positions (1, C, 1, 1).
    """
    first, second = (_spread(image, augmentation) for image in _power_means(dataset.train_x, indices))
    if first.ndim == 3 and first.shape[0] > 1:
        first, second = first.mean((1, 2), keepdim=True), second.mean((1, 2), keepdim=True)
    var = (second - first.square()).clamp_min(0) + augmentation.noise_variance
    device = dataset.train_x.device
    return vp.Moments(first[None].to(device, torch.float32), var[None].to(device, torch.float32))


def _power_means(images: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and mean square of the images, (C, H, W) in float64."""
    if len(indices) == 0:
        raise ValueError("statistics needs at least one training image.")
    first = torch.zeros(images.shape[1:], dtype=torch.float64, device=images.device)
    second = torch.zeros_like(first)
    for chunk in indices.split(_CHUNK):
        values = images[chunk].double()
        first += values.sum(0)
        second += values.square_().sum(0)
    top = 255.0 if images.dtype == torch.uint8 else 1.0
    return first / (top * len(indices)), second / (top * top * len(indices))


def _spread(image: Tensor, augmentation: Augmentation) -> Tensor:
    """The average of an image (C, H, W) over all offsets, with zeros coming in, and over both orientations."""
    if augmentation.flip:
        image = (image + image.flip(-1)) / 2
    shift = augmentation.shift
    return F.avg_pool2d(image[None], 2 * shift + 1, stride=1, padding=shift)[0] if shift else image
