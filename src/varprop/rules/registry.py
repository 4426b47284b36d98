"""Which rule handles which operation: one table, filled by decorators, read by `lookup`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ..gaussian.normal import cdf, ratio
from ..graph import ops
from ..moments import Moments

INFINITY = float("inf")
SMOOTH_STEP = (0.0, -9.0, 9.0, -40.0, 40.0)  # where the logistic function and its kin bend


@dataclass(frozen=True)
class Bend:
    """The flat parts of an activation, in its argument."""

    low: float | None = None  # flat below, if not None
    high: float | None = None  # flat above, if not None
    rectifier: float | None = None  # the point below which a rectifier is off, if it is one
    linear: float | None = None  # the point above which it passes everything, where that is another one

    @property
    def saturates(self) -> bool:
        """True if there is a flat part that is not the off side of a rectifier."""
        return self.low is not None or self.high is not None

    def probability_flat(self, x: Moments) -> Tensor:
        """P(argument in a flat part), for a Gaussian argument."""
        nothing = torch.zeros_like(x.mean)
        below = nothing if self.low is None else _above(self.low - x.mean, x.std)
        above = nothing if self.high is None else _above(x.mean - self.high, x.std)
        return below + above

    def probabilities_above(self, x: Moments) -> tuple[Tensor, Tensor]:
        """P(argument above the point where a rectifier is off, and where it is linear), for a Gaussian argument."""
        off, linear = self._points()
        return _above(x.mean - off, x.std), _above(x.mean - linear, x.std)

    def _points(self) -> tuple[float, float]:
        off = self.rectifier or 0.0
        return off, off if self.linear is None else self.linear

    def is_flat(self, x: Tensor) -> Tensor:
        """Where values lie in a flat part."""
        nowhere = torch.zeros_like(x, dtype=torch.bool)
        below = nowhere if self.low is None else x < self.low
        return below | (nowhere if self.high is None else x > self.high)

    def is_above(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Where values lie above the points of `probabilities_above`."""
        off, linear = self._points()
        return x > off, x > linear


def _above(margin: Tensor, std: Tensor) -> Tensor:
    return cdf(ratio(margin, std))


def clamp_bend(low: Any, high: Any) -> Bend | None:
    """The bend of a clamp; None if its ends are no numbers."""
    if not all(end is None or isinstance(end, (int, float)) for end in (low, high)):
        return None
    return Bend(high=high, rectifier=low) if low == 0 else Bend(low, high)


def clamp_bounds(low: Any, high: Any) -> tuple[float, float]:
    """The interval that the values of a clamp cannot leave, as far as its ends are numbers."""
    number = (int, float)
    return float(low) if isinstance(low, number) else -INFINITY, float(high) if isinstance(high, number) else INFINITY


Function = TypeVar("Function", bound=Callable[..., Any])
Key = Any  # an OpOverload, an OpOverloadPacket, or a subclass of torch.nn.Module
Kind = Literal["rule", "structural", "elementwise", "source", "constant"]
# operations that are looked for themselves, by those who put them together with others or treat them apart
Operation = Literal[
    "adaptive average", "attention", "average window", "batch norm", "bilinear", "cat", "dropout", "einsum",
    "gelu", "leaky relu", "matmul", "mean", "power", "prelu", "prelu of broadcast slopes", "recurrent", "relu",
    "select", "slice", "softmax", "view",
]  # fmt: skip
# Why a rule is only approximate: a sentence, or a function of the rule's own arguments that returns one or None.
Reason = str | Callable[..., str | None] | None


def _constantly(value: Any) -> Callable[..., Any]:
    return value if callable(value) else lambda *_, **__: value


_none, _nothing, _everything = _constantly(()), _constantly(None), _constantly((-math.inf, math.inf))


