"""Moments of lanes (`layout`) after a function together with their derivatives, which the backward pass multiplies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...gaussian.derivatives import DOUBLE, KERNELS
from ...gaussian.normal import Pair, Slopes
from ..fold.layout import Function

_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradCPU,
    torch._C.DispatchKey.AutogradCUDA,
    torch._C.DispatchKey.ADInplaceOrView,
)


def with_derivatives(function: Function, arguments: Sequence[Pair], nodes: int = DOUBLE) -> Slopes:
    """Mean, variance and derivatives after a function, by its kernel where it has one, else by autograd."""
    if function.kernel is None or function.kernel[0] not in KERNELS[nodes]:
        return _by_autograd(function.moments, arguments)
    name, *numbers = function.kernel
    return KERNELS[nodes][str(name)](*arguments, *numbers)


def _by_autograd(moments: Callable[..., Pair], arguments: Sequence[Pair]) -> Slopes:
    """Derivatives by autograd, which has to be called back first: inside of an operation it is switched off."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for key in _AUTOGRAD_KEYS:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        leaves = [tuple(t.detach().clone().requires_grad_() for t in pair) for pair in arguments]
        results = moments(*leaves)
        flat = [leaf for pair in leaves for leaf in pair]
        derivatives = torch.stack([torch.stack(_derivatives(result, flat)) for result in results])
    return torch.stack([r.detach() for r in results]), list(derivatives.detach().split(2, dim=1))


def _derivatives(result: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not result.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(result.sum(), leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if d is None else d for leaf, d in zip(leaves, found, strict=True)]
