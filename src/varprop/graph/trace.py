"""Which operations a model runs, found by one run on tensors without data: much cheaper than a capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .attributes import attributes_kept


class _OperationRecorder(TorchDispatchMode):
    """Writes down every operation, its arguments and results; tensors by the order in which they were first seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Any] = []
        self.seen: dict[int, tuple[int, Tensor]] = {}  # the tensors too: an id may be used again when one is gone

    def described(self, tree: Any) -> str:
        """A nest of arguments as text."""
        return str(pytree.tree_map_only(Tensor, self._number, tree))

    def _number(self, tensor: Tensor) -> str:
        number, _ = self.seen.setdefault(id(tensor), (len(self.seen), tensor))
        return f"%{number}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.described((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, before, self.described(result)))
        return result


def traced_operations(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Every operation of one call with what it reads and makes, equal for equal graphs; None if that cannot be found.

    Nothing is computed, and no buffer or random number generator changes.
    """
    state = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with attributes_kept(model), torch.no_grad(), torch.random.fork_rng(devices=[]), fake:
            copies: dict[str, Tensor] = {name: fake.from_tensor(tensor) for name, tensor in state.items()}
            args, kwargs = pytree.tree_map_only(Tensor, fake.from_tensor, (args, kwargs))
            with _OperationRecorder() as recorder:
                for tensor in (*copies.values(), *pytree.tree_leaves((args, kwargs))):
                    recorder.described(tensor)
                result = torch.func.functional_call(model, copies, args, kwargs)
                return [*recorder.operations, recorder.described(result)]
    except Exception:  # whatever cannot be run without data is found out by a capture, which says what it is
        return None
