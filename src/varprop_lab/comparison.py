"""The same comparison for a model and data of one's own: `varprop_lab.compare`, and `varprop compare`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import varprop as vp
from varprop.cli.inputs import PICTURES
from varprop.cli.models import callable_named, did_you_mean, located

from . import datasets, report
from .batches import Augmentation, is_tokens, scaled
from .datasets import Dataset
from .environment import require
from .execution import RunOptions, run
from .protocol import (
    FACTORIES,
    METHODS,
    PAPER_BATCH,
    PAPER_LR_MAX,
    STARTS,
    Experiment,
    Factory,
    Method,
    Outcome,
    Start,
    check_names,
)
from .report import result_table
from .starts import ROWS_FIRST, trained_network, without_own_batch_norms
from .store import Store
from .training import Loss, MakeOptimizer

NAME = "compare"  # of the experiment and of its folder
HIGHEST_LR = 10.0  # that a search tries by itself


@dataclass(frozen=True, eq=False)
class MethodComparison:
    """The results of a comparison; printed, the answer and the table.

    Attributes:
        outcomes: Of every cell: its learning rate with the whole search, curves, and the test.
        folder: With all files; `report` writes the page there.
        factory: Of the plain model.
        dataset: What was trained on.
    """

    outcomes: list[Outcome]
    folder: Path
    factory: Factory
    dataset: Dataset

    @property
    def answer(self) -> str:
        """The result in one sentence."""
        return report.answer(self.outcomes)

    def table(self) -> str:
        """A row for every start and method: learning rate, final loss and accuracies, mean ± std over the seeds."""
        return result_table(self.outcomes)

    def report(self) -> Path:
        """Write tables, figures and the HTML page; the path of the page."""
        return report.write_one(self.folder.parent, self.folder.name)

    def model(self, method: Method, start: Start, seed: int = 0) -> nn.Module:
        """A trained network in evaluation mode: the plain model, with layer or group norms where that is the method.

        Raises:
            CompareError: If there is no such cell, or it diverged.
        """
        cells = [o.cell for o in self.outcomes if (o.cell.method, o.cell.start, o.cell.seed) == (method, start, seed)]
        files = [Store(self.folder).weights_file(cell) for cell in cells]
        if not files or not files[0].is_file():
            raise CompareError(f"There is no trained network of {method} from {start} with seed {seed}.")
        weights = torch.load(files[0], map_location="cpu", weights_only=True)
        return trained_network(self.factory, method, weights, scaled(self.dataset.train_x[:2].cpu()))

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (self.answer, self.table())))


def compare(
    model: str | Factory,
    data: Any,
    *,
    methods: Sequence[str] = METHODS,
    starts: Sequence[str] = STARTS,
    loss: str | Loss | None = None,
    optimizer: str | MakeOptimizer | None = None,
    batch_size: int = PAPER_BATCH,
    seeds: int = 1,
    epochs: int = 50,
    lr_max: float | Sequence[float] | None = None,
    augmentation: Augmentation | None = None,
    out: Path | str | None = None,
    **options: Any,
) -> MethodComparison:
    """Compare normalizations of a model: equal starts, and a learning rate found for each.

    Args:
        model: A function that makes the plain model, ``path.py:function``, or the name of one of the experiments'
            models. Batch norms of its own directly after a layer are taken out first.
        data: ``mnist``, ``cifar10``, ``digits``; training inputs, training targets, test inputs and test targets as
            tensors or NumPy arrays; a torch Dataset, or two, for training and test; ``path.py:function``, which
            returns any of these; a folder of pictures with a folder for each class, in folders ``train`` and
            ``test`` or without; or an ``.npz`` file. Inputs are images (N, C, H, W), bytes or floats in [0, 1], other
            floats (N, ...), or tokens, integers (N, ...). Targets are classes (N), or whatever `loss` takes.
        methods: Some of ``standard``, ``weight``, ``batch``, ``analytic``, ``layer``, ``group``. The last two cannot
            compute the plain model's function and begin from the nearest.
        starts: Some of ``none``, ``bn``, ``ap2``, ``orthogonal``.
        loss: Of outputs and targets, a mean over samples; cross-entropy by default.
        optimizer: Called with parameter groups and ``lr``, like the classes of `torch.optim`, or the name of one; Adam
            by default.
        batch_size: Samples in a step.
        seeds: How many.
        epochs: Of the training that is reported; the search has at most 5.
        lr_max: Upper bound of the search, or several. By default 0.01, moved up by itself, to 10 at most, as long as
            the best rate lies there.
        augmentation: Of training images; none by default.
        out: The folder that gets a folder ``compare``; a temporary one by default.
        options: Of `execution.RunOptions`: device, jobs, resume, overwrite, root, max_seconds, ray, show, tensorboard.
            With several jobs other processes import the model, the loss and the optimizer, which lambdas cannot be; a
            script calls this under ``if __name__ == "__main__":`` then.

    Returns:
        The results; printed, the answer and the table.

    Raises:
        VarpropError: If something does not fit; the message says what and what to do.

    Example:
        >>> import varprop_lab
        >>> def model():
        ...     return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.randn(120, 4)
        >>> data = x[:80], (x[:80, 0] > 0).long(), x[80:], (x[80:, 0] > 0).long()
        >>> size = {"seeds": 1, "epochs": 1, "batch_size": 16, "starts": ["none"]}  # three seeds or more in earnest
        >>> results = varprop_lab.compare(model, data, methods=["standard", "analytic"], **size)
        >>> sorted(outcome.cell.method for outcome in results.outcomes)
        ['analytic', 'standard']
        >>> trained = results.model("analytic", "none")
    """
    check_names(methods, starts)
    if batch_size < 2:
        raise CompareError(f"The batch size must be at least 2, got {batch_size}.")
    bounds = (PAPER_LR_MAX,) if lr_max is None else tuple(lr_max) if isinstance(lr_max, Sequence) else (lr_max,)
    experiment = Experiment(
        NAME,
        data if isinstance(data, str) else "tensors",
        model if isinstance(model, str) else getattr(model, "__qualname__", repr(model)),
        augmentation or Augmentation(),
        methods=cast(tuple[Method, ...], tuple(methods)),
        starts=cast(tuple[Start, ...], tuple(starts)),
        batch_sizes=(batch_size,),
        lr_limit=HIGHEST_LR if lr_max is None else None,
    ).adapted(seeds=seeds, epochs=epochs, lr_max=bounds)
    own_loss = function_at(loss, "loss") if isinstance(loss, str) else loss
    how, own_optimizer = RunOptions(**options), optimizer_of(optimizer)
    dataset, factory = data_of(data, loss is not None, how.root), model_of(model)
    if (experiment.augmentation.moves and dataset.train_x.ndim != 4) or (
        experiment.augmentation.noise_variance and is_tokens(dataset.train_x)
    ):
        raise CompareError("Offsets and flips are for images (N, C, H, W), and noise for anything but tokens.")
    check_model(factory, dataset, own_loss)
    folder = Path(tempfile.mkdtemp(prefix="varprop-")) if out is None else Path(out)
    outcomes = run(experiment, folder, how, dataset=dataset, factory=factory, loss=own_loss, optimizer=own_optimizer)
    return MethodComparison(outcomes, folder / NAME, factory, dataset)


PARTS = ("training inputs", "training targets", "test inputs", "test targets")
FEWEST = 10  # training samples: a tenth of them validates
TEST_SHARE = 0.2  # of data that come without a test set
HOW = (
    "data are mnist, cifar10 or digits; a folder of pictures with a folder for each class, in folders train and test "
    "or without; an .npz file; path.py:function; or what such a function returns: training inputs, training targets, "
    "test inputs and test targets as tensors or NumPy arrays, or one or two torch Datasets"
)


class CompareError(vp.VarpropError):
    """A comparison cannot be made as asked; the message says why and what to do."""


def model_of(model: str | Factory) -> Factory:
    """A function that makes the model: itself, one of the experiments' by name, or that at ``path.py:function``."""
    if isinstance(model, str):
        model = FACTORIES[model] if model in FACTORIES else function_at(model, "model", tuple(FACTORIES))
    if isinstance(inspect.unwrap(model), nn.Module) or not callable(model):
        raise CompareError(
            "The model is given as a function that makes it, such as `lambda: Net()`, since every seed draws its own "
            f"weights; got {type(model).__name__}."
        )
    return model


