"""The runs of a question: by arm, each at the rate that suits it best, as values over seeds; and its claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..protocol.experiments import Experiment
from ..report.series import Figure
from ..verdicts.evidence import Judgement, NotRun, judged
from ..verdicts.seed_statistics import Sample
from .arms import Arm, Run

Rule = Callable[["Records"], Judgement]


@dataclass(frozen=True)
class Records:
    """Runs of one question."""

    runs: Sequence[Run]

    def at(self, arm: str, rate: float | None = None) -> list[Run]:
        """The runs of an arm, by default at the rate of the lowest training loss, the mean over seeds, in evaluation.

        Raises:
            NotRun: If there are none.
        """
        rates = {run["rate"] for run in self.runs if run["arm"] == arm}
        if not rates:
            raise NotRun(f"{arm} was not run", "questions")
        chosen = min(sorted(rates), key=lambda one: self.loss(arm, one).mean) if rate is None else rate
        return sorted((r for r in self.runs if r["arm"] == arm and r["rate"] == chosen), key=lambda r: int(r["seed"]))

    def loss(self, arm: str, rate: float | None = None) -> Sample:
        """The last training loss in evaluation mode."""
        return sample(self.at(arm, rate), lambda run: run["train_eval_loss"])

    def last(self, arm: str, curve: str) -> Sample:
        """The last value of a curve."""
        return self.of(arm, lambda run: run[curve][-1])

    def of(self, arm: str, value: Callable[[Run], float | None]) -> Sample:
        """A number of every run at the best rate."""
        return sample(self.at(arm), value)

    def rate(self, arm: str) -> float:
        """The best of those tried."""
        return float(self.at(arm)[0]["rate"])


def sample(runs: Iterable[Run], value: Callable[[Run], float | None]) -> Sample:
    """A number of every run, by its seed; infinite where the run diverged."""
    found = {int(run["seed"]): value(run) for run in runs}
    return Sample(tuple(math.inf if v is None else v for v in found.values()), tuple(found))


@dataclass(frozen=True)
class Question:
    """What is asked, what is trained for it, and what is said of the records."""

    name: str
    title: str
    arms: tuple[Arm, ...]
    settings: Experiment
    claims: tuple[tuple[str, Rule], ...]  # in words, with the function that judges
    figure: Callable[[Records], Figure]

    def findings(self, records: Records) -> list[str]:
        """A line for every claim: its verdict and the numbers it rests on."""
        found = [(text, judged(rule, records)) for text, rule in self.claims]
        return [f"- {text}: **{j.verdict}**. {'; '.join(j.measured)}." for text, j in found]
