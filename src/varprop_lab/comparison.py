"""The same comparison for a model and data of one's own: `varprop_lab.compare`, and `varprop compare`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from . import report, user_code
from .data.augmentation import Augmentation, scaled
from .data.datasets import Dataset
from .execution.run import run
from .protocol.experiments import PAPER_BATCH, PAPER_LR_MAX, Experiment, check_names
from .protocol.models import Factory
from .protocol.records import METHODS, STARTS, Method, Outcome, Start
from .protocol.starts import trained_network
from .report.text import result_table
from .store.folder import Store
from .training.ensemble import CannotStack
from .training.task import Loss, MakeOptimizer

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
            raise user_code.CompareError(f"There is no trained network of {method} from {start} with seed {seed}.")
        weights = torch.load(files[0], map_location="cpu", weights_only=True)
        return trained_network(self.factory, method, weights, scaled(self.dataset.train_x[:2].cpu()))

    def __str__(self) -> str:
        return report.answer_and_table(self.outcomes)


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
    together: bool = True,
    out: Path | str | None = None,
    root: Path | str | None = None,
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
            by default. Networks are trained one at a time with it.
        batch_size: Samples in a step.
        seeds: How many.
        epochs: Of the training that is reported; the search has at most 5.
        lr_max: Upper bound of the search, or several. By default 0.01, moved up by itself, to 10 at most, as long as
            the best rate lies there.
        augmentation: Of training images; none by default.
        together: Train all cells as one ensemble, which is fastest for small networks; otherwise, and where torch
            cannot do that (recurrent layers), one at a time.
        out: The folder that gets a folder ``compare``; a temporary one by default.
        root: Where data sets are looked for first.
        options: For `execution.run.run`: device, resume, overwrite, max_seconds, ray, show, tensorboard.

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
        raise user_code.CompareError(f"The batch size must be at least 2, got {batch_size}.")
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
        together=together and optimizer is None,
    ).adapted(seeds=seeds, epochs=epochs, lr_max=bounds)
    own_loss, own_optimizer = user_code.loss_of(loss), user_code.optimizer_of(optimizer)
    dataset, factory = user_code.data_of(data, loss is not None, root), user_code.model_of(model)
    user_code.check_augmentation(experiment.augmentation, dataset)
    user_code.check_model(factory, dataset, own_loss)
    folder = Path(tempfile.mkdtemp(prefix="varprop-")) if out is None else Path(out)
    options |= {"dataset": dataset, "factory": factory, "loss": own_loss, "optimizer": own_optimizer}
    if options.get("resume") and not Store(folder / NAME).manifest().get("configuration", {}).get("together", True):
        experiment = replace(experiment, together=False)
    try:
        outcomes = run(experiment, folder, **options)
    except CannotStack as error:
        print(f"The networks are trained one at a time, since torch cannot stack them ({error}).", file=sys.stderr)
        outcomes = run(replace(experiment, together=False), folder, **options)
    return MethodComparison(outcomes, folder / NAME, factory, dataset)
