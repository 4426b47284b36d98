"""`vp.predict`: the outputs of a trained network with their uncertainty, in one pass and without sampling."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.api import capture, plan_for
from ..engine.plan import Plan, require_complete
from ..errors import CaptureError, VarpropError
from ..graph.capture import ONE_AT_A_TIME, require_module
from ..graph.node import Node, TensorInfo
from ..graph.program import Program
from ..graph.tracing import preserved_modes
from ..moments import Moments, trusted
from ..rules.registry import lookup
from .adjoint import MeanEvaluation, precise
from .compiled import CompiledPredictions
from .cuda_replay import PredictionGraphs
from .draws import combine_with_draws, shared_products
from .last_function import LastFunction
from .noise import ElementNoise, ParameterNoise, ParameterUse, Source
from .prediction import Prediction, SourceShare, each_tensor
from .reliability import Grounds, holds
from .samples import SampleTrace

Random = str | Iterable[str] | Callable[[str, nn.Module], bool]
MOST_OUTPUTS = 256  # more have to be chosen: every output costs about a forward pass
AT_ONCE = 1 << 24  # derivatives of some outputs at a time on a CPU: what is at work should stay in its cache
HALF = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
MEMORY = 4 << 30  # bytes for derivatives of all outputs by all sources of one batch; on CUDA half of the device's


def predict(
    model: nn.Module | Program,
    x: Tensor,
    *,
    input_var: Tensor | float | None = None,
    parameter_var: Mapping[str, Tensor | float] | None = None,
    outputs: int | Sequence[int] | slice | Tensor | None = None,
    random: Random | None = None,
    draws: int = 0,
    compile: bool = False,
) -> Prediction:
    """Mean and covariance of a network's outputs under dropout, noisy inputs and uncertain weights.

    One forward pass of the rules, and one backward pass for all outputs, take the place of many runs of the network
    with drawn noise: they cost from two to some thirteen forward passes for one output (the page on error bars has a
    table), and one to two more for every further one. Correlations between units are followed to first order through
    the whole graph; what is left out is how the curvature of one layer correlates units of the next
    (`Prediction.reliable` says where that matters).

    Dropout and other noise layers are at work (`random`), everything else is in evaluation mode: batch norms use their
    stored statistics. The model itself is not changed.

    Args:
        model: Any model `torch.export` can trace, or the result of `capture`, which keeps the modes it was captured in.
        x: A batch of inputs; the first axis runs over samples, which the model must not mix.
        input_var: Variance of the input's elements, a number or a tensor that broadcasts to `x`.
        parameter_var: Variances of parameters by name, as a mean-field posterior has them; tensors of the parameters'
            shapes, or numbers.
        outputs: Which outputs, as flat indices of one sample's output, a slice or a mask of them, or directions as a
            tensor ``(k, *output shape)``, such as the difference of two logits; all of them if left out.
        random: The modules whose noise counts: a path or several, or a predicate called as ``random(path, module)``. If
            left out: dropout and drop-path modules, recurrent layers and `torch.nn.MultiheadAttention` that drop out,
            and modules that call a dropout of `torch.nn.functional`. What a module of your own draws otherwise, such as
            the ``dropout_p`` of an attention, leaves no trace in evaluation: name it.
        draws: How many real draws to add, where `Prediction.reliable` is False. The analytic result serves as their
            control variate: where it is right a few draws are as good as many, and where it is not they correct it.
            Where only the input is noisy they also give derivatives, which tell the covariance of a network of many
            inputs from 8 to 16 draws; each then costs a forward pass, and one more for every output.
        compile: Compile the prediction by TorchInductor: the first call for some shapes of inputs, outputs and
            variances takes from seconds to minutes, those that follow about half the time. For a captured program that
            is called many times; draws are not compiled, random weights that positions share cannot be.

    Returns:
        The prediction for every sample.

    Raises:
        ValueError: If nothing is random, a variance is negative or of a wrong shape, or there are too many outputs.
        CaptureError: If the model is no module, or cannot be run on x.
        MissingRule: If operations on the random path have no rule.

    Example:
        >>> import torch, varprop as vp
        >>> nn = torch.nn
        >>> model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))
        >>> prediction = vp.predict(model, torch.randn(8, 4))
        >>> prediction.mean.shape, prediction.std.shape, prediction.covariance.shape
        (torch.Size([8, 3]), torch.Size([8, 3]), torch.Size([8, 3, 3]))
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.ndim < 1 or len(x) == 0:
        raise ValueError(
            "predict takes a batch of inputs, at least one, as a dense tensor whose first axis runs over samples."
        )
    if isinstance(draws, bool) or not isinstance(draws, int) or not (draws == 0 or draws >= 4):
        raise ValueError(f"draws takes a whole number of at least 4, which a regression needs, or 0, not {draws!r}.")
    if isinstance(model, Program) and random is not None:
        raise ValueError("random= chooses modules before a model is captured: a captured program keeps its modes.")
    if compile and not isinstance(model, Program):
        raise ValueError(
            "compile=True needs a captured program, which keeps what was compiled: program = vp.capture(model, x) with "
            "noise layers alone in training mode, then vp.predict(program, x, compile=True)."
        )
    # half precision is too coarse for variances, and derivatives are needed whatever the caller has switched off
    alone = contextlib.nullcontext() if isinstance(model, Program) else ONE_AT_A_TIME
    with alone, torch.inference_mode(False), torch.autocast(x.device.type, enabled=False):
        try:
            return _predict(model, _usable(x), input_var, parameter_var, outputs, random, draws, compile)
        except RuntimeError as error:
            if isinstance(model, Program):
                _require_dtypes(model, x)
            elif x.dtype not in {value.dtype for value in model.state_dict().values()}:
                raise CaptureError(f"The model could not be run on x of {x.dtype}: {error}") from error
            raise


