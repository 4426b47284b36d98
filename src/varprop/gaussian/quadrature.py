"""Mean and variance of any pointwise function of a Gaussian variable, by panels of Gauss-Legendre nodes; its zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .normal import Pair, Scalar, as_tensor, batches, cdf, constant, gauss_legendre, pdf, promote, ratio, readable
from .rectifier import two_slopes
from .shortcuts import is_first_order

Pointwise: TypeAlias = Callable[[Tensor], Tensor]
Points: TypeAlias = Sequence[Scalar]

WINDOW = 13.0  # standard deviations on either side: what lies beyond changes no variance above 1e-35 f^2
NODES = 24  # per panel
PANELS = 7  # at least
_EXTRA = 2  # panels beyond the points given
_LEGENDRE = gauss_legendre(NODES)
_SHORTEST = 2e-7  # of 1 + |mean|: below this std, mean + std z is rounding noise
_BESIDE = 1e-5  # of 1 + |at|: how far beside a kink the function is looked at
_STEEPEST = 1e-3  # below this std the derivative of a jump, which grows like 1/std, is held


def _insert_widest(edges: Tensor) -> Tensor:
    """Bisect the widest panel, using up one of the spare edges kept at the end, if there is one."""
    width, index = (edges[1:] - edges[:-1]).max(dim=0, keepdim=True)
    middle = edges.gather(0, index) + 0.5 * width
    order = torch.arange(len(edges), device=edges.device).reshape(-1, *[1] * (edges.dim() - 1))
    shifted = torch.cat([edges[:1], edges[:-1]])
    wider = torch.where(order <= index, edges, torch.where(order == index + 1, middle, shifted))
    return torch.where(edges[-2:-1] >= WINDOW, wider, edges)


def _edges(points: list[Tensor], mean: Tensor, std: Tensor, panels: int) -> Tensor:
    """Panel boundaries in z, ascending, first axis: the points inside the window, then bisections.

    Where many panels are asked for they are equal ones, cut at the points.
    """
    count = max(panels, len(points) + _EXTRA)
    grid = torch.arange(count + 1, dtype=mean.dtype, device=mean.device) * (2.0 * WINDOW / count) - WINDOW
    grid = grid.reshape(-1, *[1] * mean.dim())
    if not points:
        return grid
    z = torch.stack([(p - mean) / std.clamp(min=torch.finfo(std.dtype).tiny) for p in points])
    z = torch.where(z.abs() < WINDOW, z, WINDOW).sort(dim=0).values
    if panels > PANELS:
        return torch.cat([grid.expand(-1, *mean.shape), z]).sort(dim=0).values
    spare = torch.full_like(mean, WINDOW).expand(count - len(points), *mean.shape)
    edges = torch.cat([torch.full_like(mean, -WINDOW).unsqueeze(0), z, spare])
    for _ in range(count - 1):
        edges = _insert_widest(edges)
    return edges


def _merge(total: tuple[Tensor, Tensor, Tensor], f: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add weighted values to (weight, mean, sum of squares) without cancellation (Chan et al., 1983)."""
    weight, mean, squares = total
    tiny = torch.finfo(w.dtype).tiny
    new = w.sum(0)
    centre = (w / new.clamp(min=tiny) * f).sum(0)
    inner = (w * (f - centre).square()).sum(0)
    delta = centre - mean
    share = new / (weight + new).clamp(min=tiny)
    return weight + new, mean + share * delta, squares + inner + weight * share * delta.square()


def _integrate(f: Pointwise, mean: Tensor, std: Tensor, edges: Tensor) -> Pair:
    node, weight = (constant(c, mean).reshape(-1, *[1] * mean.dim()) for c in _LEGENDRE)
    centre, half = 0.5 * (edges[1:] + edges[:-1]), 0.5 * (edges[1:] - edges[:-1])
    zero = torch.zeros_like(mean)
    total = (zero, zero, zero)
    for index in batches(NODES * len(centre), mean):
        panel, i = index // NODES, index % NODES
        z = torch.addcmul(centre[panel], half[panel], node[i])
        total = _merge(total, f(torch.addcmul(mean, std, z)), half[panel] * weight[i] * pdf(z))
    return total[1], total[2] / total[0]


