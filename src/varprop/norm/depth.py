"""How far the spread of a chain of normalized layers drifts from one, and the warning where that is too far.

Statistics fixed in advance are open-loop: nothing brings back a sample whose scale is off. After a rectifier a scale
off by r comes out as q'(r) = (r^2/2 - r/pi + 1/(2 pi)) / (1/2 - 1/(2 pi)), which is marginal at r = 1 and grows by
pi / (pi - 1) a layer beyond, so that the fluctuations of every finite layer pile up.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.plan import Plan, make_plan
from ..engine.walk import Walk
from ..graph.capture import Program, tensor_at
from ..graph.node import Node
from ..moments import Moments
from .layers import Normalized, normalized_layers
from .statistics import Statistics

aten = torch.ops.aten
THRESHOLD = 1.2  # of the predicted standard deviation
_SAMPLES = 256  # quantiles that stand for the population of samples
_HUGE = 1e200
_NOISE = 16  # quantiles of the fluctuation of each
_OCTAVES = (-4, 6)  # where the response to a scale is tabulated; straight in the logarithms beyond
_FINE, _COARSE = 16, 3  # points an octave


class DepthWarning(UserWarning):
    """A chain of normalized layers without skips is so deep that the spread of its units leaves one."""


@dataclass(frozen=True)
class Spread:
    """What is predicted for a layer's outputs.

    Attributes:
        length: The number of layers in the chain without skips that ends here.
        std: The standard deviation over Gaussian inputs, where the normalization means it to be one.
        before: The layer before it in the chain; None for the first.
    """

    length: int
    std: float
    before: str | None = None


def warn_of_depth(model: nn.Module, stacklevel: int = 3) -> None:
    """Warn of the longest chain of a freshly projected model whose predicted spread exceeds the threshold."""
    try:
        spreads = predict_spread(model)
    except Exception:  # a warning is no reason to fail: whatever cannot be predicted is not warned of
        return
    wide = {path: spread for path, spread in spreads.items() if spread.std > THRESHOLD}
    if wide:
        last = max(wide, key=lambda path: wide[path].length)
        warnings.warn(_message(last, wide[last], _first(last, wide)), DepthWarning, stacklevel)


def _first(path: str, wide: Mapping[str, Spread]) -> str:
    """The layer of the chain to `path` from which on all are too wide."""
    while (before := wide[path].before) in wide:
        path = before  # type: ignore[assignment]
    return path


def _message(last: str, spread: Spread, first: str) -> str:
    return (
        f"Layer '{last}' ends a chain of {spread.length} normalized layers without skips: the spread of its outputs is "
        f"predicted to grow to {spread.std:.3g} instead of 1 (above {THRESHOLD} from layer '{first}' on), because "
        f'means fixed in advance do not bring back a sample whose scale is off. vp.normalize(..., form="deep") and '
        f"vp.init_(..., shift=True) start where most activations do; skips, wider or fewer layers help as well."
    )


@torch.no_grad()
def predict_spread(model: nn.Module) -> dict[str, Spread]:
    """The spread of every normalized layer of a model in evaluation mode, right after projection.

    A chain begins at every layer that reads from the model's input, from several layers, or that is called several
    times; what enters there is taken as Gaussian with the moments the layer expects. From layer to layer a population
    of samples, each with its squared scale q relative to the expected, is mapped by q'(r) of the operations between,
    and fluctuates as the mean of a layer's fan-in squares does. This is the mean over random networks: narrow networks
    scatter about it, most of them below.
    """
    sites = {path: m for path, m in normalized_layers(model).items() if not isinstance(m, nn.RNNBase)}
    followers = _followers(sites)
    later = {path for paths in followers.values() for path in paths}
    gaussian = torch.ones(_SAMPLES, dtype=torch.float64), torch.full((_SAMPLES,), 2.0, dtype=torch.float64)
    waiting = [(path, _Chain(None, 1, *gaussian, _Window(sites[path]))) for path in sites if path not in later]
    found: dict[str, Spread] = {}
    known: dict[str, _Response] = {}
    while waiting:
        path, chain = waiting.pop()
        population = chain.population()
        found[path] = Spread(chain.length, math.sqrt(population.mean()), chain.before)
        for follower in followers.get(path, ()):
            site = sites[follower]
            mapped = _known_response(site, known)(population)
            waiting.append((follower, _Chain(path, chain.length + 1, *mapped, _Window(site, chain.window))))
    return found


def _followers(sites: Mapping[str, Normalized]) -> dict[str, list[str]]:
    """The layers that read from one layer only, by the path of that."""
    found: dict[str, list[str]] = {}
    for path, site in sites.items():
        before = _only_source(site.statistics[False])
        if before is not None and before in sites:
            found.setdefault(before, []).append(path)
    return found


def _only_source(statistics: Statistics) -> str | None:
    """The layer that all randomness comes from in the only call, unless another weight matrix stands between."""
    single = len(statistics.sources) == len(statistics.targets) == 1
    fixed = all(isinstance(value, Tensor) for value in statistics.inputs.values())
    matrices = any(tensor_at(statistics.root, name).ndim > 1 for name in statistics.state.values())
    return next(iter(statistics.sources.values())) if single and fixed and not matrices else None


class _Window:
    """The values whose squares average out in a layer's output: the channels of every place that takes part.

    All groups count, for a sample's scale is common to them. The scale of a place is an average over the windows of all
    convolutions so far. The j-fold average over k places has about the weights of a Gaussian of variance
    j (k^2 - 1) / 12, which is the average over sqrt(1 + j (k^2 - 1) pi / 3) places (both sides agree for j = 1).
    """

    def __init__(self, site: Any, before: _Window | None = None) -> None:
        kernel = site.weight.shape[2:]
        self.extents = site.statistics[False].targets[0].form.shape[2:] if len(kernel) else torch.Size()
        self.reach = [float(k * k - 1) for k in kernel]
        if before is not None and len(before.reach) == len(kernel):
            scaled = zip(before.reach, self.extents, before.extents, strict=True)
            self.reach = [r + past * (new / old) ** 2 for r, (past, new, old) in zip(self.reach, scaled, strict=True)]
        channels = site.in_features if isinstance(site, nn.Linear) else site.in_channels
        places = [min(n, math.sqrt(1 + r * math.pi / 3)) for n, r in zip(self.extents, self.reach, strict=True)]
        self.count = float(channels) * math.prod(places)


@dataclass(frozen=True)
class _Chain:
    """What enters a layer: mean square and relative variance of one square for a population of samples."""

    before: str | None
    length: int
    squares: Tensor
    variances: Tensor
    window: _Window

    def population(self) -> Tensor:
        """The squared scales after each sample's mean over the window has fluctuated.

        Such a mean is a chi-square variable in essence: the cube of a normal one, after Wilson and Hilferty (1931).
        """
        v = (self.variances / self.window.count).clamp(max=2.0).unsqueeze(-1)
        factors = (1 - v / 9 + _normal_quantiles(_NOISE) * v.sqrt() / 3).clamp(min=0).pow(3)
        drawn = self.squares.unsqueeze(-1) * factors / factors.mean(-1, keepdim=True)
        population: Tensor = drawn.flatten().sort().values.view(_SAMPLES, _NOISE).mean(1)
        return population.clamp(max=_HUGE)


def _normal_quantiles(count: int) -> Tensor:
    z = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    unit: Tensor = z / z.square().mean().sqrt()
    return unit


@dataclass(frozen=True)
class _Response:
    """What comes out of the operations between two layers where a sample's scale is off, over log2 of the scale."""

    log_squares: Tensor
    log_variances: Tensor
    per_octave: int

    def __call__(self, population: Tensor) -> tuple[Tensor, Tensor]:
        """For squared scales q = r^2: the mean squared deviation q'(r), and the relative variance of one square."""
        return self._at(population, self.log_squares), self._at(population, self.log_variances)

    def _at(self, population: Tensor, table: Tensor) -> Tensor:
        """Parabolas through three neighbours, continued straight beyond the table's ends."""
        place = (population.clamp(min=1e-300).log2() / 2 - _OCTAVES[0]) * self.per_octave
        middle = place.round().clamp(1, len(table) - 2)
        u, beyond = (place - middle).clamp(-1, 1), (place - middle) - (place - middle).clamp(-1, 1)
        left, centre, right = (table[middle.long() + step] for step in (-1, 0, 1))
        curve = centre + u * (right - left) / 2 + u.square() * (right - 2 * centre + left) / 2
        return (curve + beyond * torch.where(beyond > 0, right - centre, centre - left)).exp()