def _usable(values: Tensor) -> Tensor:
    """A copy of a tensor that was made in inference mode, with which autograd refuses to work; others as they are."""
    return values.clone() if values.is_inference() else values


def _predict(
    model: nn.Module | Program,
    x: Tensor,
    input_var: Tensor | float | None,
    parameter_var: Mapping[str, Tensor | float] | None,
    outputs: Any,
    random: Random | None,
    draws: int,
    compiled: bool,
) -> Prediction:
    program = model if isinstance(model, Program) else _captured(model, x, random)
    if len(program.inputs) != 1 or len(program.outputs) != 1:
        raise ValueError(
            f"predict takes models with one tensor input and one output, not {len(program.inputs)} and "
            f"{len(program.outputs)}: wrap the model in one that fixes the other inputs and returns one output."
        )
    size = program.inputs[0].info.shape[0]
    if tuple(program.inputs[0].info.shape[1:]) != tuple(x.shape[1:]):
        raise ValueError(
            f"The model was captured with samples of shape {tuple(program.inputs[0].info.shape[1:])}, but x has "
            f"{tuple(x.shape[1:])}."
        )
    info = getattr(program.outputs[0], "info", None)
    if not isinstance(info, TensorInfo) or info.shape[:1] != (size,) or not info.dtype.is_floating_point:
        raise ValueError(
            f"predict takes models whose output is a tensor of real numbers with samples along its first axis: for "
            f"{size} samples this one returns {_described(info)}."
        )
    if input_var is not None and not x.is_floating_point():
        raise ValueError(f"input_var needs inputs of a floating point dtype: x has {x.dtype}.")
    var = None if input_var is None else _checked_variances({"input_var": (input_var, x)})[0]
    parameters = _random_parameters(program, parameter_var or {})
    sources = (*(program.inputs if var is not None else ()), *parameters)
    plan = plan_for(program, sources)
    require_complete(plan, "leave out what makes them random")
    if places := next((node for node in program.nodes if node in plan.drawn), None):
        raise VarpropError(
            f"'{places.module or '(model)'}' reads at random positions ({places.packet or places.target}), a noise "
            "that cannot be followed: let it do so in training mode alone, and leave it out of random=."
        )
    _require_random(plan, program)
    directions = _directions(info, x.device, outputs)
    by_directions = isinstance(outputs, Tensor) and outputs.is_floating_point()
    last = None if draws or by_directions else LastFunction.of(plan, sources)
    pieces = []
    for start in range(0, len(x), size):
        count = min(size, len(x) - start)
        batch = _filled(x[start : start + count], size)
        batch_var = None if var is None else _filled(var[start : start + count], size)
        before = plan if last is None else last.before
        prediction = _predict_batch(before, batch, batch_var, parameters, directions, draws, compiled, count)
        pieces.append(prediction if last is None else last.after(prediction, directions.argmax(1)))
    return pieces[0] if len(pieces) == 1 else _joined(pieces)


