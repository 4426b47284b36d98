"""Commands and data sets that other packages bring: every package called ``varprop_...`` with a module `commands`.

The library finds them by their names and imports none of them by itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from typing import Any, Protocol, cast

PREFIX = "varprop_"
MODULE = "commands"


class Extension(Protocol):
    """The contents of the module `commands` of such a package."""

    DATASETS: tuple[str, ...]  # names that `load_inputs` takes

    def add_commands(self, commands: Any) -> None:
        """Add parsers to what `argparse.ArgumentParser.add_subparsers` returned; each sets `run` to a function."""

    def load_inputs(self, name: str, root: Path | None) -> Any:
        """Images of a data set as a network takes them, a float tensor (N, C, H, W)."""

    def data_lines(self) -> list[str]:
        """Lines of `varprop doctor` on where data sets are."""


@functools.cache
def extensions() -> tuple[Extension, ...]:
    """The extensions installed, by name.

    A package that was removed while Python runs counts as not installed; any other error of an import is raised.
    """
    names = sorted({module.name for module in pkgutil.iter_modules() if module.ispkg and module.name[:8] == PREFIX})
    return tuple(filter(None, map(_imported, names)))


def _imported(package: str) -> Extension | None:
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # None stands for it in sys.modules
        return None
    folders = (spec.submodule_search_locations if spec else None) or []
    if MODULE not in {module.name for module in pkgutil.iter_modules(folders)}:
        return None
    return cast(Extension, importlib.import_module(f"{package}.{MODULE}"))
