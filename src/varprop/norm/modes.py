"""A model captured in training and in evaluation mode: its programs, the calls of layers and the moments of inputs.

Between normalized layers attention counts otherwise than in `propagate`, and so do global averages unless the paper's
form is asked for: the programs are rewritten there.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..engine.inputs import capture_for_rules, fitted_inputs
from ..engine.plan import make_plan, operation_of, rule_of
from ..errors import RandomChoice
from ..graph import ops
from ..graph.capture import as_arguments, as_example
from ..graph.node import Node, TensorInfo
from ..graph.program import Program, transferred
from ..graph.tracing import preserved_modes, traced_operations
from ..moments import Moments
from .batchnorm import is_batch_norm
from .linear_layers import computes_with_its_own, is_call_of_linear_layer
from .statistics import CapturedMode


def drawn_elsewhere() -> Any:
    """The states of the global generators of Python and numpy, equal if nothing was drawn in between."""
    numpy = sys.modules.get("numpy")  # the core does not need numpy, the user's model may
    if numpy is None:
        return random.getstate(), None
    kind, keys, *settings = numpy.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *settings)


def warn_of_draws(model: nn.Module, verb: str) -> None:
    """Warn that the statistics of a model that draws its graph (which layers to skip, say) are those of evaluation."""
    warnings.warn(
        f"{type(model).__name__} {verb} in training mode, so that no single graph tells what it does: its statistics "
        "are those of evaluation mode in training, too. Draw with torch and without an `if` (a mask by "
        "torch.bernoulli, say) for statistics that count what is drawn.",
        stacklevel=5,
    )


def with_attention_of_like_tokens(program: Program) -> Program:
    """The program with every attention replaced by `token_average` of its values.

    Attention averages its values with weights that sum to one, so that its mean is theirs. Its variance is that of an
    average of independent tokens in `propagate`, which says so. Tokens of data are not independent, least of all behind
    many layers: a normalization that counts on their averaging out scales what is left of them up, block after block,
    until training diverges. Here attention therefore has the variance of its values, whatever its weights, masks and
    the dropout of its weights: the most it can have, exact for tokens that are all alike. So a layer behind attention
    depends on its values alone, channel by channel, and is folded with the others.
    """
    values = {node: value for node in program.nodes if (value := attended_values(node)) is not None}
    if not values:
        return program
    replaced = {node: (ops.token_average, (value, tuple(node.info.shape))) for node, value in values.items()}
    return transferred(program, program.model, replaced=replaced)


def attended_values(node: Node) -> Node | None:
    """The values of an attention, written as one operation or as a product with the result of a softmax."""
    if operation_of(node) == "attention":
        return _node(node.args[2])
    if operation_of(node) == "matmul" and _are_weights(node.args[0]):
        value = _node(node.args[1])
        return value if value is not None and value.ndim > 1 and node.ndim == value.ndim else None
    return None


def _node(value: Any) -> Node | None:
    return value if isinstance(value, Node) and isinstance(value.info, TensorInfo) else None


def _are_weights(value: Any) -> bool:
    """True for weights of an average: a node whose values sum to one along its last axis."""
    node = _node(value)
    while node is not None and _keeps_weights(node):
        before = _node(node.args[0])
        if before is None or before.ndim == 0 or before.info.shape[-1] != node.info.shape[-1]:
            return False
        node = before
    return node is not None and operation_of(node) == "softmax" and node.args[1] in (-1, node.ndim - 1)


def _keeps_weights(node: Node) -> bool:
    """True if weights that sum to one along the last axis still do behind a node, where that axis stays the same."""
    rule = rule_of(node)
    return rule is not None and (rule.copies or rule.operation in ("dropout", "view"))


def with_averages_of_like_positions(program: Program) -> Program:
    """The program with every global average replaced by `position_average`.

    `propagate` takes positions as independent: the average of n of them has 1/n of their variance. Those of images and
    of texts are not: in a ResNet at its start the outputs of the layer behind the average have three to five times the
    predicted standard deviation, so that training begins with large losses and gradients. As with attention, the most
    it can have is the variance of its values, exact for positions that are all alike.
    """
    replaced = {}
    for node in program.nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and isinstance(source.info, TensorInfo) and isinstance(node.info, TensorInfo):
            average = _averaged(node, source)
            if average is not None:
                replaced[node] = (ops.position_average, (source, *average))
    return transferred(program, program.model, replaced=replaced) if replaced else program


def _averaged(node: Node, source: Node) -> tuple[tuple[int, ...], bool] | None:
    """The positions' axes if a node is a global average, and whether they are kept."""
    axes = tuple(range(2, source.ndim))
    if (operation := operation_of(node)) in ("adaptive average", "average window"):
        padded = operation == "average window" and len(node.args) > 3 and any(node.args[3])
        batched = source.ndim == node.ndim and axes and set(node.info.shape[2:]) == {1}
        return (axes, True) if batched and not padded else None
    if operation == "mean" and len(node.args) > 1 and isinstance(node.args[1], (list, tuple)):
        dims = tuple(sorted(axis % source.ndim for axis in node.args[1]))
        tokens = source.ndim == 3 and dims == (1,)
        if tokens or (source.ndim > 3 and dims == axes):
            return dims, bool(node.args[2]) if len(node.args) > 2 else False
    return None


