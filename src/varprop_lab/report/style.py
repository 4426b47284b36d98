"""Colours, dashes and markers of figures: one place, so that every figure agrees."""

from __future__ import annotations

from typing import Any

# Close to Okabe and Ito's palette, and apart under every kind of colour blindness; the second is for dark pages.
METHOD_COLOURS = {
    "standard": ("#4a4d50", "#e0e3e6"),
    "weight": ("#009e73", "#2bd4a4"),
    "batch": ("#0064a8", "#4aa3ff"),
    "analytic": ("#d55e00", "#ff8c42"),
    "layer": ("#9c00fc", "#783cfc"),
    "group": ("#603000", "#cc183c"),
}
DOUBLE_COLOUR = ("#d16aa8", "#cc66aa")
OTHER_COLOUR = ("#8a7a00", "#e6d44a")

METHOD_MARKERS = {"standard": "s", "weight": "^", "batch": "o", "analytic": "D", "layer": "P", "group": "X"}
DASHES = {"": "solid", "decay": "dashdot", "unit-norm": "dotted"}

# Settings of matplotlib.
LOOK = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e5e8",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#80868b",
    "xtick.color": "#3c4043",
    "ytick.color": "#3c4043",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "svg.hashsalt": "varprop",  # the same figure gives the same bytes
    "svg.fonttype": "path",
}
LINESTYLES: dict[str, Any] = {
    "solid": "-",
    "dashed": (0, (4, 2)),
    "dashdot": (0, (6, 2, 1.5, 2)),
    "dotted": (0, (1.2, 1.6)),
}
MARKS: dict[str, dict[str, Any]] = {
    "diverged": {"marker": "x", "s": 34, "linewidths": 1.6},
    "chosen": {"marker": "o", "s": 60, "linewidths": 1.5},
    "at bound": {"marker": "*", "s": 110, "linewidths": 0.7},
}
LEGEND_MARKS: dict[str, dict[str, Any]] = {
    "chosen": {"marker": "o", "mfc": "none", "ms": 9},
    "at bound": {"marker": "*", "ms": 11},
    "diverged": {"marker": "x", "ms": 7, "mew": 1.6},
}


def line_style(method: str, variant: str = "", evaluation: bool = False) -> dict[str, Any]:
    """Colours, dash and marker of a method in every figure, as fields of `PlottedSeries`; evaluation is dashed."""
    light, dark = DOUBLE_COLOUR if variant == "double" else METHOD_COLOURS.get(method, OTHER_COLOUR)
    dash = "dashed" if evaluation else DASHES.get(variant, "solid" if variant == "double" else "dashdot")
    marker = "v" if variant == "double" else METHOD_MARKERS.get(method, "P")
    return {"colour": light, "dark_colour": dark, "dash": dash, "marker": marker}
