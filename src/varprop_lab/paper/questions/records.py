"""The runs of a question: by arm, each at the rate that suits it best, as values over seeds; and its claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from varprop.text_table import Table

from ...protocol.experiments import Experiment
from ...report.series import Figure
from ...seed_statistics import Sample, lower
from ..verdicts.evidence import Judgement, NotRun, all_of, judged
from .arms import Arm, Run

TRAINED = "train_eval_loss"  # at the end, in evaluation mode
Value = Callable[[Run], float | None]
Place = tuple[str, str]  # an arm, and the name of what was measured


@dataclass(frozen=True)
class Records:
    """Runs of one question."""

    runs: Sequence[Run]

    def at(self, arm: str, rate: float | None = None) -> list[Run]:
        """The runs of an arm by seed, by default at the rate of the lowest training loss, the mean over seeds.

        Raises:
            NotRun: If there are none.
        """
        rates = {run["rate"] for run in self.runs if run["arm"] == arm}
        if not rates:
            raise NotRun(f"{arm} was not run", "questions")
        chosen = min(sorted(rates), key=lambda one: self.last(arm, TRAINED, one).mean) if rate is None else rate
        return sorted((r for r in self.runs if r["arm"] == arm and r["rate"] == chosen), key=lambda r: int(r["seed"]))

    def last(self, arm: str, name: str, rate: float | None = None) -> Sample:
        """The last value of a curve, or the only one."""
        return self.of(arm, lambda run: run[name][-1] if isinstance(run[name], list) else run[name], rate)

    def of(self, arm: str, value: Value, rate: float | None = None) -> Sample:
        """A number of every run; infinite where it diverged."""
        found = {int(run["seed"]): value(run) for run in self.at(arm, rate)}
        return Sample(tuple(math.inf if v is None else v for v in found.values()), tuple(found))


Rule = Callable[[Records], Judgement]
Claims = Iterable[tuple[str, Rule]]  # in words, with what judges


def is_lower(*pairs: tuple[Place, Place]) -> Rule:
    """The rule that the first of every pair ends below the second, seed by seed, by more than the noise."""

    def rule(records: Records) -> Judgement:
        verdicts, lines = [], []
        for first, second in pairs:
            a, b = records.last(*first), records.last(*second)
            verdicts.append(lower(a, b))
            texts = [one.percent() if first[1].endswith("error") else one.text() for one in (a, b)]
            lines.append(f"{first[1].rpartition('_')[2]} {texts[0]} against {texts[1]}: {verdicts[-1]}")
        return Judgement(all_of(verdicts), tuple(lines))

    return rule


@dataclass(frozen=True)
class Question:
    """What is asked, what is trained for it, and what is said of the records."""

    name: str
    title: str
    arms: tuple[Arm, ...]
    settings: Experiment
    claims: tuple[tuple[str, Rule], ...]
    figure: Callable[[Records], Figure]

    def verdicts(self, records: Records) -> str:
        """A table: every claim, its verdict, and the numbers it rests on."""
        found = [(text, judged(rule, records)) for text, rule in self.claims]
        rows = [(text, judgement.verdict, "; ".join(judgement.measured)) for text, judgement in found]
        columns = ("claim", "verdict", "measured")
        return Table("", columns, rows, left=columns).markdown()
