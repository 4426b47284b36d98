# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The gradients of rows that fit whole into registers: weights and gradients are read once and stay there.

A block takes some tiles of rows one after the other and keeps the sums over rows until its end, so that little of them
has to be written and read again.
"""

import triton
import triton.language as tl

from .tiles import (
    RECORD_FIELDS,
    SHAPE_FIELDS,
    across,
    channel_axis,
    down,
    inverse_std,
    offsets,
    record_of,
    row_axis,
    stages_of,
    tap_axis,
)


@triton.jit
def _rates(scale, row_mean, row_var, grad_bias, row, exists, ACC: tl.constexpr):
    """Of some rows: mean, variance, scale and the gradient of the bias."""
    mu = tl.load(row_mean + row, exists, 0.0)
    spread = tl.load(row_var + row, exists, 1.0)
    s = tl.load(scale + row, exists, 0.0).to(ACC)
    db = tl.load(grad_bias + row, exists, 0.0).to(ACC)
    return mu, spread, s, db


@triton.jit
def _by_sums(dot, mu, spread, s, db, grad_scale, row, exists):
    """The rate of each row, and its gradients by mean and by variance; that by scale is written."""
    inverse = inverse_std(spread)
    k = s * inverse
    dk = dot - db * mu
    tl.store(grad_scale + row, (dk * inverse).to(tl.float32), exists)
    return k, -db * k, -0.5 * dk * k * (inverse * inverse)


@triton.jit
def _unfold_by_taps(
    record,
    buffers,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    TAPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPREAD: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Channels lie side by side: a tile [rows, channels] for every tap."""
    (
        share, scale, mean, var, row_mean, row_var, tap_spread, grad_folded, grad_bias, grad_weight, grad_scale,
        partial_mean, partial_var,
    ) = buffers  # fmt: skip
    weight, place, first, rows, channels, row_stride, _, tap_stride, _, entering, shares, _, sums_at, line = record_of(
        record, WEIGHT, ALIGNED
    )
    channel = tl.arange(0, C)
    known = channel < channels
    m = across(tl.load(mean + entering + channel, known, 0.0))
    v = across(tl.load(var + entering + channel, known, 0.0))
    shared = ()
    for t in tl.static_range(TAPS):
        shared = shared + (tl.load(share + shares + t).to(ACC),)  # noqa: RUF005 - what triton understands
    by_mean = tl.zeros([R, C], ACC)  # added up over rows at the end only: a sum across warps is a barrier
    by_var = tl.zeros([R, C], ACC)
    for n in tl.range(0, ROUNDS, num_stages=stages_of(TAPS, R * C, ROUNDS)):
        row = n * R + tl.arange(0, R)
        exists = row < rows
        inside = down(exists) & across(known)
        at = down(row * row_stride) + across(channel)
        mu, spread, s, db = _rates(scale, row_mean, row_var, grad_bias, first + row, exists, ACC)
        weights = ()
        grads = ()
        spreads = ()
        products = tl.zeros([R, C], ACC)
        for t in tl.static_range(TAPS):
            w = tl.load(weight + at + t * tap_stride, inside, 0.0)
            g = tl.load(grad_folded + place + at + t * tap_stride, inside, 0.0)
            products += w.to(ACC) * g.to(ACC)
            weights = weights + (w,)  # noqa: RUF005
            grads = grads + (g,)  # noqa: RUF005
            if SPREAD:
                d = tl.load(tap_spread + sums_at + row * TAPS + t, exists, 0.0)
                spreads = spreads + (d,)  # noqa: RUF005
        k, alpha, beta = _by_sums(tl.sum(products, 1), mu, spread, s, db, grad_scale, first + row, exists)
        for t in tl.static_range(TAPS):
            da = alpha * shared[t]
            if SPREAD:
                da += 2.0 * beta * spreads[t]
            w = weights[t].to(ACC)
            of_square = down(beta * shared[t]) * w
            grad = grads[t].to(ACC) * down(k) + down(da) * m + 2.0 * of_square * v
            tl.store(grad_weight + place + at + t * tap_stride, grad.to(grad_weight.dtype.element_ty), inside)
            by_mean += down(da) * w
            by_var += of_square * w
    tl.store(partial_mean + line + channel, tl.sum(by_mean, 0), known)
    tl.store(partial_var + line + channel, tl.sum(by_var, 0), known)


