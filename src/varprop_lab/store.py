"""The folder of an experiment, where every finished piece is one file, with how it was made; its results as tables."""

from __future__ import annotations

import csv
import hashlib
import inspect
import io
import json
import math
import operator
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp

from .datasets import Dataset
from .environment import Files, StoreError, provenance, write_atomically
from .protocol import (
    FACTORIES,
    METHODS,
    PAPER_GRIDS,
    STARTS,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    VALID_ACCURACY,
    VALID_LOSS,
    Cell,
    Experiment,
    Factory,
    Outcome,
    Search,
    build,
    experiment_rank,
    grouped,
    method_rank,
    start_rank,
)

_LIBRARIES = (*(Path(module.__file__ or "").parent for module in (torch, vp)), Path(__file__).parent)  # kept by version


def fingerprints(
    factory: str | Factory, dataset: Dataset, functions: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Digests of the model with its source files, of the data, and of functions, by their names in messages."""
    named = {name: _of_function(function) for name, function in (functions or {}).items()}
    tensors = dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y
    return {"model": _of_model(factory), "data": _digest(map(_bytes_of, tensors)), **named}


def _of_function(function: Any) -> str:
    """Digest of a function's name and file; objects that are called have their `repr` for a name."""
    name = getattr(function, "__qualname__", repr(function))
    file = _file_of(function)
    text = Path(file).read_text("utf-8", errors="replace") if file and Path(file).is_file() else ""
    return _digest([name.encode(), text.encode()])


def _of_model(factory: str | Factory) -> str:
    model = build(factory, 0)
    tensors = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in model.state_dict().items()]
    function = FACTORIES[factory] if isinstance(factory, str) else factory
    return _digest(text.encode() for text in (repr(model), *tensors, *_sources(function, model)))


def _sources(function: Factory, model: nn.Module) -> list[str]:
    """The text of every file that the model is written in, those of libraries aside."""
    written = [function, *dict.fromkeys(type(module) for module in model.modules())]
    files = {Path(file) for entity in written if (file := _file_of(entity))}
    user_files = sorted(file for file in files if not any(file.is_relative_to(library) for library in _LIBRARIES))
    return [file.read_text("utf-8", errors="replace") for file in user_files if file.is_file()]


def _file_of(written: object) -> str | None:
    try:
        return inspect.getsourcefile(inspect.unwrap(written))  # type: ignore[arg-type]
    except (TypeError, OSError):  # made in a session: what it makes is all there is to look at
        return None


def _bytes_of(tensor: Tensor) -> bytes:
    shape = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    return shape + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(hashlib.sha256(piece).digest())
    return digest.hexdigest()[:16]


def describe(experiment: Experiment, device: torch.device, fingerprints: dict[str, str]) -> dict[str, Any]:
    """Everything that a result depends on, as plain values."""
    source = provenance(device)
    return {
        "experiment": experiment.name,
        **source,
        "sittings": [{name: source[name] for name in ("command", "git", "started")}],
        "configuration": experiment.configuration(),
        "fingerprints": fingerprints,
        "seeds": list(experiment.seeds),
        "lr_max": list(experiment.lr_max),
        "seconds": 0.0,
        "finished": False,
    }


def ended(described: dict[str, Any], seconds: float, finished: bool) -> dict[str, Any]:
    """The description of a run after a sitting of so many seconds."""
    *earlier, last = described["sittings"]
    sittings = [*earlier, {**last, "seconds": seconds}]
    return {**described, "sittings": sittings, "seconds": described["seconds"] + seconds, "finished": finished}


