"""The results as bars: the time of a step, as a ratio to that without normalization."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from ..report.style import METHOD_COLOURS, OTHER_COLOUR
from ..store.files import write_atomically
from .record import ROOM, Record
from .variants import VARIANTS, title

FILE = "normalization.png"
Modes = dict[str, dict[str, float]]  # ratios by mode and variant
_COLOURS = {
    "none": METHOD_COLOURS["standard"][0],
    "none-no-bias": "#9a9da0",
    "weight": METHOD_COLOURS["weight"][0],
    "batch": METHOD_COLOURS["batch"][0],
    "group": OTHER_COLOUR[0],
    "layer": "#d16aa8",
    "analytic": METHOD_COLOURS["analytic"][0],
}


def draw(record: Record, folder: Path) -> Path | None:
    """Write the chart; None if matplotlib is not there or there is nothing to draw."""
    found = ratios(record)
    if not found or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 2.0 * len(found) + 1.2), layout="constrained")
    for axes, (heading, modes) in zip(figure.subplots(len(found), squeeze=False)[:, 0], found.items(), strict=True):
        _bars(axes, heading, modes)
    figure.legend(handles=_legend(found), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"Time of a training step, relative to no normalization ({_machine(record)})", fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_atomically(folder / FILE, buffer.getvalue(), then=ROOM)
    return folder / FILE


def ratios(record: Record) -> dict[str, Modes]:
    """By case and mode, the ratios that were measured."""
    found: dict[str, Modes] = {}
    for cell in record.cells:
        ratio = record.time_ratio(cell)
        if ratio is not None:
            modes = found.setdefault(f"{cell.title}, batch {cell.batch}", {})
            modes.setdefault(f"{cell.mode} {cell.precision}", {})[cell.variant] = ratio
    return found


def _machine(record: Record) -> str:
    hardware = record.manifest["hardware"]
    threads = hardware["cpu_threads"]
    return str(hardware.get("gpu", f"CPU, {threads} thread{'s' * (threads != 1)}"))


def _legend(found: dict[str, Modes]) -> list[Any]:
    from matplotlib.patches import Patch

    drawn = {name for modes in found.values() for bars in modes.values() for name in bars}
    return [Patch(color=_COLOURS[name], label=title(name)) for name in VARIANTS if name in drawn]


def _bars(axes: Any, heading: str, modes: Modes) -> None:
    width = 0.86 / len(VARIANTS)
    for index, bars in enumerate(modes.values()):
        names = [name for name in VARIANTS if name in bars]
        for place, name in enumerate(names):
            x = index + (place - (len(names) - 1) / 2) * width
            axes.bar(x, bars[name], width * 0.92, color=_COLOURS[name])
            axes.text(x, bars[name], f"{bars[name]:.2f}", ha="center", va="bottom", fontsize=6)
    axes.axhline(1.0, color="black", linewidth=0.8, zorder=0)
    axes.set_xticks(range(len(modes)), list(modes), fontsize=8)
    axes.set_xlim(-0.55, max(2, len(modes)) - 0.45)
    axes.set_title(heading, fontsize=9, loc="left")
    axes.set_ylabel("x none", fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