def _at_kink(f: Pointwise, at: Tensor, mean: Tensor, std: Tensor, m0: Tensor, jump: bool) -> Pair:
    """Zeros with the derivatives that a kink adds to the expectations of f and (f - m0)^2: constant nodes miss it.

    By Leibniz' rule, from values and slopes of f below and above it; `mass` and `lift` are zero, with the derivatives
    of P(X < at) and the higher ones of E(X - at)_+.
    """
    here = at.detach().broadcast_to(mean.shape)
    step = _BESIDE * (1.0 + here.abs())
    sides = f(torch.stack([here + k * step for k in (-1, -2, -3, 1, 2, 3)])).detach()
    (b1, b2, b3), (a1, a2, a3) = sides[:3].unbind(0), sides[3:].unbind(0)  # extrapolated by parabolas
    below, above = 3.0 * (b1 - b2) + b3 - m0, 3.0 * (a1 - a2) + a3 - m0
    slope_below = (5.0 * b1 - 8.0 * b2 + 3.0 * b3) / (2.0 * step)
    slope_above = (8.0 * a2 - 5.0 * a1 - 3.0 * a3) / (2.0 * step)
    mass, over = torch.zeros_like(mean), mean - at
    if jump:
        mass = cdf(-over / std.clamp(min=_STEEPEST))
    lift, _ = two_slopes(over, std, 1.0, 0.0)
    a = ratio(over, std).detach()
    seen = lift.detach() + cdf(a) * (over - over.detach()) + pdf(a) * (std - std.detach())
    mass, lift = mass - mass.detach(), lift - seen
    first = mass * (below - above) + lift * (slope_above - slope_below)
    slopes = above * slope_above - below * slope_below
    return first, mass * (below.square() - above.square()) + 2.0 * lift * slopes


def _with_kinks(f: Pointwise, kinks: list[Tensor], jumps: int, mean: Tensor, std: Tensor, m: Tensor) -> Pair:
    """Zeros whose derivatives are what kinks, the last of them jumps, add to those of the mean and the variance."""
    m0, dm, dv = m.detach(), torch.zeros_like(m), torch.zeros_like(m)
    for i, at in enumerate(kinks):
        first, second = _at_kink(f, at, mean, std, m0, i >= len(kinks) - jumps)
        dm, dv = dm + first, dv + second
    return dm, dv - (2.0 * (m - m0) + dm) * dm


def expectation(
    f: Pointwise,
    mean: Tensor,
    std: Tensor,
    *,
    breaks: Points = (),
    jumps: Points = (),
    knots: Points = (),
    panels: int = PANELS,
) -> Pair:
    """Mean and variance of f(X), X ~ N(mean, std^2), for any pointwise f of moderate growth.

    m = sum w f(mean + std z), v = sum w (f - m)^2: 24 Gauss-Legendre nodes on each of max(7, points + 2)
    panels of |z| < 13, bounded by the points given and by bisections of the widest. Nodes and weights are
    constants to autograd, so that its derivatives are those of Bonnet and Price (mathematics.md, 1.1); what a kink of
    f adds to the second ones, and a jump to the first and the second, is put in by Leibniz' rule. Where
    std is below 2e-7 (1 + |mean|) and no kink is near, m - f(mean) and v are scaled down from that std by
    their std^2 law. Relative error of v at best 1e-16 |f| / sqrt v: near a limit of f use `shifted`.

    Args:
        f: called with x of shape (nodes, *shape); what it closes over must broadcast against `mean`'s shape.
        mean: means.
        std: standard deviations.
        breaks: where f or a derivative of it has a kink.
        jumps: where f itself jumps; they add their delta to the derivatives (with std held at 1e-3 or more).
        knots: where a smooth f changes its character, such as the ends of its bend; they aid accuracy only.
        panels: how many at least; more for an f that swings many times.
    """
    dtype, (mean, std) = promote(mean, std)
    kinks = [as_tensor(p, mean) for p in (*breaks, *jumps)]
    points = [*kinks, *(as_tensor(p, mean) for p in knots)]
    mean, std, *_ = torch.broadcast_tensors(mean, std, *points)  # one value may be held against many points
    shortest = (_SHORTEST * (1.0 + mean.abs())).detach()
    short = std < shortest
    for p in kinks:
        short = short & ((p - mean).abs() > WINDOW * shortest)
    scale = torch.where(short, std / shortest, 1.0).square()
    width = torch.where(short, shortest, std)
    edges = _edges([p.detach() for p in points], mean.detach(), width.detach(), panels)
    m, v = _integrate(f, mean, width, edges)
    m, v = m + (1.0 - scale) * (f(mean.unsqueeze(0)).squeeze(0) - m), v * scale
    if is_first_order():  # to first derivatives only jumps add anything
        kinks = kinks[len(kinks) - len(jumps) :]
    if kinks and torch.is_grad_enabled():
        dm, dv = _with_kinks(f, kinks, len(jumps), mean, std, m)
        m, v = m + dm, v + dv
    return m.to(dtype), v.to(dtype)


