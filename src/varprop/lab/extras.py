"""Packages that only the lab needs, asked for when they are used."""

from __future__ import annotations

import importlib
from typing import Any

import varprop as vp


def need(package: str, purpose: str) -> Any:
    """The imported package.

    Args:
        package: Its name for import.
        purpose: What needs it, the beginning of a sentence.

    Raises:
        VarpropError: If it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise vp.VarpropError(f"{purpose} needs {name}: pip install 'varprop[lab]'.") from error
