"""The structures of plan.h, and the codes of curves.h, for ctypes."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64

KNOTS, GRIDS, LONGEST_RULE = 5, 3, 256
# In the order of `enum Code`.
_CURVES = ("sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "softplus", "elu", "mish", "erf", "hardswish")
CODES = ("linear", "dropout", "two_slopes", "add", "mul", "skip", *_CURVES, "hardsigmoid", "clamp")
Pointer = ctypes.c_void_p


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class StepTable(ctypes.Structure):
    """`Step`."""

    _fields_ = (
        *_fields(c_int64, "code count start slopes knot_count"),
        *_fields(Pointer, "first second"),
        *_fields(c_double, "e d a b c narrow"),
        ("knots", c_double * KNOTS),
    )


class SiteTable(ctypes.Structure):
    """`Site`."""

    _fields_ = (
        *_fields(c_int64, "outputs groups channels taps columns"),
        *_fields(c_int64, "first_row first_channel levers dense constant"),
        *_fields(c_int64, "group_stride row_stride channel_stride tap_stride"),
        ("matrix", Pointer),
    )


class GridTable(ctypes.Structure):
    """`Grid`."""

    _fields_ = (("count", c_int64), ("widest", c_double), *_fields(Pointer, "nodes weights"))


class PlanTable(ctypes.Structure):
    """`Plan`."""

    _fields_ = (
        *_fields(c_int64, "sources constants given total entering_count rows step_count site_count slope_count"),
        *_fields(c_int64, "legendre_count most_taps"),
        *_fields(Pointer, "constant_mean constant_var legendre_nodes legendre_weights entering steps sites"),
        ("grids", GridTable * GRIDS),
    )