def capture_modes(model: nn.Module, example: Any, by_batch: Collection[nn.Module] = ()) -> dict[bool, Program]:
    """The model as it runs in training (key True) and in evaluation: dropout is in one and not in the other.

    Batch norms normalize by what they have stored in both, those in `by_batch` by the batch. A model whose graph is
    drawn in Python anew in every training step counts as in evaluation: one draw would not hold for the others.
    """
    with preserved_modes(model):
        evaluation = capture_for_rules(_in_mode(model, False, by_batch), example)
        before = drawn_elsewhere()
        alike = _ignores_mode(model, example, by_batch)
        try:
            training = evaluation if alike else capture_for_rules(_in_mode(model, True, by_batch), example)
        except RandomChoice:
            training = evaluation
            warn_of_draws(model, "chooses by torch.rand what it does (LayerDrop skips layers)")
    drawn = drawn_elsewhere() != before
    if drawn:
        warn_of_draws(model, "draws from Python's random or from numpy")
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
    """True if one capture serves for both modes."""
    if any(isinstance(module, _DropoutNd) and module.p for module in model.modules()):
        return False  # without a trace of each mode, which together take almost half as long as a capture
    if all(_is_known_to_ignore_mode(module) for module in model.modules()):
        return True
    args, kwargs = as_arguments(as_example(model, example))
    evaluation = traced_operations(_in_mode(model, False, by_batch), args, kwargs)
    return evaluation is not None and evaluation == traced_operations(_in_mode(model, True, by_batch), args, kwargs)


def _is_known_to_ignore_mode(module: nn.Module) -> bool:
    """True for the modules of torch itself that do the same in both modes."""
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


def with_calls(program: Program, layers: dict[str, Any], moments: Any, like_positions: bool = False) -> CapturedMode:
    """A captured model with the calls of some layers; `like_positions` as in `with_averages_of_like_positions`."""
    program = with_attention_of_like_tokens(program)
    if like_positions:
        program = with_averages_of_like_positions(program)
    return CapturedMode(program, calls_of(program, layers), fitted_inputs(program, moments))


def calls_of(program: Program, layers: dict[str, Any]) -> dict[Node, str]:
    """Every call of a layer, with the layer's path; a layer under several paths is known by its first."""
    path_of = {layer: path for path, layer in layers.items()}
    calls: dict[Node, str] = {}
    for node in program.nodes:
        if node.stack and (is_call_of_linear_layer(node) or operation_of(node) == "recurrent"):
            layer = program.module_of(node)
            if layer in path_of:
                calls[node] = path_of[layer]
    return calls


def reading_constants(programs: Iterable[Program], layers: dict[str, Any], moments: Any) -> frozenset[str]:
    """The called layers that read nothing random in any of a model's graphs: a layer of parameters, or of constants."""
    random: dict[str, bool] = {}
    for program in programs:
        inputs = fitted_inputs(program, moments).items()
        plan = make_plan(program, [node for node, value in inputs if _varies(value)])
        for node, path in calls_of(program, layers).items():
            random[path] = random.get(path, False) or plan.random(node)
    return frozenset(path for path, varies in random.items() if not varies)


def reading_computed(programs: Iterable[Program], layers: dict[str, Any]) -> frozenset[str]:
    """The layers that a model's graphs call with a weight or bias that is no parameter of theirs."""
    calls = ((program, node, path) for program in programs for node, path in calls_of(program, layers).items())
    return frozenset(path for program, node, path in calls if not computes_with_its_own(program, node, layers[path]))


def _varies(value: Any) -> bool:
    return not isinstance(value, Tensor) and not (isinstance(value, Moments) and not bool(value.var.any()))
