"""From a module and an example input to a graph of ATen operations with names a person knows."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from ..errors import CaptureError, RandomChoice
from ..moments import Moments, Tokens, autocast_off
from . import patterns
from .functional import in_functional_form, take_apart
from .node import Call, Node, fill_open_extents, info_of, resolve
from .program import Program, outputs_marked
from .tracing import (
    TORCH,
    TracedCalls,
    attributes_kept,
    keep_whole,
    observers_named,
    only_user_frames,
    recurrences_not_run,
    restore_leaves,
)

aten = torch.ops.aten
_LOGS = ("torch", "torch.fx.experimental.symbolic_shapes", "torch.fx.experimental.proxy_tensor")
_ASSERTIONS = {aten._assert_tensor_metadata, aten._assert_scalar, aten._assert_async}
_DROPOUTS = {
    getattr(aten, name + suffix)
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for suffix in ("", "_")
}
ONE_AT_A_TIME = threading.RLock()  # captures swap a function of torch's, and each must put back the one it found


def capture(
    model: nn.Module,
    example: Any,
    whole_classes: tuple[type[nn.Module], ...] = (),
    has_rule: Callable[[Any], bool] = lambda _: True,
) -> Program:
    """Capture what `model` does with inputs of the example's shape.

    Args:
        model: Any module `torch.export` can trace; its mode (training or evaluation) is respected, nothing is changed.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments, or shapes of these.
        whole_classes: Module classes to keep as one operation.
        has_rule: Tells whether an operation has a rule; those that have none are written as the ones they consist of.

    Raises:
        CaptureError: If the model cannot be exported, with the reason in one sentence.
    """
    args, kwargs = of_fixed_sizes(as_arguments(as_example(model, example)))
    leaves: list[Any] = []
    whole_modules = keep_whole(model, whole_classes, (args, kwargs), leaves)
    cuda = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    generators = torch.random.fork_rng(devices=cuda)
    with (
        ONE_AT_A_TIME,
        attributes_kept(model),
        observers_named(model),
        _quiet(),
        generators,
        autocast_off(),
        TracedCalls() as choices,
        _said_in_one_sentence(model, choices),
        whole_modules,
        outputs_marked(model) as marked,
        only_user_frames(),
        _unchecked_distributions(),
        recurrences_not_run(),
        _use_lazy_graph_module(True),  # most graphs on the way are never run: no code is made for them
    ):
        exported = torch.export.export(model, args, kwargs, strict=False)
        idle = _idle_dropouts(model, exported.graph_module.graph)
        exported = in_functional_form(exported)
    graph = exported.graph_module.graph
    restore_leaves(graph, leaves)
    take_apart(graph, has_rule)
    patterns.recompose(graph)
    program = _program(model, exported, marked)
    program.idle = idle
    return program


def _idle_dropouts(model: nn.Module, graph: fx.Graph) -> list[str]:
    """The paths of modules that call a dropout in evaluation, which in functional form leaves no trace."""
    paths, idle = _paths(model), dict[str, None]()
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _DROPOUTS and node.args[1] and not node.args[2]:
            idle |= {call.path: None for call in _stack(node, paths)[-1:]}
    return list(idle)


def _program(model: nn.Module, exported: torch.export.ExportedProgram, marked: set[str]) -> Program:
    nodes_by_name: dict[str, Node] = {}
    several: dict[str, list[Node]] = {}
    outputs: list[Any] = []
    paths = _paths(model)
    for node in exported.graph_module.graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _ASSERTIONS:
            continue  # they hold for the shapes captured, and return nothing
        call = _stack(node, paths)[-1:]
        if node.target is aten.alias.default and call and call[0].path in marked:
            nodes_by_name[node.name] = nodes_by_name[node.args[0].name]
            several.setdefault(call[0].key, []).append(nodes_by_name[node.name])
        elif node.op == "output":
            outputs = [nodes_by_name[out.name] if isinstance(out, fx.Node) else out for out in node.args[0]]
        else:
            nodes_by_name[node.name] = _node(node, nodes_by_name, paths)
    nodes = [node for node in dict.fromkeys(nodes_by_name.values()) if node.target]
    program = Program(model, nodes, [], {}, {}, [], exported.call_spec.out_spec, several=several)
    for spec in exported.graph_signature.input_specs:
        node, given_by_user = nodes_by_name[spec.arg.name], spec.kind is InputKind.USER_INPUT
        if given_by_user and not isinstance(spec.arg, ConstantArgument):
            program.inputs.append(node)
        elif given_by_user:
            program.constants[node] = spec.arg.value
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target in exported.state_dict:
            program.state[node] = spec.target
        else:
            program.constants[node] = exported.constants[str(spec.target)]
    fill_open_extents(program.nodes, program.tensors())
    program.names = _names(model, exported)
    kinds = [out.kind for out in exported.graph_signature.output_specs]
    program.outputs = [out for out, kind in zip(outputs, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
    return program


def _names(model: nn.Module, exported: torch.export.ExportedProgram) -> list[str]:
    """The name of every tensor the user gives, in the order of the graph."""
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    args, kwargs = pytree.tree_unflatten(specs, exported.call_spec.in_spec)
    named = named_leaves(model, args, kwargs, (type(None),))
    return [name for name, spec in named.items() if not isinstance(spec.arg, ConstantArgument)]


def _node(node: fx.Node, nodes_by_name: dict[str, Node], paths: frozenset[str]) -> Node:
    args, kwargs = resolve((node.args, node.kwargs), lambda operand: nodes_by_name[operand.name], fx.Node)
    target = node.target if node.op == "call_function" else None
    *_, line = "", *_user_frames(node.meta.get("stack_trace") or "")
    return Node(node.name, target, args, kwargs, info_of(node.meta.get("val")), _stack(node, paths), line)


def _paths(model: nn.Module) -> frozenset[str]:
    """The paths of all modules, for a model that holds one of them twice; none for others."""
    paths = frozenset(path for path, _ in model.named_modules(remove_duplicate=False))
    return paths if len(paths) > sum(1 for _ in model.modules()) else frozenset()


def _stack(node: fx.Node, paths: frozenset[str]) -> tuple[Call, ...]:
    """The module calls that a node of an exported graph was made in.

    `paths` are those of a model that holds a module twice: torch then takes the path of a call from the module that
    makes it, if that has a forward of its instance, as all have that are captured here.
    """
    calls: list[Call] = []
    for key, (path, cls) in (node.meta.get("nn_module_stack") or {}).items():
        path = re.sub(r"@\d+", "", path)
        inner = f"{calls[-1].path}.{path}".lstrip(".") if calls else path
        calls.append(Call(key, inner if inner in paths else path, str(cls)))
    return tuple(calls)


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Switch off the checks of torch.distributions: they read values, which traced tensors do not have."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)


@contextlib.contextmanager
def _said_in_one_sentence(model: nn.Module, choices: TracedCalls) -> Iterator[None]:
    """Turn any error inside into a `CaptureError` that says in a sentence what to do."""
    try:
        yield
    except Exception as error:
        if choices.undecided:
            raise RandomChoice(
                f"{type(model).__name__} chooses at random what it does (`if {choices.undecided}`), so there is no "
                f"single graph to follow: call model.eval() if it does so in training mode alone, or let the chance be "
                f"0, as that of LayerDrop by model.config.layerdrop = 0."
            ) from error
        raise CaptureError(_explain(model, error)) from error


def _explain(model: nn.Module, error: Exception) -> str:
    text = str(error)
    if hook := _failed_hook(model, error):
        return (
            f"{hook} is a hook of {type(model).__name__} that needs the values of tensors, which have none while the "
            f"model is captured: remove it until then."
        )
    where = "".join(f"\n  {frame}" for frame in _user_frames(text)[-1:])
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        return (
            f"{type(model).__name__} branches on the values of its input (an `if`, `while`, `int()` or `.item()` on a "
            f"tensor), so there is no single graph to follow; write the branch with torch.where, or keep the module "
            f"that holds it whole with `@vp.rule(ThatModule)`.{where}"
        )
    if "fake tensor in the exported program constant" in text:
        return (
            f"{type(model).__name__} does something that no graph can follow, such as torch.autograd.grad or a write "
            f"to `.data` inside its forward: keep the module that does so whole with `@vp.rule(ThatModule)`."
        )
    if any(_packs(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
        return (
            f"{type(model).__name__} packs sequences inside, whose lengths no graph can follow: let it take padded "
            f"sequences where it is given no lengths, and give an example of those; packed ones may follow."
        )
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        return (
            f"{type(model).__name__} has lazy layers, whose sizes are not known yet: call it once on data first, as in "
            f"model(x)."
        )
    if output := re.match(r"Found <class '([\w.]+)'> in output", text):
        return (
            f"{type(model).__name__} returns a {output[1].rpartition('.')[2]}, in which no graph can end: let it "
            f"return tensors, and make of them what you need where it is called."
        )
    if "argument #1 'indices'" in text:
        return (
            f"An embedding of {type(model).__name__} reads whole numbers, but its input is floating point: give "
            f"vp.Tokens(probabilities) as its moments, with the shape as example, such as example=(1, 128)."
        )
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted and "positional arguments but" in text:
        return (
            f"'{scripted[0] or '(model)'}' is a scripted module, in which no graph can be followed: put the module "
            f"that it was made of in its place."
        )
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    return f"{type(model).__name__} could not be run on the example: {first}{where}"


def _failed_hook(model: nn.Module, error: Exception) -> str:
    """The hook of the user's in which an error arose, by its name, module and line; empty if it was in none."""
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    for path, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            code = getattr(inspect.unwrap(hook), "__code__", None)
            if code in frames:
                where = f"{code.co_filename}:{code.co_firstlineno}"
                return f"{code.co_name} ({where}), registered on '{path or type(module).__name__}',"
    return ""