def optimizer_of(optimizer: str | MakeOptimizer | None) -> MakeOptimizer | None:
    """A function that makes the optimizer: a class of `torch.optim` by name, ``path.py:function``, or itself."""
    if not isinstance(optimizer, str):
        return optimizer
    classes = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)]
    return (
        getattr(torch.optim, optimizer) if optimizer in classes else function_at(optimizer, "optimizer", tuple(classes))
    )


def function_at(text: str, what: str, names: Sequence[str] = ()) -> Callable[..., Any]:
    """The function that ``path.py:function`` or ``package.module:function`` names; or one of `names` was meant."""
    path, _, name = text.rpartition(":")
    if not path or not name:
        choices = f" or one of {', '.join(names)}" if 0 < len(names) < 10 else ""
        raise CompareError(
            f"The {what} is given as path.py:function{choices}, not {text!r}.{did_you_mean(text, names)}"
        )
    with _explained(f"The {what} {text} failed"):
        return NamedFunction(path, name)


class NamedFunction:
    """The function or class at ``path.py:name`` or ``package.module:name``, imported anew in other processes.

    Ray, whose machines may have no such file, sends what was imported here: it has a pickler of its own.
    """

    def __init__(self, path: str, name: str) -> None:
        self.place = path, name
        self.function = callable_named(path, name)
        functools.update_wrapper(self, self.function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.function)


