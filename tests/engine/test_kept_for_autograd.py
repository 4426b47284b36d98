"""What is computed of a model keeps nothing for derivatives that nobody asked for, though its parameters train."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import varprop as vp

SHAPE = (1, 3, 16, 16)


def network() -> nn.Module:
    """Convolutions with closed forms, a maximum and integrals between them, whose parameters train."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, padding=1),
        nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.Softsign(), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 4),
    )  # fmt: skip


def dense(requires_grad: bool = False) -> vp.Moments:
    return vp.Moments(torch.zeros(SHAPE), torch.ones(SHAPE, requires_grad=requires_grad))


def kept_by(compute: Callable[[], Any]) -> tuple[int, Any]:
    """How many tensors autograd keeps while something is computed, and the result."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += not isinstance(tensor, FakeTensor)  # of a capture, which are without numbers
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    return kept, result


COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "moments of the full shape": lambda model: vp.propagate(model, dense()),
    "moments of uniform axes": lambda model: vp.propagate(model, vp.Moments(0.0, 1.0), SHAPE),
    "covariances": lambda model: vp.propagate(model[:2], dense(), covariance="full"),
    "a report": lambda model: vp.inspect(model, vp.Moments(0.0, 1.0), example=SHAPE),
    "coverage": lambda model: vp.coverage(model, torch.zeros(SHAPE)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_nothing_is_kept_for_autograd_unless_it_is_asked_for(name: str) -> None:
    model = network()
    kept, result = kept_by(lambda: COMPUTED[name](model))
    if isinstance(result, vp.Result):
        for moments in result.by_module().values():
            assert moments.mean.grad_fn is None and moments.var.grad_fn is None
    if name != "a report":  # whose gradients are derivatives, each dropped once it is known
        assert kept == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("asked", ["gradients", "moments"])
def test_what_is_asked_for_is_kept(asked: str) -> None:
    model = network()
    by_moments = asked == "moments"
    kept, result = kept_by(lambda: vp.propagate(model, dense(by_moments), gradients=None if by_moments else True))
    assert kept > 0
    assert result.output.var.grad_fn is not None


class _Largest(TorchDispatchMode):
    """The most bytes that live at once in tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.largest = 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else []:
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.alive += size
        self.largest = max(self.largest, self.alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


def test_memory_is_that_of_no_grad() -> None:
    """A quadrature that is kept is many times what passes through the layers."""
    program = vp.capture(network(), SHAPE)

    def peak(**settings: bool) -> int:
        gc.collect()
        with _Largest() as largest:
            vp.propagate(program, dense(), **settings)
        return largest.largest

    with torch.no_grad():
        least = peak()
    assert peak() == least
    assert peak(gradients=True) > 3 * least
