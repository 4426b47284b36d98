"""The learning rate as the paper finds it: bounded Brent on its logarithm, over the loss of a short training run.

Shekhovtsov & Flach 2018: bounds [-6, -2] on log10(lr), at most 10 iterations. The objective is the running mean of the
stochastic loss after five epochs, with exponential weights that vanish to 0.1 in one epoch. Brent's method comes near
a bound and never tries it, so here the bound is tried where the best rate lies next to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .restore import preserved_rng, preserved_training

Objective = Callable[[float], float]
StepFunction = Callable[[nn.Module, Optimizer, Any], "Tensor | float"]
_DIVERGENCE_ERRORS = (FloatingPointError, OverflowError)
_NEAR_BOUND = 0.1  # of the search interval: beyond it, ten evaluations cannot tell an optimum from the bound
_WIDEN_BY = 100.0
_PENALTY_BEFORE_ANY_FINITE_LOSS = 1e6


@dataclass(frozen=True, repr=False)
class LRSearch:
    """The result of `find_lr`, with every evaluation on the way to it.

    Example:
        >>> import math
        >>> vp.find_lr(lambda lr: (math.log10(lr) + 3) ** 2)
        LRSearch(lr=0.001, loss=..., 6 evaluations in [1e-06, 0.01])

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
        """True if at least one evaluation diverged (NaN, infinity, or a floating-point exception)."""
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
        """True if no evaluation gave a finite loss."""
        return not math.isfinite(self.loss)

    def widen(self) -> tuple[float, float]:
        """The bounds to try next; the present ones if the optimum lies inside them.

        Returns:
            The least and the largest rate.

        Example:
            >>> trace = (1e-3, 0.7), (1e-2, 0.5)
            >>> search = vp.LRSearch(1e-2, 0.5, trace, bounds=(1e-6, 1e-2), at_bound=True, flat=False)
            >>> search.widen()
            (1e-06, 1.0)
        """
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

        Raises:
            ValueError: If every evaluation diverged.

        Example:
            >>> trace = (1e-3, 0.7), (1e-2, 0.5)
            >>> search = vp.LRSearch(1e-2, 0.5, trace, bounds=(1e-6, 1e-2), at_bound=True, flat=False)
            >>> optimizer = search.apply(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=1.0))
            >>> optimizer.param_groups[0]["lr"]
            0.01
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

        Raises:
            ImportError: If matplotlib is not installed.

        Example:
            >>> trace = (1e-3, 0.7), (1e-2, 0.5)
            >>> search = vp.LRSearch(1e-2, 0.5, trace, bounds=(1e-6, 1e-2), at_bound=True, flat=False)
            >>> search.plot().get_xlabel()
            'learning rate'
        """
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError(
                    "LRSearch.plot needs matplotlib: pip install '.[lab]' in a checkout of varprop."
                ) from error
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
    try_bounds: bool = True,
    flat_tolerance: float = 1e-3,
) -> LRSearch:
    """Minimise `objective(lr)` by bounded Brent on log10 of the learning rate, on request after a look around.

    A loss that is NaN or infinite, or a FloatingPointError or OverflowError, counts as divergence and enters
    the search as a finite loss above all finite ones, growing with the rate. Random number generators are
    left as they were. No rate is set anywhere: see `LRSearch.apply`.

    Args:
        objective: The loss to expect of a learning rate, for instance from `training_objective`.
        bounds: The least and the largest rate; the paper's by default.
        maxiter: The number of evaluations (Brent always makes two), those on grids included; a bound that is tried is
            one more.
        grids: Before Brent, so many rates evenly spaced within the bounds are tried, and the bounds drawn in to the
            neighbours of the best; for every number once. Brent alone, as in the paper, settles for a poor rate now and
            then where the objective is noisy.
        try_bounds: Where the best rate lies next to a bound, within a tenth of the interval, the bound is tried too;
            False is the paper's search.
        flat_tolerance: Losses that differ by less than this share of the largest of them are called flat.

    Returns:
        The search: rate, loss, every evaluation, and the flags `at_bound`, `flat` and `diverged`.

    Raises:
        ImportError: If scipy is not installed.
        ValueError: If the bounds are no interval of positive rates, or there are too few evaluations.

    Example:
        >>> data = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(3)]
        >>> objective = vp.training_objective(nn.Linear(4, 2), torch.optim.Adam, data, nn.CrossEntropyLoss(), epochs=2)
        >>> search = vp.find_lr(objective, bounds=(1e-4, 1.0), maxiter=8, grids=(5,))
        >>> 1e-4 <= search.lr <= 1.0
        True
    """
    try:
        from scipy.optimize import minimize_scalar
    except ImportError as error:
        raise ImportError("find_lr needs scipy: pip install '.[lab]' in a checkout of varprop.") from error
    low, high = (float(bound) for bound in bounds)
    if not (0 < low < high < math.inf):
        raise ValueError(f"bounds must be two finite rates with 0 < low < high, got ({low:g}, {high:g}).")
    if maxiter - sum(grids) < 1 or min(grids, default=1) < 1:
        spent = f"got maxiter={maxiter}, with grids of {list(grids)} rates"
        raise ValueError(f"maxiter must be at least 1 above the evaluations on grids, {spent}.")
    trace: list[tuple[float, float]] = []

    def evaluated(lr: float) -> float:
        try:
            loss = as_loss(objective(lr), "objective")
        except _DIVERGENCE_ERRORS:
            loss = math.inf
        trace.append((lr, loss if math.isfinite(loss) else math.inf))
        return _finite_loss(trace, (low, high))

    def penalised(exponent: float) -> float:
        return evaluated(10.0 ** float(exponent))

    inner = math.log10(low), math.log10(high)
    with preserved_rng():
        for count in grids:
            inner = _drawn_in(penalised, inner, count)
        minimize_scalar(penalised, bounds=inner, method="bounded", options={"maxiter": maxiter - sum(grids)})
        best, loss = min(trace, key=lambda evaluation: (evaluation[1], evaluation[0]))
        position = _position(best, (low, high))
        if try_bounds and math.isfinite(loss) and not _NEAR_BOUND < position < 1 - _NEAR_BOUND:
            evaluated(high if position > 0.5 else low)
    return _summary(tuple(trace), (low, high), flat_tolerance)


def _drawn_in(loss: Callable[[float], float], bounds: tuple[float, float], count: int) -> tuple[float, float]:
    """The neighbours of the best of so many points in the middles of equal parts; a bound where there is none."""
    low, high = bounds
    points = [low + (high - low) * (index + 0.5) / count for index in range(count)]
    losses = [loss(point) for point in points]
    best = losses.index(min(losses))
    return (points[best - 1] if best else low), (points[best + 1] if best + 1 < count else high)


def _finite_loss(trace: list[tuple[float, float]], bounds: tuple[float, float]) -> float:
    """The last loss, or for it a penalty that grows with the rate, so that ties never lead Brent upwards."""
    lr, loss = trace[-1]
    if math.isfinite(loss):
        return loss
    finite = [value for _, value in trace if math.isfinite(value)]
    if not finite:
        return _PENALTY_BEFORE_ANY_FINITE_LOSS * (1 + _position(lr, bounds))
    spread = max(finite) - min(finite)
    return max(finite) + (spread or abs(max(finite)) or 1.0) * (1 + _position(lr, bounds))


def _position(lr: float, bounds: tuple[float, float]) -> float:
    """Where a rate lies between the bounds on a logarithmic scale, from 0 to 1."""
    low, high = bounds
    return math.log(lr / low) / math.log(high / low)


def _summary(trace: tuple[tuple[float, float], ...], bounds: tuple[float, float], flat_tolerance: float) -> LRSearch:
    lr, loss = min(trace, key=lambda evaluation: (evaluation[1], evaluation[0]))
    finite = [value for _, value in trace if math.isfinite(value)]
    flat = len(finite) > 1 and max(finite) - min(finite) <= flat_tolerance * max(map(abs, finite))
    position, rates = _position(lr, bounds), [rate for rate, _ in trace]
    at_high = position > 1 - _NEAR_BOUND and lr == max(rates)
    at_low = position < _NEAR_BOUND and lr == min(rates)
    return LRSearch(lr, loss, trace, bounds, bool(finite) and not flat and (at_high or at_low), flat)


def supervised_step(loss_fn: Callable[[Any, Any], Tensor]) -> StepFunction:
    """The ordinary training step for batches `(input, target)`, as `training_objective` takes it."""

    def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        if not (isinstance(batch, (tuple, list)) and [hasattr(item, "to") for item in batch] == [True, True]):
            raise TypeError(
                f"loss_fn is for batches (input, target) of two tensors, not for a {type(batch).__name__}: pass "
                f"`step`, a function of model, optimizer and batch, for any other."
            )
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        inputs, target = (item.to(device) for item in batch)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def training_objective(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | type[Optimizer] | Callable[[nn.Module], Optimizer],
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    epochs: int = 5,
    *,
    step: StepFunction | None = None,
    steps_per_epoch: int | None = None,
    schedule: Callable[[int], float] | None = None,
    loss_limit: float = math.inf,
) -> Objective:
    """The paper's objective: the running mean of the stochastic loss after `epochs` epochs, by learning rate.

    Every evaluation starts from the same model, optimizer state and random numbers. Afterwards, also after an
    exception, a model and optimizer that were passed in are as before to the last bit (parameters, buffers,
    gradients, modes, optimizer state and rates), and so are the generators of Python, torch, CUDA, numpy and
    the DataLoader. State that a module keeps elsewhere is not seen: pass a factory for such a model.

    Args:
        model: A module, or a function that builds one.
        optimizer: An optimizer of that module, or an optimizer class, or a function from model to optimizer.
            Its largest group's rate becomes the rate tried; the other groups keep their ratio to it.
        data: Batches that can be iterated once an epoch: a DataLoader or a list.
        loss_fn: Called as `loss_fn(model(input), target)` for batches `(input, target)`.
        epochs: The horizon.
        step: Instead of `loss_fn`, for any other batch structure, mixed precision or accumulation: makes one
            training step, called as `step(model, optimizer, batch)`, and returns the loss.
        steps_per_epoch: The number of batches an epoch, where `len(data)` does not tell.
        schedule: The rate's factor in each epoch counted from 0; the paper's is `lambda epoch: 0.96**epoch`.
        loss_limit: A running mean above it counts as divergence.

    Returns:
        A function from learning rate to loss, infinite as soon as training diverges.

    Raises:
        TypeError: If not exactly one of `loss_fn` and `step` is given, or the data are an iterator or have no length.
        ValueError: If there is nothing to train on.

    Example:
        >>> data = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(3)]
        >>> objective = vp.training_objective(nn.Linear(4, 2), torch.optim.Adam, data, nn.CrossEntropyLoss(), epochs=2)
        >>> objective(1e-3) < objective(10.0)
        True
    """
    if (loss_fn is None) == (step is None):
        raise TypeError("Pass either loss_fn, for batches (input, target), or step, for anything else.")
    take_step = step if step is not None else supervised_step(loss_fn)  # type: ignore[arg-type]
    if isinstance(data, Iterator):
        raise TypeError("data must be iterable once an epoch: pass a DataLoader or a list in place of an iterator.")
    try:
        length = len(data) if steps_per_epoch is None else steps_per_epoch  # type: ignore[arg-type]
    except TypeError:
        raise TypeError("data has no length: say how many batches make an epoch by steps_per_epoch.") from None
    if length < 1:
        raise ValueError("data is empty: the objective needs at least one batch an epoch.")
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}.")
    if isinstance(optimizer, Optimizer) and not isinstance(model, nn.Module):
        raise TypeError(
            "A model factory needs an optimizer factory: pass an optimizer class or a function of the model."
        )

    def objective(lr: float) -> float:
        with preserved_rng(data):
            network = model if isinstance(model, nn.Module) else model()
            with preserved_training(network, optimizer if isinstance(optimizer, Optimizer) else None):
                active = _built_optimizer(optimizer, network)
                rates = [lr * (schedule(epoch) if schedule else 1.0) for epoch in range(epochs)]
                losses = _training_losses(network, active, data, take_step, rates)
                return _mean_until_divergence(losses, length, loss_limit)

    return objective


def _training_losses(
    model: nn.Module, optimizer: Optimizer, data: Iterable[Any], step: StepFunction, rates: list[float]
) -> Iterator[float]:
    """Train for an epoch at each rate, and yield the loss of every step."""
    set_rate = rate_setter(optimizer)
    model.train()
    for rate in rates:
        set_rate(rate)
        for batch in data:
            yield as_loss(step(model, optimizer, batch), "step")


def as_loss(value: Any, source: str) -> float:
    """The number that a user's function returned; `source` names the function in the error if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise TypeError(
            f"The {source} must return the loss, one number, not a {type(value).__name__}{shape}."
        ) from None


