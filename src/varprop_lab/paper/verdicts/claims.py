"""What the paper claims: every claim stands, in words, above the function that judges it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .evidence import Evidence, Judgement, each

Rule = Callable[[Evidence], Judgement]
REGISTERED: dict[str, Claim] = {}


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, and how it is judged."""

    name: str
    text: str  # the sentence
    rule: str  # how the verdict is computed, in words
    figure: str  # ``experiment/figure`` that bears on it
    experiments: tuple[str, ...]  # that it is about
    judge: Rule
    fixed: bool  # whether the learning rate was fixed, so that no bound plays a part


def claim(
    name: str,
    text: str,
    rule: str,
    figure: str = "",
    experiments: tuple[str, ...] = (),
    fixed: bool = False,
    cases: Sequence[Any] | None = None,
    **settings: Any,
) -> Callable[[Callable[..., Judgement]], Callable[..., Judgement]]:
    """Registers the function below as what judges a claim; arguments as of `Claim`, by default on its figure's runs.

    One function may judge several claims: it is called with the evidence and the settings of each. Of a claim that
    must hold in all of several `cases` it judges one, which it gets after the evidence.
    """
    about = experiments or tuple(filter(None, [figure.partition("/")[0]]))

    def register(judge: Callable[..., Judgement]) -> Callable[..., Judgement]:
        judge_one = functools.partial(judge, **settings)

        def judge_all(evidence: Evidence) -> Judgement:
            return each(functools.partial(judge_one, evidence), cases or ())

        whole = judge_one if cases is None else judge_all
        REGISTERED[name] = Claim(name, text, rule, figure, about, whole, fixed)
        return judge

    return register
