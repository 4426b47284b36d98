"""The rules, one short file a family; importing this package fills the registry."""

from . import (  # noqa: F401
    arithmetic,
    attention,
    distance,
    dropout,
    einsum,
    elementwise,
    embedding,
    linear,
    losses,
    matrices,
    norm,
    ordering,
    pooling,
    recurrent,
    reduction,
    resample,
    rounding,
    scatter,
    structural,
)
