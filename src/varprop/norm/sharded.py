"""Parameters of which every process holds a part."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

REFUSED = (
    "Some parameters of the normalized model are sharded while a part of it runs that depends on them: call "
    "fully_shard on the whole model and, within it, on blocks that hold their own norms and whose layers are called "
    "once, and call no block by itself; or train with DistributedDataParallel; and call parallelize_module on the "
    "plain model that vp.fold returns, not on the normalized one."
)


def is_sharded(parameter: Tensor) -> bool:
    """Whether it is a tensor of `torch.distributed.tensor`."""
    return hasattr(parameter, "full_tensor")


def refuse_sharded(parameters: Sequence[Tensor]) -> None:
    """Raise where plain tensors are needed and some are sharded."""
    if any(is_sharded(parameter) for parameter in parameters):
        raise RuntimeError(REFUSED)
