"""The rules, one short file a family; importing this package fills the registry."""

from . import (  # noqa: F401
    arithmetic,
    attention,
    dropout,
    elementwise,
    linear,
    losses,
    matrices,
    norm,
    pooling,
    recurrent,
    reduction,
    structural,
)
