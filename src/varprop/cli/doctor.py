"""``varprop doctor``: what is installed, what can be used, where the data is; and how a model would be normalized."""

from __future__ import annotations

import argparse
import os
import platform
import warnings
from importlib import metadata
from typing import Any

import torch

import varprop as vp

from .inputs import InputOptions, make_inputs
from .inspect import TARGET, add_shape
from .models import load
from .options import add_command, lab

EXTRAS = {
    "lab": ("jinja2", "matplotlib", "numpy", "rich", "scikit-learn", "scipy"),
    "report": ("jinja2", "matplotlib", "rich"),
    "tracking": ("tensorboard",),
}
FOR_MODELS = ("torchvision", "timm", "transformers", "safetensors", "pillow", "pandas")  # `inspect` may ask for them


TEXT = """Show versions, devices, extras and data: the first thing to check when something does not work.

With TARGET it also shows how vp.normalize would treat its layers: which share one fold, which do not, and why."""


def add_to(commands: Any) -> None:
    """Add ``doctor`` to the commands."""
    parser = add_command(commands, "doctor", doctor, TEXT)
    parser.add_argument("target", metavar="TARGET", nargs="?", help=f"A model to examine: {TARGET}")
    add_shape(parser)


def doctor(options: argparse.Namespace) -> None:
    """Print what is installed and can be used, and how a model would be normalized if one is named."""
    python = f"Python {platform.python_version()} on {platform.platform()}"
    _print("versions", [own_version(), f"torch {torch.__version__}", python])
    _print("devices", _devices())
    _print("extras", [_extra(name, packages) for name, packages in EXTRAS.items()])
    _print("models", [", ".join(f"{package} {_version(package) or '(not installed)'}" for package in FOR_MODELS)])
    _print("data", lab().data_lines() if lab() is not None else [])
    if options.target is not None:
        _print("layers", _folded_layers(options.target, options.input_shape))


def _print(title: str, lines: list[str]) -> None:
    for line in lines:
        print(f"{title:<10}{line}")
        title = ""


def _folded_layers(target: str, shapes: list[str]) -> list[str]:
    """How the layers of a model are folded once it is normalized, and what `vp.normalize` warns of."""
    named = load(target)
    inputs = make_inputs(named, target, InputOptions(shapes))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            normalized = vp.normalize(named.model, inputs.moments, example=inputs.example)
        except ValueError as error:
            raise vp.VarpropError(f"{target} cannot be normalized: {error}") from error
    return [*vp.fold_report(normalized).table().splitlines(), *(f"warning: {warning.message}" for warning in warned)]


def own_version() -> str:
    """The version of varprop as installed."""
    return f"varprop {_version('varprop') or 'not installed (used from its source folder)'}"


def _devices() -> list[str]:
    cores = f"cpu: {os.cpu_count()} cores, torch uses {torch.get_num_threads()}"
    if not torch.cuda.is_available():
        return [cores, "cuda: none that torch can use"]
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [cores] + [
        f"cuda:{index}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
        for index, gpu in enumerate(gpus)
    ]


def _extra(name: str, packages: tuple[str, ...]) -> str:
    missing = [package for package in packages if _version(package) is None]
    if missing:
        return f"{name}: {', '.join(missing)} missing: pip install '.[{name}]' in a checkout of varprop"
    return f"{name}: {', '.join(f'{package} {_version(package)}' for package in packages)}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
