# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102 - the outer condition is decided when compiling, the inner one when running
"""The moment pass in one launch forward and one backward, whatever the depth.

A program owns a block of components (see `components`) and runs its list of operations; what an operation writes, the
next reads from global memory behind a barrier of the block, which is enough because no other program touches it. All
lanes are float64: there are some 10^4 of them, and the pass is bound by latency. The forward saves the derivatives of
every computed lane by its arguments, so that the backward knows no functions: it is a sparse product. Lanes enter the
sites through a table of entries sorted by program and lane, which the backward sums in the same order: no atomics.
"""

import triton
import triton.language as tl

from .opcodes import PAIRS
from .operations import one_argument, two_arguments

EPS = tl.constexpr(1e-6)
PROGRAM_FIELDS = tl.constexpr(9)
_FIRST_PAIR = tl.constexpr(PAIRS[0])
_LAST_PAIR = tl.constexpr(PAIRS[-1])
_HAS_PAIRS = tl.constexpr(sum(1 << code for code in PAIRS))


@triton.jit
def _read(a, b, c, d, lane, mask, sources, constants, given):
    """A number of lanes from wherever each lies: source, constant, given or computed."""
    x = tl.load(a + lane, mask & (lane < sources), 0.0).to(tl.float64)
    lane -= sources
    x += tl.load(b + lane, mask & (lane >= 0) & (lane < constants), 0.0)
    lane -= constants
    x += tl.load(c + lane, mask & (lane >= 0) & (lane < given), 0.0).to(tl.float64)
    lane -= given
    return x + tl.load(d + lane, mask & (lane >= 0), 0.0)


@triton.jit
def _read_var(scale, b, c, d, lane, mask, sources, constants, given):
    """The variance of lanes; of a source, its squared scale."""
    root = tl.load(scale + lane, mask & (lane < sources), 0.0).to(tl.float64)
    return root * root + _read(scale, b, c, d, lane, mask & (lane >= sources), sources, constants, given)


@triton.jit
def _operands(operations, first, second, output, n, there, component, mask):
    """Code of operation n, and the lanes it reads and writes."""
    code = tl.load(operations + 2 * n, there, 0)
    place = tl.load(operations + 2 * n + 1, there, 0) + component
    known = mask & there
    return (
        code,
        tl.load(first + place, known, 0),
        tl.load(second + place, known, 0),
        tl.load(output + place, known, 0),
    )


@triton.jit
def _write(mean, var, slopes, found, computed, mask, SLOPES: tl.constexpr):
    """Mean, variance and their derivatives to where they belong."""
    tl.store(mean, found[0], mask)
    tl.store(var, found[1], mask)
    for n in tl.static_range(SLOPES):
        tl.store(slopes + n * computed, found[2 + n], mask)


_SIZES = ["sources", "constants", "given", "computed"]