def _require_dtypes(program: Program, x: Tensor) -> None:
    """Refuse what has another dtype than it had when the program was captured, but for half precision."""
    read = {"x": (program.inputs[0], x)} if len(program.inputs) == 1 else {}
    read |= {program.state[node]: (node, value) for node, value in program.tensors().items() if node in program.state}
    for name, (node, value) in read.items():
        if HALF.get(node.info.dtype, node.info.dtype) is not HALF.get(value.dtype, value.dtype):
            raise ValueError(
                f"The model was captured with '{name}' of {node.info.dtype}, and it has {value.dtype} now: convert it, "
                "or capture the model again."
            )


def _described(info: Any) -> str:
    return f"shape {tuple(info.shape)} of {info.dtype}" if isinstance(info, TensorInfo) else "none"


def _filled(values: Tensor, size: int) -> Tensor:
    """A batch of the captured size, with copies of the last sample where some are missing."""
    missing = size - len(values)
    return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])]) if missing else values


def _captured(model: nn.Module, x: Tensor, random: Random | None) -> Program:
    """The model with its noise layers at work and everything else in evaluation mode."""
    require_module(model)
    chooses = callable(random) and not isinstance(random, (nn.Module, type))
    if not (random is None or chooses or (isinstance(random, Iterable) and not isinstance(random, nn.Module))):
        raise ValueError(f"random takes paths of modules or a function of path and module, not {random!r}.")
    paths = [] if random is None or callable(random) else [random] if isinstance(random, str) else list(random)
    if unknown := sorted({*paths} - {path for path, _ in model.named_modules()}):
        raise ValueError(f"random names '{unknown[0]}', which is no module of the model.")
    with preserved_modes(model):
        model.eval()
        for path, module in model.named_modules():
            if path in paths or _is_random(path, module, random):
                module.train()
        program = capture(model, x)
        functional = [model.get_submodule(path) for path in program.idle]
        functional = [module for module in functional if not module.training] if random is None else []
        if not functional:
            return program
        for module in functional:
            module.training = True  # and not what is in it
        try:
            return capture(model, x)
        except CaptureError as error:
            raise CaptureError(
                f"'{program.idle[0] or '(model)'}' calls a dropout that is idle in evaluation, and the model cannot be "
                f"captured with it at work; name the modules whose noise counts by random=. {error}"
            ) from error


def _is_random(path: str, module: nn.Module, random: Random | None) -> bool:
    if random is None:
        name = type(module).__name__.lower()
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            return module.dropout > 0
        return not list(module.children()) and ("dropout" in name or "droppath" in name or "stochasticdepth" in name)
    return callable(random) and random(path, module)


def _checked_variances(named: Mapping[str, tuple[Tensor | float, Tensor]]) -> list[Tensor]:
    """Variances as tensors of the shape, dtype and device of what they belong to, by the name of the argument."""
    values = []
    for name, (value, like) in named.items():
        if not isinstance(value, (Tensor, int, float)) or (isinstance(value, Tensor) and value.is_complex()):
            raise ValueError(f"{name} takes a number or a tensor, not {type(value).__name__}.")
        var = _usable(torch.as_tensor(value, dtype=_working(like.dtype), device=like.device)).detach()
        try:
            values.append(var.expand(like.shape))
        except RuntimeError:
            raise ValueError(
                f"{name} has shape {tuple(var.shape)}, which does not broadcast to {tuple(like.shape)}."
            ) from None
    # one look at all tensors: every look waits for a GPU
    tensors = [var for var, (value, _) in zip(values, named.values(), strict=True) if isinstance(value, Tensor)]
    looked = iter(torch.stack([torch.stack(var.aminmax()).double() for var in tensors]).tolist() if tensors else [])
    ends = [next(looked) if isinstance(value, Tensor) else (value, value) for value, _ in named.values()]
    for name, (lowest, highest) in zip(named, ends, strict=True):
        if not (lowest >= 0 and highest < math.inf):
            raise ValueError(f"{name} must be finite and not negative: it lies between {lowest} and {highest}.")
    return values


