"""The cost of the normalization, read from the file that its benchmark leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .readings import Reading, combine, lower
from .spread import Sample, number

RULE = (
    "For every model of the benchmark, the seconds of one training step with AP2 are at most those with BN. Where the "
    "file has repeated measurements, AP2 costs more only when it does so by more than the noise."
)


def overhead(files: Sequence[Path]) -> tuple[Reading, str]:
    """The claim on overhead, and how it is judged.

    The file holds ``{"models": {name: {"standard": s, "batch": s, "analytic": s}}}`` with s the seconds of one training
    step, a number or a list of repetitions.

    Args:
        files: Where it may lie; the first that exists is read.
    """
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        return Reading("no data", ("no benchmark of the overhead was found",)), RULE
    try:
        models = {name: timings(steps) for name, steps in json.loads(found.read_text("utf-8"))["models"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return Reading("no data", (f"{found} was not understood ({type(error).__name__}: {error})",)), RULE
    parts = [compare(name, steps) for name, steps in models.items()]
    return Reading(combine(p.verdict for p in parts), tuple(line for p in parts for line in p.measured)), RULE


def timings(steps: dict[str, Any]) -> dict[str, Sample]:
    """Seconds a step by method."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in steps.items()}
    return {name: Sample(tuple(map(float, values))) for name, values in lists.items() if values}


def compare(name: str, steps: dict[str, Sample]) -> Reading:
    """AP2 against BN on one model."""
    if "batch" not in steps or "analytic" not in steps:
        return Reading("no data", (f"{name}: BN and AP2 were not both measured",))
    batch, analytic = steps["batch"], steps["analytic"]
    line = f"{name}: AP2 {1e3 * analytic.mean:.3g} ms, BN {1e3 * batch.mean:.3g} ms"
    if "standard" in steps:
        plain = steps["standard"].mean
        line += f", Standard {1e3 * plain:.3g} ms: AP2 adds {share(analytic, plain)}, BN {share(batch, plain)}"
    return Reading(verdict(analytic, batch), (line,))


def verdict(analytic: Sample, batch: Sample) -> str:
    """Whether AP2 costs no more than BN; single measurements are compared as they are."""
    if analytic.seeds == batch.seeds == 1:
        return "holds" if analytic.mean <= batch.mean else "does not hold"
    return "does not hold" if lower(analytic, batch) == "does not hold" else "holds"


def share(sample: Sample, plain: float) -> str:
    """The additional time in percent of the plain step."""
    return f"{number(100 * (sample.mean / plain - 1))} %" if plain else "undefined"
