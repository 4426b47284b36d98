"""The integrals of softmax for many logits at a time: polynomials in mean and std in place of an integral a logit.

F(t) = E exp(-e^{X - t}) and the moments of softmax are smooth functions of a logit's mean and std, so that those of
all logits of a call follow from their values on a small grid of Chebyshev nodes: the sum of log F over a row needs the
row's sums of products of Chebyshev polynomials, and the moments of each logit are a polynomial whose coefficients are
the row's. The integrals themselves are those of `softmax` (mathematics.md, section 8).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .chebyshev import Range, transform
from .gumbel import FINE, gumbel

Parts = tuple[Tensor, Tensor, Tensor, Tensor]
Direct = Callable[[Tensor, Tensor], Parts]
Solver = Callable[[Tensor, Tensor], Parts | None]

STEP = 0.4  # of t: the density of T is no narrower than Gumbel's, for which the trapezoidal rule is then exact to 1e-9
LEFT, RIGHT, SPREAD = 3.7, 14.0, 5.5  # ends of t beyond the logits, and their range in std
LOST = 30.0  # a logit so far below the largest, and eight of its std, has no weight
CLOSE = 4e-7  # how small the last coefficients must be: of the sum of log F
NEVER = -30.0  # log of a probability that is neglected
SIZES = ((6, 5), (10, 6), (16, 8), (24, 10), (36, 14), (54, 18), (80, 24))  # nodes in mean and std to be tried in turn
HOPELESS = (16, 0.1)  # with so many nodes in mean, what never converges is larger than this, what does is smaller
SHORT = 8  # logits that count in a row which is not worth sharing
MOST = 400  # nodes of t
TRIED = 32  # rows on which a size is tried first
BLOCK = 1 << 18  # values of polynomials held at a time
LEAST = 2e-3  # the least width of an interval
EULER = 0.57721566490153286


class Coefficients(NamedTuple):
    """Coefficients (mean x std x t) of log F and of E[a e^-a] / F and E[a^2 e^-a] / F, scaled by e^-m/2 and e^-m."""

    log_f: Tensor
    first: Tensor
    second: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """Nodes in mean and std."""
        return self.log_f.shape[0], self.log_f.shape[1]


class Nodes(NamedTuple):
    """The nodes of t: multiples of STEP, so that calls of like logits have the same."""

    start: int
    total: int

    def values(self, like: Tensor) -> Tensor:
        """The nodes themselves."""
        return STEP * torch.arange(self.start, self.start + self.total, dtype=like.dtype)


def _table(nodes: Nodes, means: Range, stds: Range, size: tuple[int, int]) -> Coefficients:
    """A function of numbers alone: small ones are kept, for the layers of a model have logits that are alike."""
    return (_kept_table if size[0] <= 24 else _make_table)(nodes, means, stds, size)


@torch.inference_mode(False)
@torch.no_grad()
def _make_table(nodes: Nodes, means: Range, stds: Range, size: tuple[int, int]) -> Coefficients:
    t = nodes.values(torch.empty(0, dtype=torch.float64))
    m, s = means.nodes(size[0], t)[:, None, None], stds.nodes(size[1], t)[:, None]
    f0, f1, f2 = gumbel(m, s.abs(), t, FINE)
    f0 = f0.clamp(min=1e-150)
    values = torch.log(f0), f1 / f0 * torch.exp(-0.5 * m), f2 / f0 * torch.exp(-m)
    by_mean, by_std = transform(size[0], t), transform(size[1], t)
    return Coefficients(*(torch.einsum("am,bs,mst->abt", by_mean, by_std, v) for v in values))


_kept_table = functools.lru_cache(maxsize=64)(_make_table)


def _tail(coefficients: Tensor) -> Tensor:
    """The size of the last coefficients, those of the two highest degrees in either variable."""
    return torch.maximum(coefficients[-2:].abs().amax((0, 1)), coefficients[:, -2:].abs().amax((0, 1)))


def _rounded(size: float, up: bool) -> float:
    """The next sixteenth of an octave: equal intervals for calls that are alike, none much wider than it must be."""
    if size < LEAST:
        return LEAST if up else 0.0
    power = 16.0 * math.log2(size)
    return math.exp2((math.ceil(power) if up else math.floor(power)) / 16.0)


def _range(low: float, high: float) -> Range:
    return Range(0.5 * (low + high), max(0.5 * (high - low), 0.5 * LEAST))


class LogitRows(NamedTuple):
    """The logits of a call as rows, which of them are lost, the nodes of t, and intervals of means and std."""

    mean: Tensor
    std: Tensor
    lost: Tensor
    nodes: Nodes
    means: Range
    stds: Range

    @property
    def t(self) -> Tensor:
        """The nodes of t."""
        return self.nodes.values(self.mean)

    def part(self, rows: slice) -> "LogitRows":
        """Some of the rows."""
        return self._replace(mean=self.mean[rows], std=self.std[rows], lost=self.lost[rows])


def _call(mean: Tensor, std: Tensor) -> LogitRows | None:
    mu, sd = mean.detach(), std.detach()
    lost = mu + 8.0 * sd < -LOST
    kept_mean, kept_std = mu[~lost], sd[~lost]
    if not len(kept_mean) or not bool(torch.isfinite(kept_mean).all() & torch.isfinite(kept_std).all()):
        return None
    low = (mu - SPREAD * sd).masked_fill(lost, -math.inf).amax(-1).clamp(min=-1e3).amin() - LEFT
    high = (kept_mean + SPREAD * kept_std).amax() + math.log(mu.shape[-1]) + RIGHT
    first = 5 * math.floor(float(low) / (5 * STEP))
    count = 10 * math.ceil((float(high) / STEP + 1 - first) / 10)
    if count > MOST:
        return None
    means = _range(-_rounded(-float(kept_mean.amin()), up=True), 0.0)
    stds = _range(_rounded(float(kept_std.amin()), up=False), _rounded(float(kept_std.amax()), up=True))
    # What is lost has no weight, whatever it is: it must only lie on the intervals.
    mean, std = torch.where(lost, means.middle, mean), torch.where(lost, stds.middle, std)
    return LogitRows(mean, std, lost, Nodes(first, count), means, stds)


class Sums(NamedTuple):
    """Polynomials of every logit's mean (zero for lost ones) and std, and log P(T < t) of every row."""

    by_mean: Tensor
    by_std: Tensor
    log_below: Tensor


