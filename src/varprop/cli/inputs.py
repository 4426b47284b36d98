"""Inputs as the command line describes them: moments, data sets, folders of pictures or tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import varprop as vp

from .models import NamedModel, check_inputs, check_runs, embedding_rows, needed, read_file
from .options import lab

SAVED = {".pt", ".pth", ".npy"}
MOST = 1024  # inputs taken from files
PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
BATCH = 16  # inputs that --check runs at a time, at most
RUNS = 8  # and how often at least: standard errors come from the differences


@dataclass(frozen=True)
class InputOptions:
    """The options on the input, by the names of the command line."""

    input_shape: list[str]
    mean: str | None = None
    std: str | None = None
    data: str | None = None
    check: bool = False
    samples: int = 64
    root: Path | None = None
    positions: bool = False
    covariance: str | None = None

    def batch(self, available: int) -> int:
        """How many inputs to run at a time."""
        return max(1, min(BATCH, available // RUNS)) if self.check and not self.covariance else 1

    def moments_of(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Mean and std as given for an input, None where they are not."""
        return _per_channel(self.mean, "--mean", shape), _per_channel(self.std, "--std", shape)


@dataclass(frozen=True)
class Inputs:
    """The arguments of `vp.inspect` that every state of the model shares."""

    moments: Any
    example: Any
    check: Any


def make_inputs(named: NamedModel, target: str, options: InputOptions) -> Inputs:
    """The inputs of a model, from the options and from what is known of it."""
    model = named.model
    if not options.input_shape and named.shape is None:
        raise vp.VarpropError(f"The shape of the input of {target} is not known: give it by --input-shape 3,224,224.")
    shapes = [_shape_of(text) for text in options.input_shape] or [named.shape or ()]
    check_inputs(model, target, len(shapes))
    tokens = named.tokens or (_tokens_read(model, shapes[0]) if len(shapes) == 1 else None)
    if tokens is not None:
        return _tokens(model, tokens, target, shapes[0], options)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    check_runs(model, [torch.zeros(1, *shape, dtype=dtype) for shape in shapes], target)
    if options.data is None:
        return _gaussian_inputs(shapes, options, dtype)
    if len(shapes) > 1:
        raise vp.VarpropError("--data is for one input, and several shapes were given: leave it out.")
    (shape,) = shapes
    data = _standardized(_data(options.data, shape, options.root).to(dtype), *options.moments_of(shape))
    if options.covariance:
        moments = vp.input_moments(data, covariance=True)
    else:
        moments = vp.input_moments(data, "element" if options.positions else "channel")
    example = torch.zeros(options.batch(min(options.samples, len(data))), *shape, dtype=dtype)
    return Inputs(moments, example, data if options.check else None)


def _gaussian_inputs(shapes: list[tuple[int, ...]], options: InputOptions, dtype: Any) -> Inputs:
    """Independent inputs, all with the mean and std given."""
    moments = [_gaussian(shape, *options.moments_of(shape), dtype, options.positions) for shape in shapes]
    examples = [torch.zeros(options.batch(options.samples), *shape, dtype=dtype) for shape in shapes]
    check = "gaussian" if options.check else None
    if len(shapes) == 1:
        return Inputs(moments[0], examples[0], check)
    return Inputs(tuple(moments), tuple(examples), check)


def _tokens_read(model: Any, shape: tuple[int, ...]) -> int | None:
    """How many tokens the embedding knows that reads the input; None if none does."""
    try:
        return embedding_rows(model, torch.zeros(1, *shape, dtype=torch.long))
    except Exception:  # whatever a model says of whole numbers
        return None


def _tokens(model: Any, tokens: int, target: str, shape: tuple[int, ...], options: InputOptions) -> Inputs:
    if options.data is not None or options.mean is not None or options.std is not None:
        raise vp.VarpropError(f"{target} takes tokens, all equally likely: leave out --data, --mean and --std.")
    if options.positions:
        raise vp.VarpropError(f"{target} takes tokens, and --positions is for images: leave it out.")
    example = torch.zeros(1, *shape, dtype=torch.long)
    check_runs(model, [example], target)
    return Inputs(vp.Tokens.uniform(tokens), example, "gaussian" if options.check else None)