def _random_parameters(program: Program, variances: Mapping[str, Tensor | float]) -> dict[Node, Tensor]:
    """Variances of random parameters, of their shapes."""
    if not isinstance(variances, Mapping):
        raise ValueError(f"parameter_var takes variances by names of parameters, not {type(variances).__name__}.")
    names = {name: node for node, name in program.state.items()}
    unknown = [name for name in variances if name not in names]
    if unknown:
        raise ValueError(
            f"parameter_var names '{unknown[0]}', which the model does not use: it has "
            f"{', '.join(list(names)[:6])}, ..."
        )
    tensors = program.tensors() if variances else {}
    read = {id(tensors[node]): node for node in program.state if variances and node.users}  # of tied ones one is read
    named = {f"parameter_var['{name}']": (var, tensors[names[name]].detach()) for name, var in variances.items()}
    random: dict[Node, Tensor] = {}
    for name, var in zip(variances, _checked_variances(named), strict=True):
        node = read.get(id(tensors[names[name]]), names[name])
        if random.setdefault(node, var) is not var and not torch.equal(random[node], var):
            raise ValueError(f"parameter_var gives '{name}' another variance than a parameter that is tied to it.")
    return random


@dataclass(frozen=True)
class _Analysis:
    """A prediction, and what draws need beside it."""

    prediction: Prediction
    evaluation: MeanEvaluation
    sources: list[Source]
    gradients: list[list[Tensor]]


def _predict_batch(
    plan: Plan,
    x: Tensor,
    input_var: Tensor | None,
    parameters: dict[Node, Tensor],
    directions: Tensor,
    draws: int,
    compiled: bool,
    count: int,
) -> Prediction:
    """The prediction for the first `count` samples of a batch of the captured size."""
    program = plan.program

    def analysed(state: dict[Node, Any], x: Tensor, directions: Tensor, *variances: Tensor) -> _Analysis:
        first = () if input_var is None else variances[:1]
        by_node = dict(zip(parameters, variances[len(first) :], strict=True))
        return _analysed(plan, state, x, first[0] if first else None, by_node, directions)

    def predicted(*inputs: Tensor) -> Prediction:
        state = program.tensors()
        if not compiled:
            return analysed(state, *inputs).prediction
        nodes = [node for node, value in state.items() if isinstance(value, Tensor)]

        def work(*tensors: Tensor) -> Prediction:
            values = dict(zip(nodes, tensors[len(inputs) :], strict=True))
            return analysed({**state, **values}, *tensors[: len(inputs)]).prediction

        functions = program.once(CompiledPredictions, CompiledPredictions)
        return functions.run(plan, [*inputs, *(state[node] for node in nodes)], work)

    tensors = [x, directions, *(() if input_var is None else (input_var,)), *parameters.values()]
    if draws:
        analysis = analysed(program.tensors(), *tensors)
        prediction = analysis.prediction
    elif x.is_cuda:
        prediction = program.once(PredictionGraphs, PredictionGraphs).run(plan, tensors, predicted, compiled)
    else:
        prediction = predicted(*tensors)
    if count < len(x):
        prediction = each_tensor(prediction, lambda value: value[:count])
    if not draws:
        return prediction
    with torch.no_grad():
        evaluation, sources, gradients = analysis.evaluation, analysis.sources, analysis.gradients
        return combine_with_draws(prediction, evaluation, sources, x, directions, gradients, draws, count)


