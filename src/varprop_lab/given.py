"""A model, data, a loss or an optimizer of one's own, given as objects or as ``path.py:function``, and checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import varprop as vp
from varprop.cli.names import callable_named, did_you_mean

from .data import datasets
from .data.augmentation import Augmentation, is_tokens, scaled
from .data.datasets import Dataset
from .protocol.initialization import without_own_batch_norms
from .protocol.models import FACTORIES, Factory
from .training.task import Loss, MakeOptimizer

PARTS = ("training inputs", "training targets", "test inputs", "test targets")


class CompareError(vp.VarpropError):
    """A comparison cannot be made as asked; the message says why and what to do."""


def model_of(given: str | Factory) -> Factory:
    """A function that makes the model; by its own name, that of one of the experiments, or ``path.py:function``."""
    if isinstance(given, str):
        given = FACTORIES[given] if given in FACTORIES else function_at(given, "model", tuple(FACTORIES))
    if isinstance(given, nn.Module) or not callable(given):
        raise CompareError(
            "The model is given as a function that makes it, such as `lambda: Net()`, since every seed draws its own "
            f"weights; got {type(given).__name__}."
        )
    return given


def loss_of(given: str | Loss | None) -> Loss | None:
    """The loss; None for cross-entropy."""
    return function_at(given, "loss") if isinstance(given, str) else given


def optimizer_of(given: str | MakeOptimizer | None) -> MakeOptimizer | None:
    """What makes the optimizer: a class of `torch.optim` by name, ``path.py:function``, or anything called like one."""
    if not isinstance(given, str):
        return given
    known = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)]
    return getattr(torch.optim, given) if given in known else function_at(given, "optimizer", tuple(known))


def data_of(given: str | Sequence[Tensor], has_loss: bool, root: Path | str | None = None) -> Dataset:
    """The data set of a name, of four tensors, or of the function that ``path.py:function`` names.

    Without a loss of one's own (`has_loss`), targets must be classes. Named ones are looked for in `root` first.
    """
    if isinstance(given, str) and ":" not in given:
        return datasets.load(given, root)
    name = given if isinstance(given, str) else "The data"
    parts = function_at(given, "data set")() if isinstance(given, str) else given
    if not isinstance(parts, (tuple, list)) or len(parts) != 4 or not all(isinstance(p, Tensor) for p in parts):
        raise CompareError(f"{name} must be four tensors: {', '.join(PARTS)}.")
    train_x, train_y, test_x, test_y = parts
    for part, inputs, targets in (("training", train_x, train_y), ("test", test_x, test_y)):
        _check_pair(name, part, inputs, targets, has_loss)
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        kinds = " and ".join(f"{tuple(x.shape[1:])} {x.dtype}" for x in (train_x, test_x))
        raise CompareError(f"{name}: training and test samples must be of one kind, not {kinds}.")
    targets_are_classes = not (train_y.is_floating_point() or train_y.ndim > 1)
    classes = int(max(train_y.max(), test_y.max())) + 1 if targets_are_classes else 0
    tokens = is_tokens(train_x)
    inputs = [x.long() if tokens else x for x in (train_x, test_x)]
    targets = [y if y.is_floating_point() else y.long() for y in (train_y, test_y)]
    return Dataset(name, inputs[0], targets[0], inputs[1], targets[1], classes)


def _check_pair(name: str, part: str, inputs: Tensor, targets: Tensor, has_loss: bool) -> None:
    if inputs.ndim < 2 or targets.ndim < 1 or len(inputs) != len(targets) or not len(inputs):
        shapes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
        raise CompareError(
            f"{name}: {part} inputs must be (N, ...) and targets (N, ...), with N above 0, not {shapes}."
        )
    if inputs.is_complex() or inputs.dtype == torch.bool:
        raise CompareError(f"{name}: {part} inputs must be bytes, floating point or tokens, not {inputs.dtype}.")
    if not has_loss and (targets.is_floating_point() or targets.ndim != 1 or int(targets.min()) < 0):
        raise CompareError(
            f"{name}: {part} targets must be classes (N), integers from 0 on, or come with a loss for them."
        )
    _check_finite(name, f"{part} inputs", inputs)
    _check_finite(name, f"{part} targets", targets)
    if is_tokens(inputs) and int(inputs.min()) < 0:
        raise CompareError(f"{name}: {part} inputs are tokens (integers) and must not be negative.")


def _check_finite(name: str, part: str, values: Tensor) -> None:
    """Refuse NaN and infinity by the name and place of the data: in training they would be a loss that is NaN."""
    bad = ~values.reshape(len(values), -1).isfinite().all(1)
    if count := int(bad.sum()):
        first = int(bad.nonzero()[0, 0])
        raise CompareError(
            f"{name}: {count} of {len(values)} {part} hold NaN or infinity, the first is number {first}."
        )


def check_augmentation(augmentation: Augmentation, data: Dataset) -> None:
    """Refuse offsets, flips and noise where they mean nothing."""
    moved = augmentation.shift or augmentation.flip
    if (moved and data.train_x.ndim != 4) or (augmentation.noise_variance and is_tokens(data.train_x)):
        raise CompareError("Offsets and flips are for images (N, C, H, W), and noise for anything but tokens.")


def function_at(text: str, what: str, names: Sequence[str] = ()) -> Callable[..., Any]:
    """The function that ``path.py:function`` or ``package.module:function`` names; or one of `names` was meant."""
    path, _, name = text.rpartition(":")
    if not path or not name:
        known = f" or one of {', '.join(names)}" if 0 < len(names) < 10 else ""
        raise CompareError(f"The {what} is given as path.py:function{known}, not {text!r}.{did_you_mean(text, names)}")
    return callable_named(path, name)


@torch.no_grad()
def check_model(factory: Factory, data: Dataset, loss: Loss | None) -> None:
    """Refuse a model that does not take the inputs, or whose outputs do not fit the loss."""
    model = factory()
    if not isinstance(model, nn.Module):
        raise CompareError(f"The function of the model must return an nn.Module, not {type(model).__name__}.")
    inputs, targets = scaled(data.train_x[:2]), data.train_y[:2]
    try:
        outputs = model.eval()(inputs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise CompareError(f"The model does not take inputs of shape {tuple(inputs.shape)}: {error}") from error
    found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if not isinstance(outputs, Tensor):
        raise CompareError(f"The model must return a tensor, not {found}.")
    if loss is not None:
        _check_loss(loss, outputs, targets)
    elif outputs.ndim != 2 or outputs.shape[1] < data.classes:
        raise CompareError(f"The model must return scores (N, {data.classes}), one for each class, not {found}.")
    for path, module in without_own_batch_norms(model, inputs).named_modules():
        if isinstance(module, _BatchNorm):
            raise CompareError(
                f"Batch norm '{path}' of the model does not directly follow a linear layer, which could do without it, "
                f"so that every method would have it: give a model without batch norms."
            )


def _check_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")  # it would broadcast one against the other
            value = loss(outputs, targets)
    except (RuntimeError, ValueError, TypeError, IndexError, UserWarning) as error:
        raise CompareError(f"The loss does not take {shapes}: {error}") from error
    if not isinstance(value, Tensor) or value.ndim:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CompareError(f"The loss must return one number as a tensor, the mean over samples, not {found}.")