def resumed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The description of a run that goes on: it began with the first sitting, and its cells come from all of them."""
    commands = dict.fromkeys([before["command"], now["command"]])
    return {
        **now,
        "command": " && ".join(commands),
        "started": before["started"],
        "seconds": before["seconds"],
        "sittings": [*before["sittings"], *now["sittings"]],
    }


_WRITTEN = ("manifest.json", "cells", "partial", "weights", "figures", "report.html")


@dataclass(frozen=True)
class Store:
    """Reads and writes ``manifest.json``, ``cells/<key>.json``, ``weights/<key>.pt`` and ``partial/<name>.pt``."""

    folder: Path  # of one experiment; made when something is written
    files: Files = field(default_factory=Files)  # where that folder is

    def write_outcome(self, outcome: Outcome) -> None:
        """Keep what came of a cell; from then on `has` says so."""
        self.files.write(self._cell_file(outcome.cell), _json(asdict(outcome)))

    def write_weights(self, cell: Cell, tensors: dict[str, torch.Tensor]) -> None:
        """Keep the trained weights of a cell."""
        buffer = io.BytesIO()
        torch.save({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, buffer)
        self.files.write(self.weights_file(cell), buffer.getvalue())

    def weights_file(self, cell: Cell) -> Path:
        """Where the weights of a cell are; ``torch.load(file, weights_only=True)`` reads them."""
        return self.folder / "weights" / f"{_file_name(cell.key)}.pt"

    def has(self, cell: Cell) -> bool:
        """True if the cell is finished."""
        return self._cell_file(cell).is_file()

    def outcomes(self, problems: list[str] | None = None) -> list[Outcome]:
        """All finished cells, in the order of their keys; with `problems`, damaged ones are left out and told of there.

        Raises:
            StoreError: On a damaged cell, without `problems`.
        """
        outcomes = []
        for path in sorted((self.folder / "cells").glob("*.json")):
            try:
                outcomes.append(_outcome(path, self.files))
            except StoreError as error:
                if problems is None:
                    raise
                problems.append(str(error))
        return outcomes

    def write_manifest(self, values: dict[str, Any]) -> None:
        """Keep how the run was made."""
        self.files.write(self.folder / "manifest.json", _json(values))

    def manifest(self) -> dict[str, Any]:
        """The values that `write_manifest` kept; empty if there are none."""
        path = self.folder / "manifest.json"
        values = _read_json(path, self.files) if path.is_file() else {}
        try:
            _check_manifest(values)
        except (TypeError, AttributeError) as error:
            raise _damaged(path, f"it holds no description of a run ({error})") from error
        return values

    def begun(self) -> bool:
        """True if there is something to go on with."""
        return any(next((self.folder / subfolder).glob("*"), None) for subfolder in ("cells", "partial"))

    def clear(self) -> None:
        """Delete what runs wrote here, and nothing else."""
        for entry in _WRITTEN:
            path = self.folder / entry
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def save_partial(self, name: str, state: dict[str, Any]) -> None:
        """Keep the state of something unfinished: tensors, numbers, strings, and lists and dicts of them."""
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self.files.write(self._partial_file(name), buffer.getvalue())

    def load_partial(self, name: str) -> dict[str, Any] | None:
        """The state `save_partial` kept, its tensors on the CPU; None if there is none."""
        path = self._partial_file(name)
        content = self.files.read(path)
        if content is None:
            return None
        try:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load has no one error for files that are not its own
            raise _damaged(path, "torch cannot load it") from error
        if not isinstance(state, dict):
            raise _damaged(path, "it holds no dictionary")
        return state

    def drop_partial(self, name: str) -> None:
        """Forget it; nothing happens if there is none."""
        self.files.remove(self._partial_file(name))

    def _cell_file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{_file_name(cell.key)}.json"

    def _partial_file(self, name: str) -> Path:
        return self.folder / "partial" / f"{_file_name(name)}.pt"


def _file_name(name: str) -> str:
    if not name or name.startswith(".") or any(mark in name for mark in "/\\\0"):
        raise StoreError(f"{name!r} cannot be the name of a file.")
    return name


def _json(values: dict[str, Any]) -> bytes:
    # Losses may be infinite or NaN, which Python's json writes and reads as Infinity and NaN.
    return (json.dumps(values, indent=1) + "\n").encode()


def _read_json(path: Path, files: Files) -> Any:
    try:
        return json.loads(files.read(path) or b"")
    except (ValueError, RecursionError) as error:  # the latter for brackets in brackets without end
        raise _damaged(path, f"it is no JSON ({error})") from error


def _check_manifest(values: Any) -> None:
    """Raise unless all that is read from a manifest is of the kind that everything here relies on."""
    settings, sittings = values.get("configuration", {}), values.get("sittings", [])
    texts = [values.get("command", ""), *settings.get("methods", []), *settings.get("starts", [])]
    numbers = [
        values.get("seconds", 0.0),
        *values.get("seeds", []),
        *(sitting.get("seconds", 0.0) for sitting in sittings),
    ]
    mappings = [values.get(name, {}) for name in ("fingerprints", "git", "hardware", "versions")]
    mappings += [sitting.get("git", {}) for sitting in sittings]
    for kind, group in ((str, texts), ((int, float), numbers), (dict, mappings)):
        if not all(isinstance(value, kind) for value in group):
            raise TypeError("it holds values of the wrong kind")


def _outcome(path: Path, files: Files) -> Outcome:
    try:
        return Outcome.from_dict(_read_json(path, files))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"it holds no outcome of a cell ({error})") from error


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is damaged: {why}; delete it and run the command again with --resume to redo this part.")


Row = Mapping[str, Any]
_CELL = ("experiment", "method", "start", "seed", "batch_size", "lr_max", "variant")
_key = operator.itemgetter(*_CELL)
_CURVES = (TRAIN_LOSS, TRAIN_EVAL_LOSS, VALID_LOSS, VALID_ACCURACY)
_SEARCH = ("lr", "search_loss", "evaluations", "at_bound", "flat", "search_diverged")
_TEST = ("test_loss", "test_accuracy", "epochs", "diverged", "start_gap", "seconds")
_SOURCE = ("varprop", "torch", "cuda", "hardware", "commit", "dirty", "started")
_FLAGS = {"True": True, "False": False}
_COLUMNS = {
    "runs": (*_CELL, *_SEARCH, *(f"final_{name}" for name in _CURVES), *_TEST, *_SOURCE),
    "curves": (*_CELL, "curve", "epoch", "value"),
    "searches": (*_CELL, "evaluation", "lr", "loss", "chosen"),
}


def write_tables(folder: Path, outcomes: Iterable[Outcome], manifest: dict[str, Any]) -> None:
    """Write ``runs.csv``, ``curves.csv`` and ``searches.csv`` of an experiment."""
    for name, rows in _tables(list(outcomes), manifest).items():
        stream = io.StringIO()
        writer = csv.DictWriter(stream, _COLUMNS[name], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(folder / f"{name}.csv", stream.getvalue().encode())


def _tables(outcomes: list[Outcome], manifest: dict[str, Any]) -> dict[str, list[Row]]:
    source = _source_row(manifest)
    return {
        "runs": [{**_run_row(outcome), **source} for outcome in outcomes],
        "curves": [
            {**asdict(outcome.cell), "curve": name, "epoch": epoch, "value": value}
            for outcome in outcomes
            for name, values in outcome.curves.items()
            for epoch, value in enumerate(values, 1)
        ],
        "searches": [
            {**asdict(o.cell), "evaluation": index, "lr": lr, "loss": loss, "chosen": lr == o.search.lr}
            for o in outcomes
            for index, (lr, loss) in enumerate(o.search.trace, 1)
        ],
    }


def _run_row(outcome: Outcome) -> Row:
    """One training run: what it was, what rate was found, how it ended."""
    search = outcome.search
    searched = (search.lr, search.loss, len(search.trace), search.at_bound, search.flat, search.diverged)
    ends = {f"final_{name}": outcome.last(name) for name in _CURVES}
    ending = {name: getattr(outcome, name) for name in _TEST if hasattr(outcome, name)}
    epochs = max(map(len, outcome.curves.values()), default=0)
    return {**asdict(outcome.cell), **dict(zip(_SEARCH, searched, strict=True)), **ends, "epochs": epochs, **ending}


def _source_row(manifest: dict[str, Any]) -> Row:
    """Versions, hardware and git state, None where unknown: cells of several sittings come from any of them."""
    git = manifest.get("git", {}) if len(manifest.get("sittings", ())) < 2 else {}
    values = {**manifest.get("versions", {}), **git, **{name: manifest.get(name) for name in ("hardware", "started")}}
    return {name: values.get(name) for name in _SOURCE}


def read_tables(folder: Path) -> list[Outcome]:
    """The outcomes that `write_tables` wrote; numbers come back as they were."""
    curves: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in _rows(folder / "curves.csv"):
        curves.setdefault(_key(row), {}).setdefault(row["curve"], []).append(float(row["value"]))
    traces: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in _rows(folder / "searches.csv"):
        traces.setdefault(_key(row), []).append((float(row["lr"]), float(row["loss"])))
    return [
        _outcome_of_row(row, curves.get(_key(row), {}), traces.get(_key(row), [])) for row in _rows(folder / "runs.csv")
    ]


def _rows(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8", newline="") as stream:
        yield from csv.DictReader(stream)


def _outcome_of_row(row: Row, curves: dict[str, list[float]], trace: list[tuple[float, float]]) -> Outcome:
    sizes = int(row["seed"]), int(row["batch_size"]), float(row["lr_max"])
    cell = Cell(row["experiment"], row["method"], row["start"], *sizes, row["variant"])
    flags = (_FLAGS[row[name]] for name in ("at_bound", "flat", "search_diverged"))
    search = Search(float(row["lr"]), _number(row["search_loss"]), trace, *flags)
    tests = _number(row["test_loss"]), _number(row["test_accuracy"]), _FLAGS[row["diverged"]]
    return Outcome(cell, search, curves, *tests, float(row["start_gap"]), float(row["seconds"])).checked()


def _number(text: str) -> float:
    return float(text) if text else math.nan


WITHOUT_CELLS = ("relu",)  # a figure, and nothing trained
_NO_EXPERIMENT = ("claims", "all")  # names of the command line only


@dataclass(frozen=True)
class Run:
    """One experiment as found on disk."""

    experiment: str  # its name, and that of its folder
    outcomes: list[Outcome]  # of its finished cells, in a fixed order
    manifest: dict[str, Any] = field(default_factory=dict)  # how it was run; empty where the file is missing
    problems: list[str] = field(default_factory=list)  # one sentence for each thing that is missing or cannot be read
    # whether the outcomes come from the tables of a report, because the files of the cells are not there
    compact: bool = False

    def select(self, **fields: object) -> list[Outcome]:
        """The outcomes whose cells have these values."""
        return [o for o in self.outcomes if all(getattr(o.cell, name) == value for name, value in fields.items())]


def read_runs(out: Path, experiments: list[str] | None = None) -> list[Run]:
    """The runs asked for, found or not, and all others that lie in the folder given to ``--out``."""
    asked = [name for name in experiments or [] if name not in _NO_EXPERIMENT]
    folders = list(out.iterdir()) if out.is_dir() else []
    names = [f.name for f in folders if (f / "manifest.json").is_file() or (f / "cells").is_dir()]
    return [read_run(out / name) for name in sorted({*asked, *names}, key=experiment_rank)]


def read_run(folder: Path) -> Run:
    """All that one experiment's folder holds."""
    problems: list[str] = []
    store, manifest = Store(folder), {}
    try:
        manifest = store.manifest()
    except StoreError as error:
        problems.append(f"How this was run is unknown: {error}")
    compact = (folder / "runs.csv").is_file() and not (folder / "cells").is_dir()
    try:
        outcomes = read_tables(folder) if compact else store.outcomes(problems)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(f"The tables in {folder} cannot be read ({type(error).__name__}: {error})")
        outcomes = []
    outcomes.sort(key=_place_in_paper)
    if folder.name not in WITHOUT_CELLS:
        problems += _missing_cells(folder.name, outcomes, manifest) + _missing_seeds(outcomes, manifest)
    return Run(folder.name, outcomes, manifest, problems, compact)


