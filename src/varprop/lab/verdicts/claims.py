"""What the paper claims: every claim stands, in words, above the function that judges it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .evidence import Evidence, Judgement

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
    experiments: tuple[str, ...] | None = None,
    fixed: bool = False,
    **settings: Any,
) -> Callable[[Callable[..., Judgement]], Callable[..., Judgement]]:
    """Registers the function below as what judges a claim; arguments as of `Claim`, by default on its figure's runs.

    One function may judge several claims: it is called with the evidence and the settings of each.
    """
    about = (figure.partition("/")[0],) if experiments is None else experiments

    def register(judge: Callable[..., Judgement]) -> Callable[..., Judgement]:
        REGISTERED[name] = Claim(name, text, rule, figure, about, functools.partial(judge, **settings), fixed)
        return judge

    return register
