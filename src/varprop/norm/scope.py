"""One fold for one call of a model: where it begins and ends.

The folded weights are a function of the parameters, computed anew in every call of the model and let go of when the
call ends, however it ends. Within the call the layers share them, so long as what they were computed from has not been
replaced or changed since; a layer called by itself computes them for itself.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..gaussian.normal import Pair
from .distributed import fold_around
from .fold.dispatch import versions_of
from .fold.reference import own_saved_tensors
from .network import PARAMETERS, Folded, Network

ModuleT = TypeVar("ModuleT", bound=nn.Module)
CHANGED = (
    "What '{}' is folded from was changed within `vp.unchanged`, which promises that it is not: leave it before the "
    "optimizer's step."
)


class FoldedAlone(NamedTuple):
    """Folded weight and bias of a layer that is in no network, and the parameters and mode they were computed with."""

    pair: Pair
    parameters: list[Tensor]
    versions: list[int]
    inference: bool

    def serves(self, layer: nn.Module) -> bool:
        """True if it is what would be computed now for the layer, as far as autograd can tell."""
        parameters = [getattr(layer, name) for name in PARAMETERS]
        if torch.is_grad_enabled() and not self.pair[0].requires_grad and any(p.requires_grad for p in parameters):
            return False
        if torch.compiler.is_compiling():
            return True
        same = all(now is before for now, before in zip(parameters, self.parameters, strict=True))
        return same and versions_of(parameters) == self.versions and self.inference == torch.is_inference_mode_enabled()


@dataclass(eq=False)
class _Scope:
    """One call of a model, and what its layers share until it ends."""

    module: nn.Module | None  # the module that is called
    level: tuple[int, int]  # of the transforms within which it is called (`_level`)
    folds: list[tuple[Network, Folded]] = field(default_factory=list)  # networks and their folds
    # shifts and scales of layers folded in this call, where some are sharded
    vectors: dict[nn.Module, Pair] = field(default_factory=dict)
    alone: dict[nn.Module, FoldedAlone] = field(default_factory=dict)  # folds of layers that are in no network


class _Promise(NamedTuple):
    """The networks that `unchanged` promises to leave as they are, and their folds."""

    networks: tuple[Network, ...]
    folds: list[tuple[Network, Folded]]  # of these networks, shared by calls
    level: tuple[int, int]  # of the transforms within which `unchanged` was entered (`_level`)
    stepped: set[Network]  # whose parameters an optimizer has changed


class _Current(threading.local):
    """The state of this thread."""

    scope: _Scope | None = None  # the present call; None outside of a call
    promise = _Promise((), [], (0, 0), set())


_current = _Current()


def folded_layer(network: Network, index: int) -> Pair:
    """The folded weight and bias of a layer; a call of the model folds once, so long as parameters stay as they are."""
    scope, level, compiling = _current.scope, _level(), torch.compiler.is_compiling()
    if network.intact.apart:
        network.require_in_use(index, None if scope is None else scope.module)
    # A compiled graph cannot see whether a parameter was written to: it folds in every call.
    promise = _current.promise
    promised = network in promise.networks and not compiling
    shared = None
    if promised and promise.level == level:
        shared = promise.folds
    elif not promised and scope is not None and scope.level == level:
        shared = scope.folds
    if shared is None and not compiling:
        return network.fold_one(index)
    layer, subnetwork, folded = network.layers[index], network, None
    for candidate, latest in reversed(shared or ()):
        if candidate.full is network and index in candidate.index_of:
            subnetwork, folded = candidate, latest
            break
    if folded is not None and promised and (network in promise.stepped or subnetwork.changed_between(folded)):
        raise RuntimeError(CHANGED.format(network.specs[index].path))
    if folded is None or not folded.serves(layer, subnetwork.index_of[index], compiling):
        if folded is not None and promised and folded.changed(layer, subnetwork.index_of[index]):
            raise RuntimeError(CHANGED.format(network.specs[index].path))
        if network.by_calls or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            subnetwork, folded = fold_around(network, index, {} if scope is None else scope.vectors)
        else:
            subnetwork, folded = network, network.fold()
        if shared is not None and not (promised and (folded.serves_one_backward or not folded.versions)):
            shared[:] = [pair for pair in shared if pair[0] is not subnetwork] + [(subnetwork, folded)]
    return folded.pairs[subnetwork.index_of[index]]


def folded_alone(layer: nn.Module, fold: Callable[[], Pair]) -> Pair:
    """The folded weight and bias of a layer that is in no network: computed by `fold` once in a call of its model.

    Computed at each of the layer's n calls, statistics of n inputs would cost n² evaluations.
    """
    scope = _current.scope
    within = scope is not None and scope.level == _level()
    calls = scope.alone if scope is not None and within else {}
    folded = calls.get(layer)
    if folded is None or not folded.serves(layer):
        with own_saved_tensors():  # one that is computed within a gradient checkpoint serves calls outside of it
            pair = fold()
        if not within:
            return pair
        parameters = [getattr(layer, name) for name in PARAMETERS]
        compiling = torch.compiler.is_compiling()
        versions = [] if compiling else versions_of(parameters)
        folded = FoldedAlone(pair, parameters, versions, not compiling and torch.is_inference_mode_enabled())
        calls[layer] = folded
    return folded.pair


def _level() -> tuple[int, int]:
    """How many transforms of torch.func and of forward mode are at work: what one computes means nothing outside."""
    if torch.compiler.is_compiling():
        return 0, 0
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return 0 if interpreter is None else interpreter.level(), torch.autograd.forward_ad._current_level + 1


def called_module() -> nn.Module | None:
    """The outermost module of a normalized model that is being called; None where a layer is called by itself."""
    return None if _current.scope is None else _current.scope.module


class ScopedForward:
    """A module's forward, within which the layers of a network are folded once.

    It stands in the module's `__dict__` and calls the forward that it hides.
    """

    module: nn.Module
    hidden: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden forward, in a scope of its own unless it is called within one."""
        bound = args[0] if args else None
        if isinstance(bound, nn.Module) and getattr(bound.__dict__.get("forward"), "__func__", None) is self:
            # bound to its module as a function would be (accelerate's `unwrap_model`), or to a copy of that
            bound.__dict__["forward"] = self if bound is self.module else scoped_forward(bound)
            return bound.forward(*args[1:], **kwargs)
        before, level = _current.scope, _level()
        if before is None or before.level != level:
            _current.scope = _Scope(self.module, level)
        try:
            if self.hidden is not None:
                return self.hidden(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            _current.scope = before

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._method())

    @property
    def __code__(self) -> Any:  # torch.export reads the names of arguments there
        return self._method().__code__

    def _method(self) -> Any:
        return self.hidden or type(self.module).forward.__get__(self.module)

    def __reduce__(self) -> Any:
        return _scoped_forward_of, (type(self.module),), self.__dict__


