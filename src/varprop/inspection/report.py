"""The result of an inspection: rows, findings, and their forms for people and programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TextIO

from ..engine.evaluation import Evaluation as Walk
from ..engine.report import unknown_name
from ..errors import VarpropError
from .comparison import Comparison
from .data import ReportData, compared
from .findings.finding import Finding
from .numbers.row import ReportRow
from .places import Place
from .quantization import quantization
from .render.exports import Exports
from .render.page import Page
from .render.report_page import report_page, report_summary
from .render.text import report_text, show_report


@dataclass(frozen=True, repr=False)
class Report(ReportData, Exports):
    """What `inspect` found; `ReportData` says what it holds.

    Attributes:
        source: The walk and the places the report was made from; None in a copy that was saved and loaded.
    """

    source: tuple[Walk, tuple[Place, ...]] | None = field(default=None, compare=False)

    def __getitem__(self, path: str) -> ReportRow:
        """The row of a module's first call, or that of a label."""
        for row in self.rows:
            if (row.kind == "module" and row.path == path and row.call == 0) or row.label == path:
                return row
        raise KeyError(unknown_name("no row", path, [row.label for row in self.rows]))

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity ``error``."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def show(self, file: TextIO | None = None, depth: int | None = None) -> None:
        """Print findings, the table of the tree of modules and a verdict; coloured where rich is installed.

        Args:
            file: Where to; standard output if left out.
            depth: The deepest level of modules in the table, the model itself being level 0; all if left out.
        """
        show_report(self, file, depth)

    def text(self, depth: int | None = None) -> str:
        """The same as plain text."""
        return report_text(self, depth)

    def compare(self, after: ReportData, names: tuple[str, str] = ("before", "after")) -> Comparison:
        """This state of a model beside a later one.

        Args:
            after: The report of the later state.
            names: What to call this state and the later one.

        Raises:
            VarpropError: If the reports have no layer in common.
        """
        return Comparison(self, after, names, **compared(self, after))

    def to_dataframe(self) -> Any:
        """One line a row, as a pandas DataFrame.

        Raises:
            VarpropError: If pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise VarpropError("to_dataframe needs pandas: pip install pandas.") from error
        return pandas.DataFrame([row.flat() for row in self.rows])

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

    def _page(self) -> Page:
        return report_page(self)

    def _repr_html_(self) -> str:
        return report_summary(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}