ForkingPickler.register(NamedFunction, lambda named: (NamedFunction, named.place))


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Within, an error of the user's code becomes one sentence with its file and line."""
    try:
        yield
    except vp.VarpropError:
        raise
    except Exception as error:
        raise CompareError(f"{what}: {located(error)}") from error


# --- data ---


def data_of(data: Any, has_loss: bool, root: Path | str | None = None) -> Dataset:
    """The data set that is meant by a name, path, function, tensors, arrays or torch Datasets (`HOW`).

    Without a loss of the user's, targets must be classes. Named data sets are looked for in `root` first. Raises a
    CompareError for what is not understood, or cannot be trained on.
    """
    name = data if isinstance(data, str) else "The data"
    if isinstance(data, str) and ":" in data and not Path(data).exists():
        function = function_at(data, "data set")
        with _explained(f"The data set {data} failed"):
            data = function()
    elif isinstance(data, str):
        path = Path(data).expanduser()
        if path.is_dir():
            data = _picture_folder(path)
        elif path.suffix == ".npz":
            data = _arrays(path)
        else:
            return datasets.load(data, root)
    tensors = _four_tensors(data, name)
    train_x, train_y, test_x, test_y = tensors
    for subset, inputs, targets in (("training", train_x, train_y), ("test", test_x, test_y)):
        _check_pair(name, subset, inputs, targets, has_loss)
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        kinds = " and ".join(f"{tuple(x.shape[1:])} {x.dtype}" for x in (train_x, test_x))
        raise CompareError(f"{name}: training and test samples must be of one kind, not {kinds}.")
    if len(train_x) < FEWEST:
        raise CompareError(
            f"{name}: {len(train_x)} training samples are too few, at least {FEWEST} are needed: a tenth of them is "
            "held out for validation."
        )
    if bool((train_x == train_x[:1]).all()):
        raise CompareError(f"{name}: all {len(train_x)} training inputs are the same, so that nothing can be learned.")
    targets_are_classes = not (train_y.is_floating_point() or train_y.ndim > 1)
    classes = int(max(train_y.max(), test_y.max())) + 1 if targets_are_classes else 0
    if not has_loss and int(train_y.min()) == int(train_y.max()):
        raise CompareError(
            f"{name}: all training targets are class {int(train_y[0])}; two classes are needed at least."
        )
    tokens = is_tokens(train_x)
    train_x, test_x = (x.long() if tokens else x for x in (train_x, test_x))
    train_y, test_y = (y if y.is_floating_point() else y.long() for y in (train_y, test_y))
    return Dataset(name, train_x, train_y, test_x, test_y, classes)


