"""Mean and variance of a tensor of random values, as one value."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .gaussian.normal import safe_sqrt


class _Trust(threading.local):
    """Inside an evaluation the values are checked once at the end, by node: rules run without host synchronisation."""

    given = False


_trust = _Trust()


class Moments:
    """Mean and variance of every element of a tensor.

    An axis of extent 1 may stand for an axis of any extent along which the statistics do not change (a *uniform*
    axis); ``full`` holds the extents as the model sees them.

    Args:
        mean: Expected values, floating point; a number is the same for every element.
        var: Variances, of the same shape, dtype and device, or a number; left out where there is a covariance.
        full: The model's extents, where they differ from ``mean.shape``; set by `propagate`, and by `input_moments` to
            those of the data.
        covariance: In place of ``var``: the covariance of all elements, flattened, (elements, elements).

    Raises:
        ValueError: On mismatched shapes, NaN, a negative variance, or a matrix that is no covariance; the message names
            the position.

    Example:
        >>> moments = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))  # by channel
        >>> moments.std.flatten()
        tensor([1., 1., 1.])
        >>> vp.Moments(torch.zeros(2), covariance=torch.tensor([[1.0, 0.5], [0.5, 2.0]])).var
        tensor([1., 2.])
    """

    __slots__ = ("covariance", "full", "mean", "var")

    def __init__(
        self,
        mean: Tensor | float,
        var: Tensor | float | None = None,
        full: Sequence[int] | None = None,
        *,
        covariance: Tensor | None = None,
    ) -> None:
        checked = not (torch.compiler.is_compiling() or _trust.given)
        if covariance is not None:
            if var is not None:
                raise TypeError(
                    "Moments take var or covariance, of which the variances are the diagonal, and not both."
                )
            if checked:
                _check_covariance(mean, covariance)
            assert isinstance(mean, Tensor)
            var = covariance.diagonal().view(mean.shape)
        mean, var = _as_tensors(mean, var)
        if checked:
            _check_form(mean, var)
            _check_values(mean, var)
        self.mean = mean
        self.var = var
        self.full = torch.Size(full) if full is not None else mean.shape
        self.covariance = covariance

    @property
    def std(self) -> Tensor:
        """Standard deviation; its derivative stays finite at zero variance."""
        return safe_sqrt(self.var)

    @property
    def shape(self) -> torch.Size:
        """Shape of the stored tensors (uniform axes have extent 1)."""
        return self.mean.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of mean and variance."""
        return self.mean.dtype

    @property
    def device(self) -> torch.device:
        """The device of mean and variance."""
        return self.mean.device

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.mean.ndim

    def to(self, *args: Any, **kwargs: Any) -> Moments:
        """All tensors through `Tensor.to`.

        Args:
            args: As for `Tensor.to`.
            kwargs: As for `Tensor.to`.

        Returns:
            Moments of that dtype and on that device.

        Example:
            >>> moments = vp.Moments(torch.zeros(1, 3), torch.full((1, 3), 4.0))
            >>> moments.to(torch.float64).dtype
            torch.float64
        """
        return self._each(lambda tensor: tensor.to(*args, **kwargs))

    def clone(self) -> Moments:
        """A copy in memory of its own.

        Returns:
            A copy.

        Example:
            >>> moments = vp.Moments(torch.zeros(1, 3), torch.full((1, 3), 4.0))
            >>> moments.clone().mean is moments.mean
            False
        """
        return self._each(Tensor.clone)

    def expand(self, *sizes: int) -> Moments:
        """Mean and variance through `Tensor.expand`; a covariance is left out.

        Args:
            sizes: As for `Tensor.expand`.

        Returns:
            Moments of that shape.

        Example:
            >>> moments = vp.Moments(torch.zeros(1, 3), torch.full((1, 3), 4.0))
            >>> moments.expand(5, 3).shape
            torch.Size([5, 3])
        """
        return Moments(self.mean.expand(*sizes), self.var.expand(*sizes))

    def dense(self) -> Moments:
        """The moments with every uniform axis written out (as a view of stride zero).

        Returns:
            Moments without uniform axes.

        Example:
            >>> moments = vp.Moments(torch.zeros(1, 3, 1), torch.ones(1, 3, 1), full=(1, 3, 8))
            >>> moments.shape, moments.dense().shape
            (torch.Size([1, 3, 1]), torch.Size([1, 3, 8]))
        """
        return self if self.shape == self.full else Moments(self.mean.expand(self.full), self.var.expand(self.full))

    def detach(self) -> Moments:
        """The moments cut from the autograd graph.

        Returns:
            Moments that require no gradient.

        Example:
            >>> moments = vp.Moments(torch.zeros(1, 3, requires_grad=True), torch.ones(1, 3))
            >>> moments.detach().mean.requires_grad
            False
        """
        return self._each(Tensor.detach)

    def _each(self, function: Callable[[Tensor], Tensor]) -> Moments:
        if self.covariance is not None:
            return Moments(function(self.mean), full=self.full, covariance=function(self.covariance))
        return Moments(function(self.mean), function(self.var), self.full)

    def is_uniform(self, axis: int) -> bool:
        """True if one stored value stands for the whole axis.

        Args:
            axis: Of the tensor.

        Returns:
            True if the statistics do not change along the axis.

        Example:
            >>> moments = vp.Moments(torch.zeros(1, 3, 1), torch.ones(1, 3, 1), full=(1, 3, 8))
            >>> moments.is_uniform(1), moments.is_uniform(2)
            (False, True)
        """
        return self.shape[axis] == 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.mean, self.var, tuple(self.full), self.covariance)

    def __repr__(self) -> str:
        seen = "" if self.shape == self.full else f", full={tuple(self.full)}"
        joint = "" if self.covariance is None else f", covariance={tuple(self.covariance.shape)}"
        return f"Moments(mean={self.mean}, var={self.var}{seen}{joint})"


