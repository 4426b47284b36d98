"""``varprop doctor``: what is installed, what can be used, where the data is."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from importlib.util import find_spec

import typer

EXTRAS = {
    "lab": ("jinja2", "matplotlib", "numpy", "rich", "scikit-learn", "scipy", "typer"),
    "report": ("jinja2", "matplotlib", "rich"),
    "tracking": ("pyarrow", "tensorboard"),
}
FOR_MODELS = ("torchvision", "timm", "transformers", "safetensors", "pillow", "pandas")


def doctor() -> None:
    """Show versions, devices, extras and data: what to look at first when something does not work."""
    for title, lines in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("extras", [_extra(name, packages) for name, packages in EXTRAS.items()]),
        ("models", [_optional()]),
        ("data", _data()),
    ):
        for line in lines:
            typer.echo(f"{title:<10}{line}")
            title = ""


def _versions() -> list[str]:
    import torch

    return [
        f"varprop {_version('varprop') or '(from its source folder)'}",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()} on {platform.platform()}",
    ]


def _devices() -> list[str]:
    import torch

    cores = f"cpu: {os.cpu_count()} cores, torch uses {torch.get_num_threads()}"
    if not torch.cuda.is_available():
        return [cores, "cuda: none that torch can use"]
    return [cores, *(_gpu(index) for index in range(torch.cuda.device_count()))]


def _gpu(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return f"cuda:{index}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _extra(name: str, packages: tuple[str, ...]) -> str:
    missing = [package for package in packages if _version(package) is None]
    if missing:
        return f"{name}: {', '.join(missing)} missing: pip install 'varprop[{name}]'"
    return f"{name}: {', '.join(f'{package} {_version(package)}' for package in packages)}"


def _optional() -> str:
    """Packages that `inspect` uses where a target or its data asks for them."""
    return ", ".join(f"{package} {_version(package) or '(not installed)'}" for package in FOR_MODELS)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _data() -> list[str]:
    from varprop.lab.data import datasets

    looked = f"looked for in {', '.join(map(str, datasets.places()))}"
    digits = "there, with scikit-learn" if find_spec("sklearn") else "missing: pip install 'varprop[lab]'"
    found = [
        f"{name}: {datasets.whereabouts(name) or f'missing: varprop data get {name}'}" for name in ("mnist", "cifar10")
    ]
    return [looked, *found, f"digits: {digits}"]
