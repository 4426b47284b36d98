"""Why a model's standard deviations differ from Monte Carlo: the operations at which the first layer goes wrong."""

from __future__ import annotations

from typing import Any

import varprop as vp

GOOD = 0.1  # a layer's standard deviation is right within this
Layer = tuple[str, str, float]  # path, class, std analytic / std Monte Carlo

RECTIFIED = "rectifier over a skip connection, whose sum is not Gaussian"
# The first line with one of the operations found between the last good layer and the first bad one.
CAUSES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("LSTM", "GRU", "RNN", "lstm", "gru"), "successive states of a recurrent layer count as independent"),
    (("adaptive_avg_pool", "avg_pool", "mean", "sum", "scatter_add"), "average over values that are correlated"),
    (("max_pool", "amax", "max.dim"), "maximum over positions that are correlated"),
    (("scaled_dot_product_attention", "softmax"), "attention over tokens that are correlated"),
    (("div", "rsqrt", "sqrt", "vector_norm"), "quotient of values that depend on each other"),
    (("matmul", "bmm", "einsum"), "product of matrices that depend on each other"),
    (("add", "sub"), "sum of values that depend on each other"),
    (("mul",), "product of values that depend on each other"),
    (("cumsum",), "running sums of correlated values"),
    (("layer_norm", "group_norm", "instance_norm", "rms_norm", "standardize"), "statistics of correlated values"),
    (("upsample", "interpolate", "grid_sampler"), "interpolation between positions"),
    (("conv", "linear", "batch_norm"), "inputs of linear layers that are correlated"),
    (("relu", "gelu", "silu", "hardswish", "sigmoid", "clamp"), "values that are not Gaussian"),
)


def cause(result: vp.Result, layers: list[Layer]) -> dict[str, Any] | None:
    """The first innermost layer that is not good, with the operations since the last good one; None if all are good."""
    parents = {path.rpartition(".")[0] for path, *_ in layers} | {""}
    ends = {entry.module: index for index, entry in enumerate(result.entries)}
    ordered = sorted((ends[path], path, ratio) for path, _, ratio in layers if path in ends and path not in parents)
    bad = next((layer for layer in ordered if abs(layer[2] - 1) > GOOD), None)
    if bad is None:
        return None
    start = max((end for end, _, ratio in ordered if end < bad[0] and abs(ratio - 1) <= GOOD), default=-1)
    ops = list(dict.fromkeys(short(entry.op) for entry in result.entries[start + 1 : bad[0] + 1]))
    return {"layer": bad[1], "ratio": round(bad[2], 2), "ops": ops}


def short(op: str) -> str:
    """The operation without namespace and overload."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def said(found: dict[str, Any] | None) -> str:
    """The cause in words, with where it shows first."""
    if not found:
        return "output of the whole model only"
    known = (text for keys, text in CAUSES if any(_among(key, found["ops"]) for key in keys))
    words = RECTIFIED if _is_rectified_sum(found["ops"]) else next(known, ", ".join(found["ops"]))
    return f"{words} (from {found['layer']} on)"


def _is_rectified_sum(ops: list[str]) -> bool:
    """A rectifier over a skip connection: one of the terms was rectified before and cannot be negative."""
    return "add" in ops and "relu" in ops[ops.index("add") :]


def _among(key: str, ops: list[str]) -> bool:
    """Short names must be the whole of it."""
    return any(key in op for op in ops) if len(key) > 3 else key in ops