class Mixture(Moments):
    """Several Gaussians, such as one for every class of the data, with the share of each.

    `propagate` and `inspect` follow every component by itself and join what becomes of them by the law of total
    variance. For all other calls it is what its attributes say: mean, variance and covariance of all together.

    Args:
        components: Moments of one shape, all with a covariance or all without.
        shares: How likely each is; they are divided by their sum.

    Raises:
        ValueError: If there is no component, their shapes differ, or the shares are no positive numbers, one for each.

    Example:
        >>> halves = [vp.Moments(torch.tensor([[-1.0]]), 0.5), vp.Moments(torch.tensor([[1.0]]), 0.5)]
        >>> vp.Mixture(halves, [1, 1]).var
        tensor([[1.5000]])
    """

    __slots__ = ("components", "shares")

    def __init__(self, components: Sequence[Moments], shares: Sequence[float]) -> None:
        components, shares = list(components), [float(share) for share in shares]
        if not components or len(shares) != len(components) or not all(0 < share < float("inf") for share in shares):
            raise ValueError(
                f"A mixture takes components and a positive share for each, not {len(components)} and {shares}."
            )
        if len({(c.shape, c.covariance is None) for c in components}) > 1:
            raise ValueError("The components of a mixture must have one shape, and all a covariance or none of them.")
        total, share = components[0], shares[0]
        for component, more in zip(components[1:], shares[1:], strict=True):
            total, share = joined(total, share, component, more), share + more
        var = total.var if total.covariance is None else None
        super().__init__(total.mean, var, components[0].full, covariance=total.covariance)
        self.components = components
        self.shares = [value / share for value in shares]

    def __reduce__(self) -> tuple[Any, ...]:
        return Mixture, (self.components, self.shares)


def joined(first: Moments, share: float, second: Moments, other_share: float) -> Moments:
    """Moments of a value that is one of two by chance: those within, and those between their means."""
    weight = other_share / (share + other_share)
    apart = second.mean - first.mean
    mean, between = first.mean + weight * apart, weight * (1 - weight)
    if first.covariance is None or second.covariance is None:
        var = first.var + weight * (second.var - first.var) + between * apart.square()
        return Moments(mean, var, first.full)
    outer = torch.outer(apart.flatten(), apart.flatten())
    covariance = first.covariance + weight * (second.covariance - first.covariance) + between * outer
    return Moments(mean, full=first.full, covariance=covariance)


def _restored(mean: Tensor, var: Tensor, full: Sequence[int], covariance: Tensor | None = None) -> Moments:
    """Moments from a pickle."""
    return Moments(mean, var if covariance is None else None, full, covariance=covariance)


torch.serialization.add_safe_globals([Moments, _restored])  # torch.load reads no class it does not know