def _place_in_paper(outcome: Outcome) -> tuple[Any, ...]:
    cell = outcome.cell
    ranks = start_rank(cell.start), method_rank(cell.method, cell.variant)
    return cell.lr_max, cell.batch_size, *ranks, cell.seed


def _missing_cells(experiment: str, outcomes: list[Outcome], manifest: dict[str, Any]) -> list[str]:
    """Which methods of the grid have no outcome at all, start by start."""
    if not outcomes:
        return ["no finished cells"]
    configuration = {} if experiment == "naive" else manifest.get("configuration", {})  # there each has its own start
    grid = {"methods": METHODS, "starts": STARTS} if experiment in PAPER_GRIDS else configuration
    settings = sorted({(o.cell.lr_max, o.cell.batch_size) for o in outcomes})
    have = {(o.cell.lr_max, o.cell.batch_size, o.cell.start, o.cell.method) for o in outcomes}
    return [
        f"no finished cell of {method} from {start} (batch {batch}, lr at most {bound:g})"
        for bound, batch in settings
        for start in grid.get("starts", ())
        for method in grid.get("methods", ())
        if (bound, batch, start, method) not in have
    ]


def _missing_seeds(outcomes: list[Outcome], manifest: dict[str, Any]) -> list[str]:
    """Which seeds a method lacks from starts where it has others."""
    expected = {*manifest.get("seeds", []), *(o.cell.seed for o in outcomes)}
    have = grouped(outcomes, lambda c: (c.lr_max, c.batch_size, c.method, c.variant, c.start))
    lacking: dict[tuple[str, str], list[str]] = {}
    for (bound, batch, method, variant, start), group in have.items():
        if lost := ", ".join(map(str, sorted(expected - {o.cell.seed for o in group}))):
            what = f"{method}{f' ({variant})' * bool(variant)} with seed {lost}"
            lacking.setdefault((what, f"(batch {batch}, lr at most {bound:g})"), []).append(start)
    return [f"no finished cell of {what} from {', '.join(starts)} {where}" for (what, where), starts in lacking.items()]
