"""Prints how the house stands: lines and files by package, vague names, docstrings, and how far a call travels.

Run it in the project's root, `python tools/house.py`; `--no-hops` reads the sources alone and needs no torch.
"""

from __future__ import annotations

import argparse
import ast
import collections
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
VAGUE = {
    "found",
    "own",
    "given",
    "known",
    "part",
    "parts",
    "place",
    "places",
    "both",
    "others",
    "other",
    "these",
    "those",
    "whole",
    "met",
    "told",
    "made",
    "one",
    "ones",
    "rest",
    "kept",
    "thing",
    "things",
}
RIDDLE = re.compile(r"(The same|As |What |Whether |That |Those |Of )")
SMALL_FILE = 60  # lines
SMALL_HELPER = 3  # statements


def sources() -> dict[Path, str]:
    """The text of every Python file of the project, by its path below src."""
    return {file.relative_to(SOURCE): file.read_text("utf-8") for file in sorted(SOURCE.rglob("*.py"))}


def print_sizes(texts: dict[Path, str]) -> None:
    """Print lines and files by package."""
    lines: collections.Counter[str] = collections.Counter()
    files: collections.Counter[str] = collections.Counter()
    for file, text in texts.items():
        package = "/".join(file.parts[:2]) if len(file.parts) > 2 else file.parts[0]
        lines[package] += len(text.splitlines())
        files[package] += 1
    for package in sorted(lines):
        print(f"{package:32s}{lines[package]:7d} lines{files[package]:5d} files")
    for top in sorted({file.parts[0] for file in texts}):
        inside = [package for package in lines if package.split("/")[0] == top]
        total, count = sum(lines[package] for package in inside), sum(files[package] for package in inside)
        print(f"{'all of ' + top:32s}{total:7d} lines{count:5d} files")
    small = sum(file.name != "__init__.py" and len(text.splitlines()) <= SMALL_FILE for file, text in texts.items())
    print(f"{'all':32s}{lines.total():7d} lines{files.total():5d} files, {small} of at most {SMALL_FILE} lines")


def print_names(texts: dict[Path, str]) -> None:
    """Print the share of vague names, the docstrings that open like a riddle, and the helpers with one caller."""
    bound = vague = riddles = 0
    helpers: dict[str, int] = {}  # private functions by name, with how many statements they have
    uses: collections.Counter[str] = collections.Counter()
    for text in texts.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound += 1
                vague += node.id in VAGUE
            elif isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
            elif isinstance(node, ast.arg):
                bound += 1
                vague += node.arg in VAGUE
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                riddles += bool(RIDDLE.match(ast.get_docstring(node) or ""))
            if isinstance(node, ast.FunctionDef) and re.match(r"_[^_]", node.name):
                helpers[node.name] = len(node.body)
    once = sum(uses[name] == 1 and size <= SMALL_HELPER for name, size in helpers.items())
    print(f"vague names: {100 * vague / max(bound, 1):.1f} % of {bound}")
    print(f"docstrings that open with The same, As, What, Whether, That, Those or Of: {riddles}")
    print(f"private helpers of at most {SMALL_HELPER} statements with one caller: {once}")


def hops(function: Callable[[], Any]) -> tuple[int, int, int]:
    """How many files and functions of varprop a call runs through, and how many of its calls lie inside each other."""
    files: set[str] = set()
    functions: set[Any] = set()
    depth = deepest = 0
    inside = f"{SOURCE / 'varprop'}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, deepest
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(inside):
            return
        depth += 1 if event == "call" else -1
        deepest = max(deepest, depth)
        files.add(code.co_filename)
        if not code.co_name.startswith("<"):  # comprehensions and lambdas are part of a function
            functions.add(code)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(files), len(functions), deepest


def print_hops() -> None:
    """Print how far `vp.normalize` and one forward pass travel, for a small convolutional network on the CPU."""
    sys.path.insert(0, str(SOURCE))
    import torch
    from torch import nn

    import varprop as vp

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)
    )
    x, moments = torch.randn(4, 3, 8, 8), vp.Moments(0.0, 1.0)
    vp.normalize(model, moments, example=x[:1])(x)  # whatever happens once in a process does not count
    normalized = vp.normalize(model, moments, example=x[:1])
    normalized(x)
    for name, function in (
        ("vp.normalize", lambda: vp.normalize(model, moments, example=x[:1])),
        ("one forward pass", lambda: normalized(x)),
    ):
        print("{}: {} files, {} functions, {} calls deep".format(name, *hops(function)))


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-hops", action="store_true", help="Read the sources alone, and run nothing.")
    texts = sources()
    options = parser.parse_args()
    print_sizes(texts)
    print_names(texts)
    if not options.no_hops:
        print_hops()


if __name__ == "__main__":
    main()
