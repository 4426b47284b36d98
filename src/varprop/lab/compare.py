"""The same comparison for a model and data of one's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import varprop as vp

from .data import datasets
from .data.augmentation import Augmentation
from .data.datasets import Dataset
from .execution.run import run
from .protocol.experiments import PAPER_BATCH, PAPER_LR_MAX, Experiment, check_names
from .protocol.models import FACTORIES, Factory
from .protocol.records import METHODS, STARTS, Method, Outcome, Start


class CompareError(vp.VarpropError):
    """A comparison cannot be made as asked; the message says why and what to do."""


def compare(
    out: Path,
    dataset: str,
    model: str,
    methods: tuple[str, ...] = METHODS,
    starts: tuple[str, ...] = STARTS,
    *,
    root: Path | str | None = None,
    augmentation: Augmentation | None = None,
    batch_size: int = PAPER_BATCH,
    seeds: int = 1,
    epochs: int = 50,
    lr_max: tuple[float, ...] = (PAPER_LR_MAX,),
    together: bool = True,
    **options: Any,
) -> list[Outcome]:
    """Compare parametrizations of a model, each with a learning rate of its own.

    Args:
        out: The folder that gets a folder ``compare``.
        dataset: ``mnist``, ``cifar10``, ``digits``, or ``path.py:function``, which returns training images, training
            labels, test images and test labels as tensors: images (N, C, H, W), bytes or floats in [0, 1].
        model: ``path.py:function``, which returns an `nn.Module` from images to scores of the classes, or the name of
            one of the models of the experiments.
        methods: Some of ``standard``, ``weight``, ``batch``, ``analytic``.
        starts: Some of ``none``, ``bn``, ``ap2``, ``orthogonal``.
        root: Where data sets are looked for first.
        augmentation: Of the training images; none by default.
        batch_size: Samples in a step.
        seeds: How many.
        epochs: Of the training that is reported; the search has at most 5.
        lr_max: Upper bounds of the search.
        together: Train all cells as one ensemble, which is fastest for small networks; otherwise one at a time.
        options: For `execution.run.run`: device, resume, max_seconds, ray, show, tensorboard, command.
    """
    check_names(methods, starts)
    if batch_size < 2:
        raise CompareError(f"The batch size must be at least 2, got {batch_size}.")
    experiment = Experiment(
        "compare",
        dataset,
        model,
        augmentation or Augmentation(),
        methods=cast(tuple[Method, ...], methods),
        starts=cast(tuple[Start, ...], starts),
        batch_sizes=(batch_size,),
        together=together,
    ).adapted(seeds=seeds, epochs=epochs, lr_max=lr_max)
    data, factory = _dataset_of(dataset, root), _factory_of(model)
    _check_model(factory, data)
    return run(experiment, out, dataset=data, factory=factory, **options)


def _factory_of(text: str) -> Factory:
    """The function that ``path.py:function`` names, or one of the experiments' models."""
    return FACTORIES[text] if text in FACTORIES else _function_at(text, "model")


def _dataset_of(text: str, root: Path | str | None = None) -> Dataset:
    """The data set of a name, or what the function that ``path.py:function`` names returns."""
    if ":" not in text:
        return datasets.load(text, root)
    parts = _function_at(text, "data set")()
    if not isinstance(parts, (tuple, list)) or len(parts) != 4 or not all(isinstance(p, Tensor) for p in parts):
        raise CompareError(f"{text} must return four tensors: training images and labels, test images and labels.")
    train_x, train_y, test_x, test_y = parts
    for part, images, labels in (("training", train_x, train_y), ("test", test_x, test_y)):
        _check_pair(text, images, labels)
        _check_finite(text, part, images)
    classes = int(max(train_y.max(), test_y.max())) + 1
    return Dataset(text, train_x, train_y.long(), test_x, test_y.long(), classes)


def _check_pair(text: str, images: Tensor, labels: Tensor) -> None:
    if images.ndim != 4 or labels.ndim != 1 or len(images) != len(labels) or not len(images):
        shapes = f"{tuple(images.shape)} and {tuple(labels.shape)}"
        raise CompareError(f"{text}: images must be (N, C, H, W) and labels (N), with N above 0, not {shapes}.")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise CompareError(f"{text}: images must be bytes or floating point, not {images.dtype}.")
    if labels.is_floating_point() or int(labels.min()) < 0:
        raise CompareError(f"{text}: labels must be integers from 0 on.")


def _check_finite(text: str, part: str, images: Tensor) -> None:
    """Refuse NaN and infinity by the name and place of the data: in training they would be a loss that is NaN."""
    bad = (~images.flatten(1).isfinite()).any(1)
    if count := int(bad.sum()):
        first = int(bad.nonzero()[0, 0])
        raise CompareError(
            f"{text}: {count} of {len(images)} {part} samples hold NaN or infinity, the first is number {first}."
        )


def _function_at(text: str, what: str) -> Callable[[], Any]:
    """The function that ``path.py:function`` names."""
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise CompareError(f"The {what} is given as path.py:function, not {text!r}.")
    file = Path(path).expanduser()
    if not file.is_file():
        raise CompareError(f"There is no file {file} for the {what}.")
    spec = importlib.util.spec_from_file_location(f"_varprop_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise CompareError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise CompareError(f"{file} has no function {name!r}.")
    return function  # type: ignore[no-any-return]


@torch.no_grad()
def _check_model(factory: Factory, data: Dataset) -> None:
    """Refuse a model that does not take the images or has too few outputs."""
    model = factory()
    if not isinstance(model, nn.Module):
        raise CompareError(f"The function of the model must return an nn.Module, not {type(model).__name__}.")
    shape = (2, *data.train_x.shape[1:])
    try:
        scores = model.eval()(torch.zeros(shape))
    except (RuntimeError, ValueError, TypeError) as error:
        raise CompareError(f"The model does not take images of shape {shape}: {error}") from error
    if not isinstance(scores, Tensor) or scores.ndim != 2 or scores.shape[1] < data.classes:
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise CompareError(f"The model must return scores (N, {data.classes}), one for each class, not {found}.")