def _four_tensors(data: Any, name: str) -> list[Tensor]:
    """Training inputs and targets, test inputs and targets, whatever they came as."""
    if isinstance(data, torch.utils.data.Dataset):
        return _held_out(*_stacked(data, name))
    items = list(data) if isinstance(data, (tuple, list)) else [data]
    if len(items) == 2 and all(isinstance(item, torch.utils.data.Dataset) for item in items):
        return [tensor for item in items for tensor in _stacked(item, name)]
    if len(items) == 2 and all(isinstance(item, (tuple, list)) and len(item) == 2 for item in items):
        items = [*items[0], *items[1]]
    tensors = [torch.as_tensor(item) if hasattr(item, "__array__") else item for item in items]
    if len(tensors) == 2 and all(isinstance(tensor, Tensor) for tensor in tensors):
        return _held_out(*tensors)
    if len(tensors) != 4 or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise CompareError(f"{name} must be four tensors: {', '.join(PARTS)}; or a torch Dataset, or two: {HOW}.")
    return tensors


def _stacked(dataset: Any, name: str) -> tuple[Tensor, Tensor]:
    """All inputs and targets of a torch Dataset, each item a pair of them."""
    try:
        inputs, targets = zip(*(dataset[index] for index in range(len(dataset))), strict=True)
        return torch.stack([torch.as_tensor(x) for x in inputs]), torch.stack([torch.as_tensor(y) for y in targets])
    except Exception as error:
        raise CompareError(
            f"{name}: {type(dataset).__name__} must have a length and items that are pairs of an input and a target, "
            f"tensors of one shape ({located(error)})."
        ) from error


