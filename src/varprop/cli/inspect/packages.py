"""Packages that a target or its data may need, imported when they do."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

import torch

import varprop as vp

INSTALLED_AS = {"PIL": "pillow"}
OPERATORS = ("nms", "qnms")


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
        _declare_operators()
        _forget(package.partition(".")[0], "torchvision")
        return importlib.import_module(package)


def _declare_operators() -> None:
    """Beside a CPU build of torch torchvision's own operators do not load; declared they do not stop its import."""
    for name in OPERATORS:
        with contextlib.suppress(RuntimeError):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _forget(*packages: str) -> None:
    """Half imported modules would be taken for whole ones."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
