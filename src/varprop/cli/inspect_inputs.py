"""Inputs as the command line describes them: moments, data sets, folders of pictures or tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import varprop as vp

from .inspect_files import SAVED, saved_inputs
from .inspect_packages import needed

PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
MOST = 1024  # inputs taken from a data set


def numbers(text: str, option: str, kind: type[Any]) -> list[Any]:
    """Numbers separated by commas."""
    try:
        return [kind(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise vp.VarpropError(f"{option} takes {what} separated by commas, not {text!r}.") from None


def shape_of(text: str) -> tuple[int, ...]:
    """Extents separated by commas."""
    shape = tuple(numbers(text, "--input-shape", int))
    if any(extent < 1 for extent in shape):
        raise vp.VarpropError(f"--input-shape takes extents of 1 and more, not {text!r}.")
    return shape


def per_channel(text: str | None, option: str, shape: tuple[int, ...]) -> Any:
    """One value, or one a channel, beside a batch."""
    import torch

    if text is None:
        return None
    values = torch.tensor(numbers(text, option, float))
    if len(values) not in (1, shape[0]):
        raise vp.VarpropError(f"{option} takes one number or {shape[0]}, one a channel, not {len(values)}.")
    if not values.isfinite().all() or (option == "--std" and bool((values <= 0).any())):
        raise vp.VarpropError(f"{option} takes finite{' positive' if option == '--std' else ''} numbers, not {text!r}.")
    return values.view(1, -1, *[1] * (len(shape) - 1))


def gaussian(shape: tuple[int, ...], mean: Any, std: Any, dtype: Any, positions: bool = False) -> vp.Moments:
    """Moments of the input without data, mean 0 and std 1 unless given; for every position, or one for all."""
    import torch

    stored = shape if positions else [1] * len(shape)
    nothing, one = torch.zeros(1, *stored), torch.ones(1, *stored)
    first, spread = torch.broadcast_tensors(nothing if mean is None else mean, one if std is None else std)
    return vp.Moments(first.to(dtype), spread.square().to(dtype))


def standardized(inputs: Any, mean: Any, std: Any) -> Any:
    """The inputs with their channels brought to the mean and std given, if any."""
    own = vp.input_moments(inputs)
    target_mean = own.mean if mean is None else mean.to(inputs.dtype)
    factor = 1.0 if std is None else std.to(inputs.dtype) / own.std.clamp_min(1e-12)
    return (inputs - own.mean) * factor + target_mean


def data_of(name: str, shape: tuple[int, ...], root: Path | None) -> Any:
    """Inputs as the model would take them: pictures in [0, 1], saved tensors as they are."""
    place = Path(name).expanduser()
    if place.is_dir():
        return _folder(place, shape)
    if place.suffix.lower() in SAVED:
        if not place.is_file():
            raise vp.VarpropError(f"There is no file {place} with data.")
        return saved_inputs([place], shape, MOST)
    from varprop.lab.data import datasets

    if name not in ("mnist", "cifar10", "digits"):
        raise vp.VarpropError(
            f"--data is a folder of pictures or tensors, a .pt or .npy file, or mnist, cifar10 or digits; there is no "
            f"{name!r}."
        )
    images = datasets.load(name, root).train_x[:MOST]
    images = images.float() / 255 if not images.is_floating_point() else images
    if images[0].numel() != math.prod(shape):
        raise vp.VarpropError(f"{name} has images of {tuple(images.shape[1:])}, but the model takes {shape}.")
    return images.reshape(len(images), *shape)


def _folder(folder: Path, shape: tuple[int, ...]) -> Any:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    pictures = [file for file in files if file.suffix.lower() in PICTURES]
    saved = [file for file in files if file.suffix.lower() in SAVED]
    if saved and not pictures:
        return saved_inputs(saved, shape, MOST)
    return _pictures(folder, pictures[:MOST], shape)


def _pictures(folder: Path, files: list[Path], shape: tuple[int, ...]) -> Any:
    import torch

    if len(files) < 2:
        raise vp.VarpropError(f"{folder} holds {len(files)} pictures; two are needed at least.")
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise vp.VarpropError(f"Pictures have 1 or 3 channels, height and width; the model takes {shape}.")
    pillow = needed("PIL.Image")
    mode, size = ("L" if shape[0] == 1 else "RGB"), (shape[2], shape[1])

    def one(file: Path) -> Any:
        try:
            picture = pillow.open(file).convert(mode).resize(size)
        except OSError as error:
            raise vp.VarpropError(f"{file} cannot be read as a picture.") from error
        values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(shape[1], shape[2], shape[0])
        return values.permute(2, 0, 1).float() / 255

    return torch.stack([one(file) for file in files])
