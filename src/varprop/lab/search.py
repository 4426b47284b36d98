"""The learning rates of many cells by bounded Brent, in lockstep: every search waits until all are evaluated."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import varprop as vp

from .records import Search

Trace = list[tuple[float, float]]  # (lr, loss) in the order made
Evaluate = Callable[[dict[str, float]], Mapping[str, float]]


class _Cancelled(Exception):
    """Ends a search whose evaluation will never come."""


@dataclass
class _Asker:
    """One search, running in a thread of its own; it speaks only while the others wait."""

    name: str
    bounds: tuple[float, float]
    known: Trace
    evaluations: int
    news: queue.SimpleQueue[str]
    answers: queue.SimpleQueue[float | None] = field(default_factory=queue.SimpleQueue)
    wanted: float | None = None
    found: vp.LRSearch | None = None
    error: BaseException | None = None
    asked: int = 0

    def run(self) -> None:
        try:
            self.found = vp.find_lr(self.loss, self.bounds, self.evaluations)
        except BaseException as error:
            self.error = error
        self.wanted = None
        self.news.put(self.name)

    def loss(self, lr: float) -> float:
        self.asked += 1
        if self.asked <= len(self.known):
            return self._remembered(lr)
        self.wanted = lr
        self.news.put(self.name)
        answer = self.answers.get()
        if answer is None:
            raise _Cancelled
        return answer

    def _remembered(self, lr: float) -> float:
        known, loss = self.known[self.asked - 1]
        if not math.isclose(known, lr, rel_tol=1e-9):
            raise RuntimeError(
                f"The search for {self.name} asks for the learning rate {lr:g} where an earlier run evaluated "
                f"{known:g}: that run had other settings or versions; start again in another folder."
            )
        return loss


def lockstep(
    bounds: Mapping[str, tuple[float, float]],
    evaluate: Evaluate,
    evaluations: int = 10,
    known: Mapping[str, Trace] | None = None,
) -> dict[str, vp.LRSearch]:
    """Search for several learning rates at once, as `vp.find_lr` does for one.

    Args:
        bounds: Of every search, by name.
        evaluate: Called with the rates wanted, by name; returns their losses. All searches that are not finished ask
            together, every time.
        evaluations: At most so many for each.
        known: Evaluations of an earlier run: they are answered from here, in order.

    Returns:
        What `vp.find_lr` returns, by name.

    Raises:
        Exception: Whatever `evaluate` raises; the searches are ended.
    """
    news: queue.SimpleQueue[str] = queue.SimpleQueue()
    remembered = known or {}
    askers = {n: _Asker(n, b, list(remembered.get(n, [])), evaluations, news) for n, b in bounds.items()}
    for asker in askers.values():
        threading.Thread(target=asker.run, daemon=True).start()
    try:
        _serve(askers, evaluate, news)
    finally:
        for asker in askers.values():
            asker.answers.put(None)
    return {name: asker.found for name, asker in askers.items() if asker.found is not None}


def _serve(askers: dict[str, _Asker], evaluate: Evaluate, news: queue.SimpleQueue[str]) -> None:
    waiting = len(askers)
    while waiting:
        for _ in range(waiting):
            news.get()
        failed = next((asker.error for asker in askers.values() if asker.error is not None), None)
        if failed is not None:
            raise failed
        asking = {name: asker.wanted for name, asker in askers.items() if asker.wanted is not None}
        waiting = len(asking)
        losses = evaluate(asking) if asking else {}
        for name in asking:
            askers[name].wanted = None
            askers[name].answers.put(losses[name])


def as_record(found: vp.LRSearch) -> Search:
    """The search as it is kept."""
    return Search(found.lr, found.loss, list(found.trace), found.at_bound, found.flat, found.diverged)


def given(rate: float) -> Search:
    """The record of a rate that was not searched for."""
    return Search(rate, math.nan, [])
