"""One state of a model, and two beside each other: plain data, however it is shown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import VarpropError
from .findings import Differences, Finding, differences
from .rows import ReportRow

FORMAT = 1  # of to_dict


@dataclass(frozen=True, repr=False)
class ReportData:
    """One state of a model.

    Attributes:
        model: Class of the model.
        parameters: How many numbers it has.
        rows: One a module call or operation, in the order of execution, containers before what they hold.
        findings: What is worth knowing, the worst first.
        inputs: Extents, mean and std of every random input.
        gradient_ratio: Gradient at the first layer over that at the last, both summed over positions.
        check: What the numbers were compared with: ``""``, ``"gaussian"`` or ``"data"``.
        covariance: ``"full"`` where the covariance of all units was followed, ``""`` where they count as independent.
    """

    model: str
    parameters: int
    rows: tuple[ReportRow, ...]
    findings: tuple[Finding, ...]
    inputs: tuple[dict[str, Any], ...]
    gradient_ratio: float | None
    check: str = ""
    covariance: str = ""

    @property
    def assumption(self) -> str:
        """Where numbers without a mark are exact."""
        return "exact if units are jointly Gaussian" if self.covariance else "exact if units are independent"

    @property
    def measured_on(self) -> str:
        """The inputs that numbers were measured on, in words."""
        return "random inputs" if self.check == "gaussian" else self.check

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON.

        Returns:
            Dicts, lists, numbers and text.

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> report.to_dict()["model"]
            'Sequential'
        """
        return {
            "format": FORMAT,
            "model": self.model,
            "parameters": self.parameters,
            "inputs": list(self.inputs),
            "gradient_ratio": self.gradient_ratio,
            "check": self.check,
            "covariance": self.covariance,
            "findings": [finding.to_dict() for finding in self.findings],
            "rows": [row.to_dict() for row in self.rows],
        }


@dataclass(frozen=True)
class Change:
    """One row in both states."""

    before: ReportRow  # in the first state
    after: ReportRow  # in the second

    @property
    def label(self) -> str:
        """The label of the row."""
        return self.after.label

    @property
    def std_factor(self) -> float | None:
        """By how much the standard deviation was multiplied."""
        return _factor(self.before.numbers["std"], self.after.numbers["std"])

    @property
    def gradient_factor(self) -> float | None:
        """By how much the gradient summed over positions was multiplied."""
        return _factor(self.before.gradient_total, self.after.gradient_total)

    @property
    def size(self) -> float:
        """How large the change is: the larger of both factors or of their inverses, as a logarithm to the base 2."""
        return max(_doublings(self.std_factor), _doublings(self.gradient_factor))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        numbers = {
            name: {**row.numbers, "gradient_total": row.gradient_total, "growth": row.growth}
            for name, row in (("before", self.before), ("after", self.after))
        }
        factors = {"std_factor": self.std_factor, "gradient_factor": self.gradient_factor, "size": self.size}
        return {"label": self.label, "name": self.after.name, "leaf": self.after.leaf, **numbers, **factors}


@dataclass(frozen=True, repr=False)
class ComparisonData:
    """Two states of a model.

    Attributes:
        before: The report of the first state.
        after: The report of the second.
        names: What the states are called.
        changes: Every row both have, in the order of execution.
        only_before: Labels of rows that only the first has.
        only_after: Labels of rows that only the second has.
        findings: Which findings are new, gone, or stayed.
    """

    before: ReportData
    after: ReportData
    names: tuple[str, str]
    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    findings: Differences

    def largest(self, count: int | None = None) -> list[Change]:
        """The layers that changed most, the largest change first.

        Args:
            count: How many; all if left out.

        Returns:
            The changes.

        Example:
            >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
            >>> moments = vp.Moments(torch.zeros(1, 8), torch.ones(1, 8))
            >>> before = vp.inspect(model, moments)
            >>> comparison = before.compare(vp.inspect(vp.init_(model, moments), moments))
            >>> [change.label for change in comparison.largest(1)]
            ['1']
        """
        layers = [change for change in self.changes if change.after.is_layer]
        return sorted(layers, key=lambda change: -change.size)[:count]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON.

        Returns:
            Dicts, lists, numbers and text.

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> report.compare(report).to_dict()["names"]
            ['before', 'after']
        """
        return {
            "format": FORMAT,
            "model": self.after.model,
            "names": list(self.names),
            "findings": self.findings.to_dict(),
            "gradient_ratio": [self.before.gradient_ratio, self.after.gradient_ratio],
            "changes": [change.to_dict() for change in self.changes],
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
        }


def compared(before: ReportData, after: ReportData) -> dict[str, Any]:
    """The rows of two reports paired by their labels, and their findings."""
    first, second = _labelled(before.rows), _labelled(after.rows)
    changes = tuple(Change(first[key], second[key]) for key in second if key in first)
    if not any(change.before.leaf and change.after.leaf for change in changes):
        raise VarpropError(
            f"These are reports of different models, {before.model} and {after.model}: no layer has the same name."
        )
    return {
        "changes": changes,
        "only_before": tuple(label for label, number in first if (label, number) not in second),
        "only_after": tuple(label for label, number in second if (label, number) not in first),
        "findings": differences(before.findings, after.findings),
    }


def _labelled(rows: Sequence[ReportRow]) -> dict[tuple[str, int], ReportRow]:
    """Rows by label, and by number among those of one label."""
    seen: Counter[str] = Counter()
    labelled = {}
    for row in rows:
        labelled[row.label, seen[row.label]] = row
        seen[row.label] += 1
    return labelled


def _factor(before: float | None, after: float | None) -> float | None:
    if before is None or after is None or (before == 0 and after == 0):
        return None
    return after / before if before else math.inf


def _doublings(factor: float | None) -> float:
    if factor is None or math.isnan(factor):
        return 0.0
    return abs(math.log2(factor)) if 0 < factor < math.inf else math.inf
