"""Models that the command line can name: made by the user's code or another package, with weights from a file."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect as signatures
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp

INSTALLED_AS = {"PIL": "pillow"}
OPERATORS = ("nms", "qnms")


@dataclass(frozen=True)
class NamedModel:
    """A model, the shape of its input if known, and how many tokens there are if that is what it takes."""

    model: Any
    shape: tuple[int, ...] | None = None
    tokens: int | None = None


def load(text: str, seed: int = 0) -> NamedModel:
    """The model that a target names, in evaluation mode, with the random weights of a seed."""
    source, _, name = text.rpartition(":")
    if not source or not name:
        raise vp.VarpropError(
            f"TARGET is package.module:callable, file.py:factory, torchvision:NAME, timm:NAME or hf:NAME, not {text!r}."
        )
    makers: dict[str, Callable[[str], NamedModel]] = {"torchvision": _torchvision, "timm": _timm, "hf": _hugging_face}
    torch.manual_seed(seed)
    try:
        if source in makers:
            named = makers[source](name)
        else:  # a function or a class of the user's that makes the model, or the model itself
            made = callable_named(source, name)
            named = NamedModel(made if isinstance(made, nn.Module) else made())
    except vp.VarpropError:
        raise
    except Exception as error:  # of somebody else's code
        raise vp.VarpropError(f"{text} failed: {located(error)}") from error
    if not isinstance(named.model, nn.Module):
        raise vp.VarpropError(f"{text} must return an nn.Module, not {type(named.model).__name__}.")
    named.model.eval()
    return named


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


def _no_such_model(package: str, name: str, available: Iterable[str]) -> vp.VarpropError:
    return vp.VarpropError(f"{package} has no model {name!r}.{did_you_mean(name, available)}")


def check_inputs(model: Any, target: str, shapes: int) -> None:
    """Refuse a model that cannot do without more inputs than shapes were given."""
    parameters = signatures.signature(model.forward).parameters.values()
    usual = (signatures.Parameter.POSITIONAL_ONLY, signatures.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind in usual]
    if len(required) > shapes:
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


def embedding_rows(model: nn.Module, tokens: Tensor) -> int:
    """How many tokens the embedding knows that reads a model's input.

    Raises a VarpropError if there is none, or it does not know all tokens.
    """
    readers: list[int] = []

    def note(embedding: nn.Embedding | nn.EmbeddingBag, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].shape == tokens.shape and torch.equal(inputs[0], tokens):
            readers.append(embedding.num_embeddings)

    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                hooks.enter_context(module.register_forward_pre_hook(note))
        model.eval()(tokens)
    if not readers:
        raise vp.VarpropError("The data are tokens (integers), but no nn.Embedding of the model reads them.")
    return readers[0]


def load_weights(model: Any, file: Path) -> None:
    """Load a checkpoint that has to fit."""
    file = file.expanduser()
    if not file.is_file():
        raise vp.VarpropError(f"There is no file {file} with weights.")
    expected = model.state_dict()
    state = _without_wrappers(_state(file), expected)
    missing, unknown = [n for n in expected if n not in state], [n for n in state if n not in expected]
    differing = [n for n in expected if n in state and expected[n].shape != state[n].shape]
    for what, names in (("lacks", missing), ("has no place for", unknown), ("has another shape for", differing)):
        if names:
            subject = "The model" if what == "has no place for" else str(file)
            raise vp.VarpropError(f"{file} does not fit: {subject} {what} {len(names)} tensor(s), such as {names[0]}.")
    model.load_state_dict(state)


def _state(file: Path) -> dict[str, Any]:
    loaded = read_file(file, "as weights", ": give a safetensors file, or a state_dict saved by torch.save")
    for key in ("state_dict", "model"):
        loaded = loaded[key] if isinstance(loaded, dict) and isinstance(loaded.get(key), dict) else loaded
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise vp.VarpropError(f"{file} holds no state_dict, a dict of tensors by name.")
    return loaded


def _without_wrappers(state: dict[str, Any], expected: Iterable[str]) -> dict[str, Any]:
    """A state_dict without what wrappers add to names, where the model has no modules called so itself.

    torch.compile adds `_orig_mod.`, at any depth; DataParallel, DistributedDataParallel and AveragedModel `module.`.
    """
    expected = list(expected)
    if not any("_orig_mod." in name for name in expected):
        state = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    if any(name.startswith("module.") for name in expected):
        return state
    while (wrapped := [name for name in state if name.startswith("module.")]) and {*state} <= {*wrapped, "n_averaged"}:
        state = {name.removeprefix("module."): state[name] for name in wrapped}
    return state


def read_file(file: Path, purpose: str, advice: str = "") -> Any:
    """The contents of a file; one that cannot be read gets a sentence with its purpose, and what to give instead."""
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


def needed(package: str) -> Any:
    """An optional package, or one sentence on how to get it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        name = (error.name or package).partition(".")[0]
        raise vp.VarpropError(f"This needs {name}: pip install {INSTALLED_AS.get(name, name)}.") from error
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        # beside a CPU build of torch torchvision's own operators do not load; declared they do not stop its import
        for name in OPERATORS:
            with contextlib.suppress(RuntimeError):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        half_imported = (package.partition(".")[0], "torchvision")
        for name in [name for name in sys.modules if name.partition(".")[0] in half_imported]:
            del sys.modules[name]
        return importlib.import_module(package)


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

    Raises a VarpropError if there is none.
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