def _known_response(site: Normalized, known: dict[str, _Response]) -> _Response:
    """The response, computed once for all layers with the same operations before them."""
    statistics = site.statistics[False]
    key = repr((statistics.key(), site.center, site.centred_rows, _mean_before(statistics)))
    if key not in known:
        known[key] = _response(statistics, site.center, site.centred_rows)
    return known[key]


def _response(statistics: Statistics, center: bool, centred_rows: bool) -> _Response:
    """Tabulate; for elementwise operations all scales lie along the batch axis of one walk."""
    plan = make_plan(_program(statistics, statistics.nodes), statistics.sources)
    together = all(plan.inside_cluster(node) for node in statistics.nodes if plan.random(node))
    per_octave = _FINE if together else _COARSE
    low, high = (end * per_octave for end in _OCTAVES)
    scales = torch.exp2(torch.arange(low, high + 1, dtype=torch.float64) / per_octave)
    (target,) = statistics.targets
    expected = _walk(statistics, plan, torch.ones(1, dtype=torch.float64)).value(target)
    mean = expected.mean if center else torch.zeros_like(expected.mean)
    rows = [_squares(statistics, mean, part, centred_rows) for part in ([scales] if together else scales.split(1))]
    squares, variances = (torch.cat(column).double().clamp(min=1e-300) for column in zip(*rows, strict=True))
    return _Response((squares / squares[-low]).log(), (variances / squares.square()).log(), per_octave)