@dataclass(kw_only=True)
class CurveFacts:
    """Facts of a function of single elements (``elementwise``), from which its moments are integrated."""

    # computes the operation on values with one more axis in front; the operation itself if left out. Of a
    # ``structural`` operation: what to run on means and on variances
    evaluate: Callable[..., Any] | None = None
    kinks: Callable[..., Sequence[Any]] = _none  # points of the argument where the derivative jumps
    jumps: Callable[..., Sequence[Any]] = _none  # points where the function itself jumps
    # points where a smooth function changes its character, such as the ends of its bend
    knots: Callable[..., Sequence[Any]] = _none
    monotone: Callable[..., bool | None] = _nothing  # never decreases; a function of its further arguments
    # falls to a minimum and then rises, as SiLU does: the largest of several is hardly ever one where it falls
    dips: bool = False
    swings: bool = False  # rises and falls for ever, as a sine does: functions of it are integrated on many panels
    compares: bool = False  # kinks and jumps are points of the difference of the first two arguments
    # index of an argument for which only positive values make sense (logarithm, root, divisor)
    positive: int | Callable[..., int | None] | None = None
    # its result is not Gaussian where its arguments are, as that of a norm or a product of all elements; a
    # function of its arguments
    skews: Callable[..., bool | None] = _nothing
    # maps affine arguments to an affine result, or None where the result is curved
    affine: Callable[..., Any] | None = None
    independent: Callable[..., Any] | None = None  # the rule for several independent random arguments


@dataclass(kw_only=True)
class LawFacts:
    """Facts of an operation that draws random numbers, unless it draws Gaussian ones (``source``)."""

    # the numbers drawn, as a function of a standard Gaussian variable and of the operation's own arguments
    drawn: Callable[..., Tensor] | None = None
    # the whole numbers that may be drawn, in a vector, and the chance of each along a new first axis; a function
    # of the moments and of the operation's own arguments
    outcomes: Callable[..., tuple[Tensor, Tensor]] | None = None
    # where elements are replaced at random, as by dropout: a function of the arguments that returns, for every
    # outcome, its chance and the slope and the offset of the line of the element that is then the result
    mixture: Callable[..., list[tuple[float, float, float]]] | None = None
    # draws random numbers of its own beside what it computes; a function of the arguments
    draws: Callable[..., bool | None] = _nothing


@dataclass(kw_only=True)
class ElementFacts:
    """How elements of the result relate to elements of the arguments: needed to see which are independent."""

    # of a ``structural`` operation: several elements of its arguments go to one position and are added there; a
    # function of its arguments
    adds: Callable[..., bool | None] = _nothing
    selects: bool = False  # every element of the result is one of an argument; all arguments that are tensors are such
    copies: bool = False  # the result is the argument itself, perhaps in another dtype
    casts: int | None = None  # index of the argument whose dtype changes to that of the result
    # of a ``structural`` operation: all elements of its result are those of its second argument, which is
    # broadcast
    overwrites: bool = False
    # of a ``structural`` operation: the index of an argument that it may give elements of several times, which
    # shows when it is run on numbers
    repeats_elements: int | None = None
    repeats: bool = False  # two arguments that are one are treated as that, not as independent
    bias: int | None = None  # index of an argument that is added to all of the result
    # elements of its result follow from one another, as those of a softmax or of running sums do
    entangles: bool = False
    # elements of its result are of windows that share elements; a function of its arguments
    overlaps: Callable[..., bool | None] = _nothing
    # a maximum or another rank, which may be taken before a non-decreasing function or after it
    order_statistic: bool = False
    maximum: bool = False  # that order statistic is the largest, of as many as there are or fewer
    running: bool = False  # that order statistic is taken of every beginning of an axis