_classes: weakref.WeakKeyDictionary[type[nn.Module], type[ScopedForward]] = weakref.WeakKeyDictionary()


def _scoped_forward_of(plain: type[nn.Module]) -> ScopedForward:
    """A scoped forward without its attributes, of a class that all modules of a class share.

    torch.compile keeps the graphs of a code together, and allows no more than eight. A model's class has a code of its
    own in its forward; so it has one here, for graphs begin with this one.
    """
    if plain not in _classes:
        call: Any = ScopedForward.__call__
        code = call.__code__.replace(co_name=f"{plain.__name__}_forward")
        own_call = types.FunctionType(code, call.__globals__, call.__name__, call.__defaults__, call.__closure__)
        _classes[plain] = type("ScopedForward", (ScopedForward,), {"__call__": own_call})
    return object.__new__(_classes[plain])


def scoped_forward(module: nn.Module, hidden: Any = None) -> ScopedForward:
    """The scoped forward of a module; `hidden` is one that stands in the module's `__dict__`, if there is one."""
    scoped = _scoped_forward_of(type(module))
    scoped.module, scoped.hidden = module, hidden
    return scoped


def open_scopes_(model: nn.Module, layers: list[nn.Module]) -> None:
    """Let every module that holds some of the layers fold them once in each of its calls."""
    inside = {id(layer) for layer in layers}
    for module in model.modules():
        if id(module) not in inside and any(id(inner) in inside for inner in module.modules()):
            module.__dict__["forward"] = scoped_forward(module, module.__dict__.get("forward"))


def close_scopes_(model: nn.Module) -> None:
    """Undo `open_scopes_`."""
    for module in model.modules():
        scoped = module.__dict__.get("forward")
        scoped = getattr(scoped, "__func__", scoped)  # if it was bound like a function
        if isinstance(scoped, ScopedForward):
            del module.__dict__["forward"]
            if scoped.hidden is not None:
                module.__dict__["forward"] = scoped.hidden


@contextlib.contextmanager
def unchanged(model: ModuleT) -> Iterator[ModuleT]:
    """A promise that the parameters stay as they are within: the normalization is computed once for all passes.

    For the passes of a gradient accumulation or of an evaluation, in the thread that enters. An optimizer's step, and
    any other change that autograd notices (`load_state_dict`, another tensor in a parameter's place), is refused; one
    that it does not notice (a write through `.data`) must not be made. A compiled model is folded in every call all the
    same: its graph cannot see a change.

    Args:
        model: A normalized model.

    Returns:
        A context manager that gives the model.

    Raises:
        RuntimeError: At the next call after a change.

    Example:
        >>> moments = vp.Moments(torch.zeros(1, 4), torch.ones(1, 4))
        >>> model = vp.normalize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), moments)
        >>> with vp.unchanged(model), torch.no_grad():
        ...     outputs = [model(torch.randn(16, 4)) for _ in range(10)]
    """
    networks = [network for m in model.modules() for network, _ in m.__dict__.get("networks", {}).values()]
    tensors = {id(parameter) for parameter in model.parameters()}
    before = _current.promise
    folds, stepped = list(before.folds), set(before.stepped)

    def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # fused ones leave versions as they are
        if any(id(parameter) in tensors for group in optimizer.param_groups for parameter in group["params"]):
            stepped.update(networks)

    hook = register_optimizer_step_post_hook(note_step)
    _current.promise = _Promise((*before.networks, *networks), folds, _level(), stepped)
    try:
        yield model
    finally:
        hook.remove()
        _current.promise = before


@contextlib.contextmanager
def shared_fold(model: nn.Module | None = None) -> Iterator[None]:
    """Within it, layers that are asked one after the other share a fold, as in a call of their model."""
    before, _current.scope = _current.scope, _Scope(model, _level())
    try:
        yield
    finally:
        _current.scope = before
