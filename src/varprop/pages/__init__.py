"""What the HTML pages of the inspection and of the lab have in common: template engine, colours, phones, plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import VarpropError

_HERE = Path(__file__).parent
_SCRIPTS = ("svg.js", "scales.js", "plot.js", "frame.js")


def environment(templates: Path) -> Any:
    """The environment of Jinja for a folder of templates and the shared ones; what is inserted is escaped."""
    try:
        import jinja2
    except ImportError as error:
        raise VarpropError(
            "The page needs jinja2, which comes with torch: pip install '.[report]' in a checkout of varprop."
        ) from error
    loader = jinja2.FileSystemLoader([templates, _HERE])
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def script(templates: Path, *names: str) -> str:
    """The scripts of a page one after another, the shared ones first."""
    files = [*(_HERE / name for name in _SCRIPTS), *(templates / name for name in names)]
    return "\n".join(file.read_text("utf-8") for file in files)


def style(file: Path) -> str:
    """The styles of a page: the shared ones, its own, and last what phones change."""
    return "\n".join(part.read_text("utf-8") for part in (_HERE / "frame.css", file, _HERE / "phone.css"))