@triton.jit
def _unfold_across_taps(
    record,
    buffers,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Taps lie side by side: one tile [rows, channels, taps]."""
    (
        share, scale, mean, var, row_mean, row_var, tap_spread, grad_folded, grad_bias, grad_weight, grad_scale,
        partial_mean, partial_var,
    ) = buffers  # fmt: skip
    (
        weight,
        place,
        first,
        rows,
        channels,
        row_stride,
        channel_stride,
        tap_stride,
        taps,
        entering,
        shares,
        form,
        sums_at,
        line,
    ) = record_of(record, WEIGHT, False)
    channel = tl.arange(0, C)
    tap = tl.arange(0, TAPS)
    tap_ok = tap < taps
    known = channel_axis(channel < channels, False)
    m = tl.load(mean + entering + channel_axis(channel, False), known, 0.0)
    v = tl.load(var + entering + channel_axis(channel, False), known, 0.0)
    e = across(tl.load(share + shares + tap, tap_ok, 0.0).to(ACC))
    shift_of = offsets(channel, tap, channel_stride, tap_stride, False, STRIDED)
    of_mean = tl.zeros([C], ACC)
    of_var = tl.zeros([C], ACC)
    for n in range(ROUNDS):
        row = n * R + tl.arange(0, R)
        exists = row < rows
        inside = known & row_axis(exists) & tap_axis(tap_ok, False)
        at = row_axis(row * row_stride) + shift_of
        mu, spread, s, db = _rates(scale, row_mean, row_var, grad_bias, first + row, exists, ACC)
        w = tl.load(weight + at, inside, 0.0).to(ACC)
        g = tl.load(grad_folded + place + at, inside, 0.0).to(ACC)
        dot = tl.sum(tl.sum(w * g, 2), 1)
        k, alpha, beta = _by_sums(dot, mu, spread, s, db, grad_scale, first + row, exists)
        da = down(alpha) * e
        if form >= 0:
            both = down(exists) & across(tap_ok)
            da += 2.0 * down(beta) * tl.load(tap_spread + sums_at + down(row * taps) + across(tap), both, 0.0)
        da = tl.expand_dims(da, 1)
        of_square = tl.expand_dims(down(beta) * e, 1) * w
        grad = g * row_axis(k) + da * m + 2.0 * of_square * v
        tl.store(grad_weight + place + at, grad.to(grad_weight.dtype.element_ty), inside)
        of_mean += tl.sum(tl.sum(da * w, 2), 0)
        of_var += tl.sum(tl.sum(of_square * w, 2), 0)
    tl.store(partial_mean + line + channel, of_mean, channel < channels)
    tl.store(partial_var + line + channel, of_var, channel < channels)


@triton.jit
def backward(
    records,
    share,
    scale,
    mean,
    var,
    row_mean,
    row_var,
    tap_spread,
    grad_folded,
    grad_bias,
    grad_weight,
    grad_scale,
    partial_mean,
    partial_var,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    BODIES: tl.constexpr,
    SHAPES: tl.constexpr,
):
    """Gradients of one block; SHAPES has the fields of `whole.Body`, body after body."""
    record = records + tl.program_id(0) * RECORD_FIELDS
    body = tl.load(record + RECORD_FIELDS - 1)
    buffers = (
        share, scale, mean, var, row_mean, row_var, tap_spread, grad_folded, grad_bias, grad_weight, grad_scale,
        partial_mean, partial_var,
    )  # fmt: skip
    for n in tl.static_range(BODIES):
        if body == n:
            if SHAPES[SHAPE_FIELDS * n]:
                _unfold_by_taps(
                    record,
                    buffers,
                    WEIGHT,
                    ACC,
                    SHAPES[SHAPE_FIELDS * n + 1],
                    SHAPES[SHAPE_FIELDS * n + 2],
                    SHAPES[SHAPE_FIELDS * n + 3],
                    SHAPES[SHAPE_FIELDS * n + 5],
                    SHAPES[SHAPE_FIELDS * n + 6],
                    SHAPES[SHAPE_FIELDS * n + 7],
                )
            else:
                _unfold_across_taps(
                    record,
                    buffers,
                    WEIGHT,
                    ACC,
                    SHAPES[SHAPE_FIELDS * n + 1],
                    SHAPES[SHAPE_FIELDS * n + 4],
                    SHAPES[SHAPE_FIELDS * n + 5],
                    SHAPES[SHAPE_FIELDS * n + 6],
                    SHAPES[SHAPE_FIELDS * n + 7],
                )