@dataclass(kw_only=True)
class LayerFacts:
    """Traits that the normalization, the inspection and predictions ask for; left out, it has none of them."""

    operation: Operation | None = None  # the operation by a name, where it is looked for itself rather than for a trait
    linear: bool = False  # a linear layer: weighted sums of its first argument, the weights being its second
    weighted: bool = False  # a layer with weights of its own, by which scales and gradients of a model are judged
    # how to read the arguments of a convolution or of a window of an average (`rules.linear`)
    convolution: Callable[..., Any] | None = None
    transposed: Callable[..., bool | None] = _nothing  # it is a transposed convolution; a function of its arguments
    averages: bool = False  # sums or averages over positions, with equal weights
    reduces: bool = False  # reduces the axes that its second argument names
    resizes: bool = False  # interpolates between positions
    noise: bool = False  # multiplies every element by a random number of its own
    # linear in each of its random arguments, in another way than by the fields above: gradients then go back
    # through the derivative of the variance (`transposable`)
    multilinear: bool = False
    mixes_positions: bool = False  # adds up elements of several positions, in a way that no field above tells
    product: bool = False  # multiplies its arguments, element by element or as matrices
    signs: tuple[float, float] | None = None  # of a sum, those of its first two arguments
    # how to read the arguments of a batch norm in evaluation (`rules.norm.Stored`)
    batch_norm: Callable[..., Any] | None = None
    # divides by statistics of its own argument or of a batch; a function of its arguments
    normalizes: Callable[..., bool | None] = _nothing
    # over uniform positions, treats every channel alike and by itself (pooling, upsampling, dropout)
    per_channel: bool = False
    channels: int | None = None  # the axis of the result that holds the channels, if the operation decides it: 1 or -1
    stops_gradients: bool = False  # nothing comes back through it when gradients do
    # how the fold of a network computes it (`gaussian.derivatives`): a name, and numbers; a function of its
    # further arguments
    kernel: Callable[..., tuple[str | float, ...] | None] = _nothing
    work: int = 1  # how many times as long its rule takes as most do, roughly


@dataclass(kw_only=True)
class ActivationFacts:
    """Facts by which the inspection judges units."""

    # where an activation is flat, off or linear (`Bend`); a function of its further arguments
    bend: Callable[..., Any] = _nothing
    bounds: Callable[..., tuple[float, float]] = _everything  # the interval that its values cannot leave, likewise


@dataclass
class Rule(CurveFacts, LawFacts, ElementFacts, LayerFacts, ActivationFacts):
    """All that varprop knows of one operation, in groups: a new operation needs those that its kind asks for."""

    # ``rule`` maps Moments to Moments; ``structural`` moves elements, so it acts on mean and variance alike;
    # ``elementwise`` computes every element from the elements at the same position; ``source`` draws random
    # numbers; ``constant`` has a result that does not depend on the values of its arguments (``zeros_like``)
    kind: Kind
    # the rule itself; for ``elementwise`` the closed form ``(mean, std, *args) -> (mean, var)``
    function: Callable[..., Any] | None = None
    approximate: Reason = None  # the reason it is not exact, if it is not
    # tells whether the rule can deal with its arguments; random ones are `RANDOM`, constant tensors None
    handles: Callable[..., bool] | None = None

    @property
    def transposable(self) -> bool:
        """True if the derivative of the variance by that of an argument is the mean square of the Jacobian."""
        linear = self.linear or self.averages or self.resizes or self.noise or self.multilinear
        return linear or self.kind == "structural"


RANDOM = object()  # stands for a random tensor where only that matters
_rules: dict[Key, Rule] = {}
_changes: list[Key] = []  # of the table, in their order


def first_is_random(first: Any, *_further: Any, **_named: Any) -> bool:
    """True if the first argument of an operation is random: `handles` of one that bends where that argument does."""
    return first is RANDOM


def _require_operation(key: Key) -> None:
    """Refuse keys that no node of a graph has for its target: their rules would never be found."""
    if isinstance(key, type) and issubclass(key, torch.nn.Module):
        return
    if isinstance(key, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) or key in vars(ops).values():
        return
    raise TypeError(
        f"Rules belong to operations such as torch.ops.aten.relu, which vp.MissingRule names, or to subclasses of "
        f"torch.nn.Module, not to {key!r}."
    )


