"""The result of an inspection, and of comparing two: rows, findings, and their forms for people and programs."""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..engine.evaluation import Evaluation
from ..engine.report import unknown_name
from ..errors import VarpropError
from .data import ComparisonData, ReportData, compared
from .findings import Finding
from .page import Page, finite_json, render
from .quantization import quantization
from .regions import Region
from .rows import ReportRow
from .text import comparison_text, report_text, show_report
from .views import comparison_page, comparison_summary, draw, report_page, report_summary


class Exports(ABC):
    """Exports that follow from plain values, a text and a page."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""

    @abstractmethod
    def text(self) -> str:
        """Text for a terminal."""

    @abstractmethod
    def _page(self) -> Page: ...

    def to_json(self, path: str | Path | None = None) -> str:
        """The dict as JSON text, also written to a file if a path is given; what is not finite becomes null.

        Args:
            path: Where to write it, if anywhere.

        Returns:
            The text.

        Raises:
            VarpropError: If the file cannot be written.

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> report.to_json()[:1]
            '{'
        """
        text = finite_json(self.to_dict())
        if path is not None:
            _write(text + "\n", Path(path))
        return text

    def to_html(self, path: str | Path | None = None) -> str:
        """One HTML page with nothing outside it, also written to a file if a path is given.

        Args:
            path: Where to write it, if anywhere.

        Returns:
            The page.

        Raises:
            VarpropError: If the file cannot be written.

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> report.to_html().rstrip().endswith("</html>")
            True
        """
        text = render(self._page())
        if path is not None:
            _write(text, Path(path))
        return text

    def __repr__(self) -> str:
        return self.text()


def _write(text: str, file: Path) -> None:
    """Write a file so that it is there whole or not at all."""
    special = file.exists() and not file.is_file()  # such as /dev/stdout, which must not be replaced
    draft = file if special else file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        draft.write_text(text, "utf-8")
        if not special:
            draft.replace(file)
    except OSError as error:
        if not special:
            with contextlib.suppress(OSError):
                draft.unlink()
        raise VarpropError(f"{file} cannot be written: {error.strerror or error}.") from error


LARGEST = 12  # changes that `show` prints


@dataclass(frozen=True, repr=False)
class Comparison(ComparisonData, Exports):
    """Two states of a model and the changes between them; `ComparisonData` lists what it holds.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
        >>> moments = vp.Moments(torch.zeros(1, 8), torch.ones(1, 8))
        >>> before = vp.inspect(model, moments)
        >>> comparison = before.compare(vp.inspect(vp.init_(model, moments), moments))
        >>> [change.label for change in comparison.largest(1)]
        ['1']
    """

    @property
    def new(self) -> tuple[Finding, ...]:
        """Findings of the second state that the first does not have."""
        return self.findings.new

    @property
    def gone(self) -> tuple[Finding, ...]:
        """Findings of the first state that the second no longer has."""
        return self.findings.gone

    def text(self, count: int = LARGEST) -> str:
        """Findings and the largest changes as text.

        Args:
            count: How many of the changes, the largest first.

        Returns:
            Lines of text.

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> report.compare(report).text(1).splitlines()[0]
            'Sequential: before -> after'
        """
        return comparison_text(self, count)

    def show(self, file: TextIO | None = None) -> None:
        """Print findings that are new or gone, and the largest changes.

        Args:
            file: Where to; standard output if left out.

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> report.compare(report).show()
            Sequential: before -> after
            ...
        """
        print(self.text(), file=file or sys.stdout)

    def figure(self, path: str | Path) -> Path:
        """One picture of both states: standard deviation and gradient by depth, as PNG, SVG or PDF.

        Args:
            path: The file, whose ending says the format.

        Returns:
            The path.

        Raises:
            VarpropError: If matplotlib is not installed or the file cannot be written.

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     report.compare(report).figure(folder + "/states.png").name
            'states.png'
        """
        return draw(self, Path(path))

    def _page(self) -> Page:
        return comparison_page(self)

    def _repr_html_(self) -> str:
        return comparison_summary(self)


@dataclass(frozen=True, repr=False)
class Report(ReportData, Exports):
    """The result of `inspect`; `ReportData` lists what it holds.

    Attributes:
        source: The evaluation and the regions the report was made from; None in a copy that was saved and loaded.

    Example:
        >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
        >>> report["0"].name, len(report.errors)
        ('Linear', 0)
    """

    source: tuple[Evaluation, tuple[Region, ...]] | None = field(default=None, compare=False)

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

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> report.show(depth=0)
            Sequential, 36 parameters; gradient first to last: ...
        """
        show_report(self, file, depth)

    def text(self, depth: int | None = None) -> str:
        """Findings, the table and a verdict as plain text.

        Args:
            depth: The deepest level of modules in the table, the model itself being level 0; all if left out.

        Returns:
            Lines of text.

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> len(report.text(depth=0)) < len(report.text())
            True
        """
        return report_text(self, depth)

    def compare(self, after: ReportData, names: tuple[str, str] = ("before", "after")) -> Comparison:
        """This state of a model beside a later one.

        Args:
            after: The report of the later state.
            names: What to call this state and the later one.

        Returns:
            Both states with the changes between them.

        Raises:
            VarpropError: If the reports have no layer in common.

        Example:
            >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
            >>> moments = vp.Moments(torch.zeros(1, 8), torch.ones(1, 8))
            >>> before = vp.inspect(model, moments)
            >>> comparison = before.compare(vp.inspect(vp.init_(model, moments), moments))
            >>> comparison.names
            ('before', 'after')
        """
        return Comparison(self, after, names, **compared(self, after))

    def to_dataframe(self) -> Any:
        """One line a row, as a pandas DataFrame.

        Returns:
            The rows of the report.

        Raises:
            VarpropError: If pandas is not installed.

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> report.to_dataframe()["std"].max()  # doctest: +SKIP
            0.62
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise VarpropError("to_dataframe needs pandas: pip install pandas.") from error
        return pandas.DataFrame([row.flat() for row in self.rows])

    def quantization(self, bits: int = 8, *, k: float = 4.0, per_channel: bool = True) -> dict[str, Any]:
        """Ranges and corrections that a quantized copy of the model needs, from the weights alone, ready for JSON.

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

        Example:
            >>> report = vp.inspect(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> [layer["weight"] for layer in report.quantization(bits=8)["layers"]]
            ['0.weight']
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
