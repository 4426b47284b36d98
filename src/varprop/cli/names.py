"""Names that users type: the code they name, what they may have meant by one that does not exist, how it failed."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import varprop as vp


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """A question to add to a sentence; empty if nothing looks alike."""
    near = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def unknown(kind: str, name: str, candidates: Iterable[str]) -> str:
    """The sentence on a name that does not exist."""
    names = list(candidates)
    return f"There is no {kind} {name!r}; known are {', '.join(names)}.{did_you_mean(name, names)}"


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def located(error: BaseException) -> str:
    """An error in one line, with the file and line of the user's code where it was raised, if it was there."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    libraries = [
        Path(torch.__file__).parent,
        *Path(__file__).parents[1].parent.glob("varprop*"),
        Path(os.__file__).parent,
    ]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file()
        and not any(Path(frame.filename).is_relative_to(library) for library in libraries)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {first_line(error)}" if frames else first_line(error)


def callable_named(source: str, name: str) -> Callable[..., Any]:
    """The function or class that ``path.py:name`` or ``package.module:name`` names.

    Raises:
        VarpropError: If there is none.
    """
    module = _file_module(Path(source).expanduser()) if source.endswith(".py") else _package_module(source)
    value: Any = module
    for attribute in name.split("."):
        value = getattr(value, attribute, None)
    if not callable(value):
        candidates = [key for key in vars(module) if callable(getattr(module, key)) and not key.startswith("_")]
        raise vp.VarpropError(f"{source} has no function or class {name!r}.{did_you_mean(name, candidates)}")
    return value  # type: ignore[no-any-return]


def _file_module(file: Path) -> ModuleType:
    if not file.is_file():
        raise vp.VarpropError(f"There is no file {file}.")
    spec = importlib.util.spec_from_file_location(f"_varprop_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[module.__name__]  # no other process could import it: what is in it has to be sent as it is
    return module


def _package_module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise vp.VarpropError(f"There is no module {error.name}: is it installed, or in this folder?") from error
    finally:
        sys.path.remove("")
