"""Files around an inspection: tensors as inputs, and results as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import varprop as vp

from .inspect_packages import needed

SAVED = {".pt", ".pth", ".npy"}


def saved_inputs(files: list[Path], shape: tuple[int, ...], most: int) -> Any:
    """Inputs out of files, each with one of them or with a stack.

    Raises:
        VarpropError: If a file cannot be read, or holds something of another shape.
    """
    import torch

    found: list[Any] = []
    for file in files:
        found += list(_stack(_read(file), file, shape))
        if len(found) >= most:
            break
    if len(found) < 2:
        raise vp.VarpropError(f"{files[0]} holds {len(found)} input(s); two are needed at least.")
    return torch.stack(found[:most])


def _stack(values: Any, file: Path, shape: tuple[int, ...]) -> Any:
    for candidate in (values, values[None]):
        if tuple(candidate.shape[1:]) == shape:
            return candidate if candidate.is_floating_point() else candidate.float()
    raise vp.VarpropError(f"{file} holds a tensor of shape {tuple(values.shape)}, but the model takes {shape}.")


def _read(file: Path) -> Any:
    import torch

    try:
        if file.suffix == ".npy":
            return torch.from_numpy(needed("numpy").load(file, allow_pickle=False))
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except vp.VarpropError:
        raise
    except Exception as error:
        raise vp.VarpropError(f"{file} cannot be read as a tensor ({type(error).__name__}).") from error
    if not isinstance(loaded, torch.Tensor):
        raise vp.VarpropError(f"{file} holds no tensor but {type(loaded).__name__}.")
    return loaded


def write_json(values: Any, file: Path) -> None:
    """Write plain values, whole or not at all."""
    text = json.dumps(values, allow_nan=False) + "\n"
    beside = file.with_name(file.name + ".part")
    beside.write_text(text, "utf-8")
    beside.replace(file)
