"""The result of an inspection: rows, findings, and their forms for people and programs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..engine.walk import Walk
from ..errors import VarpropError
from .compare import Comparison, compare
from .findings import Finding
from .page import render, write
from .page_notebook import report_html
from .page_report import report_page
from .page_text import finite_json
from .places import Place
from .quantization import quantization
from .rows import Row
from .table import STYLES, plain, rich_table

FORMAT = 1  # of to_dict
Source = tuple[Walk, tuple[Place, ...]]


@dataclass(frozen=True)
class Report:
    """What `inspect` found.

    Attributes:
        model: Class of the model.
        parameters: How many numbers it has.
        rows: One a module call or operation, in the order of execution, containers before what they hold.
        findings: What is worth knowing, the worst first.
        inputs: Extents, mean and std of every random input.
        gradient_ratio: Gradient at the first layer over that at the last, both summed over positions.
        check: What the numbers were compared with: ``""``, ``"gaussian"`` or ``"data"``.
        source: What the report was made from; None in a copy that was saved and loaded.
    """

    model: str
    parameters: int
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    inputs: tuple[dict[str, Any], ...]
    gradient_ratio: float | None
    check: str = ""
    source: Source | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, path: str) -> Row:
        """The row of a module's first call, or that of a label."""
        for row in self.rows:
            if (row.kind == "module" and row.path == path and row.call == 0) or row.label == path:
                return row
        raise KeyError(f"no row '{path}'; known: {', '.join(row.label for row in self.rows)}")

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity ``error``."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def show(self, file: TextIO | None = None) -> None:
        """Print the table of the tree of modules, then the findings; coloured where rich is installed."""
        try:
            from rich.console import Console
        except ImportError:
            print(self.text(), file=file or sys.stdout)
            return
        console = Console(file=file or sys.stdout)
        # in a file or a pipe nothing is folded to the width of a terminal
        console = console if console.is_terminal else Console(file=file or sys.stdout, width=200)
        console.print(self._heading(), markup=False, highlight=False)
        for finding in self.findings:
            console.print(str(finding), style=STYLES[finding.severity], markup=False, highlight=False)
        console.print()
        console.print(rich_table(list(self.rows), self.findings))

    def text(self) -> str:
        """The same as plain text."""
        findings = [str(finding) for finding in self.findings] or ["Nothing to worry about was found."]
        return "\n".join([self._heading(), *findings, "", plain(list(self.rows))])

    def _heading(self) -> str:
        ratio = f"; gradient first to last: {self.gradient_ratio:.3g}" if self.gradient_ratio is not None else ""
        checked = f"; after | measured on {self.check}" if self.check else ""
        return f"{self.model}, {self.parameters:,} parameters{ratio}{checked}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {
            "format": FORMAT,
            "model": self.model,
            "parameters": self.parameters,
            "inputs": list(self.inputs),
            "gradient_ratio": self.gradient_ratio,
            "check": self.check,
            "findings": [finding.to_dict() for finding in self.findings],
            "rows": [row.to_dict() for row in self.rows],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The dict as JSON text, also written to a file if a path is given; what is not finite becomes null."""
        text = finite_json(self.to_dict())
        if path is not None:
            Path(path).write_text(text + "\n", "utf-8")
        return text

    def to_html(self, path: str | Path | None = None) -> str:
        """One HTML page with nothing outside it, also written to a file if a path is given.

        Raises:
            VarpropError: If the file cannot be written.
        """
        text = render(report_page(self))
        if path is not None:
            write(text, path)
        return text

    def compare(self, after: Report, names: tuple[str, str] = ("before", "after")) -> Comparison:
        """This state of a model beside a later one.

        Args:
            after: The report of the later state.
            names: What to call this state and the later one.

        Raises:
            VarpropError: If the reports have no layer in common.
        """
        return compare(self, after, names)

    def to_dataframe(self) -> Any:
        """One line a row, as a pandas DataFrame.

        Raises:
            VarpropError: If pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise VarpropError("to_dataframe needs pandas: pip install pandas.") from error
        return pandas.DataFrame([flat(row) for row in self.rows])

    def _repr_html_(self) -> str:
        return report_html(self)

    def quantization(self, bits: int = 8, *, k: float = 4.0, per_channel: bool = True) -> dict[str, Any]:
        """What a quantized copy of the model needs, from the weights alone, ready for JSON.

        Weights are rounded to whole multiples of their scale, symmetrically. Where W_q are those of a layer, its mean
        output is off by ``shift`` = (W_q - W) E[x]; add ``correction`` to its bias (or, times the slope of a batch norm
        behind it, to that one's) and it is not.

        Args:
            bits: Of the weights.
            k: Half width of the activation ranges, in standard deviations.
            per_channel: One scale for every output channel, or one for the whole layer.

        Returns:
            ``inputs`` and ``activations`` with the range (``low``, ``high``), ``mean`` and ``std`` of every channel,
            and ``layers`` with the name of the ``weight``, its ``scale``, ``shift`` and ``correction`` by channel.

        Raises:
            VarpropError: If the weights have changed since, or the report was saved and loaded.
        """
        if self.source is None:
            raise VarpropError("This report was saved and loaded, without the model it is about: inspect again.")
        return {"model": self.model} | quantization(*self.source, bits, k, per_channel)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}

    def __repr__(self) -> str:
        return self.text()


def flat(row: Row) -> dict[str, Any]:
    """A row as one level of names and numbers."""
    plain_row = row.to_dict()
    nested = {name: plain_row.pop(name) for name in ("mean", "std", "numbers", "measured", "ranges")}
    flattened = {f"{name}_{key}": value for name in ("mean", "std") for key, value in nested[name].items()}
    measured = {f"measured_{key}": seen["value"] for key, seen in nested["measured"].items()}
    errors = {f"measured_{key}_error": seen["error"] for key, seen in nested["measured"].items()}
    return {**plain_row, **row.numbers, **flattened, **measured, **errors}