def _register(keys: tuple[Key, ...], rule: Rule) -> None:
    if not keys:
        raise TypeError("Name the operations that the rule is for, such as vp.rule(torch.ops.aten.relu).")
    for key in keys:
        _require_operation(key)
        if key in _rules:
            name = key.__qualname__ if isinstance(key, type) else key
            raise ValueError(f"{name} already has a rule; remove one of the two.")
        _rules[key] = rule
        _changes.append(key)


def rule(
    *ops: Key,
    approximate: Reason = None,
    order_statistic: bool = False,
    handles: Callable[..., bool] | None = None,
    repeats: bool = False,
    **facts: Any,
) -> Callable[[Function], Function]:
    """Register a function of Moments for one or several operations or module classes.

    The function is called with the operation's own arguments, random tensors replaced by `Moments`. For a module
    class the module itself comes first, and the whole module is kept as one operation.

    Args:
        ops: ATen operations (``torch.ops.aten.linear``), custom operations, or subclasses of ``torch.nn.Module``.
        approximate: Why the result is not exact, if it is not: a sentence, or a function of the same arguments that
            returns a sentence or None.
        order_statistic: Whether the operation is a maximum or other rank over elements, which commutes with monotone
            functions.
        handles: Tells from the arguments whether the rule applies (tensors are `RANDOM` if random, None if not); where
            it does not, the operation counts as missing.
        repeats: Whether the rule knows what to do with two arguments that are one, as in ``x @ x``; otherwise it is
            said to take them as independent.
        facts: Further fields of `Rule`.

    Returns:
        A decorator, which gives the function back.

    Raises:
        TypeError: If these are no operations or module classes.
        ValueError: If one of them has a rule already.

    Example:
        >>> class Scaled(nn.Module):
        ...     def forward(self, x):
        ...         return 3 * x
        >>> @vp.rule(Scaled)
        ... def scaled(module, x):
        ...     return vp.Moments(3 * x.mean, 9 * x.var)
        >>> vp.propagate(Scaled(), vp.Moments(torch.ones(1, 2), torch.ones(1, 2))).output.var
        tensor([[9., 9.]])
    """
    registered_rule = Rule(
        "rule",
        approximate=approximate,
        order_statistic=order_statistic,
        handles=handles,
        repeats=repeats,
        **_functions(facts),
    )
    return _registrar(ops, registered_rule)


def source(*keys: Key, **facts: Any) -> Callable[[Function], Function]:
    """Register an operation that draws random numbers, Gaussian ones unless its facts (fields of `Rule`) say more."""
    return _registrar(keys, Rule("source", **facts))


def _registrar(ops: tuple[Key, ...], registered_rule: Rule) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        registered_rule.function = function
        _register(ops, registered_rule)
        return function

    return decorate


def structural(*ops: Key, evaluate: Callable[..., Any] | None = None, **facts: Any) -> Callable[[Function], Function]:
    """Register operations that only move, select, copy or join elements: they act on mean and variance alike.

    Used as a decorator it replaces that default by a function of Moments (to keep uniform axes, say).

    Args:
        ops: The operations.
        evaluate: What to run on the means and on the variances; the operation itself if left out.
        facts: Further fields of `Rule`.

    Returns:
        A decorator for a function of Moments, which need not be used.

    Raises:
        TypeError: If these are no operations or module classes.
        ValueError: If one of them has a rule already.

    Example:
        >>> @torch.library.custom_op("example::mirrored", mutates_args=())
        ... def mirrored(x: torch.Tensor) -> torch.Tensor:
        ...     return x.flip(1)
        >>> @mirrored.register_fake
        ... def _(x):
        ...     return torch.empty_like(x)
        >>> _ = vp.structural(torch.ops.example.mirrored)
        >>> class Model(nn.Module):
        ...     def forward(self, x):
        ...         return torch.ops.example.mirrored(x)
        >>> vp.propagate(Model(), vp.Moments(torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]))).output.var
        tensor([[2., 1.]])
    """
    registered_rule = Rule("structural", evaluate=evaluate, **_functions(facts))
    _register(ops, registered_rule)
    return _completing(registered_rule)


