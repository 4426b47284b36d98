"""How often the rules on differences decide something where there is nothing to decide.

    python -m benchmarks.verdict_rates docs/results/verdict_rates.md

Every quantity of every method, start and setting is drawn from one distribution: a number common to the runs of a
seed, and noise of the run. What a rule of `varprop_lab.paper.verdicts` then calls "holds" or "does not hold" it owes
to chance.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from varprop.text_table import Table
from varprop_lab.paper.verdicts.evidence import REGISTERED, Evidence
from varprop_lab.paper.verdicts.judge import CLAIMS
from varprop_lab.protocol import PAPER_GRIDS
from varprop_lab.seed_statistics import FAILS, HOLDS, Sample

SEEDS, DRAWS = 3, 4000
COMMON, OWN = 0.05, 0.02  # standard deviations of a seed, and of a run, of a quantity whose mean is 1
# claims that compare quantities with one another, or count cases in which they do; the others compare them with numbers
COMPARISONS = (
    "bn-stochastic", "bn-oscillates", "bn-unstable", "bn-overfits-less", "bn-overfits-less-still", "bn-generalizes",
    "bn-boost", "cifar-bn-trains-best", "cifar-bn-validates-best", "bn-batch-size-training", "bn-batch-size-validation",
    "equal-rates", "decay-nothing", "decay-destabilizes", "projection", "ap2-batch-size-training",
    "ap2-batch-size-validation", "on-par", "cifar-close", "orthogonal", "robust", "lower-loss", "lower-loss-evaluation",
)  # fmt: skip


@dataclass(frozen=True)
class NullEvidence(Evidence):
    """Evidence in which all that is asked for has the same distribution."""

    outcomes: Any = ()
    seed: int = 0
    drawn: dict[Any, Sample] = field(default_factory=dict)

    def find(self, *cell: Any, **setting: Any) -> Sample:
        """A sample of the distribution, one and the same whenever the same is asked for."""
        key = (*map(_name, cell), *sorted((name, str(value)) for name, value in setting.items()))
        if key not in self.drawn:
            common = np.random.default_rng((self.seed, 0)).normal(0, COMMON, SEEDS)
            own = np.random.default_rng((self.seed, 1 + len(self.drawn))).normal(0, OWN, SEEDS)
            self.drawn[key] = Sample(tuple(1 + common + own))
        return self.drawn[key]

    def ran(self, experiments: Any) -> list[str]:
        """All of the paper's experiments."""
        return list(PAPER_GRIDS)


def _name(argument: Any) -> str:
    """An argument of `find` in words: metrics that are made by one function from equal arguments are the same."""
    if not callable(argument):
        return str(argument)
    if isinstance(argument, functools.partial):
        return f"{_name(argument.func)} {argument.keywords}"
    return f"{argument.__qualname__} {[_name(cell.cell_contents) for cell in argument.__closure__ or ()]}"


def rates(name: str, draws: int = DRAWS) -> dict[str, float]:
    """The shares of draws of chance alone in which a claim holds and does not hold."""
    verdicts = Counter(str(REGISTERED[name].judge(NullEvidence(seed=seed)).verdict) for seed in range(draws))
    return {verdict: verdicts[verdict] / draws for verdict in (HOLDS, FAILS)}


def page(draws: int = DRAWS) -> str:
    """The rates of all comparisons as Markdown."""
    rows = []
    for claim in CLAIMS:
        if claim.name in COMPARISONS:
            found = rates(claim.name, draws)
            rows.append((claim.name, f"{100 * found[HOLDS]:.1f} %", f"{100 * found[FAILS]:.1f} %"))
    table = Table("", ("claim", "holds by chance", "does not hold by chance"), rows, left=("claim",)).markdown()
    return (
        "# Verdicts where there is nothing to find\n\n"
        "Written by `python -m benchmarks.verdict_rates docs/results/verdict_rates.md`. All methods and "
        f"starts have the same distribution (mean 1, standard deviation {COMMON:g} between seeds and {OWN:g} between "
        f"runs of a seed), {SEEDS} seeds; {draws} draws. A single comparison at the 5 % level gives 2.5 % in either "
        "column. Claims that two things are alike, or that one is at most a little above the other, are true here; "
        "for them only the last column is an error.\n\n"
        f"{table}\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.parse_args().page.write_text(page())
