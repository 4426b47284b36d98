"""The cost of the normalization, read from the file that its benchmark leaves."""

from __future__ import annotations

import json
import statistics

from .claims import claim
from .evidence import MISSING, Evidence, Judgement, at_most, each
from .seed_statistics import Sample, number


@claim(
    "overhead",
    "The proposed normalization has little overhead: no more than batch normalization",
    "For every network and mode of the benchmark: the time of a training step with AP2 is at most that with BN, round "
    "by round, with the noise to spare. Times are medians over rounds.",
    experiments=(),
)
def overhead(evidence: Evidence) -> Judgement:
    """By the first file of the benchmark that exists: its cells have the seconds of a step for every round."""
    file = next((file for file in evidence.benchmarks if file.is_file()), None)
    if file is None:
        return Judgement(MISSING, ("no benchmark of the overhead was found",))
    steps: dict[str, dict[str, Sample]] = {}
    try:
        for cell in json.loads(file.read_text("utf-8"))["cells"]:
            where = f"{cell['title']}, batch {cell['batch']}, {cell['mode']} {cell['precision']}"
            if cell["rounds"]:
                steps.setdefault(where, {})[cell["variant"]] = Sample(tuple(map(float, cell["rounds"])))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Judgement(MISSING, (f"{file} was not understood ({type(error).__name__}: {error})",))
    return each(lambda where: _compare(where, steps[where]), steps)


def _compare(where: str, steps: dict[str, Sample]) -> Judgement:
    if not {"batch", "analytic"} <= steps.keys():
        return Judgement(MISSING, (f"{where}: BN and AP2 were not both measured",))
    batch, analytic = steps["batch"], steps["analytic"]
    own, other = (statistics.median(sample.values) for sample in (analytic, batch))
    line = f"{where}: AP2 {1e3 * own:.3g} ms, BN {1e3 * other:.3g} ms"
    if "none" in steps:
        plain = statistics.median(steps["none"].values)
        shares = [f"{number(100 * (seconds / plain - 1))} %" for seconds in (own, other)]
        line += f", Standard {1e3 * plain:.3g} ms: AP2 adds {shares[0]}, BN {shares[1]}"
    return Judgement(at_most(analytic, batch, 0.0), (line,))