def shifted(
    f: Pointwise,
    tail: Pointwise,
    limit: Scalar,
    far: Tensor,
    mean: Tensor,
    std: Tensor,
    *,
    breaks: Points = (),
    knots: Points = (),
) -> Pair:
    """`expectation` of a function that saturates: where `far`, of tail = f - limit, which must not cancel.

    Near a limit other than zero f(x) - m has no digits left; tail(x) has all of them (mathematics.md, rule R2).
    """
    m, v = expectation(lambda x: torch.where(far, tail(x), f(x)), mean, std, breaks=breaks, knots=knots)
    return m + torch.where(far, as_tensor(limit, m), 0.0), v


def crossings(g: Pointwise, mean: Tensor, std: Tensor, most: int, precise: bool = True) -> list[Tensor]:
    """Up to `most` zeros of g within 9 standard deviations, by sign changes on a grid; the mean in place of others.

    g is called with points on a new first axis, an eighth of std apart. If `precise` zeros are found to the last
    digits; else to a hundredth of the standard deviation.
    """
    with torch.no_grad():
        z = torch.linspace(-9, 9, 145, dtype=torch.float64, device=mean.device).view(-1, *[1] * mean.ndim)
        grid = mean.double() + std.double() * z
        values = g(grid).double()
        if readable(mean) and (roots := _of_parabola(z, values)) is not None:
            inside = [torch.where(z.abs() <= 9, mean.double() + std.double() * z, mean.double()) for z in roots]
            return [*inside[:most], *[mean.double()] * (most - 2)]
        positive = values >= 0  # so that a zero on the grid is a change of sign too
        change = (positive[1:] != positive[:-1]).double()
        count = int(change.sum(0).amax().clamp(max=most)) if readable(mean) and change.numel() else most
        if count == 0:
            return [mean.double()] * most
        order = change.topk(count, dim=0).indices
        is_change = change.gather(0, order) > 0
        low, high = (grid.expand(values.shape).gather(0, order + k) for k in (0, 1))
        below, above = (values.gather(0, order + k) for k in (0, 1))
        narrow = 1e-15 * (low.abs() + std.double()) if precise else 0.005 * std.double().expand_as(low)
        narrow = torch.where(is_change, narrow, torch.inf)
        zeros = _zeros(g, (low, high), (below, above), narrow, steps=60 if precise else 4)
        return [*torch.where(is_change, zeros, mean.double()), *[mean.double()] * (most - count)]