def _numbers(text: str, option: str, kind: type[Any]) -> list[Any]:
    """Numbers separated by commas."""
    try:
        return [kind(word) for word in text.replace("x", ",").split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise vp.VarpropError(f"{option} takes {what} separated by commas, not {text!r}.") from None


def _shape_of(text: str) -> tuple[int, ...]:
    """Extents separated by commas."""
    shape = tuple(_numbers(text, "--input-shape", int))
    if any(extent < 1 for extent in shape):
        raise vp.VarpropError(f"--input-shape takes extents of 1 and more, not {text!r}.")
    return shape


def _per_channel(text: str | None, option: str, shape: tuple[int, ...]) -> Any:
    """One value, or one a channel, beside a batch."""
    if text is None:
        return None
    values = torch.tensor(_numbers(text, option, float))
    if len(values) not in (1, shape[0]):
        raise vp.VarpropError(f"{option} takes one number or {shape[0]}, one a channel, not {len(values)}.")
    if not values.isfinite().all() or (option == "--std" and bool((values <= 0).any())):
        raise vp.VarpropError(f"{option} takes finite{' positive' if option == '--std' else ''} numbers, not {text!r}.")
    return values.view(1, -1, *[1] * (len(shape) - 1))


def _gaussian(shape: tuple[int, ...], mean: Any, std: Any, dtype: torch.dtype, positions: bool) -> vp.Moments:
    """Moments of the input without data, mean 0 and std 1 unless given; for every position, or one for all."""
    stored = shape if positions else [1] * len(shape)
    nothing, unit = torch.zeros(1, *stored), torch.ones(1, *stored)
    first, spread = torch.broadcast_tensors(nothing if mean is None else mean, unit if std is None else std)
    return vp.Moments(first.to(dtype), spread.square().to(dtype))


def _standardized(inputs: Any, mean: Any, std: Any) -> Any:
    """The inputs with their channels brought to the mean and std given, if any."""
    measured = vp.input_moments(inputs)
    target_mean = measured.mean if mean is None else mean.to(inputs.dtype)
    factor = 1.0 if std is None else std.to(inputs.dtype) / measured.std.clamp_min(1e-12)
    return (inputs - measured.mean) * factor + target_mean


def _data(name: str, shape: tuple[int, ...], root: Path | None) -> Any:
    """Inputs as the model would take them: pictures in [0, 1], saved tensors as they are."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path, shape)
    if path.suffix.lower() in SAVED:
        if not path.is_file():
            raise vp.VarpropError(f"There is no file {path} with data.")
        return saved_inputs([path], shape)
    if lab() is None or name not in lab().DATASETS:
        raise vp.VarpropError(
            f"--data is a folder of pictures or tensors, a .pt or .npy file, or, with the lab, mnist, cifar10 or "
            f"digits; there is no {name!r}."
        )
    images = lab().load_inputs(name, root)[:MOST]
    if images[0].numel() != math.prod(shape):
        raise vp.VarpropError(f"{name} has images of {tuple(images.shape[1:])}, but the model takes {shape}.")
    return images.reshape(len(images), *shape)


def _folder(folder: Path, shape: tuple[int, ...]) -> Any:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    pictures = [file for file in files if file.suffix.lower() in PICTURES]
    saved = [file for file in files if file.suffix.lower() in SAVED]
    if saved and not pictures:
        return saved_inputs(saved, shape)
    return _pictures(folder, pictures[:MOST], shape)


def _pictures(folder: Path, files: list[Path], shape: tuple[int, ...]) -> Any:
    if len(files) < 2:
        raise vp.VarpropError(f"{folder} holds {len(files)} pictures; two are needed at least.")
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise vp.VarpropError(f"Pictures have 1 or 3 channels, height and width; the model takes {shape}.")
    pillow = needed("PIL.Image")
    mode, size = ("L" if shape[0] == 1 else "RGB"), (shape[2], shape[1])

    def one(file: Path) -> Any:
        try:
            picture = pillow.open(file).convert(mode).resize(size)
        except Exception as error:  # which one depends on the format, and on how the file is broken
            raise vp.VarpropError(f"{file} cannot be read as a picture ({type(error).__name__}).") from error
        values = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(shape[1], shape[2], shape[0])
        return values.permute(2, 0, 1).float() / 255

    return torch.stack([one(file) for file in files])


def saved_inputs(files: list[Path], shape: tuple[int, ...]) -> Any:
    """Inputs out of files, each with one of them or with a stack."""
    inputs: list[Any] = []
    for file in files:
        inputs += list(_stack(file, shape))
        if len(inputs) >= MOST:
            break
    if len(inputs) < 2:
        raise vp.VarpropError(f"{files[0]} holds {len(inputs)} input(s); two are needed at least.")
    return torch.stack(inputs[:MOST])


def _stack(file: Path, shape: tuple[int, ...]) -> Any:
    values = read_file(file, "as a tensor")
    if not isinstance(values, torch.Tensor):
        raise vp.VarpropError(f"{file} holds no tensor but {type(values).__name__}.")
    for candidate in (values, values[None]):
        if tuple(candidate.shape[1:]) == shape:
            return candidate if candidate.is_floating_point() else candidate.float()
    raise vp.VarpropError(f"{file} holds a tensor of shape {tuple(values.shape)}, but the model takes {shape}.")