def _held_out(inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Data without a test set, a fifth of them as one, drawn once and for all."""
    if len(inputs) != len(targets):
        raise CompareError(f"There are {len(inputs)} inputs and {len(targets)} targets; each input needs one.")
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    tests = max(1, round(TEST_SHARE * len(order)))
    warnings.warn(f"There is no test set: {tests} of {len(order)} samples are held out as one.", stacklevel=2)
    train, test = order[tests:].sort().values, order[:tests].sort().values
    return [inputs[train], targets[train], inputs[test], targets[test]]


def _arrays(file: Path) -> list[Any]:
    """The four arrays of an .npz file, called train_x, train_y, test_x, test_y or x_train, y_train, x_test, y_test."""
    if not file.is_file():
        raise CompareError(f"There is no file {file}.")
    try:
        arrays = dict(require("numpy", "An .npz file").load(file, allow_pickle=False))
    except (OSError, ValueError) as error:
        raise CompareError(f"{file} cannot be read as arrays ({type(error).__name__}).") from error
    for names in (("train_x", "train_y", "test_x", "test_y"), ("x_train", "y_train", "x_test", "y_test")):
        if set(names) <= arrays.keys():
            return [arrays[name] for name in names]
    raise CompareError(f"{file} must hold arrays train_x, train_y, test_x and test_y, not {', '.join(arrays)}.")


def _picture_folder(folder: Path) -> Any:
    """Pictures as bytes (N, C, H, W) and classes, from folders train and test (or val), or from one without them."""
    tests = next((folder / name for name in ("test", "val", "valid") if (folder / name).is_dir()), None)
    if tests is None or not (folder / "train").is_dir():
        return _pictures(folder, _class_folders(folder))
    classes = _class_folders(folder / "train")
    return [*_pictures(folder / "train", classes), *_pictures(tests, classes)]


def _class_folders(folder: Path) -> list[str]:
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) < 2:
        raise CompareError(f"{folder} must have a folder of pictures for each class, at least two, not {len(classes)}.")
    return classes


def _pictures(folder: Path, classes: Sequence[str]) -> tuple[Tensor, Tensor]:
    pillow = require("PIL.Image", "A folder of pictures")
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in PICTURES
    ]
    if not files:
        raise CompareError(f"There are no pictures in {folder}.")
    images: list[Tensor] = []
    for file, _ in files:
        try:
            picture = pillow.open(file)
            picture = picture if picture.mode in ("L", "RGB") else picture.convert("RGB")
            channels = len(picture.getbands())
            pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        except Exception as error:  # which one depends on the format, and on how the file is broken
            raise CompareError(f"{file} cannot be read as a picture ({type(error).__name__}).") from error
        images.append(pixels.view(picture.height, picture.width, channels).permute(2, 0, 1))
        if images[-1].shape != images[0].shape:
            shapes = f"{tuple(images[-1].shape)} beside {tuple(images[0].shape)} of {files[0][0]}"
            raise CompareError(f"{file} has another shape (channels, height, width): {shapes}; make them alike first.")
    return torch.stack(images), torch.tensor([label for _, label in files])


def _check_pair(name: str, subset: str, inputs: Tensor, targets: Tensor, has_loss: bool) -> None:
    if inputs.ndim < 2 or targets.ndim < 1 or len(inputs) != len(targets) or not len(inputs):
        shapes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
        raise CompareError(
            f"{name}: {subset} inputs must be (N, ...) and targets (N, ...), with N above 0, not {shapes}."
        )
    if inputs.is_complex() or inputs.dtype == torch.bool:
        raise CompareError(f"{name}: {subset} inputs must be bytes, floating point or tokens, not {inputs.dtype}.")
    if not has_loss and (targets.is_floating_point() or targets.ndim != 1 or int(targets.min()) < 0):
        raise CompareError(
            f"{name}: {subset} targets must be classes (N), integers from 0 on, or come with a loss for them."
        )
    for kind, values in (("inputs", inputs), ("targets", targets)):
        bad = ~values.reshape(len(values), -1).isfinite().all(1)
        if count := int(bad.sum()):  # in training they would be a loss that is NaN
            first = int(bad.nonzero()[0, 0])
            raise CompareError(
                f"{name}: {count} of {len(values)} {subset} {kind} hold NaN or infinity, the first is number {first}."
            )
    if is_tokens(inputs) and int(inputs.min()) < 0:
        raise CompareError(f"{name}: {subset} inputs are tokens (integers) and must not be negative.")


# --- the model and the loss ---


@torch.no_grad()
def check_model(factory: Factory, data: Dataset, loss: Loss | None) -> None:
    """Refuse a model that does not take the inputs, has nothing to normalize, or whose outputs do not fit the loss."""
    with _explained("The function of the model failed"):
        model: Any = factory()
    if not isinstance(model, nn.Module):
        raise CompareError(f"The function of the model must return an nn.Module, not {type(model).__name__}.")
    inputs, targets = scaled(data.train_x[:2]), data.train_y[:2]
    with _explained(f"The model does not take inputs of shape {tuple(inputs.shape)} {inputs.dtype}"):
        outputs = model.eval()(inputs)
    if not isinstance(outputs, Tensor):
        raise CompareError(f"The model must return a tensor, not {type(outputs).__name__}.")
    if loss is not None:
        _check_loss(loss, outputs, targets)
    elif outputs.ndim != 2 or outputs.shape[1] < data.classes:
        shape = tuple(outputs.shape)
        raise CompareError(f"The model must return scores (N, {data.classes}), one for each class, not {shape}.")
    if not any(isinstance(module, (*ROWS_FIRST, nn.RNNBase, nn.RNNCellBase)) for module in model.modules()):
        raise CompareError(
            "The model has no linear, convolutional or recurrent layer of torch.nn, so that there is nothing to "
            "normalize."
        )
    for path, module in without_own_batch_norms(model, inputs).named_modules():
        if isinstance(module, _BatchNorm):
            raise CompareError(
                f"Batch norm '{path}' of the model does not directly follow a linear layer, which could do without it, "
                f"so that every method would have it: give a model without batch norms."
            )


def _check_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> None:
    shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
    with _explained(f"The loss does not take {shapes}"), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")  # it would broadcast one against the other
        value: Any = loss(outputs, targets)
    if not isinstance(value, Tensor) or value.ndim:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CompareError(f"The loss must return one number as a tensor, the mean over samples, not {shape}.")
