"""The learning rate as the paper finds it: bounded Brent on its logarithm, over a short training run.

Shekhovtsov & Flach 2018: bounds [-6, -2] on log10(lr), at most 10 iterations. The objective is in `objective`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from .objective import Objective, as_loss, rate_setter
from .restore import preserved_rng

_DIVERGENCE_ERRORS = (FloatingPointError, OverflowError)
_NEAR_BOUND = 0.1  # of the search interval: beyond it, ten evaluations cannot tell an optimum from the bound
_WIDEN_BY = 100.0
_PENALTY_BEFORE_ANY_FINITE_LOSS = 1e6


@dataclass(frozen=True, repr=False)
class LRSearch:
    """What `find_lr` found, with everything it saw on the way.

    Attributes:
        lr: The rate with the least finite loss; the smallest rate tried if every evaluation diverged.
        loss: The objective at `lr`; infinite if every evaluation diverged.
        trace: Every evaluation as `(lr, loss)` in the order made; a diverged one has loss infinity.
        bounds: The interval searched.
        at_bound: The best rate lies next to a bound and is the outermost tried: the optimum may be outside.
        flat: The losses hardly differ, so the rate means nothing.
    """

    lr: float
    loss: float
    trace: tuple[tuple[float, float], ...]
    bounds: tuple[float, float]
    at_bound: bool
    flat: bool

    @property
    def diverged(self) -> bool:
        """Whether at least one evaluation diverged (NaN, infinity, or a floating-point exception)."""
        return any(not math.isfinite(loss) for _, loss in self.trace)

    @property
    def message(self) -> str:
        """The outcome in words, with the bounds to try next where there is a reason to."""
        interval = "[{:g}, {:g}]".format(*self.bounds)
        wider = "find_lr(objective, bounds=({:g}, {:g}))".format(*self.widen())
        if self.failed:
            return f"Every evaluation in {interval} diverged; try smaller rates: {wider}."
        if self.flat:
            return f"The loss is flat over {interval}, no rate is better than another; widen the bounds: {wider}."
        if self.at_bound:
            return f"The best rate {self.lr:.3g} lies at a bound of {interval}; widen the bounds: {wider}."
        count = sum(not math.isfinite(loss) for _, loss in self.trace)
        note = f"; {count} of {len(self.trace)} evaluations diverged" if count else ""
        return f"The best rate {self.lr:.3g} lies inside {interval}{note}."

    @property
    def failed(self) -> bool:
        """Whether no evaluation gave a finite loss."""
        return not math.isfinite(self.loss)

    def widen(self) -> tuple[float, float]:
        """The bounds to try next; the present ones if the optimum lies inside them."""
        low, high = self.bounds
        if self.failed:
            return low / _WIDEN_BY**2, low
        upwards = self.flat or (self.at_bound and _position(self.lr, self.bounds) > 0.5)
        downwards = self.flat or (self.at_bound and not upwards)
        return (low / _WIDEN_BY if downwards else low), (high * _WIDEN_BY if upwards else high)

    def apply(self, optimizer: Optimizer) -> Optimizer:
        """Set the rate found: the largest group's rate becomes `lr`, the others keep their ratio to it.

        Args:
            optimizer: Changed in place. A scheduler made before keeps its own base rates: make it afterwards.

        Returns:
            The same optimizer.
        """
        if self.failed:
            raise ValueError(f"There is no rate to apply: {self.message}")
        rate_setter(optimizer)(self.lr)
        return optimizer

    def plot(self, ax: Any = None) -> Any:
        """Draw loss against rate, diverged evaluations as crosses at the top.

        Args:
            ax: Matplotlib axes to draw on; new ones if left out.

        Returns:
            The axes.
        """
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError("LRSearch.plot needs matplotlib: pip install 'varprop[lab]'.") from error
            ax = pyplot.subplots()[1]
        finite = [(lr, loss) for lr, loss in sorted(self.trace) if math.isfinite(loss)]
        diverged = [lr for lr, loss in self.trace if not math.isfinite(loss)]
        top = max((loss for _, loss in finite), default=1.0)
        ax.plot([lr for lr, _ in finite], [loss for _, loss in finite], "o-", label="evaluations")
        if diverged:
            ax.plot(diverged, [top] * len(diverged), "rx", label="diverged")
        if not self.failed:
            ax.axvline(self.lr, linestyle=":", color="gray", label=f"lr = {self.lr:.3g}")
        ax.set_xscale("log")
        ax.set_xlim(*self.bounds)
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        ax.legend()
        return ax

    def __repr__(self) -> str:
        flags = [name for name in ("at_bound", "flat", "diverged") if getattr(self, name)]
        low, high = self.bounds
        evaluations = f"{len(self.trace)} evaluations in [{low:g}, {high:g}]"
        return f"LRSearch({', '.join([f'lr={self.lr:.4g}', f'loss={self.loss:.6g}', evaluations, *flags])})"


def find_lr(
    objective: Objective,
    bounds: tuple[float, float] = (1e-6, 1e-2),
    maxiter: int = 10,
    *,
    grids: Sequence[int] = (),
    flat_tolerance: float = 1e-3,
) -> LRSearch:
    """Minimise `objective(lr)` by bounded Brent on log10 of the learning rate, on request after a look around.

    A loss that is NaN or infinite, or a FloatingPointError or OverflowError, counts as divergence and enters
    the search as a finite loss above all finite ones, growing with the rate. Random number generators are
    left as they were. No rate is set anywhere: see `LRSearch.apply`.

    Args:
        objective: The loss to expect of a learning rate, for instance from `training_objective`.
        bounds: The least and the largest rate; the paper's by default.
        maxiter: The number of evaluations (Brent always makes two), those on grids included.
        grids: Before Brent, so many rates evenly spaced within the bounds are tried, and the bounds drawn in to the
            neighbours of the best; for every number once. Brent alone, as in the paper, settles for a poor rate now and
            then where the objective is noisy.
        flat_tolerance: Losses that differ by less than this share of the largest of them are called flat.

    Returns:
        The search: rate, loss, every evaluation, and the flags `at_bound`, `flat` and `diverged`.
    """
    try:
        from scipy.optimize import minimize_scalar
    except ImportError as error:
        raise ImportError("find_lr needs scipy: pip install 'varprop[lab]'.") from error
    low, high = _checked_bounds(bounds)
    if maxiter - sum(grids) < 1 or min(grids, default=1) < 1:
        raise ValueError(f"maxiter must be at least 1 above the evaluations on grids, got {maxiter} and {list(grids)}.")
    trace: list[tuple[float, float]] = []

    def penalised(exponent: float) -> float:
        lr = 10.0 ** float(exponent)
        trace.append((lr, _evaluate(objective, lr)))
        return _finite_loss(trace, (low, high))

    inner = math.log10(low), math.log10(high)
    with preserved_rng():
        for count in grids:
            inner = _drawn_in(penalised, inner, count)
        minimize_scalar(penalised, bounds=inner, method="bounded", options={"maxiter": maxiter - sum(grids)})
    return _summary(tuple(trace), (low, high), flat_tolerance)


def _drawn_in(loss: Callable[[float], float], bounds: tuple[float, float], count: int) -> tuple[float, float]:
    """The neighbours of the best of so many points in the middles of equal parts; a bound where there is none."""
    low, high = bounds
    points = [low + (high - low) * (index + 0.5) / count for index in range(count)]
    losses = [loss(point) for point in points]
    best = losses.index(min(losses))
    return (points[best - 1] if best else low), (points[best + 1] if best + 1 < count else high)


def _evaluate(objective: Objective, lr: float) -> float:
    try:
        value = objective(lr)
    except _DIVERGENCE_ERRORS:
        return math.inf
    loss = as_loss(value, "objective")
    return loss if math.isfinite(loss) else math.inf


def _finite_loss(trace: list[tuple[float, float]], bounds: tuple[float, float]) -> float:
    """The last loss, or for it a penalty that grows with the rate, so that ties never lead Brent upwards."""
    lr, loss = trace[-1]
    if math.isfinite(loss):
        return loss
    finite = [known for _, known in trace if math.isfinite(known)]
    if not finite:
        return _PENALTY_BEFORE_ANY_FINITE_LOSS * (1 + _position(lr, bounds))
    spread = max(finite) - min(finite)
    return max(finite) + (spread or abs(max(finite)) or 1.0) * (1 + _position(lr, bounds))


def _position(lr: float, bounds: tuple[float, float]) -> float:
    low, high = bounds
    return math.log(lr / low) / math.log(high / low)


def _summary(trace: tuple[tuple[float, float], ...], bounds: tuple[float, float], flat_tolerance: float) -> LRSearch:
    lr, loss = min(trace, key=lambda evaluation: (evaluation[1], evaluation[0]))
    finite = [known for _, known in trace if math.isfinite(known)]
    flat = len(finite) > 1 and max(finite) - min(finite) <= flat_tolerance * max(map(abs, finite))
    at_bound = bool(finite) and not flat and _is_at_bound(lr, trace, bounds)
    return LRSearch(lr, loss, trace, bounds, at_bound, flat)


def _is_at_bound(lr: float, trace: tuple[tuple[float, float], ...], bounds: tuple[float, float]) -> bool:
    position = _position(lr, bounds)
    near_high = position > 1 - _NEAR_BOUND and lr == max(tried for tried, _ in trace)
    near_low = position < _NEAR_BOUND and lr == min(tried for tried, _ in trace)
    return near_high or near_low


def _checked_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = (float(bound) for bound in bounds)
    if not (0 < low < high < math.inf):
        raise ValueError(f"bounds must be two finite rates with 0 < low < high, got ({low:g}, {high:g}).")
    return low, high