def _sums(x: LogitRows, table: Coefficients) -> Sums:
    by_mean = x.means.polynomials(x.mean, table.size[0]).masked_fill(x.lost.unsqueeze(-1), 0.0)
    by_std = x.stds.polynomials(x.std, table.size[1])
    log_below = (by_mean.mT @ by_std).flatten(-2) @ table.log_f.flatten(0, 1)
    # It rises with t: below the first t without a probability, where polynomials may go astray, there is none.
    least = log_below.detach().flip(-1).cummin(-1).values.flip(-1)
    return Sums(by_mean, by_std, log_below.masked_fill(least < NEVER, -math.inf))


def _left(table: Coefficients, log_below: Tensor) -> float:
    """What polynomials of higher degree would add to log F, wherever some row has a probability."""
    counts = (log_below.detach() > NEVER).any(0)
    return float(torch.where(counts, _tail(table.log_f), 0.0).amax())


def _moments(x: LogitRows, table: Coefficients, sums: Sums) -> Parts:
    """The trapezoidal rule in t, with what lies above the last node, where integrands fall like e^-t and e^-2t."""
    r = math.exp(-STEP)
    weight = STEP * torch.exp(sums.log_below)
    end = torch.zeros_like(x.t)
    end[-1] = 1.0
    first, second = weight * (1.0 + end * r / (1.0 - r)), weight * (1.0 + end * r * r / (1.0 - r * r))
    one, two = (
        ((sums.by_mean @ (w @ c.flatten(0, 1).mT).view(-1, *table.size)) * sums.by_std).sum(-1)
        for w, c in ((first, table.first), (second, table.second))
    )
    root = torch.exp(0.5 * x.mean)
    lift = (sums.by_mean * root.unsqueeze(-1)).mT @ sums.by_std
    density = weight * (lift.flatten(-2) @ table.first.flatten(0, 1))
    return one * root, two * x.mean.exp(), *_logarithm(x, density, r)


