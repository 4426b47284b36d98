"""Whether a run that goes on is still about the same model and data: fingerprints of both, kept in the manifest."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp

from ..data.datasets import Dataset
from ..protocol.models import FACTORIES, Factory, build

_LIBRARIES = (
    *(Path(module.__file__ or "").parent for module in (torch, vp)),
    Path(__file__).parents[1],
)  # kept by version


def fingerprints(
    factory: str | Factory, dataset: Dataset, functions: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Of the model, with the files it is written in, of the data, and of functions; by the names that messages use."""
    named = {name: _of_function(function) for name, function in (functions or {}).items()}
    return {"model": _of_model(factory), "data": _of_data(dataset), **named}


def _of_function(function: Any) -> str:
    """Of its name and the file it is written in; of objects that are called, what they say of themselves."""
    name = getattr(function, "__qualname__", repr(function))
    file = _file_of(function)
    text = Path(file).read_text("utf-8", errors="replace") if file and Path(file).is_file() else ""
    return _digest(part.encode() for part in (name, text))


def changed(now: dict[str, str], before: dict[str, str]) -> list[str]:
    """What differs."""
    return [name for name, value in now.items() if before.get(name) != value]


def _of_model(factory: str | Factory) -> str:
    model = build(factory, 0)
    tensors = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in model.state_dict().items()]
    function = FACTORIES[factory] if isinstance(factory, str) else factory
    return _digest(part.encode() for part in (repr(model), *tensors, *_sources(function, model)))


def _sources(function: Factory, model: nn.Module) -> list[str]:
    """The text of every file that the model is written in, those of libraries aside."""
    written = [function, *dict.fromkeys(type(module) for module in model.modules())]
    files = {Path(file) for one in written if (file := _file_of(one))}
    own = sorted(file for file in files if not any(file.is_relative_to(library) for library in _LIBRARIES))
    return [file.read_text("utf-8", errors="replace") for file in own if file.is_file()]


def _file_of(written: object) -> str | None:
    try:
        return inspect.getsourcefile(inspect.unwrap(written))  # type: ignore[arg-type]
    except (TypeError, OSError):  # made in a session: what it makes is all there is to look at
        return None


def _of_data(dataset: Dataset) -> str:
    return _digest(_bytes_of(part) for part in (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y))


def _bytes_of(tensor: Tensor) -> bytes:
    shape = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    return shape + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()[:16]
