"""Predicted against measured standard deviations while a model trains, and the learning rate before it does.

For hand-written loops, Lightning and the Trainer of transformers; neither is imported before its callback is asked for.
Numbers go to whatever has ``add_scalar(name, value, step)`` (TensorBoard) or ``log(values, step=...)`` (W&B), or is a
function of values and step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp

Select = Callable[[nn.Module], nn.Module]


class CallbackError(vp.VarpropError):
    """A callback cannot do what was asked; the message says why.

    Example:
        >>> vp.callbacks.LayerWatcher(nn.Linear(4, 2), vp.Moments(0.0, 1.0), (1, 4), to=3)
        Traceback (most recent call last):
        varprop.callbacks.CallbackError: int has neither add_scalar nor log, and is no function of values and step.
    """


class LayerWatcher:
    """Writes ``std/<layer>/predicted`` and ``std/<layer>/measured`` of every layer, now and then in training.

    The prediction is that of `vp.propagate` with the parameters of that step; the measurement is taken of the batch
    that the step trains on: the root mean square, over the layer's elements, of their standard deviation over it, and
    over the positions that the prediction takes as alike (uniform axes).

    Args:
        model: What is called in training; in the mode it is captured in, which is training mode as a rule.
        moments: Of the input, as for `vp.propagate`.
        example: An input or its shape, as for `vp.propagate`.
        to: A writer, or several.
        every: Steps from one measurement to the next.

    Raises:
        CallbackError: If there is nothing to write to, or no steps between measurements.

    Example:
        >>> written, model = [], nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> write = lambda values, step: written.append((step, sorted(values)))
        >>> watcher = vp.callbacks.LayerWatcher(model, vp.Moments(0.0, 1.0), (1, 4), to=write, every=10)
        >>> for number in range(20):
        ...     with watcher.step(number):
        ...         loss = model(torch.randn(16, 4)).square().mean()
        >>> [step for step, _ in written], written[0][1][:2]
        ([0, 10], ['std/0/measured', 'std/0/predicted'])
    """

    def __init__(self, model: nn.Module, moments: Any, example: Any = None, to: Any = (), every: int = 100) -> None:
        if every < 1:
            raise CallbackError(f"every must be at least 1 step, got {every}.")
        self.writers = _writers(to)
        self.moments, self.every = moments, every
        self.program = vp.capture(model, example, moments=moments)
        self.layers = {path: layer for path, layer in model.named_modules() if path and not any(layer.children())}

    def due(self, step: int) -> bool:
        """True if this step, counted from 0, is one to measure.

        Args:
            step: Its number.

        Returns:
            True or False.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 2))
            >>> watcher = vp.callbacks.LayerWatcher(model, vp.Moments(0.0, 1.0), (1, 4), to=lambda values, step: None)
            >>> watcher.due(0), watcher.due(1), watcher.due(100)
            (True, False, True)
        """
        return step % self.every == 0

    def predicted(self) -> dict[str, float]:
        """The standard deviation of every layer by its path, from the present parameters.

        Returns:
            Standard deviations.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 2))
            >>> watcher = vp.callbacks.LayerWatcher(model, vp.Moments(0.0, 1.0), (1, 4), to=lambda values, step: None)
            >>> sorted(watcher.predicted())
            ['0']
        """
        return {path: _std(moments.var) for path, moments in self._propagated().items()}

    def _propagated(self) -> dict[str, vp.Moments]:
        with torch.no_grad():
            result = vp.propagate(self.program, self.moments)
        return {path: result[path] for path in self.layers if path in result}

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the forward pass of a step, counted from 0: measures and writes if it is due.

        Args:
            number: Of the step.

        Returns:
            A context manager.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 2))
            >>> watcher = vp.callbacks.LayerWatcher(model, vp.Moments(0.0, 1.0), (1, 4), to=lambda values, step: None)
            >>> with watcher.step(0):
            ...     output = model(torch.randn(8, 4))
        """
        if not self.due(number):
            yield
            return
        self.start()
        try:
            yield
        finally:
            measured = self.stop()
        self.write(measured, number)

    def start(self) -> None:
        """Measure from now on; the first call of every layer counts.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 2))
            >>> watcher = vp.callbacks.LayerWatcher(model, vp.Moments(0.0, 1.0), (1, 4), to=lambda values, step: None)
            >>> watcher.start()
            >>> output = model(torch.randn(8, 4))
            >>> sorted(watcher.stop())
            ['0']
        """
        self._measured: dict[str, float] = {}
        self._expected = self._propagated()  # of the parameters that the batch meets, before the step changes them
        self._handles = [
            layer.register_forward_hook(functools.partial(self._measure, path)) for path, layer in self.layers.items()
        ]

    def stop(self) -> dict[str, float]:
        """Measure no more; what was measured.

        Returns:
            Standard deviations by the path of the layer.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 2))
            >>> watcher = vp.callbacks.LayerWatcher(model, vp.Moments(0.0, 1.0), (1, 4), to=lambda values, step: None)
            >>> watcher.start()
            >>> watcher.stop()  # no layer was called
            {}
        """
        for handle in self._handles:
            handle.remove()
        return self._measured

    def write(self, measured: Mapping[str, float], number: int) -> None:
        """Hand both numbers of every layer that was called to the writers.

        Args:
            measured: From `stop`.
            number: Of the step.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 2))
            >>> watcher = vp.callbacks.LayerWatcher(model, vp.Moments(0.0, 1.0), (1, 4), to=lambda values, step: None)
            >>> watcher.start()
            >>> output = model(torch.randn(8, 4))
            >>> watcher.write(watcher.stop(), 0)
        """
        values: dict[str, float] = {}
        for path, value in measured.items():
            values |= {f"std/{path}/predicted": _std(self._expected[path].var), f"std/{path}/measured": value}
        for writer in self.writers:
            writer(values, number)

    def _measure(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        """Forward hook: the standard deviation of a layer's first output."""
        several = isinstance(output, Tensor) and output.is_floating_point() and output.ndim > 0 and len(output) > 1
        if several and path in self._expected and path not in self._measured:
            # one variance is predicted for the batch, and for positions taken as alike
            expected = self._expected[path]
            axes = range(1, output.ndim if output.ndim == expected.ndim else 1)
            pooled = [0, *(axis for axis in axes if expected.is_uniform(axis))]
            self._measured[path] = _std(output.detach().double().var(pooled, correction=0))


def _std(variances: Tensor) -> float:
    """The root mean square of the standard deviations."""
    return float(variances.double().mean().sqrt())


def _writers(to: Any) -> list[Callable[[Mapping[str, float], int], None]]:
    """A function of values and step for every writer."""
    writers = to if isinstance(to, (list, tuple)) else [to]
    if not writers:
        raise CallbackError("There is nothing to write to: give a writer with add_scalar or log, or a function.")
    return [_writer(writer) for writer in writers]


def _writer(to: Any) -> Callable[[Mapping[str, float], int], None]:
    if hasattr(to, "add_scalar"):

        def add_scalars(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                to.add_scalar(name, value, step)

        return add_scalars
    if hasattr(to, "log"):
        return lambda values, step: to.log(dict(values), step=step)
    if callable(to):
        return lambda values, step: to(values, step)
    raise CallbackError(f"{type(to).__name__} has neither add_scalar nor log, and is no function of values and step.")


def _itself(model: nn.Module) -> nn.Module:
    return model


class _Watching:
    """A watcher that is made when training begins, for the callbacks of both frameworks."""

    def __init__(self, moments: Any, example: Any, to: Any, every: int, select: Select) -> None:
        self.settings = {"moments": moments, "example": example, "to": to, "every": every}
        self.select = select
        self.watcher: LayerWatcher | None = None
        self.measured_step: int | None = None
        _writers(to)  # refused now, not when training begins

    def begin(self, model: nn.Module) -> None:
        """Make the watcher when training begins."""
        self.watcher = LayerWatcher(self.select(model), **self.settings)

    def before(self, step: int) -> None:
        """Start to measure when a step begins that is due."""
        if self.watcher is not None and self.watcher.due(step) and self.measured_step is None:
            self.watcher.start()
            self.measured_step = step

    def after(self) -> None:
        """Write what was measured when that step ends."""
        if self.watcher is not None and self.measured_step is not None:
            self.watcher.write(self.watcher.stop(), self.measured_step)
            self.measured_step = None


def _callback(base: type, **hooks: Callable[..., None]) -> Any:
    """A callback of a framework with the given functions as its hooks."""
    return type("Callback", (base,), {name: staticmethod(hook) for name, hook in hooks.items()})()


def lightning_watcher(
    moments: Any, example: Any = None, to: Any = (), every: int = 100, select: Select = _itself
) -> Any:
    """A callback for Lightning's Trainer that does what `LayerWatcher` does.

    Args:
        moments: The moments of the input, as for `vp.propagate`.
        example: An input or its shape, as for `vp.propagate`.
        to: A writer, or several.
        every: Steps from one measurement to the next.
        select: A function from the LightningModule to the network to watch; the module itself if left out.

    Returns:
        A `lightning.Callback`.

    Raises:
        CallbackError: If Lightning is not installed, or there is nothing to write to.

    Example:
        >>> watcher = vp.callbacks.lightning_watcher(moments, to=writer)  # doctest: +SKIP
        >>> lightning.Trainer(callbacks=[watcher]).fit(module, loader)  # doctest: +SKIP
    """
    watching = _Watching(moments, example, to, every, select)
    return _callback(
        _lightning().Callback,
        on_train_start=lambda trainer, module: watching.begin(module),
        on_train_batch_start=lambda trainer, *_: watching.before(trainer.global_step),
        on_train_batch_end=lambda *_: watching.after(),
    )


def transformers_watcher(
    moments: Any, example: Any = None, to: Any = (), every: int = 100, select: Select = _itself
) -> Any:
    """A callback for the Trainer of transformers that does what `LayerWatcher` does; arguments as for Lightning's.

    Args:
        moments: The moments of the input, as for `vp.propagate`.
        example: An input or its shape, as for `vp.propagate`.
        to: A writer, or several.
        every: Steps from one measurement to the next.
        select: A function from the model to the network to watch; the model itself if left out.

    Returns:
        A `transformers.TrainerCallback`.

    Raises:
        CallbackError: If transformers is not installed, or there is nothing to write to.

    Example:
        >>> watcher = vp.callbacks.transformers_watcher(vp.Tokens.uniform(vocabulary), to=writer)  # doctest: +SKIP
        >>> transformers.Trainer(model, arguments, train_dataset=data, callbacks=[watcher]).train()  # doctest: +SKIP
    """
    watching = _Watching(moments, example, to, every, select)
    return _callback(
        _transformers().TrainerCallback,
        on_train_begin=lambda args, state, control, model, **_: watching.begin(model.train()),
        on_step_begin=lambda args, state, control, **_: watching.before(state.global_step),
        on_step_end=lambda *_, **__: watching.after(),
    )


def lightning_lr_finder(
    steps: int = 50,
    epochs: int = 1,
    bounds: tuple[float, float] = (1e-6, 1e-2),
    maxiter: int = 10,
    plot: Path | str | None = None,
) -> Any:
    """A callback that finds the learning rate by `vp.find_lr` when Lightning's training begins, and sets it.

    Model, optimizer and random numbers are as before afterwards. The callback's ``found`` is the `vp.LRSearch`.

    Args:
        steps: Batches of the training data to search on.
        epochs: How often an evaluation goes through them.
        bounds: Of the search.
        maxiter: At most so many evaluations.
        plot: A file for the picture of the search.

    Returns:
        A `lightning.Callback`.

    Raises:
        CallbackError: If Lightning is not installed; when training begins, if there are several optimizers.

    Example:
        >>> finder = vp.callbacks.lightning_lr_finder(steps=100)  # doctest: +SKIP
        >>> lightning.Trainer(callbacks=[finder]).fit(module, loader)  # doctest: +SKIP
        >>> finder.found.message  # doctest: +SKIP
    """

    def find(trainer: Any, module: Any) -> None:
        def loss_of(_: nn.Module, batch: Any) -> Tensor:
            result = module.training_step(module.transfer_batch_to_device(batch, module.device, 0), 0)
            loss: Tensor = result["loss"] if isinstance(result, Mapping) else result
            return loss

        if len(trainer.optimizers) != 1:
            raise CallbackError(f"A learning rate can be found for one optimizer, not {len(trainer.optimizers)}.")
        batches = list(itertools.islice(trainer.train_dataloader, steps))
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        with _silent(module):
            trained = module, trainer.optimizers[0], batches, loss_of
            callback.found = _found_rate(*trained, schedules, epochs, bounds, maxiter, plot)

    callback = _callback(_lightning().Callback, on_train_start=find)
    callback.found = None
    return callback


def transformers_lr_finder(
    steps: int = 50,
    epochs: int = 1,
    bounds: tuple[float, float] = (1e-6, 1e-2),
    maxiter: int = 10,
    plot: Path | str | None = None,
) -> Any:
    """A callback that finds the learning rate when training by the Trainer of transformers begins, and sets it.

    The models must return their loss, as those of transformers do; arguments as for `lightning_lr_finder`.

    Args:
        steps: Batches of the training data to search on.
        epochs: How often an evaluation goes through them.
        bounds: Of the search.
        maxiter: At most so many evaluations.
        plot: A file for the picture of the search.

    Returns:
        A `transformers.TrainerCallback`.

    Raises:
        CallbackError: If transformers is not installed.

    Example:
        >>> finder = vp.callbacks.transformers_lr_finder(steps=100)  # doctest: +SKIP
        >>> transformers.Trainer(model, arguments, train_dataset=data, callbacks=[finder]).train()  # doctest: +SKIP
    """

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        device = next(model.parameters()).device
        loss: Tensor = model(**{name: value.to(device) for name, value in batch.items()})["loss"]
        return loss

    def find(args: Any, state: Any, control: Any, **trainer: Any) -> None:
        batches = list(itertools.islice(trainer["train_dataloader"], steps))
        schedule = trainer.get("lr_scheduler")
        schedules = [] if schedule is None else [getattr(schedule, "scheduler", schedule)]
        trained = trainer["model"], trainer["optimizer"], batches, loss_of
        callback.found = _found_rate(*trained, schedules, epochs, bounds, maxiter, plot)

    callback = _callback(_transformers().TrainerCallback, on_train_begin=find)
    callback.found = None
    return callback


def _found_rate(
    model: nn.Module,
    optimizer: Any,
    batches: Sequence[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    schedules: Sequence[Any],
    epochs: int,
    bounds: tuple[float, float],
    maxiter: int,
    plot: Path | str | None,
) -> vp.LRSearch:
    """Search, draw, and set the rate found."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizer = getattr(optimizer, "optimizer", optimizer)  # frameworks wrap it
    objective = vp.training_objective(model, optimizer, batches, epochs=epochs, step=step)
    search = vp.find_lr(objective, bounds, maxiter)
    if plot is not None:
        search.plot().figure.savefig(Path(plot))
    search.apply(optimizer)
    for schedule in schedules:  # made before, they would bring their own rates back
        rates = zip(optimizer.param_groups, schedule.get_last_lr(), schedule.base_lrs, strict=True)
        schedule.base_lrs = [base * (group["lr"] / now) if now else group["lr"] for group, now, base in rates]
    return search


@contextlib.contextmanager
def _silent(pl_module: Any) -> Iterator[None]:
    """Within, what the module logs goes nowhere: it is no step of the training."""
    for name in ("log", "log_dict"):
        object.__setattr__(pl_module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            object.__delattr__(pl_module, name)


def _lightning() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise CallbackError("This callback needs Lightning: pip install lightning.")


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise CallbackError("This callback needs transformers: pip install transformers.") from error