def _analysed(
    plan: Plan,
    state: dict[Node, Any],
    x: Tensor,
    input_var: Tensor | None,
    parameters: dict[Node, Tensor],
    directions: Tensor,
) -> _Analysis:
    """One forward pass of the rules, and one backward pass for all directions."""
    program, x = plan.program, precise(x.detach())
    (entry,) = program.inputs
    env: dict[Node, Any] = {node: precise(v.detach()) if isinstance(v, Tensor) else v for node, v in state.items()}
    env[entry] = x
    sources: list[Source] = []
    with torch.enable_grad():
        with trusted():  # checked before
            env |= {node: Moments(env[node], var) for node, var in parameters.items()}
            if input_var is not None:
                input_mean = x.detach().requires_grad_()
                env[entry] = Moments(input_mean, input_var)
                sources.append(ElementNoise(program.names[0], "input", input_mean, input_var, entry))
        noise = {node: ParameterNoise(program.state[node], var) for node, var in parameters.items()}
        evaluation = MeanEvaluation(plan, env, noise)
        evaluation.run()
        mean = evaluation.value(program.outputs[0]).dense().mean
        sources += [*evaluation.sources, *(parameter for parameter in noise.values() if parameter.uses)]
        sources += shared_products(evaluation, sources, x)
        directions = directions.to(mean.dtype)
        _find_samples(program, mean, sources)
        _require_memory(mean, len(directions), sources)
        gradients = _gradients(mean, directions, sources)
    with torch.no_grad():
        covariance, shares, by_input = mean.new_zeros(()), [], None
        for source, gradient in zip(sources, gradients, strict=True):
            added = source.covariance(gradient)
            covariance = covariance + added
            shares.append(SourceShare(source.name, source.kind, added.diagonal(dim1=-2, dim2=-1)))
            if isinstance(source, ElementNoise) and source.kind == "input":
                by_input = (gradient[0].square() * source.var).movedim(0, 1)
        if len(directions) > 1:
            covariance = 0.5 * (covariance + covariance.mT)  # to the last digit
        diagonal = evaluation.value(program.outputs[0]).dense().var.reshape(len(mean), -1) @ directions.square().T
        prediction = Prediction(
            mean.detach().reshape(len(mean), -1) @ directions.T,
            covariance,
            tuple(shares),
            by_input,
            holds(Grounds.of(shares, diagonal, mean.detach(), directions, evaluation.attends)),
            diagonal,
            dict(evaluation.linearized),
        )
    return _Analysis(prediction, evaluation, sources, gradients)


def _find_samples(program: Program, mean: Tensor, sources: list[Source]) -> None:
    """Tell every source where the samples are in its entries."""
    readers: list[ElementNoise | ParameterUse] = [source for source in sources if isinstance(source, ElementNoise)]
    readers += [use for source in sources if isinstance(source, ParameterNoise) for use in source.uses]
    trace = program.once(SampleTrace, SampleTrace)
    samples = trace.complete({reader.place: reader.entry for reader in readers}, mean)
    for reader in readers:
        reader.samples = samples[reader.place]


