"""The other state that ``--against`` names: earlier weights, none, or those after ``vp.init_``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import varprop as vp

from .files import load_weights
from .inputs import Inputs

FRESH, INIT = "fresh", "init"


def check_against(against: str | None, weights: Path | None, figure: Path | None) -> None:
    """Refuse options that do not go together, before anything is loaded."""
    if figure is not None and against is None:
        raise vp.VarpropError("--figure draws two states: name the other by --against.")
    if against == FRESH and weights is None:
        raise vp.VarpropError("--against fresh compares with the model as built: give the other state by --weights.")
    if against not in (None, FRESH, INIT) and not Path(str(against)).expanduser().is_file():
        raise vp.VarpropError(f"--against takes a file of weights, {FRESH} or {INIT}; there is no file {against}.")


def other_model(as_built: Any, model: Any, against: str, inputs: Inputs) -> Any:
    """The model in the state that ``--against`` names."""
    if against == INIT:
        return vp.init_(copy.deepcopy(model), inputs.moments, example=inputs.example)
    if against != FRESH:
        load_weights(as_built, Path(against))
    return as_built


def compared(own: vp.Report, other: vp.Report, weights: Path | None, against: str) -> Any:
    """The comparison of both reports, the earlier state first: ``vp.init_`` comes after, weights in a file before."""
    name = weights.name if weights is not None else "as built"
    if against == INIT:
        return own.compare(other, (name, "vp.init_"))
    if against == FRESH:
        return other.compare(own, ("as built", name))
    file = Path(against).expanduser()
    if weights is not None and weights.name == file.name:
        return other.compare(own, (str(file), str(weights)))
    return other.compare(own, (file.name, name))