@triton.jit(do_not_specialize=_SIZES)
def forward(
    programs,
    operations,
    numbers,
    first,
    second,
    output,
    entry,
    entry_lane,
    nodes,
    knots,
    shift,
    scale,
    constant_mean,
    constant_var,
    given_mean,
    given_var,
    mean,
    var,
    slopes,
    entering_mean,
    entering_var,
    sources,
    constants,
    given,
    computed,
    OPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Computes the lanes of one program and hands out those that enter a site."""
    here = programs + tl.program_id(0) * PROGRAM_FIELDS
    begin = tl.load(here)
    end = tl.load(here + 1)
    component = tl.load(here + 2) + tl.arange(0, BLOCK)
    mask = component < tl.load(here + 3)
    if OPS:
        after = _operands(operations, first, second, output, begin, begin < end, component, mask)
        for n in range(begin, end):
            code, lane, other, target = after
            # before this one is computed, so that nobody has to wait for it
            after = _operands(operations, first, second, output, n + 1, n + 1 < end, component, mask)
            m1 = _read(shift, constant_mean, given_mean, mean, lane, mask, sources, constants, given)
            v1 = _read_var(scale, constant_var, given_var, var, lane, mask, sources, constants, given)
            target -= sources + constants + given
            if _HAS_PAIRS & OPS:
                if (code >= _FIRST_PAIR) & (code <= _LAST_PAIR):
                    m2 = _read(shift, constant_mean, given_mean, mean, other, mask, sources, constants, given)
                    v2 = _read_var(scale, constant_var, given_var, var, other, mask, sources, constants, given)
                    found = two_arguments(code, numbers + 8 * n, m1, v1, m2, v2, OPS)
                    _write(mean + target, var + target, slopes + target, found, computed, mask, 8)
            if ~_HAS_PAIRS & OPS:
                if (code < _FIRST_PAIR) | (code > _LAST_PAIR):
                    found = one_argument(code, numbers + 8 * n, nodes, knots, m1, v1, OPS)
                    _write(mean + target, var + target, slopes + target, found, computed, mask, 4)
            tl.debug_barrier()
    last = tl.load(here + 5)
    for start in range(tl.load(here + 4), last, ENTRIES):
        row = start + tl.arange(0, ENTRIES)
        inside = row < last
        place = tl.load(entry + row, inside, 0)
        lane = tl.load(entry_lane + row, inside, 0)
        m = _read(shift, constant_mean, given_mean, mean, lane, inside, sources, constants, given)
        v = _read_var(scale, constant_var, given_var, var, lane, inside, sources, constants, given)
        tl.store(entering_mean + place, m.to(tl.float32), inside)
        tl.store(entering_var + place, (v + EPS).to(tl.float32), inside)


@triton.jit
def _take_back(grad_mean, grad_var, lane, dm, dv, saved, computed, mask, sources, constants):
    """Adds to the gradients of the lanes of an argument, but to no constant's, those of the result times its slopes."""
    mm = tl.load(saved, mask, 0.0)
    mv = tl.load(saved + computed, mask, 0.0)
    vm = tl.load(saved + 2 * computed, mask, 0.0)
    vv = tl.load(saved + 3 * computed, mask, 0.0)
    mask = mask & ((lane < sources) | (lane >= sources + constants))
    tl.store(grad_mean + lane, tl.load(grad_mean + lane, mask, 0.0) + (dm * mm + dv * vm), mask)
    tl.store(grad_var + lane, tl.load(grad_var + lane, mask, 0.0) + (dm * mv + dv * vv), mask)


@triton.jit(do_not_specialize=_SIZES)
def backward(
    programs,
    operations,
    first,
    second,
    output,
    entry,
    owned,
    owned_span,
    slopes,
    scale,
    entering_grad_mean,
    entering_grad_var,
    onto_shift,
    onto_scale,
    grad_mean,
    grad_var,
    grad_shift,
    grad_scale,
    grad_given_mean,
    grad_given_var,
    sources,
    constants,
    given,
    computed,
    OPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ENTRIES: tl.constexpr,
    ONTO: tl.constexpr,
):
    """Gathers the gradients of one program's lanes and takes them back through its operations."""
    here = programs + tl.program_id(0) * PROGRAM_FIELDS
    begin = tl.load(here)
    end = tl.load(here + 1)
    component = tl.load(here + 2) + tl.arange(0, BLOCK)
    mask = component < tl.load(here + 3)
    own_begin = tl.load(here + 6)
    own_end = tl.load(here + 7)
    most = tl.load(here + 8)
    for start in range(own_begin, own_end, LANES):
        row = start + tl.arange(0, LANES)
        inside = row < own_end
        lane = tl.load(owned + row, inside, 0)
        low = tl.load(owned_span + 2 * row, inside, 0)
        high = tl.load(owned_span + 2 * row + 1, inside, 0)
        m = tl.zeros([LANES], tl.float64)
        v = tl.zeros([LANES], tl.float64)
        for step in range(0, most, ENTRIES):
            at = tl.expand_dims(low, 1) + step + tl.expand_dims(tl.arange(0, ENTRIES), 0)
            there = at < tl.expand_dims(high, 1)
            place = tl.load(entry + at, there, 0)
            m += tl.sum(tl.load(entering_grad_mean + place, there, 0.0).to(tl.float64), 1)
            v += tl.sum(tl.load(entering_grad_var + place, there, 0.0).to(tl.float64), 1)
        tl.store(grad_mean + lane, m, inside)
        tl.store(grad_var + lane, v, inside)
    tl.debug_barrier()
    if OPS:
        after = _operands(operations, first, second, output, end - 1, begin < end, component, mask)
        for back in range(begin, end):
            n = begin + end - 1 - back
            code, lane, other, target = after
            after = _operands(operations, first, second, output, n - 1, n > begin, component, mask)
            dm = tl.load(grad_mean + target, mask, 0.0)
            dv = tl.load(grad_var + target, mask, 0.0)
            saved = slopes + target - sources - constants - given
            _take_back(grad_mean, grad_var, lane, dm, dv, saved, computed, mask, sources, constants)
            if _HAS_PAIRS & OPS:
                if (code >= _FIRST_PAIR) & (code <= _LAST_PAIR):
                    tl.debug_barrier()  # both arguments may be one lane
                    second_saved = saved + 4 * computed
                    _take_back(grad_mean, grad_var, other, dm, dv, second_saved, computed, mask, sources, constants)
            tl.debug_barrier()
    for start in range(own_begin, own_end, LANES):
        row = start + tl.arange(0, LANES)
        inside = row < own_end
        lane = tl.load(owned + row, inside, 0)
        m = tl.load(grad_mean + lane, inside, 0.0)
        v = tl.load(grad_var + lane, inside, 0.0)
        source = inside & (lane < sources)
        root = tl.load(scale + lane, source, 0.0).to(tl.float64)
        by_shift = m
        by_scale = 2.0 * root * v
        if ONTO:
            by_shift += tl.load(onto_shift + lane, source, 0.0).to(tl.float64)
            by_scale += tl.load(onto_scale + lane, source, 0.0).to(tl.float64)
        tl.store(grad_shift + lane, by_shift.to(tl.float32), source)
        tl.store(grad_scale + lane, by_scale.to(tl.float32), source)
        lane -= sources + constants
        outside = inside & (lane >= 0) & (lane < given)
        tl.store(grad_given_mean + lane, m.to(tl.float32), outside)
        tl.store(grad_given_var + lane, v.to(tl.float32), outside)