def _working(dtype: torch.dtype) -> torch.dtype:
    """The dtype that moments are computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _require_random(plan: Plan, program: Program) -> None:
    output = program.outputs[0]
    if not (isinstance(output, Node) and plan.random(output)):
        raise ValueError(
            "Nothing that reaches the output is random: the model has no dropout at work. Give input_var or "
            "parameter_var, name the modules with noise by random=, or capture the model with these in training mode."
        )
    samples = program.inputs[0].info.shape[:1]
    for node in program.nodes:
        rule = lookup(node.target)
        in_training = rule is not None and rule.multilinear and rule.normalizes(*node.args, **node.kwargs)
        if in_training and node.args[0].info.shape[:1] == samples:
            raise ValueError(
                f"The batch norm '{node.module}' was captured in training mode, in which it mixes samples: capture the "
                "model in evaluation mode, with its noise layers alone in training mode."
            )


def _directions(info: TensorInfo, device: torch.device, outputs: Any) -> Tensor:
    """The output directions as rows, (k, elements of one sample's output)."""
    shape, dtype = info.shape[1:], _working(info.dtype)
    elements = shape.numel()
    if isinstance(outputs, Tensor) and outputs.is_floating_point():
        if outputs.shape[1:] != shape or outputs.ndim == 0 or len(outputs) == 0:
            raise ValueError(
                f"Directions must have shape (k, {', '.join(map(str, shape))}), not {tuple(outputs.shape)}."
            )
        return _usable(outputs.detach()).reshape(len(outputs), elements).to(device, dtype)
    if outputs is None:
        if elements > MOST_OUTPUTS:
            raise ValueError(
                f"The model has {elements} outputs a sample, and every one costs about a forward pass: choose some by "
                f"outputs=, as flat indices or directions."
            )
        return torch.eye(elements, dtype=dtype, device=device)
    index = _indices(elements, outputs)
    if len(index) * elements * dtype.itemsize > MEMORY:
        fits = max(1, MEMORY // (elements * dtype.itemsize))
        raise ValueError(f"{len(index)} outputs of {elements} are too many for memory: ask for {fits} at a time.")
    return torch.zeros(len(index), elements, dtype=dtype).scatter_(1, index.unsqueeze(1), 1).to(device)


def _indices(elements: int, outputs: Any) -> Tensor:
    """Flat indices of one sample's outputs, from a number, several, a slice or a mask."""
    if isinstance(outputs, slice):
        outputs = range(elements)[outputs]
    whole = [outputs] if type(outputs) is int else outputs
    if isinstance(whole, (list, tuple, range)) and whole and all(type(i) is int for i in whole):
        if outside := [i for i in whole if not -elements <= i < elements]:
            raise ValueError(f"outputs names index {outside[0]}, but a sample has {elements} outputs.")
        return torch.tensor([i % elements for i in whole])
    try:
        index = torch.as_tensor(outputs, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        index = torch.zeros(0)
    if index.dtype is torch.bool and index.numel() == elements and index.ndim > 0:
        index = index.flatten().nonzero().flatten()
    index = index.reshape(1) if index.ndim == 0 else index
    if index.ndim != 1 or not len(index) or index.is_floating_point() or index.dtype is torch.bool:
        raise ValueError(
            f"outputs takes flat indices of one sample's outputs, a slice or a mask of them, or directions as a "
            f"floating point tensor (k, *output shape), not {outputs!r:.80}."
        )
    beyond = index[(index < -elements) | (index >= elements)]
    if len(beyond):
        raise ValueError(f"outputs names index {int(beyond[0])}, but a sample has {elements} outputs.")
    return index % elements


def _require_memory(mean: Tensor, outputs: int, sources: list[Source]) -> None:
    """Refuse what does not fit: all derivatives by entries, and one source at a time with its factors."""
    entries = {id(entry): entry.numel() for source in sources for entry in source.entries}
    each = (sum(entries.values()) + 2 * max(source.width for source in sources)) * mean.element_size()
    pairs = 3 * len(mean) * mean.element_size()  # of covariances: of one source, their sum, and what is added
    most = torch.cuda.get_device_properties(mean.device).total_memory // 2 if mean.is_cuda else MEMORY
    needed = each * outputs + pairs * outputs**2
    if needed > most and outputs > 1:
        fits = max(1, int((math.sqrt(each**2 + 4.0 * pairs * most) - each) / (2 * pairs)))
        raise ValueError(
            f"{outputs} outputs for {len(mean)} samples at a time need {needed / 2**30:.1f} GiB of derivatives and "
            f"covariances: {fits} outputs fit, or {max(1, len(mean) * most // needed)} samples at a time."
        )


def _gradients(mean: Tensor, directions: Tensor, sources: list[Source]) -> list[list[Tensor]]:
    """For every source, derivatives of all outputs by its entries, (outputs, batch, ...), in one backward pass."""
    entries = {id(entry): entry for source in sources for entry in source.entries}
    along = directions.view(-1, 1, *mean.shape[1:]).expand(-1, *mean.shape)
    values = list(entries.values())

    def pulled(direction: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(mean, values, direction, retain_graph=True, materialize_grads=True)

    if len(along) == 1:
        by_entry = pulled(along[0])
    else:
        together = None if mean.is_cuda else max(1, AT_ONCE // sum(value.numel() for value in values))
        by_entry = torch.vmap(pulled, chunk_size=together)(along)
    found = {
        key: gradient.reshape(len(along), *entry.shape)
        for (key, entry), gradient in zip(entries.items(), by_entry, strict=True)
    }
    return [[found[id(entry)] for entry in source.entries] for source in sources]


def _joined(pieces: list[Prediction]) -> Prediction:
    """The predictions of several batches as one."""

    def joined(name: str, axis: int = 0) -> Any:
        values = [getattr(piece, name) for piece in pieces]
        return None if values[0] is None else torch.cat(values, axis)

    by_sample = ("mean", "covariance", "input_variance", "reliable", "diagonal_var")
    shares = tuple(
        replace(same[0], variance=torch.cat([share.variance for share in same]))
        for same in zip(*(piece.shares for piece in pieces), strict=True)
    )
    return replace(pieces[0], shares=shares, draws=joined("draws", 1), **{name: joined(name) for name in by_sample})
