"""A row of a report: everything that is known of the result of one module call or operation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ...text_table import extents_text
from ..places import label
from .statistics import UnitSpread

SHARES = ("saturated", "dead", "always_on")  # numbers that are shares of units without effect


@dataclass(frozen=True)
class ReportRow:
    """Statistics of the result of one module call or operation.

    Attributes:
        path: Dotted path of the module (of the innermost one for an operation); empty for the model itself.
        kind: ``module`` or ``operation``.
        name: Class of the module, or the operation.
        op: The operation that makes the result.
        moves: Whether that only moves elements.
        call: Which call of the module it is, from 0.
        depth: Depth in the tree of modules.
        leaf: Whether no other row lies inside it.
        line: The user's source line.
        extents: Extents of the result; `uniform` tells along which axes one unit stands for all.
        uniform: For every axis whether it is uniform.
        mean: Means over the units.
        std: Standard deviations over the units.
        numbers: The layer's numbers: ``mean``, ``std`` (root mean square), ``shift`` (share of the mean square that is
            constant), ``flat``, ``saturated``, ``dead``, ``always_on`` (where they apply), ``gradient``.
        growth: std over that of the model's input.
        gradient_total: Root mean square over channels of the gradient summed over positions, E[sum g^2]^(1/2), which
            can be compared between layers of different resolution; ``numbers["gradient"]`` is that of a single element.
        gain: E[f'^2]^(1/2) of an activation, std out / std in otherwise.
        status: ``exact``, ``approximate`` or ``sampled``.
        reasons: Why not exact, forward.
        gradient_status: ``exact`` or ``approximate``; empty without gradient.
        gradient_reason: Why the step back through the row's own operation is approximate.
        ranges: Low and high end of every channel, mean -+ k std.
        measured: The same numbers from data, each with its standard error.
        node: Name of the graph node.
        constant: Share of the channels that do not vary at any position.
        weighted: Whether it is a single linear layer or convolution.
        role: What becomes of it, where that decides how it is to be judged (`inspection.roles`).
        weight: Name of the weight of a linear layer or convolution.
        rank: Effective rank of that weight; 0 if it is all zeros, None without one.
        full_rank: The largest that it could have.
        trial: The same numbers from a few random inputs, where no data was given.
        branch: Of a residual sum, the standard deviation of what is added over that of the stream it is added to.
    """

    path: str
    kind: Literal["module", "operation"]
    name: str
    op: str
    moves: bool
    call: int
    depth: int
    leaf: bool
    line: str
    extents: tuple[int, ...]
    uniform: tuple[bool, ...]
    mean: UnitSpread
    std: UnitSpread
    numbers: dict[str, float]
    growth: float | None
    gradient_total: float | None
    gain: float | None
    status: str
    reasons: tuple[str, ...]
    gradient_status: str
    gradient_reason: str
    ranges: dict[str, Any] = field(repr=False)
    node: str
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    constant: float = 0.0
    weighted: bool = False
    role: str = ""
    weight: str = ""
    rank: float | None = None
    full_rank: int = 0
    trial: dict[str, dict[str, float]] = field(default_factory=dict)
    branch: float | None = None

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer of its own: nothing lies inside it, and it does more than move elements."""
        return self.leaf and not self.moves

    @property
    def trial_ratio(self) -> float | None:
        """Standard deviation on the random inputs of the trial over the computed one; None where it says nothing."""
        seen, own = self.trial.get("std"), self.numbers["std"]
        if not seen or not own or not seen["value"] or not abs(seen["value"] - own) >= 3 * seen["error"]:
            return None
        return seen["value"] / own

    @property
    def class_name(self) -> str:
        """Of the module; empty for an operation."""
        return self.name if self.kind == "module" else ""

    @property
    def own_name(self) -> str:
        """The last part of a module's path with the number of its call, or the operation in brackets."""
        name = (self.path.rpartition(".")[2] or "(model)") + (f" #{self.call + 1}" if self.call else "")
        return name if self.kind == "module" else f"[{self.name}]"

    @property
    def indented(self) -> str:
        """The same, as deep as it lies in the tree of modules."""
        return "  " * self.depth + self.own_name

    @property
    def extents_text(self) -> str:
        """Extents of the result, uniform axes in brackets."""
        return extents_text(self.extents, self.uniform)

    @property
    def label(self) -> str:
        """How a person would call it."""
        return label(self.path, self.call, "" if self.kind == "module" else self.name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        lists = {name: list(plain[name]) for name in ("extents", "uniform", "reasons")}
        return plain | lists | {"label": self.label, "mean": asdict(self.mean), "std": asdict(self.std)}

    def flat(self) -> dict[str, Any]:
        """One level of names and numbers."""
        plain = self.to_dict()
        nested = {name: plain.pop(name) for name in ("mean", "std", "numbers", "measured", "ranges", "trial")}
        spreads = {f"{name}_{key}": value for name in ("mean", "std") for key, value in nested[name].items()}
        measured = {f"measured_{key}": seen["value"] for key, seen in nested["measured"].items()}
        errors = {f"measured_{key}_error": seen["error"] for key, seen in nested["measured"].items()}
        return {**plain, **self.numbers, **spreads, **measured, **errors}
