"""The other state that ``--against`` names: earlier weights, none, or those after ``vp.init_``."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import varprop as vp

from .files import load_weights
from .inputs import Inputs

FRESH, INIT = "fresh", "init"


@dataclass(frozen=True)
class OtherState:
    """A model to compare with.

    Attributes:
        model: The model in that state.
        name: What to call it.
        own_name: What to call the state it is compared with.
        later: Whether it comes after that.
    """

    model: Any
    name: str
    own_name: str
    later: bool = False

    def compared(self, report: vp.Report, other: vp.Report) -> Any:
        """The comparison of both reports, the earlier state first."""
        if self.later:
            return report.compare(other, (self.own_name, self.name))
        return other.compare(report, (self.name, self.own_name))


def check_against(against: str | None, weights: Path | None, figure: Path | None) -> None:
    """Refuse options that do not go together, before anything is loaded."""
    if figure is not None and against is None:
        raise vp.VarpropError("--figure draws two states: name the other by --against.")
    if against == FRESH and weights is None:
        raise vp.VarpropError("--against fresh compares with the model as built: give the other state by --weights.")
    if against not in (None, FRESH, INIT) and not Path(str(against)).expanduser().is_file():
        raise vp.VarpropError(f"--against takes a file of weights, {FRESH} or {INIT}; there is no file {against}.")


def other_state(other: Any, model: Any, weights: Path | None, against: str, inputs: Inputs) -> OtherState:
    """The state that ``--against`` names: of `other`, the model as built, or of a copy of the model looked at."""
    if against == INIT:
        changed = vp.init_(copy.deepcopy(model), inputs.moments, example=inputs.example)
        return OtherState(changed, "vp.init_", _own_name(weights), later=True)
    if against == FRESH:
        return OtherState(other, "as built", _own_name(weights))
    file = Path(against).expanduser()
    load_weights(other, file)
    same = weights is not None and weights.name == file.name
    return OtherState(other, str(file) if same else file.name, str(weights) if same else _own_name(weights))


def _own_name(weights: Path | None) -> str:
    return weights.name if weights is not None else "as built"