def _completing(registered_rule: Rule) -> Callable[[Function], Function]:
    """A decorator that gives a registered rule its function."""

    def decorate(function: Function) -> Function:
        registered_rule.function = function
        return function

    return decorate


def constant(*ops: Key) -> None:
    """Register operations whose result is one number everywhere, whatever the values of a random argument."""
    _register(ops, Rule("constant"))


Points = Sequence[float] | Callable[..., Sequence[Any]]
DEPENDENT = {fact.name for fact in fields(Rule) if callable(fact.default)}  # on the arguments of an operation


def elementwise(
    *ops: Key,
    kinks: Points = (),
    jumps: Points = (),
    knots: Points = (),
    monotone: bool | Callable[..., bool] = False,
    evaluate: Callable[..., Tensor] | None = None,
    approximate: Reason = None,
    **facts: Any,
) -> Callable[[Function], Function]:
    """Register operations that act on every element alone; their moments come from panel quadrature.

    Used as a decorator it adds a closed form ``(mean, std, *arguments) -> (mean, var)``, which is then used wherever
    the argument is Gaussian, instead of the quadrature.

    Args:
        ops: The operations; the random value is the first argument.
        kinks: Where the derivative of the function jumps, as numbers or as a function of the operation's further
            arguments. Quadrature panels end there.
        jumps: The same for points where the function itself jumps.
        knots: The same for the edges of a smooth function's bend (for a sigmoid about +-9); they aid accuracy only.
        monotone: Whether the function never decreases, likewise.
        evaluate: How to compute the function on a tensor with one axis more in front; the operation itself if left out.
        approximate: As for `rule`.
        facts: Further fields of `Rule`.

    Returns:
        A decorator for the closed form, which need not be used.

    Raises:
        TypeError: If these are no operations or module classes.
        ValueError: If one of them has a rule already.

    Example:
        >>> @torch.library.custom_op("example::cube", mutates_args=())
        ... def cube(x: torch.Tensor) -> torch.Tensor:
        ...     return x**3
        >>> @cube.register_fake
        ... def _(x):
        ...     return torch.empty_like(x)
        >>> _ = vp.elementwise(torch.ops.example.cube, monotone=True)
        >>> class Model(nn.Module):
        ...     def forward(self, x):
        ...         return torch.ops.example.cube(x)
        >>> vp.propagate(Model(), vp.Moments(torch.zeros(1, 2), torch.ones(1, 2))).output.var  # E[x^6]
        tensor([[15., 15.]])
    """
    registered_rule = Rule(
        "elementwise",
        approximate=approximate,
        evaluate=evaluate,
        **_functions({"monotone": monotone, "kinks": kinks, "jumps": jumps, "knots": knots, **facts}),
    )
    _register(ops, registered_rule)
    return _completing(registered_rule)


def _functions(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts, those that may depend on an operation's arguments as functions of them."""
    return {name: _constantly(value) if name in DEPENDENT else value for name, value in facts.items()}


def lookup(target: Key) -> Rule | None:
    """The rule for a graph node's target: by overload, then by operation; for a module also by its base classes."""
    if isinstance(target, type):
        return next((_rules[base] for base in target.__mro__ if base in _rules), None)
    if target in _rules:
        return _rules[target]
    return _rules.get(getattr(target, "overloadpacket", None))


def registered() -> dict[Key, Rule]:
    """A copy of the table."""
    return dict(_rules)


def module_classes() -> tuple[type[torch.nn.Module], ...]:
    """The module classes that are kept whole."""
    return tuple(key for key in _rules if isinstance(key, type))


def unregister(*ops: Key) -> None:
    """Remove rules again (for tests and notebooks that register twice)."""
    for op in ops:
        _rules.pop(op, None)
        _changes.append(op)


def rules_revision() -> int:
    """A number that grows with every rule that is registered or removed."""
    return len(_changes)
