"""What holds while a model is traced on tensors without values, and a trace that only lists operations.

Choices by a random number are decided where chance leaves none, batch norms take a batch of one, nodes know the line
of the user's model alone, attributes that the model's code sets are put back, hooks of the user that keep tensors are
named, and recurrent operations take the shape of their results from that of their arguments: torch would run them step
by step, several times in a capture.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import proxy
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARISONS = {
    function: name
    for name in _SIGNS
    for function in (getattr(Tensor, name), getattr(Tensor, f"__{name}__"), getattr(torch, name))
}
_ANSWERED = {*_COMPARISONS, Tensor.__bool__, Tensor.item, torch.rand, functional.batch_norm}
_BATCH_NORM = inspect.signature(functional.batch_norm)
TORCH = os.path.dirname(torch.__file__)


class TracedCalls(TorchFunctionMode):
    """Within, calls of torch that need values, or refuse a batch of one, are answered all the same.

    `if torch.rand([]) < chance` is decided where the chance is 0 or 1, as that of LayerDrop may be. Batch norms of this
    thread in training mode take a batch of one, and leave alone what they have stored. Torch refuses that, or divides
    by zero: for data it makes no sense, but moments stand for any number of samples. Torch's function itself stays as
    it is: Dynamo remembers the one that it meets first.

    Attributes:
        undecided: The comparison with another chance that an `if` asked for; empty if there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.undecided = ""
        # by their ids, with the tensors: an id may be used again when one is gone
        self._drawn: dict[int, Tensor] = {}
        self._compared: dict[int, tuple[Tensor, str]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _ANSWERED:  # one capture makes thousands of calls, most of which ask for a shape or a layout
            return function(*args, **(kwargs or {}))
        if function is functional.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        number, limit = (*args, None, None)[:2]
        name = _COMPARISONS.get(function) if id(number) in self._drawn and isinstance(limit, (int, float)) else None
        if name is not None:
            least, most = (getattr(operator, name)(end, limit) for end in (0.0, 1 - 2**-24))
            if least == most:
                return least
        if function in (Tensor.__bool__, Tensor.item) and id(number) in self._compared:
            self.undecided = self._compared[id(number)][1]
        result = function(*args, **(kwargs or {}))
        if function is torch.rand and isinstance(result, Tensor) and result.numel() == 1:
            self._drawn[id(result)] = result
        elif name is not None:
            self._compared[id(result)] = result, f"torch.rand {_SIGNS[name]} {limit:g}"
        return result


def _batch_norm(*args: Any, **kwargs: Any) -> Any:
    bound = _BATCH_NORM.bind(*args, **kwargs).arguments
    if not bound.get("training"):
        return functional.batch_norm(*args, **kwargs)
    weight, bias = bound.get("weight"), bound.get("bias")
    momentum, eps = bound.get("momentum", 0.1), bound.get("eps", 1e-5)
    return torch.batch_norm(bound["input"], weight, bias, None, None, True, momentum, eps, False)


class _UserFrame:
    """In the place of torch's `CapturedTraceback`: the innermost `forward` on this thread's stack that is not torch's.

    Torch's looks up the source of every frame, of which there are about a hundred: a fifth of the time of a capture.
    """

    def __init__(self, whole: Any) -> None:
        self.whole, self.thread = whole, threading.get_ident()

    def extract(self) -> Any:
        return self if threading.get_ident() == self.thread else self.whole.extract()

    def summary(self) -> traceback.StackSummary:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (frame.f_code.co_name != "forward" or TORCH in frame.f_code.co_filename):
            frame = frame.f_back
        found = [] if frame is None else [(frame.f_code.co_filename, frame.f_lineno, "forward", None)]
        return traceback.StackSummary.from_list(found)


@contextlib.contextmanager
def only_user_frames() -> Iterator[None]:
    """Within, the nodes of graphs that this thread traces know the line of the user's model, and no others.

    The name is no part of torch's interface: where it is missing, nodes know what torch gives them.
    """
    names: Any = proxy
    whole = getattr(names, "CapturedTraceback", None)
    if whole is None:
        yield
        return
    names.CapturedTraceback = _UserFrame(whole)
    try:
        yield
    finally:
        names.CapturedTraceback = whole


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Attributes of modules, and the lists and dicts among them, are afterwards what they were before."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    held = [
        (value, value.copy())
        for _, attributes in before
        for value in attributes.values()
        if type(value) in (list, dict)
    ]
    try:
        yield
    finally:
        # What has not changed is not touched: other threads may be using the model.
        for module, attributes in before:
            _put_back(vars(module), attributes)
        for value, contents in held:
            if isinstance(value, dict):
                _put_back(value, contents)
            elif len(value) != len(contents) or any(map(operator.is_not, value, contents)):
                value[:] = contents