def _packs(frame: FrameType) -> bool:
    """True if a frame is one of torch's that packs sequences, or that of a recurrent layer on a packed one."""
    packed = frame.f_code.co_filename.endswith("rnn.py") and frame.f_locals.get("batch_sizes") is not None
    return packed or frame.f_code.co_name in ("pack_padded_sequence", "pad_packed_sequence", "pack_sequence")


def _user_frames(text: str) -> list[str]:
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*([^\n]*)', text)
    return [f"{file}:{line} in {where}: {code.strip()}" for file, line, where, code in frames if TORCH not in file]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export reports through loggers and warnings what the raised error says again."""
    logs = [logging.getLogger(name) for name in _LOGS]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # it prints graphs, too
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


Kinds = tuple[type, ...]


def as_example(model: nn.Module, example: Any, inputs: Any = None) -> Any:
    """The example, with zeros where it has a shape: ``(1, 3, 32, 32)``, or several of these in a tuple or a dict.

    Flags and whatever else is no shape may stand among them. Zeros have dtype and device of the model's parameters;
    they are whole numbers where `inputs`, the moments in the same structure, have `Tokens`.
    """
    require_module(model)
    if is_shape(example):
        return _zeros(model, example, inputs)
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(example)):
        return example  # beside a tensor whole numbers are an argument of their own, the size of an output say
    if isinstance(example, dict):
        named = inputs if isinstance(inputs, dict) else {}
        return {name: _filled(model, item, named.get(name)) for name, item in example.items()}
    if isinstance(example, (tuple, list)) and any(map(is_shape, example)):
        items = inputs if isinstance(inputs, (tuple, list)) and len(inputs) == len(example) else [None] * len(example)
        return tuple(_filled(model, item, named) for item, named in zip(example, items, strict=True))
    return example


def require_module(model: Any) -> None:
    """Refuse functions and classes: a model is a module that can be called."""
    if not isinstance(model, nn.Module):
        description = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(
            f"A model is a torch.nn.Module, not {description}: write functions as the forward of a module."
        )


def require_values(model: nn.Module) -> None:
    """Refuse parameters on the meta device."""
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise ValueError(
            f"Parameter '{empty}' is on the meta device and has no values: use model.to_empty and load it."
        )


def of_fixed_sizes(example: Any) -> Any:
    """The example, as tensors on which torch has noted nothing about their sizes.

    torch.export makes symbols of axes that are marked as dynamic, for which no moments can be computed. It is not only
    the user who marks them: torch 2.11 does so with inputs that a model compiled with `dynamic=True` keeps for its
    backward pass.
    """
    return pytree.tree_map_only(Tensor, _without_marks, example)


@torch.enable_grad()
def _without_marks(x: Tensor) -> Tensor:
    again = x.detach().requires_grad_(x.requires_grad)
    return again if x.is_leaf else again.clone()  # a model may write into what is no leaf


def is_shape(value: Any) -> bool:
    """True if a value is a sequence of whole numbers."""
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(type(extent) is int for extent in value)


def _filled(model: nn.Module, item: Any, input: Any) -> Any:
    return _zeros(model, item, input) if is_shape(item) else item


def _zeros(model: nn.Module, shape: Any, input: Any) -> Tensor:
    if min(shape) < 1:
        raise CaptureError(f"The example has the shape {tuple(shape)}: every extent must be 1 or more.")
    values = input.mean if isinstance(input, Moments) else torch.empty(0)
    like = next((p for p in model.parameters() if p.is_floating_point()), values)
    dtype = torch.long if isinstance(input, Tokens) else like.dtype
    return torch.zeros(tuple(shape), dtype=dtype, device=like.device)


def as_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from one value, a tuple or list of them, or a dict by name."""
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def named_leaves(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kinds: Kinds) -> dict[str, Any]:
    """The leaves of a model's arguments by name: that of the argument, and the way to a place inside it.

    Values of the given types are kept whole.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names += [f"argument {position}" for position in range(len(names), len(args))]
    tree = dict(zip(names, args, strict=False)) | kwargs
    named: dict[str, Any] = {}
    for name, value in tree.items():
        leaves, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda value: isinstance(value, kinds))
        named |= {name + pytree.keystr(path): leaf for path, leaf in leaves}
    return named


def leaves_of(tree: Any, kinds: tuple[type, ...]) -> list[Any]:
    """The leaves of a nest of arguments, values of the given types kept whole."""
    return pytree.tree_leaves(tree, is_leaf=lambda value: isinstance(value, kinds))
