"""Files that an inspection reads: weights and inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import varprop as vp

from .packages import needed

SAVED = {".pt", ".pth", ".npy"}
MOST = 1024  # inputs taken from files


def load_weights(model: Any, file: Path) -> None:
    """Load a checkpoint that has to fit."""
    file = file.expanduser()
    if not file.is_file():
        raise vp.VarpropError(f"There is no file {file} with weights.")
    own, given = model.state_dict(), _state(file)
    missing, unknown = [n for n in own if n not in given], [n for n in given if n not in own]
    differing = [n for n in own if n in given and own[n].shape != given[n].shape]
    for what, names in (("lacks", missing), ("has no place for", unknown), ("has another shape for", differing)):
        if names:
            subject = "The model" if what == "has no place for" else str(file)
            raise vp.VarpropError(f"{file} does not fit: {subject} {what} {len(names)} tensor(s), such as {names[0]}.")
    model.load_state_dict(given)


def _state(file: Path) -> dict[str, Any]:
    loaded = _loaded(file, "as weights", ": give a safetensors file, or a state_dict saved by torch.save")
    for key in ("state_dict", "model"):
        loaded = loaded[key] if isinstance(loaded, dict) and isinstance(loaded.get(key), dict) else loaded
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise vp.VarpropError(f"{file} holds no state_dict, a dict of tensors by name.")
    return loaded


def _loaded(file: Path, purpose: str, advice: str = "") -> Any:
    """What a file holds; a file that cannot be read gets a sentence with its purpose, and what to give instead."""
    try:
        if file.suffix == ".safetensors":
            return needed("safetensors.torch").load_file(str(file))
        if file.suffix == ".npy":
            return torch.from_numpy(needed("numpy").load(file, allow_pickle=False))
        return torch.load(file, map_location="cpu", weights_only=True)
    except vp.VarpropError:
        raise
    except Exception as error:
        if "Unsupported global" in str(error) or "Unsupported class" in str(error):
            raise vp.VarpropError(
                f"{file} holds Python objects besides tensors, and reading those could run code: save "
                f"model.state_dict() instead, or a safetensors file."
            ) from error
        raise vp.VarpropError(f"{file} cannot be read {purpose} ({type(error).__name__}){advice}.") from error


def saved_inputs(files: list[Path], shape: tuple[int, ...]) -> Any:
    """Inputs out of files, each with one of them or with a stack."""
    found: list[Any] = []
    for file in files:
        found += list(_stack(file, shape))
        if len(found) >= MOST:
            break
    if len(found) < 2:
        raise vp.VarpropError(f"{files[0]} holds {len(found)} input(s); two are needed at least.")
    return torch.stack(found[:MOST])


def _stack(file: Path, shape: tuple[int, ...]) -> Any:
    values = _loaded(file, "as a tensor")
    if not isinstance(values, torch.Tensor):
        raise vp.VarpropError(f"{file} holds no tensor but {type(values).__name__}.")
    for candidate in (values, values[None]):
        if tuple(candidate.shape[1:]) == shape:
            return candidate if candidate.is_floating_point() else candidate.float()
    raise vp.VarpropError(f"{file} holds a tensor of shape {tuple(values.shape)}, but the model takes {shape}.")