def _squares(statistics: Statistics, mean: Tensor, scales: Tensor, centred_rows: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance of one squared deviation from `mean` for every scale, over all channels.

    Centred rows do not see what the deviations of all channels have in common.
    """
    (target,) = statistics.targets
    expected = Node("expected")
    deviation = Node("deviation", aten.sub.Tensor, (target, expected), form=target.form)
    target.users.remove(deviation)  # a guest in this graph
    square = Node("square", aten.square.default, (deviation,), form=target.form)
    plan = make_plan(_program(statistics, [*statistics.nodes, deviation, square]), statistics.sources)
    walk = _walk(statistics, plan, scales, {expected: mean})
    found, common = walk.value(square), walk.value(deviation).mean.reshape(len(scales), -1).mean(1)
    means, variances = (part.reshape(len(scales), -1) for part in (found.mean, found.var))
    spread = (means - means.mean(1, keepdim=True)).square()
    return means.mean(1) - centred_rows * common.square(), (variances + spread).mean(1)


def _walk(statistics: Statistics, plan: Plan, scales: Tensor, given: dict[Node, Any] | None = None) -> Walk:
    """Run the operations on outputs with the mean they start with, whose standard deviations are the scales."""
    (source,) = statistics.sources
    var = scales.square().view(-1, *[1] * (source.ndim - 1)).to(next(statistics.root.parameters()).device)
    mean = torch.full_like(var, _mean_before(statistics))
    env = statistics.given_values() | (given or {}) | {source: Moments(mean, var, source.form.shape)}
    walk = Walk(plan, env, annotate=False)
    walk.run()
    return walk


def _mean_before(statistics: Statistics) -> float:
    """The mean that the layer before starts with, in all its channels."""
    (path,) = statistics.sources.values()
    layer: Any = statistics.root.get_submodule(path)
    return float(layer.shift.mean())


def _program(statistics: Statistics, nodes: list[Node]) -> Program:
    return Program(statistics.root, nodes, [], statistics.state, statistics.constants, [], None)