def _mean_until_divergence(losses: Iterator[float], steps_per_epoch: int, loss_limit: float) -> float:
    """sum q^(n-i) l_i / sum q^(n-i) of the losses l_1 ... l_n, with q = 0.1^(1 / steps_per_epoch)."""
    decay, total, weight, mean = 0.1 ** (1.0 / steps_per_epoch), 0.0, 0.0, math.nan
    for loss in losses:
        total, weight = decay * total + loss, decay * weight + 1.0
        mean = total / weight
        # Written so that NaN fails it too.
        if not mean <= loss_limit or not math.isfinite(mean):
            return math.inf
    return mean


def _built_optimizer(
    optimizer: Optimizer | type[Optimizer] | Callable[[nn.Module], Optimizer], model: nn.Module
) -> Optimizer:
    if isinstance(optimizer, Optimizer):
        return optimizer
    built: Callable[..., Optimizer] = optimizer
    origin = built.func if isinstance(built, functools.partial) else built
    if isinstance(origin, type) and issubclass(origin, Optimizer):
        return built(model.parameters())
    return built(model)


def rate_setter(optimizer: Optimizer) -> Callable[[float], None]:
    """Scales all groups from their present rates, so that a rate of 0 on the way loses no ratio."""
    groups = optimizer.param_groups
    rates = [(group, key, float(group[key])) for group in groups for key in ("lr", "initial_lr") if key in group]
    largest = max(float(group["lr"]) for group in groups)
    if not largest > 0:
        raise ValueError("Every parameter group has learning rate 0, so their ratios are unknown: set them first.")

    def set_rate(lr: float) -> None:
        for group, key, rate in rates:
            if isinstance(group[key], Tensor):  # a captured CUDA graph may read it: the tensor has to stay the same
                group[key].fill_(rate * (lr / largest))
            else:
                group[key] = rate * (lr / largest)

    return set_rate
