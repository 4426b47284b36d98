"""``varprop doctor``: what is installed, what can be used, where the data is; and how a model would be normalized."""

from __future__ import annotations

import os
import platform
import warnings
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated

import torch

import varprop as vp

from .inspect.command import SHAPE, TARGET
from .parser import typer

EXTRAS = {
    "lab": ("jinja2", "matplotlib", "numpy", "rich", "scikit-learn", "scipy", "typer"),
    "report": ("jinja2", "matplotlib", "rich"),
    "tracking": ("tensorboard",),
}
FOR_MODELS = ("torchvision", "timm", "transformers", "safetensors", "pillow", "pandas")  # `inspect` may ask for them


def doctor(
    target: Annotated[str | None, typer.Argument(help=f"A model to look at: {TARGET}")] = None,
    input_shape: Annotated[list[str] | None, typer.Option(help=SHAPE)] = None,
) -> None:
    """Show versions, devices, extras and data: what to look at first when something does not work.

    With TARGET also how vp.normalize would treat its layers: which are folded together, which need a walk, and why.
    """
    python = f"Python {platform.python_version()} on {platform.platform()}"
    _print("versions", [own_version(), f"torch {torch.__version__}", python])
    _print("devices", _devices())
    _print("extras", [_extra(name, packages) for name, packages in EXTRAS.items()])
    _print("models", [", ".join(f"{package} {_version(package) or '(not installed)'}" for package in FOR_MODELS)])
    _print("data", _data())
    if target is not None:
        _print("layers", _folded_layers(target, input_shape or []))


def _print(title: str, lines: list[str]) -> None:
    for line in lines:
        typer.echo(f"{title:<10}{line}")
        title = ""


def _folded_layers(target: str, shapes: list[str]) -> list[str]:
    """How the layers of a model are folded once it is normalized, and what `vp.normalize` warns of."""
    from .inspect.inputs import InputOptions, make_inputs
    from .inspect.models import load

    found = load(target)
    inputs = make_inputs(found, target, InputOptions(shapes))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            normalized = vp.normalize(found.model, inputs.moments, example=inputs.example)
        except ValueError as error:
            raise vp.VarpropError(f"{target} cannot be normalized: {error}") from error
    return [*str(vp.fold_report(normalized)).splitlines(), *(f"warning: {one.message}" for one in warned)]


def own_version() -> str:
    """The version of varprop as installed."""
    return f"varprop {_version('varprop') or 'not installed (used from its source folder)'}"


def _devices() -> list[str]:
    cores = f"cpu: {os.cpu_count()} cores, torch uses {torch.get_num_threads()}"
    if not torch.cuda.is_available():
        return [cores, "cuda: none that torch can use"]
    return [cores, *(_gpu(index) for index in range(torch.cuda.device_count()))]


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _extra(name: str, packages: tuple[str, ...]) -> str:
    missing = [package for package in packages if _version(package) is None]
    if missing:
        return f"{name}: {', '.join(missing)} missing: pip install 'varprop[{name}]'"
    return f"{name}: {', '.join(f'{package} {_version(package)}' for package in packages)}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _data() -> list[str]:
    from varprop_lab.data import datasets

    looked = f"looked for in {', '.join(map(str, datasets.places()))}"
    digits = "there, with scikit-learn" if find_spec("sklearn") else "missing: pip install 'varprop[lab]'"
    found = [
        f"{name}: {datasets.find_folder(name) or f'missing: varprop data get {name}'}" for name in ("mnist", "cifar10")
    ]
    return [looked, *found, f"digits: {digits}"]
