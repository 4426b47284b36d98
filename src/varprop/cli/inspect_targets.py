"""Models that the command line can name, and their weights."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect as signatures
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import varprop as vp

from .inspect_packages import needed, no_such_model


@dataclass(frozen=True)
class Target:
    """A model, the shape of its input if known, and how many tokens there are if that is what it takes."""

    model: Any
    shape: tuple[int, ...] | None = None
    tokens: int | None = None


def load(text: str) -> Target:
    """The model that a target names, in evaluation mode.

    Raises:
        VarpropError: In one sentence, if there is no such thing or it fails.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise vp.VarpropError(
            f"TARGET is package.module:callable, file.py:factory, torchvision:NAME, timm:NAME or hf:NAME, not {text!r}."
        )
    known: dict[str, Callable[[str], Target]] = {"torchvision": _torchvision, "timm": _timm, "hf": _hugging_face}
    with _said(text):
        found = known[place](name) if place in known else Target(_attribute(place, name)())
    import torch

    if not isinstance(found.model, torch.nn.Module):
        raise vp.VarpropError(f"{text} must return an nn.Module, not {type(found.model).__name__}.")
    found.model.eval()
    return found


@contextlib.contextmanager
def _said(text: str) -> Iterator[None]:
    """An error of somebody else's code, in one sentence."""
    try:
        yield
    except vp.VarpropError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise vp.VarpropError(f"{text} failed with {type(error).__name__}: {reason[0] if reason else ''}") from error


def _attribute(place: str, name: str) -> Callable[[], Any]:
    module = _file_module(Path(place)) if place.endswith(".py") else _package_module(place)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise vp.VarpropError(f"{place} has no function or class {name!r}.")
    return found  # type: ignore[no-any-return]


def _file_module(file: Path) -> ModuleType:
    if not file.expanduser().is_file():
        raise vp.VarpropError(f"There is no file {file}.")
    spec = importlib.util.spec_from_file_location(f"_varprop_{file.stem}", file.expanduser())
    assert spec is not None and spec.loader is not None  # its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def _package_module(name: str) -> ModuleType:
    sys.path.insert(0, "")  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise vp.VarpropError(f"There is no module {error.name}: is it installed, or in this folder?") from error
    finally:
        sys.path.remove("")


def _torchvision(name: str) -> Target:
    models = needed("torchvision.models")
    if name not in models.list_models():
        raise no_such_model("torchvision", name, models.list_models())
    return Target(models.get_model(name, weights=None), (3, 224, 224))


def _timm(name: str) -> Target:
    timm = needed("timm")
    if not timm.is_model(name):
        raise no_such_model("timm", name, timm.list_models())
    model = timm.create_model(name, pretrained=False)
    return Target(model, tuple(getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))))


def _hugging_face(name: str) -> Target:
    transformers = needed("transformers")
    automatic = transformers.AutoConfig
    config = (
        automatic.from_pretrained(name, local_files_only=True) if Path(name).exists() else automatic.for_model(name)
    )
    config.return_dict = False
    config.use_cache = False
    model = transformers.AutoModel.from_config(config)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = config.image_size
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        return Target(model, (config.num_channels, *sides))
    return Target(model, (32,), config.vocab_size)


def load_weights(model: Any, file: Path) -> None:
    """Load a checkpoint that has to fit.

    Raises:
        VarpropError: If it is missing, unreadable, or does not fit.
    """
    if not file.is_file():
        raise vp.VarpropError(f"There is no file {file} with weights.")
    own, given = model.state_dict(), _read_weights(file)
    missing, unknown = [n for n in own if n not in given], [n for n in given if n not in own]
    differing = [n for n in own if n in given and own[n].shape != given[n].shape]
    for what, names in (("lacks", missing), ("has no place for", unknown), ("has another shape for", differing)):
        if names:
            subject = "The model" if what == "has no place for" else str(file)
            raise vp.VarpropError(f"{file} does not fit: {subject} {what} {len(names)} tensor(s), such as {names[0]}.")
    model.load_state_dict(given)


def _read_weights(file: Path) -> dict[str, Any]:
    import torch

    if file.suffix == ".safetensors":
        loaded = _read(file, needed("safetensors.torch").load_file)
    else:
        loaded = _read(file, lambda path: torch.load(path, map_location="cpu", weights_only=True))
    for key in ("state_dict", "model"):
        loaded = loaded[key] if isinstance(loaded, dict) and isinstance(loaded.get(key), dict) else loaded
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise vp.VarpropError(f"{file} holds no state_dict, a dict of tensors by name.")
    return loaded


def _read(file: Path, reader: Callable[[str], Any]) -> Any:
    try:
        return reader(str(file))
    except vp.VarpropError:
        raise
    except pickle.UnpicklingError as error:
        if not any(word in str(error) for word in ("Unsupported global", "Unsupported class")):
            raise _unreadable(file, error) from error
        raise vp.VarpropError(
            f"{file} holds Python objects besides tensors, and reading those could run code: save model.state_dict() "
            f"instead, or a safetensors file."
        ) from error
    except Exception as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> vp.VarpropError:
    return vp.VarpropError(
        f"{file} cannot be read as weights ({type(error).__name__}): give a safetensors file, or a state_dict saved by "
        f"torch.save."
    )


def required_inputs(model: Any) -> list[str]:
    """Names of the inputs that a model cannot do without."""
    parameters = signatures.signature(model.forward).parameters.values()
    usual = (signatures.Parameter.POSITIONAL_ONLY, signatures.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in usual]


def check_inputs(model: Any, target: str, given: int) -> None:
    """Refuse a model that takes more inputs than shapes were given."""
    required = required_inputs(model)
    if len(required) > given:
        raise vp.VarpropError(
            f"{target} takes {len(required)} inputs ({', '.join(required)}): give --input-shape once for each, in this "
            f"order, or name a factory that wraps it."
        )


def check_runs(model: Any, examples: Sequence[Any], target: str) -> None:
    """Refuse a model that does not take the examples."""
    import torch

    try:
        with torch.no_grad():
            model(*examples)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        shapes = " and ".join(str(tuple(example.shape[1:])) for example in examples)
        raise vp.VarpropError(f"{target} does not take inputs of shape {shapes}: {reason}") from error
