"""The folder of an experiment: every finished piece is one file, written whole or not at all, with how it was made."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import io
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp

from ..data.datasets import Dataset
from ..environment import provenance
from ..protocol.experiments import FACTORIES, Experiment, Factory, build
from ..protocol.records import Cell, Outcome

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_AGAIN = "run the command again with --resume; what is finished is kept"
_UNFINISHED = ".tmp"


class StoreError(vp.VarpropError):
    """A file of a run could not be written or read; the message says which and what to do."""


class Files:
    """Where a store keeps its files: the disk here."""

    def write(self, path: Path, content: bytes) -> None:
        """Write a file, whole or not at all."""
        write_atomically(path, content)

    def read(self, path: Path) -> bytes | None:
        """Its content; None if there is no such file."""
        try:
            return path.read_bytes() if path.is_file() else None
        except OSError as error:
            raise StoreError(f"{path} could not be read: {error.strerror or error}.") from error

    def remove(self, path: Path) -> None:
        """Delete it; nothing happens if there is none."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path} could not be removed: {error.strerror or error}.") from error


def write_atomically(path: Path, content: bytes, then: str = _AGAIN) -> None:
    """Write a file so that it is either there whole or not there, whenever the process or the machine stops.

    Raises:
        StoreError: If it cannot be written; what was there before stays. On a full disk it says what to do `then`.
    """
    # a name of its own, so that two processes that write the same file do not write into each other's
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_through(temporary, content)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the error that led here is the one to report
            temporary.unlink(missing_ok=True)
        raise StoreError(_why_not_written(path, error, then)) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within, no other process can enter this for the same folder, which is made if it is not there.

    The lock is the system's and ends with the process, however it ends. Systems that have none (Windows) let all enter.

    Raises:
        StoreError: If another process is inside.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = folder.is_dir() and os.fstat(handle).st_ino == folder.stat().st_ino  # nobody has just removed it
        except BlockingIOError:
            free = False
        if not free:
            raise StoreError(f"Another process is writing to {folder}: wait for it, or choose another --out.")
        yield
    finally:
        os.close(handle)


def remove_unfinished(folder: Path) -> None:
    """Delete what processes that were killed while they wrote a file have left in a folder and those in it."""
    for path in folder.rglob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def _write_through(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """The new name itself must reach the disk; Windows cannot open a folder and does not need it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _why_not_written(path: Path, error: OSError, then: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"There is no space left on the disk to write {path}: free some and {then}."
    return f"{path} could not be written: {error.strerror or error}."


_LIBRARIES = (
    *(Path(module.__file__ or "").parent for module in (torch, vp)),
    Path(__file__).parents[1],
)  # kept by version


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


def changed(now: dict[str, str], before: dict[str, str]) -> list[str]:
    """The names whose fingerprints differ."""
    return [name for name, value in now.items() if before.get(name) != value]


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
