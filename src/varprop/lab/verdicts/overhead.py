"""The cost of the normalization, read from the file that its benchmark leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .claims import claim
from .evidence import FAILS, HOLDS, MISSING, Evidence, Judgement, each, lower
from .seed_statistics import Sample, number


@claim(
    "overhead",
    "The proposed normalization has little overhead: no more than batch normalization",
    "For every model of the benchmark, the seconds of one training step with AP2 are at most those with BN. Where the "
    "file has repeated measurements, AP2 costs more only when it does so by more than the noise.",
    experiments=(),
)
def _judge(evidence: Evidence) -> Judgement:
    return overhead(evidence.benchmarks)


def overhead(files: Sequence[Path]) -> Judgement:
    """The claim, by the first of the files that exists.

    It holds ``{"models": {name: {"standard": s, "batch": s, "analytic": s}}}`` with s the seconds of one training step,
    a number or a list of repetitions.
    """
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        return Judgement(MISSING, ("no benchmark of the overhead was found",))
    try:
        models = {name: _samples(steps) for name, steps in json.loads(file.read_text("utf-8"))["models"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Judgement(MISSING, (f"{file} was not understood ({type(error).__name__}: {error})",))
    return each(lambda name: _compare(name, models[name]), models)


def _samples(steps: dict[str, Any]) -> dict[str, Sample]:
    lists = {name: value if isinstance(value, list) else [value] for name, value in steps.items()}
    return {name: Sample(tuple(map(float, values))) for name, values in lists.items() if values}


def _compare(name: str, steps: dict[str, Sample]) -> Judgement:
    """AP2 against BN on one model; single measurements are compared as they are."""
    if "batch" not in steps or "analytic" not in steps:
        return Judgement(MISSING, (f"{name}: BN and AP2 were not both measured",))
    batch, analytic = steps["batch"], steps["analytic"]
    line = f"{name}: AP2 {1e3 * analytic.mean:.3g} ms, BN {1e3 * batch.mean:.3g} ms"
    if "standard" in steps:
        plain = steps["standard"].mean
        shares = [f"{number(100 * (s.mean / plain - 1))} %" if plain else "undefined" for s in (analytic, batch)]
        line += f", Standard {1e3 * plain:.3g} ms: AP2 adds {shares[0]}, BN {shares[1]}"
    single = analytic.seeds == batch.seeds == 1
    costs_more = analytic.mean > batch.mean if single else lower(analytic, batch) == FAILS
    return Judgement(FAILS if costs_more else HOLDS, (line,))
