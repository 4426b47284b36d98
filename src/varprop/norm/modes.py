"""A model as it runs in training and in evaluation: its graph, the calls of its layers, the moments of its inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from ..engine.api import capture
from ..engine.inputs import fitted_inputs
from ..engine.plan import make_plan
from ..graph.examples import as_arguments, as_example
from ..graph.node import Node
from ..graph.program import Program
from ..graph.tracing import traced_operations
from ..moments import Moments
from ..training.restore import preserved_modes
from .attention import with_attention_of_like_tokens
from .batchnorm import is_batch_norm
from .draws import drawn_elsewhere, warn_of_draws
from .global_average import with_averages_of_like_positions
from .linear_layers import is_call_of_linear_layer
from .recurrent import CALLS
from .statistics import CapturedMode


def capture_modes(model: nn.Module, example: Any, by_batch: Collection[nn.Module] = ()) -> dict[bool, Program]:
    """The model as it runs in training (key True) and in evaluation: dropout is in one and not in the other.

    Batch norms normalize by what they have stored in both, those in `by_batch` by the batch. A model whose graph is
    drawn in Python anew in every training step counts as in evaluation: one draw would not hold for the others.
    """
    with preserved_modes(model):
        evaluation = capture(_in_mode(model, False, by_batch), example)
        before = drawn_elsewhere()
        alike = _ignores_mode(model, example, by_batch)
        training = evaluation if alike else capture(_in_mode(model, True, by_batch), example)
    drawn = drawn_elsewhere() != before
    if drawn:
        warn_of_draws(model)
    return {False: evaluation, True: evaluation if drawn or _steps(training) == _steps(evaluation) else training}


def _in_mode(model: nn.Module, training: bool, by_batch: Collection[nn.Module]) -> nn.Module:
    """The model in a mode, but for its batch norms: what a batch measures is not known.

    Recurrent layers without dropout are in evaluation mode: the mode is a flag of their operation that means nothing.
    """
    model.train(training)
    for module in model.modules():
        if is_batch_norm(module):
            module.training = module in by_batch  # not what it may hold: the dropout of a class of its own
        elif type(module) in (nn.RNN, nn.LSTM, nn.GRU) and not module.dropout:
            module.eval()
    return model


def _ignores_mode(model: nn.Module, example: Any, by_batch: Collection[nn.Module]) -> bool:
    """Whether one capture serves for both modes."""
    if all(_is_known_to_ignore_mode(module) for module in model.modules()):
        return True
    args, kwargs = as_arguments(as_example(model, example))
    evaluation = traced_operations(_in_mode(model, False, by_batch), args, kwargs)
    return evaluation is not None and evaluation == traced_operations(_in_mode(model, True, by_batch), args, kwargs)


def _is_known_to_ignore_mode(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that do the same in both modes."""
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if isinstance(module, _WITH_MODE) or (isinstance(module, nn.RNNBase) and module.dropout):
        return False
    package, _, family = type(module).__module__.rpartition(".")
    return package == "torch.nn.modules" and family in _WITHOUT_MODE


_WITHOUT_MODE = {
    "activation",
    "batchnorm",  # in one mode in both captures
    "container",
    "conv",
    "flatten",
    "linear",
    "normalization",
    "padding",
    "pooling",
    "rnn",
    "upsampling",
}
_WITH_MODE = (nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def _steps(program: Program) -> list[str]:
    return [str((node.target, node.args, node.kwargs)) for node in program.nodes]


def with_calls(program: Program, layers: dict[str, Any], given: Any, deep: bool = False) -> CapturedMode:
    """A captured model with the calls of some layers, and with averages as they count between them in a form."""
    program = with_attention_of_like_tokens(program)
    if deep:
        program = with_averages_of_like_positions(program)
    return CapturedMode(program, calls_of(program, layers), fitted_inputs(program, given))


def calls_of(program: Program, layers: dict[str, Any]) -> dict[Node, str]:
    """Every call of a layer, with the layer's path; a layer under several paths is known by its first."""
    path_of = {layer: path for path, layer in layers.items()}
    found: dict[Node, str] = {}
    for node in program.nodes:
        if node.stack and (is_call_of_linear_layer(node) or str(node.target) in CALLS):
            layer = program.module_of(node)
            if layer in path_of:
                found[node] = path_of[layer]
    return found


def reading_constants(programs: Iterable[Program], layers: dict[str, Any], given: Any) -> frozenset[str]:
    """The called layers that read nothing random in any of a model's graphs: a layer of parameters, or of constants."""
    random: dict[str, bool] = {}
    for program in programs:
        inputs = fitted_inputs(program, given).items()
        plan = make_plan(program, [node for node, value in inputs if _varies(value)])
        for node, path in calls_of(program, layers).items():
            random[path] = random.get(path, False) or plan.random(node)
    return frozenset(path for path, varies in random.items() if not varies)


def _varies(value: Any) -> bool:
    return not isinstance(value, Tensor) and not (isinstance(value, Moments) and not bool(value.var.any()))