def _put_back(changed: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in [name for name in changed if name not in before]:
        del changed[name]
    for name, value in before.items():
        if name not in changed or changed[name] is not value:
            changed[name] = value


class HookWarning(UserWarning):
    """A hook ran on tensors without values, and may have kept some."""


@contextlib.contextmanager
def observers_named(model: nn.Module) -> Iterator[None]:
    """Warn of hooks that run within and return nothing; one that returns something is a part of the model."""
    seen: dict[str, None] = {}
    hooks = list(_user_hooks(model))
    for registry, key, hook, name in hooks:
        registry[key] = _watched(hook, name, seen)
    try:
        yield
    finally:
        for registry, key, hook, _ in hooks:
            registry[key] = hook
    if seen:
        warnings.warn(
            f"While the model was captured these hooks ran on tensors without values, of which they must not keep any: "
            f"{', '.join(seen)}.",
            HookWarning,
            stacklevel=4,
        )


def _user_hooks(model: nn.Module) -> Iterator[tuple[Any, int, Any, str]]:
    """Where each is kept, under which key, itself, and what to call it."""
    for path, module in model.named_modules():
        for registry in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(registry.items()):
                if str(getattr(hook, "__module__", "")).partition(".")[0] not in ("torch", "varprop"):
                    name = getattr(hook, "__name__", type(hook).__name__)
                    yield registry, key, hook, f"{name} on '{path or type(module).__name__}'"


def _watched(hook: Any, name: str, seen: dict[str, None]) -> Any:
    @functools.wraps(hook)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None:
            seen[name] = None
        return result

    return watched


def _empty_results(input: Tensor, states: Tensor | list[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    """Output and last states of a recurrent layer; an LSTM has a list of states, other cells have one."""
    states, bidirectional = [states] if isinstance(states, Tensor) else states, settings[-2]
    output = input.new_empty(*input.shape[:-1], states[0].shape[-1] * (2 if bidirectional else 1))
    return output, *(torch.empty_like(state) for state in states)


RECURRENCES = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


@contextlib.contextmanager
def recurrences_not_run() -> Iterator[None]:
    """Within, these operations return empty tensors of the right extents, where torch runs Python."""
    kernels = {op: dict(op.py_kernels) for op in RECURRENCES}
    steps = {op: decomposition_table.get(op) for op in RECURRENCES}
    try:
        for op in RECURRENCES:
            _set(op, dict.fromkeys(kernels[op], _empty_results), steps[op] and _empty_results)
        yield
    finally:
        for op in RECURRENCES:
            _set(op, kernels[op], steps[op])


def _set(op: Any, kernels: dict[Any, Any], steps: Any) -> None:
    """Set the Python kernels of an operation and its decomposition."""
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
    if steps is not None:
        decomposition_table[op] = steps


class _OperationRecorder(TorchDispatchMode):
    """Writes down every operation, its arguments and results; tensors by the order in which they were first seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Any] = []
        self.seen: dict[int, tuple[int, Tensor]] = {}  # the tensors too: an id may be used again when one is gone

    def described(self, tree: Any) -> str:
        """A nest of arguments as text."""
        return str(pytree.tree_map_only(Tensor, self._number, tree))

    def _number(self, tensor: Tensor) -> str:
        number, _ = self.seen.setdefault(id(tensor), (len(self.seen), tensor))
        return f"%{number}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.described((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, before, self.described(result)))
        return result


def traced_operations(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Every operation of one call with what it reads and makes, equal for equal graphs; None if that cannot be found.

    Nothing is computed, and no buffer or random number generator changes.
    """
    state = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with attributes_kept(model), torch.no_grad(), torch.random.fork_rng(devices=[]), fake:
            copies: dict[str, Tensor] = {name: fake.from_tensor(tensor) for name, tensor in state.items()}
            args, kwargs = pytree.tree_map_only(Tensor, fake.from_tensor, (args, kwargs))
            with _OperationRecorder() as recorder:
                for tensor in (*copies.values(), *pytree.tree_leaves((args, kwargs))):
                    recorder.described(tensor)
                result = torch.func.functional_call(model, copies, args, kwargs)
                return [*recorder.operations, recorder.described(result)]
    except Exception:  # whatever cannot be run without data is found out by a capture, which says what it is
        return None


# While tracing, a call of such a module ends in this marker; its inner operations are dropped afterwards.
_library = torch.library.Library("varprop", "DEF")
_library.define("leaf(Tensor[] inputs, Tensor[] outputs, int index) -> Tensor[]")
_library.impl("leaf", lambda _, outputs, index: [output.clone() for output in outputs], "CompositeExplicitAutograd")


@contextlib.contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restore which modules are in training mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@dataclass(eq=False)
class Leaf:
    """One call of a module kept whole; calling it runs the module and returns its outputs as a flat list."""

    module: nn.Module
    path: str
    arguments: Any  # the tree of (args, kwargs), tensors replaced by their position
    forward: Callable[..., Any]
    modes: Sequence[bool]  # which of the module and those in it were in training mode when this was captured

    @property
    def __name__(self) -> str:
        """The class of the module, as reports show it."""
        return type(self.module).__name__

    def fill(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module's arguments with `values` in the places of its tensors."""
        args, kwargs = pytree.tree_map(
            lambda leaf: values[leaf.index] if isinstance(leaf, _Slot) else leaf, self.arguments
        )
        return args, kwargs

    @contextlib.contextmanager
    def as_captured(self) -> Iterator[nn.Module]:
        """Within, the module, which is yielded, and those in it are in the modes that they were captured in."""
        with preserved_modes(self.module):
            for inner, training in zip(self.module.modules(), self.modes, strict=True):
                inner.training = training
            yield self.module

    def __call__(self, *values: Any) -> list[Any]:
        """Run the module on plain tensors."""
        args, kwargs = self.fill(values)
        with self.as_captured():
            return pytree.tree_leaves(self.forward(*args, **kwargs))


@dataclass(frozen=True)
class _Slot:
    index: int


@contextlib.contextmanager
def keep_whole(
    model: nn.Module, classes: tuple[type[nn.Module], ...], inputs: tuple[Any, Any], leaves: list[Leaf]
) -> Iterator[None]:
    """Within, every call of a module of `classes` leaves a marker in the trace and an entry in `leaves`.

    The module itself is not traced (it may hold what cannot be): one real run tells what its outputs are like.
    """
    patched = {path: module for path, module in model.named_modules() if isinstance(module, classes)}
    samples = _outputs_of(model, patched, inputs) if patched else {}
    for path, module in patched.items():
        module.forward = _marked(module, path, samples[path], leaves)
    try:
        yield
    finally:
        for module in patched.values():
            del module.forward


def _outputs_of(model: nn.Module, modules: dict[str, nn.Module], inputs: tuple[Any, Any]) -> dict[str, list[Any]]:
    samples: dict[str, list[Any]] = {path: [] for path in modules}

    def recorder(path: str) -> Callable[..., None]:
        return lambda _module, _args, output: samples[path].append(
            pytree.tree_map_only(Tensor, lambda t: t.to("meta"), output)
        )

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for path, module in modules.items():
            hooks.enter_context(module.register_forward_hook(recorder(path)))
        model(*inputs[0], **inputs[1])
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return samples


def _marked(module: nn.Module, path: str, samples: list[Any], leaves: list[Leaf]) -> Callable[..., Any]:
    forward = module.forward
    turn = itertools.cycle(samples)  # export may trace more than once

    def marked(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []

        def slot(tensor: Tensor) -> _Slot:
            tensors.append(tensor)
            return _Slot(len(tensors) - 1)

        modes = [inner.training for inner in module.modules()]
        leaves.append(Leaf(module, path, pytree.tree_map_only(Tensor, slot, (args, kwargs)), forward, modes))
        sample, structure = pytree.tree_flatten(next(turn))
        outputs = [torch.empty(leaf.shape, dtype=leaf.dtype, device=tensors[0].device) for leaf in sample]
        return pytree.tree_unflatten(torch.ops.varprop.leaf(tensors, outputs, len(leaves) - 1), structure)

    return marked


def restore_leaves(graph: fx.Graph, leaves: list[Leaf]) -> None:
    """Replace every marker by a node that calls the module, and drop the operations it was traced into."""
    for node in list(graph.nodes):
        if node.target is torch.ops.varprop.leaf.default:
            inputs, _, index = node.args
            with graph.inserting_before(node):
                call = graph.call_function(leaves[index], tuple(inputs))
            call.meta.update(node.meta)
            node.replace_all_uses_with(call)
            graph.erase_node(node)
    if leaves:
        graph.eliminate_dead_code()
