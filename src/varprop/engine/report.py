"""What a propagation found, and what it would need: results by module and by operation, and coverage."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ..moments import Moments
from ..text_table import extents_text, text_table


def unknown_name(what: str, name: str, choices: Iterable[str]) -> str:
    """A sentence on a name that is not known, with those that look like it; with all of them where they are few."""
    names = list(dict.fromkeys(choices))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    listed = near or names[:8]
    ending = ", ..." if not near and len(names) > len(listed) else ""
    lead = "did you mean" if near else "known are"
    return f"{what} {name!r}; {lead} {', '.join(map(repr, listed))}{ending}{'?' if near else ''}"


ASSUMPTION = "exact if units are independent"  # what every operation counts as that is not marked
Status = Literal["exact", "approximate", "sampled", "missing"]


@dataclass(frozen=True)
class Entry:
    """One operation on the random path.

    Attributes:
        name: The node's name in the graph.
        op: The operation.
        module: Dotted path of the module it was called in.
        line: The user's source line.
        status: ``exact`` if the units that it reads are independent and, for functions that are not linear, Gaussian;
            ``approximate``, ``sampled`` or ``missing``.
        reasons: Why it is not exact.
        moments: Its output's statistics, where computed.

    Example:
        >>> result = vp.propagate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
        >>> [(entry.module, entry.status) for entry in result.entries]
        [('0', 'exact'), ('1', 'exact')]
    """

    name: str
    op: str
    module: str
    line: str
    status: Status
    reasons: tuple[str, ...] = ()
    moments: Moments | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Result:
    """Mean and variance of everything a model computes.

    Attributes:
        output: The output's Moments, in the structure the model returns.
        entries: Every random operation in the order of execution.
        calls: Module path to the moments of each of its calls.
        classes: Module path to class name.
        assumption: Where operations that are not marked are exact.

    Example:
        >>> result = vp.propagate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
        >>> result.output.mean.shape, result["0"].std.shape, "1" in result
        (torch.Size([1, 4]), torch.Size([1, 4]), True)
    """

    output: Any
    entries: tuple[Entry, ...]
    calls: dict[str, tuple[Moments, ...]]
    classes: dict[str, str]
    assumption: str = ASSUMPTION

    def __getitem__(self, path: str) -> Moments:
        """Output statistics of a module, averaged over its calls (see `calls` for each).

        Of a module that returns several tensors they are those of the first one that is random.
        """
        if path not in self.calls:
            raise KeyError(unknown_name("no module", path, self.calls))
        return _average(path, self.calls[path])

    def __contains__(self, path: object) -> bool:
        return path in self.calls

    def by_module(self) -> dict[str, Moments]:
        """Output statistics of every module.

        Returns:
            Moments by path, averaged over the calls of a module.

        Example:
            >>> result = vp.propagate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> sorted(result.by_module())
            ['', '0', '1']
        """
        return {path: self[path] for path in self.calls}

    def by_op(self) -> dict[str, list[Entry]]:
        """Entries grouped by operation.

        Returns:
            Entries by the name of their operation.

        Example:
            >>> result = vp.propagate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> sorted(result.by_op())
            ['aten.linear.default', 'aten.relu.default']
        """
        groups: dict[str, list[Entry]] = {}
        for entry in self.entries:
            groups.setdefault(entry.op, []).append(entry)
        return groups

    @property
    def approximations(self) -> list[Entry]:
        """The entries that would not be exact even if units were independent."""
        return [entry for entry in self.entries if entry.status != "exact"]

    def table(self) -> str:
        """One line a module: extents of its output, mean over its units, and their standard deviation.

        That of the layer is the root mean square over its units, as everywhere; then those of the smallest and largest.

        Returns:
            Lines of text, with a legend of the marks.

        Example:
            >>> result = vp.propagate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> print(result.table())
            module   class       extents  mean ...
        """
        marks = _marks(self.entries)
        header = ("module", "class", "extents", "mean", "std", "smallest", "largest", "")
        rows: list[tuple[str, ...]] = []
        for path, calls in self.calls.items():
            for index, moments in enumerate(calls):
                name = (path or "(model)") + (f" #{index + 1}" if len(calls) > 1 else "")
                numbers = (f"{value:.4g}" for value in _summary(moments).values())
                rows.append((name, self.classes[path], _extents(moments), *numbers, marks.get(path, "")))
        text = text_table(header, rows)
        legend = [f"{mark} {reason}" for reason, mark in _legend(self.entries).items()]
        return "\n".join([text, f"Without a mark: {self.assumption}.", *legend])

    def to_dict(self, values: bool = False) -> dict[str, Any]:
        """Plain numbers, ready for JSON; with ``values`` also every unit's mean and variance.

        Args:
            values: True for the mean and variance of every unit, too.

        Returns:
            Dicts, lists, numbers and text.

        Example:
            >>> result = vp.propagate(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), vp.Moments(0.0, 1.0), example=(1, 8))
            >>> sorted(result.to_dict())
            ['modules', 'operations']
        """
        return {
            "modules": {
                path: {"class": self.classes[path], "calls": [_plain(m, values) for m in calls]}
                for path, calls in self.calls.items()
            },
            "operations": [
                {
                    "name": e.name, "op": e.op, "module": e.module, "line": e.line, "status": e.status,
                    "reasons": list(e.reasons), "moments": _plain(e.moments, values) if e.moments else None,
                }
                for e in self.entries
            ],
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"Result({len(self.calls)} modules, {len(self.entries)} operations)\n{self.table()}"


@dataclass(frozen=True)
class Coverage:
    """Every operation on the random path, before anything is computed.

    Example:
        >>> covered = vp.coverage(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (1, 8))
        >>> covered.complete, len(covered.exact), len(covered.approximate)
        (True, 2, 0)
    """

    entries: tuple[Entry, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    @property
    def exact(self) -> list[Entry]:
        """Operations whose moments are exact for Gaussian independent elements."""
        return self._with("exact")

    @property
    def approximate(self) -> list[Entry]:
        """Operations with a stated approximation."""
        return self._with("approximate")

    @property
    def missing(self) -> list[Entry]:
        """Operations without a rule."""
        return self._with("missing")

    @property
    def complete(self) -> bool:
        """True if the model propagates without sampling."""
        return not self.missing

    def table(self) -> str:
        """One line an operation and status, with count, reason and first place; `exact` if units are independent.

        Returns:
            Lines of text.

        Example:
            >>> print(vp.coverage(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (1, 8)).table())
            status  operation ...
        """
        counts = Counter((e.status, e.op, e.reasons) for e in self.entries)
        first = {(e.status, e.op, e.reasons): e for e in reversed(self.entries)}
        header = ("status", "operation", "count", "first module", "line", "reason")
        rows: list[tuple[str, ...]] = []
        for key, count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1])):
            entry = first[key]
            rows.append((entry.status, entry.op, str(count), entry.module, entry.line, "; ".join(entry.reasons)))
        return text_table(header, rows)

    def _with(self, status: Status) -> list[Entry]:
        return [entry for entry in self.entries if entry.status == status]

    def __repr__(self) -> str:
        numbers = f"{len(self.exact)} {ASSUMPTION}, {len(self.approximate)} approximate, {len(self.missing)} missing"
        return f"Coverage({numbers})\n{self.table()}"


def _average(path: str, calls: tuple[Moments, ...]) -> Moments:
    if len(calls) == 1:
        return calls[0]
    if len({call.shape for call in calls}) > 1:
        raise ValueError(f"'{path}' is called with different shapes; take one of result.calls['{path}'].")
    mean = torch.stack([call.mean for call in calls]).mean(0)
    return Moments(mean, torch.stack([call.var for call in calls]).mean(0), calls[0].full)


def _extents(moments: Moments) -> str:
    pairs = zip(moments.full, moments.shape, strict=True)
    return extents_text(moments.full, [full > 1 and stored == 1 for full, stored in pairs])


def _summary(moments: Moments) -> dict[str, float]:
    std = moments.std.detach()
    return {
        "mean": float(moments.mean.detach().mean()),
        "std": float(moments.var.detach().double().mean().sqrt()),
        "std_min": float(std.min()),
        "std_max": float(std.max()),
    }


def _plain(moments: Moments, values: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {"extents": list(moments.full), "shape": list(moments.shape), **_summary(moments)}
    if values:
        plain |= {"means": moments.mean.tolist(), "variances": moments.var.tolist()}
    return plain


def _legend(entries: tuple[Entry, ...]) -> dict[str, str]:
    reasons = dict.fromkeys(reason for entry in entries for reason in entry.reasons)
    return {reason: f"[{index + 1}]" for index, reason in enumerate(reasons)}


def _marks(entries: tuple[Entry, ...]) -> dict[str, str]:
    legend = _legend(entries)
    marks: dict[str, dict[str, None]] = {}
    for entry in entries:
        marks.setdefault(entry.module, {}).update(dict.fromkeys(legend[reason] for reason in entry.reasons))
    return {module: "".join(numbers) for module, numbers in marks.items()}
