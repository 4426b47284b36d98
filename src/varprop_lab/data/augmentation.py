"""Random offsets, flips and noise for a whole batch at once, on whatever device the images are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import varprop as vp

from .datasets import Dataset

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
    """Mean and variance of the augmented training images, exactly: the average over all offsets and flips.

    Nothing is sampled. The mean image and the mean squared image, averaged over every offset and both orientations, are
    what a measurement converges to after many passes; the noise adds its variance to each pixel.

    Returns:
        Statistics of pixels (1, C, H, W), or of channels (1, C, 1, 1) where the images have several: colour images go
        through convolutions, for which one value stands for all positions; of every element of other samples.
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
