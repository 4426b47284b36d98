"""Models that the command line can name."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import varprop as vp
from varprop_lab.names import callable_named, did_you_mean, first_line

from .packages import needed


@dataclass(frozen=True)
class NamedModel:
    """A model, the shape of its input if known, and how many tokens there are if that is what it takes."""

    model: Any
    shape: tuple[int, ...] | None = None
    tokens: int | None = None


def load(text: str, seed: int = 0) -> NamedModel:
    """The model that a target names, in evaluation mode, with the random weights of a seed."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise vp.VarpropError(
            f"TARGET is package.module:callable, file.py:factory, torchvision:NAME, timm:NAME or hf:NAME, not {text!r}."
        )
    known: dict[str, Callable[[str], NamedModel]] = {"torchvision": _torchvision, "timm": _timm, "hf": _hugging_face}
    torch.manual_seed(seed)
    try:
        found = known[place](name) if place in known else _own(place, name)
    except vp.VarpropError:
        raise
    except Exception as error:  # of somebody else's code
        raise vp.VarpropError(f"{text} failed with {first_line(error)}") from error
    if not isinstance(found.model, torch.nn.Module):
        raise vp.VarpropError(f"{text} must return an nn.Module, not {type(found.model).__name__}.")
    found.model.eval()
    return found


def _own(place: str, name: str) -> NamedModel:
    """What a function or a class of the user's makes; or a model, if that is what the name stands for."""
    named = callable_named(place, name)
    return NamedModel(named if isinstance(named, torch.nn.Module) else named())


def _torchvision(name: str) -> NamedModel:
    models = needed("torchvision.models")
    if name not in models.list_models():
        raise _no_such_model("torchvision", name, models.list_models())
    return NamedModel(models.get_model(name, weights=None), (3, 224, 224))


def _timm(name: str) -> NamedModel:
    timm = needed("timm")
    if not timm.is_model(name):
        raise _no_such_model("timm", name, timm.list_models())
    model = timm.create_model(name, pretrained=False)
    return NamedModel(model, tuple(getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))))


def _hugging_face(name: str) -> NamedModel:
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
        return NamedModel(model, (config.num_channels, *sides))
    return NamedModel(model, (32,), config.vocab_size)


def _no_such_model(package: str, name: str, known: Iterable[str]) -> vp.VarpropError:
    return vp.VarpropError(f"{package} has no model {name!r}.{did_you_mean(name, known)}")


def check_inputs(model: Any, target: str, given: int) -> None:
    """Refuse a model that cannot do without more inputs than shapes were given."""
    parameters = signatures.signature(model.forward).parameters.values()
    usual = (signatures.Parameter.POSITIONAL_ONLY, signatures.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind in usual]
    if len(required) > given:
        raise vp.VarpropError(
            f"{target} takes {len(required)} inputs ({', '.join(required)}): give --input-shape once for each, in this "
            f"order, or name a factory that wraps it."
        )


def check_runs(model: Any, examples: Sequence[Any], target: str) -> None:
    """Refuse a model that does not take the examples."""
    try:
        with torch.no_grad():
            model(*examples)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        shapes = " and ".join(str(tuple(example.shape[1:])) for example in examples)
        raise vp.VarpropError(f"{target} does not take inputs of shape {shapes}: {reason}") from error