def _as_tensors(mean: Tensor | float, var: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """Numbers as tensors, of the other's shape if that is one."""
    for what, value in (("mean", mean), ("var", var)):
        if not isinstance(value, (Tensor, Real)):
            raise TypeError(f"{what} must be a tensor or a number, not {type(value).__name__}: use torch.as_tensor.")
    assert var is not None
    if isinstance(mean, Tensor):
        return mean, var if isinstance(var, Tensor) else torch.full_like(mean, float(var))
    if isinstance(var, Tensor):
        return torch.full_like(var, float(mean)), var
    return torch.tensor(float(mean)), torch.tensor(float(var))


def _check_form(mean: Tensor, var: Tensor) -> None:
    if mean.shape != var.shape:
        raise ValueError(
            f"mean has shape {tuple(mean.shape)} but var has shape {tuple(var.shape)}; they must be equal."
        )
    if not mean.is_floating_point() or mean.dtype != var.dtype:
        raise ValueError(f"mean and var must share one floating dtype; got {mean.dtype} and {var.dtype}.")
    if mean.device != var.device:
        raise ValueError(f"mean and var must be on one device; got {mean.device} and {var.device}.")


def _check_covariance(mean: Any, covariance: Tensor) -> None:
    count = mean.numel() if isinstance(mean, Tensor) else 0
    if not isinstance(mean, Tensor) or not isinstance(covariance, Tensor) or covariance.shape != (count, count):
        shape = f"shape {tuple(covariance.shape)}" if isinstance(covariance, Tensor) else f"{covariance!r}"
        raise ValueError(
            f"covariance must be a tensor with a row and a column for each of the {count} elements of the mean, a "
            f"tensor too; got {shape}."
        )
    covariance = covariance.detach()
    largest = covariance.diagonal().clamp_min(0).sqrt()
    slack = 1e-4 * float(largest.amax().square()) if count else 0.0
    off = (covariance - covariance.mT).abs() > slack
    off |= covariance.abs() > largest[:, None] * largest + slack
    off.diagonal().zero_()  # negative variances have a message of their own
    if bool(off.any()):
        row, column = (int(i) for i in off.nonzero()[0])
        raise ValueError(
            f"covariance is not one: at ({row}, {column}) it is {covariance[row, column].item()}, and at the mirrored "
            f"position {covariance[column, row].item()}, with variances {covariance[row, row].item()} and "
            f"{covariance[column, column].item()}."
        )


def _check_values(mean: Tensor, var: Tensor) -> None:
    for what, bad, values in (
        ("mean is NaN", mean.isnan(), mean),
        ("variance is NaN", var.isnan(), var),
        ("variance is negative", var < 0, var),
    ):
        if bool(bad.any()):
            position = tuple(int(i) for i in bad.nonzero()[0])
            raise ValueError(f"{what} at position {position}: {values[position].item()}.")


@contextmanager
def trusted() -> Iterator[None]:
    """Skip the value checks of `Moments` within; whoever enters checks the results afterwards."""
    if torch.compiler.is_compiling():
        yield
        return
    before, _trust.given = _trust.given, True
    try:
        yield
    finally:
        _trust.given = before


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """A context with autocast switched off, where the device has it.

    A graph that is being made has to say so itself: it may run under autocast later.
    """
    if device.type == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type)):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@contextmanager
def autocast_off() -> Iterator[None]:
    """Within, autocast is off on every device: half precision is too coarse for moments, and gives another graph."""
    with ExitStack() as contexts:
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(kind):
                contexts.enter_context(torch.autocast(kind, enabled=False))
        yield


def compact(mean: Tensor, var: Tensor) -> Moments:
    """Moments with every axis of stride zero stored once.

    Uniform axes are written out as expanded views (stride 0); operations that only move elements keep that stride, so
    this recovers the uniform axes of the result whatever the operation was.
    """
    full = mean.shape
    for axis in range(mean.ndim):
        if full[axis] > 1 and mean.stride(axis) == 0 and var.stride(axis) == 0:
            mean, var = mean.narrow(axis, 0, 1), var.narrow(axis, 0, 1)
    return Moments(mean, var, full)


def _flatten(moments: Moments) -> tuple[list[Tensor], torch.Size]:
    joint = [] if moments.covariance is None else [moments.covariance]
    return [moments.mean, moments.var, *joint], moments.full


def _unflatten(tensors: Any, full: torch.Size) -> Moments:
    made = object.__new__(Moments)  # leaves may be placeholders of a tree_map: no checks here
    made.mean, made.var, *joint = tensors
    made.covariance = joint[0] if joint else None
    made.full = full
    return made


pytree.register_pytree_node(Moments, _flatten, _unflatten, serialized_type_name="varprop.Moments")


class Tokens:
    """A random index with given probabilities: the input of an embedding.

    Args:
        probabilities: One per token, non-negative; normalised to sum to one.

    Raises:
        ValueError: If these are no probabilities.

    Example:
        >>> counts = torch.bincount(torch.tensor([0, 2, 2, 1]), minlength=3)
        >>> vp.Tokens(counts.float()).probabilities
        tensor([0.2500, 0.2500, 0.5000])
    """

    __slots__ = ("full", "probabilities")

    def __init__(self, probabilities: Tensor, full: Sequence[int] | None = None) -> None:
        given = torch.compiler.is_compiling() or _trust.given
        if not given and not _are_probabilities(probabilities):
            raise ValueError(
                "Tokens take a tensor of non-negative floating numbers, one per token, that do not sum to zero: their "
                "probabilities, or how often each occurs."
            )
        self.probabilities = probabilities / probabilities.sum()
        self.full = torch.Size(full) if full is not None else None

    @classmethod
    def uniform(cls, count: int) -> Tokens:
        """Every one of ``count`` tokens equally likely.

        Args:
            count: The number of tokens.

        Returns:
            The tokens.

        Raises:
            ValueError: If the count is no whole number above 0.

        Example:
            >>> model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 2))
            >>> vp.propagate(model, vp.Tokens.uniform(1000), example=(1, 16)).output.full
            torch.Size([1, 16, 2])
        """
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"Tokens.uniform takes the number of tokens, a whole number above 0, not {count!r}.")
        return cls(torch.full((count,), 1.0 / count))

    def __repr__(self) -> str:
        return f"Tokens({self.probabilities.numel()} probabilities)"


def _are_probabilities(values: Any) -> bool:
    if not isinstance(values, Tensor) or values.ndim != 1 or not values.is_floating_point():
        return False
    total = values.sum()
    return not bool((values < 0).any()) and bool(total > 0) and bool(total.isfinite())
