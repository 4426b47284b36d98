"""The learning rates of many cells, in lockstep: every round evaluates one rate of each search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import varprop as vp

from ..protocol.experiments import Protocol
from ..training.trainer import Tick, Trainer

Trace = list[tuple[float, float]]  # (lr, loss) in the order made
Evaluate = Callable[[dict[str, float]], Mapping[str, float]]


class _Unknown(Exception):
    """Interrupts a search at the first rate whose loss is not known yet."""

    def __init__(self, lr: float) -> None:
        self.lr = lr


def find_lrs(
    bounds: Mapping[str, tuple[float, float]],
    evaluate: Evaluate,
    evaluations: int = 10,
    grids: Sequence[int] = (),
    known: Mapping[str, Trace] | None = None,
    limit: float | None = None,
) -> dict[str, vp.LRSearch]:
    """Search for several learning rates at once, as `vp.find_lr` does for one.

    Brent's method is deterministic, so in every round each search is repeated from its first evaluation with the
    losses known so far; the rate at which it asks for a new loss is what it wants next.

    Args:
        bounds: Of every search, by name.
        evaluate: Gives the losses at the rates that all searches that are not finished want next, by name.
        evaluations: At most so many for each.
        grids: As for `vp.find_lr`.
        known: Evaluations of an earlier run, in order.
        limit: While the best rate lies at the upper bound, the bound is moved up by a decade, at most to here; by
            default it stays.
    """
    traces = {name: list((known or {}).get(name, [])) for name in bounds}
    found: dict[str, vp.LRSearch] = {}
    while True:
        wanted: dict[str, float] = {}
        for name in bounds.keys() - found.keys():
            try:
                loss = _recorded_loss(name, traces[name])
                found[name] = _widened(loss, vp.find_lr(loss, bounds[name], evaluations, grids=grids), limit)
            except _Unknown as next_evaluation:
                wanted[name] = next_evaluation.lr
        if not wanted:
            return {name: found[name] for name in bounds}
        losses = evaluate({name: wanted[name] for name in bounds if name in wanted})
        for name, lr in wanted.items():
            traces[name].append((lr, losses[name]))


def _widened(loss: Callable[[float], float], search: vp.LRSearch, limit: float | None) -> vp.LRSearch:
    """The search, gone on with above its upper bound as long as the best rate lies there."""
    low, high = search.bounds
    while limit is not None and high < limit and search.at_bound and search.lr > math.sqrt(low * high):
        above = vp.find_lr(loss, (high, min(10 * high, limit)), 5, grids=(3,))
        best = min(search, above, key=lambda part: (part.loss, part.lr))
        high = above.bounds[1]
        at_bound = best.lr == max(rate for rate, _ in above.trace)  # no larger one was tried that is worse
        search = vp.LRSearch(best.lr, best.loss, search.trace + above.trace, (low, high), at_bound, False)
    return search


def _recorded_loss(name: str, trace: Trace) -> Callable[[float], float]:
    recorded = iter(trace)

    def loss(lr: float) -> float:
        known, value = next(recorded, (None, math.nan))
        if known is None:
            raise _Unknown(lr)
        if not math.isclose(known, lr, rel_tol=1e-9):
            raise RuntimeError(
                f"The search for {name} asks for the learning rate {lr:g} where an earlier run evaluated {known:g}: "
                "that run had other settings or versions; start again in another folder."
            )
        return value

    return loss


def losses_at(trainer: Trainer, rates: Mapping[str, float], protocol: Protocol, tick: Tick) -> dict[str, float]:
    """The running loss after the horizon of a search, by key of the cell; infinite where it diverged.

    All evaluations of a cell see the same batches in the same order. Cells that no rate is given for run along.
    """
    trainer.reset([rates.get(cell.key, protocol.lr_min) for cell in trainer.cells])
    for number in range(protocol.search_epochs):
        trainer.epoch(number, tick)
        if not any(map(math.isfinite, trainer.losses())):
            break
    return {cell.key: or_infinite(loss) for cell, loss in zip(trainer.cells, trainer.losses(), strict=True)}


def or_infinite(loss: float) -> float:
    """A loss, infinite where it is NaN."""
    return loss if math.isfinite(loss) else math.inf
