"""Predictions as one function of tensors that is compiled: what the rules do by hundreds of operations in few kernels.

The operations of a prediction, forward and backward, do not depend on values. They are listed once, by tracing, with
the parameters among the arguments, and compiled by TorchInductor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ..engine.plan import Plan
from ..errors import VarpropError
from .prediction import Prediction, each_tensor

MOST = 16  # functions of a program: batches, outputs and dtypes that take turns


class CompiledPredictions:
    """The compiled predictions of a program, by plan and by the shapes of what they read.

    A copy of it, and one from a pickle, is empty.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.functions: dict[Any, tuple[Plan, CompiledPrediction]] = {}  # the plan is held, so that its id stays

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledPredictions, ()

    def run(self, plan: Plan, tensors: Sequence[Tensor], work: Callable[..., Prediction]) -> Prediction:
        """A prediction; the first one for tensors of some shapes compiles it.

        Args:
            plan: Which values are random.
            tensors: Everything it is computed from, parameters included.
            work: Computes it from these.
        """
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        key = id(plan), *((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        with self.lock:
            if key not in self.functions:
                for old in list(self.functions)[: 1 - MOST]:
                    del self.functions[old]
                self.functions[key] = plan, CompiledPrediction(work, tensors)
            function = self.functions[key][1]
        return function(tensors)


class CompiledPrediction:
    """A prediction that was compiled; `work` computes it from tensors alone, of these shapes."""

    def __init__(self, work: Callable[..., Prediction], tensors: Sequence[Tensor]) -> None:
        def flat(*values: Tensor) -> list[Tensor]:
            results: list[Tensor] = []

            def kept(value: Tensor) -> Tensor:
                results.append(value)
                return torch.empty(0)

            self.shell = each_tensor(work(*values), kept)
            return results

        try:
            work(*tensors)  # what is found once, such as where the samples are, is known from here on
            with torch.backends.cudnn.flags(enabled=False):  # whose recurrent layers lay out their weights anew
                graph = make_fx(flat)(*tensors)
            graph.graph.eliminate_dead_code()
            _require_no_other(graph, tensors)
            with torch.no_grad():
                self.function = torch._inductor.compile(graph, list(tensors))
        except Exception as error:  # whatever a rule, a module of the user's or a compiler stumbles over
            reason = str(error).strip().partition("\n")[0]
            raise VarpropError(f"This prediction cannot be compiled; leave out compile=True: {reason}") from error

    def __call__(self, tensors: Sequence[Tensor]) -> Prediction:
        """The prediction for other values."""
        with torch.no_grad():
            results = iter(self.function(*tensors))
        return each_tensor(self.shell, lambda _: next(results))


def _require_no_other(graph: torch.fx.GraphModule, tensors: Sequence[Tensor]) -> None:
    """Refuse a function that holds values of the model, which would not follow the model as it changes."""
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    parameters = [value for value in vars(graph).values() if isinstance(value, Tensor)]
    if list(graph.parameters()) or any(value.untyped_storage().data_ptr() in given for value in parameters):
        raise VarpropError("a module reads its parameters by itself.")