def _logarithm(x: LogitRows, density: Tensor, r: float) -> tuple[Tensor, Tensor]:
    """First and second moment of T relative to the log-sum-exp of the means, times the total density."""
    y = x.t - _reference(x)
    s0, s1, s2 = r / (1.0 - r), r / (1.0 - r) ** 2, r * (1.0 + r) / (1.0 - r) ** 3
    last, end = density[:, -1:], y[:, -1:]
    one = (y * density).sum(-1, keepdim=True) + last * (end * s0 + STEP * s1)
    two = (y.square() * density).sum(-1, keepdim=True)
    return one, two + last * (end.square() * s0 + 2.0 * end * STEP * s1 + STEP * STEP * s2)


def _reference(x: LogitRows) -> Tensor:
    return torch.logsumexp(x.mean.detach().masked_fill(x.lost, -math.inf), -1, keepdim=True).clamp(min=-1e3)


def integrals(mean: Tensor, std: Tensor, direct: Direct | None = None) -> Parts | None:
    """E softmax and E softmax^2 along the last axis, mean and variance of log-sum-exp; None where it does not converge.

    E softmax within 1e-7, sd within 0.2 %; the means must be relative to the largest of each row. Rows in which few
    logits count, as the first under a causal mask, are a call of their own, and where that does not converge are left
    to `direct`, the integrals one by one.
    """
    shape = mean.shape
    mean, std = mean.reshape(-1, shape[-1]), std.reshape(-1, shape[-1])
    counted = (mean.detach() + 8.0 * std.detach() >= -LOST).sum(-1)
    short = counted <= SHORT
    if direct is None or shape[-1] <= 2 * SHORT or not bool(short.any()) or bool(short.all()):
        found = _narrowed(mean, std, counted, _together)
    else:
        groups = (~short).nonzero().squeeze(-1), short.nonzero().squeeze(-1)
        solvers: tuple[Solver, Solver] = _together, lambda m, s: _together(m, s) or direct(m, s)
        parts = [_narrowed(mean[g], std[g], counted[g], f) for g, f in zip(groups, solvers, strict=True)]
        found = _in_order(parts[0], parts[1], torch.cat(groups).argsort())
    return None if found is None else tuple(x.reshape(*shape[:-1], -1) for x in found)  # type: ignore[return-value]


def _in_order(one: Parts | None, other: Parts | None, order: Tensor) -> Parts | None:
    """Rows of both in a given order."""
    if one is None or other is None:
        return None
    return tuple(torch.cat(both)[order] for both in zip(one, other, strict=True))  # type: ignore[return-value]


def _narrowed(mean: Tensor, std: Tensor, counted: Tensor, solve: Solver) -> Parts | None:
    """The largest logits of every row, as many as count in any."""
    width = max(1, int(counted.amax()))
    if 2 * width > mean.shape[-1]:
        return solve(mean, std)
    places = (mean.detach() + 8.0 * std.detach()).topk(width, -1).indices
    found = solve(mean.gather(-1, places), std.gather(-1, places))
    if found is None:
        return None
    first, second, log_mean, log_var = found
    empty = torch.zeros_like(mean)
    return empty.scatter(-1, places, first), empty.scatter(-1, places, second), log_mean, log_var


def _together(mean: Tensor, std: Tensor) -> Parts | None:
    call = _call(mean, std)
    if call is None:
        return None
    some = call.part(slice(None, None, max(1, len(call.mean) // TRIED)))
    for size in SIZES:
        table = _table(call.nodes, call.means, call.stds, size)
        with torch.no_grad():
            left = _left(table, _sums(some, table).log_below)
        if left < CLOSE and (found := _all_rows(call, table)) is not None:
            return found
        if size[0] >= HOPELESS[0] and left > HOPELESS[1]:
            return None
    return None


def _all_rows(call: LogitRows, table: Coefficients) -> Parts | None:
    rows = max(1, BLOCK // (call.mean.shape[-1] * sum(table.size)))
    parts = []
    for start in range(0, len(call.mean), rows):
        x = call.part(slice(start, start + rows))
        sums = _sums(x, table)
        if _left(table, sums.log_below) > CLOSE:
            return None
        first, second, one, two = _moments(x, table, sums)
        total = first.sum(-1, keepdim=True).clamp(min=1e-300)
        one = one / total
        log_var = two / total - one.square() - math.pi**2 / 6.0
        parts.append((first / total, second / total, _reference(x) + one - EULER, log_var))
    first, second, log_mean, log_var = (torch.cat(part) for part in zip(*parts, strict=True))
    return first, second, log_mean, log_var
