"""Runs experiments: what is finished is kept, what is missing is done, and how it was done is written down."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import varprop as vp

from . import datasets, manifest, progress
from .datasets import Dataset
from .material import Material
from .models import Factory
from .protocol import EXPERIMENTS, Experiment
from .records import Cell, Outcome
from .settings import reproducible
from .squad import Log, OutOfTime, Surroundings
from .squads import run_one, squads
from .store import Store
from .workers import Errand, run_apart

Show = Callable[[int, str], contextlib.AbstractContextManager[progress.Progress]]


_ADAPTED = ("seeds", "epochs", "lr_max", "methods", "starts", "compiled")


class RunError(vp.VarpropError):
    """An experiment cannot be run as asked; the message says why and what to do."""


def reproduce(names: Sequence[str], out: Path, **options: Any) -> dict[str, list[Outcome]]:
    """Run experiments of the table one after another.

    Args:
        names: Of the experiments.
        out: The folder that gets one folder for each.
        options: For `Experiment.adapted` (seeds, epochs, lr_max, methods, starts, compiled) and for `run`.
    """
    adapt = {name: options.pop(name, None) for name in _ADAPTED}
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise RunError(f"There is no experiment {unknown[0]!r}; known are {', '.join(EXPERIMENTS)}.")
    return {name: run(EXPERIMENTS[name].adapted(**adapt), out, **options) for name in names}


def run(
    experiment: Experiment,
    out: Path,
    device: str = "auto",
    resume: bool = False,
    *,
    root: Path | str | None = None,
    dataset: Dataset | None = None,
    factory: Factory | None = None,
    max_seconds: float = math.inf,
    jobs: int = 1,
    show: Show = progress.show,
    tensorboard: Path | None = None,
    command: str | None = None,
) -> list[Outcome]:
    """Run an experiment and keep everything in a folder of its name.

    Args:
        experiment: What to do.
        out: The folder above.
        device: ``cpu``, ``cuda``, or ``auto``: the GPU if there is one.
        resume: Whether to go on with what is in the folder; without, a folder with results is refused.
        root: Where data sets are looked for first.
        dataset: Instead of the one the experiment names.
        factory: Instead of the model the experiment names.
        max_seconds: Stop after the piece that is under way then, with everything kept; every run does one at least.
        jobs: So many cells at once, each in a process of its own, where cells are not trained together anyway.
        show: Shows progress: `progress.show`, or anything like it.
        tensorboard: A folder for its event files; none are written by default.
        command: What the user called, for the manifest.

    Returns:
        All finished cells of the experiment; fewer than it has if the time was over.

    Raises:
        RunError: If the folder holds results and `resume` was not given, or results of other settings.
    """
    if jobs > 1 and tensorboard is not None:
        raise RunError("Event files can be written by one process only: leave out --tensorboard or --jobs.")
    deadline, place = time.monotonic() + max_seconds, chosen_device(device)
    store = Store(Path(out) / experiment.name)
    noted = _manifest(store, experiment, place, resume, command)
    data = datasets.load(experiment.dataset, root, place) if dataset is None else datasets.on_device(dataset, place)
    material = Material(experiment, data, factory or experiment.model)
    started = time.monotonic()
    with (
        reproducible(experiment, place),
        show(_total_steps(material, store), experiment.name) as bar,
        _logger(tensorboard, experiment.name) as log,
    ):
        bar.advance(0, f"{len(experiment.cells())} cells")
        around = Surroundings(store, experiment.protocol, experiment.search, bar.advance, log, deadline)
        if jobs > 1 and not experiment.together:
            errand = Errand(experiment, store.folder, material.dataset, material.factory, deadline)
            finished = run_apart(errand, _missing(experiment, store), jobs, bar.advance)
        else:
            finished = _run_all(material, around)
    seconds = noted["seconds"] + time.monotonic() - started
    store.write_manifest({**noted, "seconds": seconds, "finished": finished})
    wanted = {cell.key for cell in experiment.cells()}
    outcomes = [outcome for outcome in store.outcomes() if outcome.cell.key in wanted]
    if not finished:
        left = f"{len(outcomes)} of {len(wanted)} cells of {experiment.name} are finished"
        print(f"The time is over: {left}; go on with --resume.", file=sys.stderr)
    return outcomes


def chosen_device(name: str) -> torch.device:
    """The device of a name; ``auto`` is the GPU if there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise RunError(f"The device must be auto, cpu or cuda, not {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise RunError("There is no GPU that PyTorch can use; choose --device cpu.")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _manifest(
    store: Store, experiment: Experiment, device: torch.device, resume: bool, command: str | None
) -> dict[str, Any]:
    """Write down how the run is made; an earlier one must fit."""
    now, before = manifest.describe(experiment, device, command), store.manifest()
    if before and not resume:
        raise RunError(f"{store.folder} holds a run already: go on with --resume, or choose another --out.")
    if before and before["configuration"] != _plain(now["configuration"]):
        names = [
            name for name, value in _plain(now["configuration"]).items() if before["configuration"].get(name) != value
        ]
        raise RunError(
            f"{store.folder} was made with other settings ({', '.join(names)}): repeat them, or choose another --out."
        )
    if before:
        now = manifest.resumed(now, before)
    store.write_manifest(now)
    return now


def _plain(values: Any) -> Any:
    """As JSON gives it back: tuples have become lists."""
    if isinstance(values, dict):
        return {name: _plain(value) for name, value in values.items()}
    return [_plain(value) for value in values] if isinstance(values, (list, tuple)) else values


def _total_steps(material: Material, store: Store) -> int:
    experiment, protocol = material.experiment, material.experiment.protocol
    epochs = protocol.epochs + (protocol.evaluations * protocol.search_epochs if experiment.search else 0)
    first = [cells[0] for cells in _missing(experiment, store).values()]
    return sum(epochs * material.source(cell.seed, cell.batch_size).steps for cell in first)


def _run_all(material: Material, around: Surroundings) -> bool:
    """Run every cell that is missing, one squad after the other; whether the time was enough."""
    try:
        while missing := _missing(material.experiment, around.store):
            run_one(material, around, *next(iter(missing.items())))
            if _missing(material.experiment, around.store):
                around.check_time()
    except OutOfTime:
        return False
    return True


def _missing(experiment: Experiment, store: Store) -> dict[str, list[Cell]]:
    return squads(experiment, [cell for cell in experiment.cells() if not store.has(cell)])


@contextlib.contextmanager
def _logger(folder: Path | None, name: str) -> Iterator[Log]:
    """Writes the curves of every cell for TensorBoard."""
    if folder is None:
        yield lambda cell, number, values: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RunError("Event files need tensorboard: pip install 'varprop[tracking]'.") from error
    writer = SummaryWriter(str(Path(folder) / name))

    def log(cell: Cell, number: int, values: dict[str, float]) -> None:
        for curve, value in values.items():
            writer.add_scalar(f"{curve}/{cell.key}", value, number + 1)

    try:
        yield log
    finally:
        writer.close()