def _of_parabola(z: Tensor, values: Tensor) -> Pair | None:
    """The zeros of values on a grid around 0 if they lie on parabolas or lines, inf or NaN for none; else None."""
    middle, end = values[len(z) // 2], z[-1]
    slope, bend = (values[-1] - values[0]) / (2 * end), (values[-1] + values[0] - 2 * middle) / (2 * end * end)
    off = (values - (middle + z * (slope + z * bend))).abs().amax(0)
    if not bool((off <= 1e-13 * values.abs().amax(0)).all()):
        return None
    larger = -0.5 * (slope + torch.copysign((slope * slope - 4 * bend * middle).sqrt(), slope))
    return larger / bend, middle / larger


def _zeros(g: Pointwise, ends: Pair, values: Pair, narrow: Tensor, steps: int) -> Tensor:
    """A zero of g between two ends where it has different signs, up to `narrow` or after some steps.

    A parabola through the last three points tells where to look next (Chandrupatla, 1997); where it does not serve, and
    where values cannot be read to know when to stop, the middle does.
    """
    (a, b), (fa, fb), t = ends, values, torch.full_like(ends[0], 0.5)
    reads = readable(a)
    for _ in range(steps):
        x = a + t * (b - a)
        fx = g(x).double()
        same = (fx >= 0) == (fa >= 0)
        c, fc = (a, fa) if not reads else (torch.where(same, a, b), torch.where(same, fa, fb))
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = x, fx
        if not reads:
            continue
        width = (b - a).abs()
        if bool((width <= 2.0 * narrow).all()):
            break
        xi, phi, least = (a - b) / (c - b), (fa - fb) / (fc - fb), narrow / width
        serves = (phi.square() < xi) & ((1.0 - phi).square() < 1.0 - xi) & (least < 0.5)
        parabola = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        t = torch.where(serves & parabola.isfinite(), parabola.clamp(least, 1.0 - least), 0.5)
    return torch.where(fa.abs() < fb.abs(), a, b)


MANY = 1 << 14  # places from which a grid is worth it
SIZES = ((8, 6), (14, 8), (24, 12), (40, 16), (64, 24))  # nodes in mean and std to be tried in turn
CLOSE = 1e-9  # how small the last coefficients must be, of the largest
SMALL = 1e-5  # values that are no larger than this, of the largest, are not to be had from polynomials
SOME = 0.05  # as many of them may be computed one by one
BLOCK = 1 << 13  # places taken at a time


class Range(NamedTuple):
    """The middle and the half width of an interval."""

    middle: float
    half: float

    @classmethod
    def between(cls, low: float, high: float, least: float) -> Range:
        """The interval between two ends, or about their middle one of the least width."""
        return cls(0.5 * (low + high), max(0.5 * (high - low), 0.5 * least))

    def nodes(self, count: int, like: Tensor) -> Tensor:
        """Chebyshev nodes of the interval."""
        angle = (torch.arange(count, dtype=like.dtype, device=like.device) + 0.5) * (math.pi / count)
        return self.middle + self.half * torch.cos(angle)

    def polynomials(self, x: Tensor, count: int) -> Tensor:
        """Chebyshev polynomials of x on the interval, along a new last axis."""
        y = (x - self.middle) / self.half
        values = [torch.ones_like(y), y]
        for _ in range(2, count):
            values.append(2.0 * y * values[-1] - values[-2])
        return torch.stack(values[:count], -1)


def transform(count: int, like: Tensor) -> Tensor:
    """The matrix from values at Chebyshev nodes to coefficients."""
    k = torch.arange(count, dtype=like.dtype, device=like.device)
    rows = torch.cos(k[:, None] * (k + 0.5) * (math.pi / count)) * (2.0 / count)
    rows[0] *= 0.5
    return rows


def at_many(function: Callable[[Tensor, Tensor], Pair], mean: Tensor, std: Tensor) -> Pair | None:
    """Two smooth functions of mean and std at every place, float64; None where polynomials do not converge.

    Each is within some 1e-8 of its largest value; the second, which is positive, within 1e-3 of itself. None also where
    the second is often too small for that. `function` computes both, element by element.
    """
    if not bool(torch.isfinite(mean).all() & torch.isfinite(std).all()):
        return None
    ends = ((float(x.amin()), float(x.amax())) for x in (mean, std))
    intervals = [Range.between(low, high, 2e-6 * (1.0 + abs(low))) for low, high in ends]
    for size in SIZES:
        m, s = torch.meshgrid(*(r.nodes(n, mean) for r, n in zip(intervals, size, strict=True)), indexing="ij")
        values = torch.stack([value.view(size) for value in function(m.flatten(), s.flatten().clamp_min(0.0))])
        coefficients = torch.einsum("am,bs,kms->kab", *(transform(n, mean) for n in size), values)
        sizes = coefficients.abs()
        last = torch.maximum(sizes[:, -2:].amax((1, 2)), sizes[:, :, -2:].amax((1, 2)))
        if bool((last <= CLOSE * sizes.amax((1, 2))).all()):
            break
    else:
        return None
    count, rows, columns = coefficients.shape
    matrix, blocks = coefficients.movedim(0, -1).reshape(rows, columns * count), []
    for m, s in zip(mean.reshape(-1).split(BLOCK), std.reshape(-1).split(BLOCK), strict=True):
        by_mean = (intervals[0].polynomials(m, rows) @ matrix).view(-1, columns, count)
        blocks.append((by_mean * intervals[1].polynomials(s, columns).unsqueeze(-1)).sum(1))
    first, second = torch.cat(blocks).view(*mean.shape, count).unbind(-1)
    small = second < SMALL * second.amax()  # there the error of polynomials shows
    if int(small.sum()) > SOME * small.numel():
        return None
    if bool(small.any()):
        first[small], second[small] = function(mean[small], std[small])
    return first, second
